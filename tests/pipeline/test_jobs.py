import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from alambique.core.errors import UserError
from pipeline import jobs, server
from pipeline.jobs import Job, Status, classify


@pytest.fixture
def here(bare_project: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run jobs of the fake project from this process."""
    monkeypatch.chdir(bare_project.root)
    for name in [name for name in os.environ if name.startswith(("ALAMBIQUE_", "DVC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ALAMBIQUE_STOP_SECONDS", "0.5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return bare_project


@pytest.mark.parametrize(
    ("code", "tail", "status"),
    [
        (0, "CUDA out of memory", Status.OK),
        (2, "CUDA out of memory", Status.USER_ERROR),
        (75, "", Status.RESUMABLE),
        (-9, "", Status.RETRYABLE),
        (137, "", Status.RETRYABLE),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", Status.RETRYABLE),
        (1, "torch.distributed.DistBackendError: NCCL error in: ...\nncclSystemError: ", Status.RETRYABLE),
        (-6, "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(", Status.RETRYABLE),
        (1, "ValueError: the loss is NaN", Status.FAILED),
        (-11, "", Status.FAILED),
    ],
)
def test_verdict(code: int, tail: str, status: Status) -> None:
    outcome = classify(code, tail)
    assert outcome.status is status
    assert outcome.returncode == code


def test_a_job_runs_reports_and_is_judged(here: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with Job("distill", ["ok"]) as job:
        outcome = job.wait()
        progress, lines = job.new_progress(), job.new_lines()
        assert job.new_progress() == []
    assert (outcome.status, job.attempts) == (Status.OK, 1)
    assert [point["done"] for point in progress] == [1, 2, 3, 4, 4]
    assert progress[0]["loss_nats"] == 1.0
    assert lines[-1] == "a line for the log"
    assert sum("fake:" in line for line in lines) == 1  # the bar's last state only
    assert "a line for the log" in capfd.readouterr().err


def test_another_attempt_is_a_new_process(here: Any) -> None:
    with Job("distill", ["killed_once"]) as job:
        assert job.wait().status is Status.RETRYABLE
        job.reset()
        assert job.wait().status is Status.OK
        assert job.attempts == 2


def test_the_last_lines_decide_a_retry(here: Any) -> None:
    (here.root / "pipeline" / "teacher.py").write_text("raise RuntimeError('CUDA out of memory. Tried to allocate')")
    with Job("teacher", ["x"]) as job:
        outcome = job.wait()
    assert (outcome.status, outcome.returncode) == (Status.RETRYABLE, 1)


def test_deadline_stops_the_job_and_is_not_retried(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALAMBIQUE_DEADLINE_SECONDS", "1")
    with Job("distill", ["stubborn"]) as job:
        outcome = job.wait()
    assert outcome.status is Status.FAILED
    assert outcome.reason == "was stopped at its deadline of 1 seconds"
    assert not any(_lives(pid) for pid in here.started_pids())


def test_leaving_the_block_ends_the_job_and_its_children(here: Any) -> None:
    with Job("distill", ["sleep"]) as job:
        assert job.try_start()
        pids = here.started_pids()
    assert not any(_lives(pid) for pid in pids)
    assert (here.root / "seen" / "saved").exists()


def test_one_slot_serves_one_job_at_a_time_and_gpus_are_shared_out(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    names = (["a", "sleep"], ["b", "ok"], ["c", "ok"])
    with contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(Job("distill", name)) for name in names)
        assert first.try_start()
        assert second.try_start()
        assert not third.try_start()
        assert second.wait().status is Status.OK
        assert third.wait().status is Status.OK
        here.started_pids()
    seen = [(here.root / "seen" / f"distill-{name}").read_text().split()[1] for name in map("-".join, names)]
    assert seen == ["3", "GPU-abc", "GPU-abc"]


def test_slots_are_counted_by_the_environment(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job("distill", ["a", "ok"]) as first, Job("distill", ["b", "ok"]) as second:
        assert first.try_start()
        assert not second.try_start()  # no GPU: one job
    monkeypatch.setenv("ALAMBIQUE_SLOTS", "2")
    with Job("distill", ["a", "ok"]) as first, Job("distill", ["b", "ok"]) as second:
        assert first.try_start()
        assert second.try_start()


def test_a_job_on_several_gpus_gets_all_of_them_or_waits(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    with Job("distill", ["a", "sleep"]) as one, Job("distill", ["b", "ok"], gpus=3) as three:
        assert one.try_start()
        assert not three.try_start()
        with Job("distill", ["c", "ok"], gpus=2) as two:  # what the waiting one could have, it doesn't hold
            assert two.wait().status is Status.OK
        one.stop()
        assert three.wait().status is Status.OK
    assert [(here.root / "seen" / f"distill-{name}").read_text().split()[1] for name in ("b-ok", "c-ok")] == [
        "5,6,7",
        "6,7",
    ]


def test_jobs_beside_each_other_share_a_gpu_or_the_cpu(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus in ("", "3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        with Job("distill", ["a", "ok"], beside=2) as first, Job("distill", ["b", "ok"], beside=2) as second:
            assert first.try_start()
            assert second.try_start()
            assert (first.wait().status, second.wait().status) == (Status.OK, Status.OK)
    assert (here.root / "seen" / "distill-b-ok").read_text().split()[-1] == "3"


def test_without_a_gpu_a_job_keeps_its_pages(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def environment() -> str:
        with Job("distill", ["sleep"]) as job:
            assert job.try_start()
            assert job._process is not None
            found = Path(f"/proc/{job._process.pid}/environ").read_bytes()
        return found.replace(b"\0", b":").decode()  # glibc ends each setting with a zero of its own when it reads them

    assert f"GLIBC_TUNABLES={jobs.KEEP_PAGES}:" in environment()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert "GLIBC_TUNABLES" not in environment()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "GLIBC_TUNABLES=glibc.malloc.check=0:" in environment()


def test_a_cancelled_job_ends_and_is_not_started_again(here: Any) -> None:
    with Job("distill", ["sleep"]) as job, Job("distill", ["ok"]) as waiting:
        job.try_start()
        pids = here.started_pids()
        assert not waiting.try_start()
        for each in (waiting, job):
            each.cancel()
        outcome = job.wait()
        assert (outcome.status, outcome.reason) == (Status.RESUMABLE, "was stopped and can be resumed")
        job.reset()
        assert waiting.wait().status is Status.RESUMABLE
        assert (job.attempts, waiting.attempts) == (1, 0)
    assert not any(_lives(pid) for pid in pids)


def test_a_killed_holder_frees_the_slot_when_its_job_has_ended(here: Any) -> None:
    code = """
import time
from pipeline.jobs import Job
with Job("distill", ["sleep"]) as job:
    job.try_start()
    time.sleep(300)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=here.root, stderr=subprocess.DEVNULL)
    job_pid, _ = here.started_pids()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with Job("distill", ["ok"]) as job:
        assert job.wait().status is Status.OK  # waits for the slot, which the dying job still holds
    assert not _lives(job_pid)


