"""A plan as a table, and what to know beside it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from alambique import screen
from alambique.planning.machine import ERROR, Need, gib

if TYPE_CHECKING:
    from alambique.plan import PairPlan, Plan, TeacherPlan

_LABELS = 23  # columns
_FITS = {True: "yes", False: "no", None: "?"}


def show(plan: "Plan", console: Console | None = None) -> None:
    """Print ``plan``; to stdout, if nowhere else."""
    console = console or screen.stdout()
    console.print(_table(plan))
    for key, teacher in plan.teachers.items():
        screen.tell(console, key, _of_teacher(teacher), _LABELS)
    for key, pair in plan.pairs.items():
        screen.tell(console, key, _of_pair(pair), _LABELS)
    screen.tell(console, "disk", [f"{_gb(plan.disk_bytes)} in all"], _LABELS)
    screen.tell(console, "speed", [plan.machine.assumed], _LABELS)


def _table(plan: "Plan") -> Table:
    machine = plan.machine
    title = f"{plan.source} on {machine.name} with {gib(machine.memory_mib)} GiB"
    caption = f"predicted; memory to about {ERROR:.0%}; nothing was run"
    table = screen.table(title, caption, "stage", ("peak, GiB", "fits", "PFLOP", "time"))
    for label, need, bold in _rows(plan):
        flops = "" if need.flops is None else f"{need.flops / 1e15:,.3g}"
        table.add_row(label, gib(need.peak_mib), _FITS[need.fits], flops, _time(need), style="bold" if bold else "")
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


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _time(need: Need) -> str:
    if need.seconds is None:
        return ""
    if need.seconds < 120:
        return f"{need.seconds:.0f} s"
    return f"{need.seconds / 60:.0f} min" if need.seconds < 7200 else f"{need.seconds / 3600:.1f} h"
