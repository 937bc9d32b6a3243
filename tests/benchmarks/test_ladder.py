import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alambique.core.errors import UserError
from alambique.core.params import Params
from alambique.models.load import SplitModel, load_model
from benchmarks import ladder, ladder_page, ladder_runs, plots, records
from benchmarks.cases import Options, Outcome
from benchmarks.ladder import ONLINE, QUICK, RUNGS
from benchmarks.ladder_page import Interval
from benchmarks.ladder_runs import Pair, Plan, angle_degrees, gradient

OPTIONS = Options(torch.device("cpu"), quick=True)
FIGURES = {"kl_nats", "agreement", "perplexity", "ece", "gradient_degrees", "bytes_per_token", "kl_over_online"}


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("ladder")
    return folder, ladder.climb(QUICK, OPTIONS, folder)


def test_every_rung_is_measured_with_every_seed(climbed: tuple[Path, Outcome]) -> None:
    _, outcome = climbed
    assert [row["rung"] for row in outcome.rows[:2]] == ["teacher", "before"]
    assert [(row["rung"], row["seed"]) for row in outcome.rows[2:]] == [(r, s) for r in RUNGS for s in (0, 1)]
    summary = outcome.summary
    assert (summary["seeds"], summary["steps"], set(summary["ladder"])) == (2, 2, set(RUNGS))
    assert all(set(figures) >= FIGURES for figures in summary["ladder"].values())
    json.dumps(summary, allow_nan=False)


def test_the_figures_tell_the_rungs_apart(climbed: tuple[Path, Outcome]) -> None:
    found = climbed[1].summary["ladder"]
    assert (found[ONLINE]["gradient_degrees"], found[ONLINE]["kl_over_online"]) == (0.0, 1.0)
    assert found[ONLINE]["bytes_per_token"] is found["ce"]["bytes_per_token"] is None
    sizes = [found[rung]["bytes_per_token"] for rung in ("bucket_12", "bucket_50", "bucket")]
    assert sizes == sorted(sizes)
    angles = [found[rung]["gradient_degrees"] for rung in (ONLINE, "bucket", "bucket_50", "bucket_12", "ce")]
    assert angles == sorted(angles)
    assert found["bucket"]["gradient_degrees"] < found["renormalise"]["gradient_degrees"]
    assert len({figures["kl_nats"] for figures in found.values()}) == len(RUNGS)


def test_a_rerun_makes_only_what_is_missing_and_the_same(climbed: tuple[Path, Outcome], tmp_path: Path) -> None:
    folder, outcome = climbed
    kept = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text("".join(kept[:-2]))
    again = ladder.climb(QUICK, OPTIONS, folder)
    figures = [[{k: v for k, v in row.items() if k != "seconds"} for row in o.rows] for o in (outcome, again)]
    assert figures[0] == figures[1]
    assert [json.loads(line) for line in kept[:-2]] == [json.loads(line) for line in _lines(folder)[:-2]]


def test_a_finished_ladder_loads_nothing(climbed: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Pair, "open", no)
    only = replace(OPTIONS, only=("bucket", ONLINE))
    assert set(ladder.climb(QUICK, only, climbed[0]).summary["ladder"]) == {"bucket", ONLINE}


def _lines(folder: Path) -> list[str]:
    return (folder / "results.jsonl").read_text().splitlines()


def test_kept_hidden_states_give_the_live_teacher_s_gradient(climbed: tuple[Path, Outcome]) -> None:
    folder, _ = climbed
    pair = Pair.open(QUICK, RUNGS, folder, OPTIONS)
    live: Any = SplitModel(load_model(folder / "teacher", dtype="float32", device=OPTIONS.device))
    kept, ran = (gradient(p, RUNGS[ONLINE], seed=1) for p in (pair, replace(pair, teacher=live)))
    assert angle_degrees(kept, ran) < 0.01  # batches of 8 and of 1 row may round differently
    assert angle_degrees(kept, gradient(pair, RUNGS["bucket"], seed=1)) > 5


