import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GptOssConfig, LlamaConfig, Qwen2Config

from alambique.core.errors import UserError
from alambique.core.params import validate
from alambique.models.fetch import ModelSource
from alambique.models.load import SplitModel, load_model, stored_dtype
from alambique.models.student import (
    StudentConfig,
    copy_model,
    count_parameters,
    facts,
    layers_of,
    prune_layers,
    pruned_config,
    vocab_rows,
)
from tests.tiny_models import save_model, tiny_model, tiny_tokenizer

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
    prune_layers(tmp_path / "teacher", kept, tmp_path / "student")
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
    assert student.config.num_hidden_layers == layers_of(tmp_path / "student") == len(kept)
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
    prune_layers(tmp_path / "teacher", [0, 5], tmp_path / "student")
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
        prune_layers(tmp_path / "teacher", [0, 2], tmp_path / name)
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


def test_which_layers_are_kept() -> None:
    assert StudentConfig(drop_layers=[1, 3]).kept_layers(5) == [0, 2, 4]
    block = validate(StudentConfig, {"drop_block": {"first": 14, "count": 6}}, "here")
    assert block.kept_layers(30) == [*range(14), *range(20, 30)]
    assert StudentConfig(keep_uniform=4).kept_layers(10) == [0, 3, 6, 9]
    assert StudentConfig(keep_uniform=1).kept_layers(10) == [0]
    for count in range(1, 30):
        kept = StudentConfig(keep_uniform=count).kept_layers(30)
        assert len(set(kept)) == count
        assert kept == sorted(kept)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drop_layers": [1, 30]}, "drop_layers names layer 30, but the teacher's layers are 0 to 29"),
        ({"drop_layers": [-1]}, "drop_layers names layer -1, but"),
        ({"drop_layers": [3, 3]}, "drop_layers names a layer twice"),
        ({"drop_layers": []}, "drop_layers drops 0 of the teacher's 30 layers"),
        ({"drop_block": {"first": 0, "count": 30}}, "drop_block drops 30 of the teacher's 30 layers"),
        ({"drop_block": {"first": 28, "count": 3}}, "drop_block names layer 30"),
        ({"keep_uniform": 30}, "keep_uniform = 30 must be smaller than the teacher's 30 layers"),
    ],
)
def test_bad_layers_are_refused_in_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(StudentConfig, values, "params.yaml").kept_layers(30)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "must set exactly one of model, drop_layers, drop_block, keep_uniform, not none"),
        ({"model": "hf://a/b", "drop_layers": [1]}, "not model and drop_layers"),
        ({"drop_layer": [1]}, "unknown key drop_layer; did you mean drop_layers?"),
        ({"drop_block": {"start": 1, "count": 2}}, r"unknown key drop_block.start"),
    ],
)
def test_bad_student_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(StudentConfig, values, "params.yaml: student")


def test_a_model_with_other_names_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "teacher", tiny_model(LlamaConfig), tiny_tokenizer())
    path = tmp_path / "teacher/model.safetensors"
    tensors = load_file(path)
    tensors["vision.layers.0.weight"] = torch.zeros(2)
    save_file(tensors, path, metadata={"format": "pt"})
    (tmp_path / "student").mkdir()
    with pytest.raises(UserError, match=r"LlamaConfig has 2 stacks of layers \(model.layers, vision.layers\)"):
        prune_layers(tmp_path / "teacher", [0], tmp_path / "student")


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
    prune_layers(tmp_path / "teacher", [0, 3], tmp_path / "student")
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
