import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import run

ROOT = Path(__file__).parents[2]


def plain_python(*words: str) -> subprocess.CompletedProcess[str]:
    """Python without the packages of the virtual environment."""
    return subprocess.run(
        [sys.executable, "-S", *words], cwd=ROOT, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )


def test_another_python_is_refused_in_one_sentence() -> None:
    done = plain_python("-m", "pipeline.run", "distill", "pair")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "isn't this project's Python: use `make repro`, or put .venv/bin first on PATH." in done.stderr


def test_import_needs_the_standard_library_only() -> None:
    assert plain_python("-c", "import pipeline.run").returncode == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["distil"], "there is no stage distil; did you mean distill?"),
        (["x"], "there is no stage x; known: teacher, distill, evaluate, prepare, student, report."),
        ([], "usage: python -m pipeline.run STAGE KEY..., where STAGE is one of"),
    ],
)
def test_unknown_stage_names_the_nearest(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(words) == 2
    assert sentence in capsys.readouterr().err


def test_stages_are_those_that_are_checked() -> None:
    from pipeline.check import STAGES

    assert sorted(run.STAGES) == sorted(STAGES)


@pytest.mark.parametrize(("how", "status"), [("ok", 0), ("refused", 2), ("broken", 7)])
def test_cpu_stage_passes_its_exit_status_on(bare_project: Any, how: str, status: int) -> None:
    code, output = bare_project.run("prepare", how)
    assert code == status
    assert bare_project.attempts("prepare", how) == 1
    assert ("error: the value is wrong." in output) == (how == "refused")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_cpu_stage_stopped_leaves_nothing(bare_project: Any, number: signal.Signals) -> None:
    process = bare_project.start("prepare", "sleep")
    bare_project.started_pids()
    process.send_signal(number)
    process.send_signal(number)  # DVC's own SIGTERM arrives twice
    assert process.wait(10) == 75
    assert (bare_project.root / "seen" / "saved").exists()
    assert bare_project.left_behind() == {}


def test_wrong_environment_value_is_one_sentence(bare_project: Any) -> None:
    code, output = bare_project.run("prepare", "ok", ALAMBIQUE_STOP_SECONDS="soon")
    assert code == 2
    assert output == (
        "error: ALAMBIQUE_STOP_SECONDS=soon must be a number of seconds, 0 or more: correct or unset it.\n"
    )
