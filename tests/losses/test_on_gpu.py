"""Every path in bfloat16 where it will run: products with float32 results exist on GPUs alone."""

import pytest
import torch

from alambique import LossConfig, distillation_loss
from alambique.losses.distillation import PATHS
from tests.losses.problems import Case, grads, make_case
from tests.losses.test_kernelled import on_device

pytestmark = pytest.mark.gpu
CHUNKED = 3 * 256 * 4 / 2**20 * 4  # a budget of a dozen rows of logits, so that sums run over several chunks

OPTIONS = {
    "plain": LossConfig(chunk_budget_mib=CHUNKED),
    "compact": LossConfig(chunk_budget_mib=CHUNKED, weight_grad="compact"),
    "tempered": LossConfig(chunk_budget_mib=CHUNKED, temperature=2.0, ce_weight=0.3),
    "capped": LossConfig(chunk_budget_mib=CHUNKED, logit_softcap=8.0, logit_scale=0.5, z_loss=1e-3),
}


def low_precision(case: Case) -> Case:
    return on_device(case.to(torch.bfloat16))


@pytest.mark.parametrize("impl", sorted(PATHS))
@pytest.mark.parametrize("options", OPTIONS)
def test_bfloat16_gradients_are_within_one_per_cent(impl: str, options: str) -> None:
    case = low_precision(make_case(n=24, d=32, v=200, k=16, pad=56, spread=1.0))
    config = OPTIONS[options]
    exact = grads(case.to(torch.float64), config, "dense", scale=1.0)
    out, gradients = grads(case, config, impl, scale=1.0)
    torch.testing.assert_close(out.loss, exact[0].loss, rtol=1e-5, atol=1e-6, check_dtype=False)
    for mine, theirs in zip(gradients, exact[1], strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("impl", sorted(set(PATHS) - {"dense"}))
def test_a_float32_head_gets_a_gradient_that_was_never_rounded(impl: str) -> None:
    case = low_precision(make_case(n=24, d=32, v=200, k=16, pad=56, spread=1.0))
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight.float().requires_grad_()
    distillation_loss(hidden, weight, case.signal, vocab_size=case.vocab, impl=impl).loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    if case.hidden.is_cuda:  # on a CPU each chunk's product is rounded, only their sum is not
        assert not torch.equal(weight.grad, weight.grad.bfloat16().float())
    assert torch.isfinite(weight.grad).all()
