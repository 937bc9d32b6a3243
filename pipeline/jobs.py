"""One job: a child process `python -m pipeline.STAGE KEY...` with GPU slots, a deadline and a verdict on its end.

Knows nothing of Prefect, and is not imported by stages, so that a change here makes no result stale.
"""

import contextlib
import enum
import fcntl
import hashlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alambique.core.environment import seconds, whole_number
from alambique.core.errors import UserError
from alambique.core.places import work_dir
from alambique.core.progress import PROGRESS_FILE
from pipeline import processes
from pipeline.terminal import Relay

_LOCK_WAIT_SECONDS = 30.0  # assumption: a stopped run of the same stage is still saving
EXIT_USER_ERROR = 2
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: stopped by a signal, with a checkpoint
# What a second try can get past: the GPU's memory was full of something else, or its neighbours went away.
_TRANSIENT = re.compile(
    r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory|\bnccl\w*Error\b"
    r"|NCCL (?:error|timeout|communicator)|Watchdog caught collective operation timeout"
)


class Status(enum.Enum):
    """How a job ended, by what to do about it."""

    OK = "ok"
    USER_ERROR = "user error"  # never retried: only a person can fix it
    RESUMABLE = "stopped"  # somebody asked it to stop; the next run goes on from its checkpoint
    RETRYABLE = "killed"  # may pass the next time
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """A job's end: its status, the exit status (negative: signal), and a phrase for people."""

    status: Status
    returncode: int
    reason: str


def classify(returncode: int, stderr_tail: str) -> Outcome:
    """Judge an ended job by its exit status and the last lines that it wrote to stderr."""
    if returncode == 0:
        return Outcome(Status.OK, 0, "finished")
    if returncode == EXIT_USER_ERROR:
        return Outcome(Status.USER_ERROR, returncode, "was refused")
    if returncode == EXIT_RESUMABLE:
        return Outcome(Status.RESUMABLE, returncode, "was stopped and can be resumed")
    if returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return Outcome(Status.RETRYABLE, returncode, "was killed (signal 9; often the machine's memory was full)")
    if found := _TRANSIENT.search(stderr_tail):
        return Outcome(Status.RETRYABLE, returncode, f"failed with {found.group()!r}")
    how = f"was ended by signal {-returncode}" if returncode < 0 else f"failed with exit status {returncode}"
    return Outcome(Status.FAILED, returncode, how)


# Without a GPU a step's tensors come from malloc, which by default gives large ones back at once and maps fresh pages
# for the next: 2.1 to 2.6 s for a training step of the embedded pair against 1.7 to 1.9 s (docs/log.md).
KEEP_PAGES = ":".join(
    f"glibc.malloc.{setting}"
    for setting in ("hugetlb=1", "mmap_max=0", f"trim_threshold={1 << 40}", "top_pad=67108864")
)
_CANCELLED = Outcome(Status.RESUMABLE, -signal.SIGTERM, "was stopped and can be resumed")


def command(stage: str, key: Sequence[str]) -> list[str]:
    """The job's command line."""
    return [sys.executable, "-m", f"pipeline.{stage}", *key]


@dataclass(frozen=True)
class Limits:
    """How many jobs may run, how long and how often, from the environment: none of it changes a result."""

    slots: int  # jobs at once on this host; 0: one per GPU
    capture_jobs: int  # jobs that share one capture; 0: one per GPU, or per group of GPUs that a teacher needs
    train_processes: int  # processes, each with a GPU where there are any, that train one student
    retries: int  # further attempts of a job that ended in a way that may pass
    retry_delay_seconds: float
    deadline_seconds: float
    stop_seconds: float  # between SIGTERM and SIGKILL

    @classmethod
    def from_env(cls) -> "Limits":
        """Read the variables in docs/environment.md.

        Raises:
            UserError: a value that can't be used.
        """
        return cls(
            slots=whole_number("ALAMBIQUE_SLOTS", 0),
            capture_jobs=whole_number("ALAMBIQUE_CAPTURE_JOBS", 0),
            train_processes=max(1, whole_number("ALAMBIQUE_TRAIN_PROCESSES", 1)),
            retries=whole_number("ALAMBIQUE_JOB_RETRIES", 1),  # assumption: what a retry can help, one helps
            retry_delay_seconds=seconds("ALAMBIQUE_RETRY_DELAY_SECONDS", 10.0),  # assumption: memory is free by then
            deadline_seconds=seconds("ALAMBIQUE_DEADLINE_SECONDS", 7 * 24 * 3600.0),  # assumption: a week is a hang
            stop_seconds=seconds("ALAMBIQUE_STOP_SECONDS", 10.0),  # assumption: a checkpoint; more for large models
        )


