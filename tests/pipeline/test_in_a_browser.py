"""What a person sees: MLflow's own pages, by the links of the last screen, in Chromium without a window."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from alambique.report import mlflow_metrics, summarise
from pipeline import report, tracking
from pipeline import rows as row_pages
from pipeline.rows import Row, compare_address
from tests.browser import CHROMIUM, Browser, browser
from tests.tiny_results import BENCHMARKS, write_results

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"),
    pytest.mark.slow,
    pytest.mark.timeout(600),  # a minute of patience costs nothing where it is not needed
]
FIGURES = {
    "eval/kl_nats": 0.45, "eval/agreement": 0.6, "eval/boolq_acc": 0.74, "eval/mmlu_acc": 0.25,
    "distill/peak_mib": 6400.0, "distill/tokens_per_s": 270.1,
    "teacher/peak_mib": 2100.5, "teacher/tokens_per_s": 812.4,
    "teacher/cache_bytes_per_token": 236.2, "student/bf16_gb": 0.226548864,
}  # fmt: skip
FACTORS = {"p": 1.0, "worse": 1.1, "better": 0.9}  # of p's figures; KL is the lower the better


@pytest.fixture
def rows(mlflow_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Row]:
    """Three pairs' rows in a store of their own, by pair."""
    monkeypatch.chdir(tmp_path)
    for name in ("DVC_ROOT", "DVC_EXP_NAME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    metrics = mlflow_metrics(summarise(write_results(tmp_path), "p", "t", BENCHMARKS))
    return {
        pair: tracking.record_pair(
            pair, pair[0] * 16, {}, {name: value * factor for name, value in metrics.items()}, {}, [],
            columns=report.columns(metrics),
        )
        for pair, factor in FACTORS.items()
    }  # fmt: skip


@pytest.fixture
def served(rows: dict[str, Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLflow's server, as `make ui` starts it, where the links lead to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(row_pages, "UI_ADDRESS", f"http://127.0.0.1:{port}")
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", tracking.tracking_uri()]
    with (tmp_path / "output").open("w") as output:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
            env={**os.environ, "DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true"},
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + 120
        while not answers(row_pages.UI_ADDRESS):
            assert server.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < end, (tmp_path / "output").read_text()
            time.sleep(0.2)
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # asked kindly, it waits for the browser's connections
        server.wait(30)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


# Of each row shown: its number, and its cells by column.
TABLE = """JSON.stringify([...document.querySelectorAll('[role=row][row-index]')].map(row =>
  [row.getAttribute('row-index'), Object.fromEntries([...row.querySelectorAll('[role=gridcell]')].map(cell =>
    [cell.getAttribute('col-id'), cell.innerText]))]))"""


def table(page: Browser) -> list[dict[str, str]]:
    """Rows from the top; the grid keeps pinned cells of a row apart from the others."""
    merged: dict[int, dict[str, str]] = {}
    for index, cells in json.loads(page.value(TABLE)):
        merged.setdefault(int(index), {}).update(cells)
    return [merged[index] for index in sorted(merged)]


# The comparison's rows exist only where its list is scrolled to; names and values are in two grids side by side.
CELLS = """JSON.stringify([...document.querySelectorAll('.ReactVirtualized__Grid')].flatMap((grid, side) =>
  [...grid.querySelectorAll('[style*="left"]')].map(cell =>
    [parseFloat(cell.style.top), side, parseFloat(cell.style.left), cell.innerText.trim()])))"""
SCROLL = """JSON.stringify([...document.querySelectorAll('.ReactVirtualized__Grid')].map(grid => {
  grid.scrollTop += 150; return grid.scrollTop; }))"""


def comparison(page: Browser) -> dict[str, list[float]]:
    """By metric, its value for each run from the left."""
    lines: dict[float, dict[tuple[int, float], str]] = {}
    before, now = None, ""
    while now != before:
        for top, side, left, text in json.loads(page.value(CELLS)):
            lines.setdefault(top, {})[side, left] = text
        before, now = now, str(page.value(SCROLL))
        time.sleep(0.3)
    rows = [[text for _, text in sorted(cells.items())] for cells in lines.values()]
    return {name: [float(value) for value in values] for name, *values in rows}


def test_the_table_and_the_comparison_show_memory_speed_and_accuracy(
    rows: dict[str, Row], served: None, tmp_path: Path
) -> None:
    link = rows["p"].table_address()
    assert link is not None
    with browser(tmp_path / "profile") as page:
        page.look(4000, 1400)  # the grid draws only the columns that fit
        page.open(link)
        page.text_with("better-bbbbbb", "p-pppppp", "worse-wwwwww", "student/bf16_gb", "812.4")
        shown = table(page)
        assert [row["attributes.`Run Name`"].split()[-1] for row in shown] == [
            "better-bbbbbb",
            "p-pppppp",
            "worse-wwwwww",
        ]
        for name, value in FIGURES.items():
            assert [float(row[f"metrics.`{name}`"]) for row in shown] == pytest.approx(
                [0.9 * value, value, 1.1 * value]
            ), name

        page.open(compare_address(list(rows.values())))
        page.text_with("Comparing 3 Runs", "eval/kl_nats")
        compared = comparison(page)
        for name, value in FIGURES.items():
            assert compared[name] == pytest.approx([value, 1.1 * value, 0.9 * value], rel=1e-2), (
                name
            )  # three decimals are shown
