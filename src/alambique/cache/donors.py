"""Rows that an earlier capture in the same store holds already, under other settings: the teacher isn't asked again.

Another shard size, another codec and appended rows take their rows as they are, to the same bytes that the teacher
would have given. A smaller K or top_p is cut from a larger one; then the mass of the entries that are left out comes
from their fp16 logprobs (an error below 1e-4), so such a cache says in its manifest what it is derived from. Hidden
states go along, or are left behind; layers that the earlier capture doesn't have mean that all is captured anew.

Dimensions: N captured tokens, K entries.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alambique.cache.codec import Arrays, DamageError, Entries
from alambique.cache.drift import Drift
from alambique.cache.sampled import kept_text
from alambique.cache.shards import Block, Shard
from alambique.cache.store import Kept, Receipt, Store


@dataclass(frozen=True)
class Donor:
    """Where one row is, and the receipt of its block."""

    shard: Shard
    row: int
    receipt: Receipt


class Donors:
    """Rows by content hash, all of what one ``kept`` keeps, from original blocks that are whole."""

    def __init__(self, store: Store, kept: Kept, besides: set[str]) -> None:
        """Look through the store; blocks named in ``besides`` are left out."""
        self.top_k, self.top_p = kept.top_k, kept.top_p
        self._rows: dict[str, Donor] = {}
        for name, receipt in store.receipts().items():
            if not (receipt.gives(kept) and receipt.original) or name in besides or not store.is_whole(name, receipt):
                continue
            try:
                shard = Shard(store.path(name))
            except DamageError:
                continue
            for row, digest in enumerate(shard.row_hashes):
                if digest not in self._rows or digest in receipt.rescored:
                    self._rows[digest] = Donor(shard, row, receipt)

    @classmethod
    def larger(cls, store: Store, kept: Kept, row_hashes: list[str]) -> "Donors | None":
        """Donors of all rows that keep more than ``kept`` does, or None. Draws are neither cut nor cut from."""
        if kept.sampling is not None:
            return None
        pairs = {
            (receipt.top_k, receipt.top_p)
            for receipt in store.receipts().values()
            if receipt.original
            and receipt.source == kept.source
            and receipt.sampling is None
            and kept.hidden in (None, receipt.hidden)
            and receipt.top_k >= kept.top_k
            and receipt.top_p >= kept.top_p
        }
        for top_k, top_p in sorted(pairs - {(kept.top_k, kept.top_p)}, reverse=True):
            donors = cls(store, replace(kept, top_k=top_k, top_p=top_p), set())
            if donors.cover(row_hashes):
                return donors
        return None

    @staticmethod
    def why_none(store: Store, kept: Kept) -> str | None:
        """Why nothing of what the store holds can be used; None when it is empty."""
        receipts = store.receipts().values()
        ours, held = _text(kept), {_text(receipt) for receipt in receipts if receipt.source == kept.source}
        if held and ours not in held:
            return f"the store holds {' and '.join(sorted(held))}, not {ours}"
        return "what is in the store is of other rows or settings" if receipts else None

    def cover(self, row_hashes: Sequence[str], twice: Set[str] = frozenset()) -> bool:
        """Whether every one of these rows is here, and for those in ``twice`` how far a second scoring was."""
        return all(
            digest in self._rows and (digest not in twice or digest in self._rows[digest].receipt.rescored)
            for digest in row_hashes
        )

    def rescored(self, row_hashes: Sequence[str], twice: Set[str]) -> dict[str, Drift]:
        """How far the second scoring was, for those rows that are in ``twice``; ``cover`` says if they are here."""
        return {digest: self._rows[digest].receipt.rescored[digest] for digest in row_hashes if digest in twice}

    def entries(self, block: Block, kept: Kept, vocab_size: int) -> tuple[Entries, float, float]:
        """A block's entries, cut down to ``kept``; the seconds that the teacher once took for them; and its peak MiB.

        Raises:
            DamageError: a donor can't be decoded, although its hash is right.
        """
        donors = [self._rows[digest] for digest in block.row_hashes]
        parts = [cut(donor.shard.read_entries(donor.row), kept.top_k, kept.top_p) for donor in donors]
        ids, logprobs, tails = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        counts_R = np.array([len(part[0]) for part in parts], np.int64)
        pace = [donor.receipt.seconds / max(1, donor.receipt.tokens) for donor in donors]
        seconds = float(sum(count * each for count, each in zip(counts_R, pace, strict=True)))
        peak = max(donor.receipt.peak_mib for donor in donors)
        states = [donor.shard.read_states(donor.row) for donor in donors] if kept.hidden else []
        states_NLE = np.concatenate(states) if states else None
        return Entries(ids, logprobs, tails, counts_R, vocab_size, states_NLE), seconds, peak


def _text(kept: Kept | Receipt) -> str:
    states = f" with the hidden states {kept.hidden.text()}" if kept.hidden else ""
    return kept_text(kept.top_k, kept.top_p, kept.sampling) + states


def cut(arrays: Arrays, top_k: int, top_p: float) -> Arrays:
    """Keep the first ``top_k`` entries, and of those no more than hold the mass ``top_p``; the rest joins the tail."""
    ids_NK, logprobs_NK, tail_mass_N = arrays
    mass_NK: NDArray[Any] = np.exp(logprobs_NK.astype(np.float64))
    keep_NK = np.broadcast_to(np.arange(ids_NK.shape[1]) < top_k, ids_NK.shape)
    if top_p < 1:
        before_NK = np.cumsum(mass_NK, axis=1) - mass_NK
        keep_NK = keep_NK & (before_NK < top_p)
    surplus_NK = ~keep_NK & (mass_NK > 0)
    if surplus_NK.any():
        tail_mass_N = np.minimum(tail_mass_N + (mass_NK * surplus_NK).sum(axis=1), 1).astype(np.float32)
    filled_NK = keep_NK[:, :top_k] & ~np.isneginf(logprobs_NK[:, :top_k])
    if filled_NK.all():
        return np.ascontiguousarray(ids_NK[:, :top_k]), np.ascontiguousarray(logprobs_NK[:, :top_k]), tail_mass_N
    logprobs_NK = np.where(filled_NK, logprobs_NK[:, :top_k], np.float16(-np.inf))
    return np.where(filled_NK, ids_NK[:, :top_k], np.int32(0)), logprobs_NK, tail_mass_N
