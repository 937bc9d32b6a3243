"""The contract of a divergence, held by every entry of ``DIVERGENCES``: a new one is tested by being there."""

import pytest
import torch

from alambique.losses.divergence import DIVERGENCES

NAMES = sorted(DIVERGENCES)
BETA = 0.3


def distributions(spread: float = 4.0, classes: int = 6, rows: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(2, rows, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * spread
    log_p, log_q = torch.log_softmax(logits, -1)
    return log_p, log_q


def test_all_are_found() -> None:
    assert NAMES == ["forward_kl", "jsd", "reverse_kl", "tvd"]


@pytest.mark.parametrize("name", NAMES)
def test_slope_is_the_derivative_of_term(name: str) -> None:
    found = DIVERGENCES[name]
    log_p, log_q = distributions()
    log_q.requires_grad_()
    found.term(log_p, log_q, BETA).sum().backward()
    torch.testing.assert_close(found.slope(log_p, log_q.detach(), BETA), log_q.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_never_negative_and_zero_only_when_equal(name: str) -> None:
    found = DIVERGENCES[name]
    log_p, log_q = distributions()
    assert (found.term(log_p, log_q, BETA).sum(-1) > 1e-6).all()
    torch.testing.assert_close(
        found.term(log_p, log_p, BETA).sum(-1), torch.zeros(50, dtype=torch.float64), atol=1e-14, rtol=0
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_class_without_teacher_mass(name: str) -> None:
    found = DIVERGENCES[name]
    value = found.term(torch.tensor(-torch.inf), torch.tensor(-1.0), BETA)
    assert value.isinf() if found.infinite_without_teacher else value.isfinite()


@pytest.mark.parametrize("name", NAMES)
def test_an_absent_class_costs_nothing(name: str) -> None:
    found = DIVERGENCES[name]
    absent = torch.tensor(-torch.inf), torch.tensor(-1e30)
    assert found.term(*absent, BETA).item() == 0
    assert found.slope(*absent, BETA).item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_alone(name: str) -> None:
    found = DIVERGENCES[name]
    log_p, log_q = distributions()
    copies = log_p.clone(), log_q.clone()
    found.term(log_p, log_q, BETA)
    found.slope(log_p, log_q, BETA)
    assert torch.equal(log_p, copies[0])
    assert torch.equal(log_q, copies[1])


def test_jsd_approaches_the_kl_divergences() -> None:
    log_p, log_q = distributions(spread=1.0)
    jsd, forward, reverse = (DIVERGENCES[name].term for name in ("jsd", "forward_kl", "reverse_kl"))
    torch.testing.assert_close(
        jsd(log_p, log_q, 1e-7).sum(-1) / 1e-7, forward(log_p, log_q, 0.5).sum(-1), rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(
        jsd(log_p, log_q, 1 - 1e-7).sum(-1) / 1e-7, reverse(log_p, log_q, 0.5).sum(-1), rtol=1e-3, atol=1e-3
    )
