import numpy as np
import pytest

from alambique.cache.codec import DamageError, Entries
from alambique.cache.codecs import exact
from alambique.cache.pco import PLAIN, compress


def test_classes_are_bit_lengths_of_counts_and_ranks_invert() -> None:
    ids = np.array([[5, 1], [5, 1], [5, 1], [5, 2], [0, 2]], np.int32)
    classes, ranks = exact.classify(ids, 7)
    assert classes.tolist() == [1, 2, 2, 0, 0, 3, 0]  # counts 1 3 2 0 0 4 0
    assert exact.ids_by_rank(classes).tolist() == [5, 1, 2, 0, 3, 4, 6]
    assert exact.ids_by_rank(classes)[ranks].tolist() == list(range(7))


def test_every_fp16_value_survives_bit_for_bit() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 64)
    entries = Entries(
        np.zeros(bits.shape, np.int32), bits.view(np.float16), np.zeros(len(bits), np.float32), np.array([len(bits)]), 3
    )
    encoded = exact.encode(entries)
    ids, logprobs = np.empty(bits.shape, np.int32), np.empty(bits.shape, np.float16)
    exact.decode(
        exact.prepare(encoded.tables, 3), {name: ranges[0] for name, ranges in encoded.streams.items()}, ids, logprobs
    )
    assert np.array_equal(logprobs.view(np.uint16), bits)


def test_a_rank_outside_the_vocabulary_is_damage() -> None:
    data = compress(np.array([4], np.uint32), PLAIN)
    with pytest.raises(DamageError, match="a rank lies outside the vocabulary"):
        exact.decode_ids(np.arange(4, dtype=np.int32), data, np.zeros((1, 1), np.int32))
