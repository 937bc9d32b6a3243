"""The seam to MLflow: experiment *pairs* (one row per pair and chain) and experiment *jobs* (live curves).

MLflow is imported when first used (two seconds). The store is ``mlflow.db`` in the main checkout, or
``MLFLOW_TRACKING_URI``. Names in MLflow can't hold an @, and params can be written once only.
"""

import contextlib
import fcntl
import importlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from alambique.core.errors import UserError
from alambique.core.files import sha256_json
from alambique.core.params import Params
from alambique.core.places import main_checkout
from pipeline.rows import VIEW, Row, recall, remember

PAIRS, JOBS = "pairs", "jobs"
FINGERPRINT_TAG = "fingerprint"
_VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
_PARAM_CHARACTERS = 6000  # mlflow.utils.validation.MAX_PARAM_VAL_LENGTH
_TAG_CHARACTERS = 8000  # mlflow.utils.validation.MAX_TAG_VAL_LENGTH
_BATCH = 100  # mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH
_DIGEST_CHARACTERS = 36  # of a dataset; an MD5 by DVC with ".dir" just fits


@dataclass(frozen=True)
class Dataset:
    """What a pair was trained or measured on: ``digest`` is its DVC hash, ``context`` such as "distill"."""

    name: str
    digest: str
    source: str
    context: str


def tracking_uri() -> str:
    """The store's address: ``MLFLOW_TRACKING_URI``, or sqlite in the main checkout by its absolute path."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{main_checkout().resolve() / 'mlflow.db'}"


def _database() -> Path | None:
    """The file of a store in sqlite; None for any other."""
    scheme, _, path = tracking_uri().partition(":///")
    return Path(path.partition("?")[0]).resolve() if scheme == "sqlite" else None


def _home() -> Path:
    """Where the store keeps its lock and artifacts: beside its database, or in the main checkout."""
    database = _database()
    return main_checkout().resolve() if database is None else database.parent


def set_defaults() -> None:
    """Set MLflow's environment where the user hasn't; do it before MLflow is imported."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # else it tells of each table it makes


def load() -> None:
    """Import of MLflow what this store will need: two seconds of a core, best spent where nobody waits for them."""
    set_defaults()
    importlib.import_module("mlflow" if _database() is None else "mlflow.store.tracking.sqlalchemy_store")


def failures() -> tuple[type[Exception], ...]:
    """What a store that can't be used raises."""
    set_defaults()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, SQLAlchemyError, OSError)


