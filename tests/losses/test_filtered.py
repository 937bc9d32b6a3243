"""The gradient filter: what is dropped is bounded, reported, and stood in for by one direction."""

from dataclasses import replace

import pytest
import torch

from alambique import LossConfig, distillation_loss
from alambique.losses import filtered
from alambique.losses.filtered import hidden_gradient, select
from tests.losses.problems import Case, grads, make_case, top_k


def tailed(n: int = 96, d: int = 24, v: int = 900, k: int = 40) -> Case:
    """Logits as uneven as a language model's: a few tokens are frequent, most are rare everywhere."""
    case = make_case(n=n, d=d, v=v, k=k, pad=60, spread=1.0)
    rarity = torch.linspace(0, 14, v + 60, dtype=torch.float64)
    signal = top_k(torch.log_softmax(torch.randn(n, v, dtype=torch.float64) * 2 - rarity[:v], -1), k)
    return replace(case, hidden=case.hidden, weight=case.weight * 0.3, bias=-rarity, signal=signal)


@pytest.mark.parametrize("tolerance", [0.3, 0.03, 0.003])
def test_the_dropped_part_is_bounded_and_as_large_as_may_be(tolerance: float) -> None:
    dz = torch.randn(16, 200, dtype=torch.float64) * torch.logspace(0, -6, 200, dtype=torch.float64)
    left = dz.clone()
    found = select(left, tolerance)
    dropped = torch.ones(200, dtype=torch.bool)
    dropped[found.ids_X] = False
    assert torch.equal(found.dz_CX, dz[:, found.ids_X])
    assert torch.equal(left, dz * dropped)
    assert left.norm() <= tolerance * dz.norm()
    assert (found.dropped_energy / found.energy).sqrt().item() == pytest.approx((left.norm() / dz.norm()).item())
    least = found.dz_CX.norm(dim=0).min()
    assert (left.norm() ** 2 + least**2).sqrt() > tolerance * dz.norm()  # one more would have been too many


def test_what_is_dropped_in_one_direction_is_put_back_exactly() -> None:
    weight = torch.randn(50, 7, dtype=torch.float64)
    share = torch.linspace(1, 2, 40, dtype=torch.float64)
    dz = torch.zeros(5, 50, dtype=torch.float64)
    dz[:, :10] = torch.randn(5, 10, dtype=torch.float64)
    dz[:, 10:] = 1e-4 * torch.arange(1, 6)[:, None] * share  # rows differ by a factor: rank one
    expected, out = dz @ weight, torch.empty(5, 7, dtype=torch.float64)
    found = select(dz.clone(), 0.01)
    assert found.ids_X.max() < 10
    hidden_gradient(found, weight, out)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("labels", [False, True])
def test_gradients_within_the_tolerance_and_its_report(labels: bool) -> None:
    case = tailed()
    config = LossConfig(ce_weight=0.2 if labels else 0.0)
    options = {} if labels else {"labels_N": None}
    exact, expected = grads(case, config, "fused", **options)
    out, gradients = grads(case, config.model_copy(update={"gradient_filter": 0.003}), "fused", **options)
    assert out.loss.item() == exact.loss.item()
    assert out.filter_error is not None
    assert 0.001 < out.filter_error.item() <= 0.003
    for mine, truth in zip(gradients[:2], expected[:2], strict=True):
        assert 1e-6 < ((mine - truth).norm() / truth.norm()).item() <= 0.01
    assert torch.equal(gradients[2], expected[2])  # the bias costs nothing: it is exact
    untouched = (gradients[1] == 0).all(1)[: case.vocab].double().mean().item()
    assert untouched > 0.3  # columns that were skipped


def test_hardly_any_tolerance_changes_hardly_anything() -> None:
    case = tailed(n=20)
    _, expected = grads(case, LossConfig(), "fused")
    out, gradients = grads(case, LossConfig(gradient_filter=1e-9), "fused")
    assert out.impl == "fused"
    for mine, truth in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-6, atol=1e-9)


def test_nothing_to_learn_and_nothing_asked() -> None:
    case = make_case(pad=0)
    signal = top_k(torch.log_softmax(case.hidden @ case.weight.t(), -1), 4)
    _, gradients = grads(replace(case, signal=signal), LossConfig(gradient_filter=0.01), "auto", bias=False)
    assert all(gradient.abs().max() < 1e-12 for gradient in gradients)
    masked = torch.full_like(case.labels, -100)
    out, gradients = grads(replace(case, labels=masked), LossConfig(gradient_filter=0.01), "auto")
    assert all(gradient.abs().max() == 0 for gradient in gradients)
    assert out.filter_error is None
    with torch.no_grad():
        quiet = distillation_loss(case.hidden, case.weight, case.signal, config=LossConfig(gradient_filter=0.01))
    assert quiet.filter_error is None


@pytest.mark.parametrize("native", [True, False], ids=["native", "emulated"])
def test_low_precision_and_a_buffer(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtered, "multiplies", lambda dtype, device_type: native)
    case = tailed()
    _, expected = grads(case, LossConfig(), "dense", scale=1.0)
    buffer = torch.ones_like(case.weight, dtype=torch.float32)
    low = case.to(torch.bfloat16)
    _, gradients = grads(low, LossConfig(gradient_filter=0.003), "fused", scale=1.0, weight_grad_VD=buffer)
    assert ((gradients[0].double() - expected[0]).norm() / expected[0].norm()).item() < 0.02  # inputs are rounded too
    assert ((buffer.double() - 1 - expected[1]).norm() / expected[1].norm()).item() < 0.02
