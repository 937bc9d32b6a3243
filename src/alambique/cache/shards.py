"""One shard: a safetensors file that holds a block of rows. docs/cache-format.md describes it byte for byte.

Dimensions: R rows of the shard, S positions of a row, N captured tokens, K entries,
L layers, E size of a hidden state.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from alambique.cache.codec import Codec, DamageError, Encoded, Entries, find_codec
from alambique.cache.states import HiddenStates
from alambique.core.errors import UserError
from alambique.core.params import Config, validate

FORMAT = "alambique-teacher-cache"
VERSION = 1
SUFFIX = ".safetensors"
_STATES, _STATES_CRC32 = "hidden", "hidden_crc32"
_METADATA = "alambique"  # one key, because safetensors doesn't keep several in order
# Ceilings on what a damaged or hostile file can make a reader allocate; no tokenizer or context comes near.
MAX_VOCAB, MAX_TOP_K, MAX_SEQ_LEN = 1 << 24, 1 << 16, 1 << 26


class ShardFacts(Config):
    """What a shard says of itself, in its safetensors metadata."""

    format: str = Field(pattern=f"^{FORMAT}$")
    version: int
    name: str = Field(pattern="^[0-9a-f]{32}$")
    codec: str = Field(pattern="^[a-z0-9_]+$")
    codec_version: int
    top_k: int = Field(ge=1, le=MAX_TOP_K)
    vocab_size: int = Field(ge=1, le=MAX_VOCAB)
    seq_len: int = Field(ge=1, le=MAX_SEQ_LEN)
    num_rows: int = Field(ge=1)
    num_tokens: int = Field(ge=0)
    codec_kl_nats: float
    index_crc32: int
    hidden: HiddenStates | None = None  # not in the file where none are kept


@dataclass(frozen=True)
class Block:
    """Consecutive rows: what one shard holds, and the name that says what it depends on."""

    name: str
    first_row: int
    row_hashes: tuple[str, ...]

    @property
    def rows(self) -> range:
        """Their numbers in the whole data set."""
        return range(self.first_row, self.first_row + len(self.row_hashes))


def write_shard(
    path: Path,
    block: Block,
    mask_RS: NDArray[np.bool_],
    entries: Entries,
    codec: str,
    states: HiddenStates | None = None,
) -> None:
    """Encode a block and write its file. The same block gives the same bytes.

    Args:
        path: written plainly; the caller makes it atomic.
        block: names the shard and its rows.
        mask_RS: True at the positions that ``entries`` holds, in row order.
        entries: the captured tokens.
        codec: name of the codec.
        states: which hidden states ``entries`` holds.
    """
    module = find_codec(codec, str(path))
    encoded = module.encode(entries)
    tensors = _index(block, mask_RS, entries, encoded)
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "name": block.name,
        "codec": codec,
        "codec_version": module.VERSION,
        "top_k": entries.ids_NK.shape[1],
        "vocab_size": entries.vocab_size,
        "seq_len": mask_RS.shape[1],
        "num_rows": len(block.row_hashes),
        "num_tokens": len(entries.tail_mass_N),
        "codec_kl_nats": 0.0 if module.LOSSLESS else _codec_kl_nats(module, encoded, entries),
    }
    if states is not None:
        assert entries.states_NLE is not None
        facts["hidden"] = states.model_dump(mode="json")
        rows = np.split(entries.states_NLE, np.cumsum(entries.counts_R)[:-1])
        tensors[_STATES_CRC32] = np.array([_crc32_states(row_NLE) for row_NLE in rows], np.uint32)
    facts["index_crc32"] = _crc32_index(facts, tensors)
    for stream, ranges in encoded.streams.items():
        tensors[stream] = np.frombuffer(b"".join(ranges), np.uint8)
    tensors["tail_mass"] = entries.tail_mass_N
    if states is not None:
        tensors[_STATES] = np.ascontiguousarray(entries.states_NLE)
    save_file(tensors, path, {_METADATA: json.dumps(facts, sort_keys=True)})


def _index(
    block: Block, mask_RS: NDArray[np.bool_], entries: Entries, encoded: Encoded
) -> dict[str, NDArray[np.generic]]:
    """Everything but streams and tail mass: small, read whole when a shard is opened, covered by one checksum."""
    tensors: dict[str, NDArray[np.generic]] = {
        "row_hashes": np.frombuffer(bytes.fromhex("".join(block.row_hashes)), np.uint8).reshape(-1, 32),
        "mask": np.packbits(mask_RS, axis=1, bitorder="little"),
    }
    for stream, ranges in encoded.streams.items():
        tensors[f"{stream}_offsets"] = np.cumsum([0, *map(len, ranges)], dtype=np.int64)
    for table, data in encoded.tables.items():
        tensors[table] = np.frombuffer(data, np.uint8)
    tails = np.split(entries.tail_mass_N, np.cumsum(entries.counts_R)[:-1])
    tensors["row_crc32"] = np.array(
        [
            crc32_row([encoded.streams[stream][row] for stream in sorted(encoded.streams)], tail)
            for row, tail in enumerate(tails)
        ],
        dtype=np.uint32,
    )
    return tensors


def crc32_row(ranges: Sequence[bytes], tail_mass_N: NDArray[np.float32]) -> int:
    """Checksum of one row: its byte range in each stream, streams sorted by name, then its tail masses."""
    crc = 0
    for data in ranges:
        crc = zlib.crc32(data, crc)
    return zlib.crc32(np.ascontiguousarray(tail_mass_N).data, crc)


def _crc32_states(states_NLE: NDArray[np.uint16]) -> int:
    """Checksum of one row's hidden states; apart from the row's, so that they are read only when asked for."""
    return zlib.crc32(np.ascontiguousarray(states_NLE).data)


def _crc32_index(facts: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> int:
    """Checksum of the facts but itself, as compact JSON, then of the index: name and bytes of each tensor, sorted."""
    stated = {name: value for name, value in facts.items() if name != "index_crc32"}
    crc = zlib.crc32(json.dumps(stated, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(tensors):
        crc = zlib.crc32(np.ascontiguousarray(tensors[name]).data, zlib.crc32(name.encode(), crc))
    return crc


def _codec_kl_nats(codec: Codec, encoded: Encoded, entries: Entries) -> float:
    """What a lossy codec costs, by decoding: the mean of Σ p·(log p - log q) - p + q over the entries of a token."""
    state, total = codec.prepare(encoded.tables, entries.vocab_size), 0.0
    for row, (ids_NK, logprobs_NK) in enumerate(entries.rows()):
        decoded_ids_NK, decoded_NK = np.empty_like(ids_NK), np.empty_like(logprobs_NK)
        ranges = {stream: encoded.streams[stream][row] for stream in codec.STREAMS}
        codec.decode(state, ranges, decoded_ids_NK, decoded_NK)
        filled_NK = ~np.isneginf(logprobs_NK)
        log_p, log_q = (array[filled_NK].astype(np.float64) for array in (logprobs_NK, decoded_NK))
        total += float((np.exp(log_p) * (log_p - log_q) - np.exp(log_p) + np.exp(log_q)).sum())
    return total / max(1, len(entries.tail_mass_N))


def _need(condition: bool, complaint: str) -> None:
    if not condition:
        raise DamageError(complaint)


class Shard:
    """An open shard, memory-mapped; only the bytes of rows that are asked for are read.

    Everything that decides the size of an allocation is checked against the file when it is opened.

    Raises:
        DamageError: the file is not a whole shard of this format.
    """

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as handle:  # torch's tensors stay mapped; numpy's would be copies
                names = set(handle.keys())
                metadata = (handle.metadata() or {}).get(_METADATA)
                arrays = {name: handle.get_tensor(name).numpy() for name in names}
        except (OSError, SafetensorError, TypeError, ValueError, RuntimeError) as error:
            raise DamageError(f"it is not a safetensors file ({str(error).splitlines()[0][:120]})") from error
        self.facts = _facts(metadata)
        self.codec: Codec = find_codec(self.facts.codec, str(path))
        _need(self.facts.codec_version == self.codec.VERSION, f"codec version {self.facts.codec_version} is unknown")
        _check_shapes(arrays, self.facts, self.codec)
        large = ("tail_mass", _STATES, *self.codec.STREAMS)
        small = {name: array for name, array in arrays.items() if name not in large}
        stated = self.facts.model_dump(mode="json", exclude_none=True)
        _need(_crc32_index(stated, small) == self.facts.index_crc32, "its index fails its checksum")
        self._arrays = arrays
        unused = self.facts.seq_len % 8
        _need(not unused or int(arrays["mask"][:, -1].max()) < 1 << unused, "its mask is longer than its rows")
        counts = np.bitwise_count(arrays["mask"]).sum(axis=1, dtype=np.int64)
        self._token_offsets = np.concatenate([[0], np.cumsum(counts)])
        _need(int(self._token_offsets[-1]) == self.facts.num_tokens, "its mask and its tail masses differ in number")
        for stream in self.codec.STREAMS:
            offsets = arrays[f"{stream}_offsets"]
            ordered = offsets[0] == 0 and bool((np.diff(offsets) >= 0).all()) and offsets[-1] == len(arrays[stream])
            _need(ordered, f"the offsets of its {stream} are out of order")
        tables = {table: arrays[table].tobytes() for table in self.codec.TABLES}
        self._state = self.codec.prepare(tables, self.facts.vocab_size)

    @property
    def row_hashes(self) -> list[str]:
        """Content hash of each row, in order."""
        return [bytes(row).hex() for row in self._arrays["row_hashes"]]

    @property
    def tail_mass_N(self) -> NDArray[np.float32]:
        """Tail masses of all captured tokens, row after row (mapped, read-only)."""
        tail_mass_N: NDArray[np.float32] = self._arrays["tail_mass"]
        return tail_mass_N

    def mask_S(self, row: int) -> NDArray[np.bool_]:
        """Which positions of a row were captured."""
        bits = np.unpackbits(self._arrays["mask"][row], count=self.facts.seq_len, bitorder="little")
        return bits.view(np.bool_)

    def read_row(
        self,
        row: int,
        ids_SK: NDArray[np.int32],
        logprobs_SK: NDArray[np.float16],
        tail_mass_S: NDArray[np.float32],
    ) -> None:
        """Decode one row into arrays that hold the values of positions that were not captured.

        Raises:
            DamageError: the row fails its checksum, or its bytes can't be decoded.
        """
        mask_S = self.mask_S(row)
        captured = np.flatnonzero(mask_S)
        start, stop = (captured[0], captured[-1] + 1) if len(captured) else (0, 0)
        if stop - start == len(captured):  # one run, as in text without padding or turns: no copies
            run = slice(start, stop)
            ranges, tail_mass_S[run] = self._checked(row)
            self.codec.decode(self._state, ranges, ids_SK[run], logprobs_SK[run])
        else:
            ids_SK[mask_S], logprobs_SK[mask_S], tail_mass_S[mask_S] = self.read_entries(row)

    def read_entries(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.float16], NDArray[np.float32]]:
        """Ids [N, K], logprobs [N, K] and tail masses [N] of a row's captured positions.

        Raises:
            DamageError: the row fails its checksum, or its bytes can't be decoded.
        """
        ranges, tail_mass_N = self._checked(row)
        ids_NK = np.empty((len(tail_mass_N), self.facts.top_k), np.int32)
        logprobs_NK = np.empty(ids_NK.shape, np.float16)
        self.codec.decode(self._state, ranges, ids_NK, logprobs_NK)
        return ids_NK, logprobs_NK, tail_mass_N

    def read_states(self, row: int) -> NDArray[np.uint16]:
        """Bits of a row's hidden states, [N, L, E] of its captured positions.

        Raises:
            DamageError: they fail their checksum.
        """
        start, stop = self._token_offsets[row : row + 2]
        states_NLE: NDArray[np.uint16] = self._arrays[_STATES][start:stop]
        if _crc32_states(states_NLE) != int(self._arrays[_STATES_CRC32][row]):
            raise DamageError("its hidden states fail their checksum")
        return states_NLE

    def _checked(self, row: int) -> tuple[dict[str, bytes], NDArray[np.float32]]:
        """A row's byte ranges and tail masses, after testing its checksum."""
        start, stop = (int(offset) for offset in self._token_offsets[row : row + 2])
        tail_mass_N = self.tail_mass_N[start:stop]
        ranges = {stream: self._range(stream, row) for stream in sorted(self.codec.STREAMS)}
        if crc32_row(list(ranges.values()), tail_mass_N) != int(self._arrays["row_crc32"][row]):
            raise DamageError("it fails its checksum")
        return ranges, tail_mass_N

    def _range(self, stream: str, row: int) -> bytes:
        start, stop = self._arrays[f"{stream}_offsets"][row : row + 2]
        data: bytes = self._arrays[stream][start:stop].tobytes()
        return data


