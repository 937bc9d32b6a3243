"""Hidden states of the teacher's layers that a cache keeps beside the signal: which, and as which bits.

bfloat16, whose range is float32's: some channels of a residual stream reach thousands (arXiv 2402.17762), in a few
families more than float16 holds. Teachers are published and run in it, and then nothing is lost.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from alambique.core.params import Config

_BYTES = 2  # of a bfloat16


class HiddenStates(Config):
    """Which hidden states are kept of each captured position.

    Attributes:
        layers: of the teacher, counted from 0, ascending; a layer's state is what it hands on.
        size: numbers of one state.
    """

    layers: tuple[int, ...] = Field(min_length=1, max_length=1024)
    size: int = Field(ge=1, le=1 << 20)

    @model_validator(mode="after")
    def _ascending(self) -> "HiddenStates":
        if self.layers[0] < 0 or any(a >= b for a, b in zip(self.layers, self.layers[1:], strict=False)):
            raise ValueError(f"layers {list(self.layers)} must be ascending, from 0 on, each once")
        return self

    @property
    def bytes_per_token(self) -> int:
        """What they add to a captured position."""
        return _BYTES * len(self.layers) * self.size

    def text(self) -> str:
        """For people."""
        return f"after layers {', '.join(map(str, self.layers))}"


def to_bits(states: Tensor) -> NDArray[np.uint16]:
    """As bfloat16, whose bits numpy can hold, on the CPU."""
    bits: NDArray[np.uint16] = states.to(torch.bfloat16).cpu().view(torch.uint16).numpy()
    return bits


def from_bits(bits: NDArray[np.uint16]) -> Tensor:
    """The bfloat16 tensor over the same memory."""
    return torch.from_numpy(bits).view(torch.bfloat16)
