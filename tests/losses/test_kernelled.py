"""The Triton path against the reference twin: the contract of every other path, at shapes an interpreter can bear.

On a GPU (TRITON_INTERPRET=0) the same tests run compiled, in float64 as well.
"""

import logging
from dataclasses import replace

import pytest
import torch

from alambique import DenseSignal, LossConfig, TopKSignal, distillation_loss
from alambique.core.errors import UserError
from alambique.kernels import topk_rows
from alambique.losses import kernelled
from alambique.losses.distillation import choose
from alambique.losses.divergence import DIVERGENCES
from alambique.losses.task import Task, build
from tests.losses.problems import Case, assert_same, dense, grads, make_case, objectives, top_k
from tests.losses.test_objective import SMALL

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.gpu

# Temperature, CE weight, soft-cap, bias: every pair of values meets in some row.
OPTIONS = [(1.0, 0.0, None, False), (1.0, 0.3, 3.0, True), (2.5, 0.0, 3.0, True), (2.5, 0.3, None, False)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 23 takes several tiles, the last of them not full."""
    monkeypatch.setattr(topk_rows, "BLOCK_COLUMNS", 8)


def on_device(case: Case) -> Case:
    """The case where the kernel runs."""
    names = ("hidden", "weight", "bias", "labels", "weights")
    signal = case.signal
    moved = signal.to(DEVICE) if isinstance(signal, TopKSignal) else DenseSignal(signal.logprobs_NV.to(DEVICE))
    return replace(case, signal=moved, **{name: getattr(case, name).to(DEVICE) for name in names})


@pytest.mark.parametrize(("name", "tail"), objectives())
def test_equals_the_twin(name: str, tail: str) -> None:
    case = make_case()
    case.labels[2] = -100
    case = on_device(case)
    for temperature, ce, cap, bias in OPTIONS:
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
        assert_same(grads(case, config, "triton", bias=bias), grads(case, config, "dense", bias=bias))


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_all_entries_kept_equals_the_dense_signal(name: str, temperature: float) -> None:
    case = dense(make_case())
    config = LossConfig(divergence=name, temperature=temperature, ce_weight=0.2)
    kept = replace(case, signal=top_k(case.signal.logprobs_NV, case.vocab))
    assert_same(grads(on_device(kept), config, "triton"), grads(on_device(case), config, "dense"))


@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (4, 3.0), (23, 1.0)])
def test_a_student_equal_to_the_teacher_has_nothing_to_learn(k: int, temperature: float) -> None:
    case = make_case(pad=0)
    logprobs = torch.log_softmax(case.hidden @ case.weight.t(), -1)
    case = on_device(replace(case, signal=top_k(logprobs, k)))
    out, gradients = grads(case, LossConfig(temperature=temperature), "triton", bias=False)
    assert abs(out.loss.item()) < 1e-12
    assert all(gradient.abs().max() < 1e-12 for gradient in gradients)


@pytest.mark.parametrize(
    ("n", "d", "v", "k", "pad"), [(1, 1, 1, 1, 0), (1, 3, 9, 1, 0), (3, 2, 8, 8, 64), (5, 4, 40, 17, 1)]
)
def test_odd_shapes(n: int, d: int, v: int, k: int, pad: int) -> None:
    case = on_device(make_case(n=n, d=d, v=v, k=k, pad=pad))
    config = LossConfig(ce_weight=0.5, temperature=0.5, chunk_budget_mib=1e-4)
    assert_same(grads(case, config, "triton"), grads(case, config, "dense"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in two bytes share memory with the logits that they come from; vocabularies of several tiles."""
    monkeypatch.setattr(topk_rows, "BLOCK_COLUMNS", 32)
    case = make_case(n=6, d=8, v=150, k=9, pad=50, spread=1.0)
    low = on_device(case.to(dtype))
    exact = grads(low.to(torch.float64), LossConfig(ce_weight=0.2), "dense")
    out, gradients = grads(low, LossConfig(ce_weight=0.2), "triton")
    torch.testing.assert_close(out.loss, exact[0].loss, rtol=1e-5, atol=1e-6, check_dtype=False)
    for mine, theirs in zip(gradients, exact[1], strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).norm() < 0.01 * theirs.norm()


def test_logits_of_300() -> None:
    case = on_device(make_case(n=4, d=3, v=16, k=3, pad=0, spread=100.0, hole=False))
    exact = grads(case, LossConfig(), "dense", bias=False)
    out, gradients = grads(case.to(torch.float32), LossConfig(), "triton", bias=False)
    assert (case.hidden @ case.weight.t()).abs().max() > 300
    torch.testing.assert_close(out.loss, exact[0].loss, rtol=1e-5, atol=1e-5, check_dtype=False)
    for mine, theirs in zip(gradients, exact[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3, check_dtype=False)


def test_masked_rows_and_a_masked_batch() -> None:
    case = make_case()
    case.labels[3] = -100
    case = on_device(case)
    _, gradients = grads(case, LossConfig(ce_weight=0.5), "triton")
    assert gradients[0][3].abs().max() == 0
    case = replace(case, labels=torch.full_like(case.labels, -100))
    out, gradients = grads(case, LossConfig(ce_weight=0.5), "triton")
    assert out.loss.item() == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients)


def test_a_frozen_head_and_no_gradient_at_all() -> None:
    case = on_device(make_case())
    _, expected = grads(case, LossConfig(), "dense", scale=1.0, bias=False, labels_N=None, weights_N=None)
    hidden = case.hidden.clone().requires_grad_()
    out = distillation_loss(hidden, case.weight, case.signal, vocab_size=case.vocab, impl="triton")
    out.loss.backward()
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        quiet = distillation_loss(hidden, case.weight, case.signal, vocab_size=case.vocab, impl="triton")
    torch.testing.assert_close(quiet.loss, out.loss.detach(), rtol=1e-12, atol=0)


def test_chunks_make_no_difference() -> None:
    case = on_device(make_case(n=9, v=50, k=9))
    config = LossConfig(ce_weight=0.2, temperature=2.0, logit_softcap=4.0)
    whole = grads(case, config, "triton")
    for budget in (1e-4, 1e-3):
        assert_same(grads(case, config.model_copy(update={"chunk_budget_mib": budget}), "triton"), whole, 1e-12)


def test_a_buffer_takes_the_gradient_of_the_head() -> None:
    case = on_device(make_case())
    _, expected = grads(case, LossConfig(), "dense", scale=1.0)
    buffer = torch.ones_like(case.weight)
    _, gradients = grads(case, LossConfig(chunk_budget_mib=SMALL), "triton", scale=1.0, weight_grad_VD=buffer)
    torch.testing.assert_close(buffer - 1, expected[1], rtol=1e-11, atol=1e-12)
    assert gradients[1].abs().max() == 0


def task_of(case: Case, config: LossConfig = LossConfig()) -> Task:  # noqa: B008
    _, task = build(case.hidden, case.weight, case.signal, None, None, case.vocab, None, config, None)
    return task


def test_what_it_can_not_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case = on_device(make_case())
    with pytest.raises(UserError, match="impl triton can't do this: it reads top-K signals"):
        distillation_loss(case.hidden, case.weight, dense(make_case()).signal, vocab_size=case.vocab, impl="triton")
    monkeypatch.setattr(topk_rows, "DIVERGENCES", ("forward_kl",))
    with pytest.raises(UserError, match="its kernel has no divergence tvd; choose impl: fused"):
        distillation_loss(
            case.hidden,
            case.weight,
            case.signal,
            vocab_size=case.vocab,
            config=LossConfig(divergence="tvd"),
            impl="triton",
        )
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "need a GPU" in (kernelled.cannot(task_of(make_case()), torch.device("cpu")) or "")
    monkeypatch.setattr(kernelled.importlib.util, "find_spec", lambda name: None)
    assert kernelled.cannot(task_of(make_case()), torch.device("cuda")) == "triton is not installed"


def test_the_kernel_knows_all_divergences() -> None:
    assert set(topk_rows.DIVERGENCES) == set(DIVERGENCES)


def test_auto_takes_it_on_a_gpu_for_what_it_can_do(caplog: pytest.LogCaptureFixture) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda")

    case = make_case()
    task, hidden = task_of(case), case.hidden.as_subclass(OnGpu)
    assert choose(case.hidden, case.weight, task) == "fused"
    assert choose(hidden, case.weight, task) == "triton"
    assert choose(hidden, case.weight, task_of(case, LossConfig(gradient_filter=0.01))) == "fused"
    with caplog.at_level(logging.INFO, logger="alambique"):
        assert choose(hidden, case.weight, task_of(dense(case))) == "fused"
    assert "not triton: it reads top-K signals, and this one is dense; chunks" in caplog.text
