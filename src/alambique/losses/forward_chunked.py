"""The published forward-chunked path: all of the student's logits are kept, the objective is taken chunk by chunk.

Three whole matrix products and 4·N·V bytes: logits in float32, which the backward pass turns into their gradient.

Dimension letters: N tokens, C tokens of a chunk, V columns, D hidden size.
"""

import torch
from torch import Tensor

from alambique.losses.chunked import Workspace, evaluate, student_head
from alambique.losses.fused import Wanted, new_gradients, run_recompute
from alambique.losses.project import Gradients, Head
from alambique.losses.task import Inputs, Task, blocks


def run(inputs: Inputs, task: Task) -> tuple[Tensor, Tensor]:
    """Return the differentiable loss and the weighted sums of ``Rows``."""
    return run_recompute(inputs, task, _value, _pull)


def _value(inputs: Inputs, task: Task) -> tuple[Tensor, list[Tensor]]:
    head = student_head(inputs, task)
    logits_NV = task.scale_N.new_empty(inputs.hidden_ND.shape[0], head.columns)
    head.logits(inputs.hidden_ND, logits_NV)
    return _objective(logits_NV, head, task, with_gradient=False), [logits_NV]


def _pull(inputs: Inputs, task: Task, wanted: Wanted, left: list[Tensor]) -> Gradients:
    if not left:
        raise RuntimeError("impl forward_chunked overwrites its logits: use impl recompute to repeat the backward pass")
    logits_NV, head = left.pop(), student_head(inputs, task)
    _objective(logits_NV, head, task, with_gradient=True)
    gradients = new_gradients(inputs, wanted, task, min(1, logits_NV.shape[0]))
    if logits_NV.shape[0]:
        gradients.add(head, inputs.hidden_ND, logits_NV, 0)
    return gradients


def _objective(logits_NV: Tensor, head: Head, task: Task, *, with_gradient: bool) -> Tensor:
    """Weighted sums of ``Rows``; with the gradient, ``logits_NV`` becomes that of the raw logits."""
    space = Workspace(head, task, logits_NV.shape[0])
    totals = task.scale_N.new_zeros(5)
    for rows in blocks(logits_NV.shape[0], space.tokens):
        z_CV, soft_CV, tanh_CV = space.take(rows.stop - rows.start, head.columns)
        z_CV.copy_(logits_NV[rows])
        if tanh_CV is not None and head.softcap is not None:
            torch.div(z_CV, head.softcap, out=tanh_CV).clamp_(-1, 1)  # padding is at FLOOR, whose square is infinite
        totals += evaluate(z_CV, soft_CV, task, rows, with_gradient).totals(task.scale_N[rows])
        if with_gradient:
            head.pull_back(z_CV, tanh_CV)
            logits_NV[rows] = z_CV
    return totals
