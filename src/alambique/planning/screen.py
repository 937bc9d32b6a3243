"""A plan as a table, and what to know beside it."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from alambique.planning.machine import ERROR, Need, gib

if TYPE_CHECKING:
    from alambique.plan import PairPlan, Plan, TeacherPlan

_WIDTH = 100


def show(plan: "Plan", console: Console | None = None) -> None:
    """Print ``plan``; to stdout, 100 columns wide where it isn't a terminal."""
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    console.print(_table(plan))
    for key, teacher in plan.teachers.items():
        _print(console, key, _of_teacher(teacher))
    for key, pair in plan.pairs.items():
        _print(console, key, _of_pair(pair))
    _print(console, "disk", [f"{_gb(plan.disk_bytes)} in all"])
    _print(console, "speed", [plan.machine.assumed])


def _table(plan: "Plan") -> Table:
    machine = plan.machine
    table = Table(
        title=f"{plan.source} on {machine.name} with {gib(machine.memory_mib)} GiB",
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=f"predicted; memory to about {ERROR:.0%}; nothing was run",
        caption_justify="left",
    )
    table.add_column("stage")
    for name in ("peak, GiB", "fits", "PFLOP", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, need, bold in _rows(plan):
        cells = (
            gib(need.peak_mib),
            _fits(need),
            "" if need.flops is None else f"{need.flops / 1e15:,.3g}",
            _time(need),
        )
        table.add_row(*(Text(cell, style="bold" if bold else "") for cell in (label, *cells)))
    return table


def _rows(plan: "Plan") -> Iterator[tuple[str, Need, bool]]:
    for key, teacher in plan.teachers.items():
        if teacher.capture is not None:
            yield f"teacher@{key}", teacher.capture, True
    for key, pair in plan.pairs.items():
        if pair.student is None or pair.evaluate is None:
            continue
        yield f"student@{key}", pair.student, True
        for method, need in pair.methods.items():
            chosen = method == pair.method
            yield f"distill@{key} {method}{' (chosen)' if chosen else ''}", need, chosen
        yield f"evaluate_heldout@{key}", pair.evaluate, True


def _of_teacher(teacher: "TeacherPlan") -> Iterator[str]:
    if teacher.problem is not None:
        yield teacher.problem
        return
    yield f"{teacher.parameters:,} parameters, {teacher.num_rows:,} rows"
    source = {"sample": "from a sample of the one that is there", "formula": "by formula"}
    size = f"{teacher.cache_bytes_per_token:.0f} bytes per token"
    yield f"cache {_gb(teacher.cache_bytes)}, {size} ({source.get(teacher.cache_from, teacher.cache_from)})"
    yield _disk(teacher.disk_bytes)
    if teacher.advice is not None:
        yield teacher.advice


def _of_pair(pair: "PairPlan") -> Iterator[str]:
    if pair.problem is not None:
        yield pair.problem
        return
    yield f"{pair.parameters:,} parameters"
    yield f"largest micro_batch_rows {pair.largest_micro_batch_rows:,} (set: {pair.micro_batch_rows:,})"
    yield f"longest prepare.seq_len {pair.longest_seq_len:,} (set: {pair.seq_len:,})"
    yield _disk(pair.disk_bytes)
    if pair.advice is not None:
        yield pair.advice


def _disk(disk_bytes: dict[str, float]) -> str:
    return "disk: " + ", ".join(f"{name} {_gb(size)}" for name, size in disk_bytes.items())


def _fits(need: Need) -> str:
    return "?" if need.fits is None else "yes" if need.fits else "no"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _time(need: Need) -> str:
    if need.seconds is None:
        return ""
    minutes = need.seconds / 60
    return (
        f"{need.seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
    )


def _print(console: Console, label: str, lines: Iterator[str] | list[str]) -> None:
    for line in lines:
        console.print(Text(f"{label:<22} ", style="bold cyan") + Text(line), soft_wrap=True)
        label = ""
