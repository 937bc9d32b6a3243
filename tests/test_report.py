import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alambique.core.errors import UserError
from alambique.report import (
    cost_figures,
    cost_rows,
    gap_recovered,
    gap_silence,
    headline,
    mlflow_metrics,
    page,
    quality_rows,
    read_curve,
    recovered,
    removed,
    summarise,
)
from tests.tiny_results import BENCHMARKS, CURVE, STUDENT, write_results


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return write_results(tmp_path)


@pytest.fixture
def summary(results: Path) -> dict[str, Any]:
    return summarise(results, "p", "t", BENCHMARKS)


def test_the_summary_keeps_its_contract(summary: dict[str, Any]) -> None:
    for name in ("kl_nats", "agreement", "perplexity"):
        assert {"before", "after"} <= set(summary[name])
    assert summary["perplexity"]["teacher"] == 26.8
    for name in BENCHMARKS:
        for who in ("teacher", "before", "after"):
            assert set(summary["benchmarks"][name][who]) == {"metric", "value", "stderr", "n", "seconds"}
    assert {who: summary["benchmarks"]["boolq"][who]["value"] for who in ("teacher", "before", "after")} == {
        "teacher": 0.8,
        "before": 0.5,
        "after": 0.74,
    }
    assert {"tokens_per_s", "peak_mib", "cache_bytes_per_token", "num_tokens"} <= set(summary["teacher"])
    assert {"tokens_per_s", "peak_mib", "tflop_per_s", "seconds", "num_tokens", "loss_impl"} <= set(summary["distill"])
    json.dumps(summary, allow_nan=False)


def test_the_gap_counts_only_where_there_is_one(summary: dict[str, Any]) -> None:
    shares = {name: share for name, (share, _) in gap_recovered(summary).items()}
    assert shares == {
        "kl_nats": pytest.approx(0.5),
        "agreement": pytest.approx(0.2),
        "perplexity": pytest.approx((55.5 - 32.7) / (55.5 - 26.8)),
        "boolq": pytest.approx(0.8),
    }  # mmlu: teacher and student are equal
    mmlu = summary["benchmarks"]["mmlu"]
    assert gap_silence(mmlu) == "gap of 0.000 within two standard errors"
    mmlu["teacher"]["value"] += 0.03  # within two standard errors of 0.022 each
    assert "mmlu" not in gap_recovered(summary)
    mmlu["before"]["value"] = 0.5
    assert gap_silence(mmlu) == "untrained student above its teacher"
    mmlu["before"]["stderr"] = mmlu["teacher"]["stderr"] = None
    assert "mmlu" not in gap_recovered(summary)  # without an error nothing says that a gap is real
    assert gap_silence(mmlu) == "has no standard error"
    mmlu["before"]["value"] = math.nan
    assert gap_silence(mmlu) == "not measured"


def test_a_share_has_the_error_that_simulation_gives(summary: dict[str, Any]) -> None:
    share, error = gap_recovered(summary)["perplexity"]
    draw = np.random.default_rng(0).normal
    errors = summary["stderr"]["perplexity"]
    who = {name: draw(summary["perplexity"][name], errors[name] / 10, 100_000) for name in errors}  # a tenth: linear
    simulated = (who["after"] - who["before"]) / (who["teacher"] - who["before"])
    assert share == pytest.approx(simulated.mean(), rel=0.01)
    assert error == pytest.approx(10 * simulated.std(), rel=0.02)
    summary["stderr"]["perplexity"]["teacher"] = None
    assert gap_recovered(summary)["perplexity"] == (share, None)


def test_a_share_is_told_with_its_error(summary: dict[str, Any]) -> None:
    assert recovered(summary, "kl_nats") == "50% ± 2%"
    assert recovered(summary, "mmlu") == ""
    summary["gap_recovered_stderr"]["kl_nats"] = None
    assert recovered(summary, "kl_nats") == "50%"


def test_every_stage_has_its_cost(summary: dict[str, Any]) -> None:
    costs = {row["stage"]: row for row in cost_figures(summary)}
    assert costs["teacher: capture, once"]["tokens_per_s"] == 812.4
    assert costs["distill: training"]["peak_mib"] == 6400.0
    assert costs["evaluate: heldout"] == {
        "stage": "evaluate: heldout", "peak_mib": 1737.1, "tokens_per_s": None, "seconds": 23.9, "device": "cpu",
    }  # fmt: skip
    assert costs["evaluate: benchmarks"]["seconds"] == pytest.approx(2 * (40.0 + 2 * 32.0))


def test_a_student_equal_to_its_teacher_has_no_gap(summary: dict[str, Any]) -> None:
    summary["kl_nats"], summary["agreement"] = {"before": 0.0, "after": 0.0}, {"before": 1.0, "after": 1.0}
    summary["perplexity"]["before"] = 20.0  # better than its teacher's
    summary["benchmarks"] = {}
    assert gap_recovered(summary) == {}


def test_tables_show_standard_errors_and_units(summary: dict[str, Any]) -> None:
    rows = {row[0]: row[1:] for row in quality_rows(summary)}
    assert rows["KL from the teacher, nats ↓"] == ("0", "0.900 ± 0.020", "0.450 ± 0.010")
    assert rows["perplexity ↓"] == ("26.8 ± 2.1", "55.5 ± 4.5", "32.7 ± 2.6")
    assert rows["boolq acc ↑ (n 400, chance 0.5)"] == ("0.800 ± 0.020", "0.500 ± 0.025", "0.740 ± 0.022")
    assert rows["calibration error ↓"] == ("0.040", "0.050", "0.030")
    assert "mmlu acc ↑ (n 400)" in rows
    costs = {row[0]: row[1:] for row in cost_rows(summary)}
    assert costs["peak memory, MiB"] == ("2,100", "6,400")
    assert costs["teacher's cache, bytes per token"][0] == "236.2"


