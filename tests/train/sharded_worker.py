"""Started by test_sharded.py in two processes: tiny runs one after the other, their results on disk for the test."""

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))
import tiny_run

from alambique.core.errors import UserError
from alambique.core.signal import TopKSignal
from alambique.models.load import SplitModel
from alambique.models.ranks import Group
from alambique.train.checkpoint import weights
from alambique.train.sharded import Processes, ShardedStudent, Stopped, collect
from alambique.train.state import Interrupted
from tests.losses.parallel_worker import Collectives

# Of every run that both one process and two make; rows have between 11 and 15 targets, so parts are uneven.
RUNS: dict[str, dict[str, Any]] = {
    "tied": {"precision": "fp32", "micro_batch_rows": 1, "method": "dense"},
    "untied": {"precision": "fp32", "micro_batch_rows": 1, "loss": {"ce_weight": 0.3}},
    "odd": {"precision": "fp32", "rows_per_step": 3, "micro_batch_rows": 1, "gradient_checkpointing": True},
    "bf16": {"precision": "bf16"},
    "online": {"precision": "fp32", "method": "online", "validate_every": 2, "keep": "best"},
    "hidden": {
        "precision": "fp32", "method": "online", "rows_per_step": 3, "micro_batch_rows": 1, "teacher_size": 40,
        "hidden": {"map": [[0, 1], [1, 0]], "weight": 3.0},
    },
}  # fmt: skip


def student_of(name: str) -> SplitModel:
    return tiny_run.make_student(tied=name != "untied")


def scripted() -> Callable[[SplitModel], dict[str, float]]:
    """Says that the second of three validations is the best, after a real forward pass with the whole head."""
    kls = iter([0.3, 0.1, 0.2])

    def validate(student: SplitModel) -> dict[str, float]:
        rows = tiny_run.make_rows()
        student.model.eval()
        with torch.inference_mode():
            logits = student.logits(student.hidden(rows.input_ids_RS[:1].long(), rows.document_ids_RS[:1]))
        assert not isinstance(logits, DTensor)
        return {
            "kl_nats": next(kls),
            "agreement": 0.5,
            "perplexity": float(logits.exp().mean()),
            "calibration_error": 0.1,
        }

    return validate


def make(name: str, scratch: Path, **changes: Any) -> tuple[SplitModel, Any]:
    settings = RUNS[name] | changes
    if "validate_every" in settings:
        settings["validate"] = scripted()
    return tiny_run.train(scratch, student_of(name), **settings)


def save(out: Path, name: str, student: SplitModel, result: Any) -> None:
    whole = collect(weights(student.model), dist.get_rank() == 0)
    if dist.get_rank() == 0:
        save_file(whole, out / f"{name}.safetensors")
        (out / f"{name}.json").write_text(json.dumps(asdict(result)))


def stop_here(rank: int, polls: int) -> Callable[[], bool]:
    """A stop that only rank 1 is asked for."""
    remaining = iter(range(polls))
    return lambda: rank == 1 and next(remaining, None) is None


class Blind(tiny_run.RandomTeacher):
    """Can't read the rows of rank 1."""

    def read(self, rows: list[int]) -> TopKSignal:
        if dist.get_rank() == 1:
            raise UserError("shard 3 is damaged.")
        return super().read(rows)


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except (UserError, Interrupted, Stopped) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def stops(out: Path, processes: Processes, group: Group) -> None:
    """What ends a run in one process ends it in both."""
    found: dict[str, str | bool] = {"speaks": group.is_first("what both have to say")}
    found["stop"] = said(
        lambda: make("tied", out / "stopped", checkpoint_every_steps=100, stop=stop_here(processes.rank, 11))
    )
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, tiny_run, "RandomTeacher", tiny_run.RandomTeacher)
        tiny_run.RandomTeacher = Blind  # type: ignore[misc]
        found["unreadable"] = said(lambda: make("untied", out / "unreadable"))
    hidden, calls = ShardedStudent.hidden, iter(range(100))

    def overflowing(self: ShardedStudent, *inputs: torch.Tensor) -> torch.Tensor:
        return hidden(self, *inputs) * (torch.inf if next(calls) == 5 and processes.rank == 1 else 1.0)

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, ShardedStudent, "hidden", hidden)
        ShardedStudent.hidden = overflowing  # type: ignore[method-assign]
        found["nan"] = said(lambda: make("untied", out / "nan"))
    (out / f"said.{processes.rank}.json").write_text(json.dumps(found))


def sent(out: Path) -> None:
    """Two steps of two micro-batches in each process."""
    with Collectives() as counted:
        make("untied", out / "sent", steps=2, checkpoint_every_steps=100)
    (out / f"sent.{dist.get_rank()}.json").write_text(json.dumps(counted.counts))


def main(out: Path) -> None:
    with Group(tiny_run.CPU) as group:
        processes = Processes.of_group()
        tiny_run.PROCESSES = processes
        for name in RUNS:
            save(out, name, *make(name, out / f"{name}.scratch"))
        save(out, "resumed", *make("tied", out / "single"))  # where one process was stopped
        stops(out, processes, group)
        sent(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
