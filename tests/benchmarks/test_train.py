import torch

from benchmarks import pairs, train
from benchmarks.cases import Options

CPU = torch.device("cpu")


def test_the_summary_has_the_three_figures() -> None:
    out = train.run(Options(CPU, quick=True, repeats=2))
    assert out.summary.keys() == {"data_wait_share", "tokens_per_s", "ratio_to_bare_step"}
    assert 0 <= out.summary["data_wait_share"] < 1
    assert out.summary["tokens_per_s"] > 0
    assert [row["steps"] for row in out.rows] == [6, 6]
    assert out.summary["ratio_to_bare_step"] == out.rows[0]["median_s"] / out.rows[1]["median_s"]


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