def test_a_figure_without_a_standard_error_stands_alone(summary: dict[str, Any]) -> None:
    summary["stderr"]["kl_nats"]["after"] = None
    summary["benchmarks"]["mmlu"]["after"]["value"] = math.nan
    assert quality_rows(summary)[0][3] == "0.450"
    assert quality_rows(summary)[-1][3] == "-"


def test_the_page_tells_the_whole_story(summary: dict[str, Any]) -> None:
    summary["fingerprint"] = "0123456789abcdef"
    text = page(summary, {"Training loss": "p/loss.svg"}, "artifacts/distill/p")
    for part in (
        "113,274,432 parameters (84% of its teacher `t`)",
        "Left out of the teacher: 6 of 30 layers (14 to 19, by `drop_layers`). Before training the student stood 0.900",
        "![Training loss](p/loss.svg)",
        "`artifacts/distill/p`",
        "| 0.450 ± 0.010 |",
        "kl_nats 50% ± 2%, agreement 20% ± 2%, perplexity 79% ± 11%, boolq 80% ±",
        "mmlu says nothing (gap of 0.000 within two standard errors).",
        "0123456789abcdef",
        "wheel://x==1/model.gguf",
        "(method `fused`, path",
    ):
        assert part in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_metrics_are_flat_numbers_under_grouped_names(summary: dict[str, Any]) -> None:
    metrics = mlflow_metrics(summary)
    expected = {
        "teacher/tokens_per_s": 812.4, "teacher/peak_mib": 2100.5, "teacher/cache_bytes_per_token": 236.2,
        "distill/tokens_per_s": 270.1, "distill/peak_mib": 6400.0, "distill/tflop_per_s": 0.21,
        "distill/seconds": 151.6, "eval/boolq_acc": 0.74, "eval/boolq_acc_before": 0.5, "eval/boolq_acc_teacher": 0.8,
        "eval/mmlu_acc": 0.25, "eval/kl_nats": 0.45, "eval/kl_nats_before": 0.9, "eval/agreement": 0.6,
        "eval/perplexity": 32.7, "eval/perplexity_teacher": 26.8,
        "eval/calibration_error": 0.03, "eval/calibration_error_teacher": 0.04, "gap_recovered/boolq": 0.8,
        "student/bf16_gb": 0.226548864, "student/size_kept": 0.8420952, "student/items_per_s": 12.5,
        "student/speedup": 1.25, "worth/agreement_per_gb": 2.6484352, "worth/training_s_per_agreement_point": 15.16,
        "worth/accuracy": 0.495, "worth/accuracy_per_gb": 2.184959, "worth/accuracy_kept": 0.495 / 0.525,
    }  # fmt: skip
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value), name
    assert metrics["eval/boolq_stderr"] > 0
    assert metrics["total/seconds"] == pytest.approx(47.2 + 151.6)
    assert "gap_recovered/mmlu" not in metrics
    assert all(type(value) is float for value in metrics.values())


def test_a_missing_result_is_named(results: Path) -> None:
    (results / "evaluate/distill/p/mmlu.json").unlink()
    with pytest.raises(UserError, match=r"evaluate/distill/p/mmlu.json does not exist. Run `make repro`"):
        summarise(results, "p", "t", BENCHMARKS)


def test_a_result_without_a_figure_is_named(results: Path) -> None:
    (results / "distill/p.json").write_text('{"tokens_per_s": 1.0}')
    with pytest.raises(UserError, match=r"distill/p.json has no method, peak_mib, tflop_per_s, .*of another version"):
        summarise(results, "p", "t", BENCHMARKS)


def test_the_curve_is_read_as_numbers(results: Path) -> None:
    points = read_curve(results / "distill/p_curve.csv")
    assert len(points) == 20
    assert points[0] == {
        "step": 1, "tokens": 2048, "loss_nats": 1.0, "kd_nats": 1.0, "ce_nats": 4.0, "learning_rate": 3e-4,
        "grad_norm": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist"),
        (CURVE.splitlines()[0], "has no rows"),
        ("step,loss_nats\n1,high\n", "is not a table of numbers"),
        ("step,loss_nats\n1\n", "is not a table of numbers"),
    ],
)
def test_a_damaged_curve_is_refused(content: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=sentence):
        read_curve(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"layers_removed": [1, 4, 5], "strategy": "drop_by_influence"},
            "3 of 30 layers (1, 4 to 5, by `drop_by_influence`)",
        ),
        (
            {"layers_removed": [], "strategy": "width", "intermediate_size": 1024, "num_key_value_heads": 2},
            "teacher: 512 of 1,536 MLP channels in each layer, 1 of 3 groups of heads in each layer.",
        ),
        ({"layers_removed": None, "strategy": "model"}, "The student is a model of its own, not a pruned teacher."),
    ],
)
def test_what_was_removed_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    assert sentence in removed(STUDENT | change)


def test_the_headline_fits_a_terminal(results: Path) -> None:
    figures = headline(summarise(results, "p", "t", BENCHMARKS))
    assert list(figures) == [
        "kl_nats", "agreement", "perplexity", "boolq", "mmlu", "bf16_gb", "cache_bytes_per_token",
        "train_tokens_per_s", "train_peak_mib", "train_seconds",
    ]  # fmt: skip
    assert figures["kl_nats"] == 0.45
    assert figures["boolq"] == 0.74
