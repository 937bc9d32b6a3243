"""What a teacher says about the next token, in the forms that every loss accepts.

Dimension letters: N tokens, K kept entries, V vocabulary; leading batch dimensions may stand in for N.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TopKSignal:
    """The teacher's K most probable tokens at each position, and the mass of all the others.

    Attributes:
        ids_NK: token ids, any integer dtype, in order of falling probability.
        logprobs_NK: natural logarithms of full-vocabulary probabilities, in nats. A slot whose logprob is -inf is
            empty: it carries no mass.
        tail_mass_N: float32, 1 - Σ_k exp(logprob_k), computed from unrounded probabilities at capture.
    """

    ids_NK: Tensor
    logprobs_NK: Tensor
    tail_mass_N: Tensor

    def __getitem__(self, index: Tensor | slice) -> "TopKSignal":
        """Select tokens (index, mask or slice over the leading dimension)."""
        return TopKSignal(self.ids_NK[index], self.logprobs_NK[index], self.tail_mass_N[index])

    @property
    def num_tokens(self) -> int:
        """Length of the leading dimension."""
        return self.ids_NK.shape[0]

    def flatten(self) -> "TopKSignal":
        """Fold leading dimensions, [rows, S, K] -> [rows·S, K]."""
        k = self.ids_NK.shape[-1]
        return TopKSignal(self.ids_NK.reshape(-1, k), self.logprobs_NK.reshape(-1, k), self.tail_mass_N.reshape(-1))

    def to(self, device: torch.device | str) -> "TopKSignal":
        """Move to ``device``, without waiting where the memory is pinned."""
        tensors = (self.ids_NK, self.logprobs_NK, self.tail_mass_N)
        return TopKSignal(*(tensor.to(device, non_blocking=True) for tensor in tensors))


@dataclass(frozen=True)
class DenseSignal:
    """The teacher's whole next-token distribution, as natural logarithms of probabilities, in nats."""

    logprobs_NV: Tensor

    def __getitem__(self, index: Tensor | slice) -> "DenseSignal":
        """Select tokens (index, mask or slice over the leading dimension)."""
        return DenseSignal(self.logprobs_NV[index])

    @property
    def num_tokens(self) -> int:
        """Length of the leading dimension."""
        return self.logprobs_NV.shape[0]

    def flatten(self) -> "DenseSignal":
        """Fold leading dimensions, [rows, S, V] -> [rows·S, V]."""
        return DenseSignal(self.logprobs_NV.reshape(-1, self.logprobs_NV.shape[-1]))


@dataclass(frozen=True)
class StatesSignal:
    """A live teacher as hidden states and head, so that its logits too are only ever built chunk by chunk."""

    hidden_ND: Tensor  # after the final norm, D of the teacher; nothing flows back to it
    head_weight_VD: Tensor
    head_bias_V: Tensor | None = None
    logit_softcap: float | None = None  # c in c·tanh(logits/c)
    logit_scale: float = 1.0  # factor on the logits before the soft-cap

    def __getitem__(self, index: Tensor | slice) -> "StatesSignal":
        """Select tokens (index, mask or slice over the leading dimension)."""
        return replace(self, hidden_ND=self.hidden_ND[index])

    @property
    def num_tokens(self) -> int:
        """Length of the leading dimension."""
        return self.hidden_ND.shape[0]


Signal = TopKSignal | DenseSignal | StatesSignal
