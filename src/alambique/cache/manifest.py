"""The cache's manifest.json: what was captured from what, and the hash of every shard."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from alambique.cache.drift import Drift
from alambique.cache.sampled import Sampling
from alambique.cache.shards import FORMAT, MAX_SEQ_LEN, MAX_TOP_K, MAX_VOCAB, VERSION
from alambique.cache.states import HiddenStates
from alambique.core.errors import UserError
from alambique.core.files import MANIFEST, read_manifest, sha256_bytes
from alambique.core.params import Config, validate

REMEDY = "Capture it again (`dvc repro --force teacher@TEACHER`)."
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
_SAMPLED_TOKENS = 1_000_000  # quantiles of more tokens than this come from an even sample
SHA256 = "^[0-9a-f]{64}$"


class ShardEntry(Config):
    """One shard's place in the whole."""

    file: str = Field(pattern=r"^[0-9a-f]{32}\.safetensors$")
    first_row: int = Field(ge=0)
    rows: int = Field(ge=1)
    tokens: int = Field(ge=0)


class FileEntry(Config):
    """One file's content."""

    sha256: str = Field(pattern=SHA256)
    bytes: int = Field(ge=0)


class TailMass(Config):
    """Mass outside the kept entries, over all captured tokens."""

    mean: float
    quantiles: dict[str, float]


class Engine(Config):
    """What ran the teacher: everything that can change its numbers, or the bytes."""

    device: str
    logits_dtype: str
    versions: dict[str, str]


class Manifest(Config):
    """The fields that this version of the format has; docs/cache-format.md explains each."""

    format: str = Field(pattern=f"^{FORMAT}$")
    version: int
    codec: str = Field(pattern="^[a-z0-9_]+$")
    lossless: bool
    codec_kl_nats: float
    top_k: int = Field(ge=1, le=MAX_TOP_K)
    top_p: float
    sampling: Sampling | None
    hidden: HiddenStates | None = None  # not in the file where none are kept
    vocab_size: int = Field(ge=1, le=MAX_VOCAB)
    seq_len: int = Field(ge=1, le=MAX_SEQ_LEN)
    num_rows: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    bytes_per_token: float = Field(ge=0)
    derived_from: dict[str, float] | None
    rows_sha256: str = Field(pattern=SHA256)
    tail_mass: TailMass
    rescored: Drift | None
    identity: dict[str, Any]
    engine: Engine
    shards: list[ShardEntry] = Field(min_length=1)
    files: dict[str, FileEntry]


def rows_sha256(row_hashes: Sequence[str]) -> str:
    """One hash for all rows: sha256 over their 32-byte hashes in order."""
    return sha256_bytes(bytes.fromhex("".join(row_hashes)))


def tail_mass_statistics(tails: Iterable[NDArray[np.float32]], num_tokens: int) -> dict[str, Any]:
    """Mean and quantiles of tail masses that come shard by shard."""
    step = -(-num_tokens // _SAMPLED_TOKENS)
    total, offset = 0.0, 0
    sample: list[NDArray[np.float32]] = []
    for tail_N in tails:
        total += float(tail_N.sum(dtype=np.float64))
        sample.append(tail_N[(-offset) % step :: step])
        offset += len(tail_N)
    quantiles = np.quantile(np.concatenate(sample).astype(np.float64), QUANTILES)
    return {
        "mean": total / num_tokens,
        "quantiles": {str(q): float(value) for q, value in zip(QUANTILES, quantiles, strict=True)},
    }


def load_manifest(folder: Path) -> tuple[dict[str, Any], Manifest]:
    """Read and check ``manifest.json``: as it stands, and parsed.

    Raises:
        UserError: it is missing, damaged, of another format or version, or contradicts itself.
    """
    raw = read_manifest(folder, REMEDY)
    where = folder / MANIFEST
    if raw.get("format") == FORMAT and raw.get("version") != VERSION:
        raise UserError(
            f"{where} has format version {raw['version']!r}, but this alambique reads {VERSION}: use the version that "
            f"wrote it, or capture it again."
        )
    try:
        manifest = validate(Manifest, raw, f"{where}")
    except UserError as error:
        raise UserError(f"{error}. {REMEDY}") from error
    _check_rows(manifest, where)
    return raw, manifest


def _check_rows(manifest: Manifest, where: Path) -> None:
    next_row = 0
    for shard in manifest.shards:
        if shard.first_row != next_row:
            raise UserError(f"{where}: shard {shard.file} starts at row {shard.first_row}, not {next_row}. {REMEDY}")
        next_row += shard.rows
    tokens = sum(shard.tokens for shard in manifest.shards)
    for name, found, recorded in (("rows", next_row, manifest.num_rows), ("tokens", tokens, manifest.num_tokens)):
        if found != recorded:
            raise UserError(f"{where}: its shards hold {found} {name}, but num_{name} is {recorded}. {REMEDY}")
    if {shard.file for shard in manifest.shards} != set(manifest.files):
        raise UserError(f"{where}: `shards` and `files` name different files. {REMEDY}")
    if manifest.top_k > manifest.vocab_size:
        raise UserError(f"{where}: top_k {manifest.top_k} exceeds vocab_size {manifest.vocab_size}. {REMEDY}")
