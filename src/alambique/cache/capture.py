"""Capture: the teacher runs once over the data, and the top of its distribution at each position is kept.

Blocks of rows are the unit of work and of resuming. The forward pass of one block overlaps with compressing and
writing the one before.

Dimensions: R rows, B rows of a batch, S positions, D hidden size, V vocabulary, N captured tokens, K entries.
"""

import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from alambique.cache.codec import Codec, Entries, find_codec
from alambique.cache.head import Head, top_entries
from alambique.cache.manifest import rows_sha256, tail_mass_statistics
from alambique.cache.shards import FORMAT, VERSION, Block, Shard
from alambique.cache.store import Receipt, Store, plan_blocks
from alambique.core.errors import UserError
from alambique.core.files import MANIFEST, atomic_folder, link_or_copy, require_free_space, write_json
from alambique.core.measure import Stopwatch, device_name, peak_mib, versions
from alambique.core.params import Config
from alambique.core.progress import Progress

_BLOCKS_IN_FLIGHT = 2  # one being compressed while the next is scored; each holds 6·K bytes per token until written


class CaptureConfig(Config):
    """How the teacher is run and what is kept.

    Attributes:
        top_k: entries kept at each position.
        top_p: keep fewer entries where they hold this mass already; 1 keeps K everywhere.
        codec: how they are stored; a module in alambique.cache.codecs.
        dtype: of the teacher's weights and activations; the softmax is always fp32.
        attention: transformers' attention implementation.
        batch_tokens: tokens of one forward pass, whole rows; halved when memory runs out.
        logits_mib: memory for the logits of one chunk of tokens.
        shard_mib: size of a shard, and so of what a kill can lose.
    """

    top_k: int = Field(100, ge=1, le=65_536)  # source: the published system caches the top 100
    top_p: float = Field(1.0, gt=0, le=1)  # source: as above
    codec: str = "exact"  # source: benchmarks/cache_cases.py, smaller than the lossy formats of the field
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # source: what current teachers are published in
    attention: str = "sdpa"  # source: transformers' default
    batch_tokens: int = Field(8192, ge=1)  # assumption: fills a GPU, and a 70B teacher's activations still fit
    logits_mib: int = Field(256, ge=1)  # assumption: 1,000 tokens at V = 128,256 keep the head's GEMM compute-bound
    shard_mib: float = Field(256, gt=0)  # source: DVC handles files of 256 MB to 1 GB best; see docs/cache-format.md

    @model_validator(mode="after")
    def _store_what_is_kept(self) -> "CaptureConfig":
        if self.top_p < 1 and self.codec != "top_p":
            raise ValueError(f"needs codec = top_p for top_p = {self.top_p}: {self.codec} would store the empty slots")
        return self

    def require_vocabulary(self, vocab_size: int) -> None:
        """Refuse to keep more entries than there are tokens."""
        if self.top_k > vocab_size:
            raise UserError(
                f"teacher.top_k = {self.top_k} is larger than the vocabulary of {vocab_size} tokens: choose at most "
                f"{vocab_size}."
            )


class Rows(Protocol):
    """Packed rows, as the prepare stage makes them, on the CPU."""

    @property
    def input_ids_RS(self) -> Tensor:
        """int32 token ids."""

    @property
    def document_ids_RS(self) -> Tensor:
        """int32 document numbers, -1 on padding."""

    @property
    def loss_mask_RS(self) -> Tensor:
        """bool, True where the next token is a target."""

    def row_hashes(self) -> list[str]:
        """Hex sha256 of each row's content."""


class Teacher(Protocol):
    """A causal language model with its backbone and its output head apart."""

    head_weight_VD: Any
    head_bias_V: Tensor | None
    logit_softcap: float | None
    logit_scale: float

    def hidden(self, input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, S, D]."""


@dataclass(frozen=True)
class CaptureResult:
    """What a capture cost. Rates are those of the blocks this run scored, or else of the runs that did.

    ``seconds`` and ``peak_mib`` cover all blocks, also those that earlier, interrupted runs finished.
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
    teacher: Teacher,
    out: Path,
    store: Path,
    identity: dict[str, Any],
    config: CaptureConfig,
    vocab_size: int,
    device: torch.device,
) -> CaptureResult:
    """Capture ``rows`` into the folder ``out``, reusing the blocks that ``store`` already holds.

    The bytes of ``out`` depend on the arguments alone: not on interruptions and, as far as the teacher's own
    arithmetic doesn't depend on it, not on the batch size.

    Args:
        rows: what to score; only positions with a True loss mask are kept.
        teacher: the model, on ``device``.
        out: becomes a cache that ``TeacherCache.open`` reads; replaced when it exists.
        store: scratch folder for finished blocks, best on the same filesystem (they are hard-linked into ``out``).
        identity: what the signal comes from (model, tokenizer, ...), JSON values; blocks are named by it.
        config: what is kept and how.
        vocab_size: real entries of the vocabulary; the head's rows beyond it are padding and are cut off.
        device: where the teacher is.

    Raises:
        UserError: a setting that can't work, too little disk space, or a teacher that produces NaN.
    """
    job = _Job(rows, teacher, Store(store), identity, config, vocab_size, device)
    found = {block.name: receipt for block in job.blocks if (receipt := job.store.find(block))}
    missing = [block for block in job.blocks if block.name not in found]
    if found:
        print(f"capture: {len(found)} of {len(job.blocks)} blocks are there already", file=sys.stderr)
    job.require_space(out, missing)
    written = job.run(missing, done_tokens=sum(receipt.tokens for receipt in found.values()))
    receipts = [{**found, **written}[block.name] for block in job.blocks]
    manifest = job.assemble(out, receipts)
    timed = list(written.values()) or receipts
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
        reused_blocks=len(found),
    )


