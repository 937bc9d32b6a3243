"""One call of the loss, checked and reduced to the rows that count.

Dimension letters: N tokens (after dropping), K kept entries, V vocabulary, D hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alambique.core.errors import UserError
from alambique.core.signal import DenseSignal, Signal, StatesSignal, TopKSignal
from alambique.losses import parallel
from alambique.losses.config import LossConfig
from alambique.losses.divergence import DIVERGENCES
from alambique.losses.parallel import Shard
from alambique.losses.targets import Kept, kept_entries

IGNORED_LABEL = -100  # source: torch's cross_entropy


class Inputs(NamedTuple):
    """What gradients can be had of."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None


@dataclass(frozen=True)
class Task:
    """Everything but the differentiable inputs."""

    signal: Signal  # the teacher, for the N rows
    labels_N: Tensor | None  # int64
    scale_N: Tensor  # weight / denominator of each row, in the compute dtype
    vocab_size: int  # columns of the head from here on are padding
    config: LossConfig
    weight_grad_VD: Tensor | None = None  # where the head's gradient is added, instead of being handed to autograd
    shard: Shard | None = None  # which block of the head this process has, None for all of it

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 for float64 inputs, otherwise float32."""
        return self.scale_N.dtype

    def labels(self, rows: slice) -> Tensor | None:
        """Those of some rows."""
        return self.labels_N[rows] if self.labels_N is not None else None

    def kept(self, rows: slice) -> Kept:
        """The teacher's classes of some rows, at temperature 1; the signal is a top-K one."""
        signal = self.signal[rows]
        assert isinstance(signal, TopKSignal)
        return kept_entries(signal, self.labels(rows), self.config.tail, self.vocab_size, self.compute_dtype)

    def local_vocab(self, weight_VD: Tensor) -> int:
        """Rows of this process's head (or block of it) that are no padding."""
        start = self.shard.start if self.shard is not None else 0
        return min(max(self.vocab_size - start, 0), weight_VD.shape[0])

    def loss(self, totals: Tensor) -> Tensor:
        """The loss, from the weighted sums of ``Rows``; the diagnostics among them weigh nothing."""
        config, (kd, ce, square) = self.config, totals[:3].unbind()
        return config.kd_weight * config.temperature**2 * kd + config.ce_weight * ce + config.z_loss * square


def blocks(total: int, size: int) -> Iterator[slice]:
    """Ranges of at most ``size`` rows, in order."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """float64 for float64 inputs, otherwise float32: softmax and sums are never taken in less."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def build(
    hidden_ND: Tensor,
    head_weight_VD: Tensor,
    signal: Signal,
    labels_N: Tensor | None,
    weights_N: Tensor | None,
    vocab_size: int | None,
    denominator: Tensor | float | None,
    config: LossConfig,
    weight_grad_VD: Tensor | None,
    vocab_group: Any = None,
    drop_rows: bool = True,
) -> tuple[Tensor, Task]:
    """Check shapes and options, drop rows without weight, and return the hidden states left with their task.

    Nothing but the number of rows dropped is waited for on a GPU: numbers go there as arguments of kernels, since a
    tensor that is made of them is a copy, for which the host waits.

    Raises:
        UserError: an option that can't be had with these inputs.
        ValueError: shapes or dtypes that don't fit together.
    """
    shard = parallel.shard_of(vocab_group, head_weight_VD.shape[0]) if vocab_group is not None else None
    rows = head_weight_VD.shape[0] * (shard.size if shard is not None else 1)
    vocab_size = vocab_size or rows
    if not 0 < vocab_size <= rows:
        raise ValueError(f"vocab_size {vocab_size} is not within the head's {rows} rows")
    _check_shapes(hidden_ND, head_weight_VD, signal, labels_N, weights_N, vocab_size, weight_grad_VD)
    _check_options(signal, labels_N, config, shard)
    dtype = compute_dtype(hidden_ND)
    weight_N = torch.ones(hidden_ND.shape[0], dtype=dtype, device=hidden_ND.device)
    if weights_N is not None:
        weight_N = weights_N.detach().to(weight_N)
    if labels_N is not None:
        weight_N = weight_N.masked_fill(labels_N == IGNORED_LABEL, 0.0)
    if denominator is None:
        total = weight_N.sum()
    else:
        total = denominator.to(weight_N) if isinstance(denominator, Tensor) else weight_N.new_full((), denominator)
    scale_N = weight_N / total.masked_fill(total == 0, 1.0)  # nothing to learn from: 0, not NaN
    if drop_rows and (labels_N is not None or weights_N is not None):
        kept = weight_N.nonzero().squeeze(-1)  # a GPU is waited for; the products saved are worth far more
        if kept.numel() < hidden_ND.shape[0]:
            hidden_ND, scale_N, signal = hidden_ND.index_select(0, kept), scale_N[kept], signal[kept]
            labels_N = labels_N[kept] if labels_N is not None else None
    if labels_N is not None:
        labels_N = labels_N.long().masked_fill(labels_N == IGNORED_LABEL, 0)  # of rows that stayed, at weight 0
    _check_ids(signal, labels_N, vocab_size)
    return hidden_ND, Task(signal, labels_N, scale_N, vocab_size, config, weight_grad_VD, shard)


