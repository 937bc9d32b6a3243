"""What a divergence is, and where they are found: every module in ``losses/divergences`` is one.

A divergence is a sum over classes of a term that depends on log p and log q of that class alone, so that its slope
with respect to log q is all that any path needs; the chain rule through the softmax is in ``objective.py``. Adding
one is adding a file: nothing else names them.
"""

import importlib
import pkgutil
from typing import Protocol, cast

from torch import Tensor

from alambique.losses import divergences


class Divergence(Protocol):
    """The names that a module in ``losses/divergences`` defines; both functions work element by element."""

    ZERO_TEACHER_IS_INFINITE: bool

    def term(self, log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
        """Each class's share of the divergence, in nats; differentiable in ``log_q``, and finite at p = 0 if it can."""

    def slope(self, log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
        """Derivative of ``term`` with respect to ``log_q``."""


def names() -> list[str]:
    """Names of all divergences, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(divergences.__path__))


def load(name: str) -> Divergence:
    """The divergence called ``name``."""
    return cast(Divergence, importlib.import_module(f"{divergences.__name__}.{name}"))
