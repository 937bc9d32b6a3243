"""The gradient filter: vocabulary columns that carry next to nothing of a chunk's gradient skip two matrix products.

Most columns of dlogits are tails that sum to almost nothing. Those of least energy (sum of squares over the chunk) are
dropped as long as together they hold at most tolerance² of the total, so that the relative error of dlogits is at most
the tolerance, whatever the data. What they would have added to dH is nearly one direction, since tails move together:
it is put back as a product of rank one, each row's dropped mass times the dropped rows' mean of the head, at the cost
of one matrix-vector product. On the embedded pair that makes the error of dH seven times smaller.

Dimension letters: C tokens of the chunk, V columns, X columns kept, D hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from alambique.core.products import multiplies

# Source: kept columns grow with the chunk, and a GEMM of 512 tokens is still compute-bound on a CPU.
FILTER_TOKENS = 512
_ENERGY_ROWS = 16  # source: measured on a CPU, 9 ms against 24 ms with 128 rows of 49,152 columns


@dataclass(frozen=True)
class Columns:
    """A chunk's gradient after filtering."""

    ids_X: Tensor  # columns kept, ascending
    dz_CX: Tensor  # their gradient
    dropped_C: Tensor  # sum of each row over the columns dropped
    weight_V: Tensor  # what each column dropped weighs in the mean that stands for them, summing to 1; zero if kept
    dropped_energy: Tensor  # sum of squares of the part dropped, a scalar
    energy: Tensor  # and of all


def select(dz_CV: Tensor, tolerance: float) -> Columns:
    """Choose the columns; ``dz_CV`` is left without those kept. Waits for the device once, to learn their number."""
    energy_V = _column_energies(dz_CV)
    ascending_V, order_V = energy_V.double().sort()
    held_V = ascending_V.cumsum(0)
    num_dropped = int((held_V <= tolerance**2 * held_V[-1]).sum())
    ids_X = order_V[num_dropped:].sort().values
    dz_CX = dz_CV.index_select(1, ids_X)
    dz_CV.index_fill_(1, ids_X, 0.0)
    weight_V = energy_V.sqrt().index_fill_(0, ids_X, 0.0)
    return Columns(
        ids_X,
        dz_CX,
        dz_CV.sum(1),
        weight_V / weight_V.sum().clamp_min(torch.finfo(weight_V.dtype).tiny),
        held_V[num_dropped - 1] if num_dropped else held_V.new_zeros(()),
        held_V[-1],
    )


def _column_energies(dz_CV: Tensor) -> Tensor:
    """Sums of squares over rows, a few rows at a time: on a CPU a tenth of the time of a norm of the whole chunk."""
    square_RV, energy_V = torch.empty_like(dz_CV[:_ENERGY_ROWS]), dz_CV.new_zeros(dz_CV.shape[1])
    for start in range(0, dz_CV.shape[0], _ENERGY_ROWS):
        part_RV = dz_CV[start : start + _ENERGY_ROWS]
        energy_V += torch.mul(part_RV, part_RV, out=square_RV[: part_RV.shape[0]]).sum(0)
    return energy_V


def product_dtype(operand: Tensor) -> torch.dtype:
    """The dtype in which products for gradients take their operands: the given one's, or float32 if it is emulated."""
    return operand.dtype if multiplies(operand.dtype, operand.device.type) else torch.float32


def hidden_gradient(found: Columns, weight_VD: Tensor, out_CD: Tensor) -> None:
    """DH of the chunk: kept columns, and the dropped ones' mean as one column more."""
    mean_D = found.weight_V.to(weight_VD.dtype) @ weight_VD
    dtype = product_dtype(weight_VD)
    dz_CY = torch.cat([found.dz_CX, found.dropped_C[:, None]], 1).to(dtype)
    weight_YD = torch.cat([weight_VD.index_select(0, found.ids_X), mean_D[None]]).to(dtype)
    if dtype == out_CD.dtype:
        torch.mm(dz_CY, weight_YD, out=out_CD)
    else:
        out_CD.copy_(dz_CY @ weight_YD)


def add_weight_gradient(found: Columns, hidden_CD: Tensor, sum_VD: Tensor) -> None:
    """Add the kept columns' rows of dW."""
    dtype = product_dtype(hidden_CD)
    product_XD = torch.mm(found.dz_CX.to(dtype).t(), hidden_CD.to(dtype))
    sum_VD.index_add_(0, found.ids_X, product_XD.to(sum_VD.dtype))
