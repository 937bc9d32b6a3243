"""Forward Kullback-Leibler divergence Σ p·log(p/q): the student covers what the teacher does (Hinton et al., 2015)."""

import torch
from torch import Tensor

ZERO_TEACHER_IS_INFINITE = False  # a class without teacher mass costs nothing


def term(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Each class's share of the divergence, in nats; ``beta`` is unused."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0)


def slope(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Derivative of the divergence with respect to log q, class by class: -p."""
    return log_p.exp().neg_()
