"""Twenty kills at random moments, across the stages of a real pipeline on a tiny model, each followed by `make repro`.

Minutes long: it runs with ALAMBIQUE_LONG_TESTS=SEED, and the seed chooses order and moments. Run it with `-s` to watch.
"""

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.tiny_checkout import ROOT, Checkout, say

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("ALAMBIQUE_LONG_TESTS"), reason="ten minutes: runs with ALAMBIQUE_LONG_TESTS=1"
    ),
]

MARK = "TEST_RUN_MARK"
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
# Who is hit by what. "terminal" is ^C: the whole foreground group. "everything" is a power cut, as far as processes go.
ANYWHERE = [
    ("make", KILL), ("make", TERM), ("repro", KILL), ("dvc", KILL), ("run", KILL), ("job", KILL), ("terminal", INT),
    ("everything", KILL),
]  # fmt: skip
STAGES = ("prepare", "teacher", "student", "distill", "evaluate", "report")
# How many kills each stage gets: 12 with a GPU's orchestration, 8 without.
GPU_STAGES, CPU_STAGES = {"teacher": 4, "distill": 4, "evaluate": 4}, {"prepare": 3, "student": 3, "report": 2}
LOOK_SECONDS = 0.05  # limits count looks, not the clock: this machine may stop all of us for a while
GONE_WITHIN_SECONDS = 40.0  # ALAMBIQUE_STOP_SECONDS, pipeline.run.REPORT_SECONDS and the server's five, and some air
# What the clock, the machine's memory and the kills themselves decide; everything else must be equal.
CLOCK = re.compile(r"second|_per_s|_s_per|peak_mib|mfu|speed|data_wait_share|reused_blocks|resumed_from_step")


def deal(rng: random.Random) -> dict[str, list[tuple[str, signal.Signals]]]:
    """Twenty kills by stage: every kind, in a random order."""
    cpu, gpu = ANYWHERE.copy(), [*ANYWHERE, ("flow", KILL), ("flow", KILL)]
    rng.shuffle(cpu)
    rng.shuffle(gpu)
    without_server = rng.choice(sorted(GPU_STAGES))
    plan: dict[str, list[tuple[str, signal.Signals]]] = {}
    for stage, number in GPU_STAGES.items():
        # The stage survives its server: that kill comes last, or those after it would find the stage done.
        server = [] if stage == without_server else [("server", KILL)]
        plan[stage] = [gpu.pop() for _ in range(number - len(server))] + server
    for stage, number in CPU_STAGES.items():
        plan[stage] = [cpu.pop() for _ in range(number)]
    assert not cpu
    assert not gpu
    return plan


