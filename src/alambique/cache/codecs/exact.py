"""Every id and every fp16 logprob, bit for bit, with pcodec.

Ids are coded as ranks: the ids of a block sorted by how often they occur in it, in classes of the bit length of that
count. The table of classes costs 1-2 bits per vocabulary entry and block; ranks cost 18 bytes/token less than ids of a
tokenizer whose numbering already follows frequency (SmolLM2, 49k) and 50 less where the numbering says nothing.
Logprobs fall along a position, so their consecutive differences are small. Measured: docs/cache-format.md.

Dimensions: V vocabulary, N tokens of one row, K entries.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from alambique.cache.codec import DamageError, Encoded, Entries
from alambique.cache.pco import DELTAS, PLAIN, compress, decompress_into

VERSION = 1
LOSSLESS = True
STREAMS = ("ids", "logprobs")
TABLES = ("id_classes",)
BYTES_PER_ENTRY = 2.7  # the target of 270 B/token at K = 100; measured 1.9 to 2.5


def encode(entries: Entries) -> Encoded:
    """Compress a block of rows."""
    classes_V, rank_V = classify(entries.ids_NK, entries.vocab_size)
    rows = entries.rows()
    streams = {
        "ids": [compress(rank_V[ids_NK], PLAIN) for ids_NK, _ in rows],
        "logprobs": [compress(logprobs_NK, DELTAS) for _, logprobs_NK in rows],
    }
    return Encoded(streams, {"id_classes": compress(classes_V, PLAIN)})


def classify(ids: NDArray[np.int32], vocab_size: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """The frequency class of each id (bit length of its count), and its rank by falling class, then by id."""
    counts_V = np.bincount(ids.reshape(-1), minlength=vocab_size)
    classes_V = np.frexp(counts_V.astype(np.float64))[1].astype(np.uint8)
    rank_V = np.empty(vocab_size, np.uint32)
    rank_V[ids_by_rank(classes_V)] = np.arange(vocab_size, dtype=np.uint32)
    return classes_V, rank_V


def ids_by_rank(classes_V: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The inverse of the ranks of :func:`classify`."""
    return np.argsort(255 - classes_V, kind="stable").astype(np.int32)


def prepare(tables: Mapping[str, bytes], vocab_size: int) -> NDArray[np.int32]:
    """The id of each rank, [V]."""
    classes_V = np.empty(vocab_size, np.uint8)
    decompress_into(tables["id_classes"], classes_V)
    return ids_by_rank(classes_V)


def decode(
    state: NDArray[np.int32],
    ranges: Mapping[str, bytes],
    ids_NK: NDArray[np.int32],
    logprobs_NK: NDArray[np.float16],
) -> None:
    """Fill one row's ids and logprobs."""
    decode_ids(state, ranges["ids"], ids_NK)
    decompress_into(ranges["logprobs"], logprobs_NK)


def decode_ids(id_of_rank_V: NDArray[np.int32], data: bytes, ids: NDArray[np.int32]) -> None:
    """Fill ``ids`` from compressed ranks."""
    ranks = ids.view(np.uint32)  # decoded in place, then looked up
    decompress_into(data, ranks)
    if ranks.size and int(ranks.max()) >= len(id_of_rank_V):
        raise DamageError("a rank lies outside the vocabulary")
    np.take(id_of_rank_V, ranks, out=ids, mode="wrap")  # unlike "raise" it needs no buffer; the range was checked
