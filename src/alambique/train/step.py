"""The gradients of one optimiser step: however it is cut into micro-batches, the same sum over the same tokens.

Dimensions: B rows of a micro-batch, S positions, N positions that predict something, D hidden size.
"""

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from alambique.core.errors import UserError
from alambique.losses.config import LossConfig
from alambique.losses.distillation import distillation_loss
from alambique.models.load import SplitModel
from alambique.train.config import DistillConfig
from alambique.train.data import MicroBatch, StepRows
from alambique.train.flops import FlopCounter
from alambique.train.state import Run


@dataclass(frozen=True)
class Setup:
    """What every step of a run needs and none changes. ``loss`` knows the student's softcap and logit scale."""

    student: SplitModel
    config: DistillConfig
    loss: LossConfig
    vocab_size: int
    device: torch.device
    stop: Callable[[], bool]


def add_gradients(setup: Setup, run: Run, batch: StepRows) -> Tensor | None:
    """Leave the step's gradients in ``.grad``; returns its loss, kd and ce, in nats, on the device.

    Losses are divided by the target tokens of the whole step. When memory runs out the step starts again with
    micro-batches of half the rows, which ``run`` remembers. None means that the run was asked to stop: the
    gradients are dropped, the model is as it was before.

    Raises:
        UserError: one row alone doesn't fit in memory.
    """
    while True:
        _seed(setup.config.seed, run.step)
        with contextlib.suppress(torch.OutOfMemoryError):
            losses = _accumulate(setup, run, batch)
            if losses is None:
                setup.student.model.zero_grad(set_to_none=True)
            return losses
        # Outside the handler: its traceback would keep the failed pass's tensors alive.
        setup.student.model.zero_grad(set_to_none=True)
        _halve(setup, run)


def _seed(seed: int, step: int) -> None:
    """Make random numbers (dropout) a function of seed and step, so that no interruption or retry shifts them."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:7], "big"))


def _halve(setup: Setup, run: Run) -> None:
    if run.micro_batch_rows == 1:
        raise UserError(
            f"one row of this data doesn't fit in the memory of {setup.device} beside the model: "
            "set distill.gradient_checkpointing, prepare shorter rows (prepare.seq_len), or use a larger device."
        )
    run.micro_batch_rows = (run.micro_batch_rows + 1) // 2
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
    print(f"out of memory: going on with micro-batches of {run.micro_batch_rows} rows", file=sys.stderr)


def _accumulate(setup: Setup, run: Run, batch: StepRows) -> Tensor | None:
    """One backward pass for each micro-batch; autocast spans them all, so that each weight is cast once a step."""
    losses = torch.zeros(3, device=setup.device)
    with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.config.precision == "bf16"):
        for micro in batch.micro_batches(run.micro_batch_rows, setup.device):
            if setup.stop():
                return None
            with _counted_flops(run, micro.num_rows):
                losses += _micro_step(setup, run, micro, max(1, batch.num_target_tokens))
    return losses


def _micro_step(setup: Setup, run: Run, micro: MicroBatch, denominator: int) -> Tensor:
    """Forward, loss and backward of one micro-batch; returns its share of the step's loss, kd and ce."""
    if len(micro.labels_N) == 0:
        return torch.zeros(3, device=setup.device)
    student = setup.student
    hidden_BSD = student.hidden(micro.input_ids_BS, micro.document_ids_BS)
    hidden_ND = micro.select(hidden_BSD)
    if setup.config.precision == "bf16":
        hidden_ND = hidden_ND.to(torch.bfloat16)  # what autocast would feed the head's product
    with torch.autocast(setup.device.type, enabled=False):
        output = distillation_loss(
            hidden_ND,
            student.head_weight_VD,
            micro.signal,
            labels_N=micro.labels_N,
            head_bias_V=student.head_bias_V,
            vocab_size=setup.vocab_size,
            denominator=denominator,
            config=setup.loss,
            impl=setup.config.impl,
            weight_grad_VD=_head_gradient(student, setup.config.impl),
        )
        torch.autograd.backward(output.loss)
    run.meters.loss_impl = output.impl
    assert output.ce is not None  # labels were given
    return torch.stack([output.loss.detach(), output.kd, output.ce])


def _head_gradient(student: SplitModel, impl: str) -> Tensor | None:
    """The head's ``.grad``, for the loss to add to: one [V, D] array less than if autograd did it.

    Autograd still adds the embeddings' part of a tied weight. None where there is nothing to add, or no way.
    """
    weight_VD = student.head_weight_VD
    if impl == "dense" or not weight_VD.requires_grad:
        return None
    if weight_VD.grad is None:
        weight_VD.grad = torch.zeros_like(weight_VD)
    return weight_VD.grad


@contextlib.contextmanager
def _counted_flops(run: Run, num_rows: int) -> Iterator[None]:
    """Count what happens inside, once in a run."""
    if run.meters.flops_per_row:
        yield
        return
    with FlopCounter() as counter:
        yield
    run.meters.flops_per_row = counter.flops / num_rows
