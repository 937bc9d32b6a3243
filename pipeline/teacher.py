"""Stage teacher@TEACHER: the teacher reads the train rows once, and the top of its distribution is kept."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from alambique.cache.capture import CaptureConfig, CaptureResult, capture
from alambique.core.files import sha256_file, sha256_json, write_json
from alambique.core.measure import default_device, device_name
from alambique.core.params import Config, Params, validate
from alambique.core.places import work_dir
from alambique.data.dataset import PreparedData
from alambique.models.fetch import ModelSource, fetch_model
from alambique.models.load import SplitModel, load_model
from pipeline.job import code_of, job_main, leave


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


def run(teacher: str) -> None:
    """Write artifacts/teacher/TEACHER and results/teacher/TEACHER.json.

    Blocks are finished in the scratch folder, so a killed run continues where it was.
    """
    resolved = settings(Params.load(), teacher)
    data = PreparedData.open(Path("artifacts/prepare") / teacher)
    resolved.capture.require_vocabulary(data.manifest["vocab_size"])  # before the model is fetched
    source, device = fetch_model(resolved.model), default_device()
    signal_of = identity(source, data, resolved.capture)
    result = capture(
        data.train,
        lambda: _load(source, resolved.capture, device),
        out=Path("artifacts/teacher") / teacher,
        store=store_of(signal_of),
        identity=signal_of,
        config=resolved.capture,
        vocab_size=data.manifest["vocab_size"],
        device=device,
    )
    write_json(Path("results/teacher") / f"{teacher}.json", summary(result, device))


def identity(source: ModelSource, data: PreparedData, config: CaptureConfig) -> dict[str, Any]:
    """What the signal of a row comes from: the manifest tells it, and blocks of another identity are never reused."""
    return {
        "teacher": source.uri,
        "teacher_sha256": source.sha256,
        "tokenizer_sha256": data.manifest["tokenizer_sha256"],
        "dtype": config.dtype,
        "attention": config.attention,
        "temperature": 1.0,
    }


def store_of(signal_of: dict[str, Any]) -> Path:
    """The scratch folder of an identity and this stage's code: changed code never reuses what the old code made."""
    code = {str(path): sha256_file(path) for path in code_of("teacher")}
    return work_dir() / "teacher" / sha256_json({"identity": signal_of, "code": code})[:16]


def summary(result: CaptureResult, device: torch.device) -> dict[str, Any]:
    """The measurements that DVC shows as metrics."""
    measured = dataclasses.asdict(result)
    return {"cache_bytes_per_token": measured.pop("bytes_per_token"), **measured, "device": device_name(device)}


def _load(source: ModelSource, config: CaptureConfig, device: torch.device) -> SplitModel:
    model = SplitModel(load_model(source.path, dtype=config.dtype, device=device, attention=config.attention))
    model.check()
    return model


if __name__ == "__main__":
    leave(job_main(run))
