import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, LlamaConfig

from alambique.core.errors import UserError
from alambique.core.files import sha256_file, write_manifest
from alambique.core.params import Params
from alambique.core.sources import content_sha256
from alambique.data.dataset import PackedRows
from pipeline import student
from tests.tiny_models import save_model, tiny_model, tiny_tokenizer


def uri(folder: str) -> str:
    return f"file:{folder}#sha256={content_sha256(Path(folder))}"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder with a tiny teacher, and params that prune it."""
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    save_model(Path("teacher"), tiny_model(LlamaConfig, num_hidden_layers=4), tiny_tokenizer())
    return {
        "student": {},
        "teachers": {"big": {"model": uri("teacher"), "capture": {}}},
        "pairs": {"half": {"teacher": "big", "student": {"drop_layers": [1, 2]}, "distill": {}}},
    }


def prepare() -> None:
    """Packed rows of the teacher's tokens, as the stage before leaves them."""
    ids = torch.randint(6, 300, (4, 12), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[:, -1] = False
    folder, splits = Path("artifacts/prepare/big"), {}
    for split in ("train", "valid"):
        PackedRows(ids, torch.zeros_like(ids), mask).save(folder / f"{split}.safetensors")
        splits[split] = {"rows": 4, "target_tokens": 44}
    write_manifest(folder, {"vocab_size": 300, "splits": splits})


def run(params: dict[str, Any]) -> dict[str, Any]:
    YAML().dump(params, Path("params.yaml"))
    student.run("half")
    results: dict[str, Any] = json.loads(Path("results/student/half.json").read_text())
    return results


def test_a_pruned_teacher(checkout: dict[str, Any]) -> None:
    results = run(checkout)
    folder = Path("artifacts/student/half")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert results["num_parameters"] == model.num_parameters() < results["teacher_parameters"]
    assert (results["layers"], results["layers_kept"], results["vocab_size"]) == (2, [0, 3], 300)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tiny_tokenizer().get_vocab()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["config"]["drop_layers"] == [1, 2]
    assert results["layers_removed"] == [1, 2]
    assert results["parameters_kept"] == results["num_parameters"] / results["teacher_parameters"]
    assert results["strategy"] == "drop_layers"
    assert results["importance"] is None  # nothing was measured, so no prepared data were needed
    assert manifest["sources"][0]["uri"] == uri("teacher")
    for name, recorded in manifest["files"].items():
        assert sha256_file(folder / name) == recorded["sha256"]
    before = (folder / "manifest.json").read_bytes()
    run(checkout)
    assert (folder / "manifest.json").read_bytes() == before


def test_a_measured_student_is_pruned_where_it_hurts_least(checkout: dict[str, Any]) -> None:
    model = tiny_model(LlamaConfig, num_hidden_layers=4)
    with torch.no_grad():  # layer 1 and half of layer 2's channels do nothing, nor does the second group of heads
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, 16:] = 0
            layer.mlp.up_proj.weight[:32] = 0
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    save_model(Path("teacher"), model, tiny_tokenizer())
    checkout["teachers"]["big"]["model"] = uri("teacher")
    width = {"intermediate_size": 32, "num_key_value_heads": 1}
    checkout["pairs"]["half"]["student"] = {"drop_by_influence": 1, "width": width, "measure": {"rows": 3}}
    prepare()
    results = run(checkout)
    assert results["layers_removed"] == [1]
    assert (results["intermediate_size"], results["num_key_value_heads"]) == (32, 1)
    assert results["teacher_sizes"] == {"layers": 4, "intermediate_size": 64, "num_key_value_heads": 2}
    scores = results["importance"]
    assert scores["tokens"] == 36
    assert scores["block_influence"][1] == pytest.approx(0, abs=1e-6)
    assert scores["channels_share_kept"] == [1.0, 1.0, 1.0, 1.0]
    assert all(first > second == 0 for first, second in [*scores["groups"][:1], *scores["groups"][2:]])
    student_model = AutoModelForCausalLM.from_pretrained("artifacts/student/half")
    ids = torch.arange(6, 26)[None]
    with torch.no_grad():  # only what did nothing is gone
        torch.testing.assert_close(student_model(ids).logits, model(ids).logits)
    assert "importance" not in json.loads(Path("artifacts/student/half/manifest.json").read_text())


