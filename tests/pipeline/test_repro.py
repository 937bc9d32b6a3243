import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from alambique.core.errors import UserError
from pipeline import repro
from pipeline.server import Service
from tests.pipeline.conftest import ROOT, wait_for


@pytest.mark.slow
def test_a_run_with_its_own_server_and_one_with_nothing_to_do(bare_project: Any, prefect_database: Path) -> None:
    """The server is killed as soon as it is there, and another one takes its place."""
    bare_project.make_checkout("ok")
    (bare_project.root / ".prefect").mkdir()
    shutil.copy(prefect_database, bare_project.root / ".prefect" / "prefect.db")
    process = bare_project.start(module="pipeline.repro", PATH="/usr/bin:/bin")
    wait_for(lambda: "Prefect shows the jobs at http://127.0.0.1:" in bare_project.output(), 30)
    for pid in bare_project.left_behind("prefect server start"):
        os.kill(pid, signal.SIGKILL)
    code, output = process.wait(120), bare_project.output()
    assert code == 0, output
    assert "again while this runs" in output
    assert "LAST SCREEN" in output
    assert "Prefect can't" not in output
    assert bare_project.left_behind() == {}
    assert [bare_project.attempts(*words) for words in (("prepare", "ok"), ("distill", "ok"), ("report", "ok"))] == [
        1,
        1,
        1,
    ]
    # `report` finds the finished stages in dvc.lock: tracking.chain_fingerprint rests on that.
    lock = (bare_project.root / "seen" / "lock").read_text()
    assert "  prepare:" in lock
    assert "  distill:" in lock

    code, output = bare_project.run(module="pipeline.repro")
    assert code == 0
    assert "Prefect" not in output
    assert "LAST SCREEN" in output
    assert bare_project.attempts("distill", "ok") == 1
    assert (bare_project.root / "seen" / "checked").read_text() == "x"  # once: nothing had changed


def test_a_failing_stage_gives_its_exit_status_and_no_last_screen(project: Any) -> None:
    project.make_checkout("refused")
    code, output = project.run(module="pipeline.repro")
    assert code != 0
    assert "error: the value is wrong." in output
    assert "LAST SCREEN" not in output
    assert project.attempts("distill", "refused") == 1


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("terminal", signal.SIGINT),  # ^C reaches the whole group
        ("repro", signal.SIGTERM),
        ("repro", signal.SIGKILL),
        ("dvc", signal.SIGTERM),
        ("dvc", signal.SIGKILL),
        ("make", signal.SIGKILL),
    ],
)
def test_stopping_leaves_nothing(project: Any, victim: str, number: signal.Signals) -> None:
    project.make_checkout("sleep")
    process = project.make_repro() if victim == "make" else project.start(module="pipeline.repro")
    project.started_pids()
    victims = {
        "make": lambda pid: [pid],
        "terminal": group_of,
        "repro": lambda pid: [pid],
        "dvc": lambda pid: [child_of(pid)],
    }
    for pid in victims[victim](process.pid):
        os.kill(pid, number)
    assert process.wait(20) != 0
    project.assert_all_end(10)
    assert (project.root / "seen" / "saved").exists()


def test_two_at_once_are_refused(project: Any) -> None:
    project.make_checkout("sleep")
    first = project.start(module="pipeline.repro")
    project.started_pids()
    code, output = project.run(module="pipeline.repro")
    assert code == 2
    assert output == (
        f"error: another `make repro` is running in {project.root}: wait for it, or stop it with ^C in its terminal.\n"
    )
    first.send_signal(signal.SIGTERM)
    first.wait(20)


def test_a_checkout_without_git_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").touch()
    with pytest.raises(UserError, match="has no \\.dvc and dvc\\.yaml: change to the project's own folder"):
        repro.require_checkout(tmp_path)
    (tmp_path / ".dvc").mkdir()
    with pytest.raises(UserError) as refused:
        repro.require_checkout(tmp_path)
    assert "is a checkout without Git, which DVC needs: run `git init`, or" in str(refused.value)
    (tmp_path / ".dvc" / "config.local").write_text("[core]\n    no_scm = true\n")
    repro.require_checkout(tmp_path)
    (tmp_path / ".dvc" / "config.local").unlink()
    (tmp_path / ".git").mkdir()
    repro.require_checkout(tmp_path)


