"""Rows of an earlier capture serve another one without the teacher."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from alambique.cache.donors import cut
from alambique.cache.reader import TeacherCache

IDS = np.array([[7, 3, 9], [1, 2, 0]], np.int32)
LOGPROBS = np.array([[-0.5, -1.5, -3.0], [-0.1, -4.0, -np.inf]], np.float16)
TAILS = np.array([0.12, 0.07], np.float32)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_cutting_nothing_changes_nothing() -> None:
    for ids, logprobs, tails in (cut((IDS, LOGPROBS, TAILS), 3, 1.0), cut((IDS, LOGPROBS, TAILS), 5, 1.0)):
        assert np.array_equal(ids, IDS)
        assert np.array_equal(logprobs, LOGPROBS)
        assert np.array_equal(tails, TAILS)


def test_what_is_cut_joins_the_tail() -> None:
    ids, logprobs, tails = cut((IDS, LOGPROBS, TAILS), 2, 1.0)
    assert (ids.shape, logprobs.shape) == ((2, 2), (2, 2))
    assert tails == pytest.approx([0.12 + np.exp(-3.0), 0.07], abs=1e-7)
    ids, logprobs, tails = cut((IDS, LOGPROBS, TAILS), 3, 0.6)  # e^-0.5 = 0.607 is enough
    assert ids.tolist() == [[7, 0, 0], [1, 0, 0]]
    assert logprobs[:, 0].tolist() == LOGPROBS[:, 0].tolist()
    assert np.isneginf(logprobs[:, 1:]).all()
    assert tails == pytest.approx([0.12 + np.exp(-3.0) + np.exp(-1.5), 0.07 + np.exp(-4.0)], abs=1e-6)
    assert tails.dtype == np.float32


class Never:
    """A teacher that must not be loaded."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"the teacher was asked for {name}")


@pytest.mark.parametrize(
    "settings",
    [{"shard_mib": 1}, {"codec": "quantized"}, {"codec": "top_p"}, {"shard_mib": 0.001, "batch_tokens": 999}],
)
def test_other_blocks_and_codecs_need_no_teacher_and_give_the_same_bytes(
    tmp_path: Path, fake_teacher: ModuleType, capsys: pytest.CaptureFixture[str], settings: dict[str, object]
) -> None:
    first = fake_teacher.run(tmp_path / "first", tmp_path / "store")
    result = fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=Never(), **settings)
    assert result.reused_blocks == result.num_blocks
    assert result.seconds == pytest.approx(first.seconds, rel=1e-6)
    assert (result.tokens_per_s, result.peak_mib) == (pytest.approx(first.tokens_per_s, rel=1e-6), first.peak_mib)
    assert "come from an earlier capture" in capsys.readouterr().err
    fake_teacher.run(tmp_path / "anew", tmp_path / "other", **settings)
    assert content(tmp_path / "out") == content(tmp_path / "anew")


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.8, "codec": "top_p"}])
def test_fewer_entries_are_cut_from_a_larger_cache(
    tmp_path: Path, fake_teacher: ModuleType, settings: dict[str, object]
) -> None:
    fake_teacher.run(tmp_path / "large", tmp_path / "store")
    fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=Never(), **settings)
    fake_teacher.run(tmp_path / "anew", tmp_path / "other", **settings)
    cache, anew = TeacherCache.open(tmp_path / "out"), TeacherCache.open(tmp_path / "anew")
    cache.verify()
    assert cache.manifest["derived_from"] == {"top_k": 8, "top_p": 1.0}
    assert cache.manifest["rescored"] is None
    assert anew.manifest["derived_from"] is None
    ours, theirs = cache.read(range(14)), anew.read(range(14))
    # Mass summed from rounded logprobs may reach top_p one entry earlier or later.
    alike = (ours.ids_NK == theirs.ids_NK).all(-1)
    assert alike.double().mean() > (0.98 if "top_p" in settings else 0.999)
    assert torch.equal(ours.logprobs_NK[alike], theirs.logprobs_NK[alike])
    torch.testing.assert_close(ours.tail_mass_N[alike], theirs.tail_mass_N[alike], rtol=0, atol=1e-3)
    again = fake_teacher.run(tmp_path / "again", tmp_path / "store", teacher=Never(), **settings)
    assert again.reused_blocks == again.num_blocks
    assert content(tmp_path / "again") == content(tmp_path / "out")


@pytest.mark.parametrize("settings", [{"top_k": 9}, {"top_k": 9, "codec": "quantized"}])
def test_more_entries_are_captured_anew_and_it_says_so(
    tmp_path: Path, fake_teacher: ModuleType, capsys: pytest.CaptureFixture[str], settings: dict[str, object]
) -> None:
    fake_teacher.run(tmp_path / "first", tmp_path / "store")
    assert fake_teacher.run(tmp_path / "out", tmp_path / "store", **settings).reused_blocks == 0
    assert "capture: the store holds top 8, not top 9, so all is scored\n" in capsys.readouterr().err


def test_a_lossy_or_damaged_block_gives_nothing(tmp_path: Path, fake_teacher: ModuleType) -> None:
    fake_teacher.run(tmp_path / "lossy", tmp_path / "store", codec="quantized")
    assert fake_teacher.run(tmp_path / "out", tmp_path / "store").reused_blocks == 0
    for shard in (tmp_path / "store").glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.unlink()
        shard.write_bytes(data)
    assert fake_teacher.run(tmp_path / "out", tmp_path / "store", shard_mib=1).reused_blocks == 0


def test_more_rows_than_the_larger_cache_has_are_captured_anew(tmp_path: Path, fake_teacher: ModuleType) -> None:
    fake_teacher.run(tmp_path / "large", tmp_path / "store")
    result = fake_teacher.run(tmp_path / "out", tmp_path / "store", rows=fake_teacher.make_rows(15), top_k=4)
    assert result.reused_blocks == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_bytes())["derived_from"] is None
