"""What `keep: sampled` keeps: draws from the teacher's whole distribution, each position's own.

`keep: top_k_and_draws` keeps the top K as they are and draws from the rest alone: as unbiased, and with less noise.

Draws with replacement, each of weight 1 / draws, make an unbiased estimate of the distribution, and of the gradient of
the forward KL from it: no token is cut off, however rare. Equal draws are merged into one entry. Source: Sparse Logit
Sampling (ACL 2025), which reports 12 different tokens from 50 draws and a loss within 0.01 nats of the whole
distribution's.

Dimensions: R rows, S positions, N tokens, C tokens of a chunk, D hidden size, V vocabulary, U draws, K slots, G groups.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from alambique.cache.head import Head, float_pieces, logits_chunks, pieces, top_ids
from alambique.core.errors import UserError
from alambique.core.files import sha256_json
from alambique.core.params import Config

MAX_DRAWS = 2048  # up to here rounding to float16 leaves every count recoverable: rint(draws · exp(log-weight))
_GROUP = 64  # columns that the first step of a draw takes as one; as head._GROUP


class Sampling(Config):
    """What decides the draws, beside the teacher and the row.

    Attributes:
        draws: at each position.
        seed: another seed gives other draws of the same distribution.
        top_k: the most probable tokens, kept beside the draws, which are of the others then.
    """

    draws: int = Field(ge=1, le=MAX_DRAWS)
    seed: int = Field(ge=0)
    top_k: int = Field(default=0, ge=0)  # a cache from before there was a choice has none

    def slots(self, vocab_size: int) -> int:
        """Entries that a position may need: K."""
        return min(self.top_k + self.draws, vocab_size)

    def uniforms(self, row_hash: str, seq_len: int) -> NDArray[np.float64]:
        """Numbers in [0, 1) that decide a row's draws, [S, U]: a function of the arguments alone, on any machine.

        They come from the raw stream of Philox, which numpy keeps the same in all versions.
        """
        key = int(sha256_json([row_hash, self.seed])[:32], 16)
        bits: NDArray[np.uint64] = np.random.Philox(key=key).random_raw(seq_len * self.draws)
        return (bits >> np.uint64(11)).astype(np.float64).reshape(seq_len, self.draws) * 2.0**-53

    def log_weights(self) -> Tensor:
        """Float16 log of count / draws for every count from 0, [U + 1].

        The rounding moves a weight, and so their sum, by less than 0.1 % at 50 draws and 0.2 % at any number.
        """
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(np.arange(self.draws + 1) / self.draws).astype(np.float16))


def kept_text(top_k: int, top_p: float, sampling: Sampling | None) -> str:
    """What a cache keeps at each position, for people."""
    if sampling is not None:
        top = f"top {sampling.top_k} and " if sampling.top_k else ""
        return f"{top}{sampling.draws} draws{' of the rest' if top else ''} (seed {sampling.seed})"
    return f"top {top_k}" + (f" within mass {top_p}" if top_p < 1 else "")


def require_tail(sampled: bool, tail: str, where: str) -> None:
    """Refuse a cache whose entries mean something else than the loss's ``tail`` takes them for.

    Raises:
        UserError: begins with ``where``.
    """
    if sampled and tail != "sampled":
        raise UserError(
            f"{where}: distill.loss.tail = {tail} would take draws for a top K: set it to sampled, or the teacher's "
            "keep to top_k."
        )
    if not sampled and tail == "sampled":
        raise UserError(
            f"{where}: distill.loss.tail = sampled would take a top K for draws: set another tail (bucket is the "
            "default), or the teacher's keep to sampled or top_k_and_draws."
        )


class Sampler:
    """Draws for rows by number.

    Args:
        sampling: how many, and the seed.
        row_hashes: content hash of each row.
        mask_RS: True at the positions that are captured.
    """

    def __init__(self, sampling: Sampling, row_hashes: list[str], mask_RS: NDArray[np.bool_]) -> None:
        self._sampling, self._row_hashes, self._mask_RS = sampling, row_hashes, mask_RS

    def entries(self, hidden_ND: Tensor, head: Head, rows: range, logits_mib: int) -> tuple[Tensor, Tensor, Tensor]:
        """:func:`sampled_entries` of the captured positions of ``rows``, whose hidden states are given."""
        seq_len = self._mask_RS.shape[1]
        parts = [self._sampling.uniforms(self._row_hashes[row], seq_len)[self._mask_RS[row]] for row in rows]
        uniforms_NU = torch.from_numpy(np.concatenate(parts)).to(hidden_ND.device)
        return sampled_entries(hidden_ND, head, uniforms_NU, self._sampling, logits_mib)


def sampled_entries(
    hidden_ND: Tensor, head: Head, uniforms_NU: Tensor, sampling: Sampling, logits_mib: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Different tokens among the draws of each position, with the log of count / draws; before them the top K, if any.

    The softmax runs in fp32 over the whole unpadded vocabulary; what is drawn from it, in float64.

    Returns:
        int32 ids [N, K] and float16 log-weights [N, K] in nats, in order of falling weight, then of rising id; empty
        slots have id 0 and log-weight -inf. The float32 tail mass [N] is 0: the weights sum to 1. It is NaN where the
        logits have a NaN.
    """
    start, parts = 0, []
    for logits_CV in logits_chunks(hidden_ND, head, logits_mib):
        top_CK = top_ids(logits_CV, head, sampling.top_k)
        for z_CV, ids_CK in zip(float_pieces(logits_CV, head), pieces(logits_CV, top_CK), strict=True):
            probabilities_CV = torch.softmax(z_CV, -1, out=head.block("probabilities", len(z_CV), torch.float32))
            parts.append(_entries(probabilities_CV, ids_CK, uniforms_NU[start : start + len(z_CV)], sampling))
            start += len(z_CV)
    ids, log_weights, tails = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(log_weights), torch.cat(tails)


