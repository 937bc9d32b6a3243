"""Stage report@PAIR: one JSON, one page as HTML and as Markdown with plots, and one row in MLflow."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from alambique import plots
from alambique.core.errors import UserError
from alambique.core.files import atomic_folder, write_bytes, write_json
from alambique.core.params import Config, Params, validate
from alambique.pages import INDEX, kl_points, pair_page
from alambique.report import headline, mlflow_metrics, page, read_curve, summarise
from pipeline import tracking
from pipeline.job import job_main, leave

RESULTS = Path("results")


class Settings(Config):
    """What a report is about: everything that was set, flat, for MLflow's columns."""

    teacher: str
    benchmarks: list[str]
    flat: dict[str, Any]


def settings(params: Params, pair: str) -> Settings:
    """Read all sections; what the pair and its teacher override is already merged in ``flat``."""
    entry, benchmarks = params.get(f"pairs.{pair}"), params.keys("evaluate.benchmarks")
    teacher = str(entry["teacher"])
    if f"{pair}.html" == INDEX:
        raise UserError(f"{params.source}: pairs.{pair} would take the place of the page over all pairs: rename it.")
    overrides = {"student": entry["student"], "distill": entry["distill"]}
    model = params.get(f"teachers.{teacher}")
    flat: dict[str, Any] = {"pair": pair, "teacher": teacher, "teacher.model": model["model"]}
    for section in ("prepare", "teacher", "student", "distill", "evaluate", "report"):
        flat |= _flatten(section, params.get(section))
    for section, values in {**overrides, "teacher": model["capture"]}.items():
        flat |= _flatten(section, values)
    values = {"teacher": teacher, "benchmarks": benchmarks, "flat": flat}
    return validate(Settings, values, f"{params.source}: pairs.{pair}")


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {name: leaf for key, inner in value.items() for name, leaf in _flatten(f"{prefix}.{key}", inner).items()}


def run(pair: str) -> None:
    """Write results/report/PAIR.json, PAIR.metrics.json, PAIR.html, PAIR.md and PAIR/*.svg, then its row in MLflow."""
    config = settings(Params.load(), pair)
    summary = summarise(RESULTS, pair, config.teacher, config.benchmarks)
    summary |= {"fingerprint": tracking.chain_fingerprint(pair), **tracking.git_state()}
    curve = RESULTS / "distill" / f"{pair}_curve.csv"
    points, model = read_curve(curve), f"artifacts/distill/{pair}"
    target, images = RESULTS / "report", {}
    with atomic_folder(target / pair) as folder:
        for name, (title, svg) in _plots(summary, points).items():
            write_bytes(folder / f"{name}.svg", svg)
            images[title] = f"{pair}/{name}.svg"
    pages = {"html": pair_page(summary, points, config.flat, model), "md": page(summary, images, model)}
    for kind, text in pages.items():
        write_bytes(target / f"{pair}.{kind}", text.encode())
    write_json(target / f"{pair}.json", summary)
    write_json(target / f"{pair}.metrics.json", headline(summary))
    _record(pair, config, summary, [curve, *(target / f"{pair}.{kind}" for kind in (*pages, "json")), target / pair])


def _plots(summary: dict[str, Any], points: list[dict[str, float]]) -> dict[str, tuple[str, bytes]]:
    return {
        "loss": ("Training loss", plots.loss_curve(points)),
        "kl": ("KL from the teacher", plots.divergence(kl_points(summary))),
        "accuracy": ("Benchmarks", plots.accuracy(summary["benchmarks"])),
    }


def columns(metrics: Iterable[str]) -> list[str]:
    """What MLflow's table of pairs shows of a row: how good the student is, then what it cost."""
    quality = ["eval/kl_nats", "eval/agreement", "eval/perplexity"]
    aside = ("_before", "_teacher", "_stderr", "calibration_error")
    quality += [
        name for name in metrics if name.startswith("eval/") and name not in quality and not name.endswith(aside)
    ]
    costs = [f"{stage}/{name}" for stage in ("distill", "teacher") for name in ("peak_mib", "tokens_per_s")]
    return [*quality, *costs, "teacher/cache_bytes_per_token", "student/bf16_gb"]


def _record(pair: str, config: Settings, summary: dict[str, Any], files: list[Path]) -> None:
    """Write the row; files are logged one by one, a folder's too."""
    hashes = tracking.dvc_hashes(pair)
    tags = {"teacher": config.teacher, "model_path": str(Path(f"artifacts/distill/{pair}").resolve())}
    tags |= {f"dvc:{path}": md5 for path, md5 in hashes.items() if path.startswith("artifacts/")}
    datasets = [
        tracking.Dataset(name, hashes[path], path, "distill")
        for name, path in (
            ("prepared data", f"artifacts/prepare/{config.teacher}"),
            ("teacher's cache", f"artifacts/teacher/{config.teacher}"),
        )
        if path in hashes
    ]
    files = [file for path in files for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    metrics = mlflow_metrics(summary)
    row = tracking.record_pair(
        pair,
        summary["fingerprint"],
        config.flat,
        metrics,
        tags,
        [*files, Path("params.yaml")],
        datasets,
        columns(metrics),
    )
    lineage = {f"{who}_model": " ".join(model.values()) for who, model in summary["models"].items()}
    lineage |= {"teacher": config.teacher, "fingerprint": summary["fingerprint"]}
    lineage["dvc_md5"] = hashes[f"artifacts/distill/{pair}"]
    tracking.register_student(pair, row.run_id, lineage)


if __name__ == "__main__":
    leave(job_main(run))
