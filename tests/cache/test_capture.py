import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from alambique.cache import drift as drift_module
from alambique.cache import store as store_module
from alambique.cache.compare import compare
from alambique.cache.config import CaptureConfig
from alambique.cache.drift import scored_twice
from alambique.cache.reader import TeacherCache
from alambique.core.errors import UserError
from alambique.core.params import validate


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_signal_against_the_whole_softmax(captured: Path, fake_teacher: ModuleType) -> None:
    rows, teacher = fake_teacher.make_rows(), fake_teacher.FakeTeacher()
    hidden = teacher.hidden(rows.input_ids_RS, rows.document_ids_RS)
    logprobs = (hidden.double() @ teacher.head_weight_VD[:300].double().T).log_softmax(-1)
    top, ids = logprobs.topk(8)
    found = TeacherCache.open(captured).read(range(14))
    mask = rows.loss_mask_RS
    assert torch.equal(found.ids_NK[mask].long(), ids[mask])
    error = (found.logprobs_NK[mask].double() - top[mask]).abs()
    assert (error <= top[mask].abs() * 2**-11 + 1e-5).all()
    tail = 1 - top.exp().sum(-1)
    torch.testing.assert_close(found.tail_mass_N[mask].double(), tail[mask], rtol=0, atol=3e-6)


def test_result_counts_and_rates(tmp_path: Path, fake_teacher: ModuleType) -> None:
    result = fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=fake_teacher.FakeTeacher(seconds=0.01))
    assert (result.num_rows, result.num_tokens, result.num_blocks, result.reused_blocks) == (14, 279, 4, 0)
    assert result.cache_bytes == sum(
        len(data) for name, data in content(tmp_path / "out").items() if ".json" not in name
    )
    assert result.bytes_per_token == result.cache_bytes / 279
    assert 0.07 < result.seconds < 30  # seven batches of two rows
    assert result.tokens_per_s == pytest.approx(279 / result.seconds)
    assert result.peak_mib > 10
    tails = TeacherCache.open(tmp_path / "out").read(range(14)).tail_mass_N
    mask = fake_teacher.make_rows().loss_mask_RS
    assert result.mean_tail_mass == pytest.approx(float(tails[mask].double().mean()), rel=1e-9)


def test_blocks_are_linked_not_copied(tmp_path: Path, fake_teacher: ModuleType) -> None:
    fake_teacher.run(tmp_path / "out", tmp_path / "store")
    for shard in (tmp_path / "out").glob("*.safetensors"):
        assert shard.stat().st_ino == (tmp_path / "store" / shard.name).stat().st_ino


@pytest.mark.parametrize("batch_tokens", [1, 24, 72, 10_000])
def test_bytes_do_not_depend_on_the_batch_size(
    captured: Path, tmp_path: Path, fake_teacher: ModuleType, batch_tokens: int
) -> None:
    """True of this teacher, whose arithmetic is row by row; a GEMM may round otherwise in another shape."""
    fake_teacher.run(tmp_path / "out", tmp_path / "store", batch_tokens=batch_tokens)
    assert content(tmp_path / "out") == content(captured)


def test_batches_never_straddle_blocks(tmp_path: Path, fake_teacher: ModuleType) -> None:
    teacher = fake_teacher.FakeTeacher()
    fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher, batch_tokens=72)
    assert teacher.rows_seen == [3, 1, 1, 3, 1, 3, 1, 2]  # the third is the first row again, alone


def test_out_of_memory_halves_the_batch(
    captured: Path, tmp_path: Path, fake_teacher: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = fake_teacher.FakeTeacher(largest_batch=1)
    fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher, batch_tokens=96)
    assert set(teacher.rows_seen) == {1}
    assert content(tmp_path / "out") == content(captured)
    assert "out of memory with 4 rows, trying 2" in capsys.readouterr().err


def test_a_row_that_does_not_fit(tmp_path: Path, fake_teacher: ModuleType) -> None:
    with pytest.raises(UserError, match=r"one row of 24 tokens does not fit in the memory of cpu .*: lower teacher"):
        fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=fake_teacher.FakeTeacher(largest_batch=0))


def test_a_second_run_scores_nothing_and_keeps_the_timing(tmp_path: Path, fake_teacher: ModuleType) -> None:
    first = fake_teacher.run(tmp_path / "out", tmp_path / "store")
    teacher = fake_teacher.FakeTeacher()
    second = fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher)
    assert teacher.rows_seen == []
    assert second.reused_blocks == 4
    assert (second.tokens_per_s, second.seconds, second.peak_mib) == (first.tokens_per_s, first.seconds, first.peak_mib)


