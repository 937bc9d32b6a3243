import subprocess
import sys
from pathlib import Path

import pytest

from alambique.core.errors import UserError
from alambique.core.params import Config
from pipeline.job import fingerprint, job_main

ROOT = Path(__file__).resolve().parents[2]


class Settings(Config):
    rate: float


def test_a_users_error_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(key: str) -> None:
        raise UserError(f"{key} is wrong: do right.")

    monkeypatch.setattr(sys, "argv", ["stage", "this"])
    assert job_main(run) == 2
    assert capsys.readouterr().err == "error: this is wrong: do right.\n"


def test_leaving_at_once_loses_no_output_and_keeps_the_status() -> None:
    code = "from pipeline.job import leave; print('x' * 100_000); leave(75)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stdout)) == (75, 100_001)


def test_a_fingerprint_is_of_settings_inputs_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    for name in ("src/a.py", "manifest.json"):
        (tmp_path / name).write_text("1")
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/code.yaml").write_text("distill: [src]")
    monkeypatch.chdir(tmp_path)

    def name(rate: float) -> str:
        return fingerprint("distill", Settings(rate=rate), Path("manifest.json"))

    seen = set()
    for changed, rate in (("", 1.0), ("", 2.0), ("src/a.py", 2.0), ("manifest.json", 2.0)):
        if changed:
            (tmp_path / changed).write_text("2")
        assert name(rate) == name(rate)
        seen.add(name(rate))
    assert len(seen) == 4
