"""One Triton kernel per chunk of logits: the top-K objective of each row and, in place, its gradient.

One program owns one row. It takes the K kept logits out of the row, leaving FLOOR behind; goes over the vocabulary once
for the logsumexp of the tail that remains; evaluates the K + 1 classes in registers; and goes over the vocabulary a
second time to write the gradient, in two-byte form into the front half of the row's own memory. The maths and its
names are those of ``alambique/losses/objective.py``, here in the logits' dtype, so that float64 tests it exactly.

Dimension letters: C tokens of the chunk, V columns of logits (padding included), K kept entries.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from alambique.losses.config import LossConfig

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")  # those that _term and _slope know
BLOCK_COLUMNS = 4096  # assumption: 16 KiB of float32 a tile, 16 columns a thread; untuned
_WARPS = 8  # assumption: as above
_STATISTICS = 5  # kd, ce, squared logsumexp, student mass on the kept entries, entropy: the fields of objective.Rows
_FLOOR = tl.constexpr(-1e30)  # stands for a column that isn't there, finite so that a difference is never NaN


def constants(config: "LossConfig", tail_floor: float | None) -> dict[str, Any]:
    """The objective that the kernel is compiled for; ``tail_floor`` is the least mass of a teacher's tail, or None."""
    return {
        "DIVERGENCE": config.divergence,
        "BETA": config.beta,
        "LOG_BETA": math.log(config.beta),
        "LOG_REST": math.log1p(-config.beta),
        "TRUNCATE": config.tail == "truncate",
        "LOG_TAIL_FLOOR": None if tail_floor is None else math.log(tail_floor),
        "TEMPERATURE": config.temperature,
        "KD_WEIGHT": config.kd_weight,
        "CE_WEIGHT": config.ce_weight,
        "Z_LOSS": config.z_loss,
        "SCALE": config.logit_scale,
        "CAP": config.logit_softcap,
    }


