"""The loss: student hidden states and head against a teacher's signal, by the path of one's choice.

Dimension letters: N tokens, D hidden size, V rows of the head, K kept entries.
"""

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alambique.core.errors import UserError, did_you_mean
from alambique.core.signal import Signal, TopKSignal
from alambique.losses import chunked, dense, forward_chunked, fused, kernelled, parallel, tiled
from alambique.losses.config import LossConfig
from alambique.losses.task import Inputs, Task, build

_log = logging.getLogger(__name__)

# A path returns the differentiable loss and the weighted sums of ``Rows``.
Path = Callable[[Inputs, Task], tuple[Tensor, Tensor]]
PATHS: dict[str, Path] = {
    "dense": dense.run,
    "forward_chunked": forward_chunked.run,
    "recompute": fused.run_recompute,
    "fused": fused.run_fused,
    "triton": kernelled.run,
    "tiled": tiled.run,
}
SHARDED = ("fused", "recompute")  # paths for heads spread over processes
FILTERED = ("fused",)  # paths with the gradient filter
DEFAULT_CONFIG = LossConfig()
_FEWEST_TOKENS = 64  # assumption: below this many tokens per chunk, tiles reach more of a device's speed


@dataclass(frozen=True)
class LossOutput:
    """What ``distillation_loss`` returns. All but ``loss`` are detached weighted means over rows, in nats.

    Attributes:
        loss: scalar; kd_weight·T²·kd + ce_weight·ce + z_loss·(mean lse²).
        kd: the divergence, without T² and without its weight.
        ce: cross-entropy with the labels; None without labels.
        student_mass: the student's probability of the entries that the teacher kept (1 for a dense signal).
        entropy: of the student over the classes compared: the kept entries and the tail as one.
        impl: the path that ran, which tells what ``auto`` chose.
        filter_error: relative error of the logits' gradient, by norm, that the gradient filter made; None without one.
    """

    loss: Tensor
    kd: Tensor
    ce: Tensor | None
    student_mass: Tensor
    entropy: Tensor
    impl: str
    filter_error: Tensor | None = None


