import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_run import CPU, RandomTeacher, make_rows

from alambique.data.dataset import PackedRows
from alambique.train.data import StepRows, prefetch, read_step, rows_of_step


def test_each_epoch_visits_every_row_once_in_its_own_order() -> None:
    order = [row for step in range(9) for row in rows_of_step(step, 4, 12, seed=0)]
    epochs = [order[:12], order[12:24], order[24:]]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("rows_per_step", [1, 5, 12, 30])
def test_the_order_does_not_depend_on_how_it_is_cut(rows_per_step: int) -> None:
    one_by_one = [rows_of_step(i, 1, 12, seed=7)[0] for i in range(60)]
    steps = 60 // rows_per_step
    assert [row for s in range(steps) for row in rows_of_step(s, rows_per_step, 12, seed=7)] == one_by_one


def test_the_seed_decides_the_order() -> None:
    assert rows_of_step(0, 12, 12, seed=0) != rows_of_step(0, 12, 12, seed=1)


def read(rows: list[int], packed: PackedRows | None = None) -> StepRows:
    packed = packed or make_rows()
    teacher: Any = RandomTeacher(packed)
    return read_step(rows, packed, teacher, pin=False)


def test_a_label_is_the_next_token_where_the_mask_says_so() -> None:
    packed, rows = make_rows(), [5, 0, 5]
    step = read(rows, packed)
    for place, row in enumerate(rows):
        for s in range(packed.seq_len):
            wanted = int(packed.input_ids_RS[row, s + 1]) if packed.loss_mask_RS[row, s] else -100
            assert step.labels_RS[place, s] == wanted
    assert step.num_target_tokens == sum(int(packed.loss_mask_RS[row].sum()) for row in rows)
    assert step.input_ids_RS.dtype == torch.int64


@pytest.mark.parametrize("micro_batch_rows", [1, 2, 3, 5])
def test_micro_batches_hold_the_targets_of_the_step_in_order(micro_batch_rows: int) -> None:
    packed, rows = make_rows(), [5, 0, 7, 2, 11]
    step = read(rows, packed)
    parts = list(step.micro_batches(micro_batch_rows, CPU))
    assert [part.num_rows for part in parts][:-1] == [micro_batch_rows] * (len(parts) - 1)
    mask = packed.loss_mask_RS[torch.tensor(rows)]
    hidden_BSD = torch.arange(5 * packed.seq_len).reshape(5, packed.seq_len, 1).float()
    pieces = torch.split(hidden_BSD, micro_batch_rows)
    selected = torch.cat([part.select(piece) for part, piece in zip(parts, pieces, strict=True)])
    assert torch.equal(selected, hidden_BSD[mask])
    assert torch.equal(torch.cat([part.labels_N for part in parts]), step.labels_RS[mask])
    assert torch.equal(torch.cat([part.signal.ids_NK for part in parts]), step.signal.ids_NK[mask])
    assert torch.equal(torch.cat([part.signal.tail_mass_N for part in parts]), step.signal.tail_mass_N[mask])


class Watched(RandomTeacher):
    """Whose hidden states after layer n are n times the position, in three dimensions."""

    def read_states(self, rows: list[int], layers: tuple[int, ...]) -> torch.Tensor:
        position_S = torch.arange(self.signal.ids_NK.shape[1]).reshape(1, -1, 1, 1)
        return (position_S * torch.tensor(layers).reshape(1, 1, -1, 1)).expand(len(rows), -1, -1, 3).bfloat16()


@pytest.mark.parametrize("micro_batch_rows", [1, 2, 5])
def test_hidden_states_go_with_their_positions(micro_batch_rows: int) -> None:
    packed, rows = make_rows(), [5, 0, 7, 2, 11]
    teacher: Any = Watched(packed)
    step = read_step(rows, packed, teacher, pin=False, layers=(2, 4))
    found = [part.states_NLE for part in step.micro_batches(micro_batch_rows, CPU)]
    mask = packed.loss_mask_RS[torch.tensor(rows)]
    assert torch.equal(torch.cat(found), teacher.read_states(rows, (2, 4))[mask])
    assert [part.states_NLE for part in read(rows).micro_batches(5, CPU)] == [None]
    part = read_step(rows, packed, teacher, False, 1, 2, layers=(2,))
    assert part.states_RSLE.shape == (3, packed.seq_len, 1, 3)


def test_rows_for_a_live_teacher_carry_no_signal() -> None:
    step = read_step([5, 0], make_rows(), None, pin=False)
    assert [part.signal for part in step.micro_batches(1, CPU)] == [None, None]
    assert torch.equal(step.labels_RS, read([5, 0]).labels_RS)


def test_rows_without_gaps_are_passed_on_uncopied() -> None:
    packed = make_rows()
    full = PackedRows(packed.input_ids_RS, packed.document_ids_RS, torch.ones_like(packed.loss_mask_RS))
    (part,) = read([1, 2], full).micro_batches(2, CPU)
    hidden_BSD = torch.randn(2, packed.seq_len, 3)
    assert part.positions_N is None
    assert part.select(hidden_BSD).data_ptr() == hidden_BSD.data_ptr()


def test_prefetch_keeps_the_order_and_reads_no_further_than_two_steps_ahead() -> None:
    started: Counter[int] = Counter()
    step = read([0])

    def slow(number: int) -> StepRows:
        started[number] += 1
        return step

    batches = prefetch(slow, range(10))
    next(batches)
    deadline = time.monotonic() + 5
    while started[1] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert set(started) == {0, 1}
    assert len(list(batches)) == 9
    assert started == Counter(range(10))


def test_prefetch_hands_on_errors_and_ends_its_thread() -> None:
    before = threading.active_count()

    def broken(number: int) -> StepRows:
        if number == 1:
            raise ValueError("bad shard")
        return read([number])

    batches = prefetch(broken, range(3))
    next(batches)
    with pytest.raises(ValueError, match="bad shard"):
        next(batches)
    assert threading.active_count() == before
