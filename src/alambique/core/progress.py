"""Progress that a person reads (a bar) and a parent process reads (JSON lines)."""

import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

# The orchestration names a file here; each line is one JSON object with "done", "total", "unit" and any metrics.
PROGRESS_FILE = "ALAMBIQUE_PROGRESS_FILE"
_REPORT_SECONDS = 2.0  # assumption: often enough for a dashboard, too rare to cost anything


class Progress:
    """A bar on stderr with rate and ETA, mirrored as JSON lines to the file named by ``ALAMBIQUE_PROGRESS_FILE``.

    ``done`` counts what an earlier, interrupted run had finished: the bar starts there and the rate leaves it out.
    ``line`` is how many lines below the cursor it is drawn on a terminal, beside the bars of other processes.
    """

    def __init__(self, description: str, total: int, unit: str = "tokens", done: int = 0, line: int = 0) -> None:
        self._total, self._done, self._unit, self._description = total, done, unit, description
        name = os.environ.get(PROGRESS_FILE)
        self._file = Path(name).open("a") if name else None  # noqa: SIM115 closed in __exit__
        self._last = 0.0
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=description,
            unit=f" {unit}",
            unit_scale=True,
            dynamic_ncols=True,
            smoothing=0.1,
            position=line if sys.stderr.isatty() else 0,
            leave=None,  # but for the first line, which stays
            # Without a terminal (a log file) a line now and then is enough.
            mininterval=0.5 if sys.stderr.isatty() else 15.0,
        )

    def __enter__(self) -> "Progress":
        return self

    def update(self, amount: int, **metrics: float) -> None:
        """Count ``amount`` more units as done; ``metrics`` (with units in their names) are shown beside the bar."""
        self._done += amount
        if metrics:
            self._bar.set_postfix({k: f"{v:.4g}" for k, v in metrics.items()}, refresh=False)
        self._bar.update(amount)
        now = time.monotonic()
        if metrics or now - self._last >= _REPORT_SECONDS:
            self._report(metrics)
            self._last = now

    def _report(self, metrics: dict[str, float]) -> None:
        if self._file is None:
            return
        line: dict[str, Any] = {
            "description": self._description, "done": self._done, "total": self._total, "unit": self._unit, **metrics
        }  # fmt: skip
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._report({})
        self._bar.close()
        if self._file is not None:
            self._file.close()
