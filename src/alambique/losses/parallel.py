"""Heads that are spread over processes: gathered whole (FSDP2), or used where they lie (vocabulary-sharded).

Dimension letters: C tokens of a chunk, K kept entries, V rows of the head, D hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alambique.losses.objective import LogSum, Student

if torch.distributed.is_available():
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial


@dataclass(frozen=True)
class Shard:
    """One process's block of the head's rows, of equal size in each process of ``group``, in the order of ranks."""

    group: Any  # processes that share one head and work on the same tokens
    start: int  # the vocabulary index of the first row here
    size: int  # number of processes

    def join(self, here: Student) -> Student:
        """Of all processes' blocks: one all-reduce of maxima, one of sums of exponentials."""
        z_CK, tail, soft_tail, label_z_C = here
        tails = [found for found in (tail, soft_tail) if found is not None]
        columns = [z_CK, *(found.top_C[:, None] for found in tails)]
        if label_z_C is not None:
            columns.append(label_z_C[:, None])
        largest = torch.cat(columns, 1)  # what another block holds is at FLOOR here
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        slots = z_CK.shape[1]
        tops_C = largest[:, slots : slots + len(tails)].unbind(1)
        sums = torch.stack([found.relative_to(top_C).exp() for found, top_C in zip(tails, tops_C, strict=True)])
        dist.all_reduce(sums, dist.ReduceOp.SUM, self.group)
        joined = [LogSum(top_C, sum_C.log()) for top_C, sum_C in zip(tops_C, sums, strict=True)]
        label_z_C = largest[:, -1] if label_z_C is not None else None
        return Student(largest[:, :slots], joined[0], joined[1] if soft_tail is not None else None, label_z_C)

    def sum_(self, *tensors: Tensor | None) -> None:
        """Add up tensors over the processes, in place."""
        for tensor in tensors:
            if tensor is not None:
                dist.all_reduce(tensor, dist.ReduceOp.SUM, self.group)


def shard_of(group: Any, rows: int) -> Shard:
    """The block of this process, whose part of the head has ``rows`` rows."""
    return Shard(group, dist.get_rank(group) * rows, dist.get_world_size(group))


def gathered(head_VD: Tensor) -> Tensor:
    """A head that FSDP2 has sharded, whole: gathered, and its gradient averaged over processes and scattered.

    Each once for each call, so once for each micro-batch: a loss can't know that the next one wants the same head. For
    once in an optimizer step leave both to FSDP2. The head belongs to its root, which stays whole after the forward
    pass, and the loss is called there and then: the head is no DTensor. ``model.set_reshard_after_backward(False)``
    keeps it whole for the next micro-batch, and ``model.set_requires_gradient_sync`` is true for the last one alone.

    The average is what FSDP2 does to all other gradients: with a ``denominator`` that counts the tokens of all
    processes, scale the loss by their number. Anything but a DTensor is returned as it is.
    """
    if not (torch.distributed.is_available() and isinstance(head_VD, DTensor)):
        return head_VD
    return _Gather.apply(head_VD)  # type: ignore[no-untyped-call,no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharded_VD: Any) -> Tensor:
        ctx.mesh, ctx.placements = sharded_VD.device_mesh, sharded_VD.placements
        return sharded_VD.full_tensor()  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_VD: Tensor) -> Tensor:
        partial = DTensor.from_local(grad_VD.div_(ctx.mesh.size()), ctx.mesh, [Partial()] * ctx.mesh.ndim)
        return partial.redistribute(ctx.mesh, ctx.placements)