def test_two_runs_of_one_stage_are_refused(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_LOCK_WAIT_SECONDS", 0.3)
    with jobs.stage_lock("distill", ["pair"]), jobs.stage_lock("distill", ["other"]):
        with pytest.raises(UserError) as refused, jobs.stage_lock("distill", ["pair"]):
            pass
        assert str(refused.value) == (
            f"another process ({os.getpid()}) is running distill pair in this checkout: "
            "wait for it or stop it, then run again."
        )
    with jobs.stage_lock("distill", ["pair"]):
        pass


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("ALAMBIQUE_SLOTS", "many", "ALAMBIQUE_SLOTS=many must be a whole number, 0 or more: correct or unset it."),
        (
            "ALAMBIQUE_JOB_RETRIES",
            "-1",
            "ALAMBIQUE_JOB_RETRIES=-1 must be a whole number, 0 or more: correct or unset it.",
        ),
        (
            "ALAMBIQUE_DEADLINE_SECONDS",
            "nan",
            "ALAMBIQUE_DEADLINE_SECONDS=nan must be a number of seconds, 0 or more: correct or unset it.",
        ),
    ],
)
def test_wrong_limits_are_one_sentence(name: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refused:
        jobs.Limits.from_env()
    assert str(refused.value) == sentence


def test_gpus_are_those_that_the_environment_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert jobs.visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert jobs.visible_gpus() == []


def test_every_variable_of_ours_is_in_the_table() -> None:
    root = Path(__file__).parents[2]
    files = [path for folder in ("src", "pipeline", "benchmarks", "tests") for path in (root / folder).rglob("*.py")]
    code = "".join(path.read_text() for path in [*files, root / "Makefile", root / "prefect.yaml"])
    table = (root / "docs" / "environment.md").read_text()
    assert set(re.findall(r"ALAMBIQUE_\w+", code)) == set(re.findall(r"ALAMBIQUE_\w+", table))
    for name in server._DEFAULTS:
        assert name.removeprefix("PREFECT_LOGGING_LOGGERS_PREFECT") in table, name


def _lives(pid: int) -> bool:
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True
