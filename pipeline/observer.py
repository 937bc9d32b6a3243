"""What is told about a job while it runs: log lines and artifacts to Prefect, curves to MLflow.

Only `pipeline.flow` uses this, inside a task run. A failure to tell is said once and ends the telling, never the job.
"""

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from pipeline.jobs import Job, Outcome, Status

_LOOK_SECONDS = 3.0  # assumption: fresh enough to watch, rare enough to cost nothing
_CURVE_STAGES = ("teacher", "distill")  # evaluations have no curve, and importing MLflow takes two seconds
_MLFLOW_STATUS = {Status.OK: "FINISHED", Status.RESUMABLE: "KILLED", Status.RETRYABLE: "KILLED"}


class Observer:
    """Tells Prefect and MLflow how a job goes; call :meth:`look` often, it acts every few seconds."""

    def __init__(self, job: Job, logger: logging.Logger) -> None:
        self._job, self._logger = job, logger
        self._next_look = time.monotonic() + _LOOK_SECONDS
        self._artifact: UUID | None = None
        self._live: Any = None
        self._muted: set[str] = set()

    def __enter__(self) -> "Observer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_live("KILLED")  # does nothing after finish()

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
        self._end_live(_MLFLOW_STATUS.get(outcome.status, "FAILED"))

    def _tell(self) -> None:
        if lines := self._job.new_lines():
            self._logger.info("\n".join(lines))
        if points := self._job.new_progress():
            self._prefect(lambda: self._progress(points[-1]))
            self._curves(points)

    def _prefect(self, tell: Any) -> None:
        import httpx
        from prefect.exceptions import PrefectException

        if "Prefect" in self._muted:
            return
        try:
            tell()
        except (PrefectException, httpx.HTTPError, OSError, ValueError) as error:
            self._mute("Prefect", error)

    def _mute(self, who: str, error: BaseException) -> None:
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
        return "-".join([what, self._job.stage, *self._job.key]).replace("_", "-").lower()

    def _results_table(self) -> None:
        from prefect.artifacts import create_table_artifact

        results = Path("results", self._job.stage, *self._job.key).with_suffix(".json")
        if results.is_file() and results.stat().st_mtime >= self._job.started_at:
            rows = [{"name": name, "value": value} for name, value in flatten(json.loads(results.read_bytes()))]
            create_table_artifact(rows, key=self._artifact_key("results"), description=f"{self._job.label}: {results}")

    def _curves(self, points: list[dict[str, Any]]) -> None:
        if self._job.stage not in _CURVE_STAGES or "MLflow" in self._muted:
            return
        try:
            from mlflow.exceptions import MlflowException
            from sqlalchemy.exc import SQLAlchemyError

            from pipeline.tracking import LiveRun
        except ImportError as error:
            self._mute("MLflow", error)
            return
        try:
            if self._live is None:
                self._live = LiveRun(self._job.stage, self._job.key)
            self._live.log(points)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            self._mute("MLflow", error)

    def _end_live(self, status: str) -> None:
        if self._live is None:
            return
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        live, self._live = self._live, None
        try:
            live.finish(status)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            if "MLflow" not in self._muted:
                self._mute("MLflow", error)


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings by dotted name; a list is one leaf, as JSON."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value) if isinstance(value, list) else value
