"""Case ``orchestration``: what DVC, Prefect and MLflow cost over the bare jobs, and a run in which nothing changed.

Two runs of minutes, one orchestrated and one of bare jobs, differ by what the host does meanwhile, by as much as the
cost itself. So the cost is put together from two parts, each measured within its own minute:

- **outside**: the pipeline runs in a clone as `make repro` runs it, and a watcher adds up the seconds in which none of
  the commands that DVC starts (`python -m pipeline.run ...`) lived. It holds the check of params.yaml, DVC itself, and
  the last screen.
- **inside**: in a second clone each of these commands runs **in turn** with its bare job (`python -m pipeline.STAGE
  KEY`), ``--repeats`` times, one first and the other first by turns, on one Prefect server. The mean difference counts.

A stage's seconds in the whole, until the next began, stand beside (``in_the_whole_s``). Both use the downloads of this
checkout, so that none is timed. ``--quick`` takes the tests' tiny checkout, whose jobs are a few seconds long: its
share means nothing, its seconds per stage do.

Last line: ``cost_share`` of the whole run and its standard error ``cost_share_se`` (from the scatter of the pairs),
``cost_s_per_stage``, the number of ``stages``, both parts in seconds, and ``noop_20_pairs_s``: the median of
``--repeats`` times `dvc repro` with 20 pairs and nothing to do.
"""

import contextlib
import math
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import psutil
import torch

from alambique.core.errors import UserError
from alambique.core.places import assets_dir
from benchmarks.cases import Options, Outcome
from benchmarks.records import ROOT
from pipeline import server
from pipeline.jobs import KEEP_PAGES, command
from pipeline.run import CODE, GPU_STAGES
from tests.tiny_checkout import Checkout

_PAIRS = 20  # source: the acceptance line
_COMMAND = re.compile(r"> exec python -m pipeline\.run (.+)")
_LOOK_SECONDS = 0.25  # assumption: within half a second over fifteen stages, and a hundredth of a core


class Commands(threading.Thread):
    """Adds up the ``seconds`` in which a job's command lived below process ``pid``, by looking now and then."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="commands", daemon=True)
        self._root = psutil.Process(pid)
        self.seconds = 0.0

    def run(self) -> None:
        """Look until the process is gone."""
        last = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            while self._root.status() != psutil.STATUS_ZOMBIE:
                found = self._one_lives()
                now = time.monotonic()
                self.seconds += (now - last) * found
                last = now
                time.sleep(_LOOK_SECONDS)

    def _one_lives(self) -> bool:
        for process in self._root.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                words = process.cmdline()[1:4]
                if words[:2] == ["-m", "pipeline.run"] and words[2] != CODE:
                    return True
        return False


@dataclass
class Whole:
    """One `make repro`: what it executed, in order, as stage, words of its job, and seconds until the next stage."""

    jobs: list[tuple[str, list[str], float]]
    wall_s: float
    outside_s: float


def run(options: Options) -> Outcome:
    """Run the whole, then each job in turn, and the run of many pairs."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = Checkout(Path(folder) / "first"), Checkout(Path(folder) / "second")
        for place in (first, second):
            place.root.mkdir()
            _fill(place, options.quick)
        whole = _orchestrated(first)
        shutil.copy(first.root / "dvc.lock", second.root)  # a report reads what DVC knows of its chain
        with _prefect(second):
            rows: list[dict[str, Any]] = [
                {"stage": stage, "in_the_whole_s": seconds, **_in_turn(second, words, options.repeats)}
                for stage, words, seconds in whole.jobs
            ]
        many = Checkout(Path(folder) / "many")
        many.build_pairs(_PAIRS)
        idle = median(_seconds(many, ["dvc", "repro"]) for _ in range(options.repeats))
    inside_s = sum(float(row["cost_s"]) for row in rows)
    error_s = math.sqrt(sum(float(row["cost_se_s"]) ** 2 for row in rows))
    cost_s = whole.outside_s + inside_s
    summary = {
        "cost_share": cost_s / whole.wall_s,
        "cost_share_se": error_s / whole.wall_s,
        "cost_s_per_stage": cost_s / len(whole.jobs),
        "stages": len(whole.jobs),
        "outside_s": whole.outside_s,
        "inside_s": inside_s,
        "noop_20_pairs_s": idle,
    }
    rows += [
        {"stage": "all", "orchestrated_s": whole.wall_s, "cost_s": cost_s, "cost_se_s": error_s},
        {"stage": f"nothing to do, {_PAIRS} pairs", "orchestrated_s": idle},
    ]
    note = f"`all` holds {whole.outside_s:.1f} s outside the stages: the check, DVC, the last screen"
    return Outcome(rows, summary, [note])