def test_params_are_checked_again_when_they_or_the_code_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALAMBIQUE_WORK", str(tmp_path / "work"))
    monkeypatch.setattr(repro, "check", lambda: checks.append(1) or True)
    (tmp_path / "params.yaml").write_text("a: 1")
    prefect = Prefect()
    for expected in (1, 1):
        repro.check_params_once(prefect)
        assert len(checks) == expected
    (tmp_path / "params.yaml").write_text("a: 2")
    repro.check_params_once(prefect)
    assert len(checks) == 2
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text("x = 1")
    repro.check_params_once(prefect)
    assert len(checks) == prefect.starts == 3  # a run in which nothing changed starts no server


def test_a_check_that_knew_no_shapes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALAMBIQUE_WORK", str(tmp_path / "work"))
    for all_known, expected in ((False, 1), (False, 2), (True, 3), (True, 3)):
        monkeypatch.setattr(repro, "check", lambda all_known=all_known: checks.append(1) or all_known)
        repro.check_params_once(Prefect())
        assert len(checks) == expected


@pytest.mark.parametrize(("known", "expected"), [(True, True), (False, False)])
def test_the_check_runs_in_a_process_of_its_own(
    known: bool, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    if not known:
        monkeypatch.setenv("ALAMBIQUE_ASSETS", str(tmp_path))  # a fresh machine
    monkeypatch.setenv("ALAMBIQUE_SKIP_FIT", str(int(known)))
    assert repro.check() is expected
    assert capfd.readouterr() == ("", "")


def test_what_the_check_refuses_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text().replace("distill:", "destill:", 1))
    with pytest.raises(SystemExit) as left:
        repro.check()
    assert left.value.code == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors == "error: params.yaml: unknown section destill; did you mean distill?\n"


class Prefect(Service):
    """Counts, in place of a server."""

    starts = 0

    def start(self) -> None:
        self.starts += 1


def child_of(pid: int) -> int:
    found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if stat(path, 1) == pid]
    assert len(found) == 1
    return found[0]


def group_of(pid: int) -> list[int]:
    """Processes in the group of ``pid`` that are not this test: what a terminal's ^C reaches."""
    group = os.getpgid(pid)
    below, todo = [], [pid]
    while todo:
        parent = todo.pop()
        below.append(parent)
        todo += [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if stat(path, 1) == parent]
    return [process for process in below if os.getpgid(process) == group]


def stat(path: Path, field: int) -> int:
    try:
        return int(path.read_text().rpartition(")")[2].split()[field])
    except OSError:
        return -1


LOCK = """schema: '2.0'
stages:
  prepare@tiny:
    cmd: exec python -m pipeline.run prepare tiny
    deps:
    - path: pipeline/prepare.py
      hash: md5
      md5: 0123456789abcdef0123456789abcdef
      size: 2843
    params:
      params.yaml:
        prepare:
          seed: 0
        teachers.tiny.model: file:models/tiny
    outs:
    - path: artifacts/prepare/tiny
      hash: md5
      md5: 0123456789abcdef0123456789abcdef.dir
      size: 25102
      nfiles: 3
"""


def test_a_dvc_lock_that_dvc_would_refuse_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut at any byte: it is removed, or DVC takes it."""
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA
    from dvc.utils.serialize import parse_yaml

    path = tmp_path / "dvc.lock"
    repro.mend_lock(path)  # nothing there, nothing said
    kept = 0
    for length in range(len(LOCK)):
        path.write_text(LOCK[:length])
        repro.mend_lock(path)
        if path.exists():
            kept += 1
            COMPILED_LOCKFILE_SCHEMA(parse_yaml(LOCK[:length], path))
    assert kept == 12
    capsys.readouterr()
    path.write_text(LOCK)
    repro.mend_lock(path)
    assert path.read_text() == LOCK
    assert capsys.readouterr().err == ""


def test_a_half_written_rwlock_is_removed_and_a_whole_one_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rwlock"
    repro.mend_rwlock(path)  # nothing there, nothing said
    path.write_text('{"a": {"write": {"pid": 1, "cmd": "dvc"}}}')
    repro.mend_rwlock(path)
    assert path.is_file()
    assert capsys.readouterr().err == ""
    for half in ("", '{"a": '):
        path.write_text(half)
        repro.mend_rwlock(path)
        assert not path.exists()
        assert "which a killed DVC left half-written" in capsys.readouterr().err
