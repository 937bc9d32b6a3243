"""How the student does on held-out rows while it trains: the teacher reads them once, its hidden states are kept.

Dimensions: B rows of a batch, S positions, D hidden size, V rows of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alambique.data.dataset import PackedRows
from alambique.heldout import HeldoutConfig, Sharing, heldout, shares
from alambique.models.load import SplitModel
from alambique.train.config import DistillConfig

FIGURES = ("kl_nats", "agreement", "perplexity", "calibration_error")  # of what heldout returns
Validate = Callable[[SplitModel], dict[str, float]]


@dataclass
class _View:
    """A model as ``heldout`` wants it, with another way to its hidden states."""

    head_weight_VD: nn.Parameter
    head_bias_V: Tensor | None
    logit_softcap: float | None
    logit_scale: float
    hidden: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def of(cls, model: SplitModel, hidden: Callable[[Tensor, Tensor], Tensor]) -> "_View":
        return cls(model.head_weight_VD, model.head_bias_V, model.logit_softcap, model.logit_scale, hidden)


def validator(
    teacher: SplitModel,
    rows: PackedRows,
    vocab_size: int,
    config: DistillConfig,
    device: torch.device,
    processes: Sharing | None = None,
) -> Validate:
    """Let the teacher read ``rows`` now; returns a function that compares a student with it, as often as one likes.

    That function gives ``kl_nats`` (KL(teacher ‖ student) over the whole vocabulary), ``agreement``, ``perplexity`` and
    ``calibration_error``, of the student in the precision that it trains in. Of the teacher it holds the head, and on
    the CPU the hidden states, [rows, S, D] in the teacher's dtype: the rest of it may go. Several ``processes`` share
    the rows, and must call it together.
    """
    settings = HeldoutConfig.model_validate({"batch_rows": config.micro_batch_rows})
    states: dict[bytes, Tensor] = {}
    for batch, _ in shares(rows.num_rows, settings.batch_rows, processes):
        ids_BS, documents_BS = rows.input_ids_RS[batch].long(), rows.document_ids_RS[batch]
        with torch.inference_mode():
            states[_key(ids_BS, documents_BS)] = teacher.hidden(ids_BS.to(device), documents_BS.to(device)).cpu()
    recorded = _View.of(teacher, lambda ids_BS, documents_BS: states[_key(ids_BS, documents_BS)].to(device))

    def validate(student: SplitModel) -> dict[str, float]:
        def hidden(input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                return student.hidden(input_ids_BS, document_ids_BS)

        student.model.eval()  # the trainer turns it back
        views = {"student": _View.of(student, hidden)}
        found = heldout(recorded, views, rows, vocab_size, settings, device, shown=False, processes=processes)
        return {name: float(found[name]["student"]) for name in FIGURES}

    return validate


def _key(input_ids_BS: Tensor, document_ids_BS: Tensor) -> bytes:
    return torch.stack([input_ids_BS.int(), document_ids_BS.int()]).cpu().numpy().tobytes()
