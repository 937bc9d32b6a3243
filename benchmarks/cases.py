"""What can be measured: the cases by name, and the shapes of real models that they use.

A case is a module with ``run(options: Options) -> Outcome``, imported only when it is asked for, so that a case may
need more (Liger, transformers) than the others. Adding one is adding a line to ``CASES``.

Dimension letters: N tokens, D hidden size, V vocabulary, K kept entries.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """The head of one real model, and how many of its positions are in one call of the loss."""

    tokens: int
    hidden: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}x{self.vocab}"


SMOLLM2_135M = (576, 49_152)  # (D, V); source: the model's config.json
LLAMA32_1B = (2048, 128_256)  # source: as above
LLAMA31_8B = (4096, 128_256)  # source: as above; fits the published figures of the loss alone
TOP_K = 100  # source: the published cache


@dataclass(frozen=True)
class Options:
    """How a case is run.

    Attributes:
        device: where timings and measured peaks are taken.
        quick: tiny shapes, to see that everything runs; its figures mean nothing and are never recorded.
        repeats: timed runs of each contender, interleaved; the median counts.
        only: names of shapes, dtypes or contenders to keep, see ``keep``.
    """

    device: torch.device
    quick: bool = False
    repeats: int = 5
    only: tuple[str, ...] = ()

    def keep(self, names: Iterable[str]) -> list[str]:
        """Those of a group of names that ``only`` mentions; all of them if it mentions none of the group."""
        names = list(names)
        return [name for name in names if name in self.only] or names


@dataclass
class Outcome:
    """What a case found.

    Attributes:
        rows: one dict per figure or group of figures, JSON values only; these are recorded and printed as a table.
        summary: the last line, whose keys other tools rely on.
        notes: sentences below the table: what could not run and why, what a peer's job differs in.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """Where a case is and what vouches for it.

    Attributes:
        about: one line for ``--help``.
        module: imported when the case runs.
        tests: paths of the tests that must pass before anything is timed.
        measures: files and folders whose content is hashed into each recorded row.
    """

    about: str
    module: str
    tests: tuple[str, ...]
    measures: tuple[str, ...]


_HOUSE_TESTS = ("tests/benchmarks/test_run.py", "tests/planning/test_counting.py")
_LOSS_TESTS = ("tests/losses", "tests/kernels", "tests/benchmarks/test_loss_cases.py", *_HOUSE_TESTS)
_LOSS_CODE = (
    *(f"src/alambique/{name}" for name in ("losses", "kernels", "core/signal.py", "planning/counting.py")),
    "benchmarks",
)
_CACHE_CODE = ("src/alambique/cache", "src/alambique/core/signal.py", "benchmarks")
_TRAIN_TESTS = ("tests/train", "tests/losses", *_HOUSE_TESTS)
_TRAIN_CODE = (
    *(f"src/alambique/{name}" for name in ("losses", "kernels", "models/load.py", "train", "core/signal.py")),
    *(f"benchmarks/{name}.py" for name in ("methods", "pairs", "train")),
)
_LADDER_TESTS = (
    "tests/cache/test_donors.py",
    "tests/cache/test_sampled.py",
    *(f"tests/losses/test_{name}.py" for name in ("objective", "targets", "distillation")),
    *(f"tests/train/test_{name}.py" for name in ("step", "optimiser")),
)
_LADDER_CODE = (
    *(
        f"src/alambique/{name}"
        for name in ("cache", "data", "losses", "models", "train", "core/signal.py", "heldout.py")
    ),
    *(f"benchmarks/{name}.py" for name in ("ladder", "ladder_runs", "teacher_data")),
)

CASES: dict[str, Case] = {
    "loss_memory": Case(
        "peak and retained memory of the loss, 8K to 256K tokens", "benchmarks.loss_memory", _LOSS_TESTS, _LOSS_CODE
    ),
    "loss_speed": Case(
        "time of the loss against dense, three plain products and peers",
        "benchmarks.loss_speed",
        _LOSS_TESTS,
        _LOSS_CODE,
    ),
    "loss_precision": Case(
        "gradient error at bfloat16 against float64", "benchmarks.loss_precision", _LOSS_TESTS, _LOSS_CODE
    ),
    "cache": Case(
        "bytes per token and decoding speed of the teacher's cache",
        "benchmarks.cache_cases",
        ("tests/cache",),
        _CACHE_CODE,
    ),
    "capture": Case("capture against the bare forward pass", "benchmarks.capture_cases", ("tests/cache",), _CACHE_CODE),
    "methods": Case(
        "the published comparison: a live teacher, and three ways to use a cached one",
        "benchmarks.methods",
        ("tests/benchmarks/test_methods.py", *_TRAIN_TESTS),
        _TRAIN_CODE,
    ),
    "train": Case(
        "a step of the trainer against a bare one",
        "benchmarks.train",
        ("tests/benchmarks/test_train.py", *_TRAIN_TESTS),
        _TRAIN_CODE,
    ),
    "ladder": Case(
        "what truncation, tails and K cost the student, against the full divergence",
        "benchmarks.ladder",
        ("tests/benchmarks/test_ladder.py", "tests/test_heldout.py", *_LADDER_TESTS),
        _LADDER_CODE,
    ),
    "orchestration": Case(
        "what DVC, Prefect and MLflow cost over the bare jobs, and a run of 20 pairs with nothing to do",
        "benchmarks.orchestration",
        tuple(f"tests/pipeline/test_{name}.py" for name in ("run", "repro", "jobs")),
        ("pipeline", "benchmarks/orchestration.py"),
    ),
}
