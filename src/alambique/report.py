"""What a distillation was worth, from the JSON files of its stages: one summary, one page, flat metrics."""

import csv
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from alambique.core.errors import UserError
from alambique.core.files import read_json
from alambique.provenance import cache_contents, lineage

WHO = ("teacher", "before", "after")
_FOLDERS = {"teacher": "teacher", "before": "student", "after": "distill"}
_REMEDY = "Run `make repro`, or `dvc repro report@PAIR`."
_TEACHER = ("tokens_per_s", "peak_mib", "cache_bytes_per_token", "num_tokens", "seconds", "cache_bytes", "device")
_DISTILL = (
    "method", "tokens_per_s", "peak_mib", "tflop_per_s", "seconds", "num_tokens", "loss_impl", "steps", "loss_nats",
    "device",
)  # fmt: skip
_EVALUATION = ("peak_mib", "seconds", "device")
_HELDOUT = ("kl_nats", "agreement", "perplexity", "calibration_error", "stderr")
# Label, what a perfect student has where the teacher isn't measured, and digits.
_QUALITY = {
    "kl_nats": ("KL from the teacher, nats ↓", "0", 3),
    "agreement": ("top-1 agreement ↑", "1", 3),
    "perplexity": ("perplexity ↓", None, 1),
    "calibration_error": ("calibration error ↓", None, 3),
}
_STUDENT = (
    "num_parameters", "teacher_parameters", "strategy", "layers_removed", "teacher_sizes", "intermediate_size",
    "num_key_value_heads",
)  # fmt: skip
_WIDTHS = {"intermediate_size": "MLP channels", "num_key_value_heads": "groups of heads"}


def summarise(results: Path, pair: str, teacher: str, benchmarks: Sequence[str]) -> dict[str, Any]:
    """Gather what the stages measured about one pair, from the folder of results; ``artifacts`` lies beside it.

    Returns:
        JSON-ready: ``kl_nats``, ``agreement`` ({before, after}), ``perplexity`` ({teacher, before, after}), ``stderr``
        of these three in the same shape, ``calibration_error``, ``benchmarks.<name>.<teacher|before|after>`` =
        {metric, value, stderr, n, seconds} with ``benchmarks.<name>.chance``, ``gap_recovered`` and
        ``gap_recovered_stderr``, what ``teacher``, ``student``, ``distill`` and ``evaluate`` cost, ``cache`` and
        ``lineage`` (:mod:`alambique.provenance`), and ``validation`` ({step: figures}) where training measured it.

    Raises:
        UserError: a result is missing, or lacks a figure.
    """
    heldout = read_json(results / "evaluate" / "heldout" / f"{pair}.json", _REMEDY)
    rows = {name: _benchmark(results, pair, teacher, name) for name in benchmarks}
    artifacts, trained = results.with_name("artifacts"), results / "distill" / f"{pair}.json"
    summary: dict[str, Any] = {
        "pair": pair,
        **{name: heldout[name] for name in _HELDOUT},
        "heldout_tokens": heldout["num_tokens"],
        "benchmarks": rows,
        "teacher": {"key": teacher, **_figures(results / "teacher" / f"{teacher}.json", _TEACHER)},
        "student": _figures(results / "student" / f"{pair}.json", _STUDENT),
        "distill": _figures(trained, _DISTILL),
        "evaluate": _evaluation(results, pair, teacher, benchmarks),
        "validation": read_json(trained).get("validation", {}),
        "models": heldout["models"],
        "cache": cache_contents(artifacts / "teacher" / teacher, _REMEDY),
        "lineage": lineage(artifacts / "distill" / pair, _REMEDY),
    }
    shares = gap_recovered(summary)
    summary["gap_recovered"] = {name: share for name, (share, _) in shares.items()}
    summary["gap_recovered_stderr"] = {name: error for name, (_, error) in shares.items()}
    return summary


def _evaluation(results: Path, pair: str, teacher: str, benchmarks: Sequence[str]) -> dict[str, Any]:
    """What the evaluations cost: held-out text, and all benchmarks on the three models together."""
    evaluate = results / "evaluate"
    cost = {"heldout": _figures(evaluate / "heldout" / f"{pair}.json", _EVALUATION)}
    folders = [evaluate / _FOLDERS[who] / (teacher if who == "teacher" else pair) for who in WHO]
    if runs := [_figures(folder / f"{name}.json", _EVALUATION) for folder in folders for name in benchmarks]:
        cost["benchmarks"] = {
            "peak_mib": max(run["peak_mib"] for run in runs),
            "seconds": sum(run["seconds"] for run in runs),
            "device": ", ".join(sorted({run["device"] for run in runs})),
        }
    return cost