@contextlib.contextmanager
def _store() -> Iterator[Any]:
    """A client, and the store for this process alone while the block lasts.

    A client's first act is to make or check the tables: four that meet on a new database break each other's migrations.
    The lock is beside the database, which checkouts may share.
    """
    set_defaults()
    from mlflow import MlflowClient

    with (_home() / ".mlflow.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # closing the file frees it
        yield MlflowClient(tracking_uri=tracking_uri())


def _experiment_id(client: Any, name: str) -> str:
    """Find or make an experiment."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    # Without a location MLflow would take ./mlruns of whatever folder the first writer ran in.
    location = None
    if _database() is not None:
        location = (_home() / "mlruns" / name).as_uri()
    return str(client.create_experiment(name, artifact_location=location))


def _name(text: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", text)


def chain_fingerprint(pair: str, lock_path: Path = Path("dvc.lock")) -> str:
    """Name everything that decides ``pair``'s results: 16 hex digits.

    Hashes the dependencies and params that dvc.lock records for each stage of the pair's chain, evaluations included.
    DVC writes dvc.lock after every stage, so `report` finds the whole chain there.

    Raises:
        UserError: the chain isn't in dvc.lock yet.
    """
    chain = {
        name: {
            "deps": {dep["path"]: dep.get("md5") or dep.get("hash") for dep in entry.get("deps", [])},
            "params": entry.get("params", {}),
        }
        for name, entry in _chain(pair, lock_path).items()
    }
    return sha256_json({"pair": pair, "chain": chain})[:16]


def dvc_hashes(pair: str, lock_path: Path = Path("dvc.lock")) -> dict[str, str]:
    """DVC's hash of every output of the pair's chain, by path."""
    return {out["path"]: str(out.get("md5", "")) for entry in _chain(pair, lock_path).values() for out in entry["outs"]}


def _chain(pair: str, lock_path: Path) -> dict[str, dict[str, Any]]:
    """Entries of dvc.lock for the stages that `report` of ``pair`` rests on, by name."""
    params = Params.load()
    teacher = str(params.get(f"pairs.{pair}.teacher"))
    benchmarks = params.get("evaluate.benchmarks")
    if not lock_path.is_file():
        raise UserError(f"{lock_path} does not exist: run `make repro`, so that DVC records the stages.")
    stages: dict[str, dict[str, Any]] = YAML(typ="safe").load(lock_path.read_text()).get("stages", {})
    wanted = [f"prepare@{teacher}", f"teacher@{teacher}", f"student@{pair}", f"distill@{pair}"]
    missing = [name for name in wanted if name not in stages]
    if missing:
        raise UserError(f"{lock_path} has no {missing[0]}: run `dvc repro report@{pair}`, not the stage alone.")
    # dvc.lock keeps what was removed from params.yaml, so evaluations are chosen by the files that they make now.
    results = {f"results/evaluate/heldout/{pair}.json"}
    for benchmark in benchmarks:
        results.add(f"results/evaluate/teacher/{teacher}/{benchmark}.json")
        results |= {f"results/evaluate/{kind}/{pair}/{benchmark}.json" for kind in ("student", "distill")}
    wanted += [name for name, entry in stages.items() if any(o["path"] in results for o in entry.get("outs", []))]
    return {name: stages[name] for name in sorted(wanted)}


def git_state() -> dict[str, str]:
    """Tags ``git_commit`` and ``git_dirty``; empty outside a Git checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], capture_output=True, text=True, check=True)
        except (subprocess.CalledProcessError, FileNotFoundError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {}
    # dvc.lock changes with every run and says nothing about the code.
    dirty = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!dvc.lock")
    return {"git_commit": commit, "git_dirty": str(bool(dirty)).lower()}


def record_pair(
    pair: str,
    fingerprint: str,
    params: Mapping[str, Any],
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    artifacts: Sequence[Path],
    datasets: Iterable[Dataset] = (),
    columns: Sequence[str] = (),
) -> Row:
    """Write the one row of (``pair``, ``fingerprint``) in experiment *pairs*, or update it, and note where it is.

    ``params`` is flat, by dotted name; ``metrics`` are named ``teacher/…``, ``distill/…``, ``eval/…``. Tags for the
    pair, the fingerprint, Git and a DVC experiment are added here. A row left incomplete by a kill is completed.
    ``columns`` names the metrics that the experiment's table shows, sorted by the first, least on top.
    """
    all_tags = {"pair": pair, **git_state(), **tags}
    if experiment := os.environ.get("DVC_EXP_NAME"):
        all_tags["dvc_exp"] = experiment
    with _store() as client:
        experiment_id = _experiment_id(client, PAIRS)
        found = _stored(client, experiment_id, pair, fingerprint)
        # Both tags come with the row itself: a kill can't leave a row that the next search would miss.
        identity = {FINGERPRINT_TAG: fingerprint, "pair": pair}
        run = found or client.create_run(experiment_id, run_name=f"{pair}-{fingerprint[:6]}", tags=identity)
        _write(client, run, params, metrics, all_tags)
        if not run.inputs.dataset_inputs:
            client.log_inputs(run.info.run_id, [_dataset_input(dataset) for dataset in datasets])
        for path in artifacts:
            client.log_artifact(run.info.run_id, str(path))
        client.set_terminated(run.info.run_id)
        if columns:
            client.set_experiment_tag(experiment_id, _VIEW_TAG, _view(columns))
        row = _row(client.get_experiment(experiment_id), run)
    remember(pair, fingerprint, row)
    return row


def _stored(client: Any, experiment_id: str, pair: str, fingerprint: str) -> Any:
    """The run of (``pair``, ``fingerprint``), or None."""
    query = f"tags.{FINGERPRINT_TAG} = '{fingerprint}' and tags.pair = '{pair}'"
    return next(iter(client.search_runs([experiment_id], query, max_results=1)), None)


def _row(experiment: Any, run: Any) -> Row:
    view = _VIEW_TAG in experiment.tags
    return Row(tracking_uri(), str(experiment.experiment_id), str(run.info.run_id), view)


def _write(
    client: Any, run: Any, params: Mapping[str, Any], metrics: Mapping[str, float], tags: Mapping[str, str]
) -> None:
    """Write what ``run`` doesn't hold yet, or holds with another value."""
    from mlflow.entities import Metric, Param, RunTag

    now_ms = int(time.time() * 1000)
    had = run.data
    new_metrics = [
        Metric(_name(key), float(value), now_ms, 0)
        for key, value in metrics.items()
        if had.metrics.get(_name(key)) != float(value)
    ]
    new_params = [
        Param(_name(key), _text(value)[:_PARAM_CHARACTERS])
        for key, value in params.items()
        if _name(key) not in had.params
    ]
    new_tags = [RunTag(_name(key), str(value)[:_TAG_CHARACTERS]) for key, value in tags.items()]
    client.log_batch(run.info.run_id, metrics=new_metrics, params=new_params[:_BATCH], tags=new_tags[:_BATCH])
    for start in range(_BATCH, max(len(new_params), len(new_tags)), _BATCH):
        part = slice(start, start + _BATCH)
        client.log_batch(run.info.run_id, params=new_params[part], tags=new_tags[part])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _dataset_input(dataset: Dataset) -> Any:
    from mlflow.entities import Dataset as Entity
    from mlflow.entities import DatasetInput, InputTag

    digest = dataset.digest[:_DIGEST_CHARACTERS]
    entity = Entity(name=dataset.name, digest=digest, source_type="local", source=dataset.source)
    return DatasetInput(entity, [InputTag("mlflow.data.context", dataset.context)])


def register_student(pair: str, run_id: str, tags: Mapping[str, str]) -> str | None:
    """Make the student of row ``run_id`` a version of the registered model ``pair``, once; return the version's number.

    The version points at the student's folder and carries ``tags``; no weights are copied. None with a tracking server:
    it takes only sources among the run's own artifacts, where gigabytes of weights don't belong.
    """
    if _database() is None:
        return None
    folder = main_checkout().resolve() / "artifacts" / "distill" / pair
    with _store() as client:
        if not client.search_registered_models(f"name = '{pair}'"):
            client.create_registered_model(pair, description=f"Students of pair {pair}, one version per row.")
        known = client.search_model_versions(f"name = '{pair}' and run_id = '{run_id}'")
        version = (
            known[0]
            if known
            else client.create_model_version(
                pair,
                folder.as_uri(),
                run_id,
                tags={_name(key): value for key, value in {**tags, **git_state()}.items()},
                description="In its folder while that has this dvc_md5; else check out git_commit, `make repro`: "
                "DVC restores it from its cache.",
            )
        )
    return str(version.version)


def find_pair(pair: str, fingerprint: str) -> Row | None:
    """The row of (``pair``, ``fingerprint``), as noted or as stored; None without one or a usable store."""
    if (database := _database()) is not None and not database.is_file():
        return None  # asking would make an empty one
    if (noted := recall(pair, fingerprint, tracking_uri())) is not None:
        return noted
    with contextlib.suppress(*failures()), _store() as client:
        experiment = client.get_experiment_by_name(PAIRS)
        if experiment and (found := _stored(client, experiment.experiment_id, pair, fingerprint)):
            row = _row(experiment, found)
            remember(pair, fingerprint, row)
            return row
    return None


def _view(columns: Sequence[str]) -> str:
    keys = [f"metrics.`{_name(name)}`" for name in columns]
    widths = {key: 30 + 7 * len(name) for key, name in zip(keys, columns, strict=True)}  # pixels: names in full
    state = {"selectedColumns": keys, "columnOrder": keys, "columnWidths": widths}
    return json.dumps({**state, "orderByKey": keys[0], "orderByAsc": True})


class LiveRun:
    """One run in experiment *jobs* while a job runs: its curves, and the machine's load every ten seconds."""

    def __init__(self, stage: str, key: Sequence[str]) -> None:
        tags = {"stage": stage, "key": " ".join(key), **git_state()}
        with _store() as self._client:
            experiment_id = _experiment_id(self._client, JOBS)
            run = self._client.create_run(experiment_id, run_name="-".join([stage, *key]), tags=tags)
        self.run_id = str(run.info.run_id)
        self._monitor = self._start_monitor()

    def _start_monitor(self) -> Any:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(self.run_id, tracking_uri=tracking_uri())
        monitor.start()
        return monitor

    def log(self, points: Iterable[Mapping[str, Any]]) -> None:
        """Log the numbers of progress records (``alambique.core.progress``), each at its count of work done."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(_name(name), float(value), now_ms, int(point["done"]))
            for point in points
            for name, value in point.items()
            if name not in ("description", "done", "total", "unit") and isinstance(value, int | float)
        ]
        for start in range(0, len(metrics), 1000):  # MAX_METRICS_PER_BATCH
            self._client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def finish(self, status: str) -> None:
        """End the run: ``FINISHED``, ``FAILED`` or ``KILLED``."""
        self._monitor.finish()
        self._client.set_terminated(self.run_id, status=status)
