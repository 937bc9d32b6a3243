import contextlib
import dataclasses
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from alambique.core.errors import UserError
from alambique.core.places import work_dir
from pipeline import tracking
from pipeline.rows import Row, compare_address, recall
from pipeline.tracking import Dataset, chain_fingerprint, dvc_hashes, record_pair
from tests.pipeline.conftest import wait_for

ROOT = Path(__file__).parents[2]
PARAMS = {"pairs": {"p": {"teacher": "t"}, "other": {"teacher": "t"}}, "evaluate": {"benchmarks": {"boolq": {}}}}


def entry(out: str, dep: str = "d") -> dict[str, Any]:
    return {
        "cmd": "x",
        "deps": [{"path": "code", "hash": "md5", "md5": dep}],
        "outs": [{"path": out, "md5": f"md5-{out}"}],
    }


def chain() -> dict[str, Any]:
    """dvc.lock's stages of pair p, with another pair's and a benchmark that params.yaml has dropped."""
    return {
        "prepare@t": entry("artifacts/prepare/t"),
        "teacher@t": entry("artifacts/teacher/t"),
        "student@p": entry("artifacts/student/p"),
        "distill@p": entry("artifacts/distill/p"),
        "evaluate_teacher@t-boolq": entry("results/evaluate/teacher/t/boolq.json"),
        "evaluate@distill-p-boolq": entry("results/evaluate/distill/p/boolq.json"),
        "evaluate@distill-p-dropped": entry("results/evaluate/distill/p/dropped.json"),
        "evaluate_heldout@p": entry("results/evaluate/heldout/p.json"),
        "distill@other": entry("artifacts/distill/other"),
        "report@p": entry("results/report/p"),
    }


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("DVC_ROOT", "DVC_EXP_NAME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    YAML().dump(PARAMS, tmp_path / "params.yaml")
    write_lock(chain())
    return tmp_path


def write_lock(stages: dict[str, Any]) -> None:
    YAML().dump({"schema": "2.0", "stages": stages}, Path("dvc.lock"))


def test_fingerprint_names_what_decides_the_results() -> None:
    first = chain_fingerprint("p")
    assert re.fullmatch("[0-9a-f]{16}", first)
    changes = {
        "evaluate@distill-p-boolq": True,
        "distill@p": True,
        "evaluate@distill-p-dropped": False,  # dvc.lock keeps what nobody asks for any more
        "distill@other": False,
        "report@p": False,
    }
    for name, matters in changes.items():
        stages = chain()
        stages[name]["deps"][0]["md5"] = "changed"
        write_lock(stages)
        assert (chain_fingerprint("p") != first) == matters, name
    stages = chain()
    stages["distill@p"]["params"] = {"params.yaml": {"distill.learning_rate": 0.1}}
    write_lock(stages)
    assert chain_fingerprint("p") != first


def test_hashes_are_those_of_the_chain() -> None:
    hashes = dvc_hashes("p")
    assert hashes["artifacts/distill/p"] == "md5-artifacts/distill/p"
    assert len(hashes) == 7


def test_a_chain_that_has_not_run_is_one_sentence() -> None:
    stages = chain()
    del stages["distill@p"]
    write_lock(stages)
    with pytest.raises(UserError) as refused:
        chain_fingerprint("p")
    assert str(refused.value) == "dvc.lock has no distill@p: run `dvc repro report@p`, not the stage alone."
    Path("dvc.lock").unlink()
    with pytest.raises(UserError, match=r"dvc\.lock does not exist: run `make repro`"):
        chain_fingerprint("p")


def test_git_state_of_a_checkout(checkout: Path) -> None:
    assert tracking.git_state() == {}
    for words in (["init", "-q"], ["add", "params.yaml", "dvc.lock"], ["commit", "-qm", "start"]):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *identity, *words], check=True)
    state = tracking.git_state()
    assert re.fullmatch("[0-9a-f]{40}", state["git_commit"])
    assert state["git_dirty"] == "false"
    Path("dvc.lock").write_text("")  # every run changes it
    assert tracking.git_state()["git_dirty"] == "false"
    Path("params.yaml").write_text("")
    assert tracking.git_state()["git_dirty"] == "true"


def store() -> Any:
    tracking.set_defaults()
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking.tracking_uri())


