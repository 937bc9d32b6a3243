"""Rows of MLflow's experiment *pairs*: the addresses of their pages, and a note of each, to do without MLflow.

Importing MLflow and opening its store takes two seconds, half of a `make repro` that has nothing to do.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from alambique.core.files import write_json
from alambique.core.places import work_dir

UI_ADDRESS = "http://127.0.0.1:5000"  # where `make ui` serves
# A view that MLflow's pages open by its key: what "Share view" stores (read from the page's source, 3.17.2).
VIEW = "figures"
_TRAINING = "workflowType=machine_learning"  # else a page opens for generative AI


@dataclass(frozen=True)
class Row:
    """One run of an experiment in the store at ``store``; ``view``: whether the experiment has a view of its table."""

    store: str
    experiment_id: str
    run_id: str
    view: bool

    def address(self) -> str:
        """Of the run's page while `make ui` runs."""
        return f"{UI_ADDRESS}/#/experiments/{self.experiment_id}/runs/{self.run_id}?{_TRAINING}"

    def table_address(self) -> str | None:
        """Of the experiment's table with its view while `make ui` runs; None without a view."""
        page = f"{UI_ADDRESS}/#/experiments/{self.experiment_id}/runs?{_TRAINING}&viewStateShareKey={VIEW}"
        return page if self.view else None


def compare_address(rows: Sequence[Row]) -> str:
    """Of the page that compares rows of one experiment while `make ui` runs."""
    lists = [row.run_id for row in rows], [rows[0].experiment_id]
    runs, experiments = (quote(json.dumps(ids, separators=(",", ":"))) for ids in lists)
    return f"{UI_ADDRESS}/#/compare-runs?runs={runs}&experiments={experiments}"


def remember(pair: str, fingerprint: str, row: Row) -> None:
    """Note where a row is."""
    write_json(_note(pair, fingerprint), asdict(row))


def recall(pair: str, fingerprint: str, store: str) -> Row | None:
    """The row as it was noted; None if it wasn't, or in another store. It may have been deleted since."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        row = Row(**json.loads(_note(pair, fingerprint).read_bytes()))
        return row if row.store == store else None
    return None


def _note(pair: str, fingerprint: str) -> Path:
    return work_dir() / "rows" / f"{pair}-{fingerprint}.json"
