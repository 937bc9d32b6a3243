"""A student's files: a teacher's with layers, MLP channels and groups of heads left out, or a copy of a model.

Pruning copies tensors between safetensors files, one at a time and bit for bit, in the teacher's stored dtype; the
model is never built, so that memory stays small and no conversion can creep in. The result is a standard model of the
teacher's architecture.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from alambique.core.errors import UserError
from alambique.core.files import link_or_copy, write_json
from alambique.models.fetch import ModelSource, weight_files
from alambique.models.student import Cut, Width

# "model.layers.7.mlp…": the stack of decoder layers as transformers names it, also below "language_model.".
_LAYER = re.compile(r"^(?P<stack>(?:[a-z_]+\.)*?(?:layers|h|blocks))\.(?P<index>\d+)\.(?P<rest>.+)$")
# What belongs to a model beside its weights: configuration, tokenizer, terms of use.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*")
_NOT_COMPANIONS = ("manifest.json", "config.json", "model.safetensors.index.json")
# The dimension along which a projection's weight holds MLP channels or heads; a bias has only the first.
_CUT_DIM = {
    "mlp.gate_proj": 0, "mlp.up_proj": 0, "mlp.down_proj": 1,
    "self_attn.q_proj": 0, "self_attn.k_proj": 0, "self_attn.v_proj": 0, "self_attn.o_proj": 1,
}  # fmt: skip


def facts(path: Path) -> dict[str, Any]:
    """What a reader of results wants to know of a model folder; None for a size that its architecture doesn't have."""
    text = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    return {
        "num_parameters": count_parameters(path),
        "layers": int(text.num_hidden_layers),
        "intermediate_size": getattr(text, "intermediate_size", None),
        "num_key_value_heads": getattr(text, "num_key_value_heads", None),
        "vocab_rows": vocab_rows(path),
        "bytes": sum((path / name).stat().st_size for name in weight_files(path)),
    }


def vocab_rows(path: Path) -> int:
    """Rows of the output head of the model in ``path``, padding included."""
    return int(AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().vocab_size)


def count_parameters(model: Path | PreTrainedConfig) -> int:
    """Parameters of a model in a folder or of a configuration, tied ones once, from the configuration alone."""
    config = AutoConfig.from_pretrained(model, local_files_only=True) if isinstance(model, Path) else model
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in built.parameters())


def copy_model(source: ModelSource, out: Path) -> None:
    """Put the model's files into ``out``, hard-linked where the filesystem can."""
    for name in (*weight_files(source.path), "config.json"):
        link_or_copy((source.path / name).resolve(), out / name)
    index = source.path / "model.safetensors.index.json"
    if index.is_file():
        link_or_copy(index.resolve(), out / index.name)
    _copy_companions(source.path, out)


def prune_model(teacher: Path, cut: Cut, out: Path) -> None:
    """Write into ``out`` what ``cut`` leaves of the model in ``teacher``, its layers renumbered from 0.

    Everything else (embeddings, norms, head, tying, dtype, tokenizer) is the teacher's.

    Raises:
        UserError: the model's layers aren't named in a way that is understood.
    """
    config = AutoConfig.from_pretrained(teacher, local_files_only=True)
    new_index = {old: new for new, old in enumerate(cut.layers)}
    weight_map: dict[str, str] = {}
    total_bytes = 0
    stacks: set[str] = set()
    for name in weight_files(teacher):
        tensors = {}
        with safe_open(teacher / name, framework="pt") as shard:
            for key in shard.keys():  # noqa: SIM118 a safetensors file is not a mapping
                match = _LAYER.match(key)
                if not match:
                    tensors[key] = shard.get_tensor(key)
                    continue
                stacks.add(match["stack"])
                index, rest = int(match["index"]), match["rest"]
                if index in new_index:
                    tensor = _narrowed(shard.get_tensor(key), rest, index, cut, config)
                    tensors[f"{match['stack']}.{new_index[index]}.{rest}"] = tensor
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
        index_of = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(out / "model.safetensors.index.json", index_of)
    widths = (None if kept is None else kept.shape[1] for kept in (cut.channels, cut.groups))
    pruned_config(config, cut.layers, *widths).save_pretrained(out)
    _copy_companions(teacher, out)


