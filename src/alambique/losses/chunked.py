"""A sweep over the tokens, chunk by chunk, in buffers that are used again: what the chunked paths have in common.

Dimension letters: N tokens, C tokens of a chunk, V columns, D hidden size.
"""

import torch
from torch import Tensor

from alambique.core.signal import DenseSignal, StatesSignal, TopKSignal
from alambique.losses.config import LossConfig
from alambique.losses.filtered import FILTER_TOKENS
from alambique.losses.objective import Rows, compare, dense_rows, locate, pick_labels, portion, spread, strip
from alambique.losses.project import Gradients, Head
from alambique.losses.targets import kept_entries
from alambique.losses.task import Task

_DENSE_BUFFERS = 8  # [C, V] arrays alive at once for a dense signal: logits, log p, log q, q, slope, temporaries


def student_head(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task) -> Head:
    """The student's head, or this process's block of it, cast once to the hidden states' dtype."""
    return Head(
        weight_VD,
        bias_V,
        operand_dtype=hidden_ND.dtype,
        vocab_size=task.local_vocab(weight_VD),
        softcap=task.config.logit_softcap,
        scale=task.config.logit_scale,
    )


def chunk_tokens(config: LossConfig, columns: int, sparse: bool = True) -> int:
    """Tokens per chunk that fit ``chunk_budget_mib``: depends on the vocabulary and the options, not on the input."""
    buffers = 1 + (config.temperature != 1) if sparse else _DENSE_BUFFERS
    row_bytes = 4 * columns * (buffers + (config.logit_softcap is not None))
    tokens = int(config.chunk_budget_mib * 2**20) // row_bytes
    if config.gradient_filter > 0:
        tokens = min(tokens, FILTER_TOKENS)
    return tokens // 128 * 128 if tokens >= 128 else max(1, tokens)  # multiples of 128 fill a GEMM's tiles


def num_chunks(hidden_ND: Tensor, weight_VD: Tensor, task: Task) -> int:
    """An upper bound on the chunks of a sweep."""
    size = chunk_tokens(task.config, weight_VD.shape[0], isinstance(task.signal, TopKSignal))
    return -(-hidden_ND.shape[0] // size)


class Workspace:
    """The [C, V] buffers of a sweep; ``take`` gives views for a chunk of fewer rows."""

    def __init__(self, head: Head, task: Task, tokens: int) -> None:
        sparse = isinstance(task.signal, TopKSignal)
        columns = head.columns if task.shard is None else head.rows  # processes must take equal chunks
        self.tokens = min(chunk_tokens(task.config, columns, sparse), max(1, tokens))
        self._z_CV = task.scale_N.new_empty(self.tokens, head.columns)
        self._soft_CV = torch.empty_like(self._z_CV) if sparse and task.config.temperature != 1 else None
        self._tanh_CV = torch.empty_like(self._z_CV) if head.softcap is not None else None

    def take(self, rows: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Views (logits, tempered logits or None, tanh or None) of the first ``rows`` rows."""
        soft_CV = self._soft_CV[:rows] if self._soft_CV is not None else None
        tanh_CV = self._tanh_CV[:rows] if self._tanh_CV is not None else None
        return self._z_CV[:rows], soft_CV, tanh_CV


def sweep(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, task: Task, gradients: Gradients | None
) -> Tensor:
    """Go over the tokens chunk by chunk; return the weighted sums of ``Rows`` and fill ``gradients`` if given.

    With a gradient filter, two sums of squares follow: of the dlogits dropped and of all.
    """
    head = student_head(hidden_ND, weight_VD, bias_V, task)
    space = Workspace(head, task, hidden_ND.shape[0])
    totals = task.scale_N.new_zeros(5)
    for start in range(0, hidden_ND.shape[0], space.tokens):
        rows = slice(start, min(start + space.tokens, hidden_ND.shape[0]))
        z_CV, soft_CV, tanh_CV = space.take(rows.stop - start)
        head.logits(hidden_ND[rows], z_CV, tanh_CV)
        totals += evaluate(z_CV, soft_CV, task, rows, gradients is not None).totals(task.scale_N[rows])
        if gradients is not None:
            head.pull_back(z_CV, tanh_CV)
            gradients.add(head, hidden_ND[rows], z_CV, start)
    if gradients is None:
        return totals
    if task.shard is not None:
        task.shard.sum_(gradients.hidden_ND, gradients.energies)
    return totals if gradients.energies is None else torch.cat([totals, gradients.energies.to(totals.dtype)])


def evaluate(z_CV: Tensor, soft_CV: Tensor | None, task: Task, rows: slice, with_gradient: bool) -> Rows:
    """Evaluate the objective for ``rows``, whose logits are in ``z_CV``; they become their gradient, or are lost.

    ``soft_CV`` is a buffer like ``z_CV``, for a top-K signal at a temperature other than 1.
    """
    config, signal = task.config, task.signal[rows]
    labels_C = task.labels_N[rows] if task.labels_N is not None else None
    grad_scale_C = task.scale_N[rows] * config.logit_scale if with_gradient else None
    if not isinstance(signal, TopKSignal):
        return dense_rows(z_CV, teacher_logprobs(signal, z_CV, task), labels_C, grad_scale_C, config)
    kept = kept_entries(signal, labels_C, config.tail, task.vocab_size, z_CV.dtype)
    start = task.shard.start if task.shard is not None else 0
    slots, label_z_C = locate(kept, start, start + z_CV.shape[1]), pick_labels(z_CV, labels_C, start)
    soft_here = None
    if soft_CV is not None:
        soft_here = strip(torch.div(z_CV, config.temperature, out=soft_CV), slots)[1]
    z_CK, here = strip(z_CV, slots)
    tail, soft_tail = here, soft_here
    if task.shard is not None:
        z_CK, label_z_C, tail, soft_tail = task.shard.join(z_CK, label_z_C, here, soft_here)
    found, factors = compare(kept, z_CK, tail, soft_tail, label_z_C, grad_scale_C, config)
    if factors is not None:
        if task.shard is not None:
            factors = portion(factors, here, tail, soft_here, soft_tail)
        spread(z_CV, soft_CV, slots, labels_C, factors, start)
    return found


def teacher_logprobs(signal: DenseSignal | StatesSignal, like_CV: Tensor, task: Task) -> Tensor:
    """Teacher's log-probabilities at the config's temperature over the vocabulary, -inf in padding, as ``like_CV``."""
    if isinstance(signal, StatesSignal):
        head = Head(
            signal.head_weight_VD.detach()[: task.vocab_size],
            signal.head_bias_V.detach()[: task.vocab_size] if signal.head_bias_V is not None else None,
            operand_dtype=signal.hidden_ND.dtype,
            vocab_size=task.vocab_size,
            softcap=signal.logit_softcap,
            scale=signal.logit_scale,
        )
        logits_CV = like_CV.new_empty(like_CV.shape[0], head.columns)
        head.logits(signal.hidden_ND.detach(), logits_CV)
    else:
        logits_CV = signal.logprobs_NV.detach()[:, : task.vocab_size].to(like_CV.dtype)
    if task.config.temperature != 1:
        logits_CV = logits_CV / task.config.temperature
    if like_CV.shape[1] == task.vocab_size:
        return torch.log_softmax(logits_CV, 1)
    log_p_CV = like_CV.new_full(like_CV.shape, -torch.inf)
    log_p_CV[:, : task.vocab_size] = torch.log_softmax(logits_CV, 1)
    return log_p_CV
