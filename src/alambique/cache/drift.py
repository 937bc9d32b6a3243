"""How far two scorings of the same positions lie apart, and which rows a capture scores twice to know its own drift.

The two may keep different ids. What both know exactly is the probability of every id that both keep and, as one
bucket, of all the rest; the KL between these merged distributions is a lower bound of the KL between the whole ones,
and needs no guess about what either left out. ``shared_mass`` tells how much the bucket hides.

Dimensions: N positions, K and L entries of the two.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from alambique.cache.codec import Arrays
from alambique.core.params import Config

# assumption: a row alone costs up to forty times its share of a full batch (a small model on a large GPU), so that
# this stays below 1 % of a capture.
_ONE_ROW_IN = 4096
_LEAST_REST = 2.0**-20  # assumption: a tail mass is one minus a sum of fp32 numbers, right to about 1e-6


class Drift(Config):
    """How far a second scoring of some positions lies from the first.

    Attributes:
        rows, positions: what was compared.
        mean_kl_nats, max_kl_nats: KL(first ‖ second) of a position, over the ids that both keep and one bucket for
            all the rest: at most the KL of the whole distributions.
        max_logprob_difference_nats: over the ids that both keep.
        same_top1: share of positions whose most probable id is the same.
        shared_mass: mean probability, by the first, of the ids that both keep.
    """

    rows: int = Field(ge=1)
    positions: int = Field(ge=1)
    mean_kl_nats: float
    max_kl_nats: float
    max_logprob_difference_nats: float
    same_top1: float
    shared_mass: float


def scored_twice(row_hashes: Sequence[str], has_target_R: Iterable[bool]) -> set[str]:
    """The hashes of rows to score a second time: the first row's, and about one in 4,096, chosen by content.

    Rows without a target don't count.

    Whether a row is in the sample doesn't depend on the others but for the first, so a data set that grows or loses
    its end keeps it.
    """
    hashes = [digest for digest, has_target in zip(row_hashes, has_target_R, strict=True) if has_target]
    return {h for n, h in enumerate(hashes) if n == 0 or int(h[:8], 16) % _ONE_ROW_IN == 0}


def drift(first: Arrays, second: Arrays) -> Drift:
    """Compare two scorings of the same positions of one row (at least one position).

    Each term is p·(log p - log q) - p + q, whose sum is a KL that is never negative though rounded probabilities
    don't quite sum to one.
    """
    (ids_NK, logprobs_NK, _), (ids_NL, logprobs_NL, _) = first, second
    num_positions = len(ids_NK)
    in_first, in_second = _common(ids_NK, logprobs_NK, ids_NL, logprobs_NL)
    log_p = logprobs_NK.reshape(-1)[in_first].astype(np.float64)
    log_q = logprobs_NL.reshape(-1)[in_second].astype(np.float64)
    rest_p_N, rest_q_N = _rest(first, in_first), _rest(second, in_second)
    shared_N = np.bincount(in_first // ids_NK.shape[1], _kl_terms(log_p, log_q), num_positions)
    kl_N = shared_N + _kl_terms(np.log(rest_p_N), np.log(rest_q_N))
    return Drift(
        rows=1,
        positions=num_positions,
        mean_kl_nats=float(kl_N.mean()),
        max_kl_nats=float(kl_N.max()),
        max_logprob_difference_nats=float(np.abs(log_p - log_q).max(initial=0.0)),
        same_top1=float((ids_NK[:, 0] == ids_NL[:, 0]).mean()),
        shared_mass=float(np.exp(log_p).sum() / num_positions),
    )


def merged(parts: Sequence[Drift]) -> Drift:
    """The drift over the positions of all ``parts`` (at least one)."""
    positions = sum(part.positions for part in parts)

    def mean(name: str) -> float:
        return float(sum(getattr(part, name) * part.positions for part in parts)) / positions

    return Drift(
        rows=sum(part.rows for part in parts),
        positions=positions,
        mean_kl_nats=mean("mean_kl_nats"),
        max_kl_nats=max(part.max_kl_nats for part in parts),
        max_logprob_difference_nats=max(part.max_logprob_difference_nats for part in parts),
        same_top1=mean("same_top1"),
        shared_mass=mean("shared_mass"),
    )


def _common(
    ids_NK: NDArray[Any], logprobs_NK: NDArray[Any], ids_NL: NDArray[Any], logprobs_NL: NDArray[Any]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where each id that both keep at a position is, as flat indices into the first and into the second."""
    num_ids = 1 + int(max(ids_NK.max(), ids_NL.max()))
    flat, keys = [], []
    for ids, logprobs in ((ids_NK, logprobs_NK), (ids_NL, logprobs_NL)):
        filled = np.flatnonzero(~np.isneginf(logprobs))
        flat.append(filled)
        keys.append(filled // ids.shape[1] * num_ids + ids.reshape(-1)[filled])
    _, at_first, at_second = np.intersect1d(*keys, return_indices=True)
    return flat[0][at_first], flat[1][at_second]


def _rest(arrays: Arrays, common: NDArray[np.intp]) -> NDArray[np.float64]:
    """The mass of everything but the common ids: the tail and the entries that only this one keeps."""
    _, logprobs_NK, tail_mass_N = arrays
    mass_NK: NDArray[np.float64] = np.exp(logprobs_NK.astype(np.float64))
    mass_NK.reshape(-1)[common] = 0.0
    rest_N: NDArray[np.float64] = np.maximum(tail_mass_N + mass_NK.sum(axis=1), _LEAST_REST)
    return rest_N


def _kl_terms(log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float64]:
    p: NDArray[np.float64] = np.exp(log_p)
    terms: NDArray[np.float64] = p * (log_p - log_q) - p + np.exp(log_q)
    return terms
