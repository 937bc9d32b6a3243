import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import Gemma2Config, LlamaConfig, PreTrainedModel

from alambique import scoring
from alambique.core.errors import UserError
from alambique.evaluate import BenchmarkConfig, EvaluateSettings, read_benchmark, stock_tasks
from alambique.models.load import load_tokenizer
from alambique.scoring import ScoringLM, run_benchmark
from tests.tiny_models import save_model, tiny_model, tiny_tokenizer

EVALS = Path(__file__).resolve().parents[1] / "evals"
CPU = torch.device("cpu")
SETTINGS = EvaluateSettings(dtype="float32", batch_tokens=200)
BOOLQ = [
    {"question": f"is {word} wet", "answer": number % 2 == 0, "passage": f"{word} " * (number + 1)}
    for number, word in enumerate(["water", "rain", "fire", "the old dog", "snow", "green hills", "a cat"])
]
HELLASWAG = [
    {
        "activity_label": "Running",
        "ctx_a": "The dog saw a cat" + " on the mat" * number,
        "ctx_b": "it",
        "endings": ["ran.", "sat on the mat.", "saw the rain and the rivers.", "was silver."],
        "label": str(number % 4),
    }
    for number in range(5)
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(LlamaConfig, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), model, tiny_tokenizer())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(BOOLQ).save_to_disk(str(root / "boolq/validation"))
    datasets.Dataset.from_list(HELLASWAG).save_to_disk(str(root / "hellaswag/validation"))
    answers = datasets.ClassLabel(names=["A", "B", "C", "D"])
    for number, path in enumerate(sorted(stock_tasks().glob("mmlu/default/mmlu_*.yaml"))):
        subject = path.stem.removeprefix("mmlu_")
        row = {"question": f" what of {subject}?", "subject": subject, "choices": list("wxyz"), "answer": number % 4}
        rows = datasets.Dataset.from_list([row, row]).cast_column("answer", answers)
        for split in ("dev", "test"):
            rows.save_to_disk(str(root / "mmlu" / subject / split))
    return root


def run(name: str, config: BenchmarkConfig, folder: Path, data: Path, evals: Path = EVALS) -> dict[str, Any]:
    return run_benchmark(folder, name, config, SETTINGS, CPU, lambda uri: data / name, evals)


def stock_answers(lm: HFLM, name: str, data: Path, limit: int | None) -> tuple[Any, list[Any]]:
    """lm-eval's results, and the log-probability of every answer, by the model class given."""
    config = BenchmarkConfig(limit=limit)
    loaded = scoring._load_tasks(read_benchmark(name, EVALS), config, data / name)
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
    found = evaluate(lm=lm, task_dict=loaded, limit=limit, log_samples=True)
    return found["results"], [s["resps"] for samples in found["samples"].values() for s in samples]


@pytest.mark.parametrize(
    ("name", "limit", "dtype"),
    [
        ("boolq", None, torch.float32),
        ("hellaswag", None, torch.float32),
        ("hellaswag", None, torch.bfloat16),
        ("mmlu", 1, torch.bfloat16),
    ],
)
def test_scores_are_those_of_the_stock_class(
    name: str, limit: int | None, dtype: torch.dtype, folder: Path, data: Path
) -> None:
    model = tiny_model(LlamaConfig, max_position_embeddings=1024).to(dtype)
    tokenizer = load_tokenizer(folder)
    lm = ScoringLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    lm.batch_tokens = 10**6  # one batch, as below: the shape of a batch decides rounding
    stock = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1000)
    ours, theirs = (stock_answers(each, name, data, limit) for each in (lm, stock))
    assert ours[1] == theirs[1]
    assert json.dumps(ours[0]) == json.dumps(theirs[0])


@pytest.mark.parametrize("config_class", [LlamaConfig, Gemma2Config])  # Gemma 2 caps its logits
def test_small_batches_change_only_rounding(config_class: Any, folder: Path, data: Path) -> None:
    extra = {"final_logit_softcapping": 5.0, "attention": "eager"} if config_class is Gemma2Config else {}
    model = tiny_model(config_class, max_position_embeddings=1024, **extra)
    stock = HFLM(pretrained=model, tokenizer=load_tokenizer(folder), batch_size=1)
    lm = ScoringLM(pretrained=model, tokenizer=load_tokenizer(folder), batch_size=1)
    lm.batch_tokens = 60
    (_, ours), (_, theirs) = (stock_answers(each, "hellaswag", data, None) for each in (lm, stock))
    for mine, other in zip(ours, theirs, strict=True):
        for (first,), (second,) in zip(mine, other, strict=True):
            assert first[0] == pytest.approx(second[0], rel=1e-5, abs=1e-4)
            assert first[1] == second[1]


