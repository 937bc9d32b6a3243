"""Reverse Kullback-Leibler divergence Σ q·log(q/p): the student stays where the teacher has mass (MiniLLM, 2023)."""

import torch
from torch import Tensor

ZERO_TEACHER_IS_INFINITE = True  # student mass where the teacher has none costs infinitely much


def term(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Each class's share of the divergence, in nats; ``beta`` is unused."""
    q = log_q.exp()
    return torch.where(q > 0, q * (log_q - log_p), 0.0)


def slope(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Derivative of the divergence with respect to log q, class by class: q·(log q - log p + 1)."""
    q = log_q.exp()
    return torch.where(q > 0, q * (log_q - log_p + 1.0), 0.0)