@dataclass
class Watched:
    """A checkout, its marked processes, and `make repro` there, one run after the other."""

    checkout: Checkout
    log: Path
    make: subprocess.Popen[bytes] | None = None
    runs: int = 0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mark = f"{MARK}={self.checkout.root}"
        shutil.copy(ROOT / "Makefile", self.checkout.root / "Makefile")
        self.env = {name: value for name, value in self.checkout.env.items() if not name.startswith(("PREFECT", "DVC"))}
        self.env |= {MARK: str(self.checkout.root), "TMPDIR": str(self.log.parent)}
        self.env |= {"CUDA_VISIBLE_DEVICES": "", "ALAMBIQUE_RETRY_DELAY_SECONDS": "1"}

    def start(self) -> None:
        """`make repro`, as at a terminal: a foreground group of its own, with ^C at its default."""
        self.runs += 1
        with self.log.open("a") as log:
            log.write(f"\n===== run {self.runs}\n")
            log.flush()
            self.make = subprocess.Popen(
                ["make", "-o", ".venv/.ok", "repro"],  # -o: the environment of this test, not one of its own
                cwd=self.checkout.root, env=self.env, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=lambda: signal.signal(INT, signal.SIG_DFL),
            )  # fmt: skip

    def running(self) -> bool:
        return self.make is not None and self.make.poll() is None

    def processes(self) -> dict[int, list[str]]:
        """Command lines of all living processes that carry the mark or work in the checkout."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                marked = self.mark in (entry / "environ").read_text(errors="replace").split("\0")
                if state != "Z" and (marked or (entry / "cwd").readlink() == self.checkout.root):
                    found[int(entry.name)] = words
        return found

    def by_role(self, role: str) -> dict[int, str]:
        """Processes of one role, with what they are about (a job's stage and key)."""
        return {pid: what for pid, words in self.processes().items() for name, what in [role_of(words)] if name == role}

    def locked_stages(self) -> set[str]:
        """Stages that DVC has finished."""
        path = self.checkout.root / "dvc.lock"
        with contextlib.suppress(OSError):
            return set((YAML(typ="safe").load(path.read_text()) or {}).get("stages", {}))
        return set()

    def stages_of_last_run(self) -> list[str]:
        return Checkout.stages_run(self.log.read_text().rpartition(f"===== run {self.runs}\n")[2])

    def scratch(self) -> tuple[set[str], int]:
        """What a kill may not take: shards with a receipt, and the step of the newest whole checkpoint."""
        work = self.checkout.root / ".work"
        shards = {path.stem for path in work.glob("teacher/*/*.json")}
        steps = [int(path.parent.name.removeprefix("step_")) for path in work.glob("distill/*/step_*/manifest.json")]
        return shards, max(steps, default=0)

    def wait_for_the_end(self, seconds: float) -> float:
        """Wait until nothing that carries the mark lives; what stays longer is a problem, and killed. Seconds taken."""
        began, looks = time.monotonic(), 0
        while self.running() or self.processes():
            looks += 1
            if looks * LOOK_SECONDS > seconds:
                left = [" ".join(words)[-60:] for words in self.processes().values()]
                self.problem(f"still there after {seconds:.0f} s: {sorted(left)}")
                self.kill_all()
                break
            time.sleep(LOOK_SECONDS)
        assert self.make is not None
        self.make.wait(10)
        return time.monotonic() - began

    def kill_all(self) -> None:
        """End what carries the mark and whatever it starts meanwhile."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, KILL)
            time.sleep(LOOK_SECONDS)

    def look_for_locks(self) -> None:
        """Slots, stage locks and the checkout's own lock must be free.

        Within a second: the kernel takes a killed process's memory, and with it the mark, before it closes its files.
        """
        root = self.checkout.root
        for path in [*root.glob(".work/slots/*"), *root.glob(".work/locks/*"), root / ".dvc"]:
            end = time.monotonic() + 1.0
            while held := is_held(path):
                if time.monotonic() > end:
                    break
                time.sleep(LOOK_SECONDS)
            if held:
                self.problem(f"{path} is still held")

    def problem(self, sentence: str) -> None:
        say(f"PROBLEM: {sentence}")
        self.problems.append(f"run {self.runs}: {sentence}")


def is_held(path: Path) -> bool:
    """Whether another process has locked a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def role_of(words: list[str]) -> tuple[str, str]:
    """A process's part in a run, by its command line, and its last words."""
    if Path(words[0]).name == "make":
        return "make", ""
    if "-m" not in words[:-1]:
        return "other", ""
    module, *rest = words[words.index("-m") + 1 :]
    what = module.removeprefix("pipeline.")
    if module == "prefect":
        return "server", ""
    if module == "dvc" or what in ("repro", "run", "flow"):
        return what, " ".join(rest)
    return ("job", " ".join([what, *rest])) if what in STAGES else ("other", "")


def undisturbed(watched: Watched) -> dict[str, float]:
    """Run to the end without a kill; seconds that the jobs took, by stage (the longest of several)."""
    began: dict[str, float] = {}
    seen: dict[str, float] = {}
    watched.start()
    while watched.running():
        for what in watched.by_role("job").values():
            seen[what] = time.monotonic() - began.setdefault(what, time.monotonic())
        time.sleep(0.05)
    assert watched.make is not None
    assert watched.make.returncode == 0, watched.log.read_text()[-4000:]
    return {stage: max(took for what, took in seen.items() if what.split()[0] == stage) for stage in STAGES}


def strike(watched: Watched, victim: str, number: signal.Signals) -> str | None:
    """Send the signal; what was hit, or None if nobody was there."""
    if victim == "terminal":
        assert watched.make is not None
        os.killpg(watched.make.pid, number)
        return "the foreground group"
    found = watched.processes()
    targets = {pid: words for pid, words in found.items() if victim in ("everything", role_of(words)[0])}
    for pid in sorted(targets):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return f"{len(targets)} processes" if targets else None


class Chain:
    """The twenty kills, in the order in which DVC comes to their stages."""

    def __init__(self, watched: Watched, seconds: dict[str, float], rng: random.Random) -> None:
        self.watched, self.seconds, self.rng = watched, seconds, rng
        self.plan = deal(rng)
        self.hits: Counter[tuple[str, str]] = Counter()
        self.slowest_end = 0.0
        self.struck: set[int] = set()  # jobs that have had a kill: a survivor gets no second one

    def run(self) -> None:
        while any(self.plan.values()):
            if not self.watched.running():
                self.begin()
            pid, what = self.next_job()
            self.one(pid, what)

    def begin(self) -> None:
        self.done, self.saved = self.watched.locked_stages(), self.watched.scratch()
        self.move_kills()
        self.watched.start()

    def move_kills(self) -> None:
        """Give the kills of a stage that is done, in spite of some, to one that is still to come."""
        done = {name.replace("_", "@").split("@")[0] for name in self.done}
        done -= {"evaluate"} if not any(name.startswith("evaluate_heldout") for name in self.done) else set()
        for stage in done & self.plan.keys():
            kills, self.plan[stage] = self.plan[stage], []
            for kill in kills:
                open_to = GPU_STAGES if kill[0] in ("flow", "server") else STAGES
                to_come = [other for other in STAGES if other in open_to and other not in done]
                assert to_come, f"nothing is left to be killed: {kill}"
                self.plan[to_come[0]].append(kill)

    def next_job(self) -> tuple[int, str]:
        """Wait for a job of a stage that still has a kill to come."""
        for _ in range(round(300 / LOOK_SECONDS)):
            for pid, what in self.watched.by_role("job").items():
                if pid not in self.struck and self.plan[what.split()[0]]:
                    return pid, what
            if not self.watched.running():
                self.after_the_end()
                self.begin()
            time.sleep(LOOK_SECONDS)
        pytest.fail(f"no job of {[s for s, left in self.plan.items() if left]} within five minutes")

    def one(self, pid: int, what: str) -> None:
        """Wait for a moment of the job's life, or the commit of its results after it, and strike."""
        stage = what.split()[0]
        last = stage == "report" and len(self.plan[stage]) == 1  # too late, and nothing would be left to kill
        moment = self.rng.uniform(0, 0.8 if last else 1.1) * self.seconds[stage]
        began = time.monotonic()
        while time.monotonic() - began < moment and Path(f"/proc/{pid}").exists():
            time.sleep(0.01)
        victim, number = self.plan[stage].pop(0)
        hit = strike(self.watched, victim, number)
        if hit is None:  # gone since: its turn comes with another job
            victim, number = "dvc", KILL
            hit = strike(self.watched, victim, number)
        self.struck.add(pid)
        left = f"{time.monotonic() - began:.1f} of about {self.seconds[stage]:.1f} s"
        total = sum(self.hits.values()) + 1
        say(f"{total:2d} {number.name} {victim} ({hit}) in {what}, {left}")
        self.hits[(f"{number.name} {victim}", stage)] += 1
        goes_on = victim == "server" or (victim == "job" and stage in GPU_STAGES)
        if not goes_on:
            self.after_the_end()

    def after_the_end(self) -> None:
        """What must hold once a run is over, however it came to its end."""
        took = self.watched.wait_for_the_end(GONE_WITHIN_SECONDS)
        self.slowest_end = max(self.slowest_end, took)
        self.watched.look_for_locks()
        if again := self.done & set(self.watched.stages_of_last_run()):
            self.watched.problem(f"ran again although finished: {sorted(again)}")
        shards, step = self.watched.scratch()
        finished = self.watched.locked_stages()
        if lost := self.saved[0] - shards:
            self.watched.problem(f"{len(lost)} finished shards are gone")
        if step < self.saved[1] and not any(name.startswith("distill@") for name in finished):
            self.watched.problem(f"the checkpoint of step {self.saved[1]} is gone, the newest is {step}")
        if lost_stages := self.done - finished:
            self.watched.problem(f"dvc.lock has forgotten {sorted(lost_stages)}")


def without_clock(value: Any) -> Any:
    """A results file's content without what the clock decides."""
    if isinstance(value, dict):
        return {key: without_clock(inner) for key, inner in value.items() if not CLOCK.search(key)}
    return [without_clock(inner) for inner in value] if isinstance(value, list) else value


def content(path: Path) -> Any:
    return without_clock(json.loads(path.read_text())) if path.suffix == ".json" else path.read_bytes()


def tree(root: Path, top: str) -> dict[str, Path]:
    return {path.relative_to(root).as_posix(): path for path in (root / top).rglob("*") if path.is_file()}


def differences(one: Path, other: Path) -> Iterator[str]:
    """Files of artifacts and results that only one checkout has, or that differ by more than times."""
    for top in ("artifacts", "results"):
        here, there = tree(one, top), tree(other, top)
        yield from (f"{name} is in one only" for name in sorted(here.keys() ^ there.keys()))
        for name in sorted(here.keys() & there.keys()):
            exact = top == "artifacts" or not name.endswith((".html", ".md"))  # pages tell the time that things took
            a, b = here[name], there[name]
            if exact and (a.read_bytes() != b.read_bytes() if top == "artifacts" else content(a) != content(b)):
                yield f"{name} differs"


def row_differences(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """What differs between two rows of MLflow by more than times and places."""
    for kind in ("params", "metrics"):
        a, b = without_clock(one[kind]), without_clock(other[kind])
        yield from (f"{kind} {name}" for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name))
        yield from (f"{kind} {name} is in one only" for name in sorted(one[kind].keys() ^ other[kind].keys()))
    yield from (f"tag {name} is in one only" for name in sorted(one["tags"].keys() ^ other["tags"].keys()))
    for kind in ("status", "artifacts", "datasets", "versions"):
        if one[kind] != other[kind]:
            yield f"{kind}: {one[kind]} and {other[kind]}"


def test_twenty_kills_lose_nothing(tmp_path: Path) -> None:
    seed = int(os.environ["ALAMBIQUE_LONG_TESTS"])
    began = time.monotonic()
    (tmp_path / "tmp").mkdir()
    original = Checkout(tmp_path / "undisturbed")
    original.build()
    copy = Checkout(tmp_path / "killed")
    original.command("git", "clone", "--quiet", ".", str(copy.root))
    reference, watched = Watched(original, tmp_path / "tmp/undisturbed.log"), Watched(copy, tmp_path / "tmp/killed.log")
    seconds = undisturbed(reference)
    say(f"undisturbed: {time.monotonic() - began:.0f} s, jobs { ({s: round(t, 1) for s, t in seconds.items()}) }")
    chain = Chain(watched, seconds, random.Random(seed))
    try:
        chain.run()
        chain.after_the_end()
    finally:
        watched.kill_all()
    watched.start()
    watched.wait_for_the_end(600)
    assert watched.make is not None
    assert watched.make.returncode == 0, watched.log.read_text()[-4000:]
    for number, line in enumerate(sorted(f"{kind} in {stage}" for kind, stage in chain.hits)):
        say(f"{number + 1:2d} {line}")
    say(f"{watched.runs} runs, the slowest end took {chain.slowest_end:.1f} s, {time.monotonic() - began:.0f} s in all")
    problems = [*watched.problems, *differences(original.root, copy.root)]
    rows, killed = original.rows(), copy.rows()
    assert [len(rows), len(killed)] == [1, 1]
    problems += row_differences(rows[0], killed[0])
    left = [path.name for path in (tmp_path / "tmp").iterdir() if path.suffix != ".log"]
    problems += [f"left in TMPDIR: {name}" for name in left]
    assert problems == []
