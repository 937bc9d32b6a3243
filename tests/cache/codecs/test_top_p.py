import numpy as np
import pytest

from alambique.cache.codec import DamageError, Entries
from alambique.cache.codecs import exact, top_p
from alambique.cache.pco import PLAIN, compress

NONE = -np.inf


def make(logprobs: list[list[float]], counts: list[int]) -> Entries:
    array = np.array(logprobs, np.float16)
    ids = np.arange(array.size, dtype=np.int32).reshape(array.shape) + 5
    return Entries(ids, array, np.zeros(len(array), np.float32), np.array(counts), 100)


def test_only_filled_slots_are_stored_and_come_back() -> None:
    entries = make([[-0.1, NONE, NONE], [-0.5, -1.0, -1.5], [NONE, NONE, NONE], [-0.2, -2.0, NONE]], [1, 0, 3])
    encoded = top_p.encode(entries)
    state = top_p.prepare(encoded.tables, 100)
    rows = []
    for row, count in enumerate(entries.counts_R):
        ids, logprobs = np.full((count, 3), 9, np.int32), np.zeros((count, 3), np.float16)
        top_p.decode(state, {name: ranges[row] for name, ranges in encoded.streams.items()}, ids, logprobs)
        rows.append((ids, logprobs))
    ids, logprobs = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    assert np.array_equal(logprobs, entries.logprobs_NK)
    assert ids.tolist() == [[5, 0, 0], [8, 9, 10], [0, 0, 0], [14, 15, 0]]


def test_it_is_smaller_than_exact_when_slots_are_empty() -> None:
    rng = np.random.default_rng(0)
    logprobs = -np.sort(rng.exponential(3, (300, 60)), axis=1)
    logprobs[np.arange(60) >= rng.integers(1, 30, 300)[:, None]] = NONE
    ids = rng.integers(0, 5000, (300, 60)).astype(np.int32)
    entries = Entries(ids, logprobs.astype(np.float16), np.zeros(300, np.float32), np.array([300]), 5000)

    def size(codec: object) -> int:
        return sum(len(ranges[0]) for ranges in codec.encode(entries).streams.values())

    assert size(top_p) < 0.5 * size(exact)


def test_an_empty_slot_before_a_filled_one_is_refused() -> None:
    with pytest.raises(ValueError, match="an empty slot stands before a filled one"):
        top_p.encode(make([[NONE, -1.0]], [1]))


def test_a_count_above_the_slots_is_damage() -> None:
    ranges = {"counts": compress(np.array([3], np.uint32), PLAIN), "ids": b"", "logprobs": b""}
    with pytest.raises(DamageError, match="a position has more entries than slots"):
        top_p.decode(np.arange(3, dtype=np.int32), ranges, np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float16))
