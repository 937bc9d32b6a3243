import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from pipeline import processes

ROOT = Path(__file__).parents[2]

SLEEP = "import time; time.sleep(300)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEP}"


def test_stop_kills_what_ignores_sigterm() -> None:
    process = processes.start([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    processes.stop(process, 0.3)
    assert process.returncode == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - began < 5.0
    process.stdout.close()


def test_child_dies_with_a_killed_parent() -> None:
    outer = f"""
import sys, time
from pipeline import processes
child = processes.start([sys.executable, "-c", {SLEEP!r}])
print(child.pid, flush=True)
time.sleep(300)
"""
    parent = subprocess.Popen([sys.executable, "-c", outer], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 10
    while alive(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_orphans_of_a_killed_child_are_adopted_and_stopped() -> None:
    middle = f"""
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    outer = f"""
import signal, sys
from pipeline import processes
sys.exit(processes.supervise([sys.executable, "-c", {middle!r}], signal.SIGTERM, 2.0))
"""
    done = subprocess.run([sys.executable, "-c", outer], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 128 + signal.SIGKILL
    assert not alive(int(done.stdout))


def test_supervise_kills_after_the_grace() -> None:
    outer = f"""
import signal, sys
from pipeline import processes
sys.exit(processes.supervise([sys.executable, "-c", {DEAF!r}], signal.SIGTERM, 1.0))
"""
    process = subprocess.Popen([sys.executable, "-c", outer], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGKILL
    process.stdout.close()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PRIORITY = """
import os, pathlib
group = pathlib.Path("/proc/self/autogroup")
print(os.getpriority(os.PRIO_PROCESS, 0), group.read_text().split()[-1] if group.exists() else "none", flush=True)
"""


def priority(behind: bool) -> list[str]:
    child = processes.start([sys.executable, "-c", PRIORITY], stdout=subprocess.PIPE, behind=behind)
    assert child.stdout is not None
    with child.stdout:
        words: list[str] = child.stdout.read().decode().split()
    child.wait()
    return words


def test_what_runs_behind_does_so_and_a_job_that_its_starter_begins_does_not() -> None:
    """Nice values of a thread and, where the kernel schedules by session, of its session."""
    before = priority(behind=False)
    for _ in range(5):
        thread_nice, session_nice = priority(behind=True)
        if session_nice in ("none", "10"):
            break
        time.sleep(0.2)  # who isn't root may write it once in 100 ms, on the whole machine
    assert int(thread_nice) == max(int(before[0]), 10)
    assert session_nice == ("none" if before[1] == "none" else "10")
    thread = threading.Thread(target=os.setpriority, args=(os.PRIO_PROCESS, 0, 19))
    thread.start()  # as a thread that imports Prefect steps back
    thread.join()
    assert priority(behind=False) == before
