"""The two chunked paths that never hold more than one chunk of logits, and how all paths enter autograd.

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
from alambique.losses.task import Inputs, Task, insist

_SCALED = (
    "weight_grad_VD was filled for a loss that is not scaled, and this one was: "
    "pass denominator= instead, or use impl recompute"
)
Wanted = tuple[bool, ...]  # which of the inputs want a gradient
Sweep = Callable[[Inputs, Task, Gradients | None], Tensor]
Value = Callable[[Inputs, Task], tuple[Tensor, Any]]  # the weighted sums of ``Rows``, and whatever ``Pull`` wants of it
Pull = Callable[[Inputs, Task, Wanted, Any], Gradients]  # the task's scale includes the gradient of the loss


def run_fused(inputs: Inputs, task: Task, sweeper: Sweep = sweep) -> tuple[Tensor, Tensor]:
    """Return the differentiable loss and the weighted sums of ``Rows``."""
    grad_enabled = torch.is_grad_enabled()  # off inside forward, whatever it was outside
    return _GradientInForward.apply(*inputs, task, sweeper, grad_enabled)  # type: ignore[no-untyped-call,no-any-return]


def _value(inputs: Inputs, task: Task) -> tuple[Tensor, None]:
    return sweep(inputs, task, None), None


def _pull(inputs: Inputs, task: Task, wanted: Wanted, _: None) -> Gradients:
    gradients = new_gradients(inputs, wanted, task, num_chunks(inputs, task))
    sweep(inputs, task, gradients)
    return gradients


def run_recompute(inputs: Inputs, task: Task, value: Value = _value, pull: Pull = _pull) -> tuple[Tensor, Tensor]:
    """Return the differentiable loss and the weighted sums of ``Rows``."""
    return _GradientInBackward.apply(*inputs, task, value, pull)  # type: ignore[no-untyped-call,no-any-return]


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
        inputs, wanted, gradients = Inputs(hidden_ND, weight_VD, bias_V), ctx.needs_input_grad[:3], None
        if grad_enabled and any(wanted):
            gradients = new_gradients(inputs, wanted, task, num_chunks(inputs, task))
        totals = sweeper(inputs, task, gradients)
        if gradients is not None:
            ctx.gradients, ctx.filled = finished(gradients, inputs, task), wanted[1] and task.weight_grad_VD is not None
        ctx.mark_non_differentiable(totals)
        return task.loss(totals), totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError("impl fused holds its gradient for one backward pass: use impl recompute to repeat it")
        ctx.gradients = None
        if ctx.filled:
            insist(grad_loss == 1, _SCALED)
        if grad_loss.device.type != "cpu" or grad_loss != 1:  # comparing on a GPU would wait for it
            gradients = [None if grad is None else grad.mul_(grad_loss) for grad in gradients]
        return (*gradients, None, None, None)


class _GradientInBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task, value: Value, pull: Pull
    ) -> tuple[Tensor, Tensor]:
        totals, found = value(Inputs(hidden_ND, weight_VD, bias_V), task)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V)
        ctx.task, ctx.pull, ctx.found = task, pull, found
        ctx.mark_non_differentiable(totals)
        return task.loss(totals), totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        inputs = Inputs(*ctx.saved_tensors)
        task = replace(ctx.task, scale_N=ctx.task.scale_N * grad_loss)  # before anything is rounded
        gradients = ctx.pull(inputs, task, ctx.needs_input_grad[:3], ctx.found)
        return (*finished(gradients, inputs, task), None, None, None)


def new_gradients(inputs: Inputs, wanted: Wanted, task: Task, products: int) -> Gradients:
    """Buffers for the gradients wanted, the head's being a sum of ``products`` products."""
    hidden_ND, weight_VD, bias_V = inputs
    weight_grad_VD, fresh = task.weight_grad_VD if wanted[1] else None, task.weight_grad_VD is None
    if wanted[1] and fresh:
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


def finished(gradients: Gradients, inputs: Inputs, task: Task) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients in their inputs' dtypes; what went into the caller's buffer is not handed out again."""
    weight, bias = gradients.weight_VD if task.weight_grad_VD is None else None, gradients.bias_V
    weight = weight.to(inputs.weight_VD.dtype) if weight is not None else None
    bias = bias.to(inputs.bias_V.dtype) if bias is not None and inputs.bias_V is not None else None
    return gradients.hidden_ND, weight, bias
