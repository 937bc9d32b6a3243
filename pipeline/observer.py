"""What is told about a job while it runs: log lines and artifacts to Prefect, curves to MLflow.

Only `pipeline.flow` uses this, inside a task run. A failure to tell is said once and ends the telling, never the job.
"""

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from pipeline import processes, tracking
from pipeline.jobs import Job, Outcome, Status

_LOOK_SECONDS = 10.0  # source: MLflow's for the machine's load; a look costs about 50 ms of a core
_CURVE_STAGES = ("teacher", "distill")  # evaluations have no curve, and importing MLflow takes two seconds
_CURVE_AFTER_SECONDS = 10.0  # assumption: a shorter job has no curve worth waiting for
_FINISH_SECONDS = 20.0  # assumption: a store that takes longer is out of order
_MLFLOW_STATUS = {Status.OK: "FINISHED", Status.RESUMABLE: "KILLED", Status.RETRYABLE: "KILLED"}


class Observer:
    """Tells Prefect and MLflow how a job goes; call :meth:`look` often, it acts every few seconds."""

    def __init__(self, job: Job, logger: logging.Logger) -> None:
        self._job, self._logger = job, logger
        self._next_look = time.monotonic() + _LOOK_SECONDS
        self._artifact: UUID | None = None
        # Importing MLflow takes two seconds of a core, which a job that is starting leaves free.
        self._curves = Curves(job.stage, job.key) if job.stage in _CURVE_STAGES else None
        self._points: list[dict[str, Any]] = []  # not yet given to the curves
        self._began = time.monotonic()
        self._muted: set[str] = set()

    def __enter__(self) -> "Observer":
        if self._curves is not None:
            self._curves.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_curves("KILLED")  # does nothing after finish()

    def look(self) -> None:
        """Pass on what is new, if it is time."""
        if time.monotonic() >= self._next_look:
            self._tell()
            self._next_look = time.monotonic() + _LOOK_SECONDS

    def finish(self, outcome: Outcome) -> None:
        """Pass on the rest and the results."""
        self._tell()
        log = self._logger.info if outcome.status is Status.OK else self._logger.error
        log("%s %s", self._job.label, outcome.reason)
        if outcome.status is Status.OK:
            self._prefect(self._results_table)
        self._end_curves(_MLFLOW_STATUS.get(outcome.status, "FAILED"))

    def _tell(self) -> None:
        if lines := self._job.new_lines():
            self._logger.info("\n".join(lines))
        if points := self._job.new_progress():
            self._prefect(lambda: self._progress(points[-1]))
            self._points += points
        self._feed_curves()

    def _feed_curves(self) -> None:
        if self._curves is None or time.monotonic() - self._began < _CURVE_AFTER_SECONDS:
            return
        if self._points:
            self._curves.add(self._points)
            self._points = []
        self._mute("MLflow", self._curves.error)

    def _end_curves(self, status: str) -> None:
        if self._curves is not None:
            self._curves.finish(status)
            self._mute("MLflow", self._curves.error)
            self._curves = None

    def _prefect(self, tell: Any) -> None:
        import httpx
        from prefect.exceptions import PrefectException

        if "Prefect" in self._muted:
            return
        try:
            tell()
        except (PrefectException, httpx.HTTPError, OSError, ValueError) as error:
            self._mute("Prefect", error)

    def _mute(self, who: str, error: BaseException | None) -> None:
        if error is None or who in self._muted:
            return
        self._muted.add(who)
        first_line = next(iter(str(error).splitlines()), "")
        print(
            f"\n{who} can't follow {self._job.label} ({type(error).__name__}: {first_line}); the job is not affected.",
            file=sys.stderr,
            flush=True,
        )

    def _progress(self, point: Mapping[str, Any]) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        percent = min(100.0, 100.0 * float(point["done"]) / max(1.0, float(point["total"])))
        text = f"{self._job.label}: {point['description']}, {point['done']:,} of {point['total']:,} {point['unit']}"
        if self._artifact is None:
            artifact = create_progress_artifact(percent, key=self._artifact_key("progress"), description=text)
            self._artifact = artifact if isinstance(artifact, UUID) else None
        else:
            update_progress_artifact(self._artifact, percent, description=text)

    def _artifact_key(self, what: str) -> str:
        words = "-".join([what, self._job.stage, *self._job.key])
        return words.replace("_", "-").replace("/", "-of-").lower()

    def _results_table(self) -> None:
        from prefect.artifacts import create_table_artifact

        results = Path("results", self._job.stage, *self._job.key).with_suffix(".json")
        if results.is_file() and results.stat().st_mtime >= self._job.started_at:
            rows = [{"name": name, "value": value} for name, value in flatten(json.loads(results.read_bytes()))]
            create_table_artifact(rows, key=self._artifact_key("results"), description=f"{self._job.label}: {results}")


class Curves(threading.Thread):
    """Sends progress records to MLflow from a thread of its own: a slow or dead store can't hold up the job's watch."""

    def __init__(self, stage: str, key: Sequence[str]) -> None:
        super().__init__(name="curves to MLflow", daemon=True)
        self._stage, self._key = stage, key
        self._points: queue.SimpleQueue[list[dict[str, Any]] | str] = queue.SimpleQueue()
        self._used = False
        self.error: Exception | None = None

    def add(self, points: list[dict[str, Any]]) -> None:
        """Log these records soon."""
        self._used = True
        self._points.put(points)

    def finish(self, status: str) -> None:
        """Log what is left and end the run as ``status``, if there was anything to log; gives up after 20 seconds."""
        self._points.put(status)
        if self._used:
            self.join(_FINISH_SECONDS)

    def run(self) -> None:
        """Make the run once there is something to log, until :meth:`finish`; keep the first failure in ``error``."""
        processes.step_back()
        tracking.load()
        failures = tracking.failures()
        if isinstance(item := self._points.get(), str):
            return
        try:
            live = tracking.LiveRun(self._stage, self._key)
            while not isinstance(item, str):
                live.log(item)
                item = self._points.get()
            live.finish(item)
        except failures as error:
            self.error = error


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings by dotted name; a list is one leaf, as JSON."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value) if isinstance(value, list) else value
