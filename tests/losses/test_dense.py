"""The reference twin, which is the definition, against published closed forms and finite differences."""

import itertools

import pytest
import torch
from torch import Tensor

from alambique import LossConfig, TopKSignal, distillation_loss
from alambique.losses.config import Tail
from alambique.losses.divergence import DIVERGENCES
from tests.losses.problems import Case, dense, grads, make_case, objectives


def closed_form(z_V: Tensor, p_K: Tensor, ids_K: Tensor, label: int, name: str, tail: Tail) -> tuple[Tensor, Tensor]:
    """Loss and gradient with respect to the logits of one token, as in the papers; p has no empty slot."""
    q_V = torch.softmax(z_V, 0)
    p_V = torch.zeros_like(q_V)
    p_V[ids_K] = p_K
    inside_V = torch.zeros_like(q_V, dtype=torch.bool)
    inside_V[ids_K] = True
    mass, rest = p_K.sum(), 1 - p_K.sum()
    q_in, q_out = q_V[inside_V].sum(), q_V[~inside_V].sum()
    cross = (p_K * (p_K.log() - q_V[ids_K].log())).sum()
    if name == "forward_kl" and tail == "truncate":
        return cross, mass * q_V - p_V
    if name == "forward_kl" and tail == "renormalise":
        return (p_K / mass * ((p_K / mass).log() - q_V[ids_K].log())).sum(), q_V - p_V / mass
    if name == "forward_kl" and tail == "bucket":
        return cross + rest * (rest / q_out).log(), torch.where(inside_V, q_V - p_V, q_V * (1 - rest / q_out))
    if name == "forward_kl" and tail == "residual_to_label":
        p_V[label] += rest
        some = p_V > 0
        return (p_V[some] * (p_V[some] / q_V[some]).log()).sum(), q_V - p_V
    assert (name, tail) == ("reverse_kl", "bucket")
    a_V = torch.where(inside_V, (q_V / p_V.clamp_min(1e-30)).log(), (q_out / rest).log())
    value = (q_V[ids_K] * a_V[ids_K]).sum() + q_out * (q_out / rest).log()
    assert q_in < 1
    return value, q_V * (a_V - value)


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("forward_kl", "truncate"),
        ("forward_kl", "renormalise"),
        ("forward_kl", "bucket"),
        ("forward_kl", "residual_to_label"),
        ("reverse_kl", "bucket"),
    ],
)
def test_closed_forms(name: str, tail: Tail) -> None:
    case = make_case(hole=False, pad=0)
    signal = case.signal
    assert isinstance(signal, TopKSignal)
    _, (d_hidden, _, _) = grads(case, LossConfig(divergence=name, tail=tail), "dense", bias=False, scale=1.0)
    total, expected = 0.0, torch.zeros_like(case.hidden)
    for row in range(7):
        z_V = case.weight @ case.hidden[row]
        value, gradient = closed_form(
            z_V, signal.logprobs_NK[row].exp(), signal.ids_NK[row].long(), int(case.labels[row]), name, tail
        )
        share = case.weights[row] / case.weights.sum()
        total += float(share * value)
        expected[row] = share * gradient @ case.weight
    out, _ = grads(case, LossConfig(divergence=name, tail=tail), "dense", bias=False)
    assert out.loss.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(d_hidden, expected, rtol=1e-9, atol=1e-12)


def test_temperature_softens_both_sides_and_squares_before_the_gradient() -> None:
    case = dense(make_case(pad=0))
    temperature = 3.0
    config = LossConfig(temperature=temperature)
    out, (d_hidden, _, _) = grads(case, config, "dense", bias=False, scale=1.0, weights_N=None)
    z_NV = case.hidden @ case.weight.t()
    p_NV = torch.softmax(case.signal.logprobs_NV / temperature, 1)
    q_NV = torch.softmax(z_NV / temperature, 1)
    kl = (p_NV * (p_NV / q_NV).log()).sum(1).mean()
    assert out.kd.item() == pytest.approx(kl.item(), rel=1e-12)
    assert out.loss.item() == pytest.approx(temperature**2 * kl.item(), rel=1e-12)
    torch.testing.assert_close(d_hidden, temperature * (q_NV - p_NV) @ case.weight / 7, rtol=1e-9, atol=1e-12)


