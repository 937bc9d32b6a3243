"""Stage teacher@TEACHER: the teacher reads the train rows once, and the top of its distribution is kept.

`python -m pipeline.teacher TEACHER` does all of it. `python -m pipeline.teacher TEACHER I/N` is one of N processes that
score the rows between them; the former then finds them scored. pipeline/parts.py says how many there are.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from alambique.cache.capture import CaptureResult, capture
from alambique.cache.config import CaptureConfig
from alambique.cache.fill import fill, parse_part
from alambique.cache.score import Teacher
from alambique.core.errors import UserError
from alambique.core.files import sha256_file, sha256_json, write_json
from alambique.core.measure import default_device, device_name
from alambique.core.params import Config, Params, validate
from alambique.core.places import work_dir
from alambique.data.dataset import PreparedData
from alambique.models.fetch import ModelSource, fetch_model
from alambique.models.load import SplitModel, layers_and_size, load_model
from alambique.models.ranks import Ranks, launch, local_rank
from pipeline.code import code_of
from pipeline.job import job_main, leave


class Settings(Config):
    """What decides the teacher's cache, beside the prepared data."""

    capture: CaptureConfig
    model: str


def settings(params: Params, teacher: str) -> Settings:
    """Read the stage's sections of params.yaml."""
    values = {
        "capture": params.section(CaptureConfig, "teacher", f"teachers.{teacher}.capture"),
        "model": params.get(f"teachers.{teacher}.model"),
    }
    return validate(Settings, values, f"{params.source}: teachers.{teacher}")


def run(teacher: str, part: str | None = None) -> None:
    """Write artifacts/teacher/TEACHER and results/teacher/TEACHER.json, or as a part of several only to the store.

    Blocks are finished in the scratch folder, so a killed run continues where it was.
    """
    of_several = None if part is None else parse_part(part)
    resolved = settings(Params.load(), teacher)
    data = PreparedData.open(Path("artifacts/prepare") / teacher)
    device = default_device()
    config = resolved.capture.resolved(device)
    config.require_vocabulary(data.manifest["vocab_size"])  # before the model is fetched
    source = fetch_model(resolved.model)

    def load() -> SplitModel:
        return _load(source, config, device)

    if config.tensor_parallel == 1:
        _score(teacher, of_several, data, source, config, device, load)
    elif (rank := local_rank()) is None:
        _require_gpus(config.tensor_parallel)
        if code := launch(config.tensor_parallel, "-m", "pipeline.teacher", teacher, *([part] if part else [])):
            leave(code)
    else:
        device = torch.device(device.type, rank) if device.type == "cuda" else device
        with Ranks(device) as ranks:
            if ranks.leads:
                _score(teacher, of_several, data, source, config, device, lambda: ranks.lead(load))
            else:
                ranks.follow(load)


def _score(
    teacher: str,
    part: tuple[int, int] | None,
    data: PreparedData,
    source: ModelSource,
    config: CaptureConfig,
    device: torch.device,
    load: Callable[[], Teacher],
) -> None:
    signal_of, vocab_size = identity(source, data, config), data.manifest["vocab_size"]
    states = config.states(*layers_and_size(source.path)) if config.hidden_layers else None
    store = store_of(signal_of)
    if part is not None:
        fill(data.train, load, store, signal_of, config, vocab_size, device, part, states)
        return
    out = Path("artifacts/teacher") / teacher
    result = capture(data.train, load, out, store, signal_of, config, vocab_size, device, states)
    write_json(Path("results/teacher") / f"{teacher}.json", summary(result, device, config))


def _require_gpus(number: int) -> None:
    """Refuse more processes than there are GPUs; on a CPU any number will do."""
    found = torch.cuda.device_count()
    if 0 < found < number:
        raise UserError(
            f"teacher.tensor_parallel = {number} needs {number} GPUs, and {found} can be seen: lower it, or make more "
            "visible (CUDA_VISIBLE_DEVICES)."
        )


def identity(source: ModelSource, data: PreparedData, config: CaptureConfig) -> dict[str, Any]:
    """What the signal of a row comes from: the manifest tells it, and blocks of another identity are never reused."""
    return {
        "teacher": source.uri,
        "teacher_sha256": source.sha256,
        "tokenizer_sha256": data.manifest["tokenizer_sha256"],
        "dtype": config.dtype,
        "attention": config.attention,
        "device_map": config.device_map,
        "tensor_parallel": config.tensor_parallel,
        "temperature": 1.0,
    }


def store_of(signal_of: dict[str, Any]) -> Path:
    """The scratch folder of an identity and this stage's code: changed code never reuses what the old code made."""
    code = {str(path): sha256_file(path) for path in code_of("teacher")}
    return work_dir() / "teacher" / sha256_json({"identity": signal_of, "code": code})[:16]


def summary(result: CaptureResult, device: torch.device, config: CaptureConfig) -> dict[str, Any]:
    """The measurements that DVC shows as metrics; ``peak_mib`` is that of one device."""
    measured, name = dataclasses.asdict(result), device_name(device)
    number = config.tensor_parallel if config.device_map is None else max(1, torch.cuda.device_count())
    return {
        "cache_bytes_per_token": measured.pop("bytes_per_token"),
        **measured,
        "device": name if number == 1 else f"{number} x {name}",
    }


def _load(source: ModelSource, config: CaptureConfig, device: torch.device) -> SplitModel:
    loaded = load_model(
        source.path,
        dtype=config.dtype,
        device=device,
        attention=config.attention,
        device_map=config.device_map,
        tensor_parallel=config.tensor_parallel,
    )
    model = SplitModel(loaded)
    if config.device_map is not None or config.tensor_parallel > 1:
        model.gather_head()
    model.check(device)
    return model


if __name__ == "__main__":
    leave(job_main(run))
