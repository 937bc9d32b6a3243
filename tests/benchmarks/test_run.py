import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import records, run
from benchmarks.cases import CASES, Options, Outcome


def imported(modules: list[str], suspects: tuple[str, ...]) -> str:
    code = f"import sys, {', '.join(modules)}; print([name for name in {suspects} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=records.ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_benchmarks_need_nothing_of_the_pipeline() -> None:
    files = (records.ROOT / "benchmarks").glob("*.py")
    modules = sorted(f"benchmarks.{path.stem}" for path in files if path.stem != "__init__")
    assert imported(modules, ("dvc", "prefect", "mlflow")) == "[]"
    loss = [name for name in modules if name.startswith("benchmarks.loss_")]
    assert imported([*loss, "benchmarks.run"], ("transformers", "liger_kernel", "cut_cross_entropy", "triton")) == "[]"


def test_every_case_names_tests_and_code_that_exist() -> None:
    for name, case in CASES.items():
        if (records.ROOT / (case.module.replace(".", "/") + ".py")).exists():
            for path in (*case.tests, *case.measures):
                assert (records.ROOT / path).exists(), f"{name}: {path}"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Case loss_speed replaced by one that measures nothing, and results kept in a folder of the test."""

    class Stub:
        @staticmethod
        def run(options: Options) -> Outcome:
            return Outcome([{"a": 1.23456, "b": None}], {"ratio": 0.5}, ["a note"])

    monkeypatch.setattr(run.importlib, "import_module", lambda name: Stub)
    monkeypatch.setenv("ALAMBIQUE_BENCH_RESULTS", str(tmp_path))
    return tmp_path


def test_red_code_is_not_timed(stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "run_tests", lambda paths, device: 1)
    assert run.main(["loss_speed", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "not timed" in captured.err
    assert "ratio" not in captured.out


def test_the_last_line_is_json_and_rows_are_recorded(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "run_tests", lambda paths, device: 0)
    assert run.main(["loss_speed", "--record", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == {"ratio": 0.5}
    assert any("a note" in line for line in lines)
    (row,) = records.load("loss_speed", stub)
    assert row["a"] == 1.23456
    assert {"device", "threads", "versions", "commit", "date", "code"} <= row.keys()


def test_several_cases_share_one_test_run(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(run, "run_tests", lambda paths, device: calls.append(paths) or 0)
    assert run.main(["loss_speed", "loss_memory", "--device", "cpu"]) == 0
    assert len(calls) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]).keys() == {"loss_speed", "loss_memory"}


@pytest.mark.parametrize("flag", ["--quick", "--skip-tests"])
def test_untested_or_tiny_figures_are_never_recorded(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["loss_speed", "--record", flag, "--device", "cpu"]) == 2
    assert "--record keeps only tested figures" in capsys.readouterr().err


def test_a_case_that_lacks_a_package_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'nothere'", name="nothere")

    monkeypatch.setattr(run.importlib, "import_module", missing)
    assert run.main(["loss_speed", "--skip-tests", "--device", "cpu"]) == 2
    assert "case loss_speed needs nothere" in capsys.readouterr().err


def test_tests_that_are_not_there_are_not_green(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(run.UserError, match="tests/nowhere is not there"):
        run.run_tests(["tests/nowhere"], torch.device("cpu"))


def test_a_failing_test_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_red.py").write_text("def test_red():\n    assert False\n")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert run.run_tests(["test_red.py"], torch.device("cpu")) == 1


def test_the_code_s_hash_follows_its_content(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    file = tmp_path / "code" / "a.py"
    file.write_text("x = 1\n")
    first = records.code_hash(["code"], tmp_path)
    assert records.code_hash(["code"], tmp_path) == first
    file.write_text("x = 2\n")
    assert records.code_hash(["code"], tmp_path) != first


def test_outside_git_the_commit_is_unknown(tmp_path: Path) -> None:
    assert records.commit(tmp_path) == "unknown"