def _benchmark(results: Path, pair: str, teacher: str, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for who in WHO:
        key = teacher if who == "teacher" else pair
        found = read_json(results / "evaluate" / _FOLDERS[who] / key / f"{name}.json", _REMEDY)
        row[who] = {field: found[field] for field in ("metric", "value", "stderr", "n", "seconds")}
        row["chance"] = found["chance"]
    return row


def _figures(path: Path, names: Sequence[str]) -> dict[str, Any]:
    found = read_json(path, _REMEDY)
    missing = [name for name in names if name not in found]
    if missing:
        raise UserError(f"{path} has no {', '.join(missing)}: it is of another version. {_REMEDY}")
    return {name: found[name] for name in names}


def gap_recovered(summary: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """The share of the distance between untrained student and teacher that training closed, by name.

    (after - before) / (teacher - before), with its standard error as if the three were independent: they were measured
    on the same items, so the true error is smaller. For KL and agreement the teacher's own values are 0 and 1. A
    benchmark counts only if the student was worse than its teacher by more than two standard errors: a share of a gap
    that isn't there would be noise.
    """
    ideals = {"kl_nats": 0.0, "agreement": 1.0, "perplexity": summary["perplexity"]["teacher"]}
    shares = {}
    for name, ideal in ideals.items():
        values, errors = {**summary[name], "teacher": ideal}, {"teacher": 0.0, **summary["stderr"][name]}
        if (ideal - values["before"]) * (1 if name == "agreement" else -1) > 0:
            shares[name] = _share(values, errors)
    for name, row in summary["benchmarks"].items():
        if gap_silence(row) is None:
            values, errors = ({who: row[who][field] for who in WHO} for field in ("value", "stderr"))
            shares[name] = _share(values, errors)
    return shares


def _share(values: Mapping[str, float], stderr: Mapping[str, float | None]) -> tuple[float, float | None]:
    """(after - before) / (teacher - before), and its standard error to first order."""
    gap = values["teacher"] - values["before"]
    share = (values["after"] - values["before"]) / gap
    errors = [stderr.get(who) for who in ("after", "before", "teacher")]
    if None in errors:
        return share, None
    slopes = (1.0, share - 1, -share)
    terms = [slope * (error or 0.0) / gap for slope, error in zip(slopes, errors, strict=True)]
    return share, math.hypot(*terms)


def gap_silence(row: Mapping[str, Any]) -> str | None:
    """Why a benchmark says nothing about the gap that training closed; None if it does say something."""
    gap = row["teacher"]["value"] - row["before"]["value"]
    noise = 2 * math.hypot(row["teacher"]["stderr"] or 0.0, row["before"]["stderr"] or 0.0)
    if not known(gap):
        return "not measured"
    if not noise > 0:
        return "has no standard error"
    if gap > noise:
        return None
    if gap < -noise:
        return "untrained student above its teacher"
    return f"gap of {gap:.3f} within two standard errors"


def recovered(summary: Mapping[str, Any], name: str) -> str:
    """The share of one measure's gap that training closed, formatted with its standard error; empty if unknown."""
    share, error = (summary.get(key, {}).get(name) for key in ("gap_recovered", "gap_recovered_stderr"))
    if not known(share):
        return ""
    return f"{share:.0%}" + (f" ± {error:.0%}" if known(error) else "")


def known(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def read_curve(path: Path) -> list[dict[str, float]]:
    """The loss curve that training wrote: one mapping per step, column name -> number."""
    try:
        with path.open(newline="") as stream:
            points = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(stream)]
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist. {_REMEDY}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is not a table of numbers ({error}): run distill again.") from error
    if not points:
        raise UserError(f"{path} has no rows: run distill again.")
    return points


def quality_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """The table of results: (what, teacher, before, after), formatted, with standard errors where they exist."""
    rows = []
    for name, (label, perfect, digits) in _QUALITY.items():
        # A calibration error is over bins of all rows, so there is no spread over rows to show.
        values, errors = summary[name], summary["stderr"].get(name, {})
        teacher, before, after = (_plus_minus(values.get(who), errors.get(who), digits) for who in WHO)
        rows.append((label, perfect or teacher, before, after))
    for name, row in summary["benchmarks"].items():
        teacher, before, after = (_plus_minus(row[who]["value"], row[who]["stderr"], 3) for who in WHO)
        chance = "" if row["chance"] is None else f", chance {row['chance']:g}"
        rows.append((f"{name} {row['after']['metric']} ↑ (n {row['after']['n']:,}{chance})", teacher, before, after))
    return rows


def cost_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The table of costs: (what, capturing the teacher, training the student), formatted."""
    teacher, distill = summary["teacher"], summary["distill"]
    return [
        ("tokens", f"{teacher['num_tokens']:,}", f"{distill['num_tokens']:,}"),
        ("tokens per second", f"{teacher['tokens_per_s']:,.0f}", f"{distill['tokens_per_s']:,.0f}"),
        ("seconds", f"{teacher['seconds']:,.1f}", f"{distill['seconds']:,.1f}"),
        ("peak memory, MiB", f"{teacher['peak_mib']:,.0f}", f"{distill['peak_mib']:,.0f}"),
        ("teacher's cache, bytes per token", f"{teacher['cache_bytes_per_token']:,.1f}", ""),
        ("TFLOP per second", "", f"{distill['tflop_per_s']:,.3g}"),
    ]


def cost_figures(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each stage cost: ``stage``, ``peak_mib``, ``tokens_per_s`` (None where unknown), ``seconds``, ``device``."""
    teacher, evaluate = summary["teacher"], summary.get("evaluate", {})
    found = [("teacher: capture, once", teacher), ("distill: training", summary["distill"])]
    found += [(f"evaluate: {name}", evaluate[name]) for name in evaluate]
    names = ("peak_mib", "tokens_per_s", "seconds", "device")
    return [{"stage": stage, **{name: figures.get(name) for name in names}} for stage, figures in found]


def _plus_minus(value: float | None, stderr: float | None, digits: int) -> str:
    if not known(value):
        return "-"
    return f"{value:.{digits}f}" + (f" ± {stderr:.{digits}f}" if known(stderr) else "")


def page(summary: Mapping[str, Any], plots: Mapping[str, str], model_folder: str) -> str:
    """The report as Markdown; ``plots`` gives the path of each one's SVG, relative to the page, by title."""
    student, teacher, distill = summary["student"], summary["teacher"], summary["distill"]
    smaller = student["num_parameters"] / student["teacher_parameters"]
    shares = ", ".join(f"{name} {recovered(summary, name)}" for name in summary["gap_recovered"]) or "-"
    silent = {name: gap_silence(row) for name, row in summary["benchmarks"].items()}
    nothing = "".join(f" {name} says nothing ({reason})." for name, reason in silent.items() if reason)
    images = "\n\n".join(f"![{title}]({path})" for title, path in plots.items())
    return f"""# {summary["pair"]}

A student of {student["num_parameters"]:,} parameters ({smaller:.0%} of its teacher `{teacher["key"]}`) was trained on
{distill["num_tokens"]:,} tokens in {distill["steps"]:,} steps against its teacher (method `{distill["method"]}`, path
of the loss `{distill["loss_impl"]}`). The result lies in `{model_folder}`.

{removed(student)} Before training the student stood {summary["kl_nats"]["before"]:.3f} nats from its teacher and agreed
with it on {summary["agreement"]["before"]:.0%} of the tokens.

## Quality

{_markdown(("", "teacher", "student before", "student after"), quality_rows(summary))}

Held-out figures are over {summary["heldout_tokens"]:,} tokens and the whole vocabulary. ± is one standard error:
differences of less than two of them say nothing.

Share of the gap to the teacher that training closed: {shares}.{nothing}

{images}

## Cost

{_markdown(("", "teacher (once)", "training"), cost_rows(summary))}

## Lineage

{_markdown(("what", "which"), [(what, f"`{which}`") for what, which in lineage_rows(summary)])}
"""


def removed(student: Mapping[str, Any]) -> str:
    """One sentence on what of the teacher isn't in the student, or that it was never in the teacher."""
    if student["layers_removed"] is None:
        return "The student is a model of its own, not a pruned teacher."
    sizes, parts = student["teacher_sizes"], []
    if gone := student["layers_removed"]:
        parts.append(f"{len(gone)} of {sizes['layers']} layers ({_runs(gone)}, by `{student['strategy']}`)")
    for name, word in _WIDTHS.items():
        if student[name] != sizes[name]:
            parts.append(f"{sizes[name] - student[name]:,} of {sizes[name]:,} {word} in each layer")
    return f"Left out of the teacher: {', '.join(parts)}."


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: 3, 5 to 7."""
    places = itertools.groupby(enumerate(numbers), key=lambda place: place[1] - place[0])
    runs = [[number for _, number in run] for _, run in places]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def lineage_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where the result comes from: (what, which); what a summary lacks is left out."""
    names = {"teacher": "teacher", "before": "student before training", "after": "student after training"}
    rows = []
    for who, model in summary.get("models", {}).items():
        digest = model.get("sha256") or model.get("manifest_sha256", "")
        rows.append(
            (f"evaluated: {names[who]}", model["uri"] if digest in model["uri"] else f"{model['uri']} {digest}")
        )
    if found := summary.get("lineage"):
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        rows = [*found["from"].items(), *rows, ("tokenizer (sha256)", found["tokenizer_sha256"])]
        rows += [("precision of training", found["precision"]), ("versions", versions)]
    if commit := summary.get("git_commit"):
        dirty = ", and changes that it does not have" if summary.get("git_dirty") == "true" else ""
        rows.append(("git commit when this was written", f"{commit}{dirty}"))
    return [*rows, ("fingerprint of the chain", summary.get("fingerprint", "-"))]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    align = ["---", *("---:" for _ in header[1:])] if len(header) > 2 else ["---"] * len(header)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, align, *rows))


