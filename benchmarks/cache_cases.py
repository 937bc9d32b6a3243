"""Case ``cache``: size and speed of every codec, on a real teacher's signal, per size of vocabulary.

``--only`` takes vocabulary sizes and names of codecs. Speeds are per second of the thread's own processor time, so
that other work on the machine counts little; they are per core, because pcodec uses one.
"""

import collections
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from alambique.cache.codec import Entries, codec_names, find_codec
from alambique.cache.head import Head, top_entries
from alambique.cache.shards import Block, Shard, write_shard
from alambique.core.products import fast_dtype
from alambique.models.load import SplitModel
from benchmarks.cases import TOP_K, Options, Outcome
from benchmarks.teacher_data import hidden_states, load_rows, load_teacher, widen

VOCABS = (49_152, 128_256, 201_088)  # SmolLM2, Llama 3, gpt-oss
_ROWS = 96  # 24,576 positions at the embedded default's 256
_BATCH_ROWS = 8  # read into new arrays at a time, as ``TeacherCache.read`` does for a batch


def run(options: Options) -> Outcome:
    """Measure each codec at each vocabulary size; the summary is the exact codec's."""
    outcome = Outcome()
    rows = load_rows(4 if options.quick else _ROWS, options.quick)
    teacher = load_teacher(fast_dtype(options.device), options.device, options.quick)
    hidden_ND = hidden_states(teacher, rows)
    mask_RS = rows.loss_mask_RS.numpy()
    block = Block("0" * 32, 0, tuple(rows.row_hashes()))
    for vocab in (300,) if options.quick else map(int, options.keep(map(str, VOCABS))):
        entries = _entries(teacher, hidden_ND, vocab, mask_RS)
        for codec in options.keep(codec_names()):
            found = measure(codec, entries, block, mask_RS, options.repeats)
            outcome.rows.append({"vocab": vocab, "codec": codec, **found})
    exact = [row for row in outcome.rows if row["codec"] == "exact"]
    for key in ("bytes_per_token", "decode_tokens_per_s", "encode_tokens_per_s", "exact"):
        outcome.summary[key] = {str(row["vocab"]): row[key] for row in exact}
    outcome.notes.append("vocabularies above the teacher's own are its head, widened by noisy copies (teacher_data.py)")
    return outcome


def measure(
    codec: str, entries: Entries, block: Block, mask_RS: np.ndarray[Any, np.dtype[np.bool_]], repeats: int
) -> dict[str, Any]:
    """Write a shard, read it back row by row, and compare."""
    tokens, (num_rows, seq_len) = len(entries.tail_mass_N), mask_RS.shape
    module = find_codec(codec, "benchmarks")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        encode_s = _thread_seconds(lambda: write_shard(path, block, mask_RS, entries, codec), min(repeats, 3))
        shard = Shard(path)

        def read() -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
            for start in range(0, num_rows, _BATCH_ROWS):
                batch = range(start, min(start + _BATCH_ROWS, num_rows))
                ids_RSK = np.zeros((len(batch), seq_len, entries.ids_NK.shape[1]), np.int32)
                logprobs_RSK = np.full(ids_RSK.shape, -np.inf, np.float16)
                tail_mass_RS = np.ones(ids_RSK.shape[:2], np.float32)
                for index, row in enumerate(batch):
                    shard.read_row(row, ids_RSK[index], logprobs_RSK[index], tail_mass_RS[index])
                yield ids_RSK, logprobs_RSK

        decode_s = _thread_seconds(lambda: collections.deque(read(), maxlen=0), max(repeats, 3))
        ids, logprobs = (np.concatenate(parts)[mask_RS] for parts in zip(*read(), strict=True))
        same_ids = bool(np.array_equal(ids, entries.ids_NK))
        same_logprobs = np.array_equal(logprobs.view(np.uint16), entries.logprobs_NK.view(np.uint16))
        return {
            "bytes_per_token": path.stat().st_size / tokens,
            "encode_tokens_per_s": tokens / encode_s,
            "decode_tokens_per_s": tokens / decode_s,
            "exact": bool(same_ids and same_logprobs),
            "lossless": module.LOSSLESS,
        }


def _entries(
    teacher: SplitModel, hidden_ND: torch.Tensor, vocab: int, mask_RS: np.ndarray[Any, np.dtype[np.bool_]]
) -> Entries:
    weight_VD = teacher.head_weight_VD.detach()
    if vocab > len(weight_VD):
        weight_VD = widen(weight_VD, vocab)
    with torch.inference_mode():
        kept = top_entries(hidden_ND, Head(weight_VD, None, None, 1.0), TOP_K, logits_mib=256)
    ids, logprobs, tails = (tensor.cpu().numpy() for tensor in kept)
    return Entries(ids, logprobs, tails, mask_RS.sum(axis=1, dtype=np.int64), vocab)


def _thread_seconds(step: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        step()
        seconds.append(time.thread_time() - start)
    return median(seconds)
