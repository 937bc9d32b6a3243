"""How far the student is from its teacher on text that neither was trained on here: KL, agreement, perplexity.

All figures are over the whole vocabulary. No tensor of [rows, S, V] is ever made: hidden states are projected a few
hundred tokens at a time, in float32, and summed up in float64.

Dimensions: R rows, B rows in a batch, S positions, N target tokens of a batch, C tokens of a chunk, D hidden size,
V shared vocabulary.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from alambique.core.errors import UserError
from alambique.core.params import Config
from alambique.core.products import bfloat16_operands
from alambique.core.progress import Progress
from alambique.data.dataset import PackedRows

_BINS = 15  # of confidence, for the calibration error: Guo et al., ICML 2017
_SUMS = ("nll", "agreement", "kl")


class HeldoutConfig(Config):
    """``evaluate.heldout``."""

    rows: int | None = Field(None, ge=1)  # first rows of the valid split; None = all
    batch_rows: int = Field(4, ge=1)  # assumption: 4 rows of 256 keep two cores busy; small for long rows on a GPU
    chunk_tokens: int = Field(128, ge=1)  # measured: at V = 49k 25 MB, which malloc keeps; 64 and 256 are slower


class Scorer(Protocol):
    """What this module needs of a model: ``models.load.SplitModel`` is one."""

    head_weight_VD: torch.nn.Parameter
    head_bias_V: Tensor | None
    logit_softcap: float | None
    logit_scale: float

    def hidden(self, input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, S, D]."""
        ...


class Sharing(Protocol):
    """Processes that share the batches between them: ``train.sharded.Processes`` is one."""

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        ...

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    def sum_(self, tensor: Tensor) -> None:
        """Add up a tensor over the processes, in place."""
        ...


@dataclass
class _Head:
    """An output head in float32, without padded rows; ``exact`` says that its weights are bfloat16 values."""

    weight_VD: Tensor
    bias_V: Tensor | None
    softcap: float | None
    scale: float
    exact: bool

    @classmethod
    def of(cls, model: Scorer, vocab_size: int) -> "_Head":
        rows = model.head_weight_VD.shape[0]
        if rows < vocab_size:
            raise UserError(f"The output head has {rows:,} rows, but the prepared data {vocab_size:,} token ids.")
        bias_V = None if model.head_bias_V is None else model.head_bias_V.detach()[:vocab_size].float()
        weight_VD = model.head_weight_VD.detach()[:vocab_size]
        exact = weight_VD.dtype == torch.bfloat16
        return cls(weight_VD.float(), bias_V, model.logit_softcap, model.logit_scale, exact)

    def logprobs(self, hidden_CD: Tensor) -> Tensor:
        """Natural logarithms of next-token probabilities, [C, V] float32."""
        with bfloat16_operands() if self.exact and hidden_CD.dtype == torch.bfloat16 else contextlib.nullcontext():
            logits_CV = torch.mm(hidden_CD.float(), self.weight_VD.t())
        if self.bias_V is not None:
            logits_CV += self.bias_V
        logits_CV *= self.scale
        if self.softcap is not None:
            logits_CV = torch.tanh(logits_CV / self.softcap) * self.softcap
        return F.log_softmax(logits_CV, dim=-1)


@dataclass
class _Sums:
    """Float64 sums over the target tokens of each row, by name, and the calibration bins of one model."""

    rows: dict[str, Tensor]
    bins: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))

    @classmethod
    def of(cls, num_rows: int) -> "_Sums":
        return cls({name: torch.zeros(num_rows, dtype=torch.float64) for name in _SUMS})

    def add(self, name: str, row_N: Tensor, value_N: Tensor) -> None:
        self.rows[name].index_add_(0, row_N, value_N.double().cpu())

    def add_calibration(self, confidence_N: Tensor, correct_N: Tensor) -> None:
        bin_N = (confidence_N.double().cpu() * _BINS).long().clamp_max(_BINS - 1)
        self.bins.index_add_(0, bin_N, confidence_N.double().cpu() - correct_N.double().cpu())


