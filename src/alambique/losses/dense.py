"""The reference twin: the objective as it is defined, by autograd, over all logits at once. Clear before fast.

Dimension letters: N tokens, V vocabulary (padding cut off), K kept entries, D hidden size.
"""

import torch
from torch import Tensor

from alambique.core.errors import UserError
from alambique.core.signal import TopKSignal
from alambique.losses.chunked import teacher_logprobs
from alambique.losses.config import LossConfig
from alambique.losses.divergence import DIVERGENCES
from alambique.losses.objective import FLOOR, Rows
from alambique.losses.targets import Kept, kept_entries, temper
from alambique.losses.task import Inputs, Task


def run(inputs: Inputs, task: Task) -> tuple[Tensor, Tensor]:
    """Return the differentiable loss and the weighted sums of ``Rows``; a buffer for the head's gradient is refused."""
    if task.weight_grad_VD is not None:
        raise UserError("loss: impl dense can't fill weight_grad_VD: choose impl fused, or leave the buffer out.")
    config, labels_N = task.config, task.labels_N
    z_NV = logits(inputs, task)
    plain_NV = torch.log_softmax(z_NV, 1)
    log_q_NV = plain_NV if config.temperature == 1 else torch.log_softmax(z_NV / config.temperature, 1)
    if isinstance(task.signal, TopKSignal):
        kd_N, mass_N, entropy_N = _sparse(plain_NV, log_q_NV, task.signal, task)
    else:
        log_p_NV = teacher_logprobs(task.signal, log_q_NV, task)
        kd_N = DIVERGENCES[config.divergence].term(log_p_NV, log_q_NV, config.beta).sum(1)
        mass_N, entropy_N = torch.ones_like(kd_N), -(log_q_NV.exp() * log_q_NV).sum(1)
    ce_N = -plain_NV.gather(1, labels_N[:, None]).squeeze(1) if labels_N is not None else torch.zeros_like(kd_N)
    square_N = z_NV.logsumexp(1).square() if config.z_loss else torch.zeros_like(kd_N)
    totals = Rows(kd_N, ce_N, square_N, mass_N, entropy_N).totals(task.scale_N)
    return task.loss(totals), totals.detach()


def logits(inputs: Inputs, task: Task) -> Tensor:
    """[N, vocab_size] logits in the compute dtype, from inputs that are never rounded on the way."""
    hidden_ND, weight_VD, bias_V = inputs
    dtype, config = task.compute_dtype, task.config
    weight_VD = weight_VD[: task.vocab_size].to(hidden_ND.dtype)  # operands have one dtype: the hidden states'
    z_NV = hidden_ND.to(dtype) @ weight_VD.to(dtype).t()
    if bias_V is not None:
        z_NV = z_NV + bias_V[: task.vocab_size].to(dtype)
    z_NV = z_NV * config.logit_scale
    if config.logit_softcap is not None:
        z_NV = config.logit_softcap * torch.tanh(z_NV / config.logit_softcap)
    return z_NV


def _sparse(plain_NV: Tensor, log_q_NV: Tensor, signal: TopKSignal, task: Task) -> tuple[Tensor, Tensor, Tensor]:
    config = task.config
    found = DIVERGENCES[config.divergence]
    kept = kept_entries(signal, task.labels_N, config.tail, task.vocab_size, plain_NV.dtype)
    rows_N, slots_N = kept.filled_CK.nonzero(as_tuple=True)
    inside_NV = torch.zeros_like(plain_NV, dtype=torch.bool)
    inside_NV[rows_N, kept.ids_CK[rows_N, slots_N]] = True
    log_t_N = log_q_NV.masked_fill(inside_NV, FLOOR).logsumexp(1)
    log_shape_N = None
    if config.temperature != 1:
        log_c_NV = torch.log_softmax(plain_NV.detach().masked_fill(inside_NV, FLOOR), 1)
        log_shape_N = (log_c_NV / config.temperature).masked_fill(inside_NV, FLOOR).logsumexp(1)
    kept = temper(kept, config.tail, config.temperature, log_shape_N, found.infinite_without_teacher)
    return _classes(kept, log_q_NV.gather(1, kept.ids_CK), log_t_N, config)


def _classes(kept: Kept, log_q_NK: Tensor, log_t_N: Tensor, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    term = DIVERGENCES[config.divergence].term
    log_p_NK = kept.log_p_CK.masked_fill(~kept.filled_CK, 0.0)  # finite, so that the slots left out give no NaN
    kd_N = torch.where(kept.filled_CK, term(log_p_NK, log_q_NK, config.beta), 0.0).sum(1)
    kd_N = kd_N + term(kept.log_r_C, log_t_N, config.beta)
    q_NK = torch.where(kept.filled_CK, log_q_NK.exp(), 0.0)
    return kd_N, q_NK.sum(1), -(q_NK * log_q_NK).sum(1) - log_t_N.exp() * log_t_N
