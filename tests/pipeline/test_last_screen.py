import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from alambique.report import summarise
from pipeline import last_screen, tracking
from pipeline.rows import compare_address
from tests.tiny_results import BENCHMARKS, write_results


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("DVC_ROOT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    params = {"prepare": {"train_rows": 160}, "pairs": {"p": {}, "unfinished": {}}}
    YAML().dump(params, tmp_path / "params.yaml")
    return tmp_path


def write_report(root: Path) -> None:
    results = write_results(root)
    summary = summarise(results, "p", "t", BENCHMARKS) | {"fingerprint": "f" * 16}
    (results / "report").mkdir()
    (results / "report/p.json").write_text(json.dumps(summary))


def shown(width: int = 100, **options: Any) -> str:
    stream = io.StringIO()
    last_screen.show(console=Console(file=stream, width=width, highlight=False, **options))
    return stream.getvalue()


def test_it_shows_what_came_out_and_where_it_is(checkout: Path) -> None:
    write_report(checkout)
    text = shown()
    for part in (
        "p: KL to the teacher -50%, agreement +0.100",
        "0.900 ± 0.020",
        "0.450 ± 0.010",
        "0.740 ± 0.022",
        "boolq acc",
        "113,274,432",
        "2,100",
        "236.2",
        'transformers.AutoModelForCausalLM.from_pretrained("artifacts/distill/p")',
        "results/report/p.html",
        "all pairs results/report/index.html",
        "prepare.train_rows: 160 -> 640",
        "presets/",
    ):
        assert part in text, part
    assert "…" not in text  # nothing cut
    assert "MLflow" not in text  # there is no store
    assert "0.450 <span" in Path("results/report/index.html").read_text()


def test_it_is_readable_at_100_columns_without_a_terminal(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(checkout)
    last_screen.show()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 15
    assert max(len(line) for line in lines) <= 100
    assert not any("\x1b" in line for line in lines)


def test_the_link_leads_to_the_row(checkout: Path) -> None:
    write_report(checkout)
    row = tracking.record_pair("p", "f" * 16, {}, {"eval/kl_nats": 0.45}, {}, [])
    assert row.address() in shown()


def test_two_pairs_have_a_link_to_their_comparison(checkout: Path) -> None:
    write_report(checkout)
    summary = json.loads(Path("results/report/p.json").read_text())
    Path("results/report/unfinished.json").write_text(json.dumps({**summary, "pair": "unfinished"}))
    rows = [tracking.record_pair(pair, "f" * 16, {}, {"eval/kl_nats": 0.4}, {}, [], columns=["eval/kl_nats"])
            for pair in ("p", "unfinished")]  # fmt: skip
    text = shown()
    assert str(rows[1].table_address()) in text
    assert compare_address(rows) in text
    assert rows[0].address() not in text


def test_a_broken_store_does_not_hide_the_result(checkout: Path) -> None:
    write_report(checkout)
    Path("mlflow.db").write_text("not a database, but long enough to be looked at by sqlite" * 40)
    assert "0.450 ± 0.010" in shown()


def test_without_a_report_it_says_what_to_do(checkout: Path) -> None:
    assert "No pair has a report yet" in shown()
