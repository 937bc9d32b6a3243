"""Stage evaluate: one model on one benchmark, or a pair on held-out text.

`python -m pipeline.evaluate teacher TEACHER BENCHMARK`, `… student PAIR BENCHMARK` (before training),
`… distill PAIR BENCHMARK` (after), `… heldout PAIR`.
"""

from pathlib import Path
from typing import Any

from alambique.core.errors import UserError, did_you_mean
from alambique.core.files import MANIFEST, read_manifest, sha256_file, write_json
from alambique.core.measure import Stopwatch, default_device, device_name, peak_mib, versions
from alambique.core.params import Config, Params, validate
from alambique.core.sources import fetch
from alambique.data.dataset import PreparedData
from alambique.evaluate import BenchmarkConfig, EvaluateSettings
from alambique.heldout import HeldoutConfig, heldout
from alambique.models.fetch import fetch_model
from alambique.models.load import SplitModel, load_model
from pipeline.job import job_main, leave

KINDS = ("teacher", "student", "distill", "heldout")
RESULTS = Path("results/evaluate")


class Settings(Config):
    """What decides one evaluation; ``benchmark`` or ``heldout`` is set."""

    run: EvaluateSettings
    benchmark: BenchmarkConfig | None = None
    heldout: HeldoutConfig | None = None
    teacher: str | None = None
    teacher_model: str | None = None


def settings(params: Params, kind: str, key: str, benchmark: str = "") -> Settings:
    """Read the stage's sections of params.yaml."""
    if kind not in KINDS:
        raise UserError(f"evaluate what? {kind} is not one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    values: dict[str, Any] = {"run": params.section(EvaluateSettings, "evaluate.settings")}
    if kind == "heldout":
        values["heldout"] = params.section(HeldoutConfig, "evaluate.heldout")
        values["teacher"] = params.get(f"pairs.{key}.teacher")
    else:
        values["benchmark"] = params.section(BenchmarkConfig, f"evaluate.benchmarks.{benchmark}")
    if kind == "teacher":
        values["teacher"] = key
    if teacher := values.get("teacher"):
        values["teacher_model"] = params.get(f"teachers.{teacher}.model")
    return validate(Settings, values, f"{params.source}: evaluate")


def run(kind: str, key: str, benchmark: str = "") -> None:
    """Write results/evaluate/KIND/KEY/BENCHMARK.json, or results/evaluate/heldout/PAIR.json."""
    config = settings(Params.load(), kind, key, benchmark)
    if kind == "heldout":
        write_json(RESULTS / "heldout" / f"{key}.json", _heldout(key, config))
    else:
        write_json(RESULTS / kind / key / f"{benchmark}.json", _benchmark(kind, key, benchmark, config))


def _benchmark(kind: str, key: str, name: str, config: Settings) -> dict[str, Any]:
    assert config.benchmark is not None
    from alambique.scoring import run_benchmark  # lm_eval takes seconds to import

    if kind == "teacher":
        source = fetch_model(str(config.teacher_model))
        path, identity = source.path, {"uri": source.uri, "sha256": source.sha256}
    else:
        path, identity = _student(kind, key)
    return {**run_benchmark(path, name, config.benchmark, config.run, default_device(), fetch), "model": identity}


def _student(kind: str, pair: str) -> tuple[Path, dict[str, str]]:
    """A student's folder, known to be whole, and the hash of its manifest."""
    folder = Path("artifacts") / kind / pair
    read_manifest(folder, f"Run its stage first (`dvc repro {kind}@{pair}`).")
    return folder, {"uri": folder.as_posix(), "manifest_sha256": sha256_file(folder / MANIFEST)}


def _heldout(pair: str, config: Settings) -> dict[str, Any]:
    """Teacher, student before and student after, on the valid rows of the teacher's prepared data."""
    assert config.heldout is not None
    device = default_device()
    run = config.run.resolved(device)
    data = PreparedData.open(Path("artifacts/prepare") / str(config.teacher))
    source = fetch_model(str(config.teacher_model))
    paths = {"teacher": source.path}
    identities: dict[str, dict[str, str]] = {"teacher": {"uri": source.uri, "sha256": source.sha256}}
    for name, kind in (("before", "student"), ("after", "distill")):
        paths[name], identities[name] = _student(kind, pair)
    models = {
        name: SplitModel(load_model(path, dtype=run.dtype, device=device, attention=run.attention))
        for name, path in paths.items()
    }
    watch = Stopwatch(device)
    teacher = models.pop("teacher")
    figures = heldout(teacher, models, data.valid, data.manifest["vocab_size"], config.heldout, device)
    return {
        **figures,
        "settings": run.model_dump(mode="json"),
        "models": identities,
        "versions": versions(),
        "seconds": round(watch.seconds(), 3),
        "peak_mib": round(peak_mib(device), 1),
        "device": device_name(device),
    }


if __name__ == "__main__":
    leave(job_main(run))
