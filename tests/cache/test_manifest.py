import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alambique.cache.manifest import QUANTILES, load_manifest, rows_sha256, tail_mass_statistics
from alambique.core.errors import UserError
from alambique.core.files import sha256_bytes


def change(captured: Path, target: Path, **fields: Any) -> Path:
    manifest = json.loads((captured / "manifest.json").read_bytes())
    for name, value in fields.items():
        if value is None:
            del manifest[name]
        else:
            manifest[name] = value
    target.mkdir()
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def test_a_real_manifest_parses(captured: Path) -> None:
    raw, manifest = load_manifest(captured)
    assert raw["num_tokens"] == manifest.num_tokens == 279
    assert manifest.lossless
    assert set(manifest.tail_mass.quantiles) == {str(q) for q in QUANTILES}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 2}, "has format version 2, but this alambique reads 1: use the version that wrote it"),
        ({"format": "zip"}, "format = 'zip'"),
        ({"top_k": None}, "top_k is missing"),
        ({"top_k": 0}, "top_k = 0 should be greater than or equal to 1"),
        ({"top_k": 301}, "top_k 301 exceeds vocab_size 300"),
        ({"vocab_size": 1 << 62}, "vocab_size"),
        ({"num_rows": 15}, "its shards hold 14 rows, but num_rows is 15"),
        ({"num_tokens": 1}, "its shards hold 279 tokens, but num_tokens is 1"),
        ({"shards": []}, "shards"),
        ({"files": {}}, "`shards` and `files` name different files"),
        ({"files": {"../x": {"sha256": "0" * 64, "bytes": 1}}}, "`shards` and `files` name different files"),
        ({"surprise": 1}, "unknown key surprise"),
    ],
)
def test_every_lie_is_one_sentence_with_a_remedy(
    captured: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_manifest(change(captured, tmp_path / "cache", **fields))
    assert message in str(caught.value)
    assert "apture it again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shards_out_of_order(captured: Path, tmp_path: Path) -> None:
    shards = json.loads((captured / "manifest.json").read_bytes())["shards"]
    with pytest.raises(UserError, match=r"starts at row 4, not 0\."):
        load_manifest(change(captured, tmp_path / "cache", shards=shards[1:]))


def test_a_file_name_cannot_leave_the_folder(captured: Path, tmp_path: Path) -> None:
    shards = json.loads((captured / "manifest.json").read_bytes())["shards"]
    shards[0]["file"] = "../../secret.safetensors"
    with pytest.raises(UserError, match="file"):
        load_manifest(change(captured, tmp_path / "cache", shards=shards))


def test_missing_or_broken_manifest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest\.json does not exist\. Capture it again"):
        load_manifest(tmp_path)
    for content in ("{", "[]", '{"files": 3}', '{"files": {}}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(UserError, match="Capture it again"):
            load_manifest(tmp_path)


def test_rows_hash_is_over_bytes() -> None:
    assert rows_sha256(["00" * 32, "ff" * 32]) == sha256_bytes(b"\0" * 32 + b"\xff" * 32)


def test_statistics_across_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    tails = np.random.default_rng(0).random(1000, dtype=np.float32)
    parts = np.split(tails, [3, 3, 500])
    whole = tail_mass_statistics(parts, 1000)
    assert whole["mean"] == pytest.approx(float(tails.mean(dtype=np.float64)), rel=1e-12)
    assert whole["quantiles"]["0.5"] == pytest.approx(float(np.quantile(tails, 0.5)), rel=1e-6)
    monkeypatch.setattr("alambique.cache.manifest._SAMPLED_TOKENS", 150)  # every seventh token
    sampled = tail_mass_statistics(parts, 1000)
    assert sampled["quantiles"]["0.5"] == pytest.approx(float(np.quantile(tails[::7], 0.5)), rel=1e-6)
