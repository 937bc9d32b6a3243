"""The maths of a chunk: from logits to the loss of each row and, in place, its gradient with respect to the logits.

Closed forms, no autograd. With q = softmax(z), D = Σ term(log p, log q) over classes and a = ∂D/∂log q, the chain rule
through the softmax gives ∂D/∂z = a - q·Σa. For a top-K signal the classes are the kept entries S and one tail of
student mass t = 1 - Σ_S q; a tail column j, of conditional probability c_j = q_j/t within the tail, then gets
c_j·(a_t - t·Σa). The softmax is therefore taken over the tail alone and joined with the K kept logits in their small
arrays: no 1 - Q that cancels, and no clamp that kills a gradient.

Dimension letters: C tokens of the chunk, V columns of logits (padding included), K kept entries, L classes (K + 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from alambique.core.signal import TopKSignal
from alambique.losses import divergence
from alambique.losses.config import LossConfig
from alambique.losses.targets import Kept, kept_entries, temper

# Stands for a column that isn't there. Finite, so that a row of nothing else gives a harmless softmax instead of NaN;
# far below any logit, so that its exponential beside a real column is exactly 0.
FLOOR = -1e30


@dataclass(frozen=True)
class Rows:
    """Per-row values, each [C] in nats but for ``mass_C``.

    Attributes:
        kd_C: the divergence D, without T² and weights.
        ce_C: cross-entropy with the label; zeros without labels.
        square_C: logsumexp of the logits, squared.
        mass_C: student mass on the kept entries.
        entropy_C: entropy of the student over the classes compared.
    """

    kd_C: Tensor
    ce_C: Tensor
    square_C: Tensor
    mass_C: Tensor
    entropy_C: Tensor

    def totals(self, scale_C: Tensor) -> Tensor:
        """Sums over rows weighted by ``scale_C``, shape [5] in field order."""
        return torch.stack([self.kd_C, self.ce_C, self.square_C, self.mass_C, self.entropy_C]) @ scale_C


@dataclass(frozen=True)
class _Split:
    """A row's softmax as kept entries and tail; all logarithms are relative to ``top_C``, the row's largest logit."""

    top_C: Tensor
    log_tail_C: Tensor
    lse_C: Tensor
    log_q_CK: Tensor
    log_t_C: Tensor


def needs_scratch(config: LossConfig) -> bool:
    """Whether a top-K chunk needs a second [C, V] buffer, for the tempered logits."""
    return config.temperature != 1


def sparse_rows(
    z_CV: Tensor,
    scratch_CV: Tensor | None,
    signal: TopKSignal,
    labels_C: Tensor | None,
    grad_scale_C: Tensor | None,
    config: LossConfig,
    vocab_size: int,
) -> Rows:
    """Evaluate a chunk against a top-K signal.

    Args:
        z_CV: logits in the compute dtype, columns from ``vocab_size`` at FLOOR; destroyed. With ``grad_scale_C`` it
            ends as that scale times ∂(row's loss)/∂z.
        scratch_CV: a buffer like ``z_CV`` if ``needs_scratch``.
        signal: the teacher for these rows.
        labels_C: int64, or None.
        grad_scale_C: factor on each row's gradient, or None for values alone.
        config: the objective.
        vocab_size: number of real columns.
    """
    found = divergence.load(config.divergence)
    temperature = config.temperature
    kept = kept_entries(signal, labels_C, config.tail, vocab_size, z_CV.dtype)
    label_z_C = z_CV.gather(1, labels_C[:, None]).squeeze(1) if labels_C is not None else None
    soft = None
    if scratch_CV is not None:
        torch.div(z_CV, temperature, out=scratch_CV)
        soft = split_softmax(scratch_CV, kept)
    plain = split_softmax(z_CV, kept)
    log_shape_C = None
    if soft is not None:
        log_shape_C = soft.log_tail_C - plain.log_tail_C / temperature + (soft.top_C - plain.top_C / temperature)
    kept = temper(kept, config.tail, temperature, log_shape_C, found.ZERO_TEACHER_IS_INFINITE)
    split = plain if soft is None else soft

    log_p_CL = torch.cat([kept.log_p_CK, kept.log_r_C[:, None]], 1)
    log_q_CL = torch.cat([split.log_q_CK, split.log_t_C[:, None]], 1)
    filled_CL = torch.cat([kept.filled_CK, torch.ones_like(kept.filled_CK[:, :1])], 1)
    q_CL = log_q_CL.exp()
    rows = Rows(
        kd_C=torch.where(filled_CL, found.term(log_p_CL, log_q_CL, config.beta), 0.0).sum(1),
        ce_C=plain.lse_C - (label_z_C - plain.top_C) if label_z_C is not None else torch.zeros_like(plain.lse_C),
        square_C=(plain.lse_C + plain.top_C).square(),
        mass_C=q_CL[:, :-1].sum(1),
        entropy_C=-(q_CL * log_q_CL).sum(1),
    )
    if grad_scale_C is None:
        return rows

    slope_CL = torch.where(filled_CL, found.slope(log_p_CL, log_q_CL, config.beta), 0.0)
    slope_CL -= q_CL * slope_CL.sum(1, keepdim=True)
    slope_CL *= (config.kd_weight * temperature * grad_scale_C)[:, None]  # T² from the objective, 1/T from z/T
    full_C = (config.ce_weight + 2 * config.z_loss * (plain.lse_C + plain.top_C)) * grad_scale_C
    kept_CK = slope_CL[:, :-1] + full_C[:, None] * plain.log_q_CK.exp()
    tail_C = full_C * plain.log_t_C.exp()
    if scratch_CV is None:
        z_CV.mul_((tail_C + slope_CL[:, -1])[:, None])
    else:
        z_CV.mul_(tail_C[:, None]).addcmul_(scratch_CV, slope_CL[:, -1:])
    z_CV.scatter_add_(1, kept.ids_CK, torch.where(kept.filled_CK, kept_CK, 0.0))
    _subtract_labels(z_CV, labels_C, config.ce_weight * grad_scale_C)
    return rows


def split_softmax(z_CV: Tensor, kept: Kept) -> _Split:
    """Turn ``z_CV`` into the conditional softmax of the tail, 0 in the kept columns, and return the rest."""
    z_CK = z_CV.gather(1, kept.ids_CK)
    # A row without any filled slot repeats column 0 in all of them: write back what is there.
    z_CV.scatter_(1, kept.ids_CK, torch.where(kept.filled_CK.any(1, keepdim=True), FLOOR, z_CK))
    z_CK = torch.where(kept.filled_CK, z_CK, FLOOR)
    tail_top_C = z_CV.amax(1)
    torch.softmax(z_CV, 1, out=z_CV)
    top_C = torch.maximum(tail_top_C, z_CK.amax(1))
    log_tail_C = tail_top_C - top_C - z_CV.amax(1).log()
    z_CK = z_CK - top_C[:, None]
    lse_C = torch.logaddexp(z_CK.logsumexp(1), log_tail_C)
    return _Split(top_C, log_tail_C, lse_C, z_CK - lse_C[:, None], log_tail_C - lse_C)


def dense_rows(
    z_CV: Tensor,
    log_p_CV: Tensor,
    labels_C: Tensor | None,
    grad_scale_C: Tensor | None,
    config: LossConfig,
) -> Rows:
    """Evaluate a chunk against the teacher's whole distribution at the config's temperature.

    Arguments and effect as for ``sparse_rows``; ``log_p_CV`` is -inf from ``vocab_size`` on.
    """
    found = divergence.load(config.divergence)
    log_q_CV = torch.log_softmax(z_CV / config.temperature, 1)
    lse_C = torch.logsumexp(z_CV, 1)
    label_z_C = z_CV.gather(1, labels_C[:, None]).squeeze(1) if labels_C is not None else None
    q_CV = log_q_CV.exp()
    rows = Rows(
        kd_C=found.term(log_p_CV, log_q_CV, config.beta).sum(1),
        ce_C=lse_C - label_z_C if label_z_C is not None else torch.zeros_like(lse_C),
        square_C=lse_C.square(),
        mass_C=torch.ones_like(lse_C),
        entropy_C=-(q_CV * log_q_CV).sum(1),
    )
    if grad_scale_C is None:
        return rows
    z_CV.sub_(lse_C[:, None]).exp_()
    z_CV.mul_(((config.ce_weight + 2 * config.z_loss * lse_C) * grad_scale_C)[:, None])
    slope_CV = found.slope(log_p_CV, log_q_CV, config.beta)
    kd_C1 = (config.kd_weight * config.temperature * grad_scale_C)[:, None]
    z_CV.addcmul_(slope_CV, kd_C1).addcmul_(q_CV, -kd_C1 * slope_CV.sum(1, keepdim=True))
    _subtract_labels(z_CV, labels_C, config.ce_weight * grad_scale_C)
    return rows


def _subtract_labels(z_CV: Tensor, labels_C: Tensor | None, amount_C: Tensor) -> None:
    if labels_C is not None:
        z_CV.scatter_add_(1, labels_C[:, None], -amount_C[:, None])
