from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tiny_run import make_config, make_student, train
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from alambique.train.export import export_model, model_card
from alambique.train.state import Validation
from tests.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_weights_are_shipped_as_training_computed_with_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, precision: str, dtype: torch.dtype
) -> None:
    trained = {name: p.detach().to(dtype) for name, p in make_student().model.named_parameters()}
    export_model(make_student().model, tokenizer, tmp_path / "model", precision, "a card", {"made": "here"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == dtype
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[name])
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    stored = load_file(tmp_path / "model/model.safetensors")
    assert set(stored) == set(trained)  # a tied head is stored once
    assert (tmp_path / "model/README.md").read_text() == "a card"


def test_the_same_model_gives_the_same_bytes(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("a", "b"):
        export_model(make_student().model, tokenizer, tmp_path / name, "bf16", "a card", {"made": "here"})
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert [(tmp_path / "a" / name).read_bytes() for name in files] == [
        (tmp_path / "b" / name).read_bytes() for name in files
    ]


def test_a_failed_export_leaves_the_old_model(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    export_model(make_student().model, tokenizer, tmp_path / "model", "bf16", "the old card", {})
    with pytest.raises(TypeError):
        export_model(make_student().model, tokenizer, tmp_path / "model", "bf16", "a new card", {"bad": object()})
    assert (tmp_path / "model/README.md").read_text() == "the old card"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_card_tells_lineage_and_budget_and_no_time(tmp_path: Path) -> None:
    config = make_config(loss={"tail": "renormalise"})
    _, result = train(tmp_path, loss={"tail": "renormalise"})
    lineage = {"teacher": "`file:teacher`", "corpus": "`file:corpus`"}
    hub = {"base_model": ["org/teacher"], "datasets": ["org/text", "org/more"]}
    card = model_card("a_pair", result, config, lineage, hub)
    assert ModelCard(card).data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["knowledge-distillation"], **hub
    }  # fmt: skip
    assert "# a_pair\n" in card
    assert "| teacher | `file:teacher` |\n| corpus | `file:corpus` |" in card
    assert "forward_kl with tail `renormalise`" in card
    assert f"{result.steps} steps of 4 rows; {result.num_tokens:,} tokens" in card
    first, last = result.curve[0].loss_nats, result.curve[-1].loss_nats
    assert f"{first:.4f} nats at the first step, {last:.4f} at the last" in card
    slower = replace(result, seconds=99.0, tokens_per_s=0.1, tflop_per_s=0.2, peak_mib=3.0, resumed_from_step=4)
    assert model_card("a_pair", slower, config, lineage, hub) == card
    assert "On held-out rows" not in card
    validated = replace(result, shipped_step=4, validations=[Validation(4, 0.25, 0.5, 12.0, 0.0625)])
    card = model_card("a_pair", validated, config, lineage, {})
    assert "These are the weights after step 4." in card
    assert "| 4 | 0.2500 | 0.5000 | 12.00 | 0.0625 |" in card
    assert "base_model" not in card
