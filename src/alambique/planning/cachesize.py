"""Size of a teacher's cache: from a sample of one that is there, else by what was measured of another teacher.

Dimensions: R rows, N captured tokens, K entries.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig

from alambique.cache.codec import Entries
from alambique.cache.config import CaptureConfig
from alambique.cache.reader import TeacherCache
from alambique.cache.shards import Block, write_shard
from alambique.cache.states import HiddenStates
from alambique.core.errors import UserError

# Bytes of an entry in its stream by K, as the codec `exact` packs them, and bits that the table of classes takes for a
# token of the vocabulary, by entries of a shard for each of them. source: 14,815 positions of the embedded teacher's
# cache, its top 100 cut to K, in shards of 15 rows (docs/plan.md)
_K = (1, 2, 5, 10, 16, 25, 50, 75, 100)
_ID_BYTES = (1.135, 1.125, 1.178, 1.24, 1.298, 1.353, 1.439, 1.487, 1.519)
_LOGPROB_BYTES = (1.832, 1.761, 1.315, 1.007, 0.838, 0.682, 0.511, 0.434, 0.387)
_ENTRIES = (0.075, 0.3, 0.75, 1.9, 3.8, 7.5, 15, 30, 50)
_CLASS_BITS = (0.17, 0.4, 0.73, 1.21, 1.68, 2.22, 2.55, 3.0, 3.2)
_FP32_LOGPROB = 66 / 39  # source: docs/cache-format.md, logprobs of fp32 logits against those of bf16 logits
_DOUBLING = 0.022  # bytes of an id more for each doubling of the vocabulary; source: docs/cache-format.md
_VOCAB = 49_152  # of the measured teacher
_TAIL_BYTES, _ROW_BYTES, _SHARD_BYTES = 4, 60, 1100  # tail mass; hash, offsets and checksum; header; source: the format
_QUANTIZED_BYTES = 0.42  # of a code; source: docs/cache-format.md
_DRAWS = {"exact": (4.55, 0.604), "top_p": (4.49, 0.565)}  # a · draws^b fits docs/cache-format.md to 2 %
_REST_DRAW_BYTES = 2.13  # source: docs/ladder.md, a draw beside the embedded teacher's top 50
_SAMPLED_BLOCKS = 4  # assumption: blocks of a cache differ by a few per cent


@dataclass(frozen=True)
class CacheSize:
    """Bytes per captured token, and whence: ``sample``, ``formula``, or ``at most`` (a formula for a bound)."""

    bytes_per_token: float
    source: str


def predict(
    model: PreTrainedConfig, config: CaptureConfig, logits_dtype: str, seq_len: int, num_rows: int, there: Path
) -> CacheSize:
    """Predict from the cache in the folder ``there`` if it is of use, else by formula."""
    found = _sampled(config, logits_dtype, there, states_of(model, config))
    return found or by_formula(model, config, logits_dtype, seq_len, num_rows)


def by_formula(
    model: PreTrainedConfig, config: CaptureConfig, logits_dtype: str, seq_len: int, num_rows: int
) -> CacheSize:
    """Streams, tail mass, and each shard's and row's own bytes, by the measured figures of one teacher."""
    vocab = model.get_text_config().vocab_size
    slots = config.top_k if config.sampling is None else config.sampling.slots(vocab)
    states = states_of(model, config)
    rows = min(num_rows, rows_per_shard(config, slots, seq_len, states))
    tokens, entries = rows * seq_len, rows * seq_len * slots
    sampling = config.sampling
    if sampling is not None and not sampling.top_k:
        factor, power = _DRAWS["top_p" if config.codec == "top_p" else "exact"]
        streams = factor * config.draws**power
    else:
        top = slots if sampling is None else sampling.top_k
        streams = top * (_between(top, _K, _ID_BYTES) + _DOUBLING * math.log2(max(vocab, 2) / _VOCAB))
        logprob = _between(top, _K, _LOGPROB_BYTES) * (_FP32_LOGPROB if logits_dtype == "float32" else 1.0)
        streams += 4 + top * _QUANTIZED_BYTES if config.codec == "quantized" else top * logprob
        streams += _REST_DRAW_BYTES * (slots - top)
    table_bits = vocab * _between(entries / vocab, _ENTRIES, _CLASS_BITS)
    shard = _SHARD_BYTES + table_bits / 8 + rows * (_ROW_BYTES + seq_len / 8)
    streams += states.bytes_per_token if states else 0
    return CacheSize(streams + _TAIL_BYTES + shard / tokens, "at most" if config.top_p < 1 else "formula")


def states_of(model: PreTrainedConfig, config: CaptureConfig) -> HiddenStates | None:
    """Which hidden states of that teacher are kept too."""
    text = model.get_text_config()
    return config.states(text.num_hidden_layers, text.hidden_size)


def rows_per_shard(config: CaptureConfig, slots: int, seq_len: int, states: HiddenStates | None) -> int:
    """Rows of one shard, as the capture plans them."""
    return max(1, int(config.shard_mib * 2**20 / config.row_bytes(seq_len, slots, states)))


def _sampled(config: CaptureConfig, logits_dtype: str, there: Path, states: HiddenStates | None) -> CacheSize | None:
    """Encode a few blocks of a cache again, as this capture would; None where that would tell nothing."""
    try:
        cache = TeacherCache.open(there)
    except UserError:  # none is there, or a damaged one: the stage will say so
        return None
    manifest, sampling = cache.manifest, config.sampling and config.sampling.model_dump()
    same = manifest["engine"]["logits_dtype"] == logits_dtype and manifest["sampling"] == sampling
    if not same or manifest["top_p"] != config.top_p or (sampling is None and cache.top_k < config.top_k):
        return None
    slots = cache.top_k if sampling else config.top_k
    rows = min(cache.num_rows, rows_per_shard(config, slots, cache.seq_len, states))
    starts = sorted({round(start) for start in np.linspace(0, cache.num_rows - rows, _SAMPLED_BLOCKS)})
    sizes = [_encoded(cache, range(start, start + rows), slots, config.codec) for start in starts]
    tokens = sum(count for count, _ in sizes)
    of_states = states.bytes_per_token if states else 0
    return CacheSize(sum(size for _, size in sizes) / tokens + of_states, "sample") if tokens else None


def _encoded(cache: TeacherCache, rows: range, slots: int, codec: str) -> tuple[int, int]:
    """Tokens of these rows, and bytes of the shard that they make."""
    signal = cache.read(rows)
    mask_RS = ~np.isneginf(signal.logprobs_NK[..., 0].numpy())
    entries = Entries(
        np.ascontiguousarray(signal.ids_NK.numpy()[mask_RS][:, :slots]),
        np.ascontiguousarray(signal.logprobs_NK.numpy()[mask_RS][:, :slots]),
        signal.tail_mass_N.numpy()[mask_RS],
        mask_RS.sum(axis=1, dtype=np.int64),
        cache.vocab_size,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shard")
        write_shard(path, Block("0" * 32, rows.start, ("0" * 64,) * len(rows)), mask_RS, entries, codec)
        return len(entries.tail_mass_N), path.stat().st_size


def _between(at: float, places: Sequence[float], measured: Sequence[float]) -> float:
    """The measured figure there, on straight lines over the logarithm; beyond what was measured the last one."""
    return float(np.interp(math.log(at), np.log(places), measured))
