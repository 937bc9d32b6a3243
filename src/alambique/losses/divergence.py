"""The divergences between teacher and student, by name.

A divergence is a sum over classes of a term that depends on log p and log q of that class alone, so that its slope
with respect to log q is all that any path needs; the chain rule through the softmax is in ``objective.py``. Adding
one is adding a line to ``DIVERGENCES``; the kernel's own list is in ``kernels/topk_rows.py``.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_OfClasses = Callable[[Tensor, Tensor, float], Tensor]  # log p, log q and beta, element by element


class Divergence(NamedTuple):
    """One of them; ``infinite_without_teacher``: student mass where the teacher has none costs infinitely much."""

    term: _OfClasses  # each class's share, in nats; differentiable in log q, and finite at p = 0 if it can be
    slope: _OfClasses  # derivative of the term with respect to log q
    infinite_without_teacher: bool = False


def _forward_kl(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0)


def _forward_kl_slope(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return log_p.exp().neg_()


def _reverse_kl(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    q = log_q.exp()
    return torch.where(q > 0, q * (log_q - log_p), 0.0)


def _reverse_kl_slope(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    q = log_q.exp()
    return torch.where(q > 0, q * (log_q - log_p + 1.0), 0.0)


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))


def _jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    log_m = _log_mixture(log_p, log_q, beta)
    p, q = log_p.exp(), log_q.exp()
    return beta * torch.where(p > 0, p * (log_p - log_m), 0.0) + (1.0 - beta) * q * (log_q - log_m)


def _jsd_slope(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return (1.0 - beta) * log_q.exp() * (log_q - _log_mixture(log_p, log_q, beta))  # the rest cancels


def _tvd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return 0.5 * (log_p.exp() - log_q.exp()).abs()


def _tvd_slope(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    q = log_q.exp()
    return 0.5 * (q - log_p.exp()).sign() * q


DIVERGENCES = {
    # Σ p·log(p/q): the student covers what the teacher does (Hinton et al., 2015)
    "forward_kl": Divergence(_forward_kl, _forward_kl_slope),
    # β·KL(p‖m) + (1-β)·KL(q‖m), m = β·p + (1-β)·q (Agarwal et al., 2023); m has mass wherever the student has
    "jsd": Divergence(_jsd, _jsd_slope),
    # Σ q·log(q/p): the student stays where the teacher has mass (MiniLLM, 2023)
    "reverse_kl": Divergence(_reverse_kl, _reverse_kl_slope, infinite_without_teacher=True),
    # ½·Σ |p - q|, total variation: bounded, so that no single class can dominate (Wen et al., 2023)
    "tvd": Divergence(_tvd, _tvd_slope),
}