def _facts(metadata: str | None) -> ShardFacts:
    _need(metadata is not None, "it has no alambique metadata")
    try:
        found = json.loads(str(metadata))
    except json.JSONDecodeError as error:
        raise DamageError("its metadata is not JSON") from error
    _need(isinstance(found, dict), "its metadata is not a JSON object")
    try:
        facts = validate(ShardFacts, found, "its metadata")
    except UserError as error:
        raise DamageError(str(error)) from error
    _need(facts.version == VERSION, f"its format version {facts.version} is not {VERSION}")
    return facts


def _check_shapes(arrays: Mapping[str, NDArray[Any]], facts: ShardFacts, codec: Codec) -> None:
    expected: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "row_hashes": ("uint8", (facts.num_rows, 32)),
        "mask": ("uint8", (facts.num_rows, (facts.seq_len + 7) // 8)),
        "row_crc32": ("uint32", (facts.num_rows,)),
        "tail_mass": ("float32", (facts.num_tokens,)),
        **dict.fromkeys(codec.STREAMS, ("uint8", (None,))),
        **{f"{stream}_offsets": ("int64", (facts.num_rows + 1,)) for stream in codec.STREAMS},
        **dict.fromkeys(codec.TABLES, ("uint8", (None,))),
    }
    if facts.hidden is not None:
        expected[_STATES] = ("uint16", (facts.num_tokens, len(facts.hidden.layers), facts.hidden.size))
        expected[_STATES_CRC32] = ("uint32", (facts.num_rows,))
    _need(set(arrays) == set(expected), f"it holds {sorted(arrays)} instead of {sorted(expected)}")
    for name, (dtype, shape) in expected.items():
        array = arrays[name]
        fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
        _need(array.dtype == dtype and fits, f"{name} is {array.dtype} {list(array.shape)}")
