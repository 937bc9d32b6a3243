"""The contract that every codec found must keep: round trip, order, declared = stored bytes, damage refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alambique.cache.codec import Codec, DamageError, Encoded, Entries, codec_names, find_codec
from alambique.core.errors import UserError


def make_entries(counts: list[int], top_k: int, vocab_size: int, seed: int = 0) -> Entries:
    """Entries as a capture makes them: falling logprobs, distinct ids that follow Zipf's law."""
    rng = np.random.default_rng(seed)
    tokens = sum(counts)
    weights = 1.0 / np.arange(1, vocab_size + 1)
    noise = rng.gumbel(size=(tokens, vocab_size)) + np.log(rng.permutation(weights))
    ids = np.argsort(-noise, axis=1)[:, :top_k].astype(np.int32)
    logprobs = -np.sort(rng.exponential(4.0, size=(tokens, top_k)), axis=1) - 0.1
    tails = rng.random(tokens, dtype=np.float32)
    return Entries(ids, logprobs.astype(np.float16), tails, np.array(counts, np.int64), vocab_size)


def decode(codec: Codec, encoded: Encoded, entries: Entries) -> tuple[np.ndarray, np.ndarray]:
    state = codec.prepare(encoded.tables, entries.vocab_size)
    parts = []
    for row, count in enumerate(entries.counts_R):
        shape = (int(count), entries.ids_NK.shape[1])
        ids, logprobs = np.full(shape, -7, np.int32), np.full(shape, np.nan, np.float16)
        codec.decode(state, {stream: ranges[row] for stream, ranges in encoded.streams.items()}, ids, logprobs)
        parts.append((ids, logprobs))
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([logprobs for _, logprobs in parts])


@pytest.fixture(params=codec_names())
def codec(request: pytest.FixtureRequest) -> Codec:
    return find_codec(request.param, "test")


def test_round_trip_keeps_ids_and_bounds_the_error(codec: Codec) -> None:
    entries = make_entries([5, 0, 40, 1], top_k=16, vocab_size=500)
    ids, logprobs = decode(codec, codec.encode(entries), entries)
    assert np.array_equal(ids, entries.ids_NK)
    if codec.LOSSLESS:
        assert np.array_equal(logprobs.view(np.uint16), entries.logprobs_NK.view(np.uint16))
    else:
        true = entries.logprobs_NK.astype(np.float64)
        span = true.max(axis=1, keepdims=True) - true.min(axis=1, keepdims=True)
        assert (np.abs(logprobs - true) <= span / 500 + 2**-10 * np.abs(true)).all(), "8 bits of a position's span"
        assert (np.diff(logprobs.astype(np.float32), axis=1) <= 0).all(), "order is kept"


def test_encoding_is_deterministic_and_declares_its_streams(codec: Codec) -> None:
    entries = make_entries([3, 9], top_k=4, vocab_size=64)
    first, second = codec.encode(entries), codec.encode(entries)
    assert first == second
    assert tuple(sorted(first.streams)) == tuple(sorted(codec.STREAMS))
    assert tuple(sorted(first.tables)) == tuple(sorted(codec.TABLES))
    assert all(len(ranges) == 2 for ranges in first.streams.values())


@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any),
    top_k=st.integers(1, 9),
    vocab_size=st.sampled_from([9, 255, 1000]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape_round_trips(counts: list[int], top_k: int, vocab_size: int, seed: int) -> None:
    entries = make_entries(counts, top_k, vocab_size, seed)
    for name in codec_names():
        codec = find_codec(name, "test")
        ids, logprobs = decode(codec, codec.encode(entries), entries)
        assert np.array_equal(ids, entries.ids_NK), name
        assert not codec.LOSSLESS or np.array_equal(logprobs, entries.logprobs_NK), name


@pytest.mark.parametrize("vocab_size", [49_152, 128_256, 201_088, (1 << 18) + 1, 1 << 20])
def test_wide_vocabularies(codec: Codec, vocab_size: int) -> None:
    ids = np.array([[vocab_size - 1, 0], [vocab_size // 2, vocab_size - 1]], np.int32)
    logprobs = np.array([[-0.5, -1.0], [-0.0, -np.inf]], np.float16)
    entries = Entries(ids, logprobs, np.zeros(2, np.float32), np.array([2]), vocab_size)
    decoded, decoded_logprobs = decode(codec, codec.encode(entries), entries)
    filled = np.isfinite(logprobs)
    assert np.array_equal(decoded[filled], ids[filled])
    assert np.array_equal(np.isfinite(decoded_logprobs), filled), "an empty slot stays empty"


def test_damaged_ranges_are_refused_or_decode_to_valid_ids(codec: Codec) -> None:
    entries = make_entries([20], top_k=8, vocab_size=300)
    encoded = codec.encode(entries)
    state = codec.prepare(encoded.tables, 300)
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        ranges = {}
        for stream, (data,) in encoded.streams.items():
            damaged = bytearray(data)
            damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
            ranges[stream] = bytes(damaged[: rng.integers(1, len(damaged) + 1)] if rng.random() < 0.3 else damaged)
        ids, logprobs = np.zeros((20, 8), np.int32), np.zeros((20, 8), np.float16)
        try:
            codec.decode(state, ranges, ids, logprobs)
        except DamageError:
            refused += 1
        else:
            assert ids.min() >= 0
            assert ids.max() < 300
    assert refused > 100


def test_an_unknown_codec_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"teacher\.codec: there is no codec exat; did you mean exact\?"):
        find_codec("exat", "teacher.codec")
