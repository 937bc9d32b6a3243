import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from alambique.cache.fill import parse_part
from alambique.core.errors import UserError
from alambique.core.progress import PROGRESS_FILE


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def start(fake_teacher: ModuleType, store: Path, part: str, seconds: float, together: int = 1) -> subprocess.Popen[str]:
    meeting = store.with_name("meeting")
    meeting.mkdir(exist_ok=True)
    words = (str(meeting), str(store), str(seconds), part, str(together))
    command = [sys.executable, str(fake_teacher.__file__), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.slow
def test_two_processes_score_each_block_once_and_write_the_bytes_of_one(
    captured: Path, tmp_path: Path, fake_teacher: ModuleType
) -> None:
    parts = [start(fake_teacher, tmp_path / "store", part, 0.3, together=2) for part in ("1/2", "2/2")]
    scored = [int(part.communicate(timeout=100)[0]) for part in parts]
    assert [part.returncode for part in parts] == [0, 0]
    assert sum(scored) == 14 + 1  # the first row a second time, to know the drift
    assert min(scored) > 0
    teacher = fake_teacher.FakeTeacher()
    result = fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher)
    assert teacher.rows_seen == []
    assert content(tmp_path / "out") == content(captured)
    receipts = [json.loads(path.read_bytes()) for path in (tmp_path / "store").glob("*.json")]
    assert result.seconds == pytest.approx(sum(receipt["seconds"] for receipt in receipts))
    assert result.tokens_per_s == pytest.approx(279 / result.seconds)  # of one process, not of both together


@pytest.mark.slow
def test_what_a_killed_process_had_claimed_goes_to_the_others(
    captured: Path, tmp_path: Path, fake_teacher: ModuleType
) -> None:
    stuck = start(fake_teacher, tmp_path / "store", "1/2", 300)
    wait_for(lambda: (tmp_path / "store" / "claims").is_file())
    time.sleep(0.3)  # it claims a block at once
    fake_teacher.run_part(tmp_path / "store", first := fake_teacher.FakeTeacher(), "2/2")
    assert sum(first.rows_seen) == 10  # all but the block that is claimed
    stuck.send_signal(signal.SIGKILL)
    stuck.communicate()
    fake_teacher.run_part(tmp_path / "store", second := fake_teacher.FakeTeacher(), "2/2")
    assert sum(second.rows_seen) == 4 + 1  # the first row a second time, to know the drift
    fake_teacher.run(tmp_path / "out", tmp_path / "store")
    assert content(tmp_path / "out") == content(captured)


def test_progress_counts_towards_a_fair_share(
    tmp_path: Path, fake_teacher: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROGRESS_FILE, str(tmp_path / "progress.jsonl"))
    fake_teacher.run_part(tmp_path / "store", fake_teacher.FakeTeacher(), "2/3")
    last = json.loads((tmp_path / "progress.jsonl").read_text().splitlines()[-1])
    assert (last["description"], last["done"], last["total"]) == ("capture 2/3", 279, 139)  # two of four blocks


@pytest.mark.parametrize("word", ["2", "0/2", "3/2", "1/", "a/b", "-1/2", "1/2/3"])
def test_a_part_that_is_none(word: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_part(word)
    assert str(refused.value) == (f"{word} is no part of a capture: write I/N, such as 1/2 and 2/2 for two processes.")


def test_parts_are_numbered_from_one() -> None:
    assert parse_part("2/3") == (2, 3)