def topk_rows(
    z_CV: Tensor,
    bias_V: Tensor | None,
    ids_CK: Tensor,
    log_p_CK: Tensor,
    log_r_C: Tensor,
    labels_C: Tensor | None,
    grad_scale_C: Tensor | None,
    grad_dtype: torch.dtype,
    vocab_size: int,
    objective: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Evaluate a chunk of raw logits, products of hidden states and head before bias, scale and soft-cap.

    Args:
        z_CV: raw logits, float32 or float64, rows contiguous; destroyed.
        bias_V: the head's bias in the logits' dtype, or None.
        ids_CK: int64 columns of the kept entries, distinct among the filled slots of a row.
        log_p_CK: the teacher's log-probabilities at temperature 1 after the tail rule, -inf in empty slots.
        log_r_C: log of the teacher's tail mass, likewise.
        labels_C: int64 columns of the labels, or None.
        grad_scale_C: factor on each row's gradient, which includes ``logit_scale``; None for values alone.
        grad_dtype: of the gradient: the logits' own, or one of two bytes.
        vocab_size: columns from here on are padding and get a gradient of 0.
        objective: what :func:`constants` gives, its divergence one of DIVERGENCES.

    Returns:
        [5, C] statistics in the order of ``objective.Rows``, and the gradient with respect to the raw logits, [C, V]
        in ``grad_dtype``: a view of z_CV's memory, undefined without ``grad_scale_C``.
    """
    rows_5C = torch.empty(_STATISTICS, z_CV.shape[0], dtype=z_CV.dtype, device=z_CV.device)
    dz_CV = z_CV if grad_dtype == z_CV.dtype else z_CV.view(grad_dtype)[:, : z_CV.shape[1]]
    if z_CV.is_meta or z_CV.shape[0] == 0:  # on meta tensors memory is counted, and the kernel allocates none
        return rows_5C, dz_CV
    _topk_rows[(z_CV.shape[0],)](
        z_CV,
        dz_CV,
        bias_V,
        ids_CK.contiguous(),
        log_p_CK.contiguous(),
        log_r_C,
        labels_C,
        grad_scale_C,
        rows_5C,
        z_CV.shape[0],
        z_CV.stride(0),
        dz_CV.stride(0),
        z_CV.shape[1],
        vocab_size,
        ids_CK.shape[1],
        **objective,
        BLOCK_V=min(BLOCK_COLUMNS, triton.next_power_of_2(z_CV.shape[1])),
        BLOCK_K=triton.next_power_of_2(ids_CK.shape[1]),
        num_warps=_WARPS,
        num_stages=1,  # the second pass writes where it has read: loads must not run ahead of the barrier
    )
    return rows_5C, dz_CV


@triton.jit
def _topk_rows(
    z_ptr,
    dz_ptr,
    bias_ptr,
    ids_ptr,
    log_p_ptr,
    log_r_ptr,
    label_ptr,
    grad_scale_ptr,
    rows_ptr,
    num_rows,
    z_stride,
    dz_stride,
    columns,
    vocab_size,
    num_kept,
    DIVERGENCE: tl.constexpr,
    BETA: tl.constexpr,
    LOG_BETA: tl.constexpr,
    LOG_REST: tl.constexpr,
    TRUNCATE: tl.constexpr,
    LOG_TAIL_FLOOR: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    KD_WEIGHT: tl.constexpr,
    CE_WEIGHT: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    dtype = z_ptr.dtype.element_ty
    slot = tl.arange(0, BLOCK_K)
    log_p = tl.load(log_p_ptr + row * num_kept + slot, mask=slot < num_kept, other=-float("inf"))
    filled = log_p > -float("inf")
    ids = tl.load(ids_ptr + row * num_kept + slot, mask=filled, other=0)
    log_r = tl.load(log_r_ptr + row)
    label = -1
    if label_ptr is not None:
        label = tl.load(label_ptr + row)

    z_k, chain_k, z_label = _take(z_ptr, bias_ptr, ids, filled, label, SCALE, CAP)
    tail_top, tail_sum, soft_sum = _tail(z_ptr, bias_ptr, vocab_size, TEMPERATURE, SCALE, CAP, BLOCK_V)

    # The K + 1 classes; all logarithms are relative to the row's largest logit.
    top = tl.maximum(tail_top, tl.max(z_k, 0))
    log_tail = tail_top - top + tl.log(tail_sum)
    plain_log_q, plain_log_t, lse = _normalise(z_k - top, log_tail)
    log_q, log_t = plain_log_q, plain_log_t
    if TEMPERATURE != 1.0:
        log_soft_tail = (tail_top - top) / TEMPERATURE + tl.log(soft_sum)
        log_q, log_t, _ = _normalise((z_k - top) / TEMPERATURE, log_soft_tail)
        # The teacher's tail at this temperature has the shape of the student's, see targets.temper.
        log_p, log_r = _temper(log_p, log_r, log_soft_tail - log_tail / TEMPERATURE, TEMPERATURE)
    if TRUNCATE:
        log_r = tl.full([], -float("inf"), dtype)
    if LOG_TAIL_FLOOR is not None:
        log_r = tl.maximum(log_r, tl.full([], LOG_TAIL_FLOOR, dtype))
    log_p, log_r = tl.maximum(log_p, _FLOOR), tl.maximum(log_r, _FLOOR)  # no mass, without 0·inf
    term_k = _term(log_p, log_q, DIVERGENCE, BETA, LOG_BETA, LOG_REST)
    term_t = _term(log_r, log_t, DIVERGENCE, BETA, LOG_BETA, LOG_REST)
    q = tl.where(filled, tl.exp(log_q), 0.0)
    t = tl.exp(log_t)
    rows_ptr += row
    tl.store(rows_ptr, tl.sum(tl.where(filled, term_k, 0.0), 0) + term_t)
    tl.store(rows_ptr + num_rows, lse - (z_label - top) if label_ptr is not None else lse * 0.0)
    tl.store(rows_ptr + 2 * num_rows, (lse + top) * (lse + top))
    tl.store(rows_ptr + 3 * num_rows, tl.sum(q, 0))
    tl.store(rows_ptr + 4 * num_rows, -tl.sum(tl.where(filled, q * log_q, 0.0), 0) - t * log_t)

    if grad_scale_ptr is not None:
        scale = tl.load(grad_scale_ptr + row)
        slope_k = tl.where(filled, _slope(log_p, log_q, DIVERGENCE, BETA, LOG_BETA, LOG_REST), 0.0)
        slope_t = _slope(log_r, log_t, DIVERGENCE, BETA, LOG_BETA, LOG_REST)
        slope_sum = tl.sum(slope_k, 0) + slope_t
        kd_scale = scale * (KD_WEIGHT * TEMPERATURE)  # T² from the objective, 1/T from z/T
        full = scale * (CE_WEIGHT + 2.0 * Z_LOSS * (lse + top))
        dz_k = ((slope_k - q * slope_sum) * kd_scale + full * tl.exp(plain_log_q)) * chain_k
        factor = full * tl.exp(plain_log_t) / tail_sum
        soft_factor = (slope_t - t * slope_sum) * kd_scale / soft_sum
        dz_ptr += row * dz_stride
        _spread(
            z_ptr, dz_ptr, bias_ptr, columns, vocab_size, tail_top, factor, soft_factor, label, scale * CE_WEIGHT,
            TEMPERATURE, SCALE, CAP, BLOCK_V,
        )  # fmt: skip
        dz_k = tl.where(ids == label, dz_k - CE_WEIGHT * scale * chain_k, dz_k)
        tl.debug_barrier()  # the kept columns were written as tail
        tl.store(dz_ptr + ids, dz_k.to(dz_ptr.dtype.element_ty), mask=filled)


@triton.jit
def _take(z_ptr, bias_ptr, ids, filled, label, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Take the kept logits out of the row, leaving FLOOR; return them, the soft-cap's derivative, the label's logit."""
    z_k, chain_k = _logits(tl.load(z_ptr + ids, mask=filled, other=0.0), ids, filled, bias_ptr, SCALE, CAP)
    there = label >= 0
    z_label, _ = _logits(tl.load(z_ptr + label, mask=there, other=0.0), label, there, bias_ptr, SCALE, CAP)
    tl.debug_barrier()
    tl.store(z_ptr + ids, tl.full(ids.shape, _FLOOR, z_ptr.dtype.element_ty), mask=filled)
    tl.debug_barrier()
    return z_k, chain_k, z_label


@triton.jit
def _tail(
    z_ptr,
    bias_ptr,
    vocab_size,
    TEMPERATURE: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """First pass: largest logit of what is left in the row, and Σ exp of the others relative to it, twice.

    The second sum is at the temperature. Sums run lane by lane, so that threads meet only at the end.
    """
    dtype = z_ptr.dtype.element_ty
    lane_top = tl.full([BLOCK_V], _FLOOR, dtype)
    lane_sum = tl.zeros([BLOCK_V], dtype)
    lane_soft_sum = tl.zeros([BLOCK_V], dtype)
    for start in range(0, vocab_size, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        raw = tl.load(z_ptr + column, mask=column < vocab_size, other=_FLOOR)
        z, _ = _logits(raw, column, raw > 0.5 * _FLOOR, bias_ptr, SCALE, CAP)
        new_top = tl.maximum(lane_top, z)
        lane_sum = lane_sum * tl.exp(lane_top - new_top) + tl.exp(z - new_top)
        if TEMPERATURE != 1.0:
            old = lane_soft_sum * tl.exp((lane_top - new_top) / TEMPERATURE)
            lane_soft_sum = old + tl.exp((z - new_top) / TEMPERATURE)
        lane_top = new_top
    tail_top = tl.max(lane_top, 0)
    tail_sum = tl.sum(lane_sum * tl.exp(lane_top - tail_top), 0)
    soft_sum = tail_sum
    if TEMPERATURE != 1.0:
        soft_sum = tl.sum(lane_soft_sum * tl.exp((lane_top - tail_top) / TEMPERATURE), 0)
    return tail_top, tail_sum, soft_sum


@triton.jit
def _spread(
    z_ptr,
    dz_ptr,
    bias_ptr,
    columns,
    vocab_size,
    tail_top,
    factor,
    soft_factor,
    label,
    label_share,
    TEMPERATURE: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Second pass: the gradient of the tail, formed in the logits' dtype and rounded once."""
    for start in range(0, columns, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        raw = tl.load(z_ptr + column, mask=column < vocab_size, other=_FLOOR)
        z, chain = _logits(raw, column, raw > 0.5 * _FLOOR, bias_ptr, SCALE, CAP)
        if TEMPERATURE != 1.0:
            dz = factor * tl.exp(z - tail_top) + soft_factor * tl.exp((z - tail_top) / TEMPERATURE)
        else:
            dz = (factor + soft_factor) * tl.exp(z - tail_top)
        dz = tl.where(column == label, dz - label_share, dz)
        dz = tl.where(column < vocab_size, dz * chain, 0.0)
        tl.debug_barrier()  # a tile's gradient lies over columns that other threads must have read
        tl.store(dz_ptr + column, dz.to(dz_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def _normalise(x_k, log_tail):
    """Log-probabilities of the kept entries and of the tail, and the logsumexp of both."""
    lse = tl.log(tl.sum(tl.exp(x_k), 0) + tl.exp(log_tail))
    return x_k - lse, log_tail - lse, lse


@triton.jit
def _temper(log_p, log_r, log_shape, TEMPERATURE: tl.constexpr):
    """The teacher's classes at the temperature; where there is no mass at all there is none after."""
    log_p = log_p / TEMPERATURE
    log_r = log_r / TEMPERATURE + log_shape
    top = tl.maximum(tl.maximum(tl.max(log_p, 0), log_r), _FLOOR)
    mass = tl.sum(tl.exp(log_p - top), 0) + tl.exp(log_r - top)
    log_mass = top + tl.log(tl.where(mass > 0, mass, 1.0))
    return log_p - log_mass, log_r - log_mass


@triton.jit
def _logits(raw, column, there, bias_ptr, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Logits from raw ones, FLOOR where a column is not there, and the soft-cap's derivative."""
    z = raw
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column, mask=there, other=0.0)
    if SCALE != 1.0:
        z *= SCALE
    chain = 1.0
    if CAP is not None:
        z = tl.where(there, z, 0.0) / CAP
        small = tl.exp(-2.0 * tl.abs(z))  # tanh and its derivative without cancellation in the latter
        chain = 4.0 * small / ((1.0 + small) * (1.0 + small))
        z = CAP * tl.where(z < 0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)
    return tl.where(there, z, _FLOOR), chain


@triton.jit
def _logaddexp(a, b):
    top = tl.maximum(tl.maximum(a, b), _FLOOR)  # not -inf, so that two of them give -inf and not NaN
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def _term(log_p, log_q, DIVERGENCE: tl.constexpr, BETA: tl.constexpr, LOG_BETA: tl.constexpr, LOG_REST: tl.constexpr):
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    if DIVERGENCE == "forward_kl":
        term = tl.where(p > 0, p * (log_p - log_q), 0.0)
    elif DIVERGENCE == "reverse_kl":
        term = tl.where(q > 0, q * (log_q - log_p), 0.0)
    elif DIVERGENCE == "jsd":
        log_m = _logaddexp(log_p + LOG_BETA, log_q + LOG_REST)
        term = BETA * tl.where(p > 0, p * (log_p - log_m), 0.0) + (1.0 - BETA) * q * (log_q - log_m)
    else:
        tl.static_assert(DIVERGENCE == "tvd")
        term = 0.5 * tl.abs(p - q)
    return term


@triton.jit
def _slope(log_p, log_q, DIVERGENCE: tl.constexpr, BETA: tl.constexpr, LOG_BETA: tl.constexpr, LOG_REST: tl.constexpr):
    """Derivative of ``_term`` with respect to log_q."""
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    if DIVERGENCE == "forward_kl":
        slope = -p
    elif DIVERGENCE == "reverse_kl":
        slope = tl.where(q > 0, q * (log_q - log_p + 1.0), 0.0)
    elif DIVERGENCE == "jsd":
        slope = (1.0 - BETA) * q * (log_q - _logaddexp(log_p + LOG_BETA, log_q + LOG_REST))
    else:
        tl.static_assert(DIVERGENCE == "tvd")
        slope = 0.5 * q * tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
    return slope
