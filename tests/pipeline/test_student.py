import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from alambique.core.errors import UserError
from alambique.core.files import sha256_file
from alambique.core.params import Params
from alambique.core.sources import content_sha256
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
    assert manifest["sources"][0]["uri"] == uri("teacher")
    for name, recorded in manifest["files"].items():
        assert sha256_file(folder / name) == recorded["sha256"]
    before = (folder / "manifest.json").read_bytes()
    run(checkout)
    assert (folder / "manifest.json").read_bytes() == before


def test_a_model_with_more_padding(checkout: dict[str, Any]) -> None:
    save_model(Path("small"), tiny_model(LlamaConfig, num_hidden_layers=1, vocab_size=512), tiny_tokenizer())
    checkout["pairs"]["half"]["student"] = {"model": uri("small")}
    results = run(checkout)
    assert (results["layers"], results["vocab_rows"], results["vocab_size"]) == (1, 512, 300)
    assert results["layers_kept"] is None
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
        ({"student": {}}, r"params.yaml: student \+ pairs.half.student: .*must set exactly one of model, drop_layers"),
        ({"teacher": "bigg"}, r"params.yaml: teachers has no key bigg; did you mean big\?"),
    ],
)
def test_bad_input_is_one_sentence(checkout: dict[str, Any], change: dict[str, Any], message: str) -> None:
    checkout["pairs"]["half"] |= change
    with pytest.raises(UserError, match=message):
        run(checkout)
