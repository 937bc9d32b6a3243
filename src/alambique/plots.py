"""Plots as SVG: the same numbers give the same bytes, and the page behind may be light or dark."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

_INK = "#7d8590"  # contrast of about 4 with white and with near-black alike
_COLOURS = {"teacher": "#8b7bd8", "before": "#e0833a", "after": "#22a38a"}
_LABELS = {"teacher": "teacher", "before": "student before", "after": "student after"}
_STYLE = {
    "svg.hashsalt": "alambique",  # else element ids are random
    "svg.fonttype": "none",  # text stays text: small files, the reader's own fonts
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "lines.linewidth": 1.8,
}


def loss_curve(points: Sequence[Mapping[str, float]]) -> bytes:
    """Loss over training tokens: ``tokens``, ``loss_nats``, and ``kd_nats`` and ``ce_nats`` where present."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(6.4, 3.4)
        tokens = [point["tokens"] for point in points]
        series = {"loss_nats": ("loss", _COLOURS["after"], "-"), "ce_nats": ("cross-entropy", _COLOURS["before"], ":")}
        if any(point.get("kd_nats", point["loss_nats"]) != point["loss_nats"] for point in points):
            series["kd_nats"] = ("divergence from the teacher", _COLOURS["teacher"], "--")
        for column, (label, colour, style) in series.items():
            if all(column in point for point in points):
                values = [point[column] for point in points]
                axes.plot(tokens, values, style, color=colour, label=label, marker="o", markersize=2.5)
        axes.set_title("Training loss")
        axes.set_xlabel("training tokens")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_ylabel("nats per token")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.legend()
        return _svg(figure)


def accuracy(benchmarks: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Teacher, before and after on each benchmark, ± one standard error, with the level of chance.

    Args:
        benchmarks: {name: {"teacher" | "before" | "after": {"metric", "value", "stderr", "n"}, "chance": float | None}}
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(2.2 + 1.6 * len(benchmarks), 3.4)
        for offset, who in zip((-0.22, 0.0, 0.22), _COLOURS, strict=True):
            values = [row[who]["value"] for row in benchmarks.values()]
            errors = [row[who]["stderr"] or 0.0 for row in benchmarks.values()]
            at = [place + offset for place in range(len(benchmarks))]
            axes.errorbar(at, values, errors, fmt="o", capsize=3, color=_COLOURS[who], label=_LABELS[who])
        label = "chance"
        for place, row in enumerate(benchmarks.values()):
            if row.get("chance") is not None:
                axes.hlines(row["chance"], place - 0.4, place + 0.4, colors=_INK, linestyles=":", label=label)
                label = "_"  # matplotlib leaves it out of the legend
        first = next(iter(benchmarks.values()))["teacher"]
        names = [f"{name}\n{row['teacher']['metric']}, n = {row['teacher']['n']:,}" for name, row in benchmarks.items()]
        axes.set_xticks(range(len(benchmarks)), names)
        axes.set_title("Benchmarks, ± one standard error")
        axes.set_ylabel("accuracy" if str(first["metric"]).startswith("acc") else str(first["metric"]))
        axes.margins(y=0.08)
        axes.autoscale_view()
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        return _svg(figure)


def divergence(kl_nats: Mapping[str, float], stderr: Mapping[str, float | None]) -> bytes:
    """KL(teacher ‖ student) on held-out text, before and after."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(6.4, 1.7)
        for place, who in enumerate(("after", "before")):
            value, error = kl_nats[who], stderr.get(who) or 0.0
            axes.barh(place, value, height=0.6, color=_COLOURS[who], xerr=error, ecolor=_INK, capsize=3)
            axes.annotate(
                f"{value:.3f}", (value + error, place), (7, 0), textcoords="offset points", va="center"
            )  # clear of the error bar's cap
        axes.set_yticks((0, 1), (_LABELS["after"], _LABELS["before"]))
        axes.set_title("KL from the teacher, nats per token: lower is better")
        axes.set_xlim(0, 1.15 * max(kl_nats[who] + (stderr.get(who) or 0.0) for who in ("before", "after")) or 1)
        axes.grid(axis="x")
        return _svg(figure)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return stream.getvalue()
