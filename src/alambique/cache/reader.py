"""TeacherCache: random access to the signal of any rows, with every mismatch refused in one sentence.

Dimensions: R rows asked for, S positions of a row, K entries, N captured tokens,
L layers, E size of a hidden state.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alambique.cache.codec import DamageError, find_codec
from alambique.cache.manifest import REMEDY, Manifest, ShardEntry, load_manifest, rows_sha256
from alambique.cache.sampled import kept_text
from alambique.cache.shards import SUFFIX, Shard
from alambique.cache.states import HiddenStates, from_bits
from alambique.core.errors import UserError
from alambique.core.files import MANIFEST, sha256_file
from alambique.core.signal import TopKSignal


class TeacherCache:
    """A captured teacher. Rows are addressed by number; batch size, order, epochs and processes are free.

    Opening checks that every shard is there with its full size; each row's checksum is tested when it is read;
    :meth:`verify` hashes everything.
    """

    def __init__(self, path: Path, raw: dict[str, Any], manifest: Manifest) -> None:
        self.path = path
        self.manifest = raw
        self.num_rows = manifest.num_rows
        self.seq_len = manifest.seq_len
        self.top_k = manifest.top_k
        self.vocab_size = manifest.vocab_size
        self._manifest = manifest
        self._first_rows = [shard.first_row for shard in manifest.shards]
        self._open: dict[int, Shard] = {}

    @classmethod
    def open(cls, path: Path | str) -> "TeacherCache":
        """Open the cache in folder ``path``.

        Raises:
            UserError: the manifest is missing, damaged or of another version, or a shard is missing or truncated.
        """
        path = Path(path)
        raw, manifest = load_manifest(path)
        find_codec(manifest.codec, str(path / MANIFEST))
        for name, entry in manifest.files.items():
            shard = path / name
            if not shard.is_file():
                raise UserError(f"{shard} is missing. {REMEDY}")
            if (size := shard.stat().st_size) != entry.bytes:
                raise UserError(f"{shard} has {size} bytes instead of {entry.bytes}, so it is damaged. {REMEDY}")
        return cls(path, raw, manifest)

    def read(self, rows: Sequence[int]) -> TopKSignal:
        """Decode rows, in the order asked for.

        Returns:
            int32 ids [R, S, K], float16 logprobs [R, S, K] and float32 tail mass [R, S] on the CPU. Positions that
            were not captured have ids 0, logprobs -inf and tail mass 1.

        Raises:
            UserError: a row or its shard is damaged.
            IndexError: a row number lies outside [0, num_rows).
        """
        located = [self._locate(row) for row in rows]  # opened, so their sizes are true before anything is allocated
        shape = (len(rows), self.seq_len, self.top_k)
        ids_RSK = np.zeros(shape, np.int32)
        logprobs_RSK = np.full(shape, -np.inf, np.float16)
        tail_mass_RS = np.ones(shape[:2], np.float32)
        for index, (shard, row) in enumerate(located):
            with self._blaming(rows[index], shard):
                shard.read_row(row, ids_RSK[index], logprobs_RSK[index], tail_mass_RS[index])
        return TopKSignal(torch.from_numpy(ids_RSK), torch.from_numpy(logprobs_RSK), torch.from_numpy(tail_mass_RS))

    def read_states(self, rows: Sequence[int], layers: Sequence[int]) -> Tensor:
        """The teacher's hidden states after ``layers``, which the cache must hold: bfloat16 [R, S, L, E] on the CPU.

        Positions that were not captured have zeros.

        Raises:
            UserError: a row or its shard is damaged.
        """
        held = self._manifest.hidden
        assert held is not None
        places = [held.layers.index(layer) for layer in layers]
        located = [self._locate(row) for row in rows]
        bits_RSLE = np.zeros((len(rows), self.seq_len, len(places), held.size), np.uint16)
        for index, (shard, row) in enumerate(located):
            with self._blaming(rows[index], shard):
                bits_RSLE[index, shard.mask_S(row)] = shard.read_states(row)[:, places]
        return from_bits(bits_RSLE)

    @contextlib.contextmanager
    def _blaming(self, row: int, shard: Shard) -> Iterator[None]:
        try:
            yield
        except DamageError as error:
            file = self.path / f"{shard.facts.name}{SUFFIX}"
            raise UserError(f"row {row} in {file} is damaged: {error}. {REMEDY}") from error

    @property
    def states(self) -> HiddenStates | None:
        """Which hidden states of the teacher are kept beside the signal."""
        return self._manifest.hidden

    @property
    def sampled(self) -> bool:
        """Whether the entries are draws, with log-weights as their logprobs and no tail mass."""
        return self._manifest.sampling is not None

    @property
    def kept(self) -> str:
        """What is kept at each position, in words."""
        return kept_text(self.top_k, self._manifest.top_p, self._manifest.sampling)

    @cached_property
    def row_hashes(self) -> list[str]:
        """The content hash of each row, in order (as ``PackedRows.row_hashes`` makes them)."""
        return [digest for number in range(len(self._first_rows)) for digest in self._shard(number).row_hashes]

    def require(self, row_hashes: Sequence[str], tokenizer_sha256: str) -> None:
        """Refuse a cache of other data or another tokenizer.

        Args:
            row_hashes: of the rows that the cache is about to be used with, in order.
            tokenizer_sha256: of the tokenizer that made them.

        Raises:
            UserError: says which of the two differs, and where.
        """
        captured = self._manifest.identity.get("tokenizer_sha256")
        if captured != tokenizer_sha256:
            raise UserError(
                f"{self.path} was captured with the tokenizer {str(captured)[:12]}…, but the data was made with "
                f"{tokenizer_sha256[:12]}…: capture it again (`dvc repro`), or use the data that it was captured from."
            )
        if rows_sha256(row_hashes) == self._manifest.rows_sha256:
            return
        if len(row_hashes) != self.num_rows:
            difference = f"holds {self.num_rows} rows, but the data has {len(row_hashes)}"
        else:
            pairs = zip(row_hashes, self.row_hashes, strict=True)
            first = next((row for row, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
            difference = "has a damaged rows_sha256" if first is None else f"holds other data from row {first} on"
        raise UserError(f"{self.path} {difference}: capture it again (`dvc repro`).")

    def verify(self) -> None:
        """Hash every shard, then check each against the manifest and decode every row.

        Raises:
            UserError: names the first shard that is not, byte for byte, what was captured.
        """
        for number, entry in enumerate(self._manifest.shards):
            file = self.path / entry.file
            if sha256_file(file) != self._manifest.files[entry.file].sha256:
                raise UserError(f"{file} differs from the sha256 in its manifest, so it is damaged. {REMEDY}")
            self._shard(number)
            for row in range(entry.first_row, entry.first_row + entry.rows):
                self.read([row])
                if self.states is not None:
                    self.read_states([row], self.states.layers)
        if rows_sha256(self.row_hashes) != self._manifest.rows_sha256:
            raise UserError(f"{self.path / MANIFEST}: rows_sha256 is not that of the shards' rows. {REMEDY}")

    def tail_mass_by_position(self) -> NDArray[np.float64]:
        """Mean tail mass at each position of a row, [S]; NaN where no row was captured."""
        total_S, count_S = np.zeros(self.seq_len), np.zeros(self.seq_len)
        for number, entry in enumerate(self._manifest.shards):
            shard, offset = self._shard(number), 0
            for row in range(entry.rows):
                mask_S = shard.mask_S(row)
                count = int(mask_S.sum())
                total_S[mask_S] += shard.tail_mass_N[offset : offset + count]
                count_S += mask_S
                offset += count
        with np.errstate(invalid="ignore"):
            return total_S / count_S

    def _locate(self, row: int) -> tuple[Shard, int]:
        """The shard that holds a row, and the row's number in it."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of a cache with {self.num_rows} rows")
        number = bisect_right(self._first_rows, row) - 1
        return self._shard(number), row - self._first_rows[number]

    def _shard(self, number: int) -> Shard:
        if number not in self._open:
            entry = self._manifest.shards[number]
            file = self.path / entry.file
            try:
                shard = Shard(file)
                self._check(shard, entry)
            except DamageError as error:
                raise UserError(f"{file} is damaged: {error}. {REMEDY}") from error
            self._open[number] = shard
        return self._open[number]

    def _check(self, shard: Shard, entry: ShardEntry) -> None:
        """The shard must be the one that the manifest means: names catch swapped files."""
        ours = self._manifest
        expected = {
            "name": entry.file.removesuffix(SUFFIX),
            "num_rows": entry.rows,
            "num_tokens": entry.tokens,
            **{field: getattr(ours, field) for field in ("codec", "top_k", "vocab_size", "seq_len", "hidden")},
        }
        for field, value in expected.items():
            if (found := getattr(shard.facts, field)) != value:
                raise DamageError(f"its {field} is {found}, not {value}, so it is another shard's file")
