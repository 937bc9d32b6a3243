"""Teacher, student, text and signal for the cases that train: a pair of params.yaml, or random ones of a known shape.

Dimensions: R rows, S positions, K entries, V vocabulary.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from torch import Tensor

from alambique.core.errors import UserError, did_you_mean
from alambique.core.params import Params
from alambique.core.signal import TopKSignal
from alambique.data.dataset import PackedRows
from alambique.models.load import SplitModel, load_model
from alambique.train.config import DistillConfig
from alambique.train.loop import distill
from alambique.train.state import DistillResult
from benchmarks import timing
from benchmarks.cases import TOP_K, Options
from benchmarks.records import ROOT
from benchmarks.teacher_data import random_llama, random_rows
from pipeline import distill as stage


@dataclass(frozen=True)
class Pair:
    """What one training run needs; ``cache`` reads like a TeacherCache, ``trained`` says whether weights are real."""

    name: str
    train: PackedRows
    valid: PackedRows
    vocab_size: int
    cache: Any
    config: DistillConfig
    student: Callable[[], SplitModel]
    teacher: Callable[[], SplitModel]
    trained: bool


@dataclass(frozen=True)
class _Shape:
    """A Llama: ``student_layers`` of the teacher's ``layers``, all else alike; and how it is trained."""

    hidden: int
    intermediate: int
    layers: int
    student_layers: int
    heads: int
    kv_heads: int
    vocab: int
    seq_len: int
    distill: dict[str, Any]


_TINY = _Shape(32, 64, 2, 1, 4, 2, 300, 32, {"rows_per_step": 2, "micro_batch_rows": 1, "learning_rate": 1e-2})


def _published() -> _Shape:
    """Llama 3.1 8B and ten of its layers, as published; source: the model's config.json, and the preset."""
    settings = YAML(typ="safe").load(ROOT / "presets" / "llama31_8b_pruned_3b.yaml")["distill"]
    return _Shape(4096, 14_336, 32, 10, 32, 8, 128_256, 8192, {**settings, "rows_per_step": 4})


RANDOM: dict[str, Callable[[], _Shape]] = {"tiny": lambda: _TINY, "llama31_8b_random": _published}


def chosen(options: Options) -> str:
    """The pair that ``--only`` names, else the first of params.yaml; a tiny random one for ``--quick``."""
    if options.quick:
        return "tiny"
    pairs = Params.load().keys("pairs")
    named = [name for name in options.only if name in pairs or name in RANDOM]
    return named[0] if named else pairs[0]


def open_pair(name: str, device: torch.device) -> Pair:
    """The pair called ``name``: random, or of params.yaml with what DVC's stages made for it.

    Raises:
        UserError: there is no such pair, or a stage before distill hasn't run.
    """
    if name in RANDOM:
        return _random(name, RANDOM[name](), device)
    params = Params.load()
    if name not in params.keys("pairs"):
        known = [*params.keys("pairs"), *RANDOM]
        raise UserError(f"benchmarks: {name} is no pair of params.yaml{did_you_mean(name, known)}")
    resolved = stage.settings(params, name)
    if not all(Path(f"artifacts/{made}").is_dir() for made in (f"teacher/{resolved.teacher}", f"student/{name}")):
        raise UserError(
            f"benchmarks: {name} has no cache or student yet: run dvc repro teacher@{resolved.teacher} student@{name}."
        )
    inputs, config = stage.Inputs.open(resolved.teacher, name), resolved.distill.resolved(device)
    return Pair(
        name, inputs.data.train, inputs.data.valid, inputs.vocab_size, inputs.cache, config,
        lambda: SplitModel(load_model(inputs.student, dtype="float32", device=device, attention=config.attention)),
        lambda: inputs.live_teacher(device), trained=True,
    )  # fmt: skip


def train(
    pair: Pair,
    student: SplitModel,
    teacher: SplitModel | None,
    device: torch.device,
    between: Callable[[], object] | None = None,
    **settings: Any,
) -> tuple[DistillResult, list[float]]:
    """Train ``student`` without any checkpoint; the trainer's own result, and seconds from each step to the next.

    ``teacher`` is the live one or None for the cache; ``settings`` replace the pair's, and must name ``steps``. Seconds
    are by ``timing.clock``, and one fewer than the steps: all that the trainer does between the starts of two, without
    ``between``, which runs at these starts.
    """
    fixed = {"checkpoint_every_steps": settings["steps"], "log_every_steps": 1}
    config = DistillConfig.model_validate({**pair.config.model_dump(), **settings, **fixed})
    now = time.process_time if timing.clock(device) == "cpu time" else time.perf_counter
    per_step = -(-config.rows_per_step // config.micro_batch_rows)
    polls: list[tuple[float, float]] = []  # at each micro-batch; the log has waited for the device after each step

    def stop() -> bool:
        begin = now()
        if between is not None and len(polls) % per_step == 0:
            between()
        polls.append((begin, now()))
        return False

    with tempfile.TemporaryDirectory() as folder:
        result = distill(
            student, pair.train, teacher or pair.cache, config, vocab_size=pair.vocab_size, scratch=Path(folder),
            device=device, stop=stop,
        )  # fmt: skip
    starts = polls[::per_step]
    if len(starts) != result.steps:  # memory ran out on the way, and micro-batches were halved
        return result, [result.seconds / result.steps] * (result.steps - 1)
    return result, [end - start for (_, start), (end, _) in itertools.pairwise(starts)]


def _random(name: str, shape: _Shape, device: torch.device) -> Pair:
    generator = torch.Generator().manual_seed(0)
    config = DistillConfig.model_validate(shape.distill).resolved(device)

    train, valid = (random_rows(n, shape.seq_len, shape.vocab, generator) for n in (2 * config.rows_per_step, 2))
    return Pair(
        name, train, valid, shape.vocab, _Signals(train, shape.vocab, generator), config,
        lambda: _llama(shape, shape.student_layers, torch.float32, device),
        lambda: _llama(shape, shape.layers, torch.bfloat16, device), trained=False,
    )  # fmt: skip


def _llama(shape: _Shape, layers: int, dtype: torch.dtype, device: torch.device) -> SplitModel:
    return random_llama(
        dtype, device, vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.seq_len,
    )  # fmt: skip


class _Signals:
    """Random entries that read like a teacher's cache."""

    def __init__(self, rows: PackedRows, vocab: int, generator: torch.Generator) -> None:
        shape, top_k = rows.input_ids_RS.shape, min(TOP_K, vocab)
        first_RS1 = torch.randint(vocab, (*shape, 1), generator=generator)
        ids_RSK = (first_RS1 + torch.arange(top_k) * (vocab // top_k)) % vocab
        logprobs_RSK = _spread(shape, top_k, generator)
        self._signal = TopKSignal(ids_RSK.int(), logprobs_RSK[..., :-1].half(), logprobs_RSK[..., -1].exp())

    def read(self, rows: Sequence[int]) -> TopKSignal:
        """As ``TeacherCache.read``."""
        return self._signal[torch.tensor(rows)]


def _spread(shape: torch.Size, top_k: int, generator: torch.Generator) -> Tensor:
    """Log-probabilities of ``top_k`` entries and a tail, in falling order."""
    logits = torch.randn(*shape, top_k + 1, generator=generator).mul_(2).sort(-1, descending=True)[0]
    return logits.log_softmax(-1)
