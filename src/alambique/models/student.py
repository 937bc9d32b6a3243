"""Students: the teacher with layers left out, or a model of its own.

Pruning copies tensors between safetensors files, one at a time and bit for bit, in the teacher's stored dtype; the
model is never built, so that memory stays small and no conversion can creep in.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from alambique.core.errors import UserError
from alambique.core.files import link_or_copy, write_json
from alambique.core.params import Config
from alambique.models.fetch import ModelSource, weight_files

# "model.layers.7.mlp…": the stack of decoder layers as transformers names it, also below "language_model.".
_LAYER = re.compile(r"^(?P<stack>(?:[a-z_]+\.)*?(?:layers|h|blocks))\.(?P<index>\d+)\.(?P<rest>.+)$")
# What belongs to a model beside its weights: configuration, tokenizer, terms of use.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*")
_NOT_COMPANIONS = ("manifest.json", "config.json", "model.safetensors.index.json")


class LayerBlock(Config):
    """Consecutive layers, counted from 0."""

    first: int = Field(ge=0)
    count: int = Field(ge=1)


class StudentConfig(Config):
    """Which student: exactly one of these."""

    model: str | None = None  # URI of a model with the teacher's vocabulary
    drop_layers: list[int] | None = None  # the teacher without these layers, counted from 0
    drop_block: LayerBlock | None = None  # the teacher without a run of layers
    keep_uniform: int | None = Field(
        None, ge=1
    )  # so many of the teacher's layers, evenly spaced, first and last included

    @model_validator(mode="after")
    def _exactly_one(self) -> "StudentConfig":
        chosen = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(chosen) != 1:
            names = ", ".join(type(self).model_fields)
            raise ValueError(f"must set exactly one of {names}, not {' and '.join(chosen) or 'none'}")
        return self

    def kept_layers(self, num_layers: int) -> list[int]:
        """The teacher's layers that a pruned student keeps, ascending.

        Raises:
            UserError: an index outside the teacher, twice the same, or nothing or everything is left.
        """
        if self.keep_uniform is not None:
            return _evenly_spaced(self.keep_uniform, num_layers)
        if self.drop_block is not None:
            name, dropped = (
                "drop_block",
                list(range(self.drop_block.first, self.drop_block.first + self.drop_block.count)),
            )
        else:
            name, dropped = "drop_layers", self.drop_layers or []
        wrong = [index for index in dropped if not 0 <= index < num_layers]
        if wrong:
            raise UserError(f"{name} names layer {wrong[0]}, but the teacher's layers are 0 to {num_layers - 1}.")
        if len(set(dropped)) != len(dropped):
            raise UserError(f"{name} names a layer twice: list each layer once.")
        if not 0 < len(dropped) < num_layers:
            raise UserError(f"{name} drops {len(dropped)} of the teacher's {num_layers} layers: drop some, keep some.")
        return [index for index in range(num_layers) if index not in set(dropped)]


def _evenly_spaced(count: int, num_layers: int) -> list[int]:
    if not count < num_layers:
        raise UserError(f"keep_uniform = {count} must be smaller than the teacher's {num_layers} layers.")
    if count == 1:
        return [0]
    return [round(step * (num_layers - 1) / (count - 1)) for step in range(count)]


def layers_of(path: Path) -> int:
    """Number of decoder layers of the model in ``path``."""
    return int(AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().num_hidden_layers)


def vocab_rows(path: Path) -> int:
    """Rows of the output head of the model in ``path``, padding included."""
    return int(AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().vocab_size)


def count_parameters(path: Path) -> int:
    """Parameters of the model in ``path``, tied ones once, from its configuration alone."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def copy_model(source: ModelSource, out: Path) -> None:
    """Put the model's files into ``out``, hard-linked where the filesystem can."""
    for name in (*weight_files(source.path), "config.json"):
        link_or_copy((source.path / name).resolve(), out / name)
    index = source.path / "model.safetensors.index.json"
    if index.is_file():
        link_or_copy(index.resolve(), out / index.name)
    _copy_companions(source.path, out)


def prune_layers(teacher: Path, kept: list[int], out: Path) -> None:
    """Write into ``out`` the model in ``teacher`` with only the layers ``kept``, renumbered from 0.

    Everything else (embeddings, final norm, head, tying, dtype, tokenizer) is the teacher's.

    Raises:
        UserError: the model's layers aren't named in a way that is understood.
    """
    config = AutoConfig.from_pretrained(teacher, local_files_only=True)
    new_index = {old: new for new, old in enumerate(kept)}
    weight_map: dict[str, str] = {}
    total_bytes = 0
    stacks: set[str] = set()
    for name in weight_files(teacher):
        tensors = {}
        with safe_open(teacher / name, framework="pt") as shard:
            for key in shard.keys():  # noqa: SIM118 a safetensors file is not a mapping
                match = _LAYER.match(key)
                if match:
                    stacks.add(match["stack"])
                    if int(match["index"]) not in new_index:
                        continue
                renamed = f"{match['stack']}.{new_index[int(match['index'])]}.{match['rest']}" if match else key
                tensors[renamed] = shard.get_tensor(key)
        if tensors:
            save_file(tensors, out / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
            total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(stacks) != 1:
        raise UserError(
            f"{type(config).__name__} has {len(stacks)} stacks of layers ({', '.join(sorted(stacks))}), so pruning "
            "can't tell which to cut: give the student as a `model` instead."
        )
    if len(weight_files(teacher)) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(out / "model.safetensors.index.json", index)
    pruned_config(config, kept).save_pretrained(out)
    _copy_companions(teacher, out)


def pruned_config(config: PreTrainedConfig, kept: list[int]) -> PreTrainedConfig:
    """The configuration of a model with only the layers ``kept``: their number, and every per-layer list."""
    settings = config.to_dict()
    text = settings.get("text_config", settings)
    num_layers = text["num_hidden_layers"]
    for name, value in list(text.items()):
        if "layer" in name and isinstance(value, list) and len(value) == num_layers:  # layer_types, no_rope_layers, …
            text[name] = [value[index] for index in kept]
    text["num_hidden_layers"] = len(kept)
    rebuilt: PreTrainedConfig = type(config).from_dict(settings)
    return rebuilt


def facts(path: Path) -> Mapping[str, Any]:
    """What a reader of results wants to know of a model folder."""
    return {
        "num_parameters": count_parameters(path),
        "layers": layers_of(path),
        "vocab_rows": vocab_rows(path),
        "bytes": sum((path / name).stat().st_size for name in weight_files(path)),
    }


def _copy_companions(source: Path, out: Path) -> None:
    for pattern in _COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file() and path.name not in _NOT_COMPANIONS:
                link_or_copy(path.resolve(), out / path.name)