def test_at_a_temperature_the_teachers_tail_has_the_shape_of_the_students() -> None:
    """Full tempered KL against a teacher whose unseen tail follows the student's, seen through the bucket."""
    case = make_case(pad=0, hole=False)
    signal, temperature = case.signal, 2.0
    assert isinstance(signal, TopKSignal)
    out, _ = grads(case, LossConfig(temperature=temperature), "dense", bias=False, weights_N=None)
    total = 0.0
    for row in range(7):
        q_V = torch.softmax(case.weight @ case.hidden[row], 0)
        ids = signal.ids_NK[row].long()
        outside = torch.ones_like(q_V, dtype=torch.bool)
        outside[ids] = False
        p_V = torch.where(outside, q_V / q_V[outside].sum() * signal.tail_mass_N[row], 0.0)
        p_V[ids] = signal.logprobs_NK[row].exp()
        soft_p_V, soft_q_V = (x_V ** (1 / temperature) / (x_V ** (1 / temperature)).sum() for x_V in (p_V, q_V))
        total += float((soft_p_V * (soft_p_V / soft_q_V).log()).sum()) / 7
    assert out.kd.item() == pytest.approx(total, rel=1e-10)


def assert_gradient(case: Case, config: LossConfig, bias: bool, impl: str) -> None:
    """The gradient of ``impl`` against finite differences in float64."""

    def loss(hidden: Tensor, weight: Tensor, *bias_: Tensor) -> Tensor:
        return distillation_loss(
            hidden,
            weight,
            case.signal,
            labels_N=case.labels,
            weights_N=case.weights,
            head_bias_V=bias_[0] if bias_ else None,
            vocab_size=case.vocab,
            config=config,
            impl=impl,
        ).loss

    leaves = [x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)[: 2 + bias]]
    assert torch.autograd.gradcheck(loss, leaves, atol=1e-7, rtol=1e-6, fast_mode=True)


# Temperature, weight of the cross-entropy, soft-cap, bias, a masked row.
OPTIONS = list(itertools.product((1.0, 2.0), (0.0, 0.4), (None, 2.0), (False, True), (False, True)))


def option(name: str, tail: Tail, temperature: float, ce: float, cap: float | None) -> LossConfig:
    """Every setting that has a gradient."""
    return LossConfig(
        divergence=name,
        beta=0.3,
        tail=tail,
        temperature=temperature,
        kd_weight=0.7,
        ce_weight=ce,
        z_loss=ce / 10,
        logit_softcap=cap,
        logit_scale=0.7,
        chunk_budget_mib=1e-4,
    )


@pytest.mark.parametrize("impl", ["dense", "recompute"])
@pytest.mark.parametrize(("name", "tail"), objectives())
def test_finite_differences_of_every_objective_and_option(name: str, tail: Tail, impl: str) -> None:
    for temperature, ce, cap, bias, masked in OPTIONS:
        if tail == "sampled" and temperature != 1:
            continue
        # At a temperature the target takes the shape of the student's tail, as a constant; of one column it is one.
        case = make_case(n=3, d=2, v=7, k=3 if temperature == 1 else 6, pad=1, spread=1.0, hole=temperature == 1)
        if masked:
            case.labels[1] = -100
        assert_gradient(case, option(name, tail, temperature, ce, cap), bias, impl)


@pytest.mark.parametrize("impl", ["dense", "recompute"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_finite_differences_with_a_dense_signal(name: str, impl: str) -> None:
    for temperature, ce, cap, bias, masked in OPTIONS:
        case = make_case(n=3, d=2, v=7, k=3, pad=1, spread=1.0)
        if masked:
            case.labels[1] = -100
        assert_gradient(dense(case), option(name, "bucket", temperature, ce, cap), bias, impl)


def test_diagnostics() -> None:
    case = make_case(n=1, pad=0, hole=False)
    signal = case.signal
    assert isinstance(signal, TopKSignal)
    config = LossConfig(kd_weight=0.6, ce_weight=0.3, z_loss=0.01, temperature=1.0)
    out, _ = grads(case, config, "dense", bias=False)
    z_V = case.weight @ case.hidden[0]
    q_V, ids = torch.softmax(z_V, 0), signal.ids_NK[0].long()
    classes = torch.cat([q_V[ids], 1 - q_V[ids].sum(0, keepdim=True)])
    assert out.ce is not None
    assert out.ce.item() == pytest.approx(-q_V[case.labels[0]].log().item(), rel=1e-12)
    assert out.student_mass.item() == pytest.approx(q_V[ids].sum().item(), rel=1e-12)
    assert out.entropy.item() == pytest.approx(-(classes * classes.log()).sum().item(), rel=1e-10)
    expected = 0.6 * out.kd + 0.3 * out.ce + 0.01 * z_V.logsumexp(0) ** 2
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-12)