def test_appended_rows_capture_only_new_blocks(tmp_path: Path, fake_teacher: ModuleType) -> None:
    fake_teacher.run(tmp_path / "out", tmp_path / "store", rows=fake_teacher.make_rows(14, masked=False))
    teacher, rows = fake_teacher.FakeTeacher(), fake_teacher.make_rows(20, masked=False)
    result = fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher, rows=rows)
    assert (result.num_blocks, result.reused_blocks) == (5, 3)  # the fourth had been cut short by the end of the data
    assert sum(teacher.rows_seen) == 8
    fake_teacher.run(tmp_path / "anew", tmp_path / "other", rows=rows)
    assert content(tmp_path / "out") == content(tmp_path / "anew")


@pytest.mark.parametrize("settings", [{"top_k": 9}, {"dtype": "bfloat16"}])
def test_another_setting_captures_anew(tmp_path: Path, fake_teacher: ModuleType, settings: dict[str, object]) -> None:
    fake_teacher.run(tmp_path / "out", tmp_path / "store")
    teacher = fake_teacher.FakeTeacher(torch.bfloat16 if "dtype" in settings else torch.float32)
    assert fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher, **settings).reused_blocks == 0


@pytest.mark.parametrize("kind", ["flip", "truncate", "delete"])
def test_a_damaged_block_is_named_and_captured_again(
    captured: Path, tmp_path: Path, fake_teacher: ModuleType, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    fake_teacher.run(tmp_path / "out", tmp_path / "store")
    victim = sorted((tmp_path / "store").glob("*.safetensors"))[1]
    if kind == "flip":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 4
        victim.write_bytes(data)
    elif kind == "truncate":
        os.truncate(victim, 50)
    else:
        victim.unlink()
    teacher = fake_teacher.FakeTeacher()
    assert fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher).reused_blocks == 3
    assert sum(teacher.rows_seen) <= 4
    assert content(tmp_path / "out") == content(captured)
    assert kind == "delete" or f"{victim.name} (rows" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_captures_end_with_the_same_bytes(captured: Path, tmp_path: Path, fake_teacher: ModuleType) -> None:
    """kill -9 of a real process at several moments; what follows finishes the rest."""
    out, store = tmp_path / "out", tmp_path / "store"
    command = [sys.executable, fake_teacher.__file__, str(out), str(store), "0.15"]
    for blocks in (1, 3):
        child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while len(list(store.glob("*.json"))) < blocks and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert not out.exists()
    result = fake_teacher.run(out, store)
    assert 3 <= result.reused_blocks < 4
    assert content(out) == content(captured)


def test_a_full_disk_in_mid_capture(
    captured: Path, tmp_path: Path, fake_teacher: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = store_module.write_shard, []

    def fill_up(path: Path, *rest: object) -> None:
        if len(written) == 2:
            path.write_bytes(b"part of a shard")
            raise OSError(28, "No space left on device")
        written.append(path)
        real(path, *rest)

    monkeypatch.setattr(store_module, "write_shard", fill_up)
    with pytest.raises(UserError, match="No space left on device"):
        fake_teacher.run(tmp_path / "out", tmp_path / "store")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert fake_teacher.run(tmp_path / "out", tmp_path / "store").reused_blocks == 2
    assert content(tmp_path / "out") == content(captured)


def test_space_is_checked_before_the_teacher_runs(
    tmp_path: Path, fake_teacher: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10_000, 9_000, 1_000))
    teacher = fake_teacher.FakeTeacher()
    with pytest.raises(UserError, match=r"the teacher's cache needs about 0 MiB in .*store, but 0 MiB are free"):
        fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher)
    assert teacher.rows_seen == []


def test_nan_names_the_row(tmp_path: Path, fake_teacher: ModuleType) -> None:
    teacher = fake_teacher.FakeTeacher()
    real = teacher.hidden

    def broken(input_ids_BS: torch.Tensor, document_ids_BS: torch.Tensor) -> torch.Tensor:
        hidden_BSD = real(input_ids_BS, document_ids_BS)
        if len(teacher.rows_seen) == 4:  # rows 4 and 5; the third call was for row 0 again
            hidden_BSD[1, 4] = float("nan")
        return hidden_BSD

    teacher.hidden = broken
    with pytest.raises(UserError, match=r"NaN or infinite logits in row 5 of the training rows: choose another"):
        fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher)


@pytest.mark.parametrize("top_k", [301, 60_000])
def test_k_larger_than_the_vocabulary(tmp_path: Path, fake_teacher: ModuleType, top_k: int) -> None:
    with pytest.raises(UserError) as caught:
        fake_teacher.run(tmp_path / "out", tmp_path / "store", top_k=top_k)
    assert str(caught.value) == (
        f"teacher.top_k = {top_k} is larger than the vocabulary of 300 tokens: choose at most 300."
    )


