"""As many entries as a position needs: empty slots at its end cost nothing. What is there comes back bit for bit.

Goes with ``teacher.top_p``, which leaves slots empty once the kept mass reaches p. Ids and logprobs are coded as by
``exact``, without the empty slots; their ids come back as 0.

Dimensions: N tokens of one row, K slots.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from alambique.cache.codec import DamageError, Encoded, Entries
from alambique.cache.codecs import exact
from alambique.cache.pco import DELTAS, PLAIN, compress, decompress_into

VERSION = 1
LOSSLESS = True
STREAMS = ("counts", "ids", "logprobs")
TABLES = exact.TABLES
BYTES_PER_ENTRY = exact.BYTES_PER_ENTRY  # when every slot is filled


def encode(entries: Entries) -> Encoded:
    """Compress a block of rows, whose empty slots must follow the filled ones."""
    filled_NK = ~np.isneginf(entries.logprobs_NK)
    if (filled_NK[:, 1:] > filled_NK[:, :-1]).any():
        raise ValueError("an empty slot stands before a filled one")
    classes_V, rank_V = exact.classify(entries.ids_NK[filled_NK], entries.vocab_size)
    streams: dict[str, list[bytes]] = {stream: [] for stream in STREAMS}
    for ids_NK, logprobs_NK in entries.rows():
        row_filled_NK = ~np.isneginf(logprobs_NK)
        streams["counts"].append(compress(row_filled_NK.sum(axis=1, dtype=np.uint32), PLAIN))
        streams["ids"].append(compress(rank_V[ids_NK[row_filled_NK]], PLAIN))
        streams["logprobs"].append(compress(logprobs_NK[row_filled_NK], DELTAS))
    return Encoded(streams, {"id_classes": compress(classes_V, PLAIN)})


def prepare(tables: Mapping[str, bytes], vocab_size: int) -> NDArray[np.int32]:
    """The id of each rank, [V]."""
    return exact.prepare(tables, vocab_size)


def decode(
    state: NDArray[np.int32],
    ranges: Mapping[str, bytes],
    ids_NK: NDArray[np.int32],
    logprobs_NK: NDArray[np.float16],
) -> None:
    """Fill one row's ids and logprobs."""
    counts_N = np.empty(len(ids_NK), np.uint32)
    decompress_into(ranges["counts"], counts_N)
    num_slots = ids_NK.shape[1]
    if counts_N.size and int(counts_N.max()) > num_slots:
        raise DamageError("a position has more entries than slots")
    filled_NK = np.arange(num_slots) < counts_N[:, None]
    ids = np.empty(int(counts_N.sum(dtype=np.int64)), np.int32)  # at most the slots of ids_NK
    logprobs = np.empty(ids.shape, np.float16)
    exact.decode_ids(state, ranges["ids"], ids)
    decompress_into(ranges["logprobs"], logprobs)
    ids_NK[~filled_NK] = 0
    logprobs_NK[~filled_NK] = -np.inf
    ids_NK[filled_NK] = ids
    logprobs_NK[filled_NK] = logprobs
