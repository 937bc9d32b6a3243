import json
from pathlib import Path

import pytest
import torch

from alambique.core.errors import UserError
from alambique.core.files import write_json, write_manifest
from alambique.data.dataset import PackedRows, PreparedData


def rows(count: int = 3, seq_len: int = 8) -> PackedRows:
    documents_RS = torch.zeros(count, seq_len, dtype=torch.int32)
    documents_RS[:, 6:] = -1
    mask_RS = torch.ones(count, seq_len, dtype=torch.bool)
    mask_RS[:, 5:] = False
    return PackedRows(torch.arange(count * seq_len, dtype=torch.int32).reshape(count, seq_len), documents_RS, mask_RS)


def write_prepared(folder: Path) -> Path:
    folder.mkdir()
    splits = {"train": rows(3), "valid": rows(2)}
    for name, split in splits.items():
        split.save(folder / f"{name}.safetensors")
    facts = {name: {"rows": s.num_rows, "target_tokens": s.num_target_tokens} for name, s in splits.items()}
    write_manifest(folder, {"splits": facts})
    return folder


def test_counts_and_round_trip(tmp_path: Path) -> None:
    packed = rows()
    assert (packed.num_rows, packed.seq_len, packed.num_tokens, packed.num_target_tokens) == (3, 8, 18, 15)
    packed.save(tmp_path / "a")
    packed.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = PackedRows.load(tmp_path / "a")
    for name in ("input_ids_RS", "document_ids_RS", "loss_mask_RS"):
        assert torch.equal(getattr(loaded, name), getattr(packed, name))
        assert getattr(loaded, name).dtype == getattr(packed, name).dtype


def test_row_hashes_see_ids_documents_and_mask_and_nothing_else() -> None:
    base = rows()
    hashes = base.row_hashes()
    assert len(set(hashes)) == 3
    assert rows(2).row_hashes() == hashes[:2]  # independent of the other rows
    for name, value in (("input_ids_RS", 99), ("document_ids_RS", 1), ("loss_mask_RS", False)):
        tensors = {n: getattr(base, n).clone() for n in ("input_ids_RS", "document_ids_RS", "loss_mask_RS")}
        tensors[name][1, 2] = value
        changed = PackedRows(**tensors).row_hashes()
        assert [old == new for old, new in zip(hashes, changed, strict=True)] == [True, False, True]


def test_wrong_dtypes_and_shapes_are_refused() -> None:
    base = rows()
    with pytest.raises(ValueError, match=r"input_ids_RS must be torch.int32 \[rows, seq_len\], not torch.int64"):
        PackedRows(base.input_ids_RS.long(), base.document_ids_RS, base.loss_mask_RS)
    with pytest.raises(ValueError, match=r"loss_mask_RS must be"):
        PackedRows(base.input_ids_RS, base.document_ids_RS, base.loss_mask_RS[:, 1:])


def test_prepared_data_opens(tmp_path: Path) -> None:
    data = PreparedData.open(write_prepared(tmp_path / "p"))
    assert (data.train.num_rows, data.valid.num_rows) == (3, 2)
    assert data.manifest["splits"]["train"]["target_tokens"] == 15


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path / "p")
    path = folder / "valid.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"valid.safetensors differs from the sha256 in its manifest, so it is damaged"):
        PreparedData.open(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"valid.safetensors is missing. Run the prepare stage again"):
        PreparedData.open(folder)


def test_a_manifest_that_contradicts_the_rows_is_refused(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path / "p")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["train"]["rows"] = 4
    write_json(folder / "manifest.json", manifest)
    with pytest.raises(UserError, match=r'the train split holds \{"rows": 3, .*recorded .*4'):
        PreparedData.open(folder)


@pytest.mark.parametrize("content", [b"", b"garbage" * 10])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match="is not a file of packed rows"):
        PackedRows.load(tmp_path / "x")


def test_no_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest.json does not exist. Run the prepare stage again"):
        PreparedData.open(tmp_path)
