import time

import torch

from benchmarks import pairs, timing, train
from benchmarks.cases import Options

CPU = torch.device("cpu")


def test_the_summary_has_the_three_figures() -> None:
    out = train.run(Options(CPU, quick=True, repeats=2))
    assert out.summary.keys() == {"data_wait_share", "tokens_per_s", "ratio_to_bare_step"}
    assert 0 <= out.summary["data_wait_share"] < 1
    assert out.summary["tokens_per_s"] > 0
    assert [row["contender"] for row in out.rows] == ["trainer alone", "trainer", "bare"]
    assert [row["steps"] for row in out.rows] == [2, 2, 2]
    assert out.summary["ratio_to_bare_step"] == out.rows[1]["median_s"] / out.rows[2]["median_s"]


def test_what_runs_between_steps_is_not_their_time() -> None:
    pair, calls = pairs.open_pair("tiny", CPU), []
    burn = sum if timing.clock(CPU) == "cpu time" else None

    def between() -> None:
        calls.append(burn(range(40_000_000)) if burn else time.sleep(0.5))

    _, seconds = pairs.train(pair, pair.student(), None, CPU, between, steps=4)
    assert len(calls) == 4
    assert len(seconds) == 3
    assert max(seconds) < 0.3  # what runs between takes longer


def test_a_bare_step_learns_the_same_task() -> None:
    """Its loss is the trainer's: after as many steps on its rows both have brought the same divergence down."""
    pair = pairs.open_pair("tiny", CPU)
    student = pair.student()
    before = [p.detach().clone() for p in student.model.parameters()]
    step = train._bare(pair, student, CPU)
    for _ in range(40):
        step()
    assert not any(torch.equal(old, new) for old, new in zip(before, student.model.parameters(), strict=True))
    first = pairs.train(pair, pair.student(), None, CPU, steps=1)[0].curve[0].loss_nats
    after = pairs.train(pair, student, None, CPU, steps=1)[0].curve[0].loss_nats
    assert after < 0.9 * first