def record(**changes: Any) -> Row:
    row: dict[str, Any] = {
        "pair": "p",
        "fingerprint": "f" * 16,
        "params": {f"distill.p{number}": number for number in range(150)} | {"teacher.model": "wheel://x"},
        "metrics": {"distill/tokens_per_s": 10.5, "eval/boolq@acc": 0.5},
        "tags": {"dvc:artifacts/distill/p": "abc"},
        "artifacts": [Path("params.yaml")],
        "datasets": [
            Dataset("teacher cache", "0123456789abcdef0123456789abcdef.dir", "artifacts/teacher/t", "distill")
        ],
    }
    return record_pair(**(row | changes))


def test_one_complete_row_per_pair_and_fingerprint(mlflow_database: Path, checkout: Path) -> None:
    row = record()
    assert record(metrics={"distill/tokens_per_s": 11.0}) == row
    other = record(fingerprint="e" * 16)
    same_chain = record(pair="q")
    assert len({row.run_id, other.run_id, same_chain.run_id}) == 3
    client = store()
    experiment = client.get_experiment_by_name("pairs")
    assert len(client.search_runs([experiment.experiment_id])) == 3
    run = client.get_run(row.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "p-ffffff"
    assert run.data.metrics == {"distill/tokens_per_s": 11.0, "eval/boolq_acc": 0.5}
    assert len(run.data.params) == 151
    assert run.data.params["teacher.model"] == "wheel://x"
    assert run.data.tags["dvc:artifacts/distill/p"] == "abc"
    assert run.inputs.dataset_inputs[0].dataset.digest == "0123456789abcdef0123456789abcdef.dir"
    assert experiment.artifact_location == (checkout / "mlruns" / "pairs").as_uri()
    assert (checkout / "mlruns" / "pairs" / row.run_id / "artifacts" / "params.yaml").is_file()
    page = f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}"
    assert row.address() == f"{page}/runs/{row.run_id}?workflowType=machine_learning"
    assert compare_address([row, other]) == (
        "http://127.0.0.1:5000/#/compare-runs?"
        f"runs=%5B%22{row.run_id}%22%2C%22{other.run_id}%22%5D&experiments=%5B%22{experiment.experiment_id}%22%5D"
    )


def test_the_table_of_pairs_has_its_columns_in_its_link(mlflow_database: Path) -> None:
    assert record().table_address() is None
    row = record(columns=["eval/kl_nats", "eval/boolq@acc"])
    experiment = store().get_experiment_by_name("pairs")
    assert row.table_address() == (
        f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs"
        "?workflowType=machine_learning&viewStateShareKey=figures"
    )
    view = json.loads(experiment.tags["mlflow.sharedViewState.figures"])
    assert view["selectedColumns"] == view["columnOrder"] == ["metrics.`eval/kl_nats`", "metrics.`eval/boolq_acc`"]
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`eval/kl_nats`", True)
    assert set(view["columnWidths"]) == set(view["columnOrder"])


def test_a_row_is_found_without_asking_mlflow_and_by_asking_where_nobody_noted_it(
    mlflow_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = record(columns=["eval/kl_nats"])
    with monkeypatch.context() as patch:
        patch.setattr(tracking, "_store", lambda: pytest.fail("asked"))
        assert tracking.find_pair("p", "f" * 16) == row
    shutil.rmtree(work_dir() / "rows")  # as `make clean` does
    assert tracking.find_pair("p", "f" * 16) == row
    assert tracking.find_pair("p", "e" * 16) is None
    with monkeypatch.context() as patch:  # asked once, noted again
        patch.setattr(tracking, "_store", lambda: pytest.fail("asked"))
        assert tracking.find_pair("p", "f" * 16) == row
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{mlflow_database.parent}/other.db")
    shutil.copy(mlflow_database, mlflow_database.parent / "other.db")
    found = tracking.find_pair("p", "f" * 16)  # a note about one store says nothing of another
    assert found == dataclasses.replace(row, store=tracking.tracking_uri())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"store": 1}', '{"unknown": 1}'])
def test_a_broken_note_is_none(text: str, mlflow_database: Path) -> None:
    row = record()
    (note,) = (work_dir() / "rows").iterdir()
    note.write_text(text)
    assert recall("p", "f" * 16, row.store) is None
    assert tracking.find_pair("p", "f" * 16) == row


