"""Case ``ladder``: what each way of telling the student about the teacher is worth, against the teacher's whole say.

Every rung trains the same student on the same rows in the same order, and differs in the objective alone; ``online``
is the exact forward KL over the whole vocabulary at every step. A seed chooses which rows of the corpus are trained on
(no two share one) and their order: a pruned student holds no other chance. ``--only`` takes rungs.

Each finished run is kept in the scratch folder at once, so the same command continues where an earlier one stopped.
"""

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from alambique.core.files import sha256_json, write_bytes
from alambique.core.measure import versions
from alambique.core.params import Params
from alambique.core.places import work_dir
from alambique.core.progress import Progress
from benchmarks import ladder_page, records
from benchmarks.cases import CASES, TOP_K, Options, Outcome
from benchmarks.ladder_runs import Pair, Plan, Rung, gradient, measure, train, untrained

ONLINE = ladder_page.ONLINE
RUNGS: dict[str, Rung] = {
    ONLINE: Rung(),
    "ce": Rung({"kd_weight": 0.0, "ce_weight": 1.0}, {"top_k": TOP_K}),  # the loss ignores it
    "truncate": Rung({"tail": "truncate"}, {"top_k": TOP_K}),
    "renormalise": Rung({"tail": "renormalise"}, {"top_k": TOP_K}),
    "residual_to_label": Rung({"tail": "residual_to_label"}, {"top_k": TOP_K}),
    # Of 30 draws from this teacher on this text 12 are different tokens (measured), as many as bucket_12 keeps.
    "sampled_12": Rung({"tail": "sampled"}, {"keep": "sampled", "draws": 30}),
    "sampled_50_draws": Rung({"tail": "sampled"}, {"keep": "sampled", "draws": 50}),
    "top_50_and_16_draws": Rung({"tail": "sampled"}, {"keep": "top_k_and_draws", "top_k": 50, "draws": 16}),
    "top_100_and_16_draws": Rung({"tail": "sampled"}, {"keep": "top_k_and_draws", "top_k": TOP_K, "draws": 16}),
    "bucket": Rung({"tail": "bucket"}, {"top_k": TOP_K}),
    "bucket_50": Rung({"tail": "bucket"}, {"top_k": 50}),
    "bucket_12": Rung({"tail": "bucket"}, {"top_k": 12}),
}
# The embedded recipe's own number of steps.
FULL, QUICK = Plan(seeds=3, steps=64, valid_rows=16), Plan(seeds=2, steps=2, valid_rows=2, dtype="float32")


def run(options: Options) -> Outcome:
    """Climb the ladder, or continue to; the rows are single runs, the tables that are printed compare them."""
    plan = QUICK if options.quick else FULL
    with _scratch(plan, options.quick) as folder:
        return climb(plan, options, folder)


def climb(plan: Plan, options: Options, folder: Path) -> Outcome:
    """Make the runs of ``plan`` that ``folder`` doesn't hold yet, and compare all of them."""
    names = options.keep(RUNGS)
    kept = Kept(folder / "results.jsonl")
    missing = [(seed, name) for seed in range(plan.seeds) for name in names if not kept.has(name, seed)]
    if missing or not kept.has("before", 0):
        pair = Pair.open(plan, {name: RUNGS[name] for name in RUNGS}, folder, options)
        if not kept.has("before", 0):
            kept.add(untrained(pair))
        _make(missing, pair, plan, kept, len(names))
    order = [*ladder_page.FIXED, *names]
    rows = sorted((row for row in kept.rows if row["rung"] in order), key=lambda r: (order.index(r["rung"]), r["seed"]))
    print(ladder_page.markdown(rows))
    summary = {"ladder": ladder_page.summary(rows), "seeds": plan.seeds, "steps": plan.steps}
    return Outcome(rows=rows, summary=summary, notes=_NOTES)


_NOTES = [
    "online: the teacher's hidden states were kept from its one pass, its head is applied at every step; these are "
    "the gradients of running it at every step",
    "gradient_degrees: between the rung's gradient and online's on the seed's first batch, before any step, over all "
    "parameters",
    "the tables above are for docs/ladder.md; after --record `python -m benchmarks.plots` draws its plot",
]


@dataclass
class Kept:
    """Results of finished runs, one JSON object a line; rewritten whole, so that a kill can't leave half a line."""

    path: Path
    rows: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.is_file() else []

    def has(self, rung: str, seed: int) -> bool:
        """Whether this run is finished."""
        return any((row["rung"], row["seed"]) == (rung, seed) for row in self.rows)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Keep the results of a run that has just finished."""
        self.rows += rows
        write_bytes(self.path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.rows).encode())


def _make(missing: list[tuple[int, str]], pair: Pair, plan: Plan, kept: Kept, rungs: int) -> None:
    total = plan.seeds * rungs * plan.steps
    reference: tuple[int, list[Tensor]] | None = None
    with Progress("ladder", total, "steps", done=total - len(missing) * plan.steps) as progress:
        for seed, name in missing:
            if reference is None or reference[0] != seed:
                reference = None  # frees the last one first
                reference = seed, gradient(pair, RUNGS[ONLINE], seed)
            started = time.monotonic()
            student, degrees = train(pair, RUNGS[name], seed, reference[1], progress)
            row = {
                "rung": name,
                "seed": seed,
                "steps": plan.steps,
                **measure(pair, student),
                "gradient_degrees": degrees,
                "bytes_per_token": pair.bytes_per_token(RUNGS[name]),
                "seconds": time.monotonic() - started,
            }
            kept.add([row])


@contextlib.contextmanager
def _scratch(plan: Plan, quick: bool) -> Iterator[Path]:
    """A folder named by everything that decides the results, code included; a throw-away one for tiny runs."""
    if quick:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
        return
    params = Params.load()
    identity = {
        "plan": asdict(plan),
        "rungs": {name: asdict(rung) for name, rung in RUNGS.items()},
        "params": {key: params.tree[key] for key in ("prepare", "teacher", "student", "distill", "teachers", "pairs")},
        "code": records.code_hash(CASES["ladder"].measures),
        "versions": versions(),
    }
    folder = work_dir() / "ladder" / sha256_json(identity)[:16]
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
