"""The head over one chunk: hidden states to logits that were never rounded, and gradients back.

Operands have the hidden states' dtype; products are summed in the compute dtype. On a CPU torch (2.13) has no matrix
product that takes bfloat16 tensors and returns float32. There, logits are made from operands upcast block by block of
the head, by the processor's bfloat16 instructions (``core.products``), which is exact since every bfloat16 is a
float32; products for gradients are rounded once per chunk and summed in float32. On a CPU that only emulates bfloat16
products, eight times slower, all are made from upcast operands at float32's speed.

Dimension letters: C tokens of the chunk, V columns, D hidden size, N tokens.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from alambique.core.products import bfloat16_operands
from alambique.losses.filtered import add_weight_gradient, hidden_gradient, product_dtype, select
from alambique.losses.objective import FLOOR

_BLOCK_BYTES = 16 << 20  # assumption: rows of the head handled at a time on a CPU; large for a GEMM, small by a chunk
_COLUMN_MULTIPLE = 64  # rows of a chunk stay aligned for tensor cores; the padding is at FLOOR


class Head:
    """A head with its bias, scale and soft-cap, applied to chunks in buffers that it doesn't own.

    Of its ``rows`` it computes ``columns``: the vocabulary rounded up as far as there are rows.
    """

    def __init__(
        self,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        *,
        operand_dtype: torch.dtype,
        vocab_size: int,
        softcap: float | None,
        scale: float,
    ) -> None:
        self.vocab_size, self.softcap, self.scale = vocab_size, softcap, scale
        self.rows = weight_VD.shape[0]
        self.columns = min(self.rows, max(1, -(-vocab_size // _COLUMN_MULTIPLE)) * _COLUMN_MULTIPLE)
        self.weight_VD = weight_VD[: self.columns].to(operand_dtype)
        self.bias_V = bias_V[: self.columns] if bias_V is not None else None

    def logits(self, hidden_CD: Tensor, z_CV: Tensor, tanh_CV: Tensor | None = None, start: int = 0) -> None:
        """Fill ``z_CV`` with the columns from ``start``; with a soft-cap ``tanh_CV`` keeps what ``pull_back`` wants."""
        stop = start + z_CV.shape[1]
        _exact_product(hidden_CD, self.weight_VD[start:stop], z_CV)
        if self.bias_V is not None:
            z_CV.add_(self.bias_V[start:stop].to(z_CV.dtype))
        if self.softcap is not None:
            tanh_CV = torch.tanh(z_CV.mul_(self.scale / self.softcap), out=z_CV if tanh_CV is None else tanh_CV)
            torch.mul(tanh_CV, self.softcap, out=z_CV)
        elif self.scale != 1:
            z_CV.mul_(self.scale)
        if stop > self.vocab_size:
            z_CV[:, max(self.vocab_size - start, 0) :].fill_(FLOOR)

    def pull_back(self, dz_CV: Tensor, tanh_CV: Tensor | None) -> None:
        """Turn the gradient of capped logits into that of raw ones; the scale is in the rows' factor already."""
        if tanh_CV is not None:
            dz_CV.addcmul_(dz_CV, tanh_CV.square_(), value=-1)


@dataclass
class Gradients:
    """Gradients that are summed over chunks; a field is None where nobody wants it."""

    hidden_ND: Tensor | None  # in the hidden states' dtype, each row written once
    weight_VD: Tensor | None  # the head's, all rows, in float32 or as ``weight_grad`` says
    bias_V: Tensor | None  # in the compute dtype
    fresh: bool  # whether weight_VD holds nothing yet, so that the first chunk overwrites it
    tolerance: float = 0.0  # of the gradient filter; 0 for none
    energies: Tensor | None = None  # [2], sums of squares of dlogits that the filter dropped and of all

    def add(self, head: Head, hidden_CD: Tensor, dz_CV: Tensor, start: int) -> None:
        """Add a chunk whose first row is ``start``; ``dz_CV``, rounded to the operands or not, is destroyed."""
        if self.bias_V is not None:
            self.bias_V[: head.columns] += dz_CV.sum(0, dtype=self.bias_V.dtype)
        if self.tolerance > 0:
            self._add_filtered(head, hidden_CD, dz_CV, start)
            return
        dz_CV = rounded(dz_CV, product_dtype(hidden_CD))
        if self.hidden_ND is not None:
            _hidden_product(dz_CV, head.weight_VD, self.hidden_ND[start : start + hidden_CD.shape[0]])
        if self.weight_VD is not None:
            add_product(self.weight_VD[: head.columns], dz_CV.t(), hidden_CD, self.fresh)
            self.fresh = False

    def _add_filtered(self, head: Head, hidden_CD: Tensor, dz_CV: Tensor, start: int) -> None:
        found = select(dz_CV, self.tolerance)
        energies = torch.stack([found.dropped_energy, found.energy])
        self.energies = energies if self.energies is None else self.energies + energies
        if self.hidden_ND is not None:
            hidden_gradient(found, head.weight_VD, self.hidden_ND[start : start + hidden_CD.shape[0]])
        if self.weight_VD is not None:
            if self.fresh:
                self.weight_VD.zero_()
                self.fresh = False
            add_weight_gradient(found, hidden_CD, self.weight_VD)


