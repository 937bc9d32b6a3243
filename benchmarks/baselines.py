"""What the loss is compared with: the dense loss as one would write it, and the matrix products that nobody avoids.

Dimension letters: N tokens, D hidden size, V vocabulary, K kept entries.
"""

import torch
from torch import Tensor

from alambique.core.signal import TopKSignal


def dense_loss(hidden_ND: Tensor, weight_VD: Tensor, signal: TopKSignal) -> Tensor:
    """Forward KL with a tail bucket, mean over tokens, in nats: logits in the inputs' dtype, softmax in float32.

    Leaner than the library's ``dense`` reference, which makes no rounding before float32 and serves every option: a
    baseline must not be slow by its generality.
    """
    log_q_NV = torch.log_softmax((hidden_ND @ weight_VD.t()).float(), -1)
    log_q_NK = log_q_NV.gather(1, signal.ids_NK.long())
    log_p_NK, r_N = signal.logprobs_NK.float(), signal.tail_mass_N.clamp_min(1e-12)
    log_t_N = torch.log1p(-log_q_NK.exp().sum(1).clamp_max(1 - 1e-6))
    kd_N = (log_p_NK.exp() * (log_p_NK - log_q_NK)).sum(1) + r_N * (r_N.log() - log_t_N)
    return kd_N.mean()


def three_gemms(hidden_ND: Tensor, weight_VD: Tensor, logits_NV: Tensor | None = None) -> tuple[Tensor, ...]:
    """The products of the logits and of both gradients, whole, in the inputs' dtype, with nothing in between."""
    logits_NV = torch.mm(hidden_ND, weight_VD.t(), out=logits_NV)
    return torch.mm(logits_NV, weight_VD), torch.mm(logits_NV.t(), hidden_ND)