def test_more_tokens_than_the_head_has_rows(tmp_path: Path, fake_teacher: ModuleType) -> None:
    teacher = fake_teacher.FakeTeacher()
    teacher.head_weight_VD = teacher.head_weight_VD[:299]
    with pytest.raises(UserError, match="the tokenizer has 300 tokens, but the teacher's output head only 299 rows"):
        fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher)


def test_nothing_to_capture(tmp_path: Path, fake_teacher: ModuleType) -> None:
    rows = fake_teacher.make_rows()
    rows.loss_mask_RS[:] = False
    with pytest.raises(UserError, match="no position of the training rows has a target"):
        fake_teacher.run(tmp_path / "out", tmp_path / "store", rows=rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"top_p": 0.9},
            "teacher: the section needs codec = top_p for top_p = 0.9: exact would store the empty slots",
        ),
        ({"top_k": 0}, "teacher: top_k = 0 should be greater than or equal to 1"),
        ({"topk": 5}, "teacher: unknown key topk; did you mean top_k?"),
        (
            {"device_map": "auto", "tensor_parallel": 2},
            "teacher: the section can't have tensor_parallel = 2 and a device_map, only one of them",
        ),
        (
            {"device_map": "gpu"},
            "teacher: device_map = 'gpu' should be 'auto', 'balanced' or 'sequential'",
        ),
        ({"dtype": "fp16"}, "teacher: dtype = 'fp16' should be 'auto', 'float32', 'bfloat16' or 'float16'"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(CaptureConfig, settings, "teacher")
    assert str(caught.value) == message


def test_an_unknown_codec(tmp_path: Path, fake_teacher: ModuleType) -> None:
    with pytest.raises(UserError, match=r"teacher\.codec: there is no codec exakt; did you mean exact\?"):
        fake_teacher.run(tmp_path / "out", tmp_path / "store", codec="exakt")


def test_rows_of_equal_content_share_a_block(tmp_path: Path, fake_teacher: ModuleType) -> None:
    rows = fake_teacher.make_rows(8)
    for tensor in (rows.input_ids_RS, rows.document_ids_RS, rows.loss_mask_RS):
        tensor[4:] = tensor[:4].clone()
    fake_teacher.run(tmp_path / "out", tmp_path / "store", rows=rows)
    cache = TeacherCache.open(tmp_path / "out")
    cache.verify()
    signal = cache.read(range(8))
    assert np.array_equal(signal.ids_NK[:4], signal.ids_NK[4:])


def test_quantized_tells_its_error_and_top_p_its_mass(captured: Path, tmp_path: Path, fake_teacher: ModuleType) -> None:
    exact = TeacherCache.open(captured).read(range(14))
    mask = fake_teacher.make_rows().loss_mask_RS
    fake_teacher.run(tmp_path / "quantized", tmp_path / "store", codec="quantized")
    cache = TeacherCache.open(tmp_path / "quantized")
    cache.verify()
    signal_of_rows = cache.read(range(14))
    assert torch.equal(signal_of_rows.ids_NK, exact.ids_NK)
    assert torch.equal(signal_of_rows.tail_mass_N, exact.tail_mass_N)
    log_p, log_q = exact.logprobs_NK[mask].double(), signal_of_rows.logprobs_NK[mask].double()
    error = (log_p.exp() * (log_p - log_q) - log_p.exp() + log_q.exp()).sum(-1).mean()
    assert cache.manifest["lossless"] is False
    assert cache.manifest["codec_kl_nats"] == pytest.approx(float(error), rel=1e-9)
    assert 0 < float(error) < 1e-4
    assert TeacherCache.open(captured).manifest["codec_kl_nats"] == 0

    fake_teacher.run(tmp_path / "top_p", tmp_path / "store", codec="top_p", top_p=0.8)
    cache = TeacherCache.open(tmp_path / "top_p")
    cache.verify()
    signal_of_rows = cache.read(range(14))
    filled = signal_of_rows.logprobs_NK.isfinite()
    assert torch.equal(signal_of_rows.ids_NK[filled], exact.ids_NK[filled])
    assert torch.equal(signal_of_rows.logprobs_NK[filled], exact.logprobs_NK[filled])
    assert filled[mask].sum() < 0.7 * mask.sum() * 8
    assert (signal_of_rows.tail_mass_N[mask & ~filled.all(-1)] < 0.2 + 1e-6).all()
    assert cache.manifest["top_p"] == 0.8


@pytest.fixture
def wobbly(fake_teacher: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes teachers that see a lone row otherwise than in a batch, as real kernels do; every third row is rescored."""
    monkeypatch.setattr(drift_module, "_ONE_ROW_IN", 3)

    def make(broken_at: int | None = None) -> Any:
        teacher = fake_teacher.FakeTeacher()
        steady = teacher.hidden

        def hidden(input_ids_BS: torch.Tensor, document_ids_BS: torch.Tensor) -> torch.Tensor:
            if len(teacher.rows_seen) == broken_at:
                raise KeyboardInterrupt
            return steady(input_ids_BS, document_ids_BS) * (1.01 if len(input_ids_BS) == 1 else 1.0)

        teacher.hidden = hidden
        return teacher

    return make


class Never:
    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"the teacher was asked for {name}")


def test_the_manifest_tells_how_far_a_second_scoring_was(
    tmp_path: Path, fake_teacher: ModuleType, wobbly: Callable[..., Any]
) -> None:
    fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=wobbly())
    fake_teacher.run(tmp_path / "alone", tmp_path / "other", teacher=wobbly(), batch_tokens=24)
    together, alone = TeacherCache.open(tmp_path / "out"), TeacherCache.open(tmp_path / "alone")
    mask_RS = fake_teacher.make_rows().loss_mask_RS
    sample = scored_twice(together.row_hashes, mask_RS.any(1).tolist())
    numbers = sorted((digest, row) for row, digest in enumerate(together.row_hashes) if digest in sample)
    assert 2 < len(numbers) < 14
    found = together.manifest["rescored"]
    assert found == compare(together, alone, [(row, row) for _, row in numbers]).model_dump()
    assert (found["rows"], found["positions"]) == (len(numbers), sum(int(mask_RS[row].sum()) for _, row in numbers))
    assert found["mean_kl_nats"] > 1e-5
    assert alone.manifest["rescored"]["mean_kl_nats"] == 0


def test_one_row_of_a_small_corpus_is_scored_twice(captured: Path) -> None:
    found = TeacherCache.open(captured).manifest["rescored"]
    assert (found["rows"], found["positions"], found["mean_kl_nats"], found["same_top1"]) == (1, 23, 0.0, 1.0)


def test_second_scorings_survive_an_interruption(
    tmp_path: Path, fake_teacher: ModuleType, wobbly: Callable[..., Any]
) -> None:
    fake_teacher.run(tmp_path / "anew", tmp_path / "other", teacher=wobbly())
    with pytest.raises(KeyboardInterrupt):
        fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=wobbly(broken_at=7))
    result = fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=wobbly())
    assert 0 < result.reused_blocks < 4
    assert content(tmp_path / "out") == content(tmp_path / "anew")
    fake_teacher.run(tmp_path / "again", tmp_path / "store", teacher=Never())
    assert content(tmp_path / "again") == content(tmp_path / "anew")


@pytest.mark.parametrize("settings", [{"shard_mib": 1}, {"codec": "quantized"}])
def test_second_scorings_go_with_their_rows(
    tmp_path: Path, fake_teacher: ModuleType, wobbly: Callable[..., Any], settings: dict[str, object]
) -> None:
    fake_teacher.run(tmp_path / "first", tmp_path / "store", teacher=wobbly())
    fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=Never(), **settings)
    first, out = (TeacherCache.open(tmp_path / name).manifest["rescored"] for name in ("first", "out"))
    assert out == first
    rows = fake_teacher.make_rows(10)
    fake_teacher.run(tmp_path / "fewer", tmp_path / "store", teacher=Never(), rows=rows, **settings)
    fake_teacher.run(tmp_path / "anew", tmp_path / "other", teacher=wobbly(), rows=rows, **settings)
    assert content(tmp_path / "fewer") == content(tmp_path / "anew")


def test_a_block_whose_first_row_was_not_scored_twice_is_captured_again(
    tmp_path: Path, fake_teacher: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift_module, "_ONE_ROW_IN", 1 << 40)
    rows = fake_teacher.make_rows(12, masked=False)
    fake_teacher.run(tmp_path / "first", tmp_path / "store", rows=rows)
    rest = type(rows)(rows.input_ids_RS[4:], rows.document_ids_RS[4:], rows.loss_mask_RS[4:])
    assert fake_teacher.run(tmp_path / "out", tmp_path / "store", rows=rest).reused_blocks == 1
    fake_teacher.run(tmp_path / "anew", tmp_path / "other", rows=rest)
    assert content(tmp_path / "out") == content(tmp_path / "anew")


def test_draws_are_not_scored_twice(tmp_path: Path, fake_teacher: ModuleType) -> None:
    teacher = fake_teacher.FakeTeacher()
    fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher, keep="sampled")
    assert TeacherCache.open(tmp_path / "out").manifest["rescored"] is None
    assert sum(teacher.rows_seen) == 14
