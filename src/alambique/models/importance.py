"""How much each part of a model does, measured while it reads text: what pruning takes for the least harmful.

- Block influence of a layer: 1 − cosine between its input and its output, mean over tokens (ShortGPT, arXiv
  2403.03853).
- Distance over a block of n layers: the same between the input of its first and the output of its last (arXiv
  2403.17887, there as an angle at the last token; here over all tokens).
- An MLP channel: mean |activation| of the down projection's input (Minitron, arXiv 2407.14679).
- A group of heads (a key-value head with its query heads): mean norm of what it adds to the residual stream, that is
  after the output projection. Minitron takes the norm before it, blind to what the projection makes of a head.

Everything comes from one pass over the text, by hooks, one row at a time, without the output head. The hidden states
are those of the residual stream: transformers' ``output_hidden_states`` gives the last one after the final norm.

Dimensions: R rows, S positions, D hidden size, N tokens of documents, L layers, I MLP channels, G groups, W values
of a group's heads.
"""

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alambique.core.errors import UserError
from alambique.core.progress import Progress
from alambique.models.load import SplitModel


@dataclass(frozen=True)
class Importance:
    """Scores, higher where more would be lost.

    ``block_influence`` by layer; ``block_distance`` by first layer of a block; ``channels_LI`` and ``groups_LG``
    float64 on the CPU, None unless width was asked for.
    """

    num_tokens: int
    block_influence: list[float]
    block_distance: list[float]
    channels_LI: Tensor | None = None
    groups_LG: Tensor | None = None


@torch.inference_mode()
def measure_importance(
    model: SplitModel, input_ids_RS: Tensor, document_ids_RS: Tensor, *, block: int = 1, width: bool = False
) -> Importance:
    """Let ``model`` read the rows, each document by itself, and score its parts.

    Args:
        model: the teacher; with ``width``, one that passes ``prune.require_prunable_width``.
        input_ids_RS: token ids.
        document_ids_RS: negative on padding, which doesn't count.
        block: layers of a block in ``block_distance``.
        width: whether to score channels and groups too.

    Raises:
        UserError: the model has no list of layers, or the rows no token.
    """
    layers, device = model.layers, model.head_weight_VD.device
    meter = _Meter(len(layers), block)
    with contextlib.ExitStack() as stack, Progress("measuring the teacher", document_ids_RS.numel()) as progress:
        for handle in meter.watch(layers, model.config, width):
            stack.callback(handle.remove)
        for row in range(len(input_ids_RS)):
            ids_1S, documents_1S = (
                tensor[row : row + 1].long().to(device) for tensor in (input_ids_RS, document_ids_RS)
            )
            meter.start_row(documents_1S[0] >= 0)
            model.hidden(ids_1S, documents_1S)
            progress.update(ids_1S.numel())
    return meter.importance()


class _Meter:
    """Sums over tokens, filled by hooks."""

    def __init__(self, num_layers: int, block: int) -> None:
        self._tokens = 0
        self._real_S: Tensor = torch.empty(0)
        self._states_SD: deque[Tensor] = deque(maxlen=max(block, 1) + 1)  # inputs of the layers so far, latest last
        # Sum of 1 − cosine over blocks of so many layers, by the layer after them.
        self._turned = {distance: [0.0] * (num_layers + 1) for distance in {1, block}}
        self._block, self._seen = block, 0
        self._channels: list[Any] = [0.0] * num_layers
        self._groups: list[Any] = [0.0] * num_layers

    def watch(self, layers: Sequence[nn.Module], config: Any, width: bool) -> list[Any]:
        """Hook into every layer; the handles remove the hooks."""
        handles = [layers[0].register_forward_pre_hook(self._on_first_input, with_kwargs=True)]
        handles += [layer.register_forward_hook(self._on_output) for layer in layers]
        if width:
            groups = config.num_key_value_heads
            for index, layer in enumerate(layers):
                down, out = layer.get_submodule("mlp.down_proj"), layer.get_submodule("self_attn.o_proj")
                handles.append(down.register_forward_pre_hook(partial(self._on_mlp, index)))
                handles.append(out.register_forward_pre_hook(partial(self._on_heads, index, groups)))
        return handles

    def start_row(self, real_S: Tensor) -> None:
        """Say which positions of the next row count."""
        self._real_S = real_S
        self._tokens += int(real_S.sum())

    def _on_first_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._states_SD.clear()
        self._seen = 0
        self._states_SD.append((args[0] if args else kwargs["hidden_states"])[0])

    def _on_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._states_SD.append((output if isinstance(output, Tensor) else output[0])[0])
        self._seen += 1
        for distance, total in self._turned.items():
            if len(self._states_SD) > distance:
                before_ND, after_ND = (self._states_SD[at][self._real_S].float() for at in (-1 - distance, -1))
                total[self._seen] += float((1 - F.cosine_similarity(before_ND, after_ND, dim=-1)).sum())

    def _on_mlp(self, index: int, module: nn.Module, args: tuple[Tensor]) -> None:
        channels_NI = args[0][0][self._real_S]
        self._channels[index] += channels_NI.abs().sum(dim=0, dtype=torch.float32).double().cpu()

    def _on_heads(self, index: int, groups: int, module: nn.Linear, args: tuple[Tensor]) -> None:
        values_NGW, weight_DGW = (x.reshape(len(x), groups, -1) for x in (args[0][0][self._real_S], module.weight))
        norms_G = [F.linear(values_NGW[:, g], weight_DGW[:, g]).float().norm(dim=-1).sum() for g in range(groups)]
        self._groups[index] += torch.stack(norms_G).double().cpu()

    def importance(self) -> Importance:
        """Means over tokens."""
        if not self._tokens:
            raise UserError("The rows to measure the teacher on hold no token: raise `student.measure.rows`.")
        turned = {d: [total / self._tokens for total in totals[d:]] for d, totals in self._turned.items()}
        channels_LI, groups_LG = (
            torch.stack(scores) / self._tokens if isinstance(scores[0], Tensor) else None
            for scores in (self._channels, self._groups)
        )
        return Importance(self._tokens, turned[1], turned[self._block], channels_LI, groups_LG)
