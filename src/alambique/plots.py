"""Plots as SVG: the same numbers give the same bytes, and the page behind may be light or dark."""

import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

WIDE, NARROW = 7.2, 3.7  # inches: a column of text, and a phone
_MOST_POINTS = 400  # of a curve, assumption: more can't be told apart in a column
_LOG_FROM = 5  # ratio of sizes above which their axis is logarithmic, assumption
Box = tuple[float, float, float, float]  # left, bottom, right, top
_DOT = 4.0  # half the size of a point, in points of type
_FONT_SIZE = 9  # of names in a plot, in points
_WIDEST_LETTER = 0.62  # mean width of a letter in the widest of the usual sans-serif fonts, in font sizes; assumption
_INK = "#7d8590"  # contrast of about 4 with white and with near-black alike
_COLOURS = {"teacher": "#8b7bd8", "before": "#e0833a", "after": "#22a38a"}
_MARKERS = {"teacher": "D", "before": "o", "after": "s"}  # told apart without colour too
_AWAY = {"before": (9, "left"), "after": (-9, "right")}  # where a name goes, from the first point and from the last
_LABELS = {"teacher": "teacher", "before": "student before", "after": "student after"}
VARIABLES = {_INK: "muted", **{colour: who for who, colour in _COLOURS.items()}}  # of templates/style.css
_STYLE = {
    "svg.hashsalt": "alambique",  # else element ids are random
    "svg.fonttype": "none",  # text stays text: small files, the reader's own fonts
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
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


def loss_curve(points: Sequence[Mapping[str, float]], width: float = WIDE) -> bytes:
    """Loss over training tokens: ``tokens``, ``loss_nats``, and ``kd_nats`` and ``ce_nats`` where present.

    Cross-entropy has a panel of its own: it is several times the loss, and would flatten it.
    """
    points = _thin(points)
    series = {"loss_nats": ("loss", "after", "-")}
    if any(point.get("kd_nats", point["loss_nats"]) != point["loss_nats"] for point in points):
        series["kd_nats"] = ("divergence from the teacher", "teacher", "--")
    panels = [("Training loss", series)]
    if all(point.get("ce_nats", point["loss_nats"]) != point["loss_nats"] for point in points):
        panels.append(("Cross-entropy", {"ce_nats": ("cross-entropy", "before", "-")}))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, 0.7 + 1.9 * len(panels)), layout="constrained")
        for axes, (title, lines) in zip(
            figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], panels, strict=True
        ):
            for column, (label, who, style) in lines.items():
                values = [point[column] for point in points]
                axes.plot([point["tokens"] for point in points], values, style, color=_COLOURS[who], label=label)
            axes.set_title(f"{title}, nats per token")
            axes.margins(x=0.02)
            axes.grid(axis="y")
            if len(lines) > 1:
                axes.legend()
        figure.axes[0].set_ylim(bottom=0)
        _over_tokens(axes)
        return _svg(figure)