def test_the_head_runs_only_where_a_batch_is_scored(folder: Path, data: Path) -> None:
    model = tiny_model(LlamaConfig, max_position_embeddings=1024)
    rows: list[int] = []
    positions: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[1]))
    model.model.register_forward_hook(lambda module, args, output: positions.append(output[0].shape[1]))
    lm = ScoringLM(pretrained=model, tokenizer=load_tokenizer(folder), batch_size=1)
    lm.batch_tokens = 1
    stock_answers(lm, "boolq", data, None)
    tokenizer = load_tokenizer(folder)
    assert set(rows) == {len(tokenizer.encode(answer)) for answer in (" no", " yes")}
    assert min(positions) > 20 > max(rows)


def test_requests_that_differ_in_their_last_token_share_a_batch() -> None:
    requests = [(("", ""), context, answer) for context, answer in (([1, 2], [3]), ([5, 6, 7], [8]), ([1, 2], [4]))]
    assert list(scoring._batches(requests, 1)) == [[1], [0, 2]]
    assert list(scoring._batches(requests, 8)) == [[1, 0, 2]]  # two model inputs, padded to four tokens


def test_a_text_longer_than_the_model_is_truncated_as_the_stock_class_does(folder: Path, data: Path) -> None:
    model = tiny_model(LlamaConfig, max_position_embeddings=40)
    lm = ScoringLM(pretrained=model, tokenizer=load_tokenizer(folder), batch_size=1)
    lm.batch_tokens = 10**6
    stock = HFLM(pretrained=model, tokenizer=load_tokenizer(folder), batch_size=1000)
    assert stock_answers(lm, "hellaswag", data, None)[1] == stock_answers(stock, "hellaswag", data, None)[1]


def test_a_result_says_all_that_a_reader_needs(folder: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("hellaswag", BenchmarkConfig(limit=4), folder, data)
    json.dumps(found, allow_nan=False)
    assert found["benchmark"] == "hellaswag"
    assert found["metric"] == "acc_norm"
    assert found["value"] == found["metrics"]["acc_norm"]
    assert found["stderr"] == found["metrics"]["acc_norm_stderr"]
    assert (found["n"], found["limit"], found["num_fewshot"], found["chance"]) == (4, 4, 0, 0.25)
    assert found["versions"]["lm_eval"] == "0.4.13"
    assert found["versions"]["tasks"] == {"hellaswag": 1.0}
    assert found["seconds"] > 0
    assert found["peak_mib"] > 0
    assert "cpu" in found["device"]
    assert "it/s" not in capsys.readouterr().err  # none of lm-eval's own bars


def test_a_group_is_pooled_over_its_members_and_keeps_a_standard_error(folder: Path, data: Path) -> None:
    found = run("mmlu", BenchmarkConfig(num_fewshot=2, limit=1), folder, data)  # from the dev split
    assert found["benchmark"] == "mmlu"
    assert found["num_fewshot"] == 2
    assert found["n"] == 57
    p = found["value"]
    assert 0 < p < 1
    assert found["stderr"] == pytest.approx((p * (1 - p) / 56) ** 0.5)
    assert found["versions"]["tasks"] == {"mmlu": "2", "members": [1.0]}


def test_another_metric_can_be_chosen(folder: Path, data: Path) -> None:
    found = run("hellaswag", BenchmarkConfig(metric="acc"), folder, data)
    assert found["value"] == found["metrics"]["acc"]


def test_a_metric_that_is_not_reported_is_refused(folder: Path, data: Path) -> None:
    with pytest.raises(UserError, match=r"^hellaswag reports acc, acc_norm, not f1: correct `metric` in params.yaml"):
        run("hellaswag", BenchmarkConfig(metric="f1"), folder, data)


def test_an_unknown_benchmark_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean boolq"):
        run("bolq", BenchmarkConfig(), tmp_path / "no model", tmp_path)


def test_data_that_only_the_hub_has_are_asked_for_by_name(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def offline(self: Any, task: str) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    (tmp_path / "arc").mkdir()
    (tmp_path / "arc/benchmark.yaml").write_text("task: arc_easy\n")
    monkeypatch.setattr(scoring.TaskManager, "__init__", lambda self: None)  # indexing 14,000 files takes seconds
    monkeypatch.setattr(scoring.TaskManager, "load", offline)
    with pytest.raises(
        UserError, match=r"^The data of lm-eval's task arc_easy can't be had \(Couldn't reach the Hub\)"
    ):
        run("arc", BenchmarkConfig(), folder, data, tmp_path)
