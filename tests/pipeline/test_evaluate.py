"""The evaluate stage on tiny models: each of its four commands, and what it reads of params.yaml."""

import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from ruamel.yaml import YAML
from transformers import LlamaConfig

from alambique.core.errors import UserError
from alambique.core.files import sha256_file, write_manifest
from alambique.core.params import Params
from alambique.core.sources import content_sha256
from alambique.data.dataset import PackedRows
from pipeline import evaluate
from tests.tiny_models import save_model, tiny_model, tiny_tokenizer

ROWS = [{"question": f"is {word} wet", "answer": True, "passage": word} for word in ("rain", "fire", "the sea")]


def params() -> dict[str, Any]:
    return {
        "evaluate": {
            "settings": {"dtype": "float32"},
            "heldout": {"batch_rows": 2},
            "benchmarks": {"boolq": {"limit": 2}},
        },
        "teachers": {"t": {"model": f"file:model#sha256={content_sha256(Path('model'))}", "capture": {}}},
        "pairs": {"p": {"teacher": "t", "student": {}, "distill": {}}},
    }


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models, prepared rows, and boolq with local data, as the stages before leave them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    model, tokenizer = tiny_model(LlamaConfig, max_position_embeddings=256), tiny_tokenizer()
    save_model(Path("model"), model, tokenizer)
    for kind in ("student", "distill"):
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(0.5)
        write_manifest(save_model(Path("artifacts") / kind / "p", model, tokenizer), {"created_by": "test"})
    ids = torch.randint(6, 300, (4, 12), dtype=torch.int32)
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[:, -1] = False
    rows = PackedRows(ids, torch.zeros_like(ids), mask)
    folder = Path("artifacts/prepare/t")
    splits = {}
    for split in ("train", "valid"):
        rows.save(folder / f"{split}.safetensors")
        splits[split] = {"rows": 4, "target_tokens": 44}
    write_manifest(folder, {"vocab_size": 300, "splits": splits})
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk("data/validation")
    spec = {
        "task": "boolq",
        "stock": "super_glue/boolq/default.yaml",
        "metric": "acc",
        "chance": 0.5,
        "data": f"file:data#sha256={content_sha256(Path('data'))}",
        "rename": {"answer": "label"},
        "override": {"training_split": None},
    }
    Path("evals/boolq").mkdir(parents=True)
    YAML().dump(spec, Path("evals/boolq/benchmark.yaml"))
    YAML().dump(params(), Path("params.yaml"))
    return tmp_path


@pytest.mark.parametrize(("kind", "key"), [("teacher", "t"), ("student", "p"), ("distill", "p")])
def test_one_model_on_one_benchmark(kind: str, key: str, checkout: Path) -> None:
    evaluate.run(kind, key, "boolq")
    found = json.loads(Path(f"results/evaluate/{kind}/{key}/boolq.json").read_text())
    assert found["n"] == 2
    assert found["metric"] == "acc"
    if kind == "teacher":
        assert found["model"]["uri"] == params()["teachers"]["t"]["model"]
    else:
        manifest = sha256_file(Path(f"artifacts/{kind}/p/manifest.json"))
        assert found["model"] == {"uri": f"artifacts/{kind}/p", "manifest_sha256": manifest}


def test_a_pair_on_held_out_text(checkout: Path) -> None:
    evaluate.run("heldout", "p")
    found = json.loads(Path("results/evaluate/heldout/p.json").read_text())
    assert found["num_tokens"] == 44
    assert set(found["perplexity"]) == {"teacher", "before", "after"}
    assert 0 < found["kl_nats"]["before"] < found["kl_nats"]["after"]  # the fixture halves the layer once, then twice
    assert all(math.isfinite(value) for value in found["perplexity"].values())
    assert set(found["models"]) == {"teacher", "before", "after"}


@pytest.mark.parametrize(
    ("words", "reads"),
    [
        (("teacher", "t", "boolq"), {"evaluate.settings", "evaluate.benchmarks.boolq", "teachers.t.model"}),
        (("student", "p", "boolq"), {"evaluate.settings", "evaluate.benchmarks.boolq"}),
        (("distill", "p", "boolq"), {"evaluate.settings", "evaluate.benchmarks.boolq"}),
        (
            ("heldout", "p"),
            {"evaluate.settings", "evaluate.heldout", "pairs.p.teacher", "teachers.t.model"},
        ),
    ],
)
def test_it_reads_only_what_decides_its_result(words: tuple[str, ...], reads: set[str], checkout: Path) -> None:
    given = Params(params())
    evaluate.settings(given, *words)
    assert set(given.reads) == reads


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("techer", "t", "boolq"), "evaluate what.*did you mean teacher"),
        (("teacher", "t", "bolq"), "evaluate.benchmarks has no key bolq; did you mean boolq"),
        (("student", "nobody", "boolq"), "artifacts/student/nobody/manifest.json does not exist. Run its stage first"),
    ],
)
def test_wrong_words_are_refused(words: tuple[str, ...], sentence: str, checkout: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        evaluate.run(*words)


@pytest.mark.parametrize(
    ("section", "value", "sentence"),
    [
        ("settings", {"dtyp": "float32"}, "unknown key dtyp; did you mean dtype"),
        ("settings", {"batch_tokens": 0}, "batch_tokens = 0 should be greater than or equal to 1"),
        ("benchmarks", {"boolq": {"limits": 3}}, "unknown key limits; did you mean limit"),
    ],
)
def test_wrong_settings_are_refused(section: str, value: Any, sentence: str, checkout: Path) -> None:
    tree = params()
    tree["evaluate"][section] = value
    with pytest.raises(UserError, match=sentence):
        evaluate.settings(Params(tree), "teacher", "t", "boolq")