def _thin(points: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Means of consecutive points, so that a long run's curve stays a small file."""
    size = -(-len(points) // _MOST_POINTS)
    blocks = (points[start : start + size] for start in range(0, len(points), size))
    return [{name: sum(point[name] for point in block) / len(block) for name in block[0]} for block in blocks]


def divergence(points: Sequence[tuple[float, float, float | None]], width: float = WIDE) -> bytes:
    """KL(teacher ‖ student) on held-out text over training.

    ``points`` are training tokens so far, nats per token and its standard error: the first before training, the last
    after it.
    """
    drawn = [
        (x, value, error if error and math.isfinite(error) else 0.0)
        for x, value, error in points
        if math.isfinite(value)
    ]
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(width, 2.4)
        tokens, values = [point[0] for point in drawn], [point[1] for point in drawn]
        axes.plot(tokens, values, ":" if len(drawn) == 2 else "-", color=_COLOURS["after"])
        for who, (x, value, error) in zip(("before", "after"), (*drawn[:1], *drawn[1:][-1:]), strict=False):
            axes.errorbar([x], [value], [error], fmt="o", capsize=3, color=_COLOURS[who])
            (aside, ha), (up, va) = _AWAY[who], (-7, "top") if value < values[0] else (7, "bottom")
            axes.annotate(f"{value:.3f} {who}", (x, value), (aside, up), textcoords="offset points", ha=ha, va=va)
        title = "KL from the teacher on held-out text" if width > NARROW else "Held-out KL"
        axes.set_title(f"{title}, nats: lower is better")
        axes.set_ylim(0, 1.3 * max((value + error for _, value, error in drawn), default=0.0) or 1)
        axes.grid(axis="y")
        _over_tokens(axes)
        return _svg(figure)


def _over_tokens(axes: Axes) -> None:
    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def accuracy(benchmarks: Mapping[str, Mapping[str, Any]], width: float = WIDE) -> bytes:
    """Teacher, before and after on each benchmark of a report, ± one and two standard errors, with chance."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(width, 1.1 + 0.75 * len(benchmarks))
        for offset, who in zip((-0.24, 0.0, 0.24), _COLOURS, strict=True):
            for place, row in enumerate(benchmarks.values()):
                value, error, at = row[who]["value"], row[who]["stderr"] or 0.0, [place + offset]
                axes.plot([value - 2 * error, value + 2 * error], at * 2, color=_COLOURS[who], linewidth=1)
                axes.plot([value - error, value + error], at * 2, color=_COLOURS[who], linewidth=3)
                label = _LABELS[who] if place == 0 else "_"  # matplotlib leaves it out of the legend
                axes.plot([value], at, _MARKERS[who], color=_COLOURS[who], markersize=6, label=label)
        label = "chance"
        for place, row in enumerate(benchmarks.values()):
            if row.get("chance") is not None:
                axes.vlines(row["chance"], place - 0.42, place + 0.42, colors=_INK, linestyles=":", label=label)
                label = "_"
        names = [f"{name}\n{row['teacher']['metric']}, n = {row['teacher']['n']:,}" for name, row in benchmarks.items()]
        axes.set_yticks(range(len(benchmarks)), names)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(benchmarks) - 0.4, -0.6)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        if width > NARROW:  # where it would take the room of the plot
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
        return _svg(figure)


@dataclass(frozen=True)
class Sized:
    """One model in the plot of size against accuracy; ``before`` is its accuracy before training, if it has one."""

    label: str
    who: str
    num_parameters: float
    value: float
    stderr: float | None
    before: float | None = None


def size_accuracy(models: Sequence[Sized], what: str, width: float = WIDE) -> bytes:
    """Accuracy (``what``) over the number of parameters, ± one standard error, each model with its name."""
    with matplotlib.rc_context({**_STYLE, "figure.dpi": 72}):  # a pixel is a point: labels are placed in these
        figure, axes = _figure(width, 4.6)
        for model in models:
            colour, x = _COLOURS[model.who], [model.num_parameters]
            if model.before is not None:
                axes.plot(x * 2, [model.before, model.value], ":", color=colour, linewidth=1)
                axes.plot(x, [model.before], _MARKERS["before"], color=_COLOURS["before"], markersize=4)
            axes.errorbar(x, [model.value], [model.stderr or 0.0], fmt=_MARKERS[model.who], color=colour, elinewidth=1)
        axes.margins(x=0.12, y=0.12)
        sizes = [model.num_parameters for model in models]
        if max(sizes) > _LOG_FROM * min(sizes):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if width > NARROW else (1,)))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: parameters(value)))
        left, right = axes.get_xlim()  # the largest models' names need room
        more = right * (right / left) ** 0.15 if axes.get_xscale() == "log" else right + 0.15 * (right - left)
        axes.set_xlim(right=more)
        axes.set_xlabel("parameters")
        axes.set_title(what)
        axes.grid(axis="y")
        figure.draw_without_rendering()  # settles where the axes are
        _label(axes, models)
        return _svg(figure)


def _label(axes: Axes, models: Sequence[Sized]) -> None:
    ends = [(model, model.before) for model in models if model.before is not None]
    ends += [(model, model.value + sign * (model.stderr or 0.0)) for model in models for sign in (-1, 1)]
    on_lines = [(model.num_parameters, value) for model, end in ends for value in np.linspace(model.value, end, 9)[1:]]
    named = [(model.num_parameters, model.value) for model in models]
    befores = [(model.num_parameters, model.before) for model in models if model.before is not None]
    points, lines = (
        [tuple(place) for place in axes.transData.transform(places)] for places in (named + befores, on_lines)
    )
    box = axes.get_window_extent()
    found = place_labels(points, [model.label for model in models], (box.x0, box.y0, box.x1, box.y1), lines)
    for model, point, place in zip(models, points, found, strict=False):
        if place is None:
            continue
        offset = (place[0] - point[0], place[1] - point[1])
        # Of the label, the place nearest to the point.
        edge = (_clamp(offset[0], _width(model.label)), _clamp(offset[1], _FONT_SIZE))
        corner, colour = (model.num_parameters, model.value), _COLOURS[model.who]
        options: dict[str, Any] = {"textcoords": "offset points", "in_layout": False}
        if math.hypot(*edge) > 2 * _FONT_SIZE:
            line = {"arrowstyle": "-", "color": _INK, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 4}
            axes.annotate("", corner, edge, arrowprops=line, zorder=1, **options)  # under all names
        axes.annotate(model.label, corner, offset, fontsize=_FONT_SIZE, va="bottom", color=colour, **options)


def _clamp(start: float, length: float) -> float:
    """The number nearest to 0 that is between ``start`` and ``start + length``."""
    return min(max(0.0, start), start + length)


def parameters(number: float) -> str:
    """A number of parameters as people say it: 113 M, 3.21 B."""
    scale, unit = (1e9, "B") if number >= 1e9 else (1e6, "M") if number >= 1e6 else (1e3, "k")
    return f"{number / scale:.3g} {unit}"


def place_labels(
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    bounds: Box,
    lines: Sequence[tuple[float, float]] = (),
) -> list[tuple[float, float] | None]:
    """The lower left corner of each label, so that none covers another or a point; None where there is no room.

    Args:
        points: what is named, then others that may not be covered; all numbers are in points of type.
        labels: the names, in the same order.
        bounds: left, bottom, right and top edge of the room.
        lines: points of lines, which a label covers only where there is no other room.
    """
    dots, taken, found = [_around(*point) for point in points], [_around(*point) for point in lines], []
    for (x, y), label in zip(points, labels, strict=False):
        boxes = [box for box in _boxes(x, y, _width(label)) if _inside(box, bounds)]
        boxes = [box for box in boxes if not any(_overlap(box, other) for other in dots)]
        clear = (box for box in boxes if not any(_overlap(box, other) for other in taken))
        box = next(clear, None) or next(iter(boxes), None)
        if box is not None:
            dots.append(box)
        found.append(None if box is None else box[:2])
    return found


def _boxes(x: float, y: float, width: float) -> Iterator[Box]:
    """Where a label of a point may be, near places first and the right before the left."""
    height = 1.4 * _FONT_SIZE
    for radius, turn in itertools.product(range(8, 160, 8), range(16)):
        dx, dy = radius * math.cos(turn * math.pi / 8), radius * math.sin(turn * math.pi / 8)
        left = x + dx - (0 if dx > 1 else width if dx < -1 else width / 2)
        yield left, y + dy - height / 2, left + width, y + dy + height / 2


def _around(x: float, y: float) -> Box:
    return x - _DOT, y - _DOT, x + _DOT, y + _DOT


def _inside(box: Box, room: Box) -> bool:
    return box[0] >= room[0] and box[1] >= room[1] and box[2] <= room[2] and box[3] <= room[3]


def _width(label: str) -> float:
    return _WIDEST_LETTER * _FONT_SIZE * len(label)


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return stream.getvalue()
