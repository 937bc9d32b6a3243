"""Processes that never outlive what started them. Standard library only: `pipeline.run` must start anywhere.

What signals alone can't promise, Linux does: a child can ask for a signal when its parent dies (PR_SET_PDEATHSIG), and
a process can adopt its orphaned descendants (PR_SET_CHILD_SUBREAPER). Elsewhere the two calls do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_BEHIND = 10  # assumption: a tenth of a job's weight, where it competes with one
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# DVC passes its own SIGTERM on, so one stop arrives twice within about 25 ms; a person's second ^C takes longer.
_SECOND_STOP_SECONDS = 3.0  # assumption


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send this process ``number`` when its parent ends, however that happens."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that :func:`stop_children` finds it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def step_back() -> None:
    """Let others go first, a job above all: this thread, and where Linux schedules by session this session.

    A product on all cores waits for its slowest thread, so that a second of another process on one core costs a second.
    What this thread starts without a session of its own stays behind too.
    """
    if sys.platform == "linux":  # elsewhere the whole process would step back for good, and its jobs with it
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, max(_BEHIND, os.getpriority(os.PRIO_PROCESS, 0)))  # of this thread
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(f"{_BEHIND}")  # sched(7)


def start(
    command: Sequence[str],
    stop_signal: signal.Signals = signal.SIGTERM,
    env: dict[str, str] | None = None,
    pass_fds: Iterable[int] = (),
    stdout: int | None = None,
    stderr: int | None = None,
    behind: bool = False,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own (no ^C from the terminal); it gets ``stop_signal`` if we die.

    With ``behind`` it steps back (:func:`step_back`).

    Call from the main thread: the kernel watches the thread that started the child.
    """

    def prepare() -> None:
        die_with_parent(stop_signal)
        if behind:
            step_back()

    return subprocess.Popen(
        list(command),
        env=env,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        stdout=stdout,
        stderr=stderr,
        preexec_fn=prepare,
    )


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal every process left in the session group that :func:`start` made."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def stop(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """End ``process`` and its group: SIGTERM, ``grace_seconds`` to save, SIGKILL."""
    if process.poll() is None:
        signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    signal_group(process, signal.SIGKILL)  # also what an ended leader has left behind
    process.wait()


def stop_children(grace_seconds: float, spare: Iterable[int] = ()) -> None:
    """End every child of this process, adopted ones included but for those to ``spare``, and wait for them."""
    kill_at = time.monotonic() + grace_seconds
    told: set[int] = set()
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = _children() - set(spare)
        if not children:
            return
        late = time.monotonic() > kill_at
        for pid in children if late else children - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        told |= children
        time.sleep(0.02)


def _children() -> set[int]:
    """Process ids whose parent is this process; empty where there is no /proc."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the name before it may hold anything
        except OSError:  # ended meanwhile
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Keep ^C and SIGTERM until the block's end, then raise KeyboardInterrupt: for what must not be cut in half."""
    if threading.current_thread() is not threading.main_thread():  # where Python delivers no signals
        yield
        return
    seen: list[int] = []
    old = {n: signal.signal(n, lambda number, frame: seen.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if seen:
        raise KeyboardInterrupt


def supervise(
    command: Sequence[str],
    stop_signal: signal.Signals,
    grace_seconds: float,
    report_seconds: float = 0.0,
    pass_fds: Iterable[int] = (),
) -> int:
    """Run ``command`` to its end and return its exit status (128 + N for signal N).

    ^C, SIGTERM and SIGHUP reach it as one ``stop_signal``. Its group is killed after ``grace_seconds`` to stop and
    ``report_seconds`` to tell others, or at a second stop that comes 3 seconds after the first or later. Whatever it
    leaves behind is stopped before this returns; if this process is killed, the child gets ``stop_signal``.
    """
    adopt_orphans()
    die_with_parent(signal.SIGTERM)
    stops: list[float] = []
    child: subprocess.Popen[bytes] | None = None

    def ask(child: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, stop_signal)
        signal.alarm(max(1, round(grace_seconds + report_seconds)))

    def impatient() -> bool:
        return len(stops) > 1 and stops[-1] - stops[0] > _SECOND_STOP_SECONDS

    def on_stop(number: int, frame: FrameType | None) -> None:
        stops.append(time.monotonic())
        if child is not None and len(stops) == 1:
            ask(child)
        elif child is not None and impatient():
            signal_group(child, signal.SIGKILL)

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if child is not None:
            signal_group(child, signal.SIGKILL)

    for number in _STOP_SIGNALS:
        signal.signal(number, on_stop)
    signal.signal(signal.SIGALRM, on_alarm)
    child = start(command, stop_signal, pass_fds=pass_fds)
    if stops:  # it came while the child was being made
        ask(child)
    code = child.wait()
    signal.alarm(0)
    stop_children(0.0 if impatient() else grace_seconds)
    return code if code >= 0 else 128 - code
