"""Student folders: what is cut equals what is skipped or silenced in the teacher by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from alambique.core.errors import UserError
from alambique.core.params import Params
from alambique.models.fetch import ModelSource
from alambique.models.load import SplitModel, load_model, stored_dtype
from alambique.models.prune import (
    copy_model,
    count_parameters,
    facts,
    prune_model,
    pruned_config,
    require_prunable_width,
    vocab_rows,
)
from alambique.models.student import Cut, StudentConfig, Width
from tests.tiny_models import save_model, tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
FAMILIES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama": (LlamaConfig, "sdpa", {}),
    "qwen2-tied": (Qwen2Config, "sdpa", {"tie_word_embeddings": True}),
    "gemma2": (Gemma2Config, "eager", {"head_dim": 8, "sliding_window": 4}),
    "gpt-oss": (
        GptOssConfig,
        "eager",
        {
            "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [[0, 1, 4, 5], [1, 2, 3]])
def test_pruned_model_equals_skipping_layers_by_hand(family: str, kept: list[int], tmp_path: Path) -> None:
    config_class, attention, settings = FAMILIES[family]
    teacher = tiny_model(config_class, attention=attention, num_hidden_layers=6, **settings)
    save_model(tmp_path / "teacher", teacher, tiny_tokenizer())
    (tmp_path / "student").mkdir()
    prune_model(tmp_path / "teacher", Cut(kept), tmp_path / "student")
    student, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "student", attn_implementation=attention, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids_BS = torch.arange(3, 33).reshape(2, 15)
    before = teacher(input_ids=ids_BS, use_cache=False).logits
    # By hand: the same layer objects, each with the mask of its own kind.
    types = teacher.config.layer_types if hasattr(teacher.config, "layer_types") else None
    teacher.model.layers = torch.nn.ModuleList(teacher.model.layers[index] for index in kept)
    teacher.config.num_hidden_layers = len(kept)
    if types:
        teacher.config.layer_types = [types[index] for index in kept]
    expected = teacher(input_ids=ids_BS, use_cache=False).logits
    assert torch.equal(student(input_ids=ids_BS, use_cache=False).logits, expected)
    assert (before - expected).abs().max() > 0.01
    assert student.config.num_hidden_layers == facts(tmp_path / "student")["layers"] == len(kept)
    tied = student.lm_head.weight is student.model.embed_tokens.weight
    assert tied == bool(teacher.config.tie_word_embeddings)
    assert [layer.self_attn.layer_idx for layer in student.model.layers] == list(range(len(kept)))
    generated = student.generate(ids_BS[:1], max_new_tokens=4, do_sample=False)  # its cache needs the right indices
    assert generated.shape[1] == 19


def test_sharded_models_keep_an_index(tmp_path: Path) -> None:
    teacher = tiny_model(LlamaConfig, num_hidden_layers=6)
    teacher.save_pretrained(tmp_path / "teacher", max_shard_size="100KB")
    tiny_tokenizer().save_pretrained(tmp_path / "teacher")
    (tmp_path / "student").mkdir()
    prune_model(tmp_path / "teacher", Cut([0, 5]), tmp_path / "student")
    index = json.loads((tmp_path / "student/model.safetensors.index.json").read_text())
    on_disk = {path.name for path in (tmp_path / "student").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == on_disk
    assert len(on_disk) > 1
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert torch.equal(student.model.layers[1].mlp.up_proj.weight, teacher.model.layers[5].mlp.up_proj.weight)
    assert index["metadata"]["total_size"] == facts(tmp_path / "student")["bytes"] - _headers(tmp_path / "student")


def _headers(folder: Path) -> int:
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))


def test_dtype_tokenizer_and_bytes_are_the_teachers(tmp_path: Path) -> None:
    teacher = tiny_model(LlamaConfig).bfloat16()
    save_model(tmp_path / "teacher", teacher, tiny_tokenizer())
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        prune_model(tmp_path / "teacher", Cut([0, 2]), tmp_path / name)
    with safe_open(tmp_path / "one/model.safetensors", framework="pt") as shard:
        assert all(shard.get_tensor(key).dtype == torch.bfloat16 for key in shard.keys())  # noqa: SIM118
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "one").get_vocab() == tiny_tokenizer().get_vocab()


def test_facts_count_tied_weights_once(tmp_path: Path) -> None:
    model = tiny_model(Qwen2Config, tie_word_embeddings=True)
    save_model(tmp_path, model, tiny_tokenizer())
    assert count_parameters(tmp_path) == model.num_parameters() == sum(p.numel() for p in model.parameters())
    assert vocab_rows(tmp_path) == 320
    assert facts(tmp_path)["layers"] == 3


def test_a_copied_model_shares_the_disk(tmp_path: Path) -> None:
    model = tiny_model(LlamaConfig)
    model.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model/LICENSE.txt").write_text("terms")
    copy_model(ModelSource(tmp_path / "model", "file:model", "0" * 64), tmp_path / "copy")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert (tmp_path / "copy/LICENSE.txt").read_text() == "terms"
    shard = next((tmp_path / "copy").glob("*.safetensors"))
    assert shard.samefile(tmp_path / "model" / shard.name)


def test_per_layer_lists_follow_the_layers() -> None:
    config = GptOssConfig(num_hidden_layers=4, vocab_size=320)
    pruned = pruned_config(config, [0, 3])
    assert pruned.layer_types == [config.layer_types[0], config.layer_types[3]]
    assert pruned.num_hidden_layers == 2
    assert config.num_hidden_layers == 4


WIDE: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-one-head-a-group": (LlamaConfig, {"num_attention_heads": 4}),
    "mistral": (MistralConfig, {"sliding_window": 4}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2}),
}


def wide_model(config_class: Any, **settings: Any) -> Any:
    """Four layers, four groups of two heads, every bias and norm random."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
    model = tiny_model(config_class, **(sizes | settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def some(parts: int, count: int) -> torch.Tensor:
    """``count`` of ``parts`` for each of four layers, ascending, other ones in each."""
    generator = torch.Generator().manual_seed(parts)
    return torch.stack([torch.randperm(parts, generator=generator)[:count].sort().values for _ in range(4)])


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("parts", ["channels", "groups", "both"])
def test_a_narrow_model_equals_silencing_by_hand(family: str, parts: str, tmp_path: Path) -> None:
    config_class, settings = WIDE[family]
    teacher = wide_model(config_class, **settings)
    save_model(tmp_path / "teacher", teacher, tiny_tokenizer())
    (tmp_path / "student").mkdir()
    channels, groups = None if parts == "groups" else some(64, 40), None if parts == "channels" else some(4, 2)
    require_prunable_width(tmp_path / "teacher", Width(intermediate_size=40, num_key_value_heads=2))
    kept = [0, 2, 3]
    prune_model(tmp_path / "teacher", Cut(kept, channels, groups), tmp_path / "student")
    student, info = AutoModelForCausalLM.from_pretrained(tmp_path / "student", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids_BS = torch.arange(3, 33).reshape(2, 15)
    with torch.no_grad():
        whole = teacher(input_ids=ids_BS, use_cache=False).logits
        silence(teacher, channels, groups)
        teacher.model.layers = torch.nn.ModuleList(teacher.model.layers[index] for index in kept)
        expected = teacher(input_ids=ids_BS, use_cache=False).logits
        torch.testing.assert_close(student(input_ids=ids_BS, use_cache=False).logits, expected)
        assert (whole - expected).abs().max() > 0.01
    config = student.config
    assert config.intermediate_size == (64 if parts == "groups" else 40)
    assert config.num_key_value_heads == (4 if parts == "channels" else 2)
    assert config.num_attention_heads // config.num_key_value_heads == settings.get("num_attention_heads", 8) // 4
    assert student.generate(ids_BS[:1], max_new_tokens=4, do_sample=False).shape[1] == 19
    SplitModel(student).check()


def silence(model: Any, channels: torch.Tensor | None, groups: torch.Tensor | None) -> None:
    """Take from the residual stream what the channels and groups that go would add: nothing else is changed."""
    for index, layer in enumerate(model.model.layers):
        if channels is not None:
            gone = [i for i in range(64) if i not in channels[index]]
            layer.mlp.down_proj.weight[:, gone] = 0
        if groups is not None:
            out = layer.self_attn.o_proj.weight
            width = out.shape[1] // 4
            for group in set(range(4)) - set(groups[index].tolist()):
                out[:, group * width : (group + 1) * width] = 0


REFUSED: dict[str, tuple[Any, dict[str, Any], Width, str]] = {
    "experts": (
        GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        Width(intermediate_size=8),
        r"GptOssConfig has mlp\.\S+ \[.*\] in its layers, .*; no mixture of experts\): take `width` away",
    ),
    "sinks": (
        GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        Width(num_key_value_heads=1),
        r"GptOssConfig has self_attn\.sinks \[4\] in its layers",
    ),
    "fused": (Phi3Config, {}, Width(intermediate_size=8), r"Phi3Config has mlp\.gate_up_proj\.weight \[128, 32\]"),
    "a norm across heads": (
        Olmo2Config,
        {},
        Width(num_key_value_heads=1),
        r"Olmo2Config has self_attn\.k_norm\.weight \[16\] in its layers",
    ),
    "heads": (
        LlamaConfig,
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4},
        Width(num_key_value_heads=3),
        r"width\.num_key_value_heads = 3 leaves 3 heads, which LlamaConfig refuses \(.*not a multiple.*\): choose",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_width_pruning_does_not_know_is_refused(case: str, tmp_path: Path) -> None:
    config_class, settings, width, message = REFUSED[case]
    attention = "eager" if config_class is GptOssConfig else "sdpa"
    save_model(tmp_path, tiny_model(config_class, attention=attention, **settings), tiny_tokenizer())
    with pytest.raises(UserError, match=message):
        require_prunable_width(tmp_path, width)


def test_what_width_does_not_touch_is_not_asked_for(tmp_path: Path) -> None:
    save_model(tmp_path, tiny_model(Olmo2Config), tiny_tokenizer())
    require_prunable_width(tmp_path, Width(intermediate_size=8))  # only its heads are tied together by a norm


# Llama 3.1 8B's config.json: what decides its number of parameters.
LLAMA31_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_preset_makes_the_published_size_of_an_8b() -> None:
    teacher = LlamaConfig(**LLAMA31_8B)
    assert count_parameters(teacher) == 8_030_261_248  # as published
    params = Params.load(ROOT / "presets/llama31_8b_pruned_3b.yaml")
    student = params.section(StudentConfig, "student", "pairs.llama31_8b_20l.student")
    student.require(32, 14336, 8)
    assert student.drop_block is not None
    assert student.width is not None
    layers = range(32 - student.drop_block.count)
    config = pruned_config(teacher, layers, student.width.intermediate_size, student.width.num_key_value_heads)
    assert count_parameters(config) == 3_210_907_648


def test_a_model_with_other_names_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "teacher", tiny_model(LlamaConfig), tiny_tokenizer())
    path = tmp_path / "teacher/model.safetensors"
    tensors = load_file(path)
    tensors["vision.layers.0.weight"] = torch.zeros(2)
    save_file(tensors, path, metadata={"format": "pt"})
    (tmp_path / "student").mkdir()
    with pytest.raises(UserError, match=r"LlamaConfig has 2 stacks of layers \(model.layers, vision.layers\)"):
        prune_model(tmp_path / "teacher", Cut([0]), tmp_path / "student")


def pack_experts(folder: Path) -> None:
    """Turn a tiny gpt-oss into a checkpoint with MXFP4 experts, as the published ones are."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in list(tensors.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = value.shape
            del tensors[name]
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = torch.full(blocks.shape[:-1], 120, dtype=torch.uint8)  # 2^(120 - 127)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(settings))


def test_packed_experts_are_pruned_as_they_are_and_expanded_on_loading(tmp_path: Path) -> None:
    settings = FAMILIES["gpt-oss"][2] | {"hidden_size": 64, "intermediate_size": 32}
    model = tiny_model(GptOssConfig, attention="eager", num_hidden_layers=4, **settings).bfloat16()
    save_model(tmp_path / "teacher", model, tiny_tokenizer())
    pack_experts(tmp_path / "teacher")
    (tmp_path / "student").mkdir()
    prune_model(tmp_path / "teacher", Cut([0, 3]), tmp_path / "student")
    models = [
        load_model(tmp_path / name, dtype=stored_dtype(tmp_path / name), device=torch.device("cpu"), attention="eager")
        for name in ("teacher", "student")
    ]
    experts = [models[0].model.layers[3].mlp.experts, models[1].model.layers[1].mlp.experts]
    assert experts[0].down_proj.dtype == torch.bfloat16
    assert experts[0].down_proj.abs().sum() > 0
    assert torch.equal(experts[0].down_proj, experts[1].down_proj)
    assert torch.equal(experts[0].gate_up_proj, experts[1].gate_up_proj)
    SplitModel(models[1]).check()
    assert count_parameters(tmp_path / "student") == models[1].num_parameters()
