import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from alambique.core.errors import UserError
from alambique.core.params import Params
from pipeline import report, tracking
from tests.tiny_results import BENCHMARKS, write_results

ROOT = Path(__file__).parents[2]


def params() -> dict[str, Any]:
    return {
        "prepare": {"seq_len": 256, "corpora": [{"uri": "file:x"}]},
        "teacher": {"top_k": 100, "dtype": "bfloat16"},
        "student": {},
        "distill": {"learning_rate": 3e-4, "loss": {"tail": "bucket"}},
        "evaluate": {"settings": {}, "heldout": {}, "benchmarks": {name: {"limit": 5} for name in BENCHMARKS}},
        "report": {},
        "teachers": {"t": {"model": "wheel://x", "capture": {"top_k": 50}}},
        "pairs": {"p": {"teacher": "t", "student": {"drop_layers": [1]}, "distill": {"loss": {"tail": "truncate"}}}},
    }


def entry(out: str) -> dict[str, Any]:
    return {"cmd": "x", "deps": [], "outs": [{"path": out, "md5": f"md5 of {out}"}]}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("DVC_ROOT", "DVC_EXP_NAME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    write_results(tmp_path)
    YAML().dump(params(), tmp_path / "params.yaml")
    outs = {"prepare@t": "artifacts/prepare/t", "teacher@t": "artifacts/teacher/t"}
    outs |= {"student@p": "artifacts/student/p", "distill@p": "artifacts/distill/p"}
    stages = {name: entry(out) for name, out in outs.items()}
    YAML().dump({"schema": "2.0", "stages": stages}, tmp_path / "dvc.lock")
    return tmp_path


def test_settings_hold_what_was_set_with_overrides_merged() -> None:
    resolved = report.settings(Params(params()), "p")
    assert resolved.teacher == "t"
    assert resolved.benchmarks == BENCHMARKS
    flat = resolved.flat
    assert flat["teacher.top_k"] == 50
    assert flat["teacher.dtype"] == "bfloat16"
    assert flat["teacher.model"] == "wheel://x"
    assert flat["distill.learning_rate"] == 3e-4
    assert flat["distill.loss.tail"] == "truncate"
    assert flat["student.drop_layers"] == [1]
    assert flat["evaluate.benchmarks.boolq.limit"] == 5


def test_it_writes_the_page_the_plots_and_one_complete_row(checkout: Path) -> None:
    report.run("p")
    found = json.loads(Path("results/report/p.json").read_text())
    assert found["fingerprint"] == tracking.chain_fingerprint("p")
    page = Path("results/report/p.md").read_text()
    images = sorted(path.relative_to("results/report").as_posix() for path in Path("results/report/p").iterdir())
    assert images == ["p/accuracy.svg", "p/kl.svg", "p/loss.svg"]
    assert all(f"({image})" in page for image in images)
    html = Path("results/report/p.html").read_text()
    assert "0.450 <span" in html
    assert "distill.loss.tail: &#34;truncate&#34;" in html
    row = tracking.find_pair("p", found["fingerprint"])
    assert row is not None
    assert tracking.find_pair("p", "another") is None
    database = sqlite3.connect("mlflow.db")
    metrics = dict(database.execute("select key, value from latest_metrics where run_uuid = ?", [row.run_id]))
    assert metrics["eval/kl_nats"] == 0.45
    assert metrics["teacher/peak_mib"] == 2100.5
    logged = dict(database.execute("select key, value from params where run_uuid = ?", [row.run_id]))
    assert logged["distill.loss.tail"] == "truncate"
    tags = dict(database.execute("select key, value from tags where run_uuid = ?", [row.run_id]))
    assert tags["dvc:artifacts/distill/p"] == "md5 of artifacts/distill/p"
    version = database.execute("select version, source, run_id from model_versions where name = 'p'").fetchall()
    assert version == [(1, (checkout / "artifacts/distill/p").as_uri(), row.run_id)]
    lineage = dict(database.execute("select key, value from model_version_tags where name = 'p'"))
    assert lineage["dvc_md5"] == "md5 of artifacts/distill/p"
    assert lineage["fingerprint"] == found["fingerprint"]
    assert lineage["after_model"] == f"artifacts/distill/p {'c' * 64}"
    assert {"p.html", "p.json", "p.md", "loss.svg", "params.yaml"} <= {path.name for path in Path("mlruns").rglob("*")}
    before = {path: path.read_bytes() for path in Path("results/report").rglob("*") if path.is_file()}
    report.run("p")  # the same results: the same bytes, the same row
    assert {path: path.read_bytes() for path in Path("results/report").rglob("*") if path.is_file()} == before
    assert database.execute("select count(*) from runs").fetchone() == (1,)
    assert database.execute("select count(*) from model_versions").fetchone() == (1,)


def test_a_missing_result_is_told_before_anything_is_written(checkout: Path) -> None:
    Path("results/evaluate/heldout/p.json").unlink()
    with pytest.raises(UserError, match=r"heldout/p\.json does not exist"):
        report.run("p")
    assert not Path("results/report").exists()


def test_a_pair_may_not_take_the_place_of_the_index() -> None:
    tree = params()
    tree["pairs"]["index"] = tree["pairs"]["p"]
    with pytest.raises(UserError, match=r"pairs\.index would take the place"):
        report.settings(Params(tree), "index")


def test_the_page_tells_the_commit_and_whether_files_differed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "git_state", lambda: {"git_commit": "c" * 40, "git_dirty": "true"})
    report.run("p")
    html = Path("results/report/p.html").read_text()
    assert f"git checkout {'c' * 40}" in html
    assert "Files differed from this commit" in html


def test_the_columns_of_mlflows_table_are_the_students_figures_and_the_costs() -> None:
    metrics = ["eval/kl_nats", "eval/kl_nats_before", "eval/boolq_acc", "eval/boolq_stderr", "eval/boolq_acc_teacher"]
    assert report.columns([*metrics, "eval/calibration_error", "gap_recovered/boolq"]) == [
        "eval/kl_nats", "eval/agreement", "eval/perplexity", "eval/boolq_acc",
        "distill/peak_mib", "distill/tokens_per_s", "teacher/peak_mib", "teacher/tokens_per_s",
        "teacher/cache_bytes_per_token", "student/bf16_gb",
    ]  # fmt: skip
