"""Capture: the teacher runs once over the data, and the top of its distribution at each position is kept.

Blocks of rows are the unit of work and of resuming. The forward pass of one block overlaps with compressing and
writing the one before.

Dimensions: R rows, S positions.
"""

import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from alambique.cache.codec import Codec, find_codec
from alambique.cache.config import CaptureConfig
from alambique.cache.donors import Donors
from alambique.cache.drift import merged, scored_twice
from alambique.cache.manifest import rows_sha256, tail_mass_statistics
from alambique.cache.sampled import Sampler
from alambique.cache.score import Rows, Scorer, Teacher
from alambique.cache.shards import FORMAT, VERSION, Block, Shard
from alambique.cache.states import HiddenStates
from alambique.cache.store import Kept, Receipt, Store, plan_blocks
from alambique.core.errors import UserError
from alambique.core.files import (
    MANIFEST,
    atomic_folder,
    link_or_copy,
    require_free_space,
    sha256_json,
    write_json,
)
from alambique.core.measure import Stopwatch, device_name, peak_mib, versions
from alambique.core.progress import Progress

_BLOCKS_IN_FLIGHT = 2  # one being compressed while the next is scored; each holds 6·K bytes per token until written


@dataclass(frozen=True)
class CaptureResult:
    """What a capture cost.

    ``seconds`` and ``peak_mib`` are what the teacher took for all blocks, also those that earlier runs or jobs beside
    this one finished: of jobs side by side the sum and the largest. ``tokens_per_s`` is the pace of the blocks that
    this run scored, or of all when it scored none: always that of one job, so N of them are up to N times as fast.
    """

    num_rows: int
    num_tokens: int
    tokens_per_s: float
    seconds: float
    peak_mib: float
    cache_bytes: int
    bytes_per_token: float
    mean_tail_mass: float
    num_blocks: int
    reused_blocks: int


def capture(
    rows: Rows,
    load_teacher: Callable[[], Teacher],
    out: Path,
    store: Path,
    identity: dict[str, Any],
    config: CaptureConfig,
    vocab_size: int,
    device: torch.device,
    states: HiddenStates | None = None,
) -> CaptureResult:
    """Capture ``rows`` into the folder ``out``, reusing what ``store`` already holds.

    The bytes of ``out`` don't depend on interruptions nor, as far as the teacher's own arithmetic doesn't, on the
    batch size. Only a cache cut from a larger one (and marked so) differs from one captured anew.

    Args:
        rows: what to score; only positions with a True loss mask are kept.
        load_teacher: gives the model in the dtype of ``config.resolved(device)`` on ``device``; called only if
            something has to be scored.
        out: becomes a cache that ``TeacherCache.open`` reads; replaced when it exists.
        store: scratch folder for finished blocks, best on the same filesystem (they are hard-linked into ``out``).
        identity: what the signal comes from (model, tokenizer, ...), JSON values; blocks are named by it.
        config: what is kept and how.
        vocab_size: real entries of the vocabulary; the head's rows beyond it are padding and are cut off.
        device: where the teacher is.
        states: what ``config.hidden_layers`` is of this teacher.

    Raises:
        UserError: a setting that can't work, too little disk space, or a teacher that produces NaN.
    """
    job = CaptureJob(rows, load_teacher, Store(store), identity, config, vocab_size, device, states)
    job.plan()
    job.require_space(out)
    written = job.run()
    receipts = [{**job.found, **written}[block.name] for block in job.blocks]
    manifest = job.assemble(out, receipts)
    timed = [written[name] for name in job.scored] or receipts
    return CaptureResult(
        num_rows=manifest["num_rows"],
        num_tokens=manifest["num_tokens"],
        tokens_per_s=sum(receipt.tokens for receipt in timed) / max(sum(receipt.seconds for receipt in timed), 1e-9),
        seconds=sum(receipt.seconds for receipt in receipts),
        peak_mib=max(receipt.peak_mib for receipt in receipts),
        cache_bytes=sum(receipt.bytes for receipt in receipts),
        bytes_per_token=manifest["bytes_per_token"],
        mean_tail_mass=manifest["tail_mass"]["mean"],
        num_blocks=len(receipts),
        reused_blocks=len(receipts) - len(job.scored),
    )


def engine(device: torch.device, dtype: str) -> dict[str, Any]:
    """What runs the teacher: the device and the versions that can change its numbers or the bytes."""
    packages = ("torch", "transformers", "pcodec", "safetensors")
    found = versions(*packages)
    return {
        "device": device_name(device),
        "logits_dtype": "float32" if device.type == "cuda" else dtype,  # as head.Head.logits_dtype
        "versions": {package: found[package] for package in packages},
    }


