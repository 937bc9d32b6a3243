"""The store: a scratch folder where finished blocks outlive a killed capture, each with a receipt."""

import fcntl
import os
import sys
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from alambique.cache.codec import Entries, find_codec
from alambique.cache.drift import Drift
from alambique.cache.sampled import Sampling
from alambique.cache.shards import FORMAT, SUFFIX, VERSION, Block, write_shard
from alambique.cache.states import HiddenStates
from alambique.core.errors import UserError
from alambique.core.files import atomic_path, read_json, sha256_file, sha256_json, write_json
from alambique.core.params import Config

_ABANDONED_SECONDS = 3600  # assumption: writing one shard takes seconds, so an older scratch file is a killed run's


@dataclass(frozen=True)
class Kept:
    """What a capture keeps and how: ``source`` is the hash of all that decides the teacher's distribution itself."""

    source: str
    codec: str
    top_k: int
    top_p: float
    sampling: Sampling | None = None  # None for the top K; with draws, top_k is the number of slots
    hidden: HiddenStates | None = None
    derived: bool = False  # cut from a larger capture, so not quite what the teacher would give


class Receipt(Config):
    """What is known of a finished block: written after its shard, so a shard without one is not finished."""

    source: str
    top_k: int
    top_p: float
    sampling: Sampling | None
    hidden: HiddenStates | None
    original: bool  # every bit as the teacher gave it: neither derived nor stored by a lossy codec
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)
    tokens: int = Field(ge=0)
    seconds: float = Field(ge=0)  # of the forward pass and all it waited for; what a resumed run reports
    peak_mib: float = Field(ge=0)
    rescored: dict[str, Drift]  # of rows that were scored twice, by content hash

    def gives(self, kept: Kept) -> bool:
        """Whether the block holds of its rows what ``kept`` keeps, whatever the codec."""
        ours = (self.source, self.top_k, self.top_p, self.sampling)
        theirs = (kept.source, kept.top_k, kept.top_p, kept.sampling)
        return ours == theirs and kept.hidden in (None, self.hidden)


def plan_blocks(row_hashes: list[str], rows_per_block: int, depends_on: dict[str, Any]) -> list[Block]:
    """Cut rows into blocks of ``rows_per_block`` and name each by the hash of everything that decides its bytes."""
    blocks = []
    for first in range(0, len(row_hashes), rows_per_block):
        hashes = tuple(row_hashes[first : first + rows_per_block])
        name = sha256_json({"format": FORMAT, "version": VERSION, **depends_on, "rows": hashes})[:32]
        blocks.append(Block(name, first, hashes))
    return blocks


class Store:
    """Blocks by name in one folder. Several captures may share it: equal names mean equal bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._claims: int | None = None  # never closed: that would free every claim
        folder.mkdir(parents=True, exist_ok=True)
        for scratch in folder.glob(".*.part"):
            if time.time() - scratch.stat().st_mtime > _ABANDONED_SECONDS:
                scratch.unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        """Where the file of the block called ``name`` is, or will be."""
        return self.folder / f"{name}{SUFFIX}"

    def receipts(self) -> dict[str, Receipt]:
        """Receipts of all blocks, by name; one that can't be read is no receipt."""
        found = {path.stem: self._read_receipt(path.stem) for path in sorted(self.folder.glob("*.json"))}
        return {name: receipt for name, receipt in found.items() if receipt is not None}

    def is_whole(self, name: str, receipt: Receipt) -> bool:
        """Whether a block's file is the one that its receipt means, by hash."""
        shard = self.path(name)
        return shard.is_file() and shard.stat().st_size == receipt.bytes and sha256_file(shard) == receipt.sha256

    def find(self, block: Block, twice: Set[str] = frozenset()) -> Receipt | None:
        """The receipt of a block whose file is whole, hashing it; a damaged one is named on stderr and forgotten.

        A block is not finished either when it lacks the second scoring of one of its rows that are in ``twice``.
        """
        shard = self.path(block.name)
        if not (shard.is_file() and self._receipt_path(block.name).is_file()):
            return None
        receipt = self._read_receipt(block.name)
        if receipt is not None and self.is_whole(block.name, receipt):
            return receipt if twice & set(block.row_hashes) <= receipt.rescored.keys() else None
        rows = f"rows {block.rows.start} to {block.rows.stop - 1}"
        print(f"warning: {shard} ({rows}) is damaged and will be captured again", file=sys.stderr)
        self._receipt_path(block.name).unlink()
        return None

    def claim(self, block: Block) -> bool:
        """Take a block for this process, until it ends; False when another one has it, or has just finished it.

        A lock on one byte of an empty file, which the kernel frees however the process ends: what a killed one had
        claimed goes to the next that asks.
        """
        if self._claims is None:
            self._claims = os.open(self.folder / "claims", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(block.name[:15], 16))
        except (BlockingIOError, PermissionError):  # POSIX leaves open which
            return False
        return not self._receipt_path(block.name).is_file()

    def write(
        self,
        block: Block,
        mask_RS: NDArray[np.bool_],
        entries: Entries,
        kept: Kept,
        seconds: float,
        peak_mib: float,
        rescored: dict[str, Drift],
    ) -> Receipt:
        """Encode a block, write it atomically, then its receipt.

        Raises:
            UserError: the disk is full or can't be written; finished blocks stay.
        """
        shard = self.path(block.name)
        try:
            with atomic_path(shard) as scratch:
                write_shard(scratch, block, mask_RS, entries, kept.codec, kept.hidden)
                sha256, size = sha256_file(scratch), scratch.stat().st_size
            receipt = Receipt(
                source=kept.source,
                top_k=kept.top_k,
                top_p=kept.top_p,
                sampling=kept.sampling,
                hidden=kept.hidden,
                original=find_codec(kept.codec, str(shard)).LOSSLESS and not kept.derived,
                sha256=sha256,
                bytes=size,
                tokens=len(entries.tail_mass_N),
                seconds=seconds,
                peak_mib=peak_mib,
                rescored=rescored,
            )
            write_json(self._receipt_path(block.name), receipt.model_dump())
        except OSError as error:
            raise UserError(
                f"{shard} could not be written ({error.strerror or error}): free some space and run again, the blocks "
                "finished so far are kept."
            ) from error
        return receipt

    def _receipt_path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _read_receipt(self, name: str) -> Receipt | None:
        try:
            return Receipt.model_validate(read_json(self._receipt_path(name)))
        except (UserError, ValidationError):
            return None
