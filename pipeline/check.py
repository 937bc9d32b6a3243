"""Check the whole of params.yaml before anything runs: `python -m pipeline.check [FILE]`.

Each stage checks its own section when it starts; this asks them all at once, so that a typing error in `distill`
doesn't wait for the teacher to finish.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from alambique.cache.config import CaptureConfig
from alambique.cache.sampled import require_tail
from alambique.core.errors import UserError, did_you_mean
from alambique.core.params import Config, Params
from alambique.evaluate import BenchmarkConfig, check_benchmarks
from alambique.plan import require_fit
from alambique.planning.machine import machine
from alambique.train.config import DistillConfig
from alambique.train.hidden import require_held
from pipeline.job import job_main, leave
from pipeline.run import STAGES

SKIP = "ALAMBIQUE_SKIP_FIT"


class TeacherEntry(Config):
    """One entry of `teachers`: a model and what its capture changes from the `teacher` section."""

    model: str
    capture: dict[str, Any]


class PairEntry(Config):
    """One entry of `pairs`: a key of `teachers`, and what this pair changes from `student` and `distill`."""

    teacher: str
    student: dict[str, Any]
    distill: dict[str, Any]


def check_params(path: Path = Path("params.yaml")) -> None:
    """Validate every section of ``path`` and every stage's settings, without a download, up to the first problem."""
    params = Params.load(path)
    sections = (*STAGES, "teachers", "pairs")
    for name in params.tree:
        if name not in sections:
            raise UserError(f"{path}: unknown section {name}{did_you_mean(name, sections)}")
    teachers = params.keys("teachers")
    pairs = params.keys("pairs")
    for teacher in teachers:
        params.section(TeacherEntry, f"teachers.{teacher}")
    for pair in pairs:
        entry = params.section(PairEntry, f"pairs.{pair}")
        if entry.teacher not in teachers:
            hint = did_you_mean(entry.teacher, teachers)
            raise UserError(f"{path}: pairs.{pair}.teacher = {entry.teacher} is not in teachers{hint}")
    for stage, *key in _every_job(teachers, pairs, params.keys("evaluate.benchmarks")):
        importlib.import_module(f"pipeline.{stage}").settings(params, *key)
        if stage == "distill":
            _check_tail(params, *key)
    benchmarks = params.keys("evaluate.benchmarks")
    check_benchmarks({name: params.section(BenchmarkConfig, f"evaluate.benchmarks.{name}") for name in benchmarks})


def check_fit(path: Path = Path("params.yaml")) -> bool:
    """Refuse stages that can't fit into this machine's memory; returns whether all of them could be looked at.

    Only models whose configuration is on this machine are: nothing is downloaded. A pair of the Hub is known once its
    prepare stage has fetched the tokenizer.

    Raises:
        UserError: the first stage that can't fit, what would, and how to run it all the same.
    """
    if os.environ.get(SKIP, "0") not in ("", "0"):
        return True
    try:
        return require_fit(Params.load(path), machine(None, None, timed=False))
    except UserError as error:
        raise UserError(f"{error} {SKIP}=1 runs it all the same.") from error


def _check_tail(params: Params, pair: str) -> None:
    """The loss must take the cache for what it will be; the `distill` stage would only find out hours later."""
    config = params.section(DistillConfig, "distill", f"pairs.{pair}.distill")
    if config.method != "online":  # which reads no cache
        teacher = params.get(f"pairs.{pair}.teacher")
        capture = params.section(CaptureConfig, "teacher", f"teachers.{teacher}.capture")
        require_tail(capture.sampling is not None, config.loss.tail, f"{params.source}: pairs.{pair}")
        if config.hidden is not None:
            require_held(config.hidden, capture.hidden_layers, f"{params.source}: teachers.{teacher}")


def _every_job(teachers: list[str], pairs: list[str], benchmarks: list[str]) -> list[tuple[str, ...]]:
    """The words after `pipeline.run` of every stage that dvc.yaml makes from these keys."""
    return [
        *((stage, teacher) for stage in ("prepare", "teacher") for teacher in teachers),
        *((stage, pair) for stage in ("student", "distill", "report") for pair in pairs),
        *(("evaluate", "teacher", teacher, benchmark) for teacher in teachers for benchmark in benchmarks),
        *(("evaluate", kind, p, b) for kind in ("student", "distill") for p in pairs for b in benchmarks),
        *(("evaluate", "heldout", pair) for pair in pairs),
    ]


def run(file: str = "params.yaml") -> None:
    """Print one line when all is well."""
    check_params(Path(file))
    print(f"{file}: every stage's settings are valid")


def main(unknown: int) -> NoReturn:
    """For `make repro`: check settings and fit, and leave with status 0 when all is well, with 2 when something isn't.

    Status ``unknown`` means: all is well as far as can be told, while some models aren't on this machine yet.
    """
    all_known = True

    def both() -> None:
        nonlocal all_known
        check_params()
        all_known = check_fit()

    leave(job_main(both) or (0 if all_known else unknown))


if __name__ == "__main__":
    sys.exit(job_main(run))
