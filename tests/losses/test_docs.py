"""The lines that README.md and docs/loss.md offer for one's own loop run as they stand."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from alambique import LossConfig, distillation_loss
from alambique.losses.config import Tail
from alambique.losses.distillation import PATHS
from alambique.losses.divergence import DIVERGENCES
from tests.losses.problems import make_case

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "loss.md"


def run_block(page: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Execute the page's only block of Python with ``names`` around it; return what it leaves."""
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    exec(block, names)
    return names


def test_the_lines_of_the_page_run() -> None:
    case = make_case(n=6, d=5, pad=0)
    case.labels[4] = -100
    batch = SimpleNamespace(
        input_ids=torch.zeros(2, 3, dtype=torch.int64),
        ids=case.signal.ids_NK.view(2, 3, -1),
        logprobs=case.signal.logprobs_NK.view(2, 3, -1),
        tail_mass=case.signal.tail_mass_N.view(2, 3),
        next_ids=case.labels.view(2, 3),
    )
    lm_head = torch.nn.Linear(5, case.vocab, bias=False)
    before = lm_head.weight.detach().clone().requires_grad_()
    states = case.hidden.float().requires_grad_()
    left = run_block(
        PAGE,
        {
            "backbone": lambda ids: states.view(*ids.shape, 5),
            "lm_head": lm_head,
            "batch": batch,
            "optimizer": torch.optim.SGD(lm_head.parameters(), lr=0.1),
        },
    )
    expected = distillation_loss(
        states.detach(), before, case.signal, labels_N=case.labels, config=left["config"], impl="dense"
    )
    expected.loss.backward()
    torch.testing.assert_close(left["out"].loss, expected.loss)
    assert before.grad is not None
    torch.testing.assert_close(lm_head.weight, before - 0.1 * before.grad)
    assert states.grad is not None
    assert states.grad[4].abs().max() == 0
    assert states.grad[5].abs().max() > 0


def test_the_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from alambique import TeacherCache  # here: a machine that only tests the loss has none of what a cache needs
    from tests.cache import fake_teacher

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "artifacts/teacher/smollm2_135m"
    fake_teacher.run(folder, tmp_path / "store", keep="top_k_and_draws", top_k=7, draws=4)
    rows = [5, 0]
    mask_N = fake_teacher.make_rows().loss_mask_RS[rows].flatten()
    hidden_ND = torch.randn(int(mask_N.sum()), 5, requires_grad=True)
    lm_head = torch.nn.Linear(5, fake_teacher.VOCAB, bias=False)
    given = {"rows": rows, "mask_N": mask_N, "hidden_ND": hidden_ND, "lm_head": lm_head}
    left = run_block(ROOT / "README.md", given)
    signal = TeacherCache.open(folder).read(rows).flatten()[mask_N]
    expected = distillation_loss(hidden_ND, lm_head.weight, signal, config=LossConfig(tail="sampled"), impl="dense")
    torch.testing.assert_close(left["out"].loss, expected.loss)
    for leaf, gradient in zip(
        (hidden_ND, lm_head.weight), torch.autograd.grad(expected.loss, (hidden_ND, lm_head.weight)), strict=True
    ):
        torch.testing.assert_close(leaf.grad, gradient)


def test_the_page_names_every_path_divergence_and_tail() -> None:
    text = PAGE.read_text()
    for name in (*PATHS, *DIVERGENCES, *get_args(Tail)):
        assert f"`{name}`" in text, name
