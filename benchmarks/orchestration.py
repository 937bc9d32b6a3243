"""Case ``orchestration``: what DVC, Prefect and MLflow cost over the bare jobs, and a run in which nothing changed.

The pipeline runs in a clone as `make repro` runs it, timed by the lines that DVC writes, and then each of its jobs
alone (`python -m pipeline.STAGE KEY`) in a second clone, in the same order. Both use the downloads of this checkout, so
that none is timed; they run one after the other, and what neighbours take from the machine in between counts: processor
time, over all processes, is the steadier figure. ``--quick`` takes the tests' tiny checkout, whose jobs are a few
seconds long: its share means nothing, its seconds per stage do.

Two runs of minutes differ by what the host does meanwhile. What lies outside the jobs' own processes in the one run
doesn't: ``outside_jobs_s``, the cost but for what a job loses to those who watch it.

Last line: ``cost_s_per_stage`` and ``cost_share`` by the clock, ``cost_cpu_s_per_stage``, the number of ``stages``, and
``noop_20_pairs_s``: the median of ``--repeats`` times `dvc repro` with 20 pairs and nothing to do. The cost holds the
check of params.yaml and the last screen, which nobody would go without; ``orchestration_share`` is that of DVC, Prefect
and MLflow alone, with both of them among the bare jobs.
"""

import contextlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from alambique.core.errors import UserError
from alambique.core.places import assets_dir
from benchmarks.cases import Options, Outcome
from benchmarks.records import ROOT
from pipeline.jobs import KEEP_PAGES, command
from pipeline.run import GPU_STAGES, STAGES
from tests.tiny_checkout import Checkout

_PAIRS = 20  # source: the acceptance line
_LOOK_SECONDS = 0.25  # assumption: within half a second over fifteen stages, and a hundredth of a core
_JOBS = [["-m", f"pipeline.{stage}"] for stage in STAGES]


@dataclass
class Spent:
    """Seconds by the clock, and processor seconds of all processes that were waited for."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


class Jobs(threading.Thread):
    """Adds up the ``seconds`` in which a stage's own process lived below process ``pid``, by looking now and then."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="jobs", daemon=True)
        self._root = psutil.Process(pid)
        self.seconds = 0.0

    def run(self) -> None:
        """Look until the process is gone."""
        last = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            while self._root.status() != psutil.STATUS_ZOMBIE:
                found = self._job_lives()
                now = time.monotonic()
                self.seconds += (now - last) * found
                last = now
                time.sleep(_LOOK_SECONDS)

    def _job_lives(self) -> bool:
        for process in self._root.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if process.cmdline()[1:3] in _JOBS:
                    return True
        return False


def run(options: Options) -> Outcome:
    """Run both, and the run of many pairs."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = Checkout(Path(folder) / "first"), Checkout(Path(folder) / "second")
        for place in (first, second):
            place.root.mkdir()
            _fill(place, options.quick)
        jobs, whole, outside_s = _orchestrated(first)
        shutil.copy(first.root / "dvc.lock", second.root)  # a report reads what DVC knows of its chain
        check = _timed(second, [sys.executable, "-m", "pipeline.check"])
        bare = {stage: _bare(second, words) for stage, words, _ in jobs}
        screen = _timed(second, [sys.executable, "-m", "pipeline.last_screen"])
        many = Checkout(Path(folder) / "many")
        many.build_pairs(_PAIRS)
        idle = [_timed(many, ["dvc", "repro"]).wall_s for _ in range(options.repeats)]
    rows: list[dict[str, Any]] = [
        {"stage": stage, "orchestrated_s": wall_s, "bare_s": bare[stage].wall_s, "cost_s": wall_s - bare[stage].wall_s}
        for stage, _, wall_s in jobs
    ]
    aside = check.wall_s + screen.wall_s
    rows += [
        {"stage": "check of params.yaml", "bare_s": check.wall_s},
        {"stage": "last screen", "bare_s": screen.wall_s},
    ]
    total = Spent(sum(one.wall_s for one in bare.values()), sum(one.cpu_s for one in bare.values()))
    rows.append(
        {"stage": "all", "orchestrated_s": whole.wall_s, "bare_s": total.wall_s, "cost_s": whole.wall_s - total.wall_s,
         "orchestrated_cpu_s": whole.cpu_s, "bare_cpu_s": total.cpu_s}
    )  # fmt: skip
    summary = {
        "cost_s_per_stage": (whole.wall_s - total.wall_s) / len(jobs),
        "cost_share": (whole.wall_s - total.wall_s) / whole.wall_s,
        "orchestration_share": (whole.wall_s - total.wall_s - aside) / whole.wall_s,
        "outside_jobs_s": outside_s,
        "outside_jobs_share": outside_s / whole.wall_s,
        "cost_cpu_s_per_stage": (whole.cpu_s - total.cpu_s) / len(jobs),
        "stages": len(jobs),
        "noop_20_pairs_s": median(idle),
    }
    note = "`all` orchestrated holds the check and the last screen too; stages are timed from one to the next"
    return Outcome(
        [*rows, {"stage": f"nothing to do, {_PAIRS} pairs", "orchestrated_s": median(idle)}], summary, [note]
    )


def _fill(place: Checkout, tiny: bool) -> None:
    if tiny:
        place.build()
        return
    place.command("git", "clone", "--quiet", str(ROOT), ".")
    if not assets_dir().is_dir():
        raise UserError(f"benchmarks: {assets_dir()} has no downloads to share: run `make repro` here first.")
    place.env["ALAMBIQUE_ASSETS"] = str(assets_dir().resolve())


def _orchestrated(place: Checkout) -> tuple[list[tuple[str, list[str], float]], Spent, float]:
    """What `make repro` executed, in order: stage, the words of its job, seconds until the next.

    Then the whole, and the seconds of it in which no job's process lived.
    """
    marks, words, name = list[float](), list[tuple[str, list[str]]](), ""
    before, began = _cpu_s(), time.monotonic()
    output = []
    with subprocess.Popen(
        [sys.executable, "-m", "pipeline.repro"], cwd=place.root, env=place.env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        lives = Jobs(process.pid)
        lives.start()
        for line in process.stdout or ():
            output.append(line)
            if found := re.match(r"Running stage '(.+)'", line):
                name = found[1]
                marks.append(time.monotonic())
            elif found := re.match(r"> exec python -m pipeline\.run (.+)", line):
                words.append((name, found[1].split()))
            elif line.startswith("To track the changes"):  # DVC has done its last stage
                marks.append(time.monotonic())
    if process.returncode != 0:
        raise UserError(f"benchmarks: `make repro` failed:\n{''.join(output[-20:])}")
    whole = Spent(time.monotonic() - began, _cpu_s() - before)
    marks.append(time.monotonic())
    stages = [(stage, job, marks[n + 1] - marks[n]) for n, (stage, job) in enumerate(words)]
    return stages, whole, whole.wall_s - lives.seconds


def _bare(place: Checkout, words: list[str]) -> Spent:
    """A job alone, with the allocator's settings that the pipeline would give it: they are no cost of orchestration."""
    if words[0] in GPU_STAGES and not torch.cuda.is_available():
        place.env["GLIBC_TUNABLES"] = KEEP_PAGES
    else:
        place.env.pop("GLIBC_TUNABLES", None)
    return _timed(place, command(words[0], words[1:]))


def _timed(place: Checkout, words: list[str]) -> Spent:
    before, began = _cpu_s(), time.monotonic()
    place.command(*words)
    return Spent(time.monotonic() - began, _cpu_s() - before)


def _cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
