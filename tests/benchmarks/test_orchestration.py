from pathlib import Path

import pytest

from alambique.core.errors import UserError
from benchmarks import orchestration
from tests.tiny_checkout import Checkout

REPRO = """
import sys, time
print("Stage 'prepare@t' didn't change, skipping")
for name, words in (("teacher@t", "teacher t"), ("evaluate@distill-p-boolq", "evaluate distill p boolq")):
    print(f"Running stage '{name}':", f"> exec python -m pipeline.run {words}", sep="\\n", flush=True)
    time.sleep(0.3 if words == "teacher t" else 0.1)
print("To track the changes with git, run:", "\\tgit add dvc.lock", "Use `dvc push` to send", sep="\\n", flush=True)
time.sleep(0.3)
sys.exit(FAILS)
"""


def fake(root: Path, fails: int) -> Checkout:
    (root / "pipeline").mkdir()
    (root / "pipeline/__init__.py").touch()
    (root / "pipeline/repro.py").write_text(REPRO.replace("FAILS", str(fails)))
    place = Checkout(root)
    place.env["PYTHONPATH"] = str(root)
    return place


def test_stages_are_timed_by_the_lines_that_dvc_writes(tmp_path: Path) -> None:
    jobs, whole, outside_s = orchestration._orchestrated(fake(tmp_path, 0))
    assert [(stage, words) for stage, words, _ in jobs] == [
        ("teacher@t", ["teacher", "t"]),
        ("evaluate@distill-p-boolq", ["evaluate", "distill", "p", "boolq"]),
    ]
    first, second = (seconds for _, _, seconds in jobs)
    late = 0.05  # a line is timed when it is read: a stage may seem shorter by as much as its first line is late
    assert first >= 0.3 - late
    assert second >= 0.1 - late
    assert whole.wall_s >= first + second + 0.3 - late  # what follows the last stage is no stage's
    assert whole.cpu_s > 0
    assert outside_s == whole.wall_s  # these stages have no process


def test_a_run_that_fails_is_not_a_measurement(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`make repro` failed:\nStage 'prepare@t'"):
        orchestration._orchestrated(fake(tmp_path, 1))


def test_seconds_in_which_a_job_lives(tmp_path: Path) -> None:
    place = fake(tmp_path, 0)
    (tmp_path / "pipeline/teacher.py").write_text("import time\ntime.sleep(1.5)\n")
    (tmp_path / "pipeline/repro.py").write_text(
        "import subprocess, sys, time\ntime.sleep(1)\nsubprocess.run([sys.executable, '-m', 'pipeline.teacher', 't'])\n"
    )
    _, whole, outside_s = orchestration._orchestrated(place)
    late = 2 * orchestration._LOOK_SECONDS
    assert 1.0 - late < outside_s < whole.wall_s - 1.5 + late
