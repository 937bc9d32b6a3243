import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from alambique.cache import shards
from alambique.cache.codec import DamageError, Entries
from alambique.cache.shards import Block, Shard, crc32_row, write_shard

SEQ_LEN, TOP_K, VOCAB = 11, 4, 100  # 11 positions: the mask's last byte has unused bits


def make(path: Path) -> tuple[np.ndarray, Entries]:
    rng = np.random.default_rng(3)
    mask = rng.random((5, SEQ_LEN)) < 0.6
    mask[2], mask[4] = False, True
    counts = mask.sum(axis=1)
    tokens = int(counts.sum())
    ids = rng.permuted(np.tile(np.arange(VOCAB, dtype=np.int32), (tokens, 1)), axis=1)[:, :TOP_K].copy()
    logprobs = -np.sort(rng.exponential(3, (tokens, TOP_K)), axis=1).astype(np.float16)
    entries = Entries(ids, logprobs, rng.random(tokens, dtype=np.float32), counts, VOCAB)
    block = Block("ab" * 16, 10, tuple(f"{row:064x}" for row in range(5)))
    write_shard(path, block, mask, entries, "exact")
    return mask, entries


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    make(tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def test_rows_come_back_at_their_positions(tmp_path: Path) -> None:
    mask, entries = make(tmp_path / "x")
    shard = Shard(tmp_path / "x")
    assert shard.row_hashes == [f"{row:064x}" for row in range(5)]
    start = 0
    for row, (ids, logprobs) in enumerate(entries.rows()):
        got = np.zeros((SEQ_LEN, TOP_K), np.int32), np.full((SEQ_LEN, TOP_K), -np.inf, np.float16), np.ones(SEQ_LEN)
        shard.read_row(row, *got)
        assert np.array_equal(shard.mask_S(row), mask[row])
        assert np.array_equal(got[0][mask[row]], ids)
        assert np.array_equal(got[1][mask[row]], logprobs)
        assert np.array_equal(got[2][mask[row]], entries.tail_mass_N[start : start + len(ids)])
        assert (got[0][~mask[row]] == 0).all()
        assert np.isneginf(got[1][~mask[row]]).all()
        assert (got[2][~mask[row]] == 1).all()
        start += len(ids)


def test_the_documented_layout(shard: Path) -> None:
    """docs/cache-format.md, read with nothing of ours but the checksum's definition."""
    tensors = load_file(shard)
    with safe_open(shard, framework="numpy") as handle:
        metadata = handle.metadata()
    assert list(metadata) == ["alambique"]
    assert sorted(tensors) == sorted(
        [
            "row_hashes",
            "mask",
            "row_crc32",
            "tail_mass",
            "ids",
            "ids_offsets",
            "logprobs",
            "logprobs_offsets",
            "id_classes",
        ]
    )
    facts = json.loads(metadata["alambique"])
    assert (facts["num_rows"], facts["seq_len"], facts["top_k"], facts["version"]) == (5, SEQ_LEN, TOP_K, 1)
    offsets = {name: tensors[f"{name}_offsets"] for name in ("ids", "logprobs")}
    assert tensors["ids"].size == offsets["ids"][-1]
    first = [tensors[name][: offsets[name][1]].tobytes() for name in ("ids", "logprobs")]
    count = int(np.unpackbits(tensors["mask"][0], bitorder="little").sum())
    assert crc32_row(first, tensors["tail_mass"][:count]) == tensors["row_crc32"][0]


def test_the_same_block_gives_the_same_bytes(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def rewrite(path: Path, change: dict[str, np.ndarray], facts: dict[str, object] | None = None) -> None:
    tensors = load_file(path)
    with safe_open(path, framework="numpy") as handle:
        old = json.loads(handle.metadata()["alambique"])
    merged = {name: array for name, array in {**tensors, **change}.items() if array is not None}
    save_file(merged, path, {"alambique": json.dumps({**old, **(facts or {})})})


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"format": "other"}, "format = 'other'"),
        ({"version": 2}, "its format version 2 is not 1"),
        ({"codec_version": 9}, "codec version 9 is unknown"),
        ({"top_k": 1 << 40}, "less than or equal to 65536"),
        ({"vocab_size": 1 << 60}, "less than or equal to"),
        ({"seq_len": 17}, r"mask is uint8 \[5, 2\]"),
        ({"seq_len": 10}, "its index fails its checksum"),
        ({"num_rows": 6}, "row_hashes is"),
        ({"num_tokens": 3}, "tail_mass is"),
        ({"index_crc32": 1}, "its index fails its checksum"),
        ({"surprise": 1}, "unknown key surprise"),
    ],
)
def test_wrong_facts_are_damage(shard: Path, facts: dict[str, object], message: str) -> None:
    rewrite(shard, {}, facts)
    with pytest.raises(DamageError, match=message):
        Shard(shard)


@pytest.mark.parametrize("name", ["row_hashes", "mask", "row_crc32", "ids_offsets", "logprobs_offsets", "id_classes"])
def test_an_index_that_changed_is_damage(shard: Path, name: str) -> None:
    array = load_file(shard)[name].copy()
    array.reshape(-1)[0] ^= 1
    rewrite(shard, {name: array})
    with pytest.raises(DamageError, match="its index fails its checksum"):
        Shard(shard)


@pytest.mark.parametrize(
    ("facts", "change", "message"),
    [
        ({"seq_len": 10}, {}, "its mask is longer than its rows"),
        ({}, {"mask": np.zeros((5, 2), np.uint8)}, "its mask and its tail masses differ in number"),
        ({}, {"ids_offsets": np.array([0, 9, 3, 9, 9, 9])}, "the offsets of its ids are out of order"),
        ({}, {"logprobs_offsets": np.array([0, 0, 0, 0, 0, 1 << 40])}, "the offsets of its logprobs are out of order"),
        ({}, {"logprobs_offsets": np.array([-9, 0, 0, 0, 0, 9])}, "the offsets of its logprobs are out of order"),
    ],
)
def test_a_forged_checksum_helps_no_one(
    shard: Path, facts: dict[str, object], change: dict[str, np.ndarray], message: str
) -> None:
    rewrite(shard, change, facts)
    tensors = {name: t for name, t in load_file(shard).items() if name not in ("ids", "logprobs", "tail_mass")}
    with safe_open(shard, framework="numpy") as handle:
        stated = json.loads(handle.metadata()["alambique"])
    rewrite(shard, {}, {"index_crc32": shards._crc32_index(stated, tensors)})
    with pytest.raises(DamageError, match=message):
        Shard(shard)


def test_a_missing_or_foreign_tensor_is_damage(shard: Path) -> None:
    rewrite(shard, {"extra": np.zeros(1)})
    with pytest.raises(DamageError, match="it holds"):
        Shard(shard)


def test_no_metadata_and_no_safetensors_are_damage(tmp_path: Path) -> None:
    save_file({"ids": np.zeros(3)}, tmp_path / "a")
    with pytest.raises(DamageError, match="it has no alambique metadata"):
        Shard(tmp_path / "a")
    save_file({"ids": np.zeros(3)}, tmp_path / "a", {"alambique": "{"})
    with pytest.raises(DamageError, match="its metadata is not JSON"):
        Shard(tmp_path / "a")
    save_file({"ids": np.zeros(3)}, tmp_path / "a", {"alambique": "[]"})
    with pytest.raises(DamageError, match="its metadata is not a JSON object"):
        Shard(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"\xff" * 64)
    with pytest.raises(DamageError, match="it is not a safetensors file"):
        Shard(tmp_path / "b")
