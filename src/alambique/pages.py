"""Reports as HTML that stands alone: no script, nothing loaded from elsewhere, light or dark as the reader's screen.

Whatever comes from a file is escaped by the templates; only plots are put in as they are.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from alambique import plots
from alambique.core.errors import UserError
from alambique.core.files import write_bytes
from alambique.report import WHO, cost_figures, gap_silence, known, lineage_rows, quality_rows, recovered, removed

INDEX = "index.html"
TEMPLATES = Path(__file__).with_name("templates")
_HEADLINE = ("kl_nats", "agreement", "perplexity")  # the first of the measures


def pair_page(
    summary: Mapping[str, Any],
    curve: Sequence[Mapping[str, float]],
    settings: Mapping[str, Any],
    model_folder: str,
) -> str:
    """The report of one pair; parts that the summary lacks are left out, and so is an empty curve.

    ``summary`` has a ``fingerprint`` besides, and ``git_commit`` and ``git_dirty`` where there is Git; ``settings`` is
    everything that was set, flat.
    """
    figures = {"kl": _drawn("kl", "KL from the teacher over training", plots.divergence, kl_points(summary))}
    if summary["benchmarks"]:
        figures["accuracy"] = _drawn("accuracy", "Benchmarks", plots.accuracy, summary["benchmarks"])
    if curve:
        figures["loss"] = _drawn("loss", "Training loss", plots.loss_curve, curve)
    silent = {key: gap_silence(row) for key, row in summary["benchmarks"].items()}
    return _render(
        "pair.html",
        summary={**dict.fromkeys(("git_commit", "git_dirty", "validation")), **summary},
        lineage=lineage_rows(summary),
        measures=[_measure(summary, key, row, silent.get(key)) for key, row in _quality(summary).items()],
        removed=removed(summary["student"]).replace("`", ""),
        costs=cost_figures(summary),
        cache=summary.get("cache"),
        figures=figures,
        settings={name: json.dumps(value, ensure_ascii=False) for name, value in settings.items()},
        model_folder=model_folder,
    )


def kl_points(summary: Mapping[str, Any]) -> list[tuple[float, float, float | None]]:
    """KL on held-out text over training tokens, for :func:`alambique.plots.divergence`."""
    kl_nats, stderr, distill = summary["kl_nats"], summary["stderr"]["kl_nats"], summary["distill"]
    a_step = distill["num_tokens"] / max(1, distill["steps"])
    steps = {int(step): found["kl_nats"] for step, found in summary.get("validation", {}).items()}
    between = [(a_step * step, value, None) for step, value in sorted(steps.items()) if 0 < step < distill["steps"]]
    return [
        (0, kl_nats["before"], stderr.get("before")),
        *between,
        (distill["num_tokens"], kl_nats["after"], stderr.get("after")),
    ]


def _quality(summary: Mapping[str, Any]) -> dict[str, tuple[str, str, str, str]]:
    """The rows of the table of results, by measure."""
    keys = (*_HEADLINE, "calibration_error", *summary["benchmarks"])
    return dict(zip(keys, quality_rows(summary), strict=True))


def _measure(
    summary: Mapping[str, Any], key: str, row: tuple[str, str, str, str], silence: str | None
) -> dict[str, Any]:
    """One line of results: formatted values, and where on the way from student to teacher training came."""
    share, error = (summary.get(name, {}).get(key) for name in ("gap_recovered", "gap_recovered_stderr"))
    label, *values = row
    return {
        "key": key,
        "label": label,
        **dict(zip(WHO, values, strict=True)),
        "recovered": recovered(summary, key),
        "silence": silence,
        "at": _percent(share) if known(share) else None,
        "low": _percent(share - error) if known(share) and known(error) else None,
        "high": _percent(share + error) if known(share) and known(error) else None,
    }


def _percent(share: float) -> float:
    return round(100 * min(max(share, 0.0), 1.0), 2)


def write_index(folder: Path) -> Path:
    """Write the page over all reports of ``folder``, from their JSON files, and return its path.

    A file that isn't a report, or is of another version, is named on the page and otherwise left alone.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: name the folder of reports, or make one with `make repro`.")
    summaries, skipped = [], []
    # No dot in a key: PAIR.metrics.json is no report, but an extract for the terminal.
    for path in sorted(found for found in folder.glob("*.json") if "." not in found.stem):
        try:
            summary = json.loads(path.read_bytes())
            _row(summary, [])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            skipped.append(path.name)
        else:
            page = path.with_suffix(".html")
            summaries.append({**summary, "page": page.name if page.is_file() else None})
    write_bytes(folder / INDEX, index_page(summaries, skipped).encode())
    return folder / INDEX


