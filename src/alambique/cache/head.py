"""From hidden states to the entries that are kept, a chunk of tokens at a time: no [rows, S, V] tensor exists.

Dimensions: N tokens, C tokens of a chunk, D hidden size, V vocabulary (without padding), K entries.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

# On a CPU a softmax runs over pieces that stay in its cache: 11 to 17 ms instead of 59 for 256 tokens at V = 49,152.
_CPU_PIECE_BYTES = 1 << 20  # fp32 logits; 1 to 2 MiB measured alike on a Xeon, 1 to 12 MiB on an EPYC
_GROUP = 16  # columns whose maximum is taken first; 16 to 64 measured alike at V = 49,152
# Logits of one product. oneDNN packs the weights anew for each: 198, 131, 118 ms for 2,048 tokens with 24, 48, 96 MiB.
_CPU_CHUNK_BYTES = 96 << 20
_SAFE_LOGIT = 60.0  # exp of no larger one overflows, nor does the sum over any vocabulary


@dataclass
class Head:
    """The teacher's output head without its padded rows.

    Logits are ``cap·tanh(z / cap)`` with ``z = scale · (hidden · weightᵀ + bias)``, or z where ``softcap`` is None.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    softcap: float | None
    scale: float
    _blocks: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False)

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

    def block(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """[tokens, V] to be overwritten, of each dtype one, in the same memory at every call.

        On a CPU with AMX touching fresh pages would take as long as the product does.
        """
        if dtype not in self._blocks or len(self._blocks[dtype]) < tokens:
            self._blocks[dtype] = self.weight_VD.new_empty(tokens, len(self.weight_VD), dtype=dtype)
        return self._blocks[dtype][:tokens]


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
            parts.append(_entries(*_largest_in_two_steps(logits_CV, top_k), top_p))
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
        block_CV = head.block(len(hidden_CD), hidden_ND.dtype)
        logits_CV = torch.mm(hidden_CD, weight_DV, out=block_CV)
        if not head.plain:
            logits_CV = head.block(len(hidden_CD), torch.float32)
            for piece_CV, final_CV in zip(pieces(block_CV), pieces(logits_CV), strict=True):
                final_CV.copy_(_transform(piece_CV, head))
        yield logits_CV


def top_ids(logits_CV: Tensor, top_k: int) -> Tensor:
    """Ids of the largest logits, [C, K] int64; these stay as they are."""
    if top_k and _in_two_steps(logits_CV, top_k):
        return _largest_in_two_steps(logits_CV, top_k)[0]
    return logits_CV.topk(top_k, dim=-1).indices


def pieces(logits_CV: Tensor, of_CX: Tensor | None = None) -> tuple[Tensor, ...]:
    """Rows at a time whose logits stay in a CPU's cache as fp32; on another device all rows.

    With ``of_CX`` the rows of that tensor instead.
    """
    rows = len(logits_CV)
    if logits_CV.device.type == "cpu":
        rows = _CPU_PIECE_BYTES // (4 * logits_CV.shape[1])
    return torch.split(logits_CV if of_CX is None else of_CX, max(1, rows))


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


def _largest_in_two_steps(logits_CV: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_largest` for many columns: every one of the K largest is in one of the K groups with the largest maxima.

    numpy's partition is four times as fast as torch's topk.
    """
    whole = logits_CV.shape[1] // _GROUP * _GROUP
    maxima_CG, sums_C1 = _maxima_and_sums(logits_CV, whole)
    groups_CK = _partition(maxima_CG, top_k)
    grouped_CWG = logits_CV[:, :whole].view(len(logits_CV), _GROUP, -1)  # column c is in group c mod G
    candidates_CWK = grouped_CWG.gather(2, groups_CK[:, None].expand(-1, _GROUP, -1))
    candidates_CM = torch.cat([candidates_CWK.flatten(1), logits_CV[:, whole:]], dim=1).float()
    found_CK = _partition(candidates_CM, top_k)
    top_CK, order_CK = candidates_CM.gather(1, found_CK).sort(dim=1, descending=True)
    found_CK = found_CK.gather(1, order_CK)
    # From a place among the candidates back to a column.
    grouped_CK = found_CK // top_k * grouped_CWG.shape[2] + groups_CK.gather(1, found_CK % top_k)
    return torch.where(found_CK < _GROUP * top_k, grouped_CK, found_CK - _GROUP * top_k + whole), top_CK, sums_C1


def _maxima_and_sums(logits_CV: Tensor, whole: int) -> tuple[Tensor, Tensor]:
    """Maxima (fp32) of the groups of the first ``whole`` columns, and the sums of exp(logit - largest) over all."""
    maxima_CG = torch.empty(len(logits_CV), whole // _GROUP)
    sums_C1 = torch.empty(len(logits_CV), 1)
    out = zip(pieces(logits_CV), pieces(logits_CV, maxima_CG), pieces(logits_CV, sums_C1), strict=True)
    for piece_CV, piece_maxima_CG, piece_sums_C1 in out:
        z_CV = piece_CV.to(torch.float32, copy=True)
        torch.amax(z_CV[:, :whole].view(len(z_CV), _GROUP, -1), 1, out=piece_maxima_CG)
        torch.sum(z_CV.exp_(), 1, keepdim=True, out=piece_sums_C1)
    most_C1 = torch.cat([maxima_CG, logits_CV[:, whole:].float()], dim=1).amax(1, keepdim=True)
    sums_C1 /= most_C1.exp()  # cheaper than to subtract the largest from all
    unsafe_C = ~(most_C1.abs() < _SAFE_LOGIT).squeeze(1)
    if bool(unsafe_C.any()):
        sums_C1[unsafe_C] = (logits_CV[unsafe_C].float() - most_C1[unsafe_C]).exp().sum(1, keepdim=True)
    return maxima_CG, sums_C1


def _partition(values_CX: Tensor, top_k: int) -> Tensor:
    """Columns of the largest values of each row, [C, K] int64, in any order."""
    first = values_CX.shape[1] - top_k
    return torch.from_numpy(np.argpartition(values_CX.numpy(), first, axis=1)[:, first:])


def _transform(logits_CV: Tensor, head: Head) -> Tensor:
    z_CV = logits_CV.float()
    if head.bias_V is not None:
        z_CV = z_CV + head.bias_V.float()
    z_CV = z_CV * head.scale
    return z_CV if head.softcap is None else head.softcap * torch.tanh(z_CV / head.softcap)
