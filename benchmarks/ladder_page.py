"""What the ladder's runs say together: means over seeds, 95 % intervals, paired differences; two tables and a plot."""

import math
import operator
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

ONLINE = "online"
FIXED = ("teacher", "before")  # the ends of the ladder, one evaluation each
Rows = Sequence[dict[str, Any]]
# Figure -> heading and digits of its mean.
_FIGURES = {
    "kl_nats": ("KL, nats ↓", 4),
    "agreement": ("agreement ↑", 4),
    "perplexity": ("perplexity ↓", 2),
    "ece": ("calibration error ↓", 4),
    "gradient_degrees": ("gradient angle, ° ↓", 1),
    "bytes_per_token": ("cache, bytes/token ↓", 1),
}
_PAIRED = ("kl_nats", "agreement", "perplexity", "ece")
# Student's t at 97.5 % for 1, 2, … degrees of freedom. Source: any table of it
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Interval(NamedTuple):
    """A mean over seeds and half the width of its 95 % interval, None for a single seed."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Of independent values: Student's t, at most ten of them."""
        n, mean = len(values), statistics.fmean(values)
        return cls(mean, _T[n - 2] * statistics.stdev(values) / math.sqrt(n) if n > 1 else None)

    def show(self, digits: int, sign: str = "") -> str:
        """As a cell of a table."""
        half = "" if self.half is None else f" ± {self.half:.{digits}f}"
        return f"{self.mean:{sign}.{digits}f}{half}"


def values(rows: Rows, rung: str, figure: str) -> dict[int, float]:
    """A figure of a rung, by seed; runs without it are left out."""
    found = {row["seed"]: row[figure] for row in rows if row["rung"] == rung}
    return {seed: value for seed, value in found.items() if value is not None}


def over_online(rows: Rows, rung: str) -> Interval | None:
    """Held-out KL over online's, seed by seed."""
    return _paired(rows, rung, "kl_nats", operator.truediv)


def minus_online(rows: Rows, rung: str, figure: str) -> Interval | None:
    """A figure less online's, seed by seed: what both owe to the rows they saw drops out."""
    return _paired(rows, rung, figure, operator.sub)


def _paired(rows: Rows, rung: str, figure: str, compare: Callable[[float, float], float]) -> Interval | None:
    ours, theirs = values(rows, rung, figure), values(rows, ONLINE, figure)
    found = [compare(ours[seed], theirs[seed]) for seed in ours.keys() & theirs.keys()]
    return Interval.of(found) if found else None


def summary(rows: Rows) -> dict[str, dict[str, float | None]]:
    """Means by rung, and ``kl_over_online`` with half the width of its interval."""
    found: dict[str, dict[str, float | None]] = {}
    for rung in _rungs(rows):
        ratio = over_online(rows, rung)
        found[rung] = {
            **{figure: _mean(values(rows, rung, figure)) for figure in _FIGURES},
            "kl_over_online": ratio.mean if ratio else None,
            "kl_over_online_half_width": ratio.half if ratio else None,
        }
    return found


def markdown(rows: Rows) -> str:
    """Two tables: the figures, and their differences from online's."""
    first = [["", *(heading for heading, _ in _FIGURES.values())]]
    for rung in [name for name in FIXED if any(row["rung"] == name for row in rows)] + _rungs(rows):
        cells = [_cell(values(rows, rung, figure), digits) for figure, (_, digits) in _FIGURES.items()]
        first.append([_code(rung), *cells])
    second = [["less `online`", "KL, %", *(_FIGURES[figure][0] for figure in _PAIRED)]]
    for rung in _rungs(rows):
        ratio = over_online(rows, rung)
        if rung == ONLINE or ratio is None:
            continue
        percent = Interval(100 * (ratio.mean - 1), None if ratio.half is None else 100 * ratio.half)
        differences = {figure: minus_online(rows, rung, figure) for figure in _PAIRED}
        cells = [found.show(_FIGURES[figure][1], "+") if found else "" for figure, found in differences.items()]
        second.append([_code(rung), percent.show(1, "+"), *cells])
    return f"{_table(first)}\n\n{_table(second)}\n"


def draw(rows: Rows) -> Figure:
    """Held-out KL by rung, and its excess over online's, both with 95 % intervals."""
    rungs = _rungs(rows)[::-1]
    kl = [Interval.of(list(values(rows, rung, "kl_nats").values())) for rung in rungs]
    excess = [over_online(rows, rung) or Interval(math.nan, None) for rung in rungs]
    figure = Figure(figsize=(8.5, 0.35 * len(rungs) + 1.4))
    left, right = figure.subplots(1, 2, sharey=True)
    dots: dict[str, Any] = {"fmt": "o", "markersize": 4, "capsize": 3}
    left.errorbar([i.mean for i in kl], rungs, xerr=[i.half or 0.0 for i in kl], **dots)
    left.set(xlabel="held-out KL, nats")
    percent, halves = [100 * (i.mean - 1) for i in excess], [100 * (i.half or 0.0) for i in excess]
    right.errorbar(percent, rungs, xerr=halves, **dots)
    right.axvspan(-1, 1, alpha=0.15)
    right.set(xlabel="the same, % above online's, paired by seed", xscale="symlog")
    right.xaxis.set_major_formatter("{x:g}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def _rungs(rows: Rows) -> list[str]:
    return [rung for rung in dict.fromkeys(row["rung"] for row in rows) if rung not in FIXED]


def _mean(by_seed: dict[int, float]) -> float | None:
    return Interval.of(list(by_seed.values())).mean if by_seed else None


def _cell(by_seed: dict[int, float], digits: int) -> str:
    found = list(by_seed.values())
    if not found:
        return ""
    # What no seed changes (one cache serves all) needs no interval.
    return (Interval(found[0], None) if len(set(found)) == 1 else Interval.of(found)).show(digits)


def _code(rung: str) -> str:
    return {"teacher": "the teacher", "before": "before training"}.get(rung, f"`{rung}`")


def _table(lines: list[list[str]]) -> str:
    rule = ["---", *("---:" for _ in lines[0][1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (lines[0], rule, *lines[1:]))
