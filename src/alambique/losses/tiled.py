"""The path of least memory: tiles of tokens × vocabulary, made twice, and no buffer as wide as the vocabulary.

The forward pass keeps, per token, the tail's logsumexp and the K kept logits. The backward pass makes each tile again
with the same arithmetic: four matrix products. The head's gradient is summed over blocks of tokens.

Dimension letters: N tokens, C tokens of a block, V columns of a tile, D hidden size, K kept entries.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from alambique.core.errors import UserError
from alambique.core.signal import TopKSignal
from alambique.losses.chunked import student_head
from alambique.losses.filtered import product_dtype
from alambique.losses.fused import Inputs, Wanted, gradient_in_backward, new_gradients
from alambique.losses.objective import LogSum, compare, locate, pick_labels, portion, spread, strip
from alambique.losses.project import Gradients, Head, add_product, rounded
from alambique.losses.targets import Kept, kept_entries
from alambique.losses.task import Task

_TILE_TOKENS = 4096  # assumption: the head and its gradient pass through memory once per block of tokens
_TILE_MIB = 64  # assumption: of logits in a tile; 4,096 columns, enough for a GEMM and small beside the head


def run(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task) -> tuple[Tensor, Tensor]:
    """Return the differentiable loss and the weighted sums of ``Rows``.

    Raises:
        UserError: the signal is not a top-K one.
    """
    if not isinstance(task.signal, TopKSignal):
        raise UserError("loss: impl tiled can't use a dense signal: choose impl fused, or a top-K signal.")
    return gradient_in_backward(hidden_ND, weight_VD, bias_V, task, _value, _pull)


@dataclass(frozen=True)
class _Scan:
    """What one pass over a block's tiles leaves: see ``compare``."""

    z_CK: Tensor
    tail: LogSum
    soft_tail: LogSum | None
    label_z_C: Tensor | None


def _value(inputs: Inputs, task: Task) -> tuple[Tensor, list[_Scan]]:
    tiles = _Tiles(student_head(*inputs, task), task, inputs.hidden_ND.shape[0])
    totals, scans = task.scale_N.new_zeros(5), []
    for rows in tiles.blocks():
        kept, labels_C = _teacher(task, rows)
        scan = _scan(tiles, inputs.hidden_ND[rows], kept, labels_C)
        scans.append(scan)
        found, _ = compare(kept, scan.z_CK, scan.tail, scan.soft_tail, scan.label_z_C, None, task.config)
        totals += found.totals(task.scale_N[rows])
    return totals, scans


def _pull(inputs: Inputs, task: Task, wanted: Wanted, scans: list[_Scan]) -> Gradients:
    tiles = _Tiles(student_head(*inputs, task), task, inputs.hidden_ND.shape[0])
    gradients = new_gradients(inputs, wanted, task, len(scans))
    for rows, scan in zip(tiles.blocks(), scans, strict=True):
        _pull_block(tiles, inputs.hidden_ND[rows], rows, scan, task, gradients)
    return gradients


