"""The three loss cases run at tiny shapes, and their last lines have the keys that others read."""

import math
import time

import pytest
import torch

from alambique import distillation_loss
from benchmarks import baselines, contenders, loss_memory, loss_precision, loss_speed, problems, timing
from benchmarks.cases import Options, Shape

QUICK = Options(torch.device("cpu"), quick=True, repeats=1)


def test_loss_memory_counts_each_path_at_each_length() -> None:
    out = loss_memory.run(QUICK)
    for impl in ("dense", "dense_plain", "forward_chunked", "recompute", "fused", "fused_compact", "triton", "tiled"):
        assert out.summary["peak_gib"][impl].keys() == {"256", "512"}, impl
        assert all(value > 0 for value in out.summary["retained_gib"][impl].values()) or impl == "recompute"


def test_loss_speed_compares_side_by_side() -> None:
    out = loss_speed.run(
        Options(QUICK.device, quick=True, repeats=1, only=("fused", "dense", "dense_plain", "float32"))
    )
    assert out.summary["ours"] == "fused"
    assert out.summary["ratio_to"].keys() == {"three_gemms", "dense", "dense_plain"}
    assert out.summary["ratio_to"]["dense"].keys() == {"256x64x1024"}
    assert out.summary["ratio_to"]["dense"]["256x64x1024"].keys() == {"float32"}
    assert {row["contender"] for row in out.rows} == {"fused", "three_gemms", "dense", "dense_plain"}


def test_loss_precision_is_small_for_ours_and_large_where_logits_are_rounded() -> None:
    out = loss_precision.run(Options(QUICK.device, quick=True, only=("fused", "dense_plain")))
    assert out.summary["grad_error"]["fused"]["near"] < 0.01
    assert out.summary["grad_error"]["fused"]["far"] < 0.01
    assert out.summary["grad_error"]["dense_plain"]["near"] > 0.02


def test_the_plain_dense_loss_is_the_same_objective() -> None:
    problem = problems.make(Shape(8, 16, 1000), torch.float32, "cpu", 10)
    plain = baselines.dense_loss(problem.hidden_ND, problem.weight_VD, problem.signal)
    exact = distillation_loss(problem.hidden_ND, problem.weight_VD, problem.signal, impl="dense").loss
    torch.testing.assert_close(plain, exact, rtol=1e-5, atol=1e-6)


def test_a_near_teacher_is_near_and_a_far_one_far() -> None:
    losses = []
    for near in (True, False):
        problem = problems.make_related(Shape(16, 32, 1000), near, torch.device("cpu"), 10)
        losses.append(distillation_loss(problem.hidden_ND, problem.weight_VD, problem.signal).loss.item())
    assert 0 < losses[0] < 0.02 < 1 < losses[1]


def test_peers_that_can_not_run_say_why() -> None:
    cpu = torch.device("cpu")
    names, notes = contenders.available(["fused", "triton", "liger_kl", "torch_lce"], cpu)
    assert "fused" in names
    assert "triton" not in names
    assert any("interpreter" in note for note in notes)
    assert any(note.startswith("liger_kl: not run here") for note in notes)


def test_a_peer_s_failure_is_reported_and_ours_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: problems.Problem) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    options = Options(torch.device("cpu"), quick=True, repeats=1, only=("fused", "torch_lce", "float32"))
    monkeypatch.setitem(contenders.ALL, "torch_lce", contenders.Contender(broken))
    out = loss_speed.run(options)
    assert "torch_lce" not in out.summary["ratio_to"]
    assert any("torch_lce can't do 256x64x1024 in float32: no such kernel" in note for note in out.notes)
    monkeypatch.setitem(contenders.ALL, "fused", contenders.Contender(broken))
    with pytest.raises(RuntimeError, match="no such kernel"):
        loss_speed.run(options)


@pytest.mark.parametrize("name", sorted(contenders.PEERS))
def test_peers_run_where_they_are_installed(name: str) -> None:
    device = torch.device("cpu")
    if name == "cce" or contenders.PEERS[name].refuses(device):
        pytest.skip("compiles for minutes" if name == "cce" else "not for this device")
    problem = problems.make(Shape(64, 64, 256), torch.float32, device, 10)
    loss = contenders.PEERS[name].loss(problem)
    loss.backward()
    assert problem.hidden_ND.grad is not None
    assert math.isfinite(loss.item())


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    steps = {name: (lambda name=name: order.append(name)) for name in "ab"}
    seconds = timing.interleaved(steps, 2, torch.device("cpu"))
    assert order == ["a", "b", "a", "b"]
    assert [len(runs) for runs in seconds.values()] == [2, 2]
    assert timing.ratio([1.0, 5.0, 2.0], [4.0]) == 0.5


def test_one_thread_is_timed_by_its_own_time() -> None:
    cpu = torch.device("cpu")
    assert timing.clock(cpu) == ("cpu time" if torch.get_num_threads() == 1 else "elapsed")
    assert timing.clock(torch.device("cuda")) == "elapsed"
    if timing.clock(cpu) == "cpu time":
        assert timing.timed(lambda: time.sleep(0.2), cpu) < 0.1


def test_only_keeps_what_it_names_of_a_group() -> None:
    options = Options(torch.device("cpu"), only=("a", "float32"))
    assert options.keep(["a", "b"]) == ["a"]
    assert options.keep(["float32", "bfloat16"]) == ["float32"]
    assert options.keep(["x", "y"]) == ["x", "y"]
