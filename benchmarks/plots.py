"""``python -m benchmarks.plots``: the plots of docs/loss.md and docs/ladder.md, from the rows recorded last."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks import ladder_page, records
from benchmarks.cases import LLAMA31_8B, SMOLLM2_135M

FOLDER = records.ROOT / "docs" / "plots"
_LABELS = {"dense": "dense (reference)", "dense_plain": "dense, as one writes it", "torch_lce": "torch linear CE"}


def main(folder: Path = FOLDER) -> int:
    """Write the SVG files; say which rows they are from."""
    folder.mkdir(parents=True, exist_ok=True)
    memory = newest(records.load("loss_memory"), ("contender", "tokens"))
    if memory:
        measured = any(row["peak_gib"] is not None for row in memory)
        key, how = ("peak_gib", "measured") if measured else ("counted_gib", "counted")
        points = [(row["contender"], row["tokens"], row[key]) for row in memory if row[key] is not None]
        title = f"Peak memory of the loss with its inputs, {how}\nD 4096, V 128,256, K 100, bfloat16"
        draw(points, "GiB", title, folder / "loss_memory.svg")
    speed = newest(records.load("loss_speed"), ("contender", "shape", "dtype"))
    for_plot: list[dict[str, Any]] = []
    for head in (LLAMA31_8B, SMOLLM2_135M):  # a GPU's rows if there are any, else a CPU's
        for_plot = for_plot or [row for row in speed if row["shape"].endswith(f"x{head[0]}x{head[1]}")]
    if for_plot:
        points = [
            (f"{row['contender']}, {row['dtype']}", int(row["shape"].split("x")[0]), row["median_s"])
            for row in for_plot
        ]
        device = for_plot[-1]["device"]
        tail = for_plot[-1]["shape"].split("x", 1)[1].replace("x", ", V ")
        draw(points, "seconds", f"Time of one step of the loss, {device}\nD {tail}, K 100", folder / "loss_time.svg")
    ladder = newest(records.load("ladder"), ("rung", "seed"))
    if ladder:
        save(ladder_page.draw(ladder), folder / "ladder.svg")
    print(f"{len(memory)} rows of memory, {len(for_plot)} of time, {len(ladder)} of the ladder; plots in {folder}")
    return 0


def newest(rows: Sequence[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The last row of each combination of ``keys``, in order of first appearance."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        found[tuple(row[key] for key in keys)] = row
    return list(found.values())


def draw(points: Sequence[tuple[str, int, float]], unit: str, title: str, path: Path) -> None:
    """One line per name over the number of tokens, both axes logarithmic."""
    figure = Figure(figsize=(7.5, 4.8))
    axes = figure.subplots()
    names = list(dict.fromkeys(name for name, _, _ in points))
    for index, name in enumerate(names):
        line = sorted((tokens, value) for found, tokens, value in points if found == name)
        axes.plot(
            *zip(*line, strict=True),
            marker="o",
            markersize=3,
            linestyle="-" if index % 2 == 0 else "--",
            label=_LABELS.get(name, name),
        )
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit, title=title)
    ticks = sorted({tokens for _, tokens, _ in points})
    axes.set_xticks(ticks, [f"{tokens // 1024}K" if tokens >= 1024 else str(tokens) for tokens in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """As SVG: the same rows give the same file."""
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "alambique"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