class _Tiles:
    """Sizes and buffers of the tiles."""

    def __init__(self, head: Head, task: Task, tokens: int) -> None:
        self.head, self.temperature, self.tokens = head, task.config.temperature, tokens
        self._buffers = 1 + (self.temperature != 1) + (head.softcap is not None)
        self.rows = max(1, min(_TILE_TOKENS, tokens))
        elements = int(min(task.config.chunk_budget_mib, _TILE_MIB) * 2**18)
        width = elements // (self.rows * self._buffers)
        self.width = min(max(1, width // 128 * 128 if width >= 128 else width), head.columns)
        self._memory = [task.scale_N.new_empty(self.rows * self.width) for _ in range(self._buffers)]

    def blocks(self) -> Iterator[slice]:
        """Token ranges."""
        for start in range(0, self.tokens, self.rows):
            yield slice(start, min(start + self.rows, self.tokens))

    def make(self, hidden_CD: Tensor) -> Iterator[tuple[int, Tensor, Tensor | None, Tensor | None]]:
        """For each tile: first column, logits, tempered logits or None, tanh or None, in buffers used again."""
        for start in range(0, self.head.columns, self.width):
            shape = hidden_CD.shape[0], min(self.width, self.head.columns - start)
            views = [memory[: shape[0] * shape[1]].view(shape) for memory in self._memory]
            tanh_CV = views.pop() if self.head.softcap is not None else None
            self.head.logits(hidden_CD, views[0], tanh_CV, start)
            soft_CV = torch.div(views[0], self.temperature, out=views[1]) if self.temperature != 1 else None
            yield start, views[0], soft_CV, tanh_CV


def _teacher(task: Task, rows: slice) -> tuple[Kept, Tensor | None]:
    signal = task.signal[rows]
    assert isinstance(signal, TopKSignal)
    labels_C = task.labels_N[rows] if task.labels_N is not None else None
    return kept_entries(signal, labels_C, task.config.tail, task.vocab_size, task.compute_dtype), labels_C


def _scan(tiles: _Tiles, hidden_CD: Tensor, kept: Kept, labels_C: Tensor | None) -> _Scan:
    """Logsumexp of the tail, kept logits and the labels' logits, tile by tile."""
    z_CK, tail, soft_tail, label_z_C = None, None, None, None
    for start, z_CV, soft_CV, _ in tiles.make(hidden_CD):
        slots, labels_here_C = locate(kept, start, start + z_CV.shape[1]), pick_labels(z_CV, labels_C, start)
        if soft_CV is not None:
            soft_here = strip(soft_CV, slots)[1]
            soft_tail = soft_here if soft_tail is None else soft_tail.join(soft_here)
        here_CK, tail_here = strip(z_CV, slots)
        tail = tail_here if tail is None else tail.join(tail_here)
        z_CK = here_CK if z_CK is None else torch.maximum(z_CK, here_CK)  # FLOOR in all tiles but one
        if labels_here_C is not None:
            label_z_C = labels_here_C if label_z_C is None else torch.maximum(label_z_C, labels_here_C)
    assert z_CK is not None
    assert tail is not None
    return _Scan(z_CK, tail, soft_tail, label_z_C)


def _pull_block(tiles: _Tiles, hidden_CD: Tensor, rows: slice, scan: _Scan, task: Task, gradients: Gradients) -> None:
    """Make a block's tiles again, turn them into gradients and add these up."""
    kept, labels_C = _teacher(task, rows)
    grad_scale_C = task.scale_N[rows] * task.config.logit_scale
    _, factors = compare(kept, scan.z_CK, scan.tail, scan.soft_tail, scan.label_z_C, grad_scale_C, task.config)
    assert factors is not None
    sum_CD = hidden_CD.new_zeros(hidden_CD.shape, dtype=task.compute_dtype) if gradients.hidden_ND is not None else None
    for start, z_CV, soft_CV, tanh_CV in tiles.make(hidden_CD):
        stop, slots = start + z_CV.shape[1], locate(kept, start, start + z_CV.shape[1])
        soft_here = strip(soft_CV, slots)[1] if soft_CV is not None else None
        here = portion(factors, strip(z_CV, slots)[1], scan.tail, soft_here, scan.soft_tail)
        spread(z_CV, soft_CV, slots, labels_C, here, start)
        tiles.head.pull_back(z_CV, tanh_CV)
        if gradients.bias_V is not None:
            gradients.bias_V[start:stop] += z_CV.sum(0)
        dz_CV = rounded(z_CV, product_dtype(hidden_CD))
        if sum_CD is not None:
            add_product(sum_CD, dz_CV, tiles.head.weight_VD[start:stop], fresh=start == 0)
        if gradients.weight_VD is not None:
            add_product(gradients.weight_VD[start:stop], dz_CV.t(), hidden_CD, gradients.fresh)
    gradients.fresh = False
    if gradients.hidden_ND is not None and sum_CD is not None:
        gradients.hidden_ND[rows] = sum_CD
