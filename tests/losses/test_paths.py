"""Every path against the reference twin, values and gradients, for every option."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from alambique import LossConfig, LossOutput, TopKSignal, distillation_loss
from alambique.core.signal import Signal
from alambique.losses import divergence
from alambique.losses.distillation import PATHS

FAST = sorted(set(PATHS) - {"dense"})
TAILS = ["bucket", "renormalise", "truncate", "residual_to_label", "sampled"]


@dataclass
class Case:
    """Inputs of one call, in float64 unless converted."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    signal: Signal
    labels: Tensor
    weights: Tensor
    vocab: int


def make_case(
    n: int = 7, d: int = 5, v: int = 23, k: int = 4, pad: int = 3, spread: float = 2.0, seed: int = 0
) -> Case:
    """A random problem; one slot of one row is empty, labels fall inside and outside the kept entries."""
    g = torch.Generator().manual_seed(seed)
    f64 = torch.float64
    teacher = torch.log_softmax(torch.randn(n, v, generator=g, dtype=f64) * spread, -1)
    logprobs, ids = teacher.topk(k)
    if k > 1 and n > 1:
        logprobs[0, -1] = -torch.inf
        ids[0, -1] = 0
    labels = torch.randint(v, (n,), generator=g)
    labels[: n // 2] = ids[: n // 2, 0]
    return Case(
        hidden=torch.randn(n, d, generator=g, dtype=f64) * spread,
        weight=torch.randn(v + pad, d, generator=g, dtype=f64),
        bias=torch.randn(v + pad, generator=g, dtype=f64),
        signal=TopKSignal(ids.int(), logprobs, 1 - logprobs.exp().sum(-1)),
        labels=labels,
        weights=torch.rand(n, generator=g, dtype=f64) + 0.5,
        vocab=v,
    )


def grads(
    case: Case, config: LossConfig, impl: str, *, bias: bool = True, **more: object
) -> tuple[LossOutput, list[Tensor]]:
    """Loss and gradients of hidden, weight and bias."""
    leaves = [x.detach().clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    options = {"labels_N": case.labels, "weights_N": case.weights, "vocab_size": case.vocab, **more}
    out = distillation_loss(
        leaves[0], leaves[1], case.signal, head_bias_V=leaves[2] if bias else None, config=config, impl=impl, **options
    )
    (out.loss * 1.5).backward()
    return out, [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]


def assert_same(one: tuple[LossOutput, list[Tensor]], two: tuple[LossOutput, list[Tensor]]) -> None:
    for name in ("loss", "kd", "ce", "student_mass", "entropy"):
        torch.testing.assert_close(getattr(one[0], name), getattr(two[0], name), rtol=1e-11, atol=1e-12)
    for a, b in zip(one[1], two[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def objectives() -> list[tuple[str, str]]:
    return [
        (name, tail)
        for name, tail in itertools.product(divergence.names(), TAILS)
        if not (divergence.load(name).ZERO_TEACHER_IS_INFINITE and tail != "bucket")
    ]


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize(("name", "tail"), objectives())
def test_sparse_equals_twin(name: str, tail: str, impl: str) -> None:
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
        )
        assert_same(grads(case, config, impl, bias=bias), grads(case, config, "dense", bias=bias))
