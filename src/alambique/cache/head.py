"""From hidden states to the entries that are kept, a chunk of tokens at a time: no [rows, S, V] tensor exists.

Dimensions: N tokens, C tokens of a chunk, D hidden size, V vocabulary (without padding), K entries.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# On a CPU the softmax runs over pieces that stay in its cache: 11 to 17 ms instead of 59 for 256 tokens at V = 49,152.
_CPU_PIECE_BYTES = 2 << 20  # fp32 logits; 1 to 12 MiB measured alike on an EPYC
_GROUP = 16  # columns whose maximum is taken first; 16 to 64 measured alike at V = 49,152
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
    """The entries of one piece, whose logits are used up."""
    z_CV = logits_CV.float()
    ids_CK = _top_ids(z_CV, top_k)
    top_CK = z_CV.gather(-1, ids_CK)
    most_C1 = top_CK[:, :1].clone()  # the largest logit of all
    logprobs_CK = (top_CK - most_C1) - z_CV.sub_(most_C1).exp_().sum(-1, keepdim=True).log_()
    if top_p < 1.0:
        before_CK = logprobs_CK.exp().cumsum(-1).roll(1, -1)
        before_CK[:, 0] = 0.0
        surplus_CK = before_CK >= top_p
        ids_CK, logprobs_CK = ids_CK.masked_fill(surplus_CK, 0), logprobs_CK.masked_fill(surplus_CK, -torch.inf)
    kept_C = logprobs_CK.exp().sum(-1, dtype=torch.float64)
    tail_C = (1.0 - kept_C).clamp(0.0, 1.0).float()
    return ids_CK.int(), logprobs_CK.half(), tail_C


def _top_ids(z_CV: Tensor, top_k: int) -> Tensor:
    """Ids of the largest logits, [C, K] int64, in falling order.

    On a CPU, where topk takes longer than the head's product, it goes in two steps: every one of the K largest lies in
    one of the K groups of columns with the largest maxima. numpy's partition is four times as fast as torch's topk.
    """
    num_groups = z_CV.shape[1] // _GROUP
    if z_CV.device.type != "cpu" or num_groups < 4 * top_k or type(z_CV) is not Tensor:  # a fake one has no numbers
        return z_CV.topk(top_k, dim=-1).indices
    grouped_CGN = z_CV[:, : num_groups * _GROUP].view(-1, _GROUP, num_groups)  # column c is in group c mod N
    groups_CK = _largest(grouped_CGN.amax(1), top_k)
    ids_CGK = groups_CK[:, None] + torch.arange(0, num_groups * _GROUP, num_groups)[:, None]
    ids_CM = torch.cat(
        [ids_CGK.flatten(1), torch.arange(num_groups * _GROUP, z_CV.shape[1]).expand(len(z_CV), -1)], dim=1
    )
    candidates_CM = z_CV.gather(1, ids_CM)
    found_CK = _largest(candidates_CM, top_k)
    order_CK = candidates_CM.gather(1, found_CK).argsort(1, descending=True)
    return ids_CM.gather(1, found_CK.gather(1, order_CK))


def _largest(values_CX: Tensor, top_k: int) -> Tensor:
    """Columns of the largest values of each row, [C, K] int64, in any order."""
    first = values_CX.shape[1] - top_k
    return torch.from_numpy(np.argpartition(values_CX.numpy(), first, axis=1)[:, first:])


def _transform(logits_CV: Tensor, head: Head) -> Tensor:
    z_CV = logits_CV.float()
    if head.bias_V is not None:
        z_CV = z_CV + head.bias_V.float()
    z_CV = z_CV * head.scale
    return z_CV if head.softcap is None else head.softcap * torch.tanh(z_CV / head.softcap)