def insist(holds: Tensor, message: str) -> None:
    """Refuse values: with a ValueError, or on a GPU by an assertion there, for which nobody waits."""
    if holds.device.type in ("cuda", "meta"):
        torch._assert_async(holds, message)
    elif not holds:
        raise ValueError(message)


def _check_ids(signal: Signal, labels_N: Tensor | None, vocab_size: int) -> None:
    checked = {"labels_N": labels_N} if labels_N is not None else {}
    if isinstance(signal, TopKSignal):
        checked["signal.ids_NK"] = signal.ids_NK.long().masked_fill(signal.logprobs_NK == -torch.inf, 0)
    for name, ids in checked.items():
        insist(((ids >= 0) & (ids < vocab_size)).all(), f"{name} has ids outside the vocabulary of {vocab_size}")


def _check_shapes(
    hidden_ND: Tensor,
    head_weight_VD: Tensor,
    signal: Signal,
    labels_N: Tensor | None,
    weights_N: Tensor | None,
    vocab_size: int,
    weight_grad_VD: Tensor | None,
) -> None:
    if hidden_ND.dim() != 2 or head_weight_VD.dim() != 2 or hidden_ND.shape[1] != head_weight_VD.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_ND.shape)} and head {tuple(head_weight_VD.shape)} are not [N, D] and [V, D]"
        )
    tokens = hidden_ND.shape[0]
    for name, tensor in (("labels", labels_N), ("weights", weights_N)):
        if tensor is not None and tensor.shape != (tokens,):
            raise ValueError(f"{name} {tuple(tensor.shape)} is not [N] with N = {tokens}")
    if signal.num_tokens != tokens:
        raise ValueError(f"the signal has {signal.num_tokens} tokens, the hidden states {tokens}")
    if isinstance(signal, DenseSignal) and signal.logprobs_NV.shape[1] < vocab_size:
        raise ValueError(f"the dense signal has {signal.logprobs_NV.shape[1]} columns, fewer than {vocab_size}")
    if isinstance(signal, StatesSignal) and signal.head_weight_VD.shape[0] < vocab_size:
        raise ValueError(f"the teacher's head has {signal.head_weight_VD.shape[0]} rows, fewer than {vocab_size}")
    if weight_grad_VD is not None and weight_grad_VD.shape != head_weight_VD.shape:
        raise ValueError(f"weight_grad {tuple(weight_grad_VD.shape)} is not of the head's shape")


def _check_options(signal: Signal, labels_N: Tensor | None, config: LossConfig, shard: Shard | None) -> None:
    if labels_N is None and config.ce_weight > 0:
        raise UserError("loss: ce_weight > 0 needs labels: pass labels_N, or set ce_weight: 0.")
    if not isinstance(signal, TopKSignal):
        if shard is not None:
            raise UserError("loss: vocab_group can't be used with a dense signal: pass a top-K signal or a whole head.")
        return
    if config.tail != "bucket" and DIVERGENCES[config.divergence].infinite_without_teacher:
        raise UserError(
            f"loss: divergence: {config.divergence} is infinite with tail: {config.tail}, which leaves the teacher no "
            "mass outside the kept entries: choose tail: bucket."
        )
    if labels_N is None and config.tail == "residual_to_label":
        raise UserError("loss: tail: residual_to_label needs labels: pass labels_N, or choose tail: bucket.")
