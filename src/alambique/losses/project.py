"""The head over one chunk: hidden states to logits that were never rounded, and gradients back.

Operands have the hidden states' dtype; products are summed in the compute dtype. Where a matrix product can't return
float32 from bfloat16 operands (CPUs, torch 2.13), the logits are made from operands upcast block by block of the
vocabulary, which is exact, since every bfloat16 is a float32.

Dimension letters: C tokens of the chunk, V columns, D hidden size, N tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from alambique.losses.objective import FLOOR
from alambique.losses.task import Task

_BLOCK_BYTES = 16 << 20  # assumption: upcast block of the head; large enough for a GEMM, small beside a chunk
_COLUMN_MULTIPLE = 64  # rows of a chunk stay aligned for tensor cores; the padding is at FLOOR


def padded_columns(vocab_size: int, head_rows: int) -> int:
    """Columns that are computed: the vocabulary rounded up as far as the head has rows."""
    return min(head_rows, -(-vocab_size // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE)


class Head:
    """The student's head, with its bias, scale and soft-cap, applied to chunks in buffers that it doesn't own."""

    def __init__(self, weight_VD: Tensor, bias_V: Tensor | None, operand_dtype: torch.dtype, task: Task) -> None:
        self.columns = padded_columns(task.vocab_size, weight_VD.shape[0])
        self.vocab_size, self.config = task.vocab_size, task.config
        self.weight_VD = weight_VD[: self.columns].to(operand_dtype)
        self.bias_V = bias_V[: self.columns].to(task.compute_dtype) if bias_V is not None else None
        self.low_precision = operand_dtype not in (torch.float32, torch.float64)

    def logits(self, hidden_CD: Tensor, z_CV: Tensor, tanh_CV: Tensor | None) -> None:
        """Fill ``z_CV``; ``tanh_CV``, needed with a soft-cap, keeps what ``pull_back`` wants."""
        self.products(hidden_CD, z_CV)
        if self.bias_V is not None:
            z_CV.add_(self.bias_V)
        cap, scale = self.config.logit_softcap, self.config.logit_scale
        if tanh_CV is not None and cap is not None:
            torch.tanh(z_CV.mul_(scale / cap), out=tanh_CV)
            torch.mul(tanh_CV, cap, out=z_CV)
        elif scale != 1:
            z_CV.mul_(scale)
        z_CV[:, self.vocab_size :].fill_(FLOOR)

    def products(self, hidden_CD: Tensor, z_CV: Tensor) -> None:
        """Fill ``z_CV`` with the bare products of hidden states and head."""
        if not self.low_precision:
            torch.mm(hidden_CD, self.weight_VD.t(), out=z_CV)
        elif z_CV.is_cuda:
            torch.mm(hidden_CD, self.weight_VD.t(), torch.float32, out=z_CV)
        else:
            self._upcast_logits(hidden_CD, z_CV)

    def pull_back(self, dz_CV: Tensor, tanh_CV: Tensor | None) -> None:
        """Turn the gradient of capped logits into that of raw ones; the scale is in the rows' factor already."""
        if tanh_CV is not None:
            dz_CV.addcmul_(dz_CV, tanh_CV.square_(), value=-1)

    def _upcast_logits(self, hidden_CD: Tensor, z_CV: Tensor) -> None:
        hidden_CD = hidden_CD.to(z_CV.dtype)
        block = max(1, _BLOCK_BYTES // (4 * hidden_CD.shape[1]))
        buffer_BD = torch.empty(min(block, self.columns), hidden_CD.shape[1], dtype=z_CV.dtype, device=z_CV.device)
        for start in range(0, self.columns, block):
            stop = min(start + block, self.columns)
            weight_BD = buffer_BD[: stop - start].copy_(self.weight_VD[start:stop])
            torch.mm(hidden_CD, weight_BD.t(), out=z_CV[:, start:stop])


@dataclass
class Gradients:
    """Gradients that are summed over chunks; a field is None where nobody wants it.

    Attributes:
        hidden_ND: in the hidden states' dtype, each row written once.
        weight_VD: the head's, all rows, in float32 or as ``weight_grad`` says.
        bias_V: in the compute dtype.
    """

    hidden_ND: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None
    fresh: bool = True  # whether weight_VD holds nothing yet, so that the first chunk overwrites it

    def add(self, head: Head, hidden_CD: Tensor, dz_CV: Tensor, start: int) -> None:
        """Add a chunk whose first row is ``start``; ``dz_CV`` (rounded to the operands or not) is destroyed."""
        if self.bias_V is not None:
            self.bias_V[: head.columns] += dz_CV.sum(0, dtype=self.bias_V.dtype)
        if head.low_precision and dz_CV.dtype != hidden_CD.dtype:
            dz_CV = halve_in_place(dz_CV, hidden_CD.dtype)
        if self.hidden_ND is not None:
            torch.mm(dz_CV, head.weight_VD, out=self.hidden_ND[start : start + hidden_CD.shape[0]])
        if self.weight_VD is not None:
            self._add_weight(self.weight_VD[: head.columns], dz_CV, hidden_CD)
            self.fresh = False

    def _add_weight(self, weight_VD: Tensor, dz_CV: Tensor, hidden_CD: Tensor) -> None:
        beta = 0 if self.fresh else 1
        if weight_VD.dtype == hidden_CD.dtype:
            torch.addmm(weight_VD, dz_CV.t(), hidden_CD, beta=beta, out=weight_VD)
        elif weight_VD.is_cuda:
            torch.addmm(weight_VD, dz_CV.t(), hidden_CD, torch.float32, beta=beta, out=weight_VD)
        else:  # the product is rounded once per chunk, the sum is not
            block = max(1, _BLOCK_BYTES // (2 * hidden_CD.shape[1]))
            for start in range(0, weight_VD.shape[0], block):
                product_BD = torch.mm(dz_CV[:, start : start + block].t(), hidden_CD)
                part_BD = weight_VD[start : start + block]
                if self.fresh:
                    part_BD.copy_(product_BD)
                else:
                    part_BD.add_(product_BD)


def halve_in_place(dz_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a float32 chunk to a two-byte ``dtype`` within its own memory; one rounding, no second buffer.

    Row r moves from bytes 4Vr to 2Vr. Runs of rows [1, 2), [2, 4), [4, 8), … move without touching rows still to come.
    """
    half_CV = dz_CV.view(dtype).view(-1)[: dz_CV.numel()].view(dz_CV.shape)
    half_CV[:1] = dz_CV[:1].clone()
    start = 1
    while start < dz_CV.shape[0]:
        half_CV[start : 2 * start] = dz_CV[start : 2 * start]
        start *= 2
    return half_CV
