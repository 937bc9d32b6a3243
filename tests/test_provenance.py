from pathlib import Path

import pytest

from alambique.core.errors import UserError
from alambique.core.files import read_manifest, write_manifest
from alambique.provenance import cache_contents, lineage
from tests.tiny_results import CACHE_MANIFEST, write_artifacts


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    write_artifacts(tmp_path)
    return tmp_path


def test_the_parts_of_a_cache_add_up_to_its_files(artifacts: Path) -> None:
    folder = artifacts / "teacher/t"
    contents = cache_contents(folder, "")
    parts = contents["bytes_per_token"]
    assert parts["ids"] == (1200 + 200 + 32) / 10
    assert parts["logprobs"] == (700 + 32) / 10
    assert parts["tail mass"] == 4
    size = sum(file["bytes"] for file in read_manifest(folder, "")["files"].values())
    assert sum(parts.values()) == pytest.approx(size / 10)
    assert contents["mass_kept"] == pytest.approx(0.908)
    assert contents["draws"] is None


def test_draws_cut_nothing_off(artifacts: Path) -> None:
    folder = artifacts / "teacher/t"
    write_manifest(folder, CACHE_MANIFEST | {"sampling": {"draws": 50, "seed": 0}})
    contents = cache_contents(folder, "")
    assert contents["draws"] == 50
    assert contents["mass_kept"] is None


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", None])
def test_a_damaged_shard_is_named(damage: bytes | None, artifacts: Path) -> None:
    shard = next((artifacts / "teacher/t").glob("*.safetensors"))
    shard.unlink()
    if damage is not None:
        shard.write_bytes(damage)
    with pytest.raises(UserError, match=r"0\.safetensors can't be read .* Run it again"):
        cache_contents(artifacts / "teacher/t", "Run it again.")


def test_lineage_is_plain_text(artifacts: Path) -> None:
    found = lineage(artifacts / "distill/p", "")
    assert found["from"]["corpus"] == "file:text (sha256 5)"
    assert found["precision"] == "bf16"
    with pytest.raises(UserError, match=r"manifest\.json does not exist"):
        lineage(artifacts / "distill/q", "")
