"""What params.yaml asks for, before anything runs: memory, disk, FLOPs and time of each teacher and pair.

``plan`` tells all of it, ``require_fit`` only refuses what can't fit. docs/plan.md has the formulas and their limits.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from alambique.cache.config import CaptureConfig
from alambique.core.errors import UserError
from alambique.core.files import MANIFEST, read_json
from alambique.core.params import Params
from alambique.data.prepare import PrepareConfig
from alambique.evaluate import EvaluateSettings
from alambique.heldout import HeldoutConfig
from alambique.models.prune import count_parameters
from alambique.models.student import StudentConfig
from alambique.planning import cachesize, memory
from alambique.planning.machine import Machine, Need, gib
from alambique.planning.shapes import NotAtHand, shapes, student_shapes
from alambique.train.config import DistillConfig, Method

METHODS: tuple[Method, ...] = get_args(Method)
_ROWS = 1000  # assumption, where prepare.train_rows takes whatever the text gives
_TARGETS = 0.95  # assumption: share of positions with a target; 0.94 of the embedded pair's
_PREPARED_BYTES = 9  # of a position: two int32 and a bool
_CHECKPOINT_BYTES = 12  # of a parameter: fp32 weight and AdamW's two moments


@dataclass(frozen=True)
class TeacherPlan:
    """A teacher's stages and cache; after a ``problem`` nothing else is known."""

    problem: str | None = None
    parameters: int = 0
    num_rows: int = 0
    cache_bytes_per_token: float = 0.0
    cache_bytes: float = 0.0
    cache_from: str = ""
    capture: Need | None = None
    disk_bytes: dict[str, float] = field(default_factory=dict)
    advice: str | None = None


@dataclass(frozen=True)
class PairPlan:
    """A pair's stages, training by every method; after a ``problem`` nothing else is known."""

    problem: str | None = None
    parameters: int = 0
    method: str = ""
    micro_batch_rows: int = 0
    seq_len: int = 0
    student: Need | None = None
    evaluate: Need | None = None
    methods: dict[str, Need] = field(default_factory=dict)
    largest_micro_batch_rows: int = 0
    longest_seq_len: int = 0
    disk_bytes: dict[str, float] = field(default_factory=dict)
    advice: str | None = None


@dataclass(frozen=True)
class Plan:
    """All of it; memory in MiB, disk in bytes."""

    source: str
    machine: Machine
    teachers: dict[str, TeacherPlan]
    pairs: dict[str, PairPlan]

    @property
    def disk_bytes(self) -> float:
        """What all of it takes on disk."""
        entries: list[TeacherPlan | PairPlan] = [*self.teachers.values(), *self.pairs.values()]
        return sum(sum(entry.disk_bytes.values()) for entry in entries)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "disk_bytes": self.disk_bytes}


def plan(params: Params, machine: Machine, *, download: bool = True) -> Plan:
    """Plan every teacher and pair of ``params`` on ``machine``; ``download`` may fetch what tells a model's shapes.

    Raises:
        UserError: a section is invalid, or a student can't be had of its teacher.
    """
    teachers, pairs = _entries(params, machine, download)
    return Plan(
        params.source,
        machine,
        {key: teacher.plan() for key, teacher in teachers.items()},
        {key: pair.plan() for key, pair in pairs.items()},
    )


def require_fit(params: Params, machine: Machine) -> bool:
    """Refuse what can't fit even if its prediction is too high; returns whether all models' shapes were at hand.

    On a GPU a stage that runs out of memory goes on with smaller batches, so that one row is what must fit.

    Raises:
        UserError: the first stage that can't fit, and what would.
    """
    teachers, pairs = _entries(params, machine, download=False)
    entries: list[_Teacher | _Pair] = [*teachers.values(), *pairs.values()]
    all_known = True
    for entry in entries:
        try:
            if not entry.surely_fits() and machine.impossible(need := entry.least()):
                raise UserError(f"{params.source}: {entry.advice(need)}")
        except NotAtHand:
            all_known = False
    return all_known