def distillation_loss(
    hidden_ND: Tensor,
    head_weight_VD: Tensor,
    signal: Signal,
    *,
    labels_N: Tensor | None = None,
    weights_N: Tensor | None = None,
    head_bias_V: Tensor | None = None,
    vocab_size: int | None = None,
    denominator: Tensor | float | None = None,
    config: LossConfig = DEFAULT_CONFIG,
    impl: str = "auto",
    weight_grad_VD: Tensor | None = None,
    vocab_group: Any = None,
    drop_rows: bool = True,
) -> LossOutput:
    """Distillation loss of a student whose logits are hidden_ND @ head_weight_VD.T, never all built at once.

    Args:
        hidden_ND: [N, D] after the final norm. Its dtype is that of the matrix products' operands.
        head_weight_VD: [V, D], of any float dtype: a float32 parameter beside bfloat16 hidden states is cast once and
            gets a float32 gradient, a sum that was never rounded, which is better than passing its bfloat16 cast. A
            DTensor, as FSDP2 makes it, is gathered once a call and its gradient averaged and scattered once.
        signal: the teacher, for N tokens, already shifted: row i is about the token that follows position i.
        labels_N: [N] ids of the next tokens; rows at -100 count nothing.
        weights_N: [N] weights of rows, 1 by default.
        head_bias_V: [V].
        vocab_size: rows of the head from here on are padding: their logits count as -inf.
        denominator: what the weighted sum is divided by, for accumulation over micro-batches or ranks; Σ weights by
            default. Prefer it to scaling the loss, which rounds low-precision gradients twice.
        config: the objective.
        impl: ``dense`` (the definition), ``forward_chunked``, ``recompute``, ``fused``, ``triton``, ``tiled``, or
            ``auto``, which logs its choice.
        weight_grad_VD: a buffer shaped like the head, such as its ``grad``, to which the head's gradient is added;
            autograd then gets none for the head. ``fused`` and ``triton`` add it during this call, and refuse the
            backward pass of a loss that was scaled afterwards; the others add it in that pass; ``dense`` refuses.
        vocab_group: a ``torch.distributed`` group whose processes each pass an equal block of the head's rows, in the
            order of their ranks, and the same tokens; ``head_bias_V`` and ``weight_grad_VD`` are of the block too. The
            loss and dH come out whole on each. Paths ``fused`` and ``recompute``.
        drop_rows: leave rows of label -100 or weight 0 out of every product. A GPU must be asked how many they are, so
            that each call waits for it once; False spares that where they are few or gone already. They then take
            part at weight 0, and must be finite.

    Raises:
        UserError: an unknown ``impl``, or an option that it or these inputs can't serve.
        ValueError: shapes that don't fit together.
    """
    if impl != "auto" and impl not in PATHS:
        raise UserError(f"loss: impl {impl} does not exist{did_you_mean(impl, [*PATHS, 'auto'])}")
    head_weight_VD = parallel.gathered(head_weight_VD)
    with _own_precision(hidden_ND.device.type):
        kept_ND, task = build(
            hidden_ND,
            head_weight_VD,
            signal,
            labels_N,
            weights_N,
            vocab_size,
            denominator,
            config,
            weight_grad_VD,
            vocab_group,
            drop_rows,
        )
        path = choose(kept_ND, head_weight_VD, task) if impl == "auto" else impl
        if task.shard is not None and path not in SHARDED:
            raise UserError(f"loss: impl {path} can't use a head that vocab_group spreads: choose impl fused.")
        if config.gradient_filter > 0 and path not in FILTERED:
            raise UserError(f"loss: impl {path} can't filter gradients: choose impl fused, or set gradient_filter: 0.")
        loss, totals = PATHS[path](Inputs(kept_ND, head_weight_VD, head_bias_V), task)
    kd, ce, _, mass, entropy = totals[:5].unbind()
    filter_error = (totals[5] / totals[6].clamp_min(torch.finfo(totals.dtype).tiny)).sqrt() if len(totals) > 5 else None
    return LossOutput(loss, kd, ce if labels_N is not None else None, mass, entropy, path, filter_error)


def _own_precision(device_type: str) -> AbstractContextManager[object]:
    """No autocast: precision is decided here, not by the caller's region. Meta tensors have none to switch off."""
    return torch.autocast(device_type, enabled=False) if torch.amp.is_autocast_available(device_type) else nullcontext()


def choose(hidden_ND: Tensor, head_weight_VD: Tensor, task: Task) -> str:
    """What ``auto`` picks for these inputs, logged once for each kind of input."""
    sparse = isinstance(task.signal, TopKSignal)
    tokens = chunked.chunk_tokens(task.config, head_weight_VD.shape[0], sparse)
    no_kernel = kernelled.cannot(task, hidden_ND.device) if hidden_ND.is_cuda else ""
    if task.shard is not None:
        path, why = "fused", "vocab_group spreads the head"
    elif task.config.gradient_filter > 0:
        path, why = "fused", "it alone has the gradient filter"
    elif sparse and tokens < _FEWEST_TOKENS:
        path, why = "tiled", f"chunk_budget_mib {task.config.chunk_budget_mib:g} holds only {tokens} tokens of logits"
    elif hidden_ND.dtype == torch.float16:
        path, why = "recompute", "float16 gradients need the loss's scale before they are rounded"
    elif no_kernel is None:
        path, why = "triton", "as fused, with one kernel per chunk between the matrix products"
        tokens = kernelled.chunk_tokens(task.config, head_weight_VD.shape[0])
    else:
        path, why = "fused", "three matrix products, the gradient is formed in the forward pass"
        why += f"; not triton: {no_kernel}" if no_kernel else ""
    shape = f"D {hidden_ND.shape[1]}, V {head_weight_VD.shape[0]}, {hidden_ND.dtype}, {hidden_ND.device.type}"
    _announce(f"loss: auto chose {path} for {shape}: {why}; chunks of {tokens} tokens")
    return path


@functools.cache
def _announce(message: str) -> None:
    _log.info(message)
