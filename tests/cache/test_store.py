import os
import time
from pathlib import Path

import numpy as np
import pytest

from alambique.cache import store as store_module
from alambique.cache.codec import Entries
from alambique.cache.store import Kept, Store, plan_blocks
from alambique.core.errors import UserError

HASHES = [f"{row:064x}" for row in range(7)]
DEPENDS = {"identity": {"model": "m"}, "top_k": 2}


def entries(tokens: int = 6) -> Entries:
    ids = np.tile(np.array([3, 1], np.int32), (tokens, 1))
    logprobs = np.tile(np.array([-0.5, -1.5], np.float16), (tokens, 1))
    return Entries(ids, logprobs, np.full(tokens, 0.17, np.float32), np.array([3, 3]), 9)


KEPT = Kept("s" * 64, "exact", 2, 1.0)
MASK = np.ones((2, 3), np.bool_)


def test_blocks_cover_all_rows_and_are_named_by_what_they_depend_on() -> None:
    blocks = plan_blocks(HASHES, 3, DEPENDS)
    assert [list(block.rows) for block in blocks] == [[0, 1, 2], [3, 4, 5], [6]]
    grown = plan_blocks([*HASHES[:6], "f" * 64, "e" * 64], 3, DEPENDS)
    assert [a.name == b.name for a, b in zip(blocks, grown, strict=True)] == [True, True, False]
    other = plan_blocks(HASHES, 3, {**DEPENDS, "top_k": 3})
    assert not {block.name for block in blocks} & {block.name for block in other}


def test_a_finished_block_is_found_and_a_damaged_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = plan_blocks(HASHES[:2], 2, DEPENDS)[0]
    store = Store(tmp_path / "store")
    assert store.find(block) is None
    receipt = store.write(block, MASK, entries(), KEPT, seconds=1.5, peak_mib=10.0, rescored={})
    assert store.find(block) == receipt
    assert (receipt.tokens, receipt.seconds, receipt.bytes) == (6, 1.5, store.path(block.name).stat().st_size)
    assert capsys.readouterr().err == ""
    data = bytearray(store.path(block.name).read_bytes())
    data[-1] ^= 1
    store.path(block.name).write_bytes(data)
    assert store.find(block) is None
    warning = capsys.readouterr().err
    assert block.name in warning
    assert "(rows 0 to 1) is damaged and will be captured again" in warning


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"sha256": 3}'])
def test_a_damaged_receipt_is_no_receipt(tmp_path: Path, content: bytes) -> None:
    block = plan_blocks(HASHES[:2], 2, DEPENDS)[0]
    store = Store(tmp_path)
    store.write(block, MASK, entries(), KEPT, 1.0, 1.0, {})
    (tmp_path / f"{block.name}.json").write_bytes(content)
    assert store.find(block) is None


def test_a_shard_without_receipt_is_unfinished(tmp_path: Path) -> None:
    block = plan_blocks(HASHES[:2], 2, DEPENDS)[0]
    store = Store(tmp_path)
    store.write(block, MASK, entries(), KEPT, 1.0, 1.0, {})
    (tmp_path / f"{block.name}.json").unlink()
    assert store.find(block) is None


def test_scratch_of_killed_runs_goes_after_an_hour(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.xyz.part", tmp_path / ".b.xyz.part"
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 4000,) * 2)
    Store(tmp_path)
    assert not old.exists()
    assert new.exists()


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "write_shard", full)
    block = plan_blocks(HASHES[:2], 2, DEPENDS)[0]
    with pytest.raises(UserError, match=r"No space left on device\): free some space and run again, the blocks"):
        Store(tmp_path).write(block, MASK, entries(), KEPT, 1.0, 1.0, {})
    assert list(tmp_path.iterdir()) == []