def _entries(params: Params, machine: Machine, download: bool) -> tuple[dict[str, "_Teacher"], dict[str, "_Pair"]]:
    teachers = {key: _Teacher(params, machine, key, download) for key in params.keys("teachers")}
    pairs = {key: _Pair(params, key, teachers[params.get(f"pairs.{key}.teacher")]) for key in params.keys("pairs")}
    return teachers, pairs


class _Teacher:
    """One entry of ``teachers``."""

    def __init__(self, params: Params, machine: Machine, key: str, download: bool) -> None:
        self.machine, self.key, self.download = machine, key, download
        self.prepare = params.section(PrepareConfig, "prepare")
        config = params.section(CaptureConfig, "teacher", f"teachers.{key}.capture")
        self.config = config.model_copy(update={"dtype": machine.dtype}) if config.dtype == "auto" else config
        self.uri = params.get(f"teachers.{key}.model")

    @cached_property
    def model(self) -> PreTrainedConfig:
        return shapes(self.uri, download=self.download)

    @cached_property
    def num_rows(self) -> int:
        """As prepared, if that is done, else as asked for."""
        manifest = Path("artifacts/prepare", self.key, MANIFEST)
        if manifest.is_file() and (made := read_json(manifest))["config"] == self.prepare.model_dump(mode="json"):
            return int(made["splits"]["train"]["rows"])
        return self.prepare.train_rows or _ROWS

    def need(self, seq_len: int | None = None, **changes: Any) -> Need:
        """Of the capture with ``changes`` to its settings; spread over GPUs by a device map, nobody can say."""
        config, length = self.config.model_copy(update=changes), seq_len or self.prepare.seq_len
        count = memory.capture(self.model, config, length)
        itemsize, stored = getattr(torch, config.dtype).itemsize, _stored_itemsize(self.model)
        loading = 0 if stored == itemsize else count.parameters * stored
        lasting_bytes, peak_bytes = (size / config.tensor_parallel for size in (count.lasting_bytes, count.peak_bytes))
        if self.machine.device == "cuda":  # a CPU's smaller chunk of logits was counted
            logits = max(length, config.batch_tokens) * self.model.get_text_config().vocab_size * 8
            peak_bytes += min(config.logits_mib * 2**20, logits)
        found = self.machine.need(lasting_bytes, peak_bytes, count.row_flops * self.num_rows, loading)
        return found if config.device_map is None else replace(found, fits=None)

    def surely_fits(self) -> bool:
        """Whether a rough bound says so, which spares seconds of counting."""
        lasting = count_parameters(self.model) * (4 + getattr(torch, self.config.dtype).itemsize)
        tokens, row = max(self.config.batch_tokens, self.prepare.seq_len), self.prepare.seq_len
        coming = memory.rough_bytes(self.model, tokens, row, layers=1) + self.config.logits_mib * 2**20
        return self.machine.need(lasting, lasting + coming).fits is True

    def least(self) -> Need:
        return self.need(batch_tokens=1) if self.machine.device == "cuda" else self.need()

    def plan(self) -> TeacherPlan:
        try:
            model, need = self.model, self.need()
        except NotAtHand as error:
            return TeacherPlan(str(error))
        seq_len, parameters = self.prepare.seq_len, count_parameters(model)
        logits_dtype = "float32" if self.machine.device == "cuda" else self.config.dtype
        there = Path("artifacts/teacher", self.key)
        size = cachesize.predict(model, self.config, logits_dtype, seq_len, self.num_rows, there)
        cache_bytes = size.bytes_per_token * self.num_rows * seq_len * _TARGETS
        disk = {
            "model": parameters * _stored_itemsize(model),
            "prepared": _PREPARED_BYTES * seq_len * (self.num_rows + (self.prepare.valid_rows or 0)),
            "cache": cache_bytes,
        }
        return TeacherPlan(
            parameters=parameters,
            num_rows=self.num_rows,
            cache_bytes_per_token=size.bytes_per_token,
            cache_bytes=cache_bytes,
            cache_from=size.source,
            capture=need,
            disk_bytes=disk,
            advice=self.advice(need) if need.fits is False else None,
        )

    def advice(self, need: Need) -> str:
        """One sentence: what is short, and what would do."""
        where, row = f"teachers.{self.key}.capture", self.prepare.seq_len
        changes: list[tuple[str, dict[str, Any]]] = [(f"batch_tokens: {row}", {"batch_tokens": row})]
        if self.config.dtype == "float32":
            changes.append(("dtype: bfloat16", {"dtype": "bfloat16"}))
            changes.append((f"dtype: bfloat16 and batch_tokens: {row}", {"dtype": "bfloat16", "batch_tokens": row}))
        if self.machine.device == "cuda":
            changes += [(f"tensor_parallel: {n}, on {n} such GPUs", {"tensor_parallel": n}) for n in (2, 4, 8)]
        tried = ((f"set {where}.{text}", self.need(**change)) for text, change in changes)
        return _sentence(f"teacher@{self.key}", need, self.machine, tried, "take a smaller teacher")


