"""Random problems for the loss, and its gradients as a list; imported by the tests beside it."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from alambique import DenseSignal, LossConfig, LossOutput, TopKSignal, distillation_loss
from alambique.core.signal import Signal, StatesSignal
from alambique.losses.config import Tail
from alambique.losses.divergence import DIVERGENCES

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """Inputs of one call, float64 unless converted."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    signal: Signal
    labels: Tensor
    weights: Tensor
    vocab: int
    teacher: StatesSignal  # what the signal was made from

    def to(self, dtype: torch.dtype) -> "Case":
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=self.bias.to(dtype))


def top_k(logprobs: Tensor, k: int) -> TopKSignal:
    """Keep the k largest; all ids may be kept."""
    kept, ids = logprobs.topk(k)
    return TopKSignal(ids.int(), kept, 1 - kept.exp().sum(-1))


def make_case(
    n: int = 7, d: int = 5, v: int = 23, k: int = 4, pad: int = 3, spread: float = 2.0, seed: int = 0, hole: bool = True
) -> Case:
    """A teacher with its own hidden states and head, cut to its top k; labels fall inside and outside of them."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(n, d + 2, generator=g, dtype=F64) * spread
    head = torch.randn(v, d + 2, generator=g, dtype=F64)
    teacher = torch.log_softmax(states @ head.t(), -1)
    signal = top_k(teacher, k)
    if hole and k > 1 and n > 1:  # one empty slot
        signal.logprobs_NK[0, -1] = -torch.inf
        signal.ids_NK[0, -1] = 0
        signal.tail_mass_N[0] = 1 - signal.logprobs_NK[0].exp().sum()
    labels = torch.randint(v, (n,), generator=g)
    labels[: n // 2] = signal.ids_NK[: n // 2, 0].long()
    return Case(
        hidden=torch.randn(n, d, generator=g, dtype=F64) * spread,
        weight=torch.randn(v + pad, d, generator=g, dtype=F64),
        bias=torch.randn(v + pad, generator=g, dtype=F64),
        signal=signal,
        labels=labels,
        weights=torch.rand(n, generator=g, dtype=F64) + 0.5,
        vocab=v,
        teacher=StatesSignal(states, head),
    )


def objectives() -> list[tuple[str, Tail]]:
    """Every divergence with every tail that it can have."""
    return [
        (name, tail)
        for name, tail in itertools.product(DIVERGENCES, get_args(Tail))
        if tail == "bucket" or not DIVERGENCES[name].infinite_without_teacher
    ]


def dense(case: Case) -> Case:
    """The same problem with the teacher's whole distribution."""
    logits = case.teacher.hidden_ND @ case.teacher.head_weight_VD.t()
    return replace(case, signal=DenseSignal(torch.log_softmax(logits, -1)))


def grads(
    case: Case, config: LossConfig, impl: str, *, bias: bool = True, scale: float = 1.5, **more: Any
) -> tuple[LossOutput, list[Tensor]]:
    """Loss, and the gradients of scale·loss with respect to hidden states, head and bias."""
    leaves = [x.detach().clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    options = {"labels_N": case.labels, "weights_N": case.weights, "vocab_size": case.vocab, **more}
    out = distillation_loss(
        leaves[0], leaves[1], case.signal, head_bias_V=leaves[2] if bias else None, config=config, impl=impl, **options
    )
    (out.loss * scale).backward()
    return out, [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]


def assert_same(
    one: tuple[LossOutput, list[Tensor]], two: tuple[LossOutput, list[Tensor]], tolerance: float = 1e-11
) -> None:
    """Equal values, diagnostics and gradients."""
    for name in ("loss", "kd", "ce", "student_mass", "entropy"):
        assert (getattr(one[0], name) is None) == (getattr(two[0], name) is None)
        if getattr(one[0], name) is not None:
            torch.testing.assert_close(getattr(one[0], name), getattr(two[0], name), rtol=tolerance, atol=tolerance)
    for a, b in zip(one[1], two[1], strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=tolerance)