def test_a_measured_block(checkout: dict[str, Any]) -> None:
    checkout["pairs"]["half"]["student"] = {"drop_block": {"first": "measured", "count": 2}}
    prepare()
    results = run(checkout)
    distances = results["importance"]["block_distance"]
    first = distances.index(min(distances))
    assert len(distances) == 3
    assert results["layers_removed"] == [first, first + 1]


def test_a_measured_student_needs_the_prepared_data(checkout: dict[str, Any]) -> None:
    checkout["pairs"]["half"]["student"] = {"drop_by_influence": 1}
    with pytest.raises(UserError, match=r"artifacts/prepare/big.*Run the prepare stage again"):
        run(checkout)


def test_a_mixture_of_experts_is_pruned_in_depth_only(checkout: dict[str, Any]) -> None:
    experts = tiny_model(GptOssConfig, attention="eager", num_local_experts=4, num_experts_per_tok=2)
    save_model(Path("teacher"), experts, tiny_tokenizer())
    checkout["teachers"]["big"]["model"] = uri("teacher")
    checkout["pairs"]["half"]["student"] = {"drop_layers": [1], "width": {"intermediate_size": 32}}
    with pytest.raises(UserError, match="no mixture of experts"):
        run(checkout)
    checkout["pairs"]["half"]["student"] = {"drop_by_influence": 1, "measure": {"attention": "eager"}}
    prepare()
    assert run(checkout)["layers"] == 2


def test_a_model_with_more_padding(checkout: dict[str, Any]) -> None:
    save_model(Path("small"), tiny_model(LlamaConfig, num_hidden_layers=1, vocab_size=512), tiny_tokenizer())
    checkout["pairs"]["half"]["student"] = {"model": uri("small")}
    results = run(checkout)
    assert (results["layers"], results["vocab_rows"], results["vocab_size"]) == (1, 512, 300)
    assert results["layers_kept"] is None
    assert results["layers_removed"] is None
    assert results["strategy"] == "model"
    mine = AutoModelForCausalLM.from_pretrained("artifacts/student/half")
    assert torch.equal(mine.lm_head.weight, AutoModelForCausalLM.from_pretrained("small").lm_head.weight)


def test_another_vocabulary_is_refused_before_anything_is_written(checkout: dict[str, Any]) -> None:
    save_model(Path("alien"), tiny_model(LlamaConfig), tiny_tokenizer(vocab_size=290))
    checkout["pairs"]["half"]["student"] = {"model": uri("alien")}
    with pytest.raises(UserError, match="teacher and student have different vocabularies: 300 against 290 tokens"):
        run(checkout)
    assert not Path("artifacts/student/half").exists()


def test_it_reads_the_sections_that_it_says(checkout: dict[str, Any]) -> None:
    params = Params(checkout)
    student.settings(params, "half")
    assert set(params.reads) == {"student", "pairs.half.student", "pairs.half.teacher", "teachers.big.model"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student": {"drop_layers": [4]}}, "drop_layers names layer 4, but the teacher's layers are 0 to 3"),
        ({"student": {"width": {"intermediate_size": 64}}}, "width.intermediate_size = 64 must be smaller than"),
        ({"student": {}}, r"params.yaml: student \+ pairs.half.student: .*must set exactly one of model, drop_layers"),
        ({"teacher": "bigg"}, r"params.yaml: teachers has no key bigg; did you mean big\?"),
    ],
)
def test_bad_input_is_one_sentence(checkout: dict[str, Any], change: dict[str, Any], message: str) -> None:
    checkout["pairs"]["half"] |= change
    with pytest.raises(UserError, match=message):
        run(checkout)