def index_page(summaries: Sequence[Mapping[str, Any]], skipped: Sequence[str] = ()) -> str:
    """The page over all pairs: a table by teacher, and size against accuracy.

    Each summary has ``page`` besides: the name of its own page, or None. ``skipped`` names files that are no reports.
    """
    benchmarks = list(dict.fromkeys(name for summary in summaries for name in summary["benchmarks"]))
    teachers: dict[str, list[Mapping[str, Any]]] = {}
    for summary in sorted(summaries, key=lambda summary: (summary["teacher"]["key"], _order(summary))):
        teachers.setdefault(summary["teacher"]["key"], []).append(summary)
    groups = [
        {
            "key": key,
            "teacher": _row(pairs[-1], benchmarks, "teacher"),
            "pairs": [_row(pair, benchmarks) for pair in pairs],
        }
        for key, pairs in teachers.items()
    ]
    common = [name for name in benchmarks if all(name in summary["benchmarks"] for summary in summaries)]
    models = _models(teachers, common)
    figure = _drawn("size", "Accuracy over size", plots.size_accuracy, models, "Mean accuracy") if models else None
    return _render("index.html", groups=groups, benchmarks=benchmarks, common=common, figure=figure, skipped=skipped)


def _order(summary: Mapping[str, Any]) -> tuple[float, str]:
    """Nearest to the teacher first."""
    value = summary["kl_nats"]["after"]
    return (value if known(value) else math.inf, str(summary["pair"]))


def _row(summary: Mapping[str, Any], benchmarks: Sequence[str], who: str = "after") -> dict[str, Any]:
    """One line of the table, formatted: of a student after training, or of its teacher."""
    cells = _quality(summary)
    column, student = 1 + WHO.index(who), summary["student"]
    cost = summary["teacher" if who == "teacher" else "distill"]
    size = student["teacher_parameters" if who == "teacher" else "num_parameters"]
    return {
        "name": str(summary["teacher"]["key"] if who == "teacher" else summary["pair"]),
        "page": summary.get("page"),
        "figures": [cells[key][column] for key in _HEADLINE],
        "benchmarks": [cells[key][column] if key in cells else "-" for key in benchmarks],
        "parameters": plots.parameters(size),
        "peak_mib": f"{cost['peak_mib']:,.0f}" if known(cost["peak_mib"]) else "-",
        "tokens_per_s": f"{cost['tokens_per_s']:,.0f}" if known(cost["tokens_per_s"]) else "-",
        "cache": f"{summary['teacher']['cache_bytes_per_token']:,.0f}",
        "recovered": recovered(summary, "kl_nats"),
    }


def _models(teachers: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str]) -> list[plots.Sized]:
    """Every teacher and student that has a size and a finite mean accuracy over ``names``."""
    models = []
    for key, pairs in teachers.items():
        own = _mean(pairs[-1], names, "teacher")
        models.append(plots.Sized(key, "teacher", pairs[-1]["student"]["teacher_parameters"], *own))
        for pair in pairs:
            before, _ = _mean(pair, names, "before")
            size = pair["student"]["num_parameters"]
            models.append(plots.Sized(str(pair["pair"]), "after", size, *_mean(pair, names, "after"), before))
    return [model for model in models if model.num_parameters > 0 and known(model.value)]


def _mean(summary: Mapping[str, Any], names: Sequence[str], who: str) -> tuple[float, float | None]:
    """Mean accuracy over benchmarks of different items, and its standard error."""
    found = [summary["benchmarks"][name][who] for name in names]
    if not found or not all(known(one["value"]) for one in found):
        return math.nan, None
    errors = [one["stderr"] for one in found]
    error = math.hypot(*errors) / len(found) if all(known(one) for one in errors) else None
    return sum(one["value"] for one in found) / len(found), error


def _drawn(prefix: str, title: str, draw: Any, *arguments: Any) -> Markup:
    """A plot twice, for a column and for a phone: the page's style shows one. Text keeps its size in both."""
    sizes = {"wide": plots.WIDE, "narrow": plots.NARROW}
    drawn = (inline(draw(*arguments, width=width), f"{prefix}-{name}", name, title) for name, width in sizes.items())
    return Markup("\n").join(drawn)


def inline(svg: bytes, prefix: str, kind: str, title: str) -> Markup:
    """An SVG of ours as an element of a page, in the page's font and colours, its ids unlike its neighbours'."""
    root = ElementTree.fromstring(svg)
    for parent in root.iter():
        for child in [child for child in parent if child.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({name: _themed(name, value, prefix) for name, value in attributes.items()})
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib.update({"class": kind, "role": "img", "aria-label": title})
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # made here, its texts escaped


def _themed(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == "style":
        parts = [part.strip() for part in value.split(";") if not part.strip().startswith("font-family")]
        value = "; ".join(parts)
        for colour, variable in plots.VARIABLES.items():
            value = value.replace(colour, f"var(--{variable})")
    return value.replace("url(#", f"url(#{prefix}-") if name != "href" else value.replace("#", f"#{prefix}-")


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"parameters": plots.parameters, "number": _number}
    return environment.get_template(template).render(**values)


def _number(value: Any, spec: str = ",.0f") -> str:
    return format(value, spec) if known(value) else "-"
