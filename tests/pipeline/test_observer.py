import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline import observer, tracking
from pipeline.jobs import Outcome, Status
from pipeline.observer import Observer, flatten


class TrainingJob:
    """Stands for a distill job that has written three progress records."""

    stage, key, label, started_at = "distill", ("pair",), "distill pair", 0.0

    def __init__(self) -> None:
        self.points = [
            {"description": "distil", "done": n, "total": 3, "unit": "tokens", "loss_nats": 1.0 / n} for n in (1, 2, 3)
        ]

    def new_lines(self) -> list[str]:
        return []

    def new_progress(self) -> list[dict[str, Any]]:
        points, self.points = self.points, []
        return points


@pytest.fixture
def watcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Observer:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setattr(observer, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(observer, "_CURVE_AFTER_SECONDS", 0.0)
    watch = Observer(TrainingJob(), logging.getLogger("test"))  # type: ignore[arg-type]
    watch._muted.add("Prefect")  # no flow run here
    return watch


def test_curves_go_to_mlflow(
    watcher: Observer, mlflow_database: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{mlflow_database}")
    with watcher:
        watcher.look()
        watcher.finish(Outcome(Status.OK, 0, "finished"))
    with sqlite3.connect(mlflow_database) as database:
        name, status = database.execute("select name, status from runs").fetchone()
        points = database.execute("select step, value from metrics where key = 'loss_nats' order by step").fetchall()
    database.close()
    assert (name, status) == ("distill-pair", "FINISHED")
    assert points == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert "MLflow" not in capsys.readouterr().err


def test_a_store_that_cannot_be_used_is_said_once(
    watcher: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    with watcher:
        for _ in range(3):
            watcher.look()
        watcher.finish(Outcome(Status.OK, 0, "finished"))
    said = capsys.readouterr().err
    assert said.count("MLflow can't follow distill pair") == 1
    assert "the job is not affected." in said


def test_short_jobs_do_not_wait_for_mlflow(watcher: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = threading.Event()  # which it isn't before the job's end
    monkeypatch.setattr(observer, "_CURVE_AFTER_SECONDS", 10.0)
    monkeypatch.setattr(tracking, "load", imported.wait)
    monkeypatch.setattr(tracking, "LiveRun", lambda *job: pytest.fail("a short job has a run in MLflow"))
    with watcher:
        watcher.look()
        curves = watcher._curves
        watcher.finish(Outcome(Status.OK, 0, "finished"))
    assert curves is not None
    assert curves.is_alive()
    imported.set()
    curves.join(10)
    assert not curves.is_alive()


def test_flatten_keeps_leaves_by_dotted_name() -> None:
    nested = {"a": 1, "b": {"c": None, "d": [1, 2], "e": {"f": "g"}}}
    assert list(flatten(nested)) == [("a", 1), ("b.c", None), ("b.d", "[1, 2]"), ("b.e.f", "g")]
