"""A sweep over the tokens, chunk by chunk, in buffers that are used again: what the chunked paths have in common.

Dimension letters: N tokens, C tokens of a chunk, V columns, D hidden size.
"""

import torch
from torch import Tensor

from alambique.core.signal import DenseSignal, StatesSignal, TopKSignal
from alambique.losses.config import LossConfig
from alambique.losses.filtered import FILTER_TOKENS
from alambique.losses.objective import Rows, compare, dense_rows, portion, spread, strip
from alambique.losses.project import Gradients, Head
from alambique.losses.task import Inputs, Task, blocks

_DENSE_BUFFERS = 8  # [C, V] arrays alive at once for a dense signal: logits, log p, log q, q, slope, temporaries


def student_head(inputs: Inputs, task: Task) -> Head:
    """The student's head, or this process's block of it, cast once to the hidden states' dtype."""
    return Head(
        inputs.weight_VD,
        inputs.bias_V,
        operand_dtype=inputs.hidden_ND.dtype,
        vocab_size=task.local_vocab(inputs.weight_VD),
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


def num_chunks(inputs: Inputs, task: Task) -> int:
    """An upper bound on the chunks of a sweep."""
    size = chunk_tokens(task.config, inputs.weight_VD.shape[0], isinstance(task.signal, TopKSignal))
    return -(-inputs.hidden_ND.shape[0] // size)


class Buffers:
    """Memory for ``elements`` logits at a time, and for as many tempered ones and tanh where the objective has them."""

    def __init__(self, task: Task, elements: int) -> None:
        soft = isinstance(task.signal, TopKSignal) and task.config.temperature != 1
        wanted = (True, soft, task.config.logit_softcap is not None)
        self._memory = [task.scale_N.new_empty(elements) if want else None for want in wanted]

    def take(self, rows: int, columns: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Views [rows, columns]: logits, tempered logits or None, tanh or None."""
        z_CV, soft_CV, tanh_CV = (
            None if memory is None else memory[: rows * columns].view(rows, columns) for memory in self._memory
        )
        assert z_CV is not None
        return z_CV, soft_CV, tanh_CV


class Workspace(Buffers):
    """The [C, V] buffers of a sweep over ``total`` tokens, of which a chunk has ``tokens`` at most."""

    def __init__(self, head: Head, task: Task, total: int) -> None:
        columns = head.columns if task.shard is None else head.rows  # processes must take equal chunks
        fitting = chunk_tokens(task.config, columns, isinstance(task.signal, TopKSignal))
        self.tokens = min(fitting, max(1, total))
        super().__init__(task, self.tokens * head.columns)


def sweep(inputs: Inputs, task: Task, gradients: Gradients | None) -> Tensor:
    """Go over the tokens chunk by chunk; return the weighted sums of ``Rows`` and fill ``gradients`` if given.

    With a gradient filter, two sums of squares follow: of the dlogits dropped and of all.
    """
    hidden_ND, head = inputs.hidden_ND, student_head(inputs, task)
    space = Workspace(head, task, hidden_ND.shape[0])
    totals = task.scale_N.new_zeros(5)
    for rows in blocks(hidden_ND.shape[0], space.tokens):
        z_CV, soft_CV, tanh_CV = space.take(rows.stop - rows.start, head.columns)
        head.logits(hidden_ND[rows], z_CV, tanh_CV)
        totals += evaluate(z_CV, soft_CV, task, rows, gradients is not None).totals(task.scale_N[rows])
        if gradients is not None:
            head.pull_back(z_CV, tanh_CV)
            gradients.add(head, hidden_ND[rows], z_CV, rows.start)
    if gradients is None:
        return totals
    if task.shard is not None:
        task.shard.sum_(gradients.hidden_ND, gradients.energies)
    return totals if gradients.energies is None else torch.cat([totals, gradients.energies.to(totals.dtype)])


def evaluate(z_CV: Tensor, soft_CV: Tensor | None, task: Task, rows: slice, with_gradient: bool) -> Rows:
    """Evaluate the objective for ``rows``, whose logits are in ``z_CV``; they become their gradient, or are lost.

    ``soft_CV`` is a buffer like ``z_CV``, for a top-K signal at a temperature other than 1.
    """
    config, signal, labels_C = task.config, task.signal, task.labels(rows)
    grad_scale_C = task.scale_N[rows] * config.logit_scale if with_gradient else None
    if not isinstance(signal, TopKSignal):
        return dense_rows(z_CV, teacher_logprobs(signal[rows], z_CV, task), labels_C, grad_scale_C, config)
    kept, start = task.kept(rows), task.shard.start if task.shard is not None else 0
    slots, here = strip(z_CV, soft_CV, kept, labels_C, start, config.temperature)
    whole = here if task.shard is None else task.shard.join(here)
    found, factors = compare(kept, whole, grad_scale_C, config)
    if factors is not None:
        factors = factors if task.shard is None else portion(factors, here, whole)
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