def _exact_product(hidden_CD: Tensor, weight_VD: Tensor, z_CV: Tensor) -> None:
    """Fill z with hidden · weightᵀ, every product and sum in z's dtype."""
    if hidden_CD.dtype == z_CV.dtype:
        torch.mm(hidden_CD, weight_VD.t(), out=z_CV)
        return
    if z_CV.device.type != "cpu":
        torch.mm(hidden_CD, weight_VD.t(), z_CV.dtype, out=z_CV)
        return
    exact = hidden_CD.dtype == weight_VD.dtype == torch.bfloat16
    hidden_CD = hidden_CD.to(z_CV.dtype)
    block = max(1, _BLOCK_BYTES // (4 * hidden_CD.shape[1]))
    buffer_BD = torch.empty(min(block, weight_VD.shape[0]), hidden_CD.shape[1], dtype=z_CV.dtype)
    for start in range(0, weight_VD.shape[0], block):
        part_BD = weight_VD[start : start + block]
        part_BD = buffer_BD[: part_BD.shape[0]].copy_(part_BD)
        with bfloat16_operands() if exact else contextlib.nullcontext():
            torch.mm(hidden_CD, part_BD.t(), out=z_CV[:, start : start + block])


def _hidden_product(dz_CV: Tensor, weight_VD: Tensor, out_CD: Tensor) -> None:
    """Fill ``out_CD`` with dz · weight."""
    if dz_CV.dtype == weight_VD.dtype:
        torch.mm(dz_CV, weight_VD, out=out_CD)
        return
    sum_CD = dz_CV.new_empty(out_CD.shape)
    block = max(1, _BLOCK_BYTES // (4 * weight_VD.shape[1]))
    for start in range(0, weight_VD.shape[0], block):
        add_product(sum_CD, dz_CV[:, start : start + block], weight_VD[start : start + block], fresh=start == 0)
    out_CD.copy_(sum_CD)


def add_product(sum_RC: Tensor, left_RX: Tensor, right_XC: Tensor, fresh: bool) -> None:
    """Add left · right to the sum, or overwrite it when ``fresh``.

    The operands may be of a lower precision than the sum; right is brought to left's.
    """
    beta = 0 if fresh else 1
    right_XC = right_XC.to(left_RX.dtype)
    if sum_RC.dtype == left_RX.dtype:
        torch.addmm(sum_RC, left_RX, right_XC, beta=beta, out=sum_RC)
        return
    if sum_RC.device.type != "cpu":
        torch.addmm(sum_RC, left_RX, right_XC, sum_RC.dtype, beta=beta, out=sum_RC)
        return
    block = max(1, _BLOCK_BYTES // (2 * right_XC.shape[1]))
    for start in range(0, sum_RC.shape[0], block):
        part_BC, product_BC = sum_RC[start : start + block], torch.mm(left_RX[start : start + block], right_XC)
        if fresh:
            part_BC.copy_(product_BC)
        else:
            part_BC.add_(product_BC)


def rounded(dz_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a float32 chunk to a two-byte ``dtype`` within its own memory: one rounding, and no second buffer.

    Row r moves from bytes 4Vr to 2Vr. Runs of rows [1, 2), [2, 4), [4, 8), … move without touching rows still to come.
    """
    if dz_CV.element_size() <= dtype.itemsize:
        return dz_CV
    half_CV = dz_CV.view(dtype).view(-1)[: dz_CV.numel()].view(dz_CV.shape)
    half_CV[:1] = dz_CV[:1].clone()
    start = 1
    while start < dz_CV.shape[0]:
        half_CV[start : 2 * start] = dz_CV[start : 2 * start]
        start *= 2
    return half_CV