def engine(device: torch.device, logits_dtype: torch.dtype) -> dict[str, Any]:
    """What runs the teacher: the device and the versions that can change its numbers or the bytes."""
    packages = ("torch", "transformers", "pcodec", "safetensors")
    found = versions(*packages)
    return {
        "device": device_name(device),
        "logits_dtype": str(logits_dtype).removeprefix("torch."),
        "versions": {package: found[package] for package in packages},
    }


class _Job:
    """One capture: its plan, and the loop over its blocks."""

    def __init__(
        self,
        rows: Rows,
        teacher: Teacher,
        store: Store,
        identity: dict[str, Any],
        config: CaptureConfig,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.codec: Codec = find_codec(config.codec, "teacher.codec")
        _refuse(rows, teacher, config, vocab_size)
        self.rows, self.teacher, self.store, self.config = rows, teacher, store, config
        self.identity, self.vocab_size, self.device = identity, vocab_size, device
        self.head = Head(
            teacher.head_weight_VD.detach()[:vocab_size],
            None if teacher.head_bias_V is None else teacher.head_bias_V.detach()[:vocab_size],
            teacher.logit_softcap,
            teacher.logit_scale,
        )
        self.engine = engine(device, self.head.logits_dtype)
        self.mask_RS = rows.loss_mask_RS.numpy()
        self.num_rows, self.seq_len = self.mask_RS.shape
        self.batch_rows = max(1, config.batch_tokens // self.seq_len)
        row_bytes = self.seq_len * config.top_k * self.codec.BYTES_PER_ENTRY
        rows_per_block = max(1, int(config.shard_mib * 2**20 / row_bytes))
        self.row_hashes = rows.row_hashes()
        self.blocks = plan_blocks(self.row_hashes, rows_per_block, self._depends_on())

    def _depends_on(self) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "engine": self.engine,
            "codec": [self.config.codec, self.codec.VERSION],
            "top_k": self.config.top_k,
            "top_p": self.config.top_p,
            "vocab_size": self.vocab_size,
            "seq_len": self.seq_len,
        }

    def tokens_of(self, block: Block) -> int:
        """Captured positions in a block."""
        return int(self.mask_RS[block.rows.start : block.rows.stop].sum())

    def require_space(self, out: Path, missing: list[Block]) -> None:
        """Refuse to start when the blocks to capture, or a copy of all blocks in ``out``, won't fit on the disk."""

        def estimate(blocks: list[Block]) -> int:
            return int(sum(map(self.tokens_of, blocks)) * self.config.top_k * self.codec.BYTES_PER_ENTRY)

        require_free_space(self.store.folder, estimate(missing), "the teacher's cache")
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.parent.stat().st_dev != self.store.folder.stat().st_dev:  # a hard link can't cross filesystems
            require_free_space(out.parent, estimate(self.blocks), "a copy of the teacher's cache")

    def run(self, blocks: list[Block], done_tokens: int) -> dict[str, Receipt]:
        """Score and write ``blocks``; returns their receipts by name."""
        receipts: dict[str, Receipt] = {}
        pending: deque[tuple[Block, Future[Receipt]]] = deque()
        stopwatch = Stopwatch(self.device)
        progress = Progress("capture", int(self.mask_RS.sum()), done=done_tokens)

        def finish_oldest() -> None:
            block, future = pending.popleft()
            receipts[block.name] = future.result()

        # Leaving the pool waits for the block being written, so an error or ^C elsewhere doesn't lose it.
        with progress, ThreadPoolExecutor(1, "write") as writer:
            for block in blocks:
                entries = self._score(block, lambda tokens: self._report(progress, tokens, receipts))
                while len(pending) >= _BLOCKS_IN_FLIGHT - 1:
                    finish_oldest()
                mask_RS = self.mask_RS[block.rows.start : block.rows.stop]
                cost = (stopwatch.seconds(), peak_mib(self.device))
                stopwatch.restart()
                pending.append(
                    (block, writer.submit(self.store.write, block, mask_RS, entries, self.config.codec, *cost))
                )
            while pending:
                finish_oldest()
        return receipts

    def _report(self, progress: Progress, tokens: int, receipts: dict[str, Receipt]) -> None:
        written = sum(receipt.tokens for receipt in receipts.values())
        metrics = {"bytes_per_token": sum(r.bytes for r in receipts.values()) / written} if written else {}
        progress.update(tokens, **metrics)

    def _score(self, block: Block, report: Callable[[int], None]) -> Entries:
        """The kept entries of a block, on the CPU."""
        parts = []
        start = block.rows.start
        while start < block.rows.stop:
            size = min(self.batch_rows, block.rows.stop - start)
            part = self._try_batch(start, start + size)
            if part is None:
                self._halve_batch(size)
                continue
            parts.append(part)
            report(len(part[0]))
            start += size
        ids, logprobs, tails = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        counts_R = self.mask_RS[block.rows.start : block.rows.stop].sum(axis=1, dtype=np.int64)
        return Entries(ids, logprobs, tails, counts_R, self.vocab_size)

    def _try_batch(self, start: int, stop: int) -> tuple[Any, Any, Any] | None:
        """The kept entries of rows [start, stop) as numpy arrays, or None when memory ran out."""
        try:
            with torch.inference_mode():
                input_ids_BS = self.rows.input_ids_RS[start:stop].to(self.device)
                document_ids_BS = self.rows.document_ids_RS[start:stop].to(self.device)
                # Counted on the CPU, so that the device need not be waited for.
                positions_N = torch.from_numpy(np.flatnonzero(self.mask_RS[start:stop])).to(self.device)
                hidden_BSD = self.teacher.hidden(input_ids_BS, document_ids_BS)
                hidden_ND = hidden_BSD.flatten(0, 1).index_select(0, positions_N).to(self.head.weight_VD.dtype)
                kept = top_entries(hidden_ND, self.head, self.config.top_k, self.config.logits_mib, self.config.top_p)
                ids_NK, logprobs_NK, tail_mass_N = (tensor.cpu().numpy() for tensor in kept)
        except torch.OutOfMemoryError:
            return None
        if not np.isfinite(tail_mass_N).all():
            row = start + int(positions_N[int(np.flatnonzero(~np.isfinite(tail_mass_N))[0])]) // self.seq_len
            raise UserError(
                f"the teacher gives NaN or infinite logits in row {row} of the training rows: choose another "
                f"teacher.dtype than {self.config.dtype}, or another attention implementation."
            )
        return ids_NK, logprobs_NK, tail_mass_N

    def _halve_batch(self, size: int) -> None:
        if size == 1:
            raise UserError(
                f"one row of {self.seq_len} tokens does not fit in the memory of {device_name(self.device)}: lower "
                "teacher.logits_mib or prepare.seq_len, or use a smaller teacher."
            )
        self.batch_rows = size // 2
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"capture: out of memory with {size} rows, trying {self.batch_rows}", file=sys.stderr)

    def assemble(self, out: Path, receipts: list[Receipt]) -> dict[str, Any]:
        """Link the blocks into ``out`` and write its manifest, which holds nothing that a second run could change."""
        num_tokens = sum(receipt.tokens for receipt in receipts)
        shards = [Shard(self.store.shard(block)) for block in self.blocks]
        placed = list(zip(self.blocks, receipts, strict=True))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "codec": self.config.codec,
            "lossless": self.codec.LOSSLESS,
            "codec_kl_nats": sum(s.facts.codec_kl_nats * s.facts.num_tokens for s in shards) / num_tokens,
            "top_k": self.config.top_k,
            "top_p": self.config.top_p,
            "vocab_size": self.vocab_size,
            "seq_len": self.seq_len,
            "num_rows": self.num_rows,
            "num_tokens": num_tokens,
            "bytes_per_token": sum(receipt.bytes for receipt in receipts) / num_tokens,
            "rows_sha256": rows_sha256(self.row_hashes),
            "tail_mass": tail_mass_statistics((shard.tail_mass_N for shard in shards), num_tokens),
            "identity": self.identity,
            "engine": self.engine,
            "shards": [
                {
                    "file": self.store.shard(block).name,
                    "first_row": block.first_row,
                    "rows": len(block.row_hashes),
                    "tokens": receipt.tokens,
                }
                for block, receipt in placed
            ],
            "files": {
                self.store.shard(block).name: {"sha256": receipt.sha256, "bytes": receipt.bytes}
                for block, receipt in placed
            },
        }
        with atomic_folder(out) as folder:
            for block in self.blocks:
                link_or_copy(self.store.shard(block), folder / self.store.shard(block).name)
            write_json(folder / MANIFEST, manifest)
        return manifest


def _refuse(rows: Rows, teacher: Teacher, config: CaptureConfig, vocab_size: int) -> None:
    """Settings that can't work, each in one sentence, before anything runs."""
    config.require_vocabulary(vocab_size)
    if vocab_size > (head_rows := teacher.head_weight_VD.shape[0]):
        raise UserError(
            f"the tokenizer has {vocab_size} tokens, but the teacher's output head only {head_rows} rows: use the "
            "teacher's own tokenizer."
        )
    if not bool(rows.loss_mask_RS.any()):
        raise UserError("no position of the training rows has a target, so there is nothing to capture: add text.")