def visible_gpus() -> list[str]:
    """GPU names for CUDA_VISIBLE_DEVICES: what that variable already allows, or every GPU that the driver lists."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip() not in ("", "-1")]
    nvml = importlib.import_module("pynvml")  # cheap, where importing torch takes seconds
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, no GPU
        return []
    return [str(index) for index in range(nvml.nvmlDeviceGetCount())]


def try_lock(path: Path) -> int | None:
    """Take an exclusive flock on ``path`` and return its descriptor, or None while another process holds it.

    The kernel frees the lock when the last process that holds the descriptor ends, however it ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def slug(stage: str, key: Sequence[str]) -> str:
    """The job's name in file names: stage, key, and the checkout, because experiments share one work folder."""
    checkout = hashlib.sha256(str(Path.cwd()).encode()).hexdigest()[:8]
    return "-".join([stage, *key, checkout]).replace("/", "of")  # part 1/2 of a key


@contextlib.contextmanager
def stage_lock(stage: str, key: Sequence[str]) -> Iterator[int]:
    """Hold the lock of one stage and key, so that two runs can't write the same files; gives its descriptor.

    Raises:
        UserError: another run still held it after 30 seconds.
    """
    path = work_dir() / "locks" / f"{slug(stage, key)}.lock"
    end = time.monotonic() + _LOCK_WAIT_SECONDS
    while (descriptor := try_lock(path)) is None:
        if time.monotonic() > end:
            raise UserError(
                f"another process ({path.read_text().strip() or 'unknown'}) is running {stage} {' '.join(key)} in this "
                "checkout: wait for it or stop it, then run again."
            )
        time.sleep(0.2)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Job:
    """One job and its restarts. Use it in a ``with`` block: nothing that it started outlives the block.

    ``outcome`` is the verdict on the latest attempt; ``attempts`` counts the processes started, and
    ``started_at`` is the time, in seconds since the epoch, of the latest.

    A thread may run the job while another calls :meth:`cancel`.

    Args:
        stage: and
        key: what to run.
        gpus: that it needs, where there are any.
        beside: jobs that are meant to run at once; without a GPU for each they share one, or the CPU.
    """

    def __init__(self, stage: str, key: Sequence[str], gpus: int = 1, beside: int = 1) -> None:
        self.stage, self.key = stage, tuple(key)
        self.label = " ".join([stage, *key])
        self.limits = Limits.from_env()
        self.outcome: Outcome | None = None
        self.attempts = 0
        self.progress_file = work_dir() / "progress" / f"{slug(stage, key)}.jsonl"
        self._gpus = visible_gpus()
        self._slots = self.limits.slots or max(len(self._gpus), beside)
        self._needs = gpus if self._gpus else 1
        self._process: subprocess.Popen[bytes] | None = None
        self._relay: Relay | None = None
        self._held: dict[str, int] = {}  # by GPU, the descriptor that holds its slot
        self._mutex = threading.Lock()  # held while the process is started or stopped
        self.cancelled = False
        self._locks = contextlib.ExitStack()
        self._started = 0.0
        self.started_at = 0.0
        self._progress_read = 0

    def __enter__(self) -> "Job":
        self._lock = self._locks.enter_context(stage_lock(self.stage, self.key))
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop()
        finally:
            self._locks.close()

    def try_start(self) -> bool:
        """Start the process if it isn't started, nor cancelled; False while too many slots of the host are taken."""
        with self._mutex:
            if self._process is not None or self.cancelled:
                return True
            self._take_slots()
            if self._held:
                self._start()
            return bool(self._held)

    def _take_slots(self) -> None:
        """Take slots on as many GPUs as the job needs, or none."""
        for index in range(self._slots):
            gpu = self._gpus[index % len(self._gpus)] if self._gpus else ""
            if gpu not in self._held and (slot := try_lock(work_dir() / "slots" / str(index))) is not None:
                self._held[gpu] = slot
                if len(self._held) == self._needs:
                    return
        self._free_slots()

    def _free_slots(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])

    def _start(self) -> None:
        self.progress_file.parent.mkdir(parents=True, exist_ok=True)
        self.progress_file.write_bytes(b"")
        self._progress_read = 0
        env = {**os.environ, PROGRESS_FILE: str(self.progress_file)}
        if self._gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._held)
        else:
            env.setdefault("GLIBC_TUNABLES", KEEP_PAGES)
        self.outcome = None
        self.attempts += 1
        self._relay = Relay()
        self._started, self.started_at = time.monotonic(), time.time()
        # The job inherits the locks: they are held for as long as it lives, even if this process is killed.
        self._process = processes.start(
            command(self.stage, self.key),
            env=env,
            pass_fds=[self._lock, *self._held.values()],
            stderr=self._relay.write_end,
        )
        self._relay.close_write_end()

    def poll(self, seconds: float) -> Outcome | None:
        """Wait up to ``seconds``; return the verdict once the job has ended or has been stopped at its deadline."""
        if self.outcome is not None or self._process is None or self._relay is None:
            return self.outcome
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(seconds)
            self.stop()
            self.outcome = classify(code, self._relay.tail()) if code == 0 or not self.cancelled else _CANCELLED
            return self.outcome
        if time.monotonic() - self._started > self.limits.deadline_seconds:
            self.stop()
            reason = f"was stopped at its deadline of {self.limits.deadline_seconds:g} seconds"
            self.outcome = Outcome(Status.FAILED, self._process.returncode, reason)
        return self.outcome

    def wait(self) -> Outcome:
        """Start when a slot is free, and wait for the end."""
        while not self.try_start():
            time.sleep(0.5)
        while (outcome := self.poll(0.5)) is None:
            pass
        return outcome

    def stop(self) -> None:
        """End the process group if it lives (SIGTERM, time to save, SIGKILL) and free the slots."""
        with processes.interrupts_deferred(), self._mutex:
            if self._process is None or not self._held:
                return
            processes.stop(self._process, self.limits.stop_seconds)
            if self._relay is not None:
                self._relay.finish()
            self._free_slots()

    def cancel(self) -> None:
        """Ask the process to end, and never start another; :meth:`stop` waits for that."""
        with processes.interrupts_deferred(), self._mutex:
            self.cancelled = True
            if self._process is not None and self._held:
                processes.signal_group(self._process, signal.SIGTERM)
            elif self.outcome is None:
                self.outcome = _CANCELLED

    def reset(self) -> None:
        """Stop, and let the next :meth:`try_start` begin another attempt."""
        self.stop()
        self._process = None

    def new_lines(self) -> list[str]:
        """Lines of the job's stderr since the last call; of a progress bar only its latest state."""
        return self._relay.new_lines() if self._relay is not None else []

    def new_progress(self) -> list[dict[str, Any]]:
        """Progress records that the job has written since the last call (see ``alambique.core.progress``)."""
        with contextlib.suppress(FileNotFoundError), self.progress_file.open("rb") as stream:
            stream.seek(self._progress_read)
            whole, newline, _ = stream.read().rpartition(b"\n")
            self._progress_read += len(whole) + len(newline)
            return [json.loads(line) for line in whole.splitlines() if line]
        return []
