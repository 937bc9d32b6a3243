"""The fused path with one Triton kernel per chunk of logits between the matrix products.

A chunk's logits are read twice and written once, and no second [C, V] buffer is ever needed: bias, scale, soft-cap and
temperature happen in registers. What the kernel can't do is refused by name; ``fused`` does all of it.

Dimension letters: N tokens, C tokens of the chunk, V columns, D hidden size.
"""

import importlib.util
import os

import torch
from torch import Tensor

from alambique.core.errors import UserError
from alambique.core.signal import TopKSignal
from alambique.losses import chunked
from alambique.losses.config import LossConfig
from alambique.losses.divergence import DIVERGENCES
from alambique.losses.fused import run_fused
from alambique.losses.objective import Rows
from alambique.losses.project import Gradients, Head
from alambique.losses.targets import TAIL_FLOOR
from alambique.losses.task import Inputs, Task, blocks


def run(inputs: Inputs, task: Task) -> tuple[Tensor, Tensor]:
    """Return the differentiable loss and the weighted sums of ``Rows``."""
    reason = cannot(task, inputs.hidden_ND.device)
    if reason is not None:
        raise UserError(f"loss: impl triton can't do this: {reason}; choose impl: fused.")
    return run_fused(inputs, task, _sweep)


def cannot(task: Task, device: torch.device) -> str | None:
    """Why the kernel can't serve this task on this device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return "its kernels need a GPU (TRITON_INTERPRET=1 runs them on a CPU, slowly)"
    if not isinstance(task.signal, TopKSignal):
        return "it reads top-K signals, and this one is dense"
    from alambique.kernels import topk_rows

    if task.config.divergence not in topk_rows.DIVERGENCES:
        return f"its kernel has no divergence {task.config.divergence}"
    return None


def chunk_tokens(config: LossConfig, columns: int) -> int:
    """As ``chunked.chunk_tokens``, for a path that needs one buffer whatever the options."""
    return chunked.chunk_tokens(LossConfig(chunk_budget_mib=config.chunk_budget_mib), columns)


def _sweep(inputs: Inputs, task: Task, gradients: Gradients | None) -> Tensor:
    """As ``chunked.sweep``."""
    hidden_ND, weight_VD, bias_V = inputs
    head = Head(weight_VD, None, operand_dtype=hidden_ND.dtype, vocab_size=task.vocab_size, softcap=None, scale=1.0)
    size = min(chunk_tokens(task.config, head.columns), max(1, hidden_ND.shape[0]))
    z_CV = task.scale_N.new_empty(size, head.columns)
    bias_V = bias_V[: head.columns].to(z_CV.dtype) if bias_V is not None else None
    totals = task.scale_N.new_zeros(5)
    for rows in blocks(hidden_ND.shape[0], size):
        chunk_CV = z_CV[: rows.stop - rows.start]
        head.logits(hidden_ND[rows], chunk_CV)
        rows_5C, dz_CV = _evaluate(chunk_CV, bias_V, task, rows, hidden_ND.dtype, gradients is not None)
        totals += Rows(*rows_5C).totals(task.scale_N[rows])
        if gradients is not None:
            gradients.add(head, hidden_ND[rows], dz_CV, rows.start)
    return totals


def _evaluate(
    z_CV: Tensor, bias_V: Tensor | None, task: Task, rows: slice, grad_dtype: torch.dtype, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    from alambique.kernels.topk_rows import constants, topk_rows

    config, kept = task.config, task.kept(rows)
    tail_floor = TAIL_FLOOR if DIVERGENCES[config.divergence].infinite_without_teacher else None
    objective = constants(config, tail_floor)
    grad_scale_C = task.scale_N[rows] * config.logit_scale if with_gradient else None
    classes = (kept.ids_CK, kept.log_p_CK, kept.log_r_C, task.labels(rows))
    with torch.cuda.device_of(z_CV):  # type: ignore[no-untyped-call]
        return topk_rows(z_CV, bias_V, *classes, grad_scale_C, grad_dtype, task.vocab_size, objective)
