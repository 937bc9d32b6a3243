"""What each step trains on: rows in a seeded order, joined to the teacher's signal one step ahead of need.

Dimensions: R rows of a step, B rows of a micro-batch, S positions, N positions that predict something, K entries.
Where processes share rows, labels, signal and hidden states are those of fewer positions, the process's part.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alambique.cache.reader import TeacherCache
from alambique.core.signal import TopKSignal
from alambique.data.dataset import PackedRows

_IGNORED = -100  # the label of a position that predicts nothing, as torch's cross-entropy has it
_PREFETCHED_STEPS = 2  # one being trained on, one ready: enough when reading is faster than training


def rows_of_step(step: int, rows_per_step: int, num_rows: int, seed: int) -> list[int]:
    """Row numbers of step ``step``: a window on an endless sequence of seeded permutations, one for each epoch.

    A pure function of its arguments, so the position in the data needs no saving, and neither micro-batches nor
    interruptions can change the order.
    """
    start, stop = step * rows_per_step, (step + 1) * rows_per_step
    epochs = range(start // num_rows, (stop - 1) // num_rows + 1)
    order = np.concatenate([np.random.default_rng((seed, epoch)).permutation(num_rows) for epoch in epochs])
    offset = epochs.start * num_rows
    return [int(row) for row in order[start - offset : stop - offset]]


@dataclass(frozen=True)
class StepRows:
    """Rows of one optimiser step, on the CPU, in pinned memory when a GPU will ask for them.

    ``rows`` and ``num_target_tokens`` are those of the whole step, tensors the part of this process: R rows.
    ``signal`` has the shape [R, S, K], or is None where a live teacher will give it; ``labels_RS`` holds the next
    token, or −100 where there is no target.
    """

    rows: list[int]
    input_ids_RS: Tensor
    document_ids_RS: Tensor
    labels_RS: Tensor
    signal: TopKSignal | None
    num_target_tokens: int

    @property
    def num_rows(self) -> int:
        """R, of this process."""
        return len(self.labels_RS)

    def micro_batches(self, num_rows: int, device: torch.device) -> Iterator["MicroBatch"]:
        """Cut the step into groups of ``num_rows`` rows (fewer in the last), each moved to ``device`` as it comes."""
        for start in range(0, self.num_rows, num_rows):
            yield self._micro_batch(slice(start, start + num_rows), device)

    def _micro_batch(self, part: slice, device: torch.device) -> "MicroBatch":
        labels_N = self.labels_RS[part].flatten()
        positions_N = (labels_N != _IGNORED).nonzero().squeeze(1)  # on the CPU, so that no device waits for a count
        signal = None if self.signal is None else self.signal[part].to(device).flatten()
        labels_N = labels_N.to(device, non_blocking=True)
        everywhere = len(positions_N) == len(labels_N)
        if not everywhere:
            positions_N = positions_N.to(device, non_blocking=True)
            labels_N, signal = labels_N[positions_N], None if signal is None else signal[positions_N]
        return MicroBatch(
            self.input_ids_RS[part].to(device, non_blocking=True),
            self.document_ids_RS[part].to(device, non_blocking=True),
            None if everywhere else positions_N,
            labels_N,
            signal,
        )


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and backward pass, on the training device.

    ``positions_N`` indexes the flattened [B·S] positions that predict something; None stands for all of them.
    """

    input_ids_BS: Tensor
    document_ids_BS: Tensor
    positions_N: Tensor | None
    labels_N: Tensor
    signal: TopKSignal | None

    @property
    def num_rows(self) -> int:
        """B."""
        return self.input_ids_BS.shape[0]

    def select(self, hidden_BSD: Tensor) -> Tensor:
        """The hidden states that the loss needs, [N, D]."""
        hidden_PD = hidden_BSD.flatten(0, 1)
        return hidden_PD if self.positions_N is None else hidden_PD.index_select(0, self.positions_N)


def read_step(
    rows: list[int],
    packed: PackedRows,
    cache: TeacherCache | None,
    pin: bool,
    rank: int = 0,
    size: int = 1,
    context: int = 1,
) -> StepRows:
    """Join rows of prepared data to their cached signal; numpy only, because torch would wake a second thread pool.

    Process ``rank`` of ``size`` reads every ``size``-th of the step's ``rows``. All get the same number: where it
    doesn't divide, the last ones get one more without a target. Where ``context`` neighbours share rows they take them
    as one process would, and of labels and signal each its part of the positions.
    """
    part = slice(rank % context * packed.seq_len // context, (rank % context + 1) * packed.seq_len // context)
    rank, size = rank // context, size // context
    mine = rows[rank::size]
    here = mine + rows[: -(-len(rows) // size) - len(mine)]
    index = np.asarray(here)
    ids_RS = packed.input_ids_RS.numpy()[index].astype(np.int64)
    mask_RS = packed.loss_mask_RS.numpy()[index]
    mask_RS[len(mine) :] = False
    labels_RS = np.where(mask_RS, np.roll(ids_RS, -1, axis=1), _IGNORED)
    documents_RS, signal = packed.document_ids_RS.numpy()[index], None
    if cache is not None:
        read = cache.read(here)
        fields = (read.ids_NK, read.logprobs_NK, read.tail_mass_N)
        signal = TopKSignal(*(_kept(field[:, part], pin) for field in fields))
    return StepRows(
        rows,
        _kept(torch.from_numpy(ids_RS), pin),
        _kept(torch.from_numpy(documents_RS), pin),
        _kept(torch.from_numpy(labels_RS[:, part]), pin),
        signal,
        int(packed.loss_mask_RS.numpy()[rows].sum()),
    )


def _kept(tensor: Tensor, pin: bool) -> Tensor:
    return tensor.pin_memory() if pin else tensor


def prefetch(read: Callable[[int], StepRows], steps: range) -> Generator[StepRows, None, None]:
    """Yield ``read(step)`` for each step in order, reading ahead on one thread; its errors surface here."""
    pending: deque[Future[StepRows]] = deque()
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    try:
        for step in steps:
            pending.append(pool.submit(read, step))
            if len(pending) == _PREFETCHED_STEPS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
