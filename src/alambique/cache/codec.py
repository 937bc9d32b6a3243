"""What a codec is, and how a reader finds the one that a manifest names.

A codec is a module in :mod:`alambique.cache.codecs` with the members of :class:`Codec`; its name is the module's. It
turns the entries of a block of rows into byte ranges, one for each row in each of its *streams*, plus small *tables*
that the whole block shares, and back. Shards store streams and tables without knowing what they mean.

Dimensions: R rows, N captured tokens (of one row when decoding, of all rows of a block when encoding), K entries,
L layers, E size of a hidden state.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from alambique.cache import codecs
from alambique.core.errors import UserError, did_you_mean

Arrays = tuple[NDArray[np.int32], NDArray[np.float16], NDArray[np.float32]]  # ids [N, K], logprobs [N, K], tails [N]


class DamageError(Exception):
    """Bytes of a shard contradict each other. The reader says in which shard and row, and what to do."""


@dataclass(frozen=True)
class Entries:
    """What a block keeps, raw: the captured tokens of its rows, one row after another.

    Attributes:
        ids_NK: int32 token ids in order of falling probability.
        logprobs_NK: float16 natural logarithms of probabilities, in nats; -inf marks an empty slot.
        tail_mass_N: float32, the probability of all tokens that are not kept.
        counts_R: captured tokens of each row; they sum to N.
        vocab_size: ids lie in [0, vocab_size).
        states_NLE: bits of the teacher's hidden states after L layers, as bfloat16; None where none are kept.
    """

    ids_NK: NDArray[np.int32]
    logprobs_NK: NDArray[np.float16]
    tail_mass_N: NDArray[np.float32]
    counts_R: NDArray[np.int64]
    vocab_size: int
    states_NLE: NDArray[np.uint16] | None = None

    def rows(self) -> list[tuple[NDArray[np.int32], NDArray[np.float16]]]:
        """Views of ``ids_NK`` and ``logprobs_NK`` for each row."""
        ends = np.cumsum(self.counts_R)[:-1]
        return list(zip(np.split(self.ids_NK, ends), np.split(self.logprobs_NK, ends), strict=True))

    def of_row(self, number: int) -> Arrays:
        """Views of one row's ids, logprobs and tail masses."""
        stop = int(self.counts_R[: number + 1].sum())
        part = slice(stop - int(self.counts_R[number]), stop)
        return self.ids_NK[part], self.logprobs_NK[part], self.tail_mass_N[part]


@dataclass(frozen=True)
class Encoded:
    """A block's streams (one byte range per row) and tables (shared by all rows)."""

    streams: dict[str, list[bytes]]
    tables: dict[str, bytes]


class Codec(Protocol):
    """The members of a codec module."""

    VERSION: int  # of the bytes; a reader refuses any other
    LOSSLESS: bool  # whether decoding gives back every id and logprob, bit for bit
    STREAMS: tuple[str, ...]
    TABLES: tuple[str, ...]
    BYTES_PER_ENTRY: float  # rough upper estimate, to size blocks and to check free space

    def encode(self, entries: Entries) -> Encoded:
        """Compress a block. The same entries give the same bytes."""

    def prepare(self, tables: Mapping[str, bytes], vocab_size: int) -> Any:
        """Decode a shard's tables once; what it returns is handed to every :meth:`decode`."""

    def decode(
        self, state: Any, ranges: Mapping[str, bytes], ids_NK: NDArray[np.int32], logprobs_NK: NDArray[np.float16]
    ) -> None:
        """Fill one row's contiguous arrays from its byte ranges.

        Raises:
            DamageError: the bytes don't hold exactly that many valid entries.
        """


def codec_names() -> list[str]:
    """Names of all codecs, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(codecs.__path__))


def find_codec(name: str, where: str) -> Codec:
    """Import the codec called ``name``; ``where`` begins the sentence when there is none."""
    if name not in codec_names():
        raise UserError(f"{where}: there is no codec {name}{did_you_mean(name, codec_names())}")
    return cast(Codec, importlib.import_module(f"{codecs.__name__}.{name}"))