class CaptureJob:
    """One capture: its plan, and the loop over its blocks."""

    def __init__(
        self,
        rows: Rows,
        load_teacher: Callable[[], Teacher],
        store: Store,
        identity: dict[str, Any],
        config: CaptureConfig,
        vocab_size: int,
        device: torch.device,
        states: HiddenStates | None,
    ) -> None:
        config = config.resolved(device)
        self.codec: Codec = find_codec(config.codec, "teacher.codec")
        config.require_vocabulary(vocab_size)
        if not bool(rows.loss_mask_RS.any()):
            raise UserError("no position of the training rows has a target, so there is nothing to capture: add text.")
        self.rows, self.load_teacher, self.store, self.config = rows, load_teacher, store, config
        self.identity, self.vocab_size, self.device = identity, vocab_size, device
        self.engine = engine(device, config.dtype)
        self.mask_RS = rows.loss_mask_RS.numpy()
        self.num_rows, self.seq_len = self.mask_RS.shape
        self.row_hashes = rows.row_hashes()
        self.source = {"identity": identity, "engine": self.engine, "vocab_size": vocab_size, "seq_len": self.seq_len}
        sampling = config.sampling
        slots = config.top_k if sampling is None else sampling.slots(vocab_size)
        self.kept = Kept(sha256_json(self.source), config.codec, slots, config.top_p, sampling, states)
        self.derived_from: dict[str, float] | None = None
        # Draws would hide how far the teacher drifts.
        self.twice = set() if sampling else scored_twice(self.row_hashes, rows.loss_mask_RS.any(dim=1).tolist())
        self.scored: list[str] = []

    def plan(self) -> None:
        """Decide on the blocks, and find those that are finished and the rows that need no teacher."""
        self._plan_blocks()
        self.donors = Donors(self.store, self.kept, self._names())
        if not self.found and not self.donors.cover(self.row_hashes):
            larger = Donors.larger(self.store, self.kept, self.row_hashes)
            if larger is not None:
                self.derived_from = {"top_k": larger.top_k, "top_p": larger.top_p}
                self.donors, self.kept = larger, replace(self.kept, derived=True)
                self.twice = set()
                self._plan_blocks()
        missing = [block for block in self.blocks if block.name not in self.found]
        given = sum(self.donors.cover(block.row_hashes, self.twice) for block in missing)
        cut_from = f", cut from top {self.derived_from['top_k']}" if self.derived_from else ""
        if self.found or given:
            print(
                f"capture: of {len(self.blocks)} blocks {len(self.found)} are there and {given} come from an earlier "
                f"capture{cut_from}",
                file=sys.stderr,
            )
        elif (why := Donors.why_none(self.store, self.kept)) is not None:
            print(f"capture: {why}, so all is scored", file=sys.stderr)
        self.missing = missing

    def _plan_blocks(self) -> None:
        rows_per_block = max(1, int(self.config.shard_mib * 2**20 / self._row_bytes()))
        depends_on = {
            **self.source,
            "codec": [self.kept.codec, self.codec.VERSION],
            "top_k": self.kept.top_k,
            "top_p": self.kept.top_p,
            "sampling": self.kept.sampling and self.kept.sampling.model_dump(),
            "derived_from": self.derived_from,
            **self._hidden(),
        }
        self.blocks = plan_blocks(self.row_hashes, rows_per_block, depends_on)
        self.found = {block.name: receipt for block in self.blocks if (receipt := self.store.find(block, self.twice))}

    def _row_bytes(self) -> float:
        return self.config.row_bytes(self.seq_len, self.kept.top_k, self.kept.hidden)

    def _hidden(self) -> dict[str, Any]:
        """What is said of hidden states: nothing where none are kept, so that names and bytes know no difference."""
        return {"hidden": self.kept.hidden.model_dump(mode="json")} if self.kept.hidden else {}

    def _names(self) -> set[str]:
        return {block.name for block in self.blocks}

    def tokens_of(self, block: Block) -> int:
        """Captured positions in a block."""
        return int(self.mask_RS[block.rows.start : block.rows.stop].sum())

    def require_space(self, out: Path | None) -> None:
        """Refuse to start when the blocks to capture, or a copy of all blocks in ``out``, won't fit on the disk."""

        def estimate(blocks: list[Block]) -> int:
            return int(sum(map(self.tokens_of, blocks)) * self._row_bytes() / self.seq_len)

        require_free_space(self.store.folder, estimate(self.missing), "the teacher's cache")
        if out is None:
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.parent.stat().st_dev != self.store.folder.stat().st_dev:  # a hard link can't cross filesystems
            require_free_space(out.parent, estimate(self.blocks), "a copy of the teacher's cache")

    @cached_property
    def scorer(self) -> Scorer:
        """The teacher, loaded when first needed."""
        sampling = self.kept.sampling
        scorer = Scorer(
            self.rows,
            self.load_teacher(),
            top_k=self.kept.top_k,
            top_p=self.kept.top_p,
            layers=self.kept.hidden.layers if self.kept.hidden else (),
            sampler=None if sampling is None else Sampler(sampling, self.row_hashes, self.mask_RS),
            logits_mib=self.config.logits_mib,
            batch_rows=max(1, self.config.batch_tokens // self.seq_len),
            vocab_size=self.vocab_size,
            device=self.device,
        )
        if str(scorer.head.logits_dtype).removeprefix("torch.") != self.engine["logits_dtype"]:
            raise ValueError(f"the teacher's logits are {scorer.head.logits_dtype}, not as {self.engine} says")
        return scorer

    def run(self, part: tuple[int, int] | None = None) -> dict[str, Receipt]:
        """Score or convert the missing blocks and write them; returns their receipts by name.

        As ``part`` (I, N) of N processes it leaves the blocks that another one has claimed.
        """
        receipts: dict[str, Receipt] = {}
        pending: deque[tuple[Block, Future[Receipt]]] = deque()
        progress = self._progress(part)

        def finish_oldest() -> None:
            block, future = pending.popleft()
            receipts[block.name] = future.result()

        def report(tokens: int) -> None:
            written = sum(receipt.tokens for receipt in receipts.values())
            metrics = {"bytes_per_token": sum(r.bytes for r in receipts.values()) / written} if written else {}
            progress.update(tokens, **metrics)

        # Leaving the pool waits for the block being written, so an error or ^C elsewhere doesn't lose it.
        with progress, ThreadPoolExecutor(1, "write") as writer:
            for block in self.missing:
                if part is not None and not self.store.claim(block):
                    continue
                given = self.donors.cover(block.row_hashes, self.twice)
                if given:
                    entries, seconds, peak = self.donors.entries(block, self.kept, self.vocab_size)
                    rescored = self.donors.rescored(block.row_hashes, self.twice)
                    report(len(entries.tail_mass_N))
                else:
                    scorer = self.scorer  # loading it is no part of its pace
                    stopwatch = Stopwatch(self.device)
                    entries = scorer.entries(block.rows, report)
                    rescored = scorer.drifts(block, entries, self.twice)
                    self.scored.append(block.name)
                while len(pending) >= _BLOCKS_IN_FLIGHT - 1:
                    finish_oldest()
                if not given:
                    seconds, peak = stopwatch.seconds(), peak_mib(self.device)  # waiting for the writer included
                mask_RS = self.mask_RS[block.rows.start : block.rows.stop]
                pending.append(
                    (
                        block,
                        writer.submit(self.store.write, block, mask_RS, entries, self.kept, seconds, peak, rescored),
                    )
                )
            while pending:
                finish_oldest()
        return receipts

    def _progress(self, part: tuple[int, int] | None) -> Progress:
        """A bar over all tokens; of a part over its fair share of those that are missing."""
        if part is not None:
            blocks = len(self.missing) or 1
            share = sum(map(self.tokens_of, self.missing)) * -(-blocks // part[1]) // blocks  # whole blocks, rounded up
            return Progress(f"capture {part[0]}/{part[1]}", share, line=part[0] - 1)
        done = sum(receipt.tokens for receipt in self.found.values())
        return Progress("capture", int(self.mask_RS.sum()), done=done)

    def assemble(self, out: Path, receipts: list[Receipt]) -> dict[str, Any]:
        """Link the blocks into ``out`` and write its manifest, which holds nothing that a second run could change."""
        num_tokens = sum(receipt.tokens for receipt in receipts)
        shards = [Shard(self.store.path(block.name)) for block in self.blocks]
        placed = list(zip(self.blocks, receipts, strict=True))
        rescored = {digest: found for receipt in receipts for digest, found in receipt.rescored.items()}
        sample = [rescored[digest] for digest in sorted(self.twice)]
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "codec": self.config.codec,
            "lossless": self.codec.LOSSLESS,
            "codec_kl_nats": sum(s.facts.codec_kl_nats * s.facts.num_tokens for s in shards) / num_tokens,
            "top_k": self.kept.top_k,
            "top_p": self.kept.top_p,
            "sampling": self.kept.sampling and self.kept.sampling.model_dump(),
            **self._hidden(),
            "derived_from": self.derived_from,
            "vocab_size": self.vocab_size,
            "seq_len": self.seq_len,
            "num_rows": self.num_rows,
            "num_tokens": num_tokens,
            "bytes_per_token": sum(receipt.bytes for receipt in receipts) / num_tokens,
            "rows_sha256": rows_sha256(self.row_hashes),
            "tail_mass": tail_mass_statistics((shard.tail_mass_N for shard in shards), num_tokens),
            "rescored": merged(sample).model_dump() if sample else None,
            "identity": self.identity,
            "engine": self.engine,
            "shards": [
                {
                    "file": self.store.path(block.name).name,
                    "first_row": block.first_row,
                    "rows": len(block.row_hashes),
                    "tokens": receipt.tokens,
                }
                for block, receipt in placed
            ],
            "files": {
                self.store.path(block.name).name: {"sha256": receipt.sha256, "bytes": receipt.bytes}
                for block, receipt in placed
            },
        }
        with atomic_folder(out) as folder:
            for block in self.blocks:
                link_or_copy(self.store.path(block.name), folder / self.store.path(block.name).name)
            write_json(folder / MANIFEST, manifest)
        return manifest
