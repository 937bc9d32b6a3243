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
        "kl": plots.divergence([(0, 0.9, 0.02), (100, 0.6, None), (40960, 0.45, 0.01)]),
        "size": plots.size_accuracy([plots.Sized("one", "after", 1e8, 0.5, 0.02, 0.4)], "Mean accuracy"),
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
    assert b"<svg" in plots.divergence([(0, 0.5, None), (9, 0.4, None)])
    assert b"<svg" in plots.divergence([(0, float("nan"), None), (9, float("nan"), float("nan"))])


def test_a_long_curve_is_a_small_file() -> None:
    points = [{"tokens": float(step), "loss_nats": 1 + step % 7, "ce_nats": 3 + step % 5} for step in range(20_000)]
    assert len(plots.loss_curve(points)) < 60_000


@pytest.mark.parametrize("width", [plots.WIDE, plots.NARROW])
def test_no_label_covers_another_or_a_point(width: float) -> None:
    points = [(30 + 9.0 * (index % 7), 100 + 5.0 * (index % 4) + index) for index in range(23)]
    labels = [f"a_pair_called_{index}" for index in range(23)]
    found = plots.place_labels(points, labels, (0, 0, 72 * width, 300))
    placed = [place for place in found if place is not None]
    assert len(placed) == 23
    wide = max(map(len, labels)) * 0.5 * 9  # no narrower than the letters of a usual font
    boxes = [(x, y, x + wide, y + 9) for x, y in placed]
    for index, box in enumerate(boxes):
        assert 0 <= box[0] <= box[2] <= 72 * width
        others = [*boxes[:index], *((x, y, x, y) for x, y in points)]
        assert not any(box[0] < o[2] and o[0] < box[2] and box[1] < o[3] and o[1] < box[3] for o in others)


def test_a_label_without_room_is_left_out() -> None:
    assert plots.place_labels([(5, 5)], ["far too long for this room"], (0, 0, 50, 50)) == [None]


def test_a_dollar_sign_in_a_name_is_text() -> None:
    models = [plots.Sized("$\\frac{$", "after", 1e8, 0.5, None), plots.Sized("t", "teacher", 2e8, 0.6, None)]
    assert b"frac{$" in plots.size_accuracy(models, "Mean accuracy")


@pytest.mark.parametrize(("number", "words"), [(113_274_432, "113 M"), (3_212_749_824, "3.21 B"), (4_200, "4.2 k")])
def test_parameters_in_words(number: int, words: str) -> None:
    assert plots.parameters(number) == words
