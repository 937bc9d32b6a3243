"""Long rows: neighbouring processes share the positions of each row, and exchange them for heads around attention.

Each of N processes has S/N positions through the whole model. Only attention looks at other positions, and it works on
each head apart: an all-to-all before it turns a part of the positions, of all heads, into all positions of a part of
the heads; another one turns the result back (Ulysses, arXiv 2309.14509). So any mask will do, and any attention
function that transformers looks up by name.

Dimensions: B rows, S positions, P positions of a process, H heads, G heads of a process, E size of a head, D hidden.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from alambique.core.errors import UserError
from alambique.models.load import ROUNDING, SplitModel
from alambique.train.sharded import ALONE, Processes

_ENOUGH = 4  # positions a process, for the check: two documents, the second of which crosses processes
_LENGTH_BOUND = {"dynamic", "longrope"}  # rotary embeddings that change with the longest position they are shown


class Context:
    """The processes that share rows with this one; where that is none, nothing here does anything.

    While :meth:`sharing` is active ``SplitModel.hidden`` takes whole rows, [B, S], and returns the hidden states of
    this process's positions, [B, P, D]. All processes of a row must call it together, and run its backward pass.
    """

    def __init__(self, processes: Processes, device: torch.device) -> None:
        self.size, self._index = processes.context, processes.rank % processes.context
        self._processes, self._device = processes, device
        self._on, self._position_ids_BS = True, torch.empty(0)

    @contextlib.contextmanager
    def sharing(self, models: Sequence[SplitModel]) -> Iterator[None]:
        """Have each process compute its part of every row in all of ``models``."""
        with contextlib.ExitStack() as stack:
            for model in models if self.size > 1 else ():
                hook = model.backbone.register_forward_pre_hook(self._cut, with_kwargs=True)
                stack.callback(hook.remove)
            for name in {model.config._attn_implementation for model in models if self.size > 1}:
                attend = ALL_ATTENTION_FUNCTIONS[name]
                ALL_ATTENTION_FUNCTIONS[name] = partial(self._attention, attend)
                stack.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, name, attend)
            yield

    @contextlib.contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Have each process compute whole rows for a while, such as those that it alone is given."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def part(self, tensor: Tensor) -> Tensor:
        """What is here of a tensor whose second dimension is that of positions."""
        return tensor.chunk(self.size, 1)[self._index]

    def open(self, models: Sequence[SplitModel], micro_batch_rows: int) -> None:
        """Find the others; refuse models that can't be shared out, and prove on a few tokens that these can.

        Raises:
            UserError: the same in every process.
        """
        if self.size == 1:
            return
        for model in models:
            self._require_shareable(model, micro_batch_rows)
        shape = (self._processes.size // self.size, self.size)
        self._group = init_device_mesh(self._device.type, shape, mesh_dim_names=("row", "part"))["part"].get_group()
        with self.sharing(models):
            for model in models:
                self._check(model)

    def _require_shareable(self, model: SplitModel, micro_batch_rows: int) -> None:
        config, asked = model.config, f"ALAMBIQUE_CONTEXT_PROCESSES={self.size}"
        heads = [getattr(config, name, None) or 0 for name in ("num_attention_heads", "num_key_value_heads")]
        if any(number % self.size for number in heads):
            raise UserError(
                f"{asked} can't share out the {heads[0]} heads and {heads[1]} key-value heads of a "
                f"{config.model_type} model evenly: choose a divisor of both."
            )
        attention = config._attn_implementation
        if attention not in ALL_ATTENTION_FUNCTIONS:
            raise UserError(f"{asked} can't share out attention: {attention}: choose sdpa, or one of flash attention.")
        if "flash" in attention and micro_batch_rows > 1:
            raise UserError(
                f"{asked} with attention: {attention} takes single rows: set distill.micro_batch_rows to 1."
            )
        if _LENGTH_BOUND.intersection(_rope_types(config)):
            raise UserError(
                f"{asked} can't share out a {config.model_type} model whose rotary embeddings change with the length "
                "of what it reads: unset it, or choose another model."
            )

    @torch.no_grad()
    def _check(self, model: SplitModel) -> None:
        model.model.eval()  # the trainer turns the student back
        device = model.head_weight_VD.device
        ids_BS = torch.arange(_ENOUGH * self.size, device=device)[None] * 7 % model.head_weight_VD.shape[0]
        documents_BS = (torch.arange(_ENOUGH * self.size, device=device)[None] > 2).int()
        with self.whole_rows():
            whole_BSD = model.hidden(ids_BS, documents_BS)
        apart = (model.hidden(ids_BS, documents_BS) - self.part(whole_BSD)).abs().max() / whole_BSD.abs().max()
        worst = self._processes.largest(float(apart))
        if not worst <= ROUNDING[model.head_weight_VD.dtype]:
            raise UserError(
                f"{type(model.model).__name__} gives hidden states that differ by {worst:.0%} when "
                f"{self.size} processes share a row: unset ALAMBIQUE_CONTEXT_PROCESSES, or choose another model."
            )

    def _cut(self, _: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not self._on:
            return inputs, named
        self._position_ids_BS = named["position_ids"]
        return inputs, named | {name: self.part(named[name]) for name in ("input_ids", "position_ids")}

    def _attention(
        self,
        attend: Callable[..., tuple[Tensor, Any]],
        module: nn.Module,
        query_BHPE: Tensor,
        key_BHPE: Tensor,
        value_BHPE: Tensor,
        mask: Any,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """As ``attend``, one of transformers' attention functions, over the positions of all processes."""
        if not self._on:
            return attend(module, query_BHPE, key_BHPE, value_BHPE, mask, **options)
        if "position_ids" in options:  # where flash attention finds the documents
            options["position_ids"] = self._position_ids_BS
        if options.get("s_aux") is not None:  # a sink for each head
            options["s_aux"] = options["s_aux"].chunk(self.size)[self._index]
        query_BGSE, key_BGSE, value_BGSE = map(self._exchanged, (query_BHPE, key_BHPE, value_BHPE))
        out_BSGE, _ = attend(module, query_BGSE, key_BGSE, value_BGSE, mask, **options)
        return self._exchanged(out_BSGE), None

    def _exchanged(self, x: Tensor) -> Tensor:
        """Cut up the second dimension, send each process its piece, and join what comes along the third one.

        [B, H, P, E] -> [B, G, S, E] and, in the other order of dimensions, [B, S, G, E] -> [B, P, H, E].
        """
        pieces = torch.unflatten(x, 1, (self.size, -1)).movedim(1, 0).contiguous()
        came: Tensor = wait_tensor(all_to_all_single_autograd(pieces, None, None, self._group))  # type: ignore[no-untyped-call]
        return came.movedim(0, 2).flatten(2, 3)


APART = Context(ALONE, torch.device("cpu"))


def require_shareable(processes: Processes, seq_len: int, rows_per_step: int) -> None:
    """Refuse a step of so many rows, of ``seq_len`` tokens, that can't be shared out.

    Raises:
        UserError: rows or positions would not do for all, or the processes can't be grouped.
    """
    size, context = processes.size, processes.context
    if size % context:
        raise UserError(
            f"ALAMBIQUE_CONTEXT_PROCESSES={context} must divide {size}, the number of processes that train: correct it "
            "or ALAMBIQUE_TRAIN_PROCESSES."
        )
    if seq_len % context:
        raise UserError(
            f"ALAMBIQUE_CONTEXT_PROCESSES={context} can't share rows of {seq_len:,} tokens evenly: choose a divisor or "
            "another prepare.seq_len."
        )
    if rows_per_step < size // context:
        raise UserError(
            f"{size} processes can't share the {rows_per_step} rows of a step: raise distill.rows_per_step, lower "
            "ALAMBIQUE_TRAIN_PROCESSES, or have several share each row (ALAMBIQUE_CONTEXT_PROCESSES)."
        )


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary embedding; some models have one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {found.get("rope_type", "") for found in (rope, *rope.values()) if isinstance(found, dict)}
