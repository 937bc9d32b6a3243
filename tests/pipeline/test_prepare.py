import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from transformers import LlamaConfig

from alambique.core.errors import UserError
from alambique.core.params import Params
from alambique.core.sources import content_sha256
from alambique.data.dataset import PreparedData
from alambique.models.load import load_tokenizer, tokenizer_sha256
from pipeline import prepare
from tests.tiny_models import save_model, tiny_model, tiny_tokenizer


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder with a tiny model, a corpus and params; returns the params, to be changed and written again."""
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    save_model(Path("model"), tiny_model(LlamaConfig), tiny_tokenizer())
    lines = [json.dumps({"text": f"{n} the cat sat on the mat"}) for n in range(40)]
    Path("corpus.jsonl").write_text("\n".join(lines))
    return {
        "prepare": {
            "seq_len": 32,
            "train_rows": 4,
            "valid_rows": 1,
            "corpora": [{"uri": f"file:corpus.jsonl#sha256={content_sha256(Path('corpus.jsonl'))}", "format": "jsonl"}],
        },
        "teachers": {"tiny": {"model": f"file:model#sha256={content_sha256(Path('model'))}", "capture": {}}},
    }


def write(params: dict[str, Any]) -> None:
    YAML().dump(params, Path("params.yaml"))


def test_it_writes_data_manifest_and_results(checkout: dict[str, Any]) -> None:
    write(checkout)
    prepare.run("tiny")
    data = PreparedData.open(Path("artifacts/prepare/tiny"))
    assert data.train.num_rows == 4
    assert data.manifest["tokenizer_sha256"] == tokenizer_sha256(load_tokenizer(Path("model")))
    assert data.manifest["vocab_size"] == 300
    corpus = checkout["prepare"]["corpora"][0]["uri"]
    assert data.manifest["sources"] == [{"uri": corpus, "sha256": corpus.split("=")[1]}]
    results = json.loads(Path("results/prepare/tiny.json").read_text())
    assert results["train"]["target_tokens"] == data.train.num_target_tokens
    assert results["documents"] == 40
    before = Path("artifacts/prepare/tiny/manifest.json").read_bytes()
    prepare.run("tiny")
    assert Path("artifacts/prepare/tiny/manifest.json").read_bytes() == before


def test_it_reads_the_sections_that_it_says(checkout: dict[str, Any]) -> None:
    params = Params(checkout)
    prepare.settings(params, "tiny")
    assert params.reads == ["prepare", "teachers.tiny.model"]


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("prepare", {"seq_len": 128}, "prepare.seq_len = 128 is more than the teacher reads: lower it to 64 or less"),
        ("prepare", {"train_rows": 99}, "prepare.train_rows asks for 99"),
        ("prepare", {"corpora": [{"uri": "file:none.txt", "format": "text"}]}, "none.txt does not exist"),
        ("prepare", {"seqlen": 3}, r"params.yaml: prepare: unknown key seqlen; did you mean seq_len\?"),
        ("teachers", {"tiny": {"model": 3}}, "params.yaml: teachers.tiny: model = 3 should be a valid string"),
        ("teachers", {"other": {"model": "x"}}, "params.yaml: teachers has no key tiny; known: other"),
    ],
)
def test_bad_input_is_one_sentence(
    checkout: dict[str, Any], section: str, change: dict[str, Any], message: str
) -> None:
    checkout[section] = checkout[section] | change if section == "prepare" else change
    write(checkout)
    with pytest.raises(UserError, match=message):
        prepare.run("tiny")
    assert not Path("artifacts").exists()
