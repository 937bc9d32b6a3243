from pathlib import Path

import pytest

from alambique.core.errors import UserError
from benchmarks import orchestration
from tests.tiny_checkout import Checkout

REPRO = """
import sys, time
print("Stage 'prepare@t' didn't change, skipping")
stages = (("code", "code"), ("teacher@t", "teacher t"), ("evaluate@distill-p-boolq", "evaluate distill p boolq"))
for name, words in stages:
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


def test_stages_are_those_that_dvc_says_it_ran(tmp_path: Path) -> None:
    whole = orchestration._orchestrated(fake(tmp_path, 0))
    assert [(stage, words) for stage, words, _ in whole.jobs] == [
        ("teacher@t", ["teacher", "t"]),
        ("evaluate@distill-p-boolq", ["evaluate", "distill", "p", "boolq"]),
    ]
    late = 0.05  # a line is timed when it is read: a stage may seem shorter by as much as its first line is late
    first, second = (seconds for _, _, seconds in whole.jobs)
    assert first >= 0.3 - late
    assert second >= 0.1 - late
    assert whole.outside_s == whole.wall_s >= 0.7  # these stages have no process


def test_a_run_that_fails_is_not_a_measurement(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`make repro` failed:\nStage 'prepare@t'"):
        orchestration._orchestrated(fake(tmp_path, 1))


def test_seconds_outside_the_commands_of_dvc(tmp_path: Path) -> None:
    place = fake(tmp_path, 0)
    (tmp_path / "pipeline/run.py").write_text("import time\ntime.sleep(1.5)\n")
    (tmp_path / "pipeline/repro.py").write_text(
        "import subprocess, sys, time\ntime.sleep(1)\n"
        "subprocess.run([sys.executable, '-m', 'pipeline.run', 'teacher', 't'])\n"
    )
    whole = orchestration._orchestrated(place)
    late = 2 * orchestration._LOOK_SECONDS
    assert 1.0 - late < whole.outside_s < whole.wall_s - 1.5 + late


def test_a_job_runs_in_turn_with_what_starts_it(tmp_path: Path) -> None:
    place = fake(tmp_path, 0)
    log = "import sys\nopen('log', 'a').write(NAME + ' ' + ' '.join(sys.argv[1:]) + '\\n')\n"
    (tmp_path / "pipeline/run.py").write_text("import time\ntime.sleep(0.5)\n" + log.replace("NAME", "'watched'"))
    (tmp_path / "pipeline/prepare.py").write_text(log.replace("NAME", "'alone'"))
    row = orchestration._in_turn(place, ["prepare", "t"], 2)
    assert (tmp_path / "log").read_text().splitlines() == [
        "alone t",
        "watched prepare t",
        "watched prepare t",
        "alone t",
    ]
    assert row["cost_s"] == pytest.approx(row["orchestrated_s"] - row["bare_s"])
    assert row["cost_s"] > 0.3
    (tmp_path / "pipeline/prepare.py").write_text("sys.exit('no such text')")
    with pytest.raises(UserError, match=r"pipeline\.prepare t ended with 1"):
        orchestration._in_turn(place, ["prepare", "t"], 1)
