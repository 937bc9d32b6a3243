"""The maths of a chunk: from logits to the loss of each row, and to its gradient with respect to the logits.

Closed forms, no autograd. With q = softmax(z), D = Σ term(log p, log q) over classes and a = ∂D/∂log q, the chain rule
through the softmax gives ∂D/∂z = a - q·Σa. For a top-K signal the classes are the kept entries S and one tail of
student mass t = 1 - Σ_S q; a tail column j, of conditional probability c_j = q_j/t within the tail, then gets
c_j·(a_t - t·Σa). The softmax is therefore taken over the tail alone and joined with the K kept logits in their small
arrays: no 1 - Q that cancels, and no clamp that kills a gradient.

A path works in four steps, of which only the first and the last touch a block of logits. A block is all columns, a tile
of them, or one rank's share: ``strip`` (take the kept logits out, softmax of the tail in place), join the blocks'
``Student``, ``compare`` (loss and gradient factors), ``spread`` (gradient over the block).

Dimension letters: C tokens of the chunk, V columns of a block, K kept entries, L classes (K + 1).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alambique.losses.config import LossConfig
from alambique.losses.divergence import DIVERGENCES
from alambique.losses.targets import Kept, temper

# Stands for a column that isn't there. Finite, so that a row of nothing else gives a harmless softmax instead of NaN;
# far below any logit, so that its exponential beside a real column is exactly 0.
FLOOR = -1e30


class Rows(NamedTuple):
    """Per-row values, each [C] in nats but for ``mass_C``."""

    kd_C: Tensor  # the divergence D, without T² and weights
    ce_C: Tensor  # cross-entropy with the label; zeros without labels
    square_C: Tensor  # logsumexp of the logits, squared
    mass_C: Tensor  # student mass on the kept entries
    entropy_C: Tensor  # of the student over the classes compared

    def totals(self, scale_C: Tensor) -> Tensor:
        """Sums over rows weighted by ``scale_C``, shape [5] in field order."""
        return torch.stack(self) @ scale_C


class LogSum(NamedTuple):
    """log Σ exp of logits as a largest logit and a rest, so that a large common offset costs no digits."""

    top_C: Tensor
    rest_C: Tensor

    def join(self, other: "LogSum") -> "LogSum":
        """Of both sets of logits."""
        top_C = torch.maximum(self.top_C, other.top_C)
        return LogSum(top_C, torch.logaddexp(self.relative_to(top_C), other.relative_to(top_C)))

    def relative_to(self, top_C: Tensor) -> Tensor:
        """The logarithm after subtracting ``top_C`` from all logits."""
        return self.rest_C + (self.top_C - top_C)


class Student(NamedTuple):
    """A block's part of the student's logits, or that of several blocks; FLOOR stands for what another block holds."""

    z_CK: Tensor  # kept logits
    tail: LogSum  # of all others
    soft_tail: LogSum | None  # the same of logits / temperature; None at temperature 1
    label_z_C: Tensor | None  # logits of the labels, or None

    def join(self, other: "Student") -> "Student":
        """Of both blocks."""
        soft_tail, label_z_C = self.soft_tail, self.label_z_C
        if soft_tail is not None and other.soft_tail is not None:
            soft_tail = soft_tail.join(other.soft_tail)
        if label_z_C is not None and other.label_z_C is not None:
            label_z_C = torch.maximum(label_z_C, other.label_z_C)
        return Student(torch.maximum(self.z_CK, other.z_CK), self.tail.join(other.tail), soft_tail, label_z_C)


class Slots(NamedTuple):
    """Where a block holds the kept entries: column of each slot, and whether the slot is filled and in this block.

    Slots that aren't repeat the column of one that is, so that writing one value to all of a row's slots is safe.
    """

    at_CK: Tensor
    mine_CK: Tensor


class Factors(NamedTuple):
    """A chunk's gradient before it is spread: of the kept logits, and per unit of the tail's conditional softmax."""

    kept_CK: Tensor
    tail_C: Tensor  # multiplies the tail's softmax at temperature 1
    soft_tail_C: Tensor | None  # multiplies the tail's softmax at the config's temperature
    label_C: Tensor  # is subtracted in the label's column


class _LogProbs(NamedTuple):
    log_q_CK: Tensor
    log_t_C: Tensor
    top_C: Tensor
    lse_C: Tensor  # relative to top_C


def strip(
    z_CV: Tensor, soft_CV: Tensor | None, kept: Kept, labels_C: Tensor | None, start: int, temperature: float
) -> tuple[Slots, Student]:
    """Take the kept logits out of the block that begins at column ``start``, and leave the softmax of the rest there.

    ``soft_CV`` is a buffer like the block, for a temperature other than 1: it gets the same at that temperature.
    """
    slots = _locate(kept, start, start + z_CV.shape[1])
    label_z_C, soft_tail = _pick_labels(z_CV, labels_C, start), None
    if soft_CV is not None:
        soft_tail = _take_out(torch.div(z_CV, temperature, out=soft_CV), slots)[1]
    z_CK, tail = _take_out(z_CV, slots)
    return slots, Student(z_CK, tail, soft_tail, label_z_C)


def _locate(kept: Kept, start: int, stop: int) -> Slots:
    at_CK = kept.ids_CK - start
    mine_CK = kept.filled_CK & (at_CK >= 0) & (at_CK < stop - start)
    at_CK = at_CK.clamp(0, stop - start - 1)
    first_C1 = mine_CK.to(torch.uint8).argmax(1, keepdim=True)
    return Slots(torch.where(mine_CK, at_CK, at_CK.gather(1, first_C1)), mine_CK)


def _take_out(z_CV: Tensor, slots: Slots) -> tuple[Tensor, LogSum]:
    z_CK = z_CV.gather(1, slots.at_CK)
    # A row without any slot here repeats one column in all of them: write back what is there.
    z_CV.scatter_(1, slots.at_CK, torch.where(slots.mine_CK.any(1, keepdim=True), FLOOR, z_CK))
    top_C = z_CV.amax(1)
    torch.softmax(z_CV, 1, out=z_CV)
    return torch.where(slots.mine_CK, z_CK, FLOOR), LogSum(top_C, -z_CV.amax(1).log())


def _pick_labels(z_CV: Tensor, labels_C: Tensor | None, start: int) -> Tensor | None:
    if labels_C is None:
        return None
    at_C = labels_C - start
    mine_C = (at_C >= 0) & (at_C < z_CV.shape[1])
    return torch.where(mine_C, z_CV.gather(1, at_C.clamp(0, z_CV.shape[1] - 1)[:, None]).squeeze(1), FLOOR)


def compare(
    kept: Kept, student: Student, grad_scale_C: Tensor | None, config: LossConfig
) -> tuple[Rows, Factors | None]:
    """Evaluate rows from the teacher's classes at temperature 1 and the student's of all blocks.

    ``grad_scale_C`` is the factor on each row's gradient; None for values alone, without ``Factors``.
    """
    found, temperature = DIVERGENCES[config.divergence], config.temperature
    z_CK, tail, soft_tail, label_z_C = student
    plain = soft = _normalise(z_CK, tail)
    log_shape_C = None
    if soft_tail is not None:
        soft = _normalise(z_CK / temperature, soft_tail)
        log_shape_C = soft_tail.rest_C - tail.rest_C / temperature + (soft_tail.top_C - tail.top_C / temperature)
    kept = temper(kept, config.tail, temperature, log_shape_C, found.infinite_without_teacher)
    log_p_CL = torch.cat([kept.log_p_CK, kept.log_r_C[:, None]], 1)
    log_q_CL = torch.cat([soft.log_q_CK, soft.log_t_C[:, None]], 1)
    filled_CL = torch.cat([kept.filled_CK, torch.ones_like(kept.filled_CK[:, :1])], 1)
    q_CL = log_q_CL.exp()
    lse_C = plain.top_C + plain.lse_C
    rows = Rows(
        kd_C=torch.where(filled_CL, found.term(log_p_CL, log_q_CL, config.beta), 0.0).sum(1),
        ce_C=plain.lse_C - (label_z_C - plain.top_C) if label_z_C is not None else torch.zeros_like(lse_C),
        square_C=lse_C.square(),
        mass_C=q_CL[:, :-1].sum(1),
        entropy_C=-(q_CL * log_q_CL).sum(1),
    )
    if grad_scale_C is None:
        return rows, None
    slope_CL = torch.where(filled_CL, found.slope(log_p_CL, log_q_CL, config.beta), 0.0)
    slope_CL -= q_CL * slope_CL.sum(1, keepdim=True)
    slope_CL *= (config.kd_weight * temperature * grad_scale_C)[:, None]  # T² from the objective, 1/T from z/T
    full_C = (config.ce_weight + 2 * config.z_loss * lse_C) * grad_scale_C
    kept_CK = torch.where(kept.filled_CK, slope_CL[:, :-1] + full_C[:, None] * plain.log_q_CK.exp(), 0.0)
    tail_C, label_C = full_C * plain.log_t_C.exp(), config.ce_weight * grad_scale_C
    if soft_tail is None:
        return rows, Factors(kept_CK, tail_C + slope_CL[:, -1], None, label_C)
    return rows, Factors(kept_CK, tail_C, slope_CL[:, -1], label_C)


def spread(
    c_CV: Tensor, soft_c_CV: Tensor | None, slots: Slots, labels_C: Tensor | None, factors: Factors, start: int
) -> None:
    """Turn a stripped block into the gradient of its logits, in place; ``factors`` are the block's ``portion``."""
    c_CV.mul_(factors.tail_C[:, None])
    if soft_c_CV is not None and factors.soft_tail_C is not None:
        c_CV.addcmul_(soft_c_CV, factors.soft_tail_C[:, None])
    c_CV.scatter_add_(1, slots.at_CK, torch.where(slots.mine_CK, factors.kept_CK, 0.0))
    _subtract_labels(c_CV, labels_C, factors.label_C, start)