def _narrowed(tensor: Tensor, rest: str, index: int, cut: Cut, config: PreTrainedConfig) -> Tensor:
    """The channels or groups of one layer's tensor that ``cut`` keeps; the tensor itself if it has none."""
    stem, _, kind = rest.rpartition(".")
    in_mlp, dim = stem.startswith("mlp."), _CUT_DIM.get(stem)
    kept = cut.channels if in_mlp else cut.groups
    if kept is None or dim is None or (kind == "bias" and dim == 1):
        return tensor
    text = config.get_text_config()
    parts = text.intermediate_size if in_mlp else text.num_key_value_heads
    # A group is a run of rows: head h belongs to group h // (heads a group).
    shape = tensor.shape
    split = tensor.reshape(*shape[:dim], parts, -1, *shape[dim + 1 :])
    return split.index_select(dim, kept[index]).flatten(dim, dim + 1)


def pruned_config(
    config: PreTrainedConfig,
    layers: Sequence[int],
    intermediate_size: int | None = None,
    key_value_heads: int | None = None,
) -> PreTrainedConfig:
    """The configuration of what is left: the number of layers and every per-layer list, and the widths that change.

    Raises:
        UserError: the architecture doesn't allow so many heads.
    """
    settings = config.to_dict()
    text = settings.get("text_config", settings)
    num_layers = text["num_hidden_layers"]
    for name, value in list(text.items()):
        if "layer" in name and isinstance(value, list) and len(value) == num_layers:  # layer_types, no_rope_layers, …
            text[name] = [value[index] for index in layers]
    text["num_hidden_layers"] = len(layers)
    if intermediate_size is not None:
        text["intermediate_size"] = intermediate_size
    if key_value_heads is not None:
        heads, groups = text["num_attention_heads"], text["num_key_value_heads"]
        text["head_dim"] = _head_dim(config)  # no longer the hidden size over the number of heads
        text["num_attention_heads"] = heads // groups * key_value_heads
        text["num_key_value_heads"] = key_value_heads
    try:
        rebuilt: PreTrainedConfig = type(config).from_dict(settings)
    except (ValueError, StrictDataclassError) as error:
        raise UserError(
            f"width.num_key_value_heads = {key_value_heads} leaves {text['num_attention_heads']} heads, which "
            f"{type(config).__name__} refuses ({' '.join(str(error).split())}): choose another number."
        ) from error
    return rebuilt


def require_prunable_width(teacher: Path, width: Width) -> None:
    """Refuse, from names and shapes alone, a model whose parts ``width`` doesn't know how to cut.

    Known is the architecture that Llama, Mistral, Qwen 2 and 3 and SmolLM share: gate, up and down projections; query,
    key, value and output projections of whole heads; at most a norm within each head.

    Raises:
        UserError: a mixture of experts, fused projections, norms across heads, attention sinks, …, or a number of
            heads that the architecture doesn't allow.
    """
    config = AutoConfig.from_pretrained(teacher, local_files_only=True)
    wanted = {"mlp": width.intermediate_size, "self_attn": width.num_key_value_heads}
    blocks = {name for name, size in wanted.items() if size is not None}
    known, found = _shapes(config), set()
    for name in weight_files(teacher):
        with safe_open(teacher / name, framework="pt") as shard:
            for key in shard.keys():  # noqa: SIM118 a safetensors file is not a mapping
                match = _LAYER.match(key)
                rest = match["rest"] if match else ""
                if rest.split(".")[0] not in blocks:
                    continue
                stem, _, kind = rest.rpartition(".")
                shape, weight = tuple(shard.get_slice(key).get_shape()), known.get(stem, ())
                if not weight or shape != {"weight": weight, "bias": weight[:1]}.get(kind):
                    _refuse(config, f"{rest} {list(shape)}")
                found.add(stem)
    missing = sorted(stem for stem in _CUT_DIM if stem.split(".")[0] in blocks and stem not in found)
    if missing:
        _refuse(config, f"no {missing[0]}")
    pruned_config(config, [0], width.intermediate_size, width.num_key_value_heads)


def _refuse(config: PreTrainedConfig, what: str) -> None:
    raise UserError(
        f"{type(config).__name__} has {what} in its layers, which width pruning doesn't know (it knows Llama, Mistral, "
        "Qwen 2 and 3, SmolLM and what is built alike; no mixture of experts): take `width` away and prune depth only."
    )


def _shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight that may stand in a layer's MLP and attention."""
    text = config.get_text_config()
    hidden, inner, head = text.hidden_size, getattr(text, "intermediate_size", None), _head_dim(config)
    queries = text.num_attention_heads * head
    keys = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head
    return {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
    }


def _head_dim(config: PreTrainedConfig) -> int:
    text = config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _copy_companions(source: Path, out: Path) -> None:
    for pattern in _COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file() and path.name not in _NOT_COMPANIONS:
                link_or_copy(path.resolve(), out / path.name)
