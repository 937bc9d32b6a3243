"""The teacher's side of a sparse objective: its kept entries and tail as classes, by the tail rule and temperature.

Dimension letters: C tokens of a chunk, K kept entries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from alambique.core.signal import TopKSignal
from alambique.losses.config import Tail

# Below float32's resolution a tail mass can't be told from rounding; a divergence that is infinite at zero teacher
# mass sees at least this much. It bounds the target, never the student, so that no gradient is lost.
TAIL_FLOOR = 1.2e-7


@dataclass(frozen=True)
class Kept:
    """Teacher classes of a chunk: K entries and one tail."""

    ids_CK: Tensor  # int64 columns; what an empty slot names means nothing
    filled_CK: Tensor  # False for empty slots, which take part in nothing
    log_p_CK: Tensor  # log-probabilities, -inf in empty slots
    log_r_C: Tensor  # log of the tail's mass, -inf for none


def kept_entries(signal: TopKSignal, labels_C: Tensor | None, tail: Tail, vocab_size: int, dtype: torch.dtype) -> Kept:
    """Apply the tail rule at temperature 1; ``truncate`` keeps its tail here, see ``temper``.

    ``residual_to_label`` needs labels and adds a slot for them.
    """
    ids_CK, log_p_CK = signal.ids_NK.long(), signal.logprobs_NK.to(dtype)
    r_C = signal.tail_mass_N.to(dtype).clamp_min(0.0)  # capture computes it unrounded; a negative one is rounding
    if tail == "sampled":
        ids_CK, log_p_CK = _merge_repeats(ids_CK, log_p_CK)
    filled_CK = log_p_CK > -torch.inf
    if tail == "residual_to_label" and labels_C is not None:
        ids_CK, log_p_CK, filled_CK = _add_label(ids_CK, log_p_CK, filled_CK, labels_C, r_C)
    if tail in ("renormalise", "residual_to_label", "sampled"):
        r_C = torch.zeros_like(r_C)
    else:  # with every column kept there is no tail to hold the rounding error
        r_C = r_C.masked_fill(filled_CK.sum(-1) == vocab_size, 0.0)
    if tail == "renormalise":
        log_p_CK = torch.where(filled_CK, log_p_CK - log_p_CK.logsumexp(-1, keepdim=True), -torch.inf)
    return Kept(ids_CK, filled_CK, log_p_CK, r_C.log())


def temper(kept: Kept, tail: Tail, temperature: float, log_shape_C: Tensor | None, floored: bool) -> Kept:
    """Bring the classes to ``temperature`` and finish the tail rule.

    A cache holds the tail's mass but not its shape, on which its mass at another temperature depends. It is given the
    shape of the student's own tail, as ``bucket`` does implicitly at temperature 1: ``log_shape_C`` is the log of
    Σ c_j^(1/T) over the student's tail, c_j its conditional probabilities, taken as constant. Equal distributions
    then stay equal at every temperature.
    """
    log_p_CK, log_r_C = kept.log_p_CK, kept.log_r_C
    if log_shape_C is not None:
        log_p_CK = log_p_CK / temperature
        log_r_C = log_r_C / temperature + log_shape_C
        log_total_C = torch.logaddexp(log_p_CK.logsumexp(-1), log_r_C)
        some_C = log_total_C > -torch.inf
        log_p_CK = torch.where(kept.filled_CK, log_p_CK - log_total_C[:, None], -torch.inf)
        log_r_C = torch.where(some_C, log_r_C - log_total_C, -torch.inf)
    if tail == "truncate":
        log_r_C = torch.full_like(log_r_C, -torch.inf)
    if floored:
        log_r_C = log_r_C.clamp_min(torch.tensor(TAIL_FLOOR, dtype=log_r_C.dtype).log().item())
    return Kept(kept.ids_CK, kept.filled_CK, log_p_CK, log_r_C)


def _add_label(
    ids_CK: Tensor, log_p_CK: Tensor, filled_CK: Tensor, labels_C: Tensor, r_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the tail's mass to the label: to its slot, or to a new one if it has none."""
    label_C1, log_r_C1 = labels_C[:, None], r_C.log()[:, None]
    hit_CK = filled_CK & (ids_CK == label_C1)
    log_p_CK = torch.where(hit_CK, torch.logaddexp(log_p_CK, log_r_C1), log_p_CK)
    log_p_CK = torch.cat([log_p_CK, log_r_C1.masked_fill(hit_CK.any(-1, keepdim=True), -torch.inf)], -1)
    return torch.cat([ids_CK, label_C1], -1), log_p_CK, log_p_CK > -torch.inf


def _merge_repeats(ids_CK: Tensor, log_p_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Add up the weights of ids that were drawn more than once; the slots left over become empty."""
    ids_CK, order_CK = ids_CK.sort(dim=-1)
    weights_CK = log_p_CK.exp().gather(-1, order_CK)
    new_CK = torch.ones_like(ids_CK)
    new_CK[:, 1:] = (ids_CK[:, 1:] != ids_CK[:, :-1]).to(new_CK.dtype)
    slot_CK = new_CK.cumsum(-1) - 1
    merged_CK = torch.zeros_like(weights_CK).scatter_add_(-1, slot_CK, weights_CK)
    return torch.zeros_like(ids_CK).scatter_(-1, slot_CK, ids_CK), merged_CK.log()
