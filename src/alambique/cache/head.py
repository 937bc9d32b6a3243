"""From hidden states to the entries that are kept, a chunk of tokens at a time: no [rows, S, V] tensor exists.

Dimensions: N tokens, C tokens of a chunk, D hidden size, V vocabulary (without padding), K entries.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# On a CPU the softmax runs over pieces that stay in its cache: 11 to 17 ms instead of 59 for 256 tokens at V = 49,152.
_CPU_PIECE_BYTES = 2 << 20  # fp32 logits; 1 to 12 MiB measured alike on an EPYC
_GROUP = 64  # columns whose maximum is taken first; 16 to 64 measured alike at V = 49,152
# Larger blocks are mapped afresh by malloc each time; touching new pages costs 10 of 87 ms for the same 256 tokens.
_CPU_CHUNK_BYTES = 24 << 20


@dataclass(frozen=True)
class Head:
    """The teacher's output head without its padded rows.

    Logits are ``cap·tanh(z / cap)`` with ``z = scale · (hidden · weightᵀ + bias)``, or z where ``softcap`` is None.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    softcap: float | None
    scale: float

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
        if self.weight_VD.is_cuda:
            bytes_per_logit += 4
        else:
            budget = min(budget, _CPU_CHUNK_BYTES)  # and the copy is made piece by piece
        return max(1, budget // (self.weight_VD.shape[0] * bytes_per_logit))


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
    pieces = [_reduce(logits_CV, top_k, top_p) for logits_CV in logits_pieces(hidden_ND, head, logits_mib)]
    ids, logprobs, tails = zip(*pieces, strict=True)
    return torch.cat(ids), torch.cat(logprobs), torch.cat(tails)


def logits_pieces(hidden_ND: Tensor, head: Head, logits_mib: int) -> Iterator[Tensor]:
    """Logits [C, V] of a few tokens at a time, in order, with scale and soft-cap; no tokens are one piece."""
    for hidden_CD in torch.split(hidden_ND, head.chunk_tokens(logits_mib)):
        logits_CV = _product(hidden_CD, head)
        rows = max(1, len(logits_CV))
        if logits_CV.device.type == "cpu":
            rows = max(1, _CPU_PIECE_BYTES // (4 * logits_CV.shape[1]))
        for part_CV in torch.split(logits_CV, rows):
            yield part_CV if head.plain else _transform(part_CV, head)


def _product(hidden_CD: Tensor, head: Head) -> Tensor:
    weight_DV = head.weight_VD.T
    if hidden_CD.is_cuda and hidden_CD.dtype != torch.float32:
        return torch.mm(hidden_CD, weight_DV, out_dtype=torch.float32)  # no rounding to bf16 on the way
    return torch.mm(hidden_CD, weight_DV)


def _reduce(logits_CV: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    # Selecting before the softmax spares topk the fp32 copy; a softmax changes no order.
    ids_CK = _top_ids(logits_CV, top_k)
    logprobs_CK = torch.log_softmax(logits_CV, dim=-1, dtype=torch.float32).gather(-1, ids_CK)
    if top_p < 1.0:
        before_CK = logprobs_CK.exp().cumsum(-1).roll(1, -1)
        before_CK[:, 0] = 0.0
        surplus_CK = before_CK >= top_p
        ids_CK, logprobs_CK = ids_CK.masked_fill(surplus_CK, 0), logprobs_CK.masked_fill(surplus_CK, -torch.inf)
    kept_C = logprobs_CK.exp().sum(-1, dtype=torch.float64)
    tail_C = (1.0 - kept_C).clamp(0.0, 1.0).float()
    return ids_CK.int(), logprobs_CK.half(), tail_C


def _top_ids(logits_CV: Tensor, top_k: int) -> Tensor:
    """Ids of the largest logits, [C, K] int64, in falling order.

    bfloat16 on a CPU, where topk takes a fifth as long as the head's product, goes in two steps: every one of the K
    largest lies in one of the K groups of columns with the largest maxima. 16 ms instead of 23 for 256 tokens.
    """
    num_groups = logits_CV.shape[1] // _GROUP
    if logits_CV.device.type != "cpu" or logits_CV.dtype != torch.bfloat16 or num_groups < 4 * top_k:
        return logits_CV.topk(top_k, dim=-1).indices
    bits_CV = logits_CV.view(torch.int16)
    keys_CV = bits_CV ^ ((bits_CV >> 15) & 0x7FFF)  # integers in the order of the numbers, which compare faster
    grouped_CGN = keys_CV[:, : num_groups * _GROUP].view(-1, _GROUP, num_groups)  # column c is in group c mod N
    groups_CK = grouped_CGN.amax(1).topk(top_k, sorted=False).indices
    candidates_CM = grouped_CGN.gather(2, groups_CK[:, None].expand(-1, _GROUP, -1)).flatten(1)
    rest_CX = keys_CV[:, num_groups * _GROUP :]
    found_CK = torch.cat([candidates_CM, rest_CX], dim=1).topk(top_k, dim=-1).indices
    ids_CK = found_CK // top_k * num_groups + groups_CK.gather(1, found_CK % top_k)
    return torch.where(
        found_CK < candidates_CM.shape[1], ids_CK, found_CK - candidates_CM.shape[1] + num_groups * _GROUP
    )


def _transform(logits_CV: Tensor, head: Head) -> Tensor:
    z_CV = logits_CV.float()
    if head.bias_V is not None:
        z_CV = z_CV + head.bias_V.float()
    z_CV = z_CV * head.scale
    return z_CV if head.softcap is None else head.softcap * torch.tanh(z_CV / head.softcap)
