"""The lines that docs/loss.md offers for one's own loop run as they stand."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import torch

from alambique.losses import divergence
from alambique.losses.config import Tail
from alambique.losses.distillation import PATHS
from tests.losses.problems import make_case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "loss.md"


def test_the_lines_for_ones_own_loop_run() -> None:
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert match is not None
    case = make_case(n=6, d=5, pad=0)
    batch = SimpleNamespace(
        input_ids=torch.zeros(2, 3, dtype=torch.int64),
        ids=case.signal.ids_NK.view(2, 3, -1),
        logprobs=case.signal.logprobs_NK.view(2, 3, -1),
        tail_mass=case.signal.tail_mass_N.view(2, 3),
        next_ids=case.labels.view(2, 3),
    )
    lm_head = torch.nn.Linear(5, case.vocab, bias=False)
    states = case.hidden.float().view(2, 3, 5).requires_grad_()
    names = {
        "backbone": lambda ids: states,
        "lm_head": lm_head,
        "batch": batch,
        "optimizer": torch.optim.SGD(lm_head.parameters(), lr=0.1),
    }
    before = lm_head.weight.detach().clone()
    exec(match[1], names)
    assert states.grad is not None
    assert not torch.equal(lm_head.weight, before)


def test_the_page_names_every_path_divergence_and_tail() -> None:
    text = PAGE.read_text()
    for name in (*PATHS, *divergence.names(), *get_args(Tail)):
        assert f"`{name}`" in text, name