def _in_turn(place: Checkout, words: list[str], repeats: int) -> dict[str, Any]:
    """One job as DVC starts it and alone, by turns; each from scratch."""
    env = place.env.copy()
    if words[0] in GPU_STAGES and not torch.cuda.is_available():
        env["GLIBC_TUNABLES"] = KEEP_PAGES  # the pipeline sets it for them: no cost of orchestration
    commands = {"watched": [sys.executable, "-m", "pipeline.run", *words], "alone": command(words[0], words[1:])}
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(repeats):
        for name in sorted(commands, reverse=bool(number % 2)):
            shutil.rmtree(place.root / ".work", ignore_errors=True)  # shards and checkpoints to go on from
            taken[name].append(_seconds(place, commands[name], env if name == "alone" else place.env))
    costs = [watched - alone for watched, alone in zip(taken["watched"], taken["alone"], strict=True)]
    return {
        "orchestrated_s": mean(taken["watched"]),
        "bare_s": mean(taken["alone"]),
        "cost_s": mean(costs),
        "cost_se_s": stdev(costs) / math.sqrt(repeats) if repeats > 1 else math.nan,
    }


@contextlib.contextmanager
def _prefect(place: Checkout) -> Iterator[None]:
    """One server for all jobs of ``place``, with its database there."""
    with contextlib.chdir(place.root), server.Service() as service:
        service.start()
        place.env |= service.env()
        if (url := place.env.get(server.API_URL)) is not None:
            server.wait_until_ready(url)
        yield


def _fill(place: Checkout, tiny: bool) -> None:
    if tiny:
        place.build()
        return
    place.command("git", "clone", "--quiet", str(ROOT), ".")
    if not assets_dir().is_dir():
        raise UserError(f"benchmarks: {assets_dir()} has no downloads to share: run `make repro` here first.")
    place.env["ALAMBIQUE_ASSETS"] = str(assets_dir().resolve())


def _orchestrated(place: Checkout) -> Whole:
    """Run `make repro`, watched.

    Raises:
        UserError: it failed.
    """
    output, marks, jobs = list[str](), list[float](), list[tuple[str, list[str]]]()
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "pipeline.repro"], cwd=place.root, env=place.env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        lives = Commands(process.pid)
        lives.start()
        for line in process.stdout or ():
            output.append(line)
            if line.startswith(("Running stage", "To track the changes")):  # the second when DVC has done its last
                marks.append(time.monotonic())
            elif found := _COMMAND.match(line):
                stage = output[-2].split("'")[1]
                jobs.append((stage, found[1].split()))
    wall_s = time.monotonic() - began
    if process.returncode != 0:
        raise UserError(f"benchmarks: `make repro` failed:\n{''.join(output[-20:])}")
    marks.append(time.monotonic())
    timed = [(stage, words, marks[n + 1] - marks[n]) for n, (stage, words) in enumerate(jobs)]
    return Whole([job for job in timed if job[0] != CODE], wall_s, wall_s - lives.seconds)


def _seconds(place: Checkout, words: list[str], env: dict[str, str] | None = None) -> float:
    began = time.monotonic()
    done = subprocess.run(
        words, cwd=place.root, env=env or place.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise UserError(f"benchmarks: {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return time.monotonic() - began
