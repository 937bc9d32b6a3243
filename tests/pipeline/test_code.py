import hashlib
from pathlib import Path

import pytest

from pipeline import run
from pipeline.code import code_of, record


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("src/a/b.py", "src/a/page.html", "src/a/__pycache__/b.pyc", "src/c.py", "pipeline/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "pipeline/code.yaml").write_text("x: [src/a, pipeline/x.py]\ny: [src/c.py]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_are_expanded_and_compiled_files_left_out(checkout: Path) -> None:
    assert [path.as_posix() for path in code_of("x")] == ["pipeline/x.py", "src/a/b.py", "src/a/page.html"]


def test_a_change_touches_the_files_of_those_stages_that_import_it(checkout: Path) -> None:
    record()
    before = {name: (checkout / f"results/code/{name}.txt").read_text() for name in ("x", "y")}
    assert before["y"] == f"{hashlib.sha256(b'src/c.py').hexdigest()}  src/c.py\n"
    (checkout / "src/a/page.html").write_text("changed")
    assert run.main(["code"]) == 0
    after = {name: (checkout / f"results/code/{name}.txt").read_text() for name in ("x", "y")}
    assert after["y"] == before["y"]
    (line,) = set(after["x"].splitlines()) - set(before["x"].splitlines())
    assert line.endswith("  src/a/page.html")


def test_a_listed_file_that_is_gone_is_named(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "src/c.py").unlink()
    assert run.main(["code"]) == 2
    sentence = "pipeline/code.yaml lists src/c.py, which does not exist: take it out there, or bring it back."
    assert capsys.readouterr().err == f"error: {sentence}\n"