def mlflow_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Flat metrics for one row of a table of runs; slashes group them."""
    teacher, distill = summary["teacher"], summary["distill"]
    metrics = {
        **{f"teacher/{name}": teacher[name] for name in ("tokens_per_s", "peak_mib", "cache_bytes_per_token")},
        **{f"distill/{name}": distill[name] for name in ("tokens_per_s", "peak_mib", "tflop_per_s", "seconds")},
        "distill/loss_nats": distill["loss_nats"]["last"],
        "student/num_parameters": summary["student"]["num_parameters"],
        "total/seconds": teacher["seconds"] + distill["seconds"],
    }
    for name in ("kl_nats", "agreement", "perplexity", "calibration_error"):
        for who, value in summary[name].items():
            metrics[f"eval/{name}{_suffix(who)}"] = value
    for name, row in summary["benchmarks"].items():
        for who in WHO:
            metrics[f"eval/{name}_{row[who]['metric']}{_suffix(who)}"] = row[who]["value"]
            if row[who]["stderr"] is not None:
                metrics[f"eval/{name}_stderr{_suffix(who)}"] = row[who]["stderr"]
    for name, share in summary["gap_recovered"].items():
        metrics[f"gap_recovered/{name}"] = share
    return {name: float(value) for name, value in {**metrics, **_worth(summary)}.items()}


def headline(summary: Mapping[str, Any]) -> dict[str, float]:
    """The dozen figures by which pairs and settings are compared in a terminal: all of the student after training."""
    captured, trained = summary["teacher"], summary["distill"]
    return {
        **{name: summary[name]["after"] for name in ("kl_nats", "agreement", "perplexity")},
        **{name: row["after"]["value"] for name, row in summary["benchmarks"].items()},
        "bf16_gb": _worth(summary)["student/bf16_gb"],
        "cache_bytes_per_token": captured["cache_bytes_per_token"],
        **{f"train_{name}": trained[name] for name in ("tokens_per_s", "peak_mib", "seconds")},
    }


def _worth(summary: Mapping[str, Any]) -> dict[str, float]:
    """What a student gives for its size, its time and its training: columns to sort students by.

    Sizes are those of its parameters in bfloat16, in 10^9 bytes. Speeds are of scoring the benchmarks; only those of
    models scored on one device compare.
    """
    student, agreement = summary["student"], summary["agreement"]
    size_gb = 2 * student["num_parameters"] / 1e9
    worth = {
        "student/bf16_gb": size_gb,
        "student/size_kept": student["num_parameters"] / student["teacher_parameters"],
        "worth/agreement_per_gb": agreement["after"] / size_gb,
    }
    gained_points = 100 * (agreement["after"] - agreement["before"])
    if gained_points > 0:
        worth["worth/training_s_per_agreement_point"] = summary["distill"]["seconds"] / gained_points
    if rows := list(summary["benchmarks"].values()):
        accuracy = {who: sum(row[who]["value"] for row in rows) / len(rows) for who in WHO}
        seconds = {who: sum(row[who]["seconds"] for row in rows) for who in WHO}
        worth["student/items_per_s"] = sum(row["after"]["n"] for row in rows) / seconds["after"]
        worth["student/speedup"] = seconds["teacher"] / seconds["after"]
        worth["worth/accuracy"] = accuracy["after"]
        worth["worth/accuracy_per_gb"] = accuracy["after"] / size_gb
        if accuracy["teacher"] > 0:
            worth["worth/accuracy_kept"] = accuracy["after"] / accuracy["teacher"]
    return worth


def _suffix(who: str) -> str:
    return "" if who == "after" else f"_{who}"
