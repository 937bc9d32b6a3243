"""Training in several processes: FSDP2 spreads the student over them, and what one of them finds out all act upon.

Collectives hang when processes disagree, so all call the same methods in the same order, and what depends on a clock, a
signal, a disk or rounding is agreed first. Flags travel on the CPU (gloo): no process waits for a GPU to learn one.

Dimensions: B rows, S positions, D hidden size.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from alambique.core.errors import UserError
from alambique.core.files import read_json, write_json
from alambique.models.load import SplitModel
from alambique.train.data import StepRows

_FITTING_ROWS = "micro_batch_rows.json"


class TooLarge(Exception):
    """A micro-batch didn't fit in the memory of this process; ``rows`` is what the next try should take.

    In the middle of a pass the other processes wait for parts of layers that this one will never send, and neither
    NCCL nor gloo can be talked out of that: so all must end, and start again from the last checkpoint.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(f"out of memory: {rows} rows may fit")
        self.rows = rows


class Stopped(Exception):
    """Another process failed alone, and has said why."""


@dataclass(frozen=True)
class Processes:
    """Those that train together, as one of them sees it. A process alone tells nobody, and pays nothing for it.

    ``context`` neighbours share each row: see :mod:`alambique.train.context`.
    """

    rank: int = 0
    size: int = 1
    context: int = 1

    @classmethod
    def of_group(cls, context: int = 1) -> "Processes":
        """All of the default process group."""
        return cls(dist.get_rank(), dist.get_world_size(), context)

    @property
    def leads(self) -> bool:
        """Whether this one prints and writes."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true in any process; none goes on before all have come here."""
        return self.largest(flag) > 0

    def largest(self, value: float) -> float:
        """The largest of the processes' values."""
        if self.size == 1:
            return value
        told = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return told.item()

    def sum_(self, tensor: Tensor) -> None:
        """Add up a tensor over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def of_first(self, value: Any) -> Any:
        """What rank 0 has for ``value``, anything that JSON knows, in every process."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.leads else b""
        length = torch.tensor(len(text))
        dist.broadcast(length, src=0)
        data = torch.tensor([*text] if self.leads else [0] * int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0)
        return json.loads(bytes(data.tolist()))

    def together(self, batches: Iterator[StepRows]) -> Iterator[StepRows]:
        """The same batches; when one process can't read its part, all stop.

        Raises:
            UserError: the process's own; the others are told that another one stopped.
        """
        while True:
            batch, error = None, None
            try:
                batch = next(batches, None)
            except UserError as found:
                error = found
            if self.any(error is not None):
                raise error or Stopped
            if batch is None:
                return
            yield batch


ALONE = Processes()


class ShardedStudent(SplitModel):
    """A student of which each process holds a part: FSDP2 around each decoder layer, and around all that is left.

    What is left (embeddings, final norm, head) is the root. It is gathered when a step's first micro-batch begins and
    stays whole to the end of its last, so the loss finds the whole head, which is sent once a step, as is its gradient.
    Layers come and go with every pass. Gradients are summed over processes: losses are divided by the tokens of all.

    ``head_weight_VD`` and ``head_bias_V`` are the whole head from the forward pass to the end of the backward pass.

    Args:
        student: with fp32 weights, the same in each process; its model is sharded in place.
        precision: bf16 gathers the layers in bfloat16, to which autocast would round them anyway (norms too, which it
            would not). Else autocast's rounded copies of all layers would live until the backward pass.
        device: of this process.
    """

    def __init__(self, student: SplitModel, precision: str, device: torch.device) -> None:
        super().__init__(student.model)
        model = student.model
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        rounded = torch.bfloat16 if precision == "bf16" else None
        policy = MixedPrecisionPolicy(rounded, torch.float32, cast_forward_inputs=False)
        layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        modules = [fully_shard(layer, mesh=mesh, mp_policy=policy) for layer in reversed(layers)]  # inner ones first
        self._backbone_pass = _Root(model, self._forward)
        self._root = fully_shard(self._backbone_pass, mesh=mesh)  # the same object
        for module in (*modules, self._root):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        # Nothing here writes into the hidden states that the root returns, of which FSDP2 warns.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        self._find_head()
        student.head_weight_VD, student.head_bias_V = self.head_weight_VD, self.head_bias_V  # don't keep the whole one

    def hidden(self, input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        """As ``SplitModel.hidden``; all processes must call it, each with rows of its own."""
        hidden_BSD: Tensor = self._backbone_pass(input_ids_BS, document_ids_BS)
        return hidden_BSD

    def _forward(self, input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        self._find_head()
        return super().hidden(input_ids_BS, document_ids_BS)

    def _find_head(self) -> None:
        """FSDP2 gives the model other parameters when it gathers than when it shards."""
        head: Any = self.model.get_output_embeddings()
        self.head_weight_VD, self.head_bias_V = head.weight, head.bias

    def begin_micro_batch(self, last: bool) -> None:
        """Say whether the micro-batch that comes is the last of its step, after which the root is sharded again."""
        self._root.set_requires_gradient_sync(last, recurse=False)
        self._root.set_reshard_after_backward(last, recurse=False)

    def reshard(self) -> None:
        """Shard the root again, where a step was left halfway."""
        self._root.reshard()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Have the head whole outside of a step."""
        self._root.unshard()
        self._find_head()
        try:
            yield
        finally:
            self._root.reshard()


class _Root(nn.Module):
    """What owns all parameters outside of the layers. Its forward pass is that of the backbone, without the head."""

    def __init__(self, model: nn.Module, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        """Hidden states, [B, S, D]."""
        return self._forward(input_ids_BS, document_ids_BS)


def collect(tensors: Iterator[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    """Whole tensors by name, those that are sharded on the CPU; one at a time is whole on a GPU.

    All processes must call it; those that don't ``keep`` get nothing.
    """
    found = {}
    for name, value in tensors:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            found[name] = whole.cpu() if isinstance(value, DTensor) else whole.contiguous()
    return found


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """What a process holds of ``whole`` where it is sharded as ``like`` is; nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def fitting_rows(scratch: Path) -> int | None:
    """Rows of the largest micro-batch that the run in ``scratch`` may try, if one was too large before."""
    path = scratch / _FITTING_ROWS
    return int(read_json(path)) if path.is_file() else None


def note_fitting_rows(scratch: Path, rows: int) -> None:
    """Leave word for the next try."""
    write_json(scratch / _FITTING_ROWS, rows)