@torch.inference_mode()
def heldout(
    teacher: Scorer,
    students: Mapping[str, Scorer],
    rows: PackedRows,
    vocab_size: int,
    config: HeldoutConfig,
    device: torch.device,
    shown: bool = True,
    processes: Sharing | None = None,
) -> dict[str, Any]:
    """Compare students with their teacher on held-out rows; the teacher runs once per batch.

    Args:
        teacher: the teacher.
        students: students by name, such as ``before`` and ``after``.
        rows: packed rows; each document is read by itself.
        vocab_size: V, token ids that both share; further rows of a head are padding and get no probability.
        config: how much, and in what portions.
        device: where the models are.
        shown: whether progress is told; False inside a job that tells its own.
        processes: those that call this together, each to read its share of the rows; all get the figures of all rows.

    Returns:
        ``kl_nats`` (KL(teacher ‖ student), mean per target token), ``agreement`` (same most probable token),
        ``perplexity`` and ``calibration_error`` (of ``teacher`` too), each {name: value}; ``stderr`` with standard
        errors over rows in the same shape; ``num_tokens`` and ``num_rows``.
    """
    count = min(config.rows or rows.num_rows, rows.num_rows)
    if not int(rows.loss_mask_RS[:count].sum()):
        raise UserError("The valid split holds no target token: raise `prepare.valid_rows`.")
    models = {"teacher": teacher, **students}
    heads = {name: _Head.of(model, vocab_size) for name, model in models.items()}
    sums = {name: _Sums.of(count) for name in models}
    telling = Progress("held-out", int(rows.loss_mask_RS[:count].sum())) if shown else contextlib.nullcontext()
    with telling as progress:
        for batch, counts in shares(count, config.batch_rows, processes):
            ids_BS, documents_BS, mask_BS = (
                tensor[batch].to(device) for tensor in (rows.input_ids_RS, rows.document_ids_RS, rows.loss_mask_RS)
            )
            mask_BS = mask_BS & counts
            hidden_ND = {name: model.hidden(ids_BS.long(), documents_BS)[mask_BS] for name, model in models.items()}
            # Position i predicts i + 1; the last position of a row is never a target.
            label_N = ids_BS.long().roll(-1, dims=1)[mask_BS]
            row_N = batch.start + mask_BS.nonzero()[:, 0].cpu()
            for first in range(0, len(label_N), config.chunk_tokens):
                part = slice(first, first + config.chunk_tokens)
                _score({n: heads[n].logprobs(h[part]) for n, h in hidden_ND.items()}, label_N[part], row_N[part], sums)
            if progress is not None:
                progress.update(len(label_N))
    if processes is not None:
        for found in sums.values():
            for total in (*found.rows.values(), found.bins):
                processes.sum_(total)
    return _summary(sums, rows.loss_mask_RS[:count].sum(dim=1).double())


def shares(count: int, batch_rows: int, processes: Sharing | None) -> list[tuple[slice, bool]]:
    """The batches of this process, and whether they count: all run equally many, because all must run together."""
    rank, size = (processes.rank, processes.size) if processes else (0, 1)
    starts = range(0, count, batch_rows)
    numbers = range(rank, -(-len(starts) // size) * size, size)
    firsts = [(starts[number % len(starts)], number < len(starts)) for number in numbers]
    return [(slice(first, min(first + batch_rows, count)), counts) for first, counts in firsts]


def _score(logprobs_CV: dict[str, Tensor], label_C: Tensor, row_C: Tensor, sums: dict[str, _Sums]) -> None:
    """Add one chunk of tokens to the sums of every model."""
    teacher_CV = logprobs_CV["teacher"]
    teacher_p_CV, teacher_top_C = teacher_CV.exp(), teacher_CV.argmax(dim=-1)
    neg_entropy_C = torch.linalg.vecdot(teacher_p_CV, teacher_CV)
    for name, model_CV in logprobs_CV.items():
        confidence_C, top_C = model_CV.max(dim=-1)
        sums[name].add("nll", row_C, -model_CV.gather(1, label_C[:, None])[:, 0])
        sums[name].add_calibration(confidence_C.exp(), top_C == label_C)
        if name != "teacher":
            sums[name].add("agreement", row_C, top_C == teacher_top_C)
            # Dot products, because building the terms of the sum is another pass over [C, V] for every student.
            sums[name].add("kl", row_C, neg_entropy_C - torch.linalg.vecdot(teacher_p_CV, model_CV))


def _summary(sums: dict[str, _Sums], tokens_R: Tensor) -> dict[str, Any]:
    total = float(tokens_R.sum())
    figures: dict[str, Any] = {name: {} for name in ("kl_nats", "agreement", "perplexity", "calibration_error")}
    stderr: dict[str, Any] = {name: {} for name in ("kl_nats", "agreement", "perplexity")}
    for name, model in sums.items():
        nll, nll_stderr = _ratio(model.rows["nll"], tokens_R)
        figures["perplexity"][name] = math.exp(nll)
        stderr["perplexity"][name] = None if nll_stderr is None else math.exp(nll) * nll_stderr
        figures["calibration_error"][name] = float(model.bins.abs().sum()) / total
        if name != "teacher":
            for key, figure in (("kl", "kl_nats"), ("agreement", "agreement")):
                figures[figure][name], stderr[figure][name] = _ratio(model.rows[key], tokens_R)
    return {**figures, "stderr": stderr, "num_tokens": int(total), "num_rows": len(tokens_R)}


def _ratio(sum_R: Tensor, tokens_R: Tensor) -> tuple[float, float | None]:
    """Mean per token, and its standard error over rows: tokens of one document are not independent, rows nearly are.

    The linearised error of a ratio of sums (Cochran, Sampling Techniques, 1977, §6.3); None for a single row.
    """
    total, rows = float(tokens_R.sum()), len(tokens_R)
    mean = float(sum_R.sum()) / total
    if rows < 2:
        return mean, None
    residual_R = sum_R - mean * tokens_R
    return mean, math.sqrt(rows / (rows - 1) * float(residual_R.square().sum())) / total
