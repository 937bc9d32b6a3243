import json
from pathlib import Path

import pytest

from alambique.core import progress
from alambique.core.progress import PROGRESS_FILE, Progress


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PROGRESS_FILE, str(tmp_path / "progress.jsonl"))
    return tmp_path / "progress.jsonl"


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_mirrored_at_once_and_the_end_always(mirror: Path) -> None:
    with Progress("distill", total=10, unit="steps", done=3) as bar:
        bar.update(1, loss_nats=0.5)
        assert lines(mirror)[-1] == {
            "description": "distill", "done": 4, "total": 10, "unit": "steps", "loss_nats": 0.5
        }  # fmt: skip
        bar.update(6)
    assert lines(mirror)[-1]["done"] == 10


def test_updates_without_metrics_are_rare(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress("teacher", total=1000) as bar:
        for _ in range(100):
            bar.update(1)
        assert len(lines(mirror)) == 1
        now += 2.5
        bar.update(1)
        assert [line["done"] for line in lines(mirror)] == [1, 101]


def test_an_exception_still_closes_the_file(mirror: Path) -> None:
    def fail() -> None:
        with Progress("x", total=2) as bar:
            bar.update(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert lines(mirror)[-1]["done"] == 1


def test_the_bar_shows_name_and_count(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROGRESS_FILE, raising=False)
    with Progress("prepare", total=4, unit="documents", done=2) as bar:
        bar.update(2)
    shown = capsys.readouterr().err
    assert "prepare: 100%" in shown
    assert "4.00/4.00" in shown
