"""The path of least memory: tiles of tokens × vocabulary, made twice, and no buffer as wide as the vocabulary.

The forward pass keeps, per token, the tail's logsumexp and the K kept logits. The backward pass makes each tile again
with the same arithmetic: four matrix products. The head's gradient is summed over blocks of tokens.

Dimension letters: N tokens, C tokens of a block, V columns of a tile, D hidden size, K kept entries.
"""

import functools
from collections.abc import Iterator

from torch import Tensor

from alambique.core.errors import UserError
from alambique.core.signal import TopKSignal
from alambique.losses.chunked import Buffers, student_head
from alambique.losses.filtered import product_dtype
from alambique.losses.fused import Wanted, new_gradients, run_recompute
from alambique.losses.objective import Student, compare, portion, spread, strip
from alambique.losses.project import Gradients, Head, add_product, rounded
from alambique.losses.task import Inputs, Task, blocks

_TILE_TOKENS = 4096  # assumption: the head and its gradient pass through memory once per block of tokens
_TILE_MIB = 64  # assumption: of logits in a tile; 4,096 columns, enough for a GEMM and small beside the head


def run(inputs: Inputs, task: Task) -> tuple[Tensor, Tensor]:
    """Return the differentiable loss and the weighted sums of ``Rows``; a dense signal is refused."""
    if not isinstance(task.signal, TopKSignal):
        raise UserError("loss: impl tiled can't use a dense signal: choose impl fused, or a top-K signal.")
    return run_recompute(inputs, task, _value, _pull)


def _value(inputs: Inputs, task: Task) -> tuple[Tensor, list[Student]]:
    tiles = _Tiles(student_head(inputs, task), task, inputs.hidden_ND.shape[0])
    totals, scans = task.scale_N.new_zeros(5), []
    for rows in blocks(inputs.hidden_ND.shape[0], tiles.rows):
        kept = task.kept(rows)
        parts = (
            strip(z_CV, soft_CV, kept, task.labels(rows), start, task.config.temperature)[1]
            for start, z_CV, soft_CV, _ in tiles.make(inputs.hidden_ND[rows])
        )
        scans.append(functools.reduce(Student.join, parts))
        totals += compare(kept, scans[-1], None, task.config)[0].totals(task.scale_N[rows])
    return totals, scans


def _pull(inputs: Inputs, task: Task, wanted: Wanted, scans: list[Student]) -> Gradients:
    tiles = _Tiles(student_head(inputs, task), task, inputs.hidden_ND.shape[0])
    gradients = new_gradients(inputs, wanted, task, len(scans))
    for rows, scan in zip(blocks(inputs.hidden_ND.shape[0], tiles.rows), scans, strict=True):
        _pull_block(tiles, inputs.hidden_ND[rows], rows, scan, task, gradients)
    return gradients


class _Tiles(Buffers):
    """Sizes and buffers of the tiles."""

    def __init__(self, head: Head, task: Task, tokens: int) -> None:
        buffers = 1 + (task.config.temperature != 1) + (head.softcap is not None)
        self.head, self.rows = head, max(1, min(_TILE_TOKENS, tokens))
        elements = int(min(task.config.chunk_budget_mib, _TILE_MIB) * 2**18)
        width = elements // (self.rows * buffers)
        self.width = min(max(1, width // 128 * 128 if width >= 128 else width), head.columns)
        super().__init__(task, self.rows * self.width)

    def make(self, hidden_CD: Tensor) -> Iterator[tuple[int, Tensor, Tensor | None, Tensor | None]]:
        """For each tile: first column, logits, a buffer for tempered ones or None, tanh or None."""
        for start in range(0, self.head.columns, self.width):
            views = self.take(hidden_CD.shape[0], min(self.width, self.head.columns - start))
            self.head.logits(hidden_CD, views[0], views[2], start)
            yield start, *views


def _pull_block(tiles: _Tiles, hidden_CD: Tensor, rows: slice, scan: Student, task: Task, gradients: Gradients) -> None:
    """Make a block's tiles again, turn them into gradients and add these up."""
    kept, labels_C = task.kept(rows), task.labels(rows)
    _, factors = compare(kept, scan, task.scale_N[rows] * task.config.logit_scale, task.config)
    assert factors is not None
    sum_CD = hidden_CD.new_zeros(hidden_CD.shape, dtype=task.compute_dtype) if gradients.hidden_ND is not None else None
    for start, z_CV, soft_CV, tanh_CV in tiles.make(hidden_CD):
        stop = start + z_CV.shape[1]
        slots, here = strip(z_CV, soft_CV, kept, None, start, task.config.temperature)
        spread(z_CV, soft_CV, slots, labels_C, portion(factors, here, scan), start)
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
