"""The last screen of `make repro`: what came out, where it lies, what to try next. `python -m pipeline.last_screen`."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alambique import screen
from alambique.core.params import Params
from alambique.pages import write_index
from alambique.report import cost_rows, quality_rows
from pipeline import tracking
from pipeline.rows import Row, compare_address

_COMPARED = 8  # assumption: more columns than this nobody compares; the table lets one choose


def show(results: Path = Path("results"), console: Console | None = None) -> None:
    """Print one table per pair whose report exists, and what to do with it; write the page over all pairs."""
    console = console or screen.stdout()
    params = Params.load()
    pairs = params.keys("pairs")
    reports = [path for pair in pairs if (path := results / "report" / f"{pair}.json").is_file()]
    rows = [_show_pair(console, json.loads(path.read_text()), path.with_suffix(".html")) for path in reports]
    if reports:
        _print(console, "all pairs", [str(write_index(results / "report"))])
        _print(console, "MLflow", _links([row for row in rows if row is not None]))
        _print(console, "try next", _ideas(pairs, params))
    else:
        console.print("No pair has a report yet: `make repro` without T= makes them all.")


def _show_pair(console: Console, summary: dict[str, Any], page: Path) -> Row | None:
    """Print one pair; its row in MLflow, if there is one."""
    console.print()
    console.print(_table(summary))
    model = f"artifacts/distill/{summary['pair']}"
    lines = [
        ("model", [model]),
        ("load it", [f'transformers.AutoModelForCausalLM.from_pretrained("{model}")']),
        ("report", [str(page)]),
    ]
    for label, text in lines:
        _print(console, label, text)
    return tracking.find_pair(summary["pair"], summary["fingerprint"])


def _links(rows: list[Row]) -> Iterator[str]:
    """Pages of MLflow: the table of pairs, one row, or some compared."""
    if not rows:
        return
    yield "`make ui`, then"
    if (table := rows[0].table_address()) is not None:
        yield table
    if len(rows) == 1:
        yield rows[0].address()
    elif len(rows) <= _COMPARED:
        yield compare_address(rows)


def _table(summary: dict[str, Any]) -> Table:
    """Quality above, cost below: teacher, student before, student after."""
    shares = summary["gap_recovered"]
    kl = f"KL to the teacher {-shares['kl_nats']:+.0%}, " if "kl_nats" in shares else ""
    change = summary["agreement"]["after"] - summary["agreement"]["before"]
    student = summary["student"]
    title = f"{summary['pair']}: {kl}agreement {change:+.3f}"
    caption = "± one standard error; differences below two of them say nothing"
    table = screen.table(title, caption, "", ("teacher", "student before", "student after"))
    for label, *cells in quality_rows(summary):
        table.add_row(label, *cells[:-1], Text(cells[-1], style="bold"))
    table.add_section()
    sizes = [f"{student[name]:,}" for name in ("teacher_parameters", "num_parameters", "num_parameters")]
    table.add_row("parameters", *sizes)
    for label, captured, trained in cost_rows(summary):
        table.add_row(label, captured, "", trained)
    return table


def _ideas(pairs: list[str], params: Params) -> list[str]:
    rows = int(params.get("prepare").get("train_rows") or 0)  # null takes everything
    ideas = [
        f"more text: prepare.train_rows: {rows} -> {4 * rows} in params.yaml, then `make repro`",
        f"a smaller student: copy pairs.{pairs[0]} to a new name, drop more layers, `make repro`",
        "a real pair, one GPU: cp presets/llama31_8b_pruned_3b.yaml params.yaml && make repro",
    ]
    return ideas[0 if rows else 1 :]


def _print(console: Console, label: str, lines: Iterable[str]) -> None:
    screen.tell(console, label, lines, width=10)


if __name__ == "__main__":
    show()
