from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from alambique import plots
from alambique.report import read_curve, summarise
from tests.tiny_results import BENCHMARKS, write_results


@pytest.fixture
def drawn(tmp_path: Path) -> Any:
    results = write_results(tmp_path)
    summary = summarise(results, "p", "t", BENCHMARKS)
    points = read_curve(results / "distill/p_curve.csv")
    return lambda: {
        "loss": plots.loss_curve(points),
        "accuracy": plots.accuracy(summary["benchmarks"]),
        "kl": plots.divergence(summary["kl_nats"], summary["stderr"]["kl_nats"]),
    }


def test_the_same_numbers_give_the_same_bytes(drawn: Any) -> None:
    assert drawn() == drawn()


def test_plots_are_small_svg_that_suit_any_background(drawn: Any) -> None:
    for name, svg in drawn().items():
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg"), name
        assert len(svg) < 40_000, name
        text = svg.decode()
        assert "date>" not in text, name
        assert "#ffffff" not in text, name  # no white page behind
        assert "#000000" not in text, name  # no black ink


def test_plots_name_what_they_show(drawn: Any) -> None:
    texts = {name: svg.decode() for name, svg in drawn().items()}
    assert all(word in texts["loss"] for word in ("Training loss", "nats per token", "training tokens"))
    assert all(word in texts["accuracy"] for word in ("boolq", "mmlu", "teacher", "student after", "chance", "n = 400"))
    assert all(word in texts["kl"] for word in ("0.900", "0.450", "lower is better"))


def test_the_divergence_is_drawn_apart_only_where_it_differs_from_the_loss(drawn: Any) -> None:
    points = [{"tokens": 1.0, "loss_nats": 2.0, "kd_nats": 2.0, "ce_nats": 3.0}]
    assert b"divergence" not in plots.loss_curve(points)
    assert b"divergence" in plots.loss_curve([{**points[0], "kd_nats": 1.5}])


def test_a_missing_standard_error_is_no_error(drawn: Any) -> None:
    row = {who: {"metric": "acc", "value": 0.5, "stderr": None, "n": 1} for who in ("teacher", "before", "after")}
    assert b"<svg" in plots.accuracy({"x": {**row, "chance": None}})
    assert b"<svg" in plots.divergence({"before": 0.5, "after": 0.4}, {})
