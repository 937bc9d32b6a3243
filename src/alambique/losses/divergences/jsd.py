"""Generalised Jensen-Shannon divergence β·KL(p‖m) + (1-β)·KL(q‖m), m = β·p + (1-β)·q (Agarwal et al., 2023)."""

import math

import torch
from torch import Tensor

ZERO_TEACHER_IS_INFINITE = False  # the mixture has mass wherever the student has


def term(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Each class's share of the divergence, in nats."""
    log_m = _log_mixture(log_p, log_q, beta)
    p, q = log_p.exp(), log_q.exp()
    return beta * torch.where(p > 0, p * (log_p - log_m), 0.0) + (1.0 - beta) * q * (log_q - log_m)


def slope(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Derivative of the divergence with respect to log q, class by class: (1-β)·q·log(q/m); the rest cancels."""
    return (1.0 - beta) * log_q.exp() * (log_q - _log_mixture(log_p, log_q, beta))


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
