"""The published forward-chunked path: all of the student's logits are kept, the objective is taken chunk by chunk.

Three whole matrix products and 4·N·V bytes: logits in float32, which the backward pass turns into their gradient.

Dimension letters: N tokens, C tokens of a chunk, V columns, D hidden size.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alambique.losses.chunked import Workspace, evaluate, student_head
from alambique.losses.fused import finished, new_gradients
from alambique.losses.project import Head
from alambique.losses.task import Task


def run(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task) -> tuple[Tensor, Tensor]:
    """Return the differentiable loss and the weighted sums of ``Rows``."""
    return _ForwardChunked.apply(hidden_ND, weight_VD, bias_V, task)  # type: ignore[no-untyped-call,no-any-return]


class _ForwardChunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task
    ) -> tuple[Tensor, Tensor]:
        head = student_head(hidden_ND, weight_VD, bias_V, task)
        logits_NV = task.scale_N.new_empty(hidden_ND.shape[0], head.columns)
        head.logits(hidden_ND, logits_NV)
        totals = _objective(logits_NV, head, task, with_gradient=False)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V)
        ctx.task, ctx.logits_NV = task, logits_NV
        ctx.mark_non_differentiable(totals)
        return task.coefficients() @ totals, totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V = ctx.saved_tensors
        logits_NV, ctx.logits_NV = ctx.logits_NV, None
        if logits_NV is None:
            raise RuntimeError(
                "impl forward_chunked overwrites its logits: use impl recompute to repeat the backward pass"
            )
        task = replace(ctx.task, scale_N=ctx.task.scale_N * grad_loss)
        head = student_head(hidden_ND, weight_VD, bias_V, task)
        _objective(logits_NV, head, task, with_gradient=True)
        gradients = new_gradients(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad, task, min(1, hidden_ND.shape[0]))
        if hidden_ND.shape[0]:
            gradients.add(head, hidden_ND, logits_NV, 0)
        return (*finished(gradients, weight_VD, bias_V, task), None)


def _objective(logits_NV: Tensor, head: Head, task: Task, *, with_gradient: bool) -> Tensor:
    """Weighted sums of ``Rows``; with the gradient, ``logits_NV`` becomes that of the raw logits."""
    space = Workspace(head, task, logits_NV.shape[0])
    totals = task.scale_N.new_zeros(5)
    for start in range(0, logits_NV.shape[0], space.tokens):
        rows = slice(start, min(start + space.tokens, logits_NV.shape[0]))
        z_CV, soft_CV, tanh_CV = space.take(rows.stop - start)
        z_CV.copy_(logits_NV[rows])
        if tanh_CV is not None and head.softcap is not None:
            torch.div(z_CV, head.softcap, out=tanh_CV).clamp_(-1, 1)  # padding is at FLOOR, whose square is infinite
        totals += evaluate(z_CV, soft_CV, task, rows, with_gradient).totals(task.scale_N[rows])
        if with_gradient:
            head.pull_back(z_CV, tanh_CV)
            logits_NV[rows] = z_CV
    return totals