def test_a_row_that_a_kill_left_incomplete_is_completed(mlflow_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tracking, "_write", lambda *row: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            record()
    run_id = record().run_id
    client = store()
    runs = client.search_runs([client.get_experiment_by_name("pairs").experiment_id])
    assert [(run.info.run_id, run.info.status, len(run.data.params)) for run in runs] == [(run_id, "FINISHED", 151)]


@pytest.mark.slow
def test_four_writers_on_a_new_database(checkout: Path) -> None:
    """Each, in a checkout of its own, writes a row of its own and one that all share."""
    code = """
import sys
from pathlib import Path
from pipeline.tracking import record_pair, register_student
for fingerprint in ("a" * 16, sys.argv[1] * 16):
    params = {f"p{number}": number for number in range(150)}
    row = record_pair("p", fingerprint, params, {"distill/y": 2.0}, {"dvc:x": "abc"}, [Path("params.yaml")])
    register_student("p", row.run_id, {"dvc_md5": "abc"})
"""
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{checkout}/mlflow.db",
    }

    def write(name: str) -> int:
        other = checkout / name
        other.mkdir()
        shutil.copy("params.yaml", other)
        return subprocess.run([sys.executable, "-c", code, name], cwd=other, env=env, check=False).returncode

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, "bcde")) == [0, 0, 0, 0]
    with contextlib.closing(sqlite3.connect(checkout / "mlflow.db")) as database:
        rows = database.execute("select run_uuid, name, status from runs order by name").fetchall()
        assert [row[1:] for row in rows] == [(f"p-{name * 6}", "FINISHED") for name in "abcde"]
        for table, count in {"metrics": 1, "params": 150}.items():
            assert database.execute(f"select count(*) from {table} group by run_uuid").fetchall() == 5 * [(count,)]
        tagged = database.execute("select count(*) from tags where key = 'dvc:x'").fetchone()
        assert tagged == (5,)
        versions = database.execute("select version, run_id from model_versions order by version").fetchall()
    assert [number for number, _ in versions] == [1, 2, 3, 4, 5]
    assert {run for _, run in versions} == {row[0] for row in rows}
    assert all((checkout / "mlruns/pairs" / row[0] / "artifacts/params.yaml").is_file() for row in rows)


def test_the_store_is_in_the_main_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_ROOT", "/home/me/project/.dvc/tmp/exps/tmpabc")
    assert tracking.tracking_uri() == "sqlite:////home/me/project/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert tracking.tracking_uri() == "http://tracking:5000"


REPORT_WITH_A_ROW = """
from pipeline.tracking import record_pair
name = os.environ["DVC_EXP_NAME"]
record_pair("ok", name, {"a": 1}, {"distill/y": 2.0}, {}, [])
"""


@pytest.mark.slow
def test_queued_and_workspace_experiments_write_into_the_main_checkout(project: Any, new_mlflow_database: Path) -> None:
    project.make_checkout("ok")
    (project.root / "dvc.lock").unlink()  # of the other tests' checkout
    shutil.copy(new_mlflow_database, project.root / "mlflow.db")
    with (project.root / "pipeline" / "report.py").open("a") as stage:
        stage.write(REPORT_WITH_A_ROW)
    project.commit()

    def names() -> set[str]:
        with contextlib.closing(sqlite3.connect(project.root / "mlflow.db")) as database:
            query = "select value from tags join runs using (run_uuid) where key = 'dvc_exp' and status = 'FINISHED'"
            return {value for (value,) in database.execute(query)}

    for number in (2, 3):
        code, output = project.run(
            "exp", "run", "--queue", "--name", f"q{number}", "-S", f"prepare.a={number}", module="dvc"
        )
        assert code == 0, output
    assert project.run("queue", "start", "-j", "2", module="dvc")[0] == 0
    wait_for(lambda: names() == {"q2", "q3"}, 90)
    code, output = project.run("exp", "run", "--name", "here", "-S", "prepare.a=4", module="dvc")
    assert code == 0, output
    assert names() == {"q2", "q3", "here"}
    assert not list((project.root / ".dvc").rglob("mlflow.db"))
    project.run("queue", "stop", "--kill", module="dvc")
