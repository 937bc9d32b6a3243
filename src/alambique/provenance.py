"""What a report says beside measurements: of what the teacher's cache consists, and where the student comes from."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from alambique.core.errors import UserError
from alambique.core.files import read_manifest

_PARTS = {"ids": "ids", "id_classes": "ids", "logprobs": "logprobs", "codes": "logprobs", "scales": "logprobs"}
_HEADER_LENGTH = 8  # bytes of a safetensors file that say how long its header is


def cache_contents(folder: Path, remedy: str) -> dict[str, Any]:
    """What a teacher's cache keeps of each position, and in how many bytes.

    Returns:
        ``top_k``, ``draws`` (None for a top K), ``vocab_size``, ``codec``, ``lossless``, ``codec_kl_nats``, ``dtype``,
        ``mass_kept`` (mean share of the teacher's probability that the kept entries hold; None for draws, which cut
        nothing off), and ``bytes_per_token``: {"ids", "logprobs", "tail mass", "index"}, which add up to the files.

    Raises:
        UserError: the manifest or a shard is missing or damaged.
    """
    manifest = read_manifest(folder, remedy)
    sizes: Counter[str] = Counter(dict.fromkeys(("ids", "logprobs", "tail mass", "index"), 0))
    for name in manifest["files"]:
        sizes += _sizes(folder / name, remedy)
    sampling = manifest["sampling"]
    return {
        **{name: manifest[name] for name in ("top_k", "vocab_size", "codec", "lossless", "codec_kl_nats")},
        "draws": None if sampling is None else sampling["draws"],
        "dtype": manifest["identity"]["dtype"],
        "mass_kept": None if sampling is not None else 1 - manifest["tail_mass"]["mean"],
        "bytes_per_token": {part: size / manifest["num_tokens"] for part, size in sizes.items()},
    }


def _sizes(shard: Path, remedy: str) -> Counter[str]:
    """Bytes of each part of one shard, from its header alone: shards are large."""
    sizes: Counter[str] = Counter()
    try:
        with shard.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_LENGTH), "little")
            header = json.loads(stream.read(min(length, shard.stat().st_size)))
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                part = "tail mass" if name == "tail_mass" else _PARTS.get(name.removesuffix("_offsets"), "index")
                sizes[part] += last - first
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{shard} can't be read ({error}): it is damaged or missing. {remedy}") from error
    sizes["index"] += _HEADER_LENGTH + length
    return sizes


def lineage(folder: Path, remedy: str) -> dict[str, Any]:
    """What a distilled model's manifest says of where it comes from.

    Returns:
        ``from`` ({what: which}, of sources, manifests and code), ``tokenizer_sha256``, ``versions`` and ``precision``.
    """
    manifest = read_manifest(folder, remedy)
    return {
        "from": {name: str(value).replace("`", "") for name, value in manifest["lineage"].items()},
        "tokenizer_sha256": manifest["tokenizer_sha256"],
        "versions": manifest["versions"],
        "precision": manifest["config"]["precision"],
    }
