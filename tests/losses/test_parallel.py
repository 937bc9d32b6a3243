"""Two processes equal one: a head sharded over the vocabulary, and one sharded by FSDP2 and tied to the embedding."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alambique import LossConfig, distillation_loss
from tests.losses.problems import grads

pytest.importorskip("safetensors", reason="a machine that only tests kernels may lack it")
from safetensors.torch import load_file

from tests.losses.parallel_worker import CONFIGS, FILTER, Tied, problem

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("parallel")
    command = [sys.executable, "-m", "tests.losses.parallel_worker"]
    workers = [
        subprocess.Popen([*command, str(rank), str(out)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    for worker in workers:
        _, complaint = worker.communicate(timeout=200)
        assert worker.returncode == 0, complaint
    return out


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["fused", "recompute"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_vocabulary_sharded_head_equals_a_whole_one(name: str, impl: str, folder: Path) -> None:
    out, gradients = grads(problem(), CONFIGS[name], "dense")
    parts = [load_file(folder / f"vocabulary.{rank}.safetensors") for rank in (0, 1)]
    for part in parts:
        for i, expected in enumerate([out.loss.detach(), out.student_mass, gradients[0]]):
            torch.testing.assert_close(part[f"{name}.{impl}.{i}"], expected, rtol=1e-10, atol=1e-12)
    for i, expected in enumerate(gradients[1:], start=3):
        whole = torch.cat([part[f"{name}.{impl}.{i}"] for part in parts])
        torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks"), [("plain", 1), ("tempered", 3)])
def test_a_vocabulary_sharded_head_sends_two_small_tensors_per_chunk_and_its_hidden_gradient(
    name: str, chunks: int, folder: Path
) -> None:
    sent = load_file(folder / "vocabulary.0.safetensors")
    assert sent[f"{name}.fused.sent"].tolist() == [0, 0, 2 * chunks + 1]
    assert sent[f"{name}.recompute.sent"].tolist() == [0, 0, 4 * chunks + 1]  # and again in the backward pass


@pytest.mark.slow
def test_a_sharded_head_filters_and_reports_as_a_whole(folder: Path) -> None:
    _, gradients = grads(problem(), LossConfig(), "dense")
    parts = [load_file(folder / f"vocabulary.{rank}.safetensors") for rank in (0, 1)]
    assert parts[0]["filter.error"] == parts[1]["filter.error"]
    assert 0 < parts[0]["filter.error"] <= FILTER.gradient_filter
    for part in parts:
        error = (part["filter.hidden"] - gradients[0]).norm() / gradients[0].norm()
        assert 0 < error <= FILTER.gradient_filter


def assert_equals_one_process(parts: list[dict[str, torch.Tensor]], impl: str) -> None:
    case = problem()
    model = Tied(case)
    out = distillation_loss(model(torch.arange(8)), model.table, case.signal, vocab_size=case.vocab, impl="dense")
    out.loss.backward()
    total = parts[0][f"{impl}.loss"] + parts[1][f"{impl}.loss"]
    torch.testing.assert_close(total, out.loss.detach(), rtol=1e-11, atol=1e-13)
    for part in parts:
        torch.testing.assert_close(part[f"{impl}.table"], model.table.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(part[f"{impl}.layer"], model.layer.weight.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["fused", "recompute", "tiled", "dense"])
def test_fsdp_with_a_tied_head_equals_one_process(impl: str, folder: Path) -> None:
    parts = [load_file(folder / f"fsdp.{rank}.safetensors") for rank in (0, 1)]
    assert_equals_one_process(parts, impl)
    for part in parts:
        assert part[f"{impl}.sent"].tolist() == [1, 0, 0]  # the head, once


@pytest.mark.slow
def test_ddp_with_a_tied_head_equals_one_process(folder: Path) -> None:
    assert_equals_one_process([load_file(folder / f"replicated.{rank}.safetensors") for rank in (0, 1)], "fused")


@pytest.mark.slow
def test_fsdp_gathers_and_reduces_once_for_two_micro_batches(folder: Path) -> None:
    """Head, tied embedding and layer are one group of FSDP2, which goes out once and comes in once."""
    parts = [load_file(folder / f"accumulated.{rank}.safetensors") for rank in (0, 1)]
    assert_equals_one_process(parts, "fused")
    for part in parts:
        assert part["sent"].tolist() == [1, 1, 0]