class _Pair:
    """One entry of ``pairs``."""

    def __init__(self, params: Params, key: str, teacher: _Teacher) -> None:
        self.params, self.key, self.teacher, self.machine = params, key, teacher, teacher.machine
        self.student = params.section(StudentConfig, "student", f"pairs.{key}.student")
        config = params.section(DistillConfig, "distill", f"pairs.{key}.distill")
        precision = "bf16" if self.machine.dtype == "bfloat16" else "fp32"
        self.config = config.model_copy(update={"precision": precision}) if config.precision == "auto" else config
        self._known: dict[str, Need] = {}

    @cached_property
    def model(self) -> PreTrainedConfig:
        return student_shapes(self.teacher.model, self.student, download=self.teacher.download)

    def need(self, seq_len: int | None = None, **changes: Any) -> Need:
        """Of training with ``changes`` to its settings, and rows of another length."""
        config, length = self.config.model_copy(update=changes), seq_len or self.teacher.prepare.seq_len
        if (name := f"{length} {config.model_dump_json()}") not in self._known:
            teacher = self.teacher
            count = memory.train(self.model, config, length, teacher.config.top_k, teacher.model, teacher.config)
            rows = config.num_steps(teacher.num_rows) * config.rows_per_step
            self._known[name] = self.machine.need(count.lasting_bytes, count.peak_bytes, count.row_flops * rows)
        return self._known[name]

    def surely_fits(self) -> bool:
        """As for a teacher."""
        row, layers = self.teacher.prepare.seq_len, self.model.get_text_config().num_hidden_layers
        lasting = 16 * count_parameters(self.model)
        if self.config.method == "online":
            lasting += 4 * count_parameters(self.teacher.model)
        tokens, logit_bytes = self.config.micro_batch_rows * row, 48  # of all logits at once, as `dense` has them
        coming = memory.rough_bytes(self.model, tokens, row, layers) + lasting / 8  # weights cast to bf16
        coming += tokens * logit_bytes * self.model.get_text_config().vocab_size
        return self.machine.need(lasting, lasting + coming).fits is True

    def least(self) -> Need:
        return self.need(micro_batch_rows=1) if self.machine.device == "cuda" else self.need()

    def plan(self) -> PairPlan:
        try:
            model, need = self.model, self.need()
        except NotAtHand as error:
            return PairPlan(str(error))
        config, parameters = self.config, count_parameters(model)
        checkpoints = 3 + (config.keep == "best")  # those kept, and the one being written
        disk: dict[str, float] = {
            "student": parameters * _stored_itemsize(model),
            "checkpoints": checkpoints * _CHECKPOINT_BYTES * parameters,
            "distilled": parameters * (2 if config.precision == "bf16" else 4),
        }
        return PairPlan(
            parameters=parameters,
            method=config.method,
            micro_batch_rows=min(config.micro_batch_rows, config.rows_per_step),
            seq_len=self.teacher.prepare.seq_len,
            student=self._student_need(parameters),
            evaluate=self._evaluate_need(parameters),
            methods={method: self.need(method=method) for method in METHODS},
            largest_micro_batch_rows=self._most_rows(),
            longest_seq_len=self._longest(),
            disk_bytes=disk,
            advice=self.advice(need) if not need.fits else None,
        )

    def _most_rows(self) -> int:
        """The largest micro-batch that fits, on lines through three; 0 for none."""
        most = self.config.rows_per_step
        known = sorted({1, min(self.config.micro_batch_rows, most), most})
        peaks = [self.need(micro_batch_rows=rows).peak_mib for rows in known]
        return _last(np.interp(range(1, most + 1), known, peaks) <= self.machine.memory_mib)

    def _longest(self) -> int:
        """The longest rows that both capture and training take, in eighths of today's; 0 for none.

        A mask has S × S elements, so that memory is a parabola through three lengths.
        """
        row = self.teacher.prepare.seq_len
        unit = max(1, row // 8)
        lengths = [row, 2 * row, 4 * row] if self.need().fits else [unit, row // 2, row]
        parabola = np.polyfit(lengths, [self.need(length).peak_mib for length in lengths], 2)
        most = getattr(self.model.get_text_config(), "max_position_embeddings", None) or row
        tried = np.arange(unit, max(most, row) + 1, unit)
        longest = int(unit * _last(np.polyval(parabola, tried) <= self.machine.memory_mib))
        while longest and self.teacher.need(longest).fits is False:
            longest = longest // 2 // unit * unit
        return longest

    def _student_need(self, parameters: int) -> Need:
        """The student is loaded once, to be checked; before it the teacher, where that is measured."""
        sizes = [parameters * _stored_itemsize(self.model)]
        if self.student.measured:
            sizes.append(count_parameters(self.teacher.model) * _stored_itemsize(self.teacher.model))
        return self.machine.need(max(sizes), max(sizes))

    def _evaluate_need(self, parameters: int) -> Need:
        """Held-out text has teacher, student before and after at once, each with its head in fp32 and its logits."""
        settings = self.params.section(EvaluateSettings, "evaluate.settings")
        heldout = self.params.section(HeldoutConfig, "evaluate.heldout")
        dtype = self.machine.dtype if settings.dtype == "auto" else settings.dtype
        text = self.model.get_text_config()
        weights = (count_parameters(self.teacher.model) + 2 * parameters) * getattr(torch, dtype).itemsize
        heads = 3 * 4 * text.vocab_size * (text.hidden_size + 2 * heldout.chunk_tokens)
        return self.machine.need(weights + heads, weights + heads)

    def advice(self, need: Need) -> str:
        """One sentence: what is short, and what would do, the cheapest change first."""
        row = self.teacher.prepare.seq_len
        settings: dict[str, Any] = {"method": "fused", "micro_batch_rows": 1, "gradient_checkpointing": True}
        words = {name: f"{name}: {str(value).lower()}" for name, value in settings.items()}
        news = [name for name, value in settings.items() if getattr(self.config, name) != value]
        tries = [[name] for name in news] + [news[:n] for n in range(2, len(news) + 1)]

        def tried() -> Iterator[tuple[str, Need]]:
            for names in tries:
                text = " and ".join(words[name] for name in names)
                yield f"set {text} in pairs.{self.key}.distill", self.need(**{name: settings[name] for name in names})
            for length in (row // 2, row // 4, row // 8):
                text = " and ".join([f"prepare.seq_len: {length}", *(words[name] for name in news)])
                yield f"set {text}", self.need(max(1, length), **settings)

        return _sentence(f"distill@{self.key}", need, self.machine, tried(), "take a smaller student")


def _stored_itemsize(model: PreTrainedConfig) -> int:
    """Bytes of a stored weight; a configuration without a dtype was read from a GGUF, which is stored as fp32."""
    dtype = model.dtype if isinstance(model.dtype, torch.dtype) else torch.float32
    return dtype.itemsize


def _last(fits: NDArray[np.bool_]) -> int:
    """How many fit before the first that doesn't."""
    return len(fits) if fits.all() else int(np.argmin(fits))


def _sentence(what: str, need: Need, machine: Machine, tried: Iterable[tuple[str, Need]], otherwise: str) -> str:
    short = f"{what} needs about {gib(need.peak_mib)} GiB, and {machine.name} has {gib(machine.memory_mib)} GiB"
    for text, found in tried:
        if found.fits:
            return f"{short}: {text}, which needs about {gib(found.peak_mib)} GiB."
    return f"{short}, and no setting here changes that: {otherwise}, or a larger device."