def portion(factors: Factors, here: Student, whole: Student) -> Factors:
    """The factors for the block ``here``, one of several."""
    soft_C = factors.soft_tail_C
    if soft_C is not None and here.soft_tail is not None and whole.soft_tail is not None:
        soft_C = soft_C * _share(here.soft_tail, whole.soft_tail)
    return factors._replace(tail_C=factors.tail_C * _share(here.tail, whole.tail), soft_tail_C=soft_C)


def _share(block: LogSum, tail: LogSum) -> Tensor:
    return (block.relative_to(tail.top_C) - tail.rest_C).exp()


def dense_rows(
    z_CV: Tensor, log_p_CV: Tensor, labels_C: Tensor | None, grad_scale_C: Tensor | None, config: LossConfig
) -> Rows:
    """Evaluate a chunk of all columns against the teacher's whole distribution at the config's temperature.

    ``z_CV`` ends, with ``grad_scale_C``, as the gradient. ``log_p_CV`` is -inf where ``z_CV`` is FLOOR for padding.
    """
    found, temperature = DIVERGENCES[config.divergence], config.temperature
    log_q_CV = torch.log_softmax(z_CV if temperature == 1 else z_CV / temperature, 1)
    top_C = z_CV.amax(1)
    rest_C = torch.logsumexp(z_CV - top_C[:, None], 1)
    label_z_C = _pick_labels(z_CV, labels_C, 0)
    q_CV = log_q_CV.exp()
    rows = Rows(
        kd_C=found.term(log_p_CV, log_q_CV, config.beta).sum(1),
        ce_C=rest_C - (label_z_C - top_C) if label_z_C is not None else torch.zeros_like(top_C),
        square_C=(top_C + rest_C).square(),
        mass_C=torch.ones_like(top_C),
        entropy_C=-(q_CV * log_q_CV).sum(1),
    )
    if grad_scale_C is None:
        return rows
    full_C = (config.ce_weight + 2 * config.z_loss * (top_C + rest_C)) * grad_scale_C
    torch.softmax(z_CV, 1, out=z_CV).mul_(full_C[:, None])
    slope_CV = found.slope(log_p_CV, log_q_CV, config.beta)
    kd_C1 = (config.kd_weight * temperature * grad_scale_C)[:, None]
    z_CV.addcmul_(slope_CV.addcmul_(q_CV, -slope_CV.sum(1, keepdim=True)), kd_C1)
    _subtract_labels(z_CV, labels_C, config.ce_weight * grad_scale_C, 0)
    return rows


def _subtract_labels(z_CV: Tensor, labels_C: Tensor | None, amount_C: Tensor, start: int) -> None:
    if labels_C is not None:
        at_C = labels_C - start
        amount_C = torch.where((at_C >= 0) & (at_C < z_CV.shape[1]), amount_C, 0.0)
        z_CV.scatter_add_(1, at_C.clamp(0, z_CV.shape[1] - 1)[:, None], -amount_C[:, None])


def _normalise(z_CK: Tensor, tail: LogSum) -> _LogProbs:
    top_C = torch.maximum(tail.top_C, z_CK.amax(1))
    z_CK, log_tail_C = z_CK - top_C[:, None], tail.relative_to(top_C)
    lse_C = torch.logaddexp(z_CK.logsumexp(1), log_tail_C)
    return _LogProbs(z_CK - lse_C[:, None], log_tail_C - lse_C, top_C, lse_C)
