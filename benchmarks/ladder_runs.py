"""One run of the ladder: a student trained on one rung with one seed, its first gradient, and what became of it.

The teacher runs once over all rows; its hidden states are kept, and everything else is made from them: the caches, the
signal of the live teacher, and the teacher's side of the held-out comparison.

Dimensions: R rows, B rows of a batch, S positions, N tokens, D hidden size, V vocabulary.
"""

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from alambique.cache.capture import capture
from alambique.cache.config import CaptureConfig
from alambique.cache.reader import TeacherCache
from alambique.core.errors import UserError
from alambique.core.files import atomic_folder, sha256_json, write_bytes
from alambique.core.params import Params
from alambique.core.products import fast_dtype
from alambique.core.progress import Progress
from alambique.data.dataset import PackedRows
from alambique.heldout import HeldoutConfig, heldout
from alambique.models.fetch import fetch_model
from alambique.models.load import SplitModel, load_model
from alambique.models.prune import facts, prune_model
from alambique.models.student import Cut, StudentConfig
from alambique.train.config import DistillConfig
from alambique.train.data import StepRows, read_step, rows_of_step
from alambique.train.optimiser import adamw, clip_gradients, learning_rate, set_learning_rate
from alambique.train.state import Run
from alambique.train.step import Setup, add_gradients
from benchmarks.cases import Options
from benchmarks.teacher_data import load_splits, load_teacher

# Figures of a run, and what heldout calls them.
_FIGURES = {"kl_nats": "kl_nats", "agreement": "agreement", "perplexity": "perplexity", "ece": "calibration_error"}
_BATCH_ROWS = 8  # of the teacher's pass; source: docs/log.md, faster than 32 on a CPU


@dataclass(frozen=True)
class Plan:
    """How much: ``seeds`` runs of each rung, ``steps`` optimiser steps each, and rows of held-out text; and how exact.

    ``auto`` is the pipeline's precision on the device.
    """

    seeds: int
    steps: int
    valid_rows: int
    dtype: Literal["auto", "float32"] = "auto"

    def dtype_on(self, device: torch.device) -> Literal["bfloat16", "float32"]:
        """Of teacher, products and held-out comparison."""
        return fast_dtype(device) if self.dtype == "auto" else self.dtype

    def row_numbers(self, step: int, seed: int, rows_per_step: int) -> list[int]:
        """Train rows of a step: every ``seeds``-th row belongs to a seed, which passes over its rows once."""
        own = rows_of_step(step, rows_per_step, self.steps * rows_per_step, seed)
        return [seed + self.seeds * number for number in own]


@dataclass(frozen=True)
class Rung:
    """What differs from the pair's settings: the loss, and what the cache keeps (None: the teacher is live)."""

    loss: dict[str, Any] = field(default_factory=dict)
    capture: dict[str, Any] | None = None

    @property
    def cache(self) -> str:
        """A name for its cache; rungs that keep the same share it."""
        return sha256_json(self.capture)[:12]