def test_seeds_share_no_row_and_see_each_of_theirs_once() -> None:
    plan = Plan(seeds=3, steps=4, valid_rows=1)
    seen = [[n for step in range(4) for n in plan.row_numbers(step, seed, rows_per_step=2)] for seed in range(3)]
    assert sorted(number for numbers in seen for number in numbers) == list(range(24))
    assert [{number % 3 for number in numbers} for numbers in seen] == [{0}, {1}, {2}]
    assert seen[0] != sorted(seen[0])


@pytest.mark.parametrize(("degrees", "scale"), [(0.0, 1.0), (1e-3, 1.0), (30.0, 7.0), (90.0, 1.0), (180.0, 0.1)])
def test_angles_are_exact_whatever_the_lengths(degrees: float, scale: float) -> None:
    x, y = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    first = [torch.tensor([1.0]), torch.zeros(2, 2, dtype=torch.float64)]
    second = [torch.tensor([x * scale], dtype=torch.float64), torch.tensor([[y * scale, 0.0], [0.0, 0.0]]).double()]
    assert angle_degrees(first, second) == pytest.approx(degrees, rel=1e-6, abs=1e-9)


def test_intervals_are_student_s() -> None:
    assert Interval.of([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert Interval.of([5.0]) == (5.0, None)
    assert Interval.of([0.0, 2.0]).show(1) == "1.0 ± 12.7"


ROWS = [
    {
        "rung": rung,
        "seed": seed,
        "kl_nats": (0.5 + 0.1 * seed) * factor,
        "agreement": 0.6 + shift,
        "perplexity": 30.0 + seed,
        "ece": 0.03,
        "gradient_degrees": 10.0 * shift,
        "bytes_per_token": size,
    }
    for rung, factor, shift, size in ((ONLINE, 1.0, 0.0, None), ("bucket", 1.02, 0.1, 198.0))
    for seed in range(3)
]


def test_differences_are_paired_so_that_seeds_drop_out() -> None:
    assert ladder_page.over_online(ROWS, "bucket") == (pytest.approx(1.02), pytest.approx(0, abs=1e-12))
    assert Interval.of(list(ladder_page.values(ROWS, "bucket", "kl_nats").values())).half == pytest.approx(0.2534, 1e-3)
    found = ladder_page.summary(ROWS)["bucket"]
    assert found["kl_over_online"] == pytest.approx(1.02)
    assert found["bytes_per_token"] == 198.0
    assert ladder_page.over_online(ROWS[3:], "bucket") is None  # without online there is nothing to compare with


def test_the_tables_are_whole_and_show_intervals() -> None:
    text = ladder_page.markdown(ROWS)
    for block in text.strip().split("\n\n"):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block
    assert "| `online` | 0.6000 ± 0.2484 | 0.6000 | 31.00 ± 2.48 | 0.0300 | 0.0 |  |" in text
    assert "| `bucket` | +2.0 ± 0.0 | +0.0120 ± 0.0050 | +0.1000 ± 0.0000 | +0.00 ± 0.00 | +0.0000 ± 0.0000 |" in text


def test_the_plot_is_the_same_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ladder.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    for name in ("one", "two"):
        assert plots.main(tmp_path / name) == 0
    first, second = ((tmp_path / name / "ladder.svg").read_text() for name in ("one", "two"))
    assert first == second
    assert first.startswith("<?xml")


def test_a_student_that_must_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    params = Params.load(records.ROOT / "params.yaml")
    name = params.keys("pairs")[0]
    params.tree["pairs"][name]["student"] = {"keep_uniform": 20}
    monkeypatch.setattr(Params, "load", lambda *_: params)
    with pytest.raises(UserError, match=f"needs a student made by drop_layers, and pairs.{name} is another"):
        ladder_runs._embedded()
