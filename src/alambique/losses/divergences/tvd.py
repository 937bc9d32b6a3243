"""Total variation distance ½·Σ |p - q|: bounded, so that no single class can dominate (Wen et al., 2023)."""

from torch import Tensor

ZERO_TEACHER_IS_INFINITE = False  # bounded by one


def term(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Each class's share of the distance; ``beta`` is unused."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs()


def slope(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Derivative of the distance with respect to log q, class by class: ½·sign(q - p)·q, 0 where they meet."""
    q = log_q.exp()
    return 0.5 * (q - log_p.exp()).sign() * q