class Replay:
    """The teacher after its one pass: it gives the hidden states of rows that it has read, and runs nothing."""

    def __init__(self, teacher: SplitModel, splits: dict[str, PackedRows], states: dict[str, Tensor]) -> None:
        self.head_weight_VD, self.head_bias_V = teacher.head_weight_VD, teacher.head_bias_V
        self.logit_softcap, self.logit_scale = teacher.logit_softcap, teacher.logit_scale
        self._found = {
            self._key(rows.input_ids_RS[number], rows.document_ids_RS[number]): states[name][number]
            for name, rows in splits.items()
            for number in range(rows.num_rows)
        }

    @staticmethod
    def _key(input_ids_S: Tensor, document_ids_S: Tensor) -> bytes:
        return torch.stack([input_ids_S.int(), document_ids_S.int()]).cpu().numpy().tobytes()

    def recording(self, layers: Sequence[int]) -> contextlib.AbstractContextManager[dict[int, Tensor]]:
        """No state of a layer is kept, and no rung asks for one."""
        assert not layers
        return contextlib.nullcontext({})

    def hidden(self, input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, S, D]."""
        found = [self._found[self._key(*row)] for row in zip(input_ids_BS, document_ids_BS, strict=True)]
        return torch.stack(found).to(self.head_weight_VD.device)


@dataclass(frozen=True)
class Pair:
    """All that the runs share."""

    plan: Plan
    train: PackedRows
    valid: PackedRows
    vocab_size: int
    student: Path
    teacher: Replay
    caches: dict[str, TeacherCache]
    config: DistillConfig
    device: torch.device

    @classmethod
    def open(cls, plan: Plan, rungs: dict[str, Rung], folder: Path, options: Options) -> "Pair":
        """Prepare text, student, teacher and caches in ``folder``, or find them there."""
        found = _quick(folder) if options.quick else _embedded()
        train_rows = plan.seeds * plan.steps * found.distill.rows_per_step
        data = load_splits(train_rows, plan.valid_rows, options.quick)
        student = folder / "student"
        if not student.is_dir():
            layers = found.student.kept_layers(facts(found.teacher)["layers"])
            with atomic_folder(student) as scratch:
                prune_model(found.teacher, Cut(layers), scratch)
        teacher = _replay(found.teacher, {"train": data.train, "valid": data.valid}, folder, options.device, plan)
        vocab_size: int = data.manifest["vocab_size"]
        caches = {}
        # The largest K first: the smaller ones are cut from it.
        settings = [rung for rung in rungs.values() if rung.capture is not None]
        for rung in sorted({rung.cache: rung for rung in settings}.values(), key=_kept_entries, reverse=True):
            config = CaptureConfig.model_validate(
                {
                    **found.capture.model_dump(),
                    "keep": "top_k",
                    "dtype": plan.dtype_on(options.device),
                    **(rung.capture or {}),
                }
            )
            out, store = folder / "caches" / rung.cache, folder / "blocks"
            capture(data.train, lambda: teacher, out, store, {}, config, vocab_size, options.device)
            caches[rung.cache] = TeacherCache.open(out)
        return cls(plan, data.train, data.valid, vocab_size, student, teacher, caches, found.distill, options.device)

    def bytes_per_token(self, rung: Rung) -> float | None:
        """Of the rung's cache, with all that is in its files; None where there is none, or no need of one."""
        needless = rung.capture is None or rung.loss.get("kd_weight") == 0
        return None if needless else float(self.caches[rung.cache].manifest["bytes_per_token"])

    def load_student(self) -> SplitModel:
        """The student before training, in float32."""
        return SplitModel(
            load_model(self.student, dtype="float32", device=self.device, attention=self.config.attention)
        )

    def batch(self, rung: Rung, step: int, seed: int) -> StepRows:
        """The rows of a step, with the signal of the rung's cache if it has one."""
        numbers = self.plan.row_numbers(step, seed, self.config.rows_per_step)
        return read_step(numbers, self.train, self.caches.get(rung.cache), pin=False)


def _kept_entries(rung: Rung) -> int:
    return int((rung.capture or {}).get("top_k", 0))


@dataclass(frozen=True)
class _Sources:
    teacher: Path
    student: StudentConfig
    distill: DistillConfig
    capture: CaptureConfig


def _embedded() -> _Sources:
    """The first pair of params.yaml, with its settings."""
    params = Params.load()
    pair = params.keys("pairs")[0]
    teacher = params.get(f"pairs.{pair}.teacher")
    student = params.section(StudentConfig, "student", f"pairs.{pair}.student")
    if student.drop_layers is None:
        raise UserError(f"benchmarks: the ladder needs a student made by drop_layers, and pairs.{pair} is another.")
    return _Sources(
        fetch_model(params.get(f"teachers.{teacher}.model")).path,
        student,
        params.section(DistillConfig, "distill", f"pairs.{pair}.distill"),
        params.section(CaptureConfig, "teacher", f"teachers.{teacher}.capture"),
    )


def _quick(folder: Path) -> _Sources:
    """A random teacher of two layers, of which the student keeps one."""
    if not (folder / "teacher").is_dir():
        with atomic_folder(folder / "teacher") as scratch:
            load_teacher("float32", torch.device("cpu"), quick=True).model.save_pretrained(scratch)
    distill = DistillConfig.model_validate({"rows_per_step": 2, "micro_batch_rows": 1, "learning_rate": 1e-2})
    return _Sources(
        folder / "teacher", StudentConfig.model_validate({"drop_layers": [1]}), distill, CaptureConfig(shard_mib=0.01)
    )


def _replay(path: Path, splits: dict[str, PackedRows], folder: Path, device: torch.device, plan: Plan) -> Replay:
    """Load the teacher and let it read all rows, unless ``folder`` has its hidden states already."""
    teacher = SplitModel(load_model(path, dtype=plan.dtype_on(device), device=device))
    kept = folder / f"states-{sha256_json([rows.row_hashes() for rows in splits.values()])[:12]}.safetensors"
    if not kept.is_file():
        total = sum(rows.num_rows * rows.seq_len for rows in splits.values())
        with Progress("teacher", total) as progress:
            states = {name: _states(teacher, rows, progress) for name, rows in splits.items()}
        write_bytes(kept, save(states))
    return Replay(teacher, splits, load_file(kept))


