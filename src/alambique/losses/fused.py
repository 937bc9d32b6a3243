"""Chunked paths: the head is applied to a chunk of tokens at a time, in buffers that are used again.

``fused`` forms the gradient in the forward pass (three matrix products) and keeps nothing else.

Dimension letters: N tokens, C tokens of a chunk, V columns, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alambique.core.signal import TopKSignal
from alambique.losses.config import LossConfig
from alambique.losses.objective import Rows, dense_rows, needs_scratch, sparse_rows
from alambique.losses.project import Gradients, Head, padded_columns
from alambique.losses.task import Task

_DENSE_BUFFERS = 8  # [C, V] arrays alive at once in dense_rows: logits, log p, log q, q, slope and temporaries


def run_fused(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task) -> tuple[Tensor, Tensor]:
    """Return the differentiable loss and the weighted sums of ``Rows``."""
    grad_enabled = torch.is_grad_enabled()  # off inside forward, whatever it was outside
    loss, totals = _GradientInForward.apply(hidden_ND, weight_VD, bias_V, task, grad_enabled)  # type: ignore[no-untyped-call]
    return loss, totals


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task, grad_enabled: bool
    ) -> tuple[Tensor, Tensor]:
        wanted = [grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        gradients = new_gradients(hidden_ND, weight_VD, bias_V, wanted, task) if any(wanted) else None
        totals = sweep(hidden_ND, weight_VD, bias_V, task, gradients)
        if gradients is not None:
            ctx.gradients = finished(gradients, weight_VD, bias_V, task)
        ctx.mark_non_differentiable(totals)
        return task.coefficients() @ totals, totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError("impl fused holds its gradient for one backward pass: use impl recompute to repeat it")
        ctx.gradients = None
        if grad_loss.is_cuda or grad_loss != 1:  # comparing on a GPU would wait for it
            gradients = [None if grad is None else grad.mul_(grad_loss) for grad in gradients]
        return (*gradients, None, None)


def new_gradients(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, wanted: list[bool], task: Task
) -> Gradients:
    """Buffers for the gradients wanted of (hidden, weight, bias)."""
    weight_grad_VD = None
    if wanted[1] and task.weight_grad_VD is not None:
        weight_grad_VD = task.weight_grad_VD
    elif wanted[1]:
        low = hidden_ND.dtype if task.config.weight_grad == "compact" else task.compute_dtype
        weight_grad_VD = torch.empty_like(weight_VD, dtype=low)
        weight_grad_VD[padded_columns(task.vocab_size, weight_VD.shape[0]) :].zero_()
        if hidden_ND.shape[0] == 0:
            weight_grad_VD.zero_()
    return Gradients(
        torch.empty_like(hidden_ND) if wanted[0] else None,
        weight_grad_VD,
        torch.zeros_like(bias_V, dtype=task.compute_dtype) if wanted[2] and bias_V is not None else None,
        fresh=task.weight_grad_VD is None,
    )


def finished(
    gradients: Gradients, weight_VD: Tensor, bias_V: Tensor | None, task: Task
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients in their inputs' dtypes; what went into the caller's buffer is not handed out again."""
    weight = gradients.weight_VD.to(weight_VD.dtype) if gradients.weight_VD is not None else None
    bias = gradients.bias_V.to(bias_V.dtype) if gradients.bias_V is not None and bias_V is not None else None
    return gradients.hidden_ND, None if task.weight_grad_VD is not None else weight, bias


def chunk_tokens(config: LossConfig, columns: int, sparse: bool) -> int:
    """Tokens per chunk that fit ``chunk_budget_mib``: depends on the vocabulary and the options, not on the input."""
    buffers = 1 + needs_scratch(config) + (config.logit_softcap is not None) if sparse else _DENSE_BUFFERS
    tokens = (config.chunk_budget_mib << 20) // (4 * columns * buffers)
    return tokens // 128 * 128 if tokens >= 128 else max(1, tokens)  # multiples of 128 fill a GEMM's tiles


def sweep(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task, gradients: Gradients | None
) -> Tensor:
    """Go over the tokens chunk by chunk; return the weighted sums of ``Rows`` and fill ``gradients`` if given."""
    config, dtype, device = task.config, task.compute_dtype, hidden_ND.device
    head = Head(weight_VD, bias_V, hidden_ND.dtype, task)
    sparse = isinstance(task.signal, TopKSignal)
    size = min(chunk_tokens(config, head.columns, sparse), max(1, hidden_ND.shape[0]))
    z_CV = torch.empty(size, head.columns, dtype=dtype, device=device)
    scratch_CV = torch.empty_like(z_CV) if sparse and needs_scratch(config) else None
    tanh_CV = torch.empty_like(z_CV) if config.logit_softcap is not None else None
    totals = torch.zeros(5, dtype=dtype, device=device)
    for start in range(0, hidden_ND.shape[0], size):
        rows = slice(start, min(start + size, hidden_ND.shape[0]))
        count = rows.stop - start
        z, scratch, tanh = (None if buffer is None else buffer[:count] for buffer in (z_CV, scratch_CV, tanh_CV))
        assert z is not None
        head.logits(hidden_ND[rows], z, tanh)
        grad_scale_C = task.scale_N[rows] * config.logit_scale if gradients is not None else None
        totals += chunk_rows(z, scratch, task, rows, grad_scale_C, head).totals(task.scale_N[rows])
        if gradients is not None:
            head.pull_back(z, tanh)
            gradients.add(head, hidden_ND[rows], z, start)
    return totals


def chunk_rows(
    z_CV: Tensor, scratch_CV: Tensor | None, task: Task, rows: slice, grad_scale_C: Tensor | None, head: Head
) -> Rows:
    """Evaluate the objective for ``rows``, whose logits are in ``z_CV``; they become their gradient."""
    labels_C = task.labels_N[rows] if task.labels_N is not None else None
    signal = task.signal[rows]
    if isinstance(signal, TopKSignal):
        return sparse_rows(z_CV, scratch_CV, signal, labels_C, grad_scale_C, task.config, task.vocab_size)
    log_p_CV = z_CV.new_full(z_CV.shape, -torch.inf)
    real_CV = signal.logprobs_NV[:, : task.vocab_size].to(z_CV.dtype) / task.config.temperature
    log_p_CV[:, : task.vocab_size] = torch.log_softmax(real_CV, 1)
    return dense_rows(z_CV, log_p_CV, labels_C, grad_scale_C, task.config)
