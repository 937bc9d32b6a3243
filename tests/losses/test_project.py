"""The gradient's error with bfloat16 inputs, against float64: for a student far from its teacher, and almost equal."""

import pytest
import torch

from alambique import LossConfig, distillation_loss
from alambique.losses import filtered
from alambique.losses.distillation import PATHS
from tests.losses.problems import top_k

N, D, V, K = 384, 256, 4099, 64
PRECISE = sorted(set(PATHS) - {"triton"})


def gradients(near: bool, impl: str, dtype: torch.dtype, config: LossConfig) -> list[torch.Tensor]:
    """Gradients with bfloat16-valued inputs held in ``dtype``; logits spread like a language model's, |z| up to 40."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, D, generator=g).bfloat16()
    head = (torch.randn(V, D, generator=g) * 0.6).bfloat16()
    teacher = hidden.double() @ head.double().t()
    noise = torch.randn(N, V, generator=g, dtype=torch.float64)
    teacher = teacher + 0.02 * noise if near else teacher * 0.3 + 3 * noise
    leaves = [hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()]
    signal = top_k(torch.log_softmax(teacher, -1), K)
    distillation_loss(*leaves, signal, config=config, impl=impl).loss.backward()
    return [leaf.grad.double() for leaf in leaves]


@pytest.mark.parametrize("impl", PRECISE)
@pytest.mark.parametrize("near", [True, False], ids=["near", "far"])
@pytest.mark.parametrize("weight_grad", ["accurate", "compact"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "emulated"])
def test_error_is_at_most_one_percent(
    near: bool, impl: str, weight_grad: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the CPU has bfloat16 products, so that each host tests both ways."""
    monkeypatch.setattr(filtered, "multiplies", lambda dtype, device_type: native)
    config = LossConfig(weight_grad=weight_grad, chunk_budget_mib=2)  # chunks of 128 tokens
    exact = gradients(near, "dense", torch.float64, config)
    for mine, truth in zip(gradients(near, impl, torch.bfloat16, config), exact, strict=True):
        assert ((mine - truth).norm() / truth.norm()).item() <= 0.01


def test_rounded_logits_would_not_do() -> None:
    """What the exact product is for: the plain bfloat16 product loses the gradient of a student near its teacher."""
    g = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(N, D, generator=g).bfloat16(), (torch.randn(V, D, generator=g) * 0.6).bfloat16()
    exact = hidden.double() @ head.double().t()
    teacher = torch.softmax(exact + 0.02 * torch.randn(N, V, generator=g, dtype=torch.float64), -1)
    truth = torch.softmax(exact, -1) - teacher
    rounded = torch.softmax((hidden @ head.t()).double(), -1) - teacher
    assert (rounded - truth).norm() / truth.norm() > 0.1


def test_float32_follows_float64() -> None:
    """The nearer teacher differs by 0.02 in logits of up to 40, where float32 resolves 4e-6."""
    for near in (True, False):
        exact = gradients(near, "dense", torch.float64, LossConfig())
        for mine, truth in zip(gradients(near, "fused", torch.float32, LossConfig()), exact, strict=True):
            assert ((mine - truth).norm() / truth.norm()).item() <= 3e-4