@torch.inference_mode()
def _states(teacher: SplitModel, rows: PackedRows, progress: Progress) -> Tensor:
    """Hidden states of all positions, [R, S, D], on the CPU."""
    device, parts = teacher.head_weight_VD.device, []
    for start in range(0, rows.num_rows, _BATCH_ROWS):
        batch = slice(start, start + _BATCH_ROWS)
        ids_BS, documents_BS = rows.input_ids_RS[batch].to(device), rows.document_ids_RS[batch].to(device)
        parts.append(teacher.hidden(ids_BS, documents_BS).cpu())
        progress.update(ids_BS.numel())
    return torch.cat(parts)


def train(pair: Pair, rung: Rung, seed: int, reference: list[Tensor], progress: Progress) -> tuple[SplitModel, float]:
    """A trained student, and the degrees between its first step's gradient and ``reference``.

    The library's loop without its checkpoints, so that the first gradient costs no step of its own.
    """
    setup, run = _start(pair, rung, seed)
    optimiser = adamw(setup.student.model.named_parameters(), setup.config)
    degrees = 0.0
    for step in range(pair.plan.steps):
        losses = add_gradients(setup, run, pair.batch(rung, step, seed))
        assert losses is not None  # nothing asks these runs to stop
        parameters = _trainable(setup)
        if step == 0:
            degrees = angle_degrees([_gradient(parameter) for parameter in parameters], reference)
        clip_gradients(parameters, setup.config.max_grad_norm)
        set_learning_rate(optimiser, learning_rate(step, pair.plan.steps, setup.config))
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        run.step += 1
        progress.update(1, loss_nats=float(losses[0]))
    return setup.student, degrees


def gradient(pair: Pair, rung: Rung, seed: int) -> list[Tensor]:
    """The gradient of the first step, before clipping: one tensor for each trainable parameter."""
    setup, run = _start(pair, rung, seed)
    add_gradients(setup, run, pair.batch(rung, 0, seed))
    return [_gradient(parameter) for parameter in _trainable(setup)]


def _start(pair: Pair, rung: Rung, seed: int) -> tuple[Setup, Run]:
    student = pair.load_student()
    student.model.train()
    changes = {
        "seed": seed,
        "steps": pair.plan.steps,
        "method": "online" if rung.capture is None else "fused",
        "precision": "bf16" if pair.plan.dtype_on(pair.device) == "bfloat16" else "fp32",
        "loss": {**pair.config.loss.model_dump(), **rung.loss},
    }
    config = DistillConfig.model_validate({**pair.config.model_dump(), **changes})
    loss = config.loss.model_copy(update={"logit_softcap": student.logit_softcap, "logit_scale": student.logit_scale})
    teacher: Any = pair.teacher if rung.capture is None else None
    setup = Setup(
        student=student,
        teacher=teacher,
        config=config,
        loss=loss,
        vocab_size=pair.vocab_size,
        device=pair.device,
        stop=lambda: False,
    )
    return setup, Run(min(config.micro_batch_rows, config.rows_per_step))


def _trainable(setup: Setup) -> list[nn.Parameter]:
    return [parameter for parameter in setup.student.model.parameters() if parameter.requires_grad]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def angle_degrees(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The angle between two gradients, each given parameter by parameter.

    By the chord between unit vectors, because an arc cosine loses half the digits of a small angle.
    """
    ours, theirs = list(ours), list(theirs)
    norms = [math.sqrt(sum(float(part.double().square().sum()) for part in parts)) for parts in (ours, theirs)]
    chord = sum(float((a / norms[0] - b / norms[1]).double().square().sum()) for a, b in zip(ours, theirs, strict=True))
    return math.degrees(2 * math.asin(min(1.0, math.sqrt(chord) / 2)))


def measure(pair: Pair, student: SplitModel) -> dict[str, float]:
    """Held-out figures of a student."""
    found = _heldout(pair, student)
    return {name: found[key]["student"] for name, key in _FIGURES.items()}


def untrained(pair: Pair) -> list[dict[str, Any]]:
    """The ends of the ladder: the teacher itself, and the student before training."""
    found = _heldout(pair, pair.load_student())
    found["kl_nats"]["teacher"], found["agreement"]["teacher"] = 0.0, 1.0
    same = {"seed": 0, "steps": 0, "gradient_degrees": None, "bytes_per_token": None, "seconds": None}
    return [
        {"rung": rung, **same, **{name: found[key][who] for name, key in _FIGURES.items()}}
        for rung, who in (("teacher", "teacher"), ("before", "student"))
    ]


def _heldout(pair: Pair, student: SplitModel) -> dict[str, Any]:
    student.model.to(getattr(torch, pair.plan.dtype_on(pair.device))).eval()  # as it is shipped
    teacher: Any = pair.teacher
    return heldout(
        teacher, {"student": student}, pair.valid, pair.vocab_size, HeldoutConfig.model_validate({}), pair.device
    )
