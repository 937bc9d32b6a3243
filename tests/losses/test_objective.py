"""Every path against the reference twin, values and gradients, for every option."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from alambique import DenseSignal, LossConfig, TopKSignal, distillation_loss
from alambique.losses import tiled
from alambique.losses.config import Tail
from alambique.losses.distillation import PATHS
from alambique.losses.divergence import DIVERGENCES
from tests.losses.problems import Case, assert_same, dense, grads, make_case, objectives, top_k

FLOAT64 = sorted(set(PATHS) - {"dense", "triton"})  # tests/losses/test_kernelled.py holds the kernels to the same suite
ONE_BUFFER = ["fused", "recompute", "tiled"]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "_TILE_TOKENS", 3)


# Bytes enough for two or three rows of logits, so that every path takes several chunks or tiles.
SMALL = 26 * 4 * 2.5 / 2**20


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("impl", FLOAT64)
@pytest.mark.parametrize(("name", "tail"), objectives())
def test_top_k_equals_the_twin(name: str, tail: Tail, impl: str) -> None:
    case = make_case()
    case.labels[2] = -100
    for temperature, ce, cap, bias in itertools.product((1.0, 2.5), (0.0, 0.3), (None, 3.0), (False, True)):
        if tail == "sampled" and temperature != 1:
            continue
        config = LossConfig(
            divergence=name,
            tail=tail,
            beta=0.3,
            temperature=temperature,
            kd_weight=0.7,
            ce_weight=ce,
            z_loss=ce / 100,
            logit_softcap=cap,
            logit_scale=0.8 if cap else 1.0,
            chunk_budget_mib=SMALL,
        )
        assert_same(grads(case, config, impl, bias=bias), grads(case, config, "dense", bias=bias))


@pytest.mark.parametrize("impl", sorted(set(FLOAT64) - {"tiled"}))
@pytest.mark.parametrize("name", DIVERGENCES)
def test_dense_signals_equal_the_twin(name: str, impl: str) -> None:
    case = dense(make_case())
    for temperature, ce, cap, states in itertools.product((1.0, 2.5), (0.0, 0.3), (None, 3.0), (False, True)):
        config = LossConfig(
            divergence=name,
            temperature=temperature,
            ce_weight=ce,
            z_loss=ce / 100,
            logit_softcap=cap,
            chunk_budget_mib=8 * SMALL,
        )
        whole = grads(case, config, "dense")
        assert_same(grads(replace(case, signal=case.teacher) if states else case, config, impl), whole)


def test_a_live_teacher_has_bias_soft_cap_and_scale_too() -> None:
    case = make_case()
    bias = torch.randn(case.vocab, dtype=torch.float64)
    live = replace(case.teacher, head_bias_V=bias, logit_softcap=5.0, logit_scale=0.5)
    logits = 5 * torch.tanh(0.5 * (live.hidden_ND @ live.head_weight_VD.t() + bias) / 5)
    by_hand = replace(dense(case), signal=type(dense(case).signal)(torch.log_softmax(logits, -1)))
    assert_same(grads(replace(case, signal=live), LossConfig(), "fused"), grads(by_hand, LossConfig(), "dense"))


@pytest.mark.parametrize("impl", FLOAT64)
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_all_entries_kept_equals_the_dense_signal(name: str, temperature: float, impl: str) -> None:
    case = dense(make_case())
    config = LossConfig(divergence=name, temperature=temperature, ce_weight=0.2)
    kept = replace(case, signal=top_k(case.signal.logprobs_NV, case.vocab))
    assert_same(grads(kept, config, impl), grads(case, config, "dense"))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("impl", FLOAT64)
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("k", [1, 4, 23, None])
def test_a_student_equal_to_the_teacher_has_nothing_to_learn(
    name: str, temperature: float, k: int | None, impl: str
) -> None:
    if k is None and impl == "tiled":
        pytest.skip("no dense signals")
    case = make_case(pad=0)
    logprobs = torch.log_softmax(case.hidden @ case.weight.t(), -1)
    config = LossConfig(divergence=name, temperature=temperature, chunk_budget_mib=SMALL)
    signal = DenseSignal(logprobs) if k is None else top_k(logprobs, k)
    out, gradients = grads(replace(case, signal=signal), config, impl, bias=False)
    assert abs(out.loss.item()) < 1e-12
    if name != "tvd":  # whose slope jumps there, so that its sign is one of rounding
        assert all(gradient.abs().max() < 1e-12 for gradient in gradients)


@pytest.mark.parametrize("impl", FLOAT64)
def test_chunks_make_no_difference(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(n=37, v=101, k=9)
    config = LossConfig(ce_weight=0.2, temperature=2.0, logit_softcap=4.0)
    whole = grads(case, config, impl)
    for tokens, budget in ((1, 1e-4), (5, 0.003), (64, 0.02)):
        monkeypatch.setattr(tiled, "_TILE_TOKENS", tokens)
        assert_same(grads(case, config.model_copy(update={"chunk_budget_mib": budget}), impl), whole, 1e-12)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 9), d=st.integers(1, 6), v=st.integers(1, 40), k=st.integers(1, 40), pad=st.integers(0, 70),
    budget=st.floats(1e-4, 0.01), impl=st.sampled_from(FLOAT64), temperature=st.sampled_from([1.0, 0.5]),
)  # fmt: skip
def test_odd_shapes(n: int, d: int, v: int, k: int, pad: int, budget: float, impl: str, temperature: float) -> None:
    case = make_case(n=n, d=d, v=v, k=min(k, v), pad=pad)
    config = LossConfig(ce_weight=0.5, chunk_budget_mib=budget, temperature=temperature)
    assert_same(grads(case, config, impl), grads(case, config, "dense"))


@pytest.mark.parametrize("impl", FLOAT64)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_of_300(sign: float, impl: str) -> None:
    """The student is sure, and right or wrong: in float32 its other probabilities underflow, gradients must not."""
    case = make_case(n=4, d=3, v=16, k=3, pad=0, hole=False)
    hidden = torch.zeros(4, 3, dtype=torch.float64)
    weight = torch.zeros(16, 3, dtype=torch.float64)
    hidden[:, 0], weight[:, 0] = 1.0, -sign * 300.0
    for row in range(4):  # +300 on the teacher's best token, or on all the others
        hidden[row, 0] = 1.0
    weight[case.signal.ids_NK[0, 0].long(), 0] = sign * 300.0
    signal = TopKSignal(
        case.signal.ids_NK[:1].expand(4, -1),
        case.signal.logprobs_NK[:1].expand(4, -1),
        case.signal.tail_mass_N[:1].expand(4),
    )
    case = replace(case, hidden=hidden, weight=weight, signal=signal)
    exact = grads(case, LossConfig(ce_weight=0.1), "dense", bias=False)
    out, gradients = grads(case.to(torch.float32), LossConfig(ce_weight=0.1), impl, bias=False)
    torch.testing.assert_close(out.loss, exact[0].loss, rtol=1e-5, atol=0, check_dtype=False)
    for mine, theirs in zip(gradients, exact[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, check_dtype=False)
    assert gradients[0].abs().max() > 1


@pytest.mark.parametrize("impl", sorted({*FLOAT64, "dense"}))
@pytest.mark.parametrize("signal", ["top_k", "dense"])
def test_a_large_common_offset_costs_no_digits(signal: str, impl: str) -> None:
    """Logits that float32 holds exactly, with and without 4,096 added to all of them."""
    if (signal, impl) == ("dense", "tiled"):
        pytest.skip("no dense signals")
    case = make_case() if signal == "top_k" else dense(make_case())
    case = replace(case, hidden=case.hidden.round(), weight=(case.weight * 16).round() / 16).to(torch.float32)
    config = LossConfig(ce_weight=0.3, temperature=2.0)
    near = grads(replace(case, bias=torch.zeros_like(case.bias)), config, impl)
    far = grads(replace(case, bias=torch.full_like(case.bias, 4096.0)), config, impl)
    torch.testing.assert_close(far[0].loss, near[0].loss, rtol=1e-6, atol=0)
    for a, b in zip(far[1], near[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", sorted({*FLOAT64, "dense"}))
def test_everything_masked_gives_zero(impl: str) -> None:
    case = make_case()
    out, gradients = grads(replace(case, labels=torch.full_like(case.labels, -100)), LossConfig(ce_weight=0.5), impl)
    assert out.loss.item() == 0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


@pytest.mark.parametrize("impl", sorted({*FLOAT64, "dense"}))
def test_masked_rows_are_as_if_absent(impl: str) -> None:
    case = make_case(n=8)
    keep = torch.tensor([0, 3, 4, 7])
    labels, weights = torch.full_like(case.labels, -100), case.weights.clone()
    labels[keep] = case.labels[keep]
    weights[3] = 0.0
    keep = torch.tensor([0, 4, 7])
    few = replace(
        case, hidden=case.hidden[keep], signal=case.signal[keep], labels=case.labels[keep], weights=case.weights[keep]
    )
    out, gradients = grads(replace(case, labels=labels, weights=weights), LossConfig(ce_weight=0.5), impl)
    expected = grads(few, LossConfig(ce_weight=0.5), impl)
    assert_same((out, [gradients[0][keep], *gradients[1:]]), expected)
    assert gradients[0][[1, 2, 3, 5, 6]].abs().max() == 0


@pytest.mark.parametrize("impl", sorted({*FLOAT64, "dense"}))
def test_padded_columns_take_no_mass_and_no_gradient(impl: str) -> None:
    case = make_case(pad=70)
    cut = replace(case, weight=case.weight[: case.vocab], bias=case.bias[: case.vocab])
    out, gradients = grads(case, LossConfig(ce_weight=0.5), impl)
    expected = grads(cut, LossConfig(ce_weight=0.5), impl)
    assert_same((out, [gradients[0], *(gradient[: case.vocab] for gradient in gradients[1:])]), expected)
    assert all(gradient[case.vocab :].abs().max() == 0 for gradient in gradients[1:])


@pytest.mark.parametrize("impl", sorted({*FLOAT64, "dense"}))
def test_accumulation_with_a_denominator_equals_the_full_batch(impl: str) -> None:
    case = make_case(n=9)
    case.labels[1] = -100
    config = LossConfig(ce_weight=0.3)
    whole, expected = grads(case, config, impl)
    total = float(case.weights.sum() - case.weights[1])
    sums = [torch.zeros_like(x) for x in expected[1:]]
    loss, hidden = 0.0, []
    for rows in (slice(0, 2), slice(2, 3), slice(3, 9)):
        part = replace(
            case,
            hidden=case.hidden[rows],
            signal=case.signal[rows],
            labels=case.labels[rows],
            weights=case.weights[rows],
        )
        out, gradients = grads(part, config, impl, denominator=total)
        loss += out.loss.item()
        hidden.append(gradients[0])
        sums = [a + b for a, b in zip(sums, gradients[1:], strict=True)]
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12)
    for a, b in zip([torch.cat(hidden), *sums], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("impl", FLOAT64)
def test_a_buffer_takes_the_gradient_of_the_head(impl: str) -> None:
    case = make_case()
    _, expected = grads(case, LossConfig(), impl, scale=1.0)
    before = torch.randn_like(case.weight)
    buffer = before.clone()
    _, gradients = grads(case, LossConfig(chunk_budget_mib=SMALL), impl, scale=1.0, weight_grad_VD=buffer)
    torch.testing.assert_close(buffer - before, expected[1], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(gradients[0], expected[0], rtol=1e-11, atol=1e-12)
    assert gradients[1].abs().max() == 0  # autograd had none to give


@pytest.mark.parametrize("impl", FLOAT64)
def test_a_buffer_is_right_or_refused_when_the_loss_is_scaled(impl: str) -> None:
    case = make_case()
    buffer = torch.zeros_like(case.weight)
    if impl == "fused":
        with pytest.raises(ValueError, match=r"weight_grad_VD was filled for a loss that is not scaled.*denominator="):
            grads(case, LossConfig(), impl, scale=2.0, weight_grad_VD=buffer)
    else:
        grads(case, LossConfig(), impl, scale=2.0, weight_grad_VD=buffer)
        torch.testing.assert_close(buffer, grads(case, LossConfig(), impl, scale=2.0)[1][1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("impl", sorted({*FLOAT64, "dense"}))
def test_a_tied_embedding_gets_both_gradients(impl: str) -> None:
    case = make_case(pad=0)
    ids = torch.randint(case.vocab, (7,))
    table = case.weight.clone().requires_grad_()
    out = distillation_loss(table[ids] * 0.5, table, case.signal, impl=impl)
    out.loss.backward()
    apart = [case.weight.clone().requires_grad_(), case.weight.clone().requires_grad_()]
    distillation_loss(apart[0][ids] * 0.5, apart[1], case.signal, impl="dense").loss.backward()
    torch.testing.assert_close(table.grad, apart[0].grad + apart[1].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("impl", FLOAT64)
def test_a_frozen_head_gets_no_gradient_and_a_frozen_student_no_work(impl: str) -> None:
    case = make_case()
    _, expected = grads(case, LossConfig(), impl, scale=1.0, bias=False, labels_N=None, weights_N=None)
    hidden = case.hidden.clone().requires_grad_()
    out = distillation_loss(hidden, case.weight, case.signal, vocab_size=case.vocab, impl=impl)
    out.loss.backward()
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        quiet = distillation_loss(hidden, case.weight, case.signal, vocab_size=case.vocab, impl=impl)
    assert not quiet.loss.requires_grad
    assert quiet.loss.item() == pytest.approx(out.loss.item(), rel=1e-12)


PRODUCTS = {"fused": 3, "forward_chunked": 3, "recompute": 4, "tiled": 4}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("impl", FLOAT64)
def test_products(impl: str) -> None:
    """What a path multiplies: docs/loss.md counts it; a frozen head spares the product that makes its gradient."""
    case = make_case(pad=0)
    config, one = LossConfig(ce_weight=0.3, chunk_budget_mib=SMALL), 2 * case.hidden.numel() * case.vocab
    for frozen, expected in ((False, PRODUCTS[impl]), (True, PRODUCTS[impl] - 1)):
        weight = case.weight.clone().requires_grad_(not frozen)
        with FlopCounterMode(display=False) as counter:
            out = distillation_loss(
                case.hidden.clone().requires_grad_(),
                weight,
                case.signal,
                labels_N=case.labels,
                config=config,
                impl=impl,
            )
            out.loss.backward()
        assert counter.get_total_flops() == expected * one
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        distillation_loss(
            case.hidden.clone().requires_grad_(),
            case.weight,
            case.signal,
            labels_N=case.labels,
            config=config,
            impl=impl,
        )
    assert counter.get_total_flops() == one


@pytest.mark.parametrize("impl", FLOAT64)
def test_a_second_backward_pass_is_right_or_refused(impl: str) -> None:
    case = make_case()
    hidden = case.hidden.clone().requires_grad_()
    out = distillation_loss(hidden, case.weight, case.signal, vocab_size=case.vocab, impl=impl)
    (first,) = torch.autograd.grad(out.loss, hidden, retain_graph=True)
    first = first.clone()
    if impl in ("fused", "forward_chunked"):
        with pytest.raises(RuntimeError, match="use impl recompute"):
            torch.autograd.grad(out.loss, hidden)
    else:
        (second,) = torch.autograd.grad(out.loss, hidden)
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def sparse_draws(case: Case, draws: int, seed: int) -> TopKSignal:
    """Ids drawn from the teacher, each with weight 1 / draws; repeats are likely."""
    probabilities = dense(case).signal.logprobs_NV.exp()
    ids = torch.multinomial(probabilities, draws, replacement=True, generator=torch.Generator().manual_seed(seed))
    weights = torch.full(ids.shape, 1 / draws, dtype=torch.float64)
    return TopKSignal(ids, weights.log(), torch.zeros(ids.shape[0], dtype=torch.float64))


@pytest.mark.parametrize("impl", ONE_BUFFER)
def test_sampled_gradients_are_unbiased(impl: str) -> None:
    case = make_case(n=3, v=9)
    config = LossConfig(tail="sampled")
    _, expected = grads(dense(case), LossConfig(), "dense")
    mean = torch.zeros_like(expected[0])
    for seed in range(60):
        _, gradients = grads(replace(case, signal=sparse_draws(case, 200, seed)), config, impl)
        mean += gradients[0] / 60
    one_off = grads(
        replace(case, signal=top_k(dense(case).signal.logprobs_NV, 3)), LossConfig(tail="renormalise"), impl
    )
    assert (mean - expected[0]).norm() < 0.02 * expected[0].norm()
    assert (one_off[1][0] - expected[0]).norm() > 0.04 * expected[0].norm()  # what top-K would have been off by
