"""Two processes equal one: a head sharded over the vocabulary, and one sharded by FSDP2 and tied to the embedding."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alambique import distillation_loss
from tests.losses.parallel_worker import CONFIGS, Tied, problem
from tests.losses.problems import grads

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
@pytest.mark.parametrize("impl", ["fused", "recompute", "tiled", "dense"])
def test_fsdp_with_a_tied_head_equals_one_process(impl: str, folder: Path) -> None:
    case = problem()
    model = Tied(case)
    out = distillation_loss(model(torch.arange(8)), model.table, case.signal, vocab_size=case.vocab, impl="dense")
    out.loss.backward()
    parts = [load_file(folder / f"fsdp.{rank}.safetensors") for rank in (0, 1)]
    total = parts[0][f"{impl}.loss"] + parts[1][f"{impl}.loss"]
    torch.testing.assert_close(total, out.loss.detach(), rtol=1e-11, atol=1e-13)
    for part in parts:
        torch.testing.assert_close(part[f"{impl}.table"], model.table.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(part[f"{impl}.layer"], model.layer.weight.grad, rtol=1e-10, atol=1e-12)
        assert part[f"{impl}.gathers"] == 1  # the head, once
