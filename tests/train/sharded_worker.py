"""Started by test_sharded.py in two processes: tiny runs one after the other, their results on disk for the test."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import GptOssConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.insert(0, str(Path(__file__).parent))
import tiny_run

from alambique.core.errors import UserError
from alambique.core.signal import TopKSignal
from alambique.data.dataset import PackedRows
from alambique.models.load import SplitModel
from alambique.models.ranks import Group
from alambique.train.checkpoint import weights
from alambique.train.context import Context
from alambique.train.sharded import Processes, ShardedStudent, Stopped, collect
from alambique.train.state import Interrupted
from alambique.train.validation import Validate, validator
from tests.losses.parallel_worker import Collectives
from tests.tiny_models import tiny_model

# Of every run that both one process and two make; rows have between 11 and 15 targets, so parts are uneven.
RUNS: dict[str, dict[str, Any]] = {
    "tied": {"precision": "fp32", "micro_batch_rows": 1, "method": "dense"},
    "untied": {"precision": "fp32", "micro_batch_rows": 1, "loss": {"ce_weight": 0.3}},
    "odd": {"precision": "fp32", "rows_per_step": 3, "micro_batch_rows": 1, "gradient_checkpointing": True},
    "bf16": {"precision": "bf16"},
    "online": {"precision": "fp32", "method": "online", "validate_every": 2, "keep": "best"},
    "context": {"precision": "fp32", "rows_per_step": 1, "micro_batch_rows": 1, "context": 2},
    "context_online": {
        "precision": "fp32", "rows_per_step": 3, "context": 2, "method": "online", "gradient_checkpointing": True,
        "validate_every": 3, "keep": "best",
    },
}  # fmt: skip
COMPILED = {"precision": "fp32", "rows_per_step": 12, "micro_batch_rows": 3}


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
    settings = RUNS.get(name, COMPILED) | changes
    context = settings.pop("context", 1)
    if tiny_run.PROCESSES.size > 1:
        tiny_run.PROCESSES = replace(tiny_run.PROCESSES, context=context)
    if name == "online":
        settings["validate"] = scripted()
    elif "validate_every" in settings:
        settings["validate"] = measured()
    if name == "context":
        settings["rows"] = halves()
    return tiny_run.train(scratch, student_of(name), **settings)


def measured() -> Validate:
    """The real comparison, in three batches: two processes can't share them evenly."""
    config = tiny_run.make_config(precision="fp32", micro_batch_rows=5)
    rows = tiny_run.make_rows()
    return validator(tiny_run.make_live_teacher(), rows, tiny_run.VOCAB, config, tiny_run.CPU, tiny_run.PROCESSES)


def halves() -> PackedRows:
    """Rows of which some have no target in the first half, some none in the second half, and one none at all."""
    rows = tiny_run.make_rows()
    rows.loss_mask_RS[::3, :8] = False
    rows.loss_mask_RS[::4, 8:] = False
    return rows


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


@contextlib.contextmanager
def lengths() -> Iterator[set[int]]:
    """The numbers of positions that any module, outside of attention itself, returns hidden states of."""
    found: set[int] = set()

    def note(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.ndim == 3:
            found.add(output.shape[1])

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    yield found
    hook.remove()


def mixing(student: SplitModel) -> SplitModel:
    """With positions that see others outside of attention."""
    student.model.model.layers[0].mlp.register_forward_hook(lambda _m, _i, output: output.roll(1, dims=1))
    return student


def flash_like(
    module: Any, query: Any, key: Any, value: Any, mask: None, scaling: float, s_aux: Any, position_ids: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Finds documents as flash attention does, and has a sink for each head."""
    assert mask is None
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    documents = (position_ids == 0).cumsum(-1)
    seen = (documents[:, :, None] == documents[:, None]).tril()
    scores = (query @ key.mT * scaling).masked_fill(~seen[:, None], -torch.inf)
    scores = torch.cat([scores, s_aux[:, None, None].expand(-1, scores.shape[2], 1)[None]], -1)
    return (scores.softmax(-1)[..., :-1] @ value).transpose(1, 2), None


def with_sinks() -> SplitModel:
    model = tiny_model(GptOssConfig, head_dim=8, num_local_experts=2, num_experts_per_tok=1, attention="eager")
    model.config._attn_implementation = "flash_like"
    return SplitModel(model)


def contexts(out: Path, processes: Processes) -> None:
    """What the check says of models that can be shared out and of one that can't."""
    ALL_ATTENTION_FUNCTIONS.register("flash_like", flash_like)
    asked = replace(processes, context=2)
    models = {"plain": tiny_run.make_student(), "mixing": mixing(tiny_run.make_student()), "sinks": with_sinks()}
    found = {
        name: said(lambda model=model: Context(asked, tiny_run.CPU).open([model], 1))  # type: ignore[misc]
        for name, model in models.items()
    }
    (out / f"contexts.{processes.rank}.json").write_text(json.dumps(found))


def main(out: Path, compiled: bool = False) -> None:
    with Group(tiny_run.CPU) as group:
        processes = Processes.of_group()
        tiny_run.PROCESSES = processes
        if compiled:
            save(out, "compiled", *make("compiled", out / "scratch", compile=True))
            return
        for name in RUNS:
            with lengths() if name in ("tied", "context") else contextlib.nullcontext(set()) as found:
                save(out, name, *make(name, out / f"{name}.scratch"))
            (out / f"lengths.{name}.{processes.rank}.json").write_text(json.dumps(sorted(found)))
        contexts(out, processes)
        save(out, "resumed", *make("tied", out / "single"))  # where one process was stopped
        stops(out, processes, group)
        sent(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
