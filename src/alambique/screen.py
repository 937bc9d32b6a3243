"""How this project's tables and lines look on a terminal."""

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 100  # columns, where stdout isn't a terminal


def stdout() -> Console:
    """Where a screen is printed."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def table(title: str, caption: str, names: str, figures: Sequence[str]) -> Table:
    """An empty table: a column of names, and columns of figures."""
    made = Table(title=title, caption=caption, title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    made.title_justify = made.caption_justify = "left"
    made.add_column(names)
    for heading in figures:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def tell(console: Console, label: str, lines: Iterable[str], width: int) -> None:
    """A label and lines beside it, never wrapped or shortened: they are there to be copied."""
    for line in lines:
        console.print(Text(f"{label:<{width}}", style="bold cyan") + Text(line), soft_wrap=True)
        label = ""
