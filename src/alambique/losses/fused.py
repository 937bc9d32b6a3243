"""The two chunked paths that never hold more than one chunk of logits.

``fused`` forms the gradient in the forward pass: three matrix products, and only dH and dW wait for the backward pass.
``recompute``, the published fused path, keeps nothing and projects again in the backward pass: four matrix products.

Dimension letters: N tokens, V rows of the head, D hidden size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alambique.losses.chunked import num_chunks, sweep
from alambique.losses.project import Gradients
from alambique.losses.task import Task

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
Sweep = Callable[[Tensor, Tensor, Tensor | None, Task, Gradients | None], Tensor]


def run_fused(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task) -> tuple[Tensor, Tensor]:
    """Return the differentiable loss and the weighted sums of ``Rows``."""
    return gradient_in_forward(hidden_ND, weight_VD, bias_V, task, sweep)


def gradient_in_forward(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task, sweeper: Sweep
) -> tuple[Tensor, Tensor]:
    """As ``run_fused``, by another function in the place of ``chunked.sweep``."""
    grad_enabled = torch.is_grad_enabled()  # off inside forward, whatever it was outside
    return _GradientInForward.apply(hidden_ND, weight_VD, bias_V, task, sweeper, grad_enabled)  # type: ignore[no-untyped-call,no-any-return]


def run_recompute(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task) -> tuple[Tensor, Tensor]:
    """Return the differentiable loss and the weighted sums of ``Rows``."""
    return _Recompute.apply(hidden_ND, weight_VD, bias_V, task)  # type: ignore[no-untyped-call,no-any-return]


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        task: Task,
        sweeper: Sweep,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        wanted = [grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        gradients = None
        if any(wanted):
            products = num_chunks(hidden_ND, weight_VD, task)
            gradients = new_gradients(hidden_ND, weight_VD, bias_V, wanted, task, products)
        totals = sweeper(hidden_ND, weight_VD, bias_V, task, gradients)
        if gradients is not None:
            ctx.gradients = finished(gradients, weight_VD, bias_V, task)
        ctx.mark_non_differentiable(totals)
        return task.coefficients() @ totals[:5], totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError("impl fused holds its gradient for one backward pass: use impl recompute to repeat it")
        ctx.gradients = None
        if grad_loss.device.type != "cpu" or grad_loss != 1:  # comparing on a GPU would wait for it
            gradients = [None if grad is None else grad.mul_(grad_loss) for grad in gradients]
        return (*gradients, None, None, None)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V)
        ctx.task = task
        totals = sweep(hidden_ND, weight_VD, bias_V, task, None)
        ctx.mark_non_differentiable(totals)
        return task.coefficients() @ totals, totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V = ctx.saved_tensors
        task = replace(ctx.task, scale_N=ctx.task.scale_N * grad_loss)  # before anything is rounded
        products = num_chunks(hidden_ND, weight_VD, task)
        gradients = new_gradients(hidden_ND, weight_VD, bias_V, ctx.needs_input_grad, task, products)
        sweep(hidden_ND, weight_VD, bias_V, task, gradients)
        return (*finished(gradients, weight_VD, bias_V, task), None)


def new_gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    wanted: list[bool] | tuple[bool, ...],
    task: Task,
    products: int,
) -> Gradients:
    """Buffers for the gradients wanted of (hidden, weight, bias), the head's being a sum of ``products`` products."""
    weight_grad_VD, fresh = None, task.weight_grad_VD is None
    if wanted[1]:
        weight_grad_VD = task.weight_grad_VD
        if weight_grad_VD is None:
            rounds_once = products <= 1 and weight_VD.dtype == hidden_ND.dtype  # a sum in float32 would gain nothing
            low = rounds_once or task.config.weight_grad == "compact"
            weight_grad_VD = torch.empty_like(weight_VD, dtype=hidden_ND.dtype if low else task.compute_dtype)
            weight_grad_VD[task.local_vocab(weight_VD) if products else 0 :].zero_()  # rows that no product writes
    return Gradients(
        torch.empty_like(hidden_ND) if wanted[0] else None,
        weight_grad_VD,
        torch.zeros_like(bias_V, dtype=task.compute_dtype) if wanted[2] and bias_V is not None else None,
        fresh,
        task.config.gradient_filter,
    )


def finished(gradients: Gradients, weight_VD: Tensor, bias_V: Tensor | None, task: Task) -> Grads:
    """The gradients in their inputs' dtypes; what went into the caller's buffer is not handed out again."""
    weight = gradients.weight_VD.to(weight_VD.dtype) if gradients.weight_VD is not None else None
    bias = gradients.bias_V.to(bias_V.dtype) if gradients.bias_V is not None and bias_V is not None else None
    return gradients.hidden_ND, None if task.weight_grad_VD is not None else weight, bias
