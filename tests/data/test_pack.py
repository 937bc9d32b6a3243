import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alambique.data.pack import Ids, Mask, Piece, cut, pack


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int32)


def mask(*values: bool) -> Mask:
    return np.array(values, dtype=np.bool_)


def piece(size: int, document: int, targets: bool = True) -> Piece:
    return Piece(ids(*range(100 * document, 100 * document + size)), mask(*[targets] * size), document)


def test_a_row_is_laid_out_with_the_shift_made_once() -> None:
    prompt = Piece(ids(7, 8, 9, 10), mask(False, False, True, True), 1)
    rows, used = pack([piece(3, 0), prompt], 8, padding_id=5, max_rows=None)
    assert rows.input_ids_RS.tolist() == [[0, 1, 2, 7, 8, 9, 10, 5]]
    assert rows.document_ids_RS.tolist() == [[0, 0, 0, 1, 1, 1, 1, -1]]
    #                          0→1    1→2   boundary 7→8   8→9   9→10  end   padding
    assert rows.loss_mask_RS.tolist() == [[True, True, False, False, True, True, False, False]]
    assert used == {0, 1}


def test_best_fit_takes_the_fullest_row_with_room() -> None:
    rows, _ = pack([piece(5, 0), piece(7, 1), piece(3, 2), piece(1 + 1, 3)], 10, 0, None)
    assert rows.document_ids_RS.tolist() == [[0] * 5 + [1] * 2 + [-1] * 3, [0] * 7 + [1] * 3]


def test_a_budget_keeps_the_first_rows_and_their_documents() -> None:
    rows, used = pack([piece(6, number) for number in range(5)], 8, 0, max_rows=2)
    assert rows.num_rows == 2
    assert used == {0, 1}


def test_long_documents_are_cut_and_teachless_pieces_left_out() -> None:
    def cuts(size: int) -> list[list[int]]:
        return [part.ids.tolist() for part in cut(ids(*range(size)), mask(*[True] * size), 0, 4)]

    assert cuts(10) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert cuts(9) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # a lone token teaches nothing
    assert cut(ids(1, 2), mask(True, False), 0, 4) == []  # a first token is never predicted
    assert cuts(1) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=40), st.integers(12, 20))
def test_every_piece_is_packed_whole_exactly_once(sizes: list[int], seq_len: int) -> None:
    pieces = [piece(size, number) for number, size in enumerate(sizes)]
    rows, used = pack(pieces, seq_len, 0, None)
    assert used == set(range(len(sizes)))
    assert rows.num_tokens == sum(sizes)
    assert rows.num_target_tokens == sum(sizes) - len(sizes)
    found = []
    for r in range(rows.num_rows):
        for number in rows.document_ids_RS[r].unique():
            if number >= 0:
                found.append(rows.input_ids_RS[r][rows.document_ids_RS[r] == number].tolist())
        padding = rows.document_ids_RS[r] == -1
        assert torch.equal(padding, padding.sort().values)  # at the end
    assert sorted(found) == sorted(part.ids.tolist() for part in pieces)
    inside = rows.document_ids_RS[:, :-1] == rows.document_ids_RS[:, 1:]
    real = rows.document_ids_RS[:, 1:] >= 0
    assert torch.equal(rows.loss_mask_RS[:, :-1], inside & real)
    assert not rows.loss_mask_RS[:, -1].any()