def _entries(
    probabilities_CV: Tensor, top_CK: Tensor, uniforms_CU: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """What is kept of a few positions, whose most probable ``top_k`` ids are known; the probabilities are used up."""
    bad_C = 0.0 * probabilities_CV[:, 0]  # 0, or NaN
    kept_CK = probabilities_CV.gather(1, top_CK)
    rest_CV = probabilities_CV.scatter_(1, top_CK, 0.0) if sampling.top_k else probabilities_CV
    ids_CU, counts_CU = merge(draw(rest_CV, uniforms_CU))
    log_weights_CU = sampling.log_weights().to(counts_CU.device)[counts_CU]
    if sampling.top_k:
        log_weights_CU = (log_weights_CU.float() + rest_CV.sum(1, keepdim=True).log()).half()
    ids_CM, log_weights_CM = torch.cat([top_CK, ids_CU], 1), torch.cat([kept_CK.log().half(), log_weights_CU], 1)
    log_weights_CM, order_CM = log_weights_CM.sort(dim=1, descending=True, stable=True)
    slots = sampling.slots(probabilities_CV.shape[1])
    ids_CM = ids_CM.gather(1, order_CM).masked_fill_(log_weights_CM == -torch.inf, 0)
    return ids_CM[:, :slots].int(), log_weights_CM[:, :slots], bad_C


def draw(probabilities_CV: Tensor, uniforms_CU: Tensor) -> Tensor:
    """Ids [C, U] int64, each drawn where its number falls in the cumulated probabilities.

    In two steps, first the group of columns and then the column in it: only the sums of groups are cumulated over the
    whole vocabulary, so that float64, which rare tokens need, costs neither time nor memory.
    """
    vocab_size, draws = probabilities_CV.shape[1], uniforms_CU.shape[1]
    width = max(1, min(_GROUP, vocab_size // draws))  # so that the second step looks at no more than V numbers
    whole = vocab_size // width
    whole_CGW = probabilities_CV[:, : whole * width].reshape(-1, whole, width)
    sums_CG = whole_CGW.sum(-1, dtype=torch.float64)
    rest_C1 = probabilities_CV[:, whole * width :].sum(-1, keepdim=True, dtype=torch.float64)
    cumulated_CG = torch.cat([torch.zeros_like(rest_C1), sums_CG, rest_C1], dim=1).cumsum(1)
    target_CU = uniforms_CU * cumulated_CG[:, -1:]
    group_CU = _find(cumulated_CG[:, 1:].contiguous(), target_CU)
    target_CU = target_CU - cumulated_CG.gather(1, group_CU)
    columns_CUW = group_CU[..., None] * width + torch.arange(width, device=group_CU.device)
    outside_CUW = columns_CUW >= vocab_size
    columns_CUW.clamp_(max=vocab_size - 1)
    inside_CUW = probabilities_CV.gather(1, columns_CUW.flatten(1)).view(columns_CUW.shape)
    cumulated_CUW = inside_CUW.masked_fill_(outside_CUW, 0.0).cumsum(-1, dtype=torch.float64)
    found_CU1 = _find(cumulated_CUW, target_CU[..., None])
    return columns_CUW.gather(-1, found_CU1).squeeze(-1)


def _find(cumulated_XM: Tensor, target_XU: Tensor) -> Tensor:
    """The first index whose cumulated weight exceeds the target: never one of weight 0, whatever was rounded."""
    below_all_X1 = torch.nextafter(cumulated_XM[..., -1:], torch.zeros_like(cumulated_XM[..., -1:]))
    found_XU = torch.searchsorted(cumulated_XM, torch.minimum(target_XU, below_all_X1), right=True)
    return found_XU.clamp_(max=cumulated_XM.shape[-1] - 1)  # NaN finds nothing


def merge(ids_CU: Tensor) -> tuple[Tensor, Tensor]:
    """Different ids [C, U] by falling count, then by rising id, and their counts [C, U]; zeros fill up."""
    ids_CU = ids_CU.sort(dim=1).values
    new_CU = torch.ones_like(ids_CU)
    new_CU[:, 1:] = (ids_CU[:, 1:] != ids_CU[:, :-1]).to(new_CU.dtype)
    slot_CU = new_CU.cumsum(1) - 1
    different_CU = torch.zeros_like(ids_CU).scatter_(1, slot_CU, ids_CU)
    counts_CU = torch.zeros_like(ids_CU).scatter_add_(1, slot_CU, torch.ones_like(ids_CU))
    counts_CU, order_CU = counts_CU.sort(dim=1, descending=True, stable=True)
    return different_CU.gather(1, order_CU), counts_CU
