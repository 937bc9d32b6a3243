"""From hidden states to the entries that are kept, a chunk of tokens at a time: no [rows, S, V] tensor exists.

Dimensions: N tokens, C tokens of a chunk, D hidden size, V vocabulary (without padding), K entries.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

# On a CPU a softmax runs over pieces that stay in its cache. 1,024 tokens at V = 49,152 take 27, 23, 23 ms with 1, 3, 8
# MiB on an EPYC (1 MiB of L2 a core); 1 to 2 MiB measured alike on a Xeon (2 MiB).
_CPU_PIECE_BYTES = 3 << 20
_SELECT_ROWS = 128  # small tensors of these stay on malloc's heap; 64 to 256 measured alike
_GROUP = 16  # columns whose maximum is taken first; 16 to 64 measured alike at V = 49,152
_LOG2_E = math.log2(math.e)  # exp(z) = exp2(z log2 e): torch's exp2 takes a quarter of its exp's time on a CPU
_SAFE_LOGIT = 60.0  # exp of no larger one overflows, nor does the sum over any vocabulary
# Logits of one product. oneDNN packs the weights anew for each: 198, 131, 118 ms for 2,048 tokens with 24, 48, 96 MiB.
_CPU_CHUNK_BYTES = 96 << 20


@dataclass
class Head:
    """The teacher's output head without its padded rows.

    Logits are ``cap·tanh(z / cap)`` with ``z = scale · (hidden · weightᵀ + bias)``, or z where ``softcap`` is None.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    softcap: float | None
    scale: float
    _blocks: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def plain(self) -> bool:
        """Whether logits are nothing but the product."""
        return self.bias_V is None and self.softcap is None and self.scale == 1.0

    @property
    def logits_dtype(self) -> torch.dtype:
        """What the product is rounded to: fp32 on a GPU; the weight's dtype on a CPU, which has no mixed product."""
        return torch.float32 if self.weight_VD.is_cuda else self.weight_VD.dtype

    def chunk_tokens(self, logits_mib: int) -> int:
        """Tokens whose logits, with the softmax's copy of them, fit in ``logits_mib``; at least one."""
        budget, bytes_per_logit = logits_mib << 20, self.logits_dtype.itemsize
        if self.weight_VD.is_cuda or not self.plain:
            bytes_per_logit += 4
        if not self.weight_VD.is_cuda:
            budget = min(budget, _CPU_CHUNK_BYTES)  # and the softmax's copy is made piece by piece
        return max(1, budget // (self.weight_VD.shape[0] * bytes_per_logit))

    def block(self, use: str, tokens: int, dtype: torch.dtype, columns: int | None = None) -> Tensor:
        """[tokens, columns] (V of them by default) to be overwritten: the same memory at every call for this use.

        On a CPU touching fresh pages would take as long as what is done in them.
        """
        columns = len(self.weight_VD) if columns is None else columns
        block = self._blocks.get(use)
        if block is None or block.numel() < tokens * columns:
            block = self._blocks[use] = self.weight_VD.new_empty(tokens * columns, dtype=dtype)
        return block[: tokens * columns].view(tokens, columns)


def top_entries(
    hidden_ND: Tensor, head: Head, top_k: int, logits_mib: int, top_p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The K most probable tokens of each position, and the mass of the others.

    With ``top_p`` below 1 a position keeps no more than it needs to hold that mass; its other slots are empty, with
    id 0 and logprob -inf.

    The softmax runs in fp32 over the whole unpadded vocabulary. Ties go either way, as ``torch.topk`` leaves them.

    Returns:
        int32 ids [N, K] and float16 logprobs [N, K] in nats, in order of falling probability, and the float32 tail
        mass [N], which is made from unrounded probabilities. A NaN in the logits shows as a NaN tail mass.
    """
    parts = []
    for logits_CV in logits_chunks(hidden_ND, head, logits_mib):
        if _in_two_steps(logits_CV, top_k):
            for part_CV in torch.split(logits_CV, _SELECT_ROWS):
                sums_C1 = torch.empty(len(part_CV), 1)
                found = _largest_in_two_steps(part_CV, head, top_k, sums_C1)
                parts.append(_entries(*found, sums_C1, top_p))
        else:
            parts.extend(_entries(*_largest(piece_CV, top_k), top_p) for piece_CV in pieces(logits_CV))
    ids, logprobs, tails = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logprobs), torch.cat(tails)


def logits_chunks(hidden_ND: Tensor, head: Head, logits_mib: int) -> Iterator[Tensor]:
    """Logits [C, V] of some tokens at a time, in order, with scale and soft-cap; no tokens are one chunk.

    A chunk's memory is used again for the chunks after it.
    """
    tokens = min(head.chunk_tokens(logits_mib), max(1, len(hidden_ND)))
    weight_DV = head.weight_VD.T
    if hidden_ND.device.type != "cpu":
        for hidden_CD in torch.split(hidden_ND, tokens):
            if hidden_CD.dtype == torch.float32:
                logits_CV = torch.mm(hidden_CD, weight_DV)
            else:
                logits_CV = torch.mm(hidden_CD, weight_DV, out_dtype=torch.float32)  # no rounding to bf16 on the way
            yield logits_CV if head.plain else _transform(logits_CV, head)
        return
    for hidden_CD in torch.split(hidden_ND, tokens):
        block_CV = head.block("product", len(hidden_CD), hidden_ND.dtype)
        logits_CV = torch.mm(hidden_CD, weight_DV, out=block_CV)
        if not head.plain:
            logits_CV = head.block("logits", len(hidden_CD), torch.float32)
            for piece_CV, final_CV in zip(pieces(block_CV), pieces(logits_CV), strict=True):
                final_CV.copy_(_transform(piece_CV, head))
        yield logits_CV


def top_ids(logits_CV: Tensor, head: Head, top_k: int) -> Tensor:
    """Ids of the largest logits, [C, K] int64; these stay as they are."""
    if top_k and _in_two_steps(logits_CV, top_k):
        parts = torch.split(logits_CV, _SELECT_ROWS)
        return torch.cat([_largest_in_two_steps(part_CV, head, top_k)[0] for part_CV in parts])
    return logits_CV.topk(top_k, dim=-1).indices


def pieces(logits_CV: Tensor, of_CX: Tensor | None = None) -> tuple[Tensor, ...]:
    """Rows at a time whose logits stay in a CPU's cache as fp32; on another device all rows.

    With ``of_CX`` the rows of that tensor instead.
    """
    rows = len(logits_CV)
    if logits_CV.device.type == "cpu":
        rows = _CPU_PIECE_BYTES // (4 * logits_CV.shape[1])
    return torch.split(logits_CV if of_CX is None else of_CX, max(1, rows))


def float_pieces(logits_CV: Tensor, head: Head) -> Iterator[Tensor]:
    """:func:`pieces` in fp32: on a CPU copies, all in the same memory."""
    for piece_CV in pieces(logits_CV):
        if piece_CV.device.type == "cpu":
            yield head.block("piece", len(piece_CV), torch.float32).copy_(piece_CV)
        else:
            yield piece_CV.float()


def _entries(ids_CK: Tensor, top_CK: Tensor, sums_C1: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """What is kept of a chunk: ids, their logits, and the sum over all of exp(logit - largest)."""
    logprobs_CK = (top_CK - top_CK[:, :1]) - sums_C1.log()
    if top_p < 1.0:
        before_CK = logprobs_CK.exp().cumsum(-1).roll(1, -1)
        before_CK[:, 0] = 0.0
        surplus_CK = before_CK >= top_p
        ids_CK, logprobs_CK = ids_CK.masked_fill(surplus_CK, 0), logprobs_CK.masked_fill(surplus_CK, -torch.inf)
    kept_C = logprobs_CK.exp().sum(-1, dtype=torch.float64)
    tail_C = (1.0 - kept_C).clamp(0.0, 1.0).float()
    return ids_CK.int(), logprobs_CK.half(), tail_C


def _largest(logits_CV: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and values (fp32) of the largest logits, [C, K] in falling order, and [C, 1] sums for :func:`_entries`.

    The logits are used up.
    """
    z_CV = logits_CV.float()
    top_CK, ids_CK = z_CV.topk(top_k, dim=-1)
    return ids_CK, top_CK, z_CV.sub_(top_CK[:, :1]).exp_().sum(-1, keepdim=True)


def _in_two_steps(logits_CV: Tensor, top_k: int) -> bool:
    """On a CPU topk takes longer than the head's product. A fake tensor has no numbers to choose by."""
    return logits_CV.device.type == "cpu" and type(logits_CV) is Tensor and logits_CV.shape[1] >= 4 * top_k * _GROUP


def _largest_in_two_steps(
    logits_CV: Tensor, head: Head, top_k: int, sums_C1: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Ids and values (fp32) of the largest logits, [C, K] in falling order; ``sums_C1`` is for :func:`_entries`.

    Every one of the K largest is in one of the K groups with the largest maxima. numpy's partition is four times as
    fast as torch's topk.
    """
    maxima_CG = _maxima(logits_CV, head, sums_C1)
    grouped_CWG = logits_CV[:, : maxima_CG.shape[1] * _GROUP].view(len(logits_CV), _GROUP, -1)  # column c: c mod G
    ungrouped_CX = logits_CV[:, maxima_CG.shape[1] * _GROUP :]
    if sums_C1 is not None:
        _divide_by_largest(sums_C1, logits_CV, torch.cat([maxima_CG.amax(1, keepdim=True), ungrouped_CX], dim=1))
    groups_CK = _partition(maxima_CG, head, top_k, logits_CV.dtype)
    groups_CK.numpy().sort(axis=1)  # gathered in order in half the time
    candidates_CWK = grouped_CWG.gather(2, groups_CK[:, None].expand(-1, _GROUP, -1))
    candidates_CM = torch.cat([candidates_CWK.flatten(1), ungrouped_CX], dim=1).float()
    found_CK = _partition(candidates_CM, head, top_k, logits_CV.dtype)
    top_CK, order_CK = candidates_CM.gather(1, found_CK).sort(dim=1, descending=True)
    found_CK = found_CK.gather(1, order_CK)
    # From a place among the candidates back to a column.
    grouped_CK = found_CK // top_k * grouped_CWG.shape[2] + groups_CK.gather(1, found_CK % top_k)
    ungrouped_CK = found_CK - _GROUP * top_k + maxima_CG.shape[1] * _GROUP
    return torch.where(found_CK < _GROUP * top_k, grouped_CK, ungrouped_CK), top_CK


def _maxima(logits_CV: Tensor, head: Head, sums_C1: Tensor | None) -> Tensor:
    """Maxima (fp32) of the groups of columns, [C, G]; columns at the end that fill no group are left out.

    In the same pass ``sums_C1`` is filled with the sums of exp(logit) over all columns.
    """
    groups = logits_CV.shape[1] // _GROUP
    maxima_CG = head.block("maxima", len(logits_CV), torch.float32, groups)
    sums = repeat(None) if sums_C1 is None else pieces(logits_CV, sums_C1)
    for z_CV, piece_CG, piece_C1 in zip(
        float_pieces(logits_CV, head), pieces(logits_CV, maxima_CG), sums, strict=False
    ):
        torch.amax(z_CV[:, : groups * _GROUP].view(len(z_CV), _GROUP, groups), 1, out=piece_CG)
        if piece_C1 is not None:
            torch.sum(z_CV.mul_(_LOG2_E).exp2_(), 1, keepdim=True, out=piece_C1)
    return maxima_CG


def _divide_by_largest(sums_C1: Tensor, logits_CV: Tensor, largest_CX: Tensor) -> None:
    """Turn sums of exp(logit) into those of exp(logit - largest), which is cheaper than to subtract it from all."""
    most_C1 = largest_CX.float().amax(1, keepdim=True)
    sums_C1 /= most_C1.exp()
    unsafe_C = ~(most_C1.abs() < _SAFE_LOGIT).squeeze(1)
    if bool(unsafe_C.any()):
        sums_C1[unsafe_C] = (logits_CV[unsafe_C].float() - most_C1[unsafe_C]).exp().sum(1, keepdim=True)


def _partition(values_CX: Tensor, head: Head, top_k: int, logits_dtype: torch.dtype) -> Tensor:
    """Columns of the largest fp32 values of each row, [C, K] int64, in any order.

    Where they were rounded to bf16, the lower half of their bits is free: with the column there numpy selects among
    integers, which takes half the time of its argpartition.
    """
    rows, columns = values_CX.shape
    first = columns - top_k
    if logits_dtype != torch.bfloat16 or columns > 1 << 16:
        return torch.from_numpy(np.argpartition(values_CX.numpy(), first, axis=1)[:, first:])
    bits_CX, keys_CX = values_CX.view(torch.int32), head.block("keys", rows, torch.int32, columns)
    torch.bitwise_right_shift(bits_CX, 31, out=keys_CX)
    keys_CX.bitwise_and_(0x7FFF0000).bitwise_xor_(bits_CX)  # integers of negative numbers fall as these rise
    keys_CX.bitwise_or_(torch.arange(columns, dtype=torch.int32)).numpy().partition(first, axis=1)  # in place
    return keys_CX[:, first:].bitwise_and(0xFFFF).long()


def _transform(logits_CV: Tensor, head: Head) -> Tensor:
    z_CV = logits_CV.float()
    if head.bias_V is not None:
        z_CV = z_CV + head.bias_V.float()
    z_CV = z_CV * head.scale
    return z_CV if head.softcap is None else head.softcap * torch.tanh(z_CV / head.softcap)
