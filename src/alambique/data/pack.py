"""Documents of any length into rows of one length.

Best fit: each piece goes whole into the fullest row that still has room for it. Only documents longer than a row
are cut. Compared with one long string cut at every S tokens, nothing loses its beginning (which is its context), and
a few per cent of padding is the price; the order of documents is kept as far as that allows.

Dimensions: R rows, S positions in a row.
"""

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from alambique.data.dataset import PADDING_DOCUMENT, PackedRows

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one: int32 token ids, and which of them may be targets (the first one never is)."""

    ids: Ids
    is_target: Mask
    document: int

    @property
    def has_target(self) -> bool:
        """Whether any token but the first may be learnt."""
        return bool(self.is_target[1:].any())


def cut(ids: Ids, is_target: Mask, document: int, seq_len: int) -> list[Piece]:
    """Cut a document into pieces of at most ``seq_len`` tokens; the pieces that teach nothing are left out."""
    pieces = (
        Piece(ids[start : start + seq_len], is_target[start : start + seq_len], document)
        for start in range(0, len(ids), seq_len)
    )
    return [piece for piece in pieces if piece.has_target]


@dataclass
class _Rows:
    """Rows in the order they were opened, findable by the room they have left."""

    seq_len: int
    rows: list[list[Piece]] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)  # the distinct sizes in `by_room`, ascending
    by_room: dict[int, deque[int]] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        size = len(piece.ids)
        place = bisect.bisect_left(self.rooms, size)
        if place == len(self.rooms):
            self.rows.append([])
            index, room = len(self.rows) - 1, self.seq_len
        else:
            room = self.rooms[place]
            index = self.by_room[room].popleft()
            if not self.by_room[room]:
                del self.by_room[room], self.rooms[place]
        self.rows[index].append(piece)
        left = room - size
        if left not in self.by_room:
            bisect.insort(self.rooms, left)
        self.by_room.setdefault(left, deque()).append(index)


def pack(pieces: Sequence[Piece], seq_len: int, padding_id: int, max_rows: int | None) -> tuple[PackedRows, set[int]]:
    """Pack ``pieces`` into rows of ``seq_len``; return the first ``max_rows`` and the documents that are in them."""
    packing = _Rows(seq_len)
    for piece in pieces:
        packing.add(piece)
    rows = packing.rows[:max_rows]
    ids_RS = np.full((len(rows), seq_len), padding_id, dtype=np.int32)
    documents_RS = np.full((len(rows), seq_len), PADDING_DOCUMENT, dtype=np.int32)
    mask_RS = np.zeros((len(rows), seq_len), dtype=np.bool_)
    for r, row in enumerate(rows):
        start = 0
        for number, piece in enumerate(row):
            end = start + len(piece.ids)
            ids_RS[r, start:end] = piece.ids
            documents_RS[r, start:end] = number
            mask_RS[r, start : end - 1] = piece.is_target[1:]  # the shift: a position's target is the next token
            start = end
    packed = PackedRows(torch.from_numpy(ids_RS), torch.from_numpy(documents_RS), torch.from_numpy(mask_RS))
    return packed, {piece.document for row in rows for piece in row}
