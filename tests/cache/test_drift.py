import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alambique.cache.codec import Arrays
from alambique.cache.drift import _LEAST_REST, Drift, drift, merged, scored_twice


def kept(logits_NV: np.ndarray, top_k: int) -> Arrays:
    """What a capture keeps of whole distributions."""
    logprobs_NV = logits_NV - np.log(np.exp(logits_NV).sum(1, keepdims=True))
    ids_NK = np.argsort(-logprobs_NV, axis=1, kind="stable")[:, :top_k]
    logprobs_NK = np.take_along_axis(logprobs_NV, ids_NK, 1)
    tail_mass_N = np.clip(1 - np.exp(logprobs_NK).sum(1), 0, 1)
    return ids_NK.astype(np.int32), logprobs_NK.astype(np.float16), tail_mass_N.astype(np.float32)


def whole_kl(first_NV: np.ndarray, second_NV: np.ndarray) -> np.ndarray:
    log_p, log_q = (logits - np.log(np.exp(logits).sum(1, keepdims=True)) for logits in (first_NV, second_NV))
    return (np.exp(log_p) * (log_p - log_q)).sum(1)


def two_logits(seed: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    first_NV = 2 * generator.standard_normal((9, 40))
    return first_NV, first_NV + noise * generator.standard_normal((9, 40))


def test_equal_scorings_do_not_differ() -> None:
    arrays = kept(two_logits(0, 0)[0], 8)
    found = drift(arrays, arrays)
    assert (found.rows, found.positions, found.same_top1) == (1, 9, 1.0)
    assert found.mean_kl_nats == found.max_kl_nats == found.max_logprob_difference_nats == 0.0
    assert found.shared_mass == pytest.approx(float(1 - arrays[2].mean()), abs=1e-3)


def test_against_the_merged_distributions_by_hand() -> None:
    first = (np.array([[4, 1, 7]], np.int32), np.log([[0.5, 0.25, 0.125]]).astype(np.float16), np.float32([0.125]))
    second = (np.array([[1, 4]], np.int32), np.log([[0.5, 0.25]]).astype(np.float16), np.float32([0.25]))
    found = drift(first, second)
    expected = 0.5 * np.log(0.5 / 0.25) + 0.25 * np.log(0.25 / 0.5)  # and the rest, 0.25 on both sides
    assert found.mean_kl_nats == found.max_kl_nats == pytest.approx(expected, abs=1e-3)
    assert found.max_logprob_difference_nats == pytest.approx(np.log(2), abs=1e-3)
    assert (found.same_top1, found.shared_mass) == (0.0, pytest.approx(0.75, abs=1e-3))


def test_nearly_all_of_the_kl_shows_when_most_mass_is_shared() -> None:
    first_NV, second_NV = two_logits(3, 0.05)
    whole_N, found = whole_kl(first_NV, second_NV), drift(kept(first_NV, 30), kept(second_NV, 30))
    assert found.shared_mass > 0.97
    assert found.mean_kl_nats == pytest.approx(float(whole_N.mean()), rel=0.1)
    assert found.max_kl_nats == pytest.approx(float(whole_N.max()), rel=0.1)


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 40), st.integers(1, 40), st.floats(0, 3))
def test_never_negative_and_never_above_the_whole(seed: int, top_k: int, top_l: int, noise: float) -> None:
    first_NV, second_NV = two_logits(seed, noise)
    found = drift(kept(first_NV, top_k), kept(second_NV, top_l))
    assert 0 <= found.mean_kl_nats <= float(whole_kl(first_NV, second_NV).mean()) * 1.01 + 1e-4
    assert 0 <= found.shared_mass <= 1.001


def test_nothing_in_common_is_told_by_mass_and_top1() -> None:
    first = (np.array([[1]], np.int32), np.array([[-0.1]], np.float16), np.float32([0.1]))
    second = (np.array([[2]], np.int32), np.array([[-0.1]], np.float16), np.float32([0.1]))
    found = drift(first, second)
    assert (found.shared_mass, found.same_top1, found.max_logprob_difference_nats) == (0.0, 0.0, 0.0)
    assert found.mean_kl_nats == pytest.approx(0, abs=1e-6)


def test_a_tail_of_zero_is_taken_for_rounding() -> None:
    first = (np.array([[1]], np.int32), np.array([[-0.7]], np.float16), np.float32([0.5]))
    second = (np.array([[1]], np.int32), np.array([[0.0]], np.float16), np.float32([0.0]))
    expected = 0.5 * -0.7 + 0.5 * np.log(0.5 / _LEAST_REST)
    assert drift(first, second).mean_kl_nats == pytest.approx(expected, rel=1e-2)


def test_empty_slots_count_for_nothing() -> None:
    first = (np.array([[3, 0]], np.int32), np.array([[-0.1, -np.inf]], np.float16), np.float32([0.1]))
    second = (np.array([[3, 0]], np.int32), np.array([[-0.1, -3.0]], np.float16), np.float32([0.05]))
    found = drift(first, second)
    assert found.max_logprob_difference_nats == 0.0
    assert found.mean_kl_nats == pytest.approx(0, abs=1e-5)  # id 0 belongs to the rest on both sides


def test_merged_weighs_by_positions() -> None:
    fields = tuple(Drift.model_fields)
    one = Drift(**dict(zip(fields, (1, 3, 0.125, 0.25, 2.0, 1.0, 0.75), strict=True)))
    two = Drift(**dict(zip(fields, (1, 1, 0.5, 0.5, 1.0, 0.0, 0.5), strict=True)))
    found = merged([one, two])
    assert (found.rows, found.positions, found.max_kl_nats, found.max_logprob_difference_nats) == (2, 4, 0.5, 2)
    assert (found.mean_kl_nats, found.same_top1, found.shared_mass) == (0.21875, 0.75, 0.6875)
    assert merged([one]) == one


def test_few_rows_are_scored_twice_and_growing_keeps_them() -> None:
    hashes = [hashlib.sha256(str(row).encode()).hexdigest() for row in range(20_000)]
    samples = [scored_twice(hashes[:count], [True] * count) for count in (1, 128, 5_000, 20_000)]
    assert samples[0] == samples[1] == {hashes[0]}
    assert 2 <= len(samples[3]) <= 12
    for small, large in pairwise(samples):
        assert small <= large
    assert scored_twice(hashes[100:], [True] * 19_900) - {hashes[100]} == samples[3] - {hashes[0]}
    assert scored_twice(hashes[:3], [False, True, True]) == {hashes[1]}  # padding only says nothing of drift
    assert scored_twice([], []) == set()
