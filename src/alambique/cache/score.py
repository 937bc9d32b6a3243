"""The teacher's forward pass over rows, in batches that shrink when memory runs out.

Dimensions: R rows, B rows of a batch, S positions, D hidden size, V vocabulary, N captured tokens, K entries.
"""

import sys
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from alambique.cache.codec import Arrays, Entries
from alambique.cache.drift import Drift, drift
from alambique.cache.head import Head, top_entries
from alambique.cache.sampled import Sampler
from alambique.cache.shards import Block
from alambique.cache.states import to_bits
from alambique.core.errors import UserError
from alambique.core.measure import device_name

DtypeName = Literal["float32", "bfloat16", "float16"]


class Rows(Protocol):
    """Packed rows, as the prepare stage makes them, on the CPU."""

    @property
    def input_ids_RS(self) -> Tensor:
        """int32 token ids."""

    @property
    def document_ids_RS(self) -> Tensor:
        """int32 document numbers, -1 on padding."""

    @property
    def loss_mask_RS(self) -> Tensor:
        """bool, True where the next token is a target."""

    def row_hashes(self) -> list[str]:
        """Hex sha256 of each row's content."""


class Teacher(Protocol):
    """A causal language model with its backbone and its output head apart."""

    head_weight_VD: Any
    head_bias_V: Tensor | None
    logit_softcap: float | None
    logit_scale: float

    def hidden(self, input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, S, D]."""


class Recorder(Teacher, Protocol):
    """A teacher whose layers can be seen."""

    def recording(self, layers: Sequence[int]) -> AbstractContextManager[dict[int, Tensor]]:
        """Hidden states after ``layers``, left here by the forward passes inside: [B, S, D] or [1, B·S, D]."""


class Scorer:
    """Scores rows with a teacher.

    Args:
        rows: what to score; only positions with a True loss mask are kept.
        teacher: on ``device``.
        top_k, top_p: what is kept (see ``CaptureConfig``).
        sampler: draws what is kept instead.
        layers: whose hidden states are kept too.
        logits_mib: memory for the logits of a chunk.
        batch_rows: rows of one forward pass, until memory runs out.
        vocab_size: rows of the head beyond it are padding, and cut.
        device: where the teacher takes its input.
    """

    def __init__(
        self,
        rows: Rows,
        teacher: Teacher,
        *,
        top_k: int,
        top_p: float,
        sampler: Sampler | None = None,
        layers: Sequence[int] = (),
        logits_mib: int,
        batch_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        if vocab_size > (head_rows := teacher.head_weight_VD.shape[0]):
            raise UserError(
                f"the tokenizer has {vocab_size} tokens, but the teacher's output head only {head_rows} rows: use the "
                "teacher's own tokenizer."
            )
        self._rows, self._mask_RS, self._teacher = rows, rows.loss_mask_RS.numpy(), teacher
        self._top_k, self._top_p, self._sampler, self._logits_mib = top_k, top_p, sampler, logits_mib
        self._batch_rows, self._device, self._layers = batch_rows, device, layers
        self.head = Head(
            teacher.head_weight_VD.detach()[:vocab_size],
            None if teacher.head_bias_V is None else teacher.head_bias_V.detach()[:vocab_size],
            teacher.logit_softcap,
            teacher.logit_scale,
        )

    def entries(self, numbers: range, report: Callable[[int], None]) -> Entries:
        """The kept entries of consecutive rows, on the CPU; ``report`` hears of each batch's captured tokens.

        Raises:
            UserError: a single row doesn't fit into memory, or the teacher gives NaN.
        """
        parts = []
        start = numbers.start
        while start < numbers.stop:
            size = min(self._batch_rows, numbers.stop - start)
            part = self._try_batch(start, start + size)
            if part is None:
                self._halve_batch(size)
                continue
            parts.append(part)
            report(len(part[0]))
            start += size
        ids, logprobs, tails, *states = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        counts_R = self._mask_RS[numbers.start : numbers.stop].sum(axis=1, dtype=np.int64)
        return Entries(ids, logprobs, tails, counts_R, self.head.weight_VD.shape[0], *states)

    def drift(self, number: int, first: Arrays) -> Drift:
        """Score one row again, alone, and compare with its ``first`` scoring: kernels may round otherwise."""
        return drift(first, self.entries(range(number, number + 1), lambda _: None).of_row(0))

    def drifts(self, block: Block, entries: Entries, twice: Set[str]) -> dict[str, Drift]:
        """The drift of those rows of a scored block that are in ``twice``, by content hash."""
        return {
            digest: self.drift(row, entries.of_row(row - block.first_row))
            for row, digest in zip(block.rows, block.row_hashes, strict=True)
            if digest in twice
        }

    def _try_batch(self, start: int, stop: int) -> list[Any] | None:
        """Ids, logprobs, tail masses and perhaps states of rows [start, stop) in numpy, or None when memory ran out."""
        try:
            with torch.inference_mode(), self._recording() as states:
                input_ids_BS = self._rows.input_ids_RS[start:stop].to(self._device)
                document_ids_BS = self._rows.document_ids_RS[start:stop].to(self._device)
                # Counted on the CPU, so that the device need not be waited for.
                positions_N = torch.from_numpy(np.flatnonzero(self._mask_RS[start:stop])).to(self._device)
                hidden_BSD = self._teacher.hidden(input_ids_BS, document_ids_BS)
                # A teacher that is spread over GPUs ends on another one than it began, and its head may be on a third.
                hidden_ND = hidden_BSD.flatten(0, 1).index_select(0, positions_N.to(hidden_BSD.device))
                hidden_ND = hidden_ND.to(self.head.weight_VD.device, self.head.weight_VD.dtype)
                if self._sampler is None:
                    kept = top_entries(hidden_ND, self.head, self._top_k, self._logits_mib, self._top_p)
                else:
                    kept = self._sampler.entries(hidden_ND, self.head, range(start, stop), self._logits_mib)
                found = [tensor.cpu().numpy() for tensor in kept]
                if self._layers:
                    flat = (states.pop(layer).flatten(0, 1) for layer in self._layers)
                    picked = [to_bits(state.index_select(0, positions_N.to(state.device))) for state in flat]
                    found.append(np.stack(picked, axis=1))
        except torch.OutOfMemoryError:
            return None
        finite_N = np.isfinite(found[2])
        if not finite_N.all():
            index = int(np.flatnonzero(~finite_N)[0])
            row = start + int(positions_N[index]) // self._mask_RS.shape[1]
            raise UserError(
                f"the teacher gives NaN or infinite logits in row {row} of the training rows: choose another "
                f"teacher.dtype than {str(self.head.weight_VD.dtype).removeprefix('torch.')}, or another attention "
                "implementation."
            )
        return found

    def _recording(self) -> AbstractContextManager[dict[int, Tensor]]:
        return cast(Recorder, self._teacher).recording(self._layers) if self._layers else nullcontext({})

    def _halve_batch(self, size: int) -> None:
        if size == 1:
            raise UserError(
                f"one row of {self._mask_RS.shape[1]} tokens does not fit in the memory of "
                f"{device_name(self._device)}: lower teacher.logits_mib or prepare.seq_len, use a smaller teacher, or "
                "spread it over several GPUs (teacher.device_map)."
            )
        self._batch_rows = size // 2
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"capture: out of memory with {size} rows, trying {self._batch_rows}", file=sys.stderr)
