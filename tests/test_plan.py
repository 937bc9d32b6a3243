import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from transformers import LlamaConfig

from alambique.cli import main
from alambique.core.errors import UserError
from alambique.core.files import write_manifest
from alambique.core.params import Params
from alambique.plan import METHODS, plan, require_fit
from alambique.planning.machine import Machine
from alambique.planning.shapes import NotAtHand, shapes

ROOT = Path(__file__).resolve().parents[1]
PRESETS = sorted((ROOT / "presets").glob("*.yaml"))
HOST = Machine("a host", "cpu", 24_000, 1e12, "assumed", "bfloat16")
SMOLLM2 = LlamaConfig(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, dtype="float32",
)  # fmt: skip
LLAMA_8B = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131_072, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """params.yaml as it is, on a machine that has converted the embedded teacher: its configuration alone."""
    params = Params.load(ROOT / "params.yaml")
    uri = params.get("teachers.smollm2_135m.model")
    folder = tmp_path / "assets/models/SmolLM2-135M-Instruct.Q4_1-0123456789abcdef"
    folder.mkdir(parents=True)
    SMOLLM2.save_pretrained(folder)
    write_manifest(folder, {"source_sha256": uri.rpartition("=")[2]})
    monkeypatch.setenv("ALAMBIQUE_ASSETS", str(tmp_path / "assets"))
    monkeypatch.chdir(tmp_path)  # without artifacts
    return params


def real_params(folder: Path, config: LlamaConfig, **changes: Any) -> Params:
    """A preset with a model that is a folder on disk: its configuration alone."""
    config.save_pretrained(folder / "model")
    tree = YAML(typ="safe").load((ROOT / "presets/llama31_8b_pruned_3b.yaml").read_text())
    tree["teachers"]["llama31_8b"]["model"] = f"file:{folder}/model#sha256={'0' * 64}"
    tree["distill"] |= changes
    return Params(tree)


# Measured on two cores of an AMD EPYC with AMX, bf16 autocast, 144 rows x 256, eager attention (docs/plan.md).
EMBEDDED_CAPTURE_MIB, EMBEDDED_DISTILL_MIB = 1254, 4142
EMBEDDED_BYTES = {"bfloat16": 198.5, "float32": 226.6}


def test_memory_of_the_embedded_pair_is_what_was_measured(embedded: Params) -> None:
    found = plan(embedded, HOST)
    capture, pair = found.teachers["smollm2_135m"].capture, found.pairs["smollm2_24l"]
    assert capture is not None
    assert capture.peak_mib == pytest.approx(EMBEDDED_CAPTURE_MIB, rel=0.15)
    assert pair.methods["fused"].peak_mib == pytest.approx(EMBEDDED_DISTILL_MIB, rel=0.15)
    assert pair.parameters == 113_274_432


@pytest.mark.parametrize("dtype", EMBEDDED_BYTES)
def test_cache_of_the_embedded_pair_is_what_was_measured(embedded: Params, dtype: str) -> None:
    found = plan(embedded, HOST if dtype == "bfloat16" else Machine(**{**vars(HOST), "dtype": dtype}))
    assert found.teachers["smollm2_135m"].cache_from == "formula"
    assert found.teachers["smollm2_135m"].cache_bytes_per_token == pytest.approx(EMBEDDED_BYTES[dtype], rel=0.05)


def test_methods_come_in_the_order_of_their_memory(embedded: Params) -> None:
    found = plan(embedded, HOST).pairs["smollm2_24l"]
    assert tuple(found.methods) == METHODS
    peaks = {method: need.peak_mib for method, need in found.methods.items()}
    assert peaks["fused"] < peaks["forward_chunked"] < peaks["dense"]
    assert peaks["fused"] < peaks["online"]


def test_the_published_setting_is_in_the_published_order(tmp_path: Path) -> None:
    """Llama 3.1 8B to 3.2B at 8K on one H200: 58.3 GB fused, 61.8 forward-chunked, 78.3 dense, 102.8 online."""
    params = real_params(tmp_path, LLAMA_8B, micro_batch_rows=1)
    h200 = Machine("H200", "cuda", 143_771, 300e12, "assumed", "bfloat16")
    found = plan(params, h200).pairs["llama31_8b_20l"]
    assert found.parameters == pytest.approx(3.21e9, rel=0.01)
    assert all(need.fits for need in found.methods.values())
    assert found.longest_seq_len >= 8192
    assert found.advice is None


def test_what_does_not_fit_comes_with_what_would(embedded: Params) -> None:
    found = plan(embedded, Machine(**{**vars(HOST), "memory_mib": 3500}))
    advice = found.pairs["smollm2_24l"].advice
    assert advice is not None
    assert advice.startswith("distill@smollm2_24l needs about ")
    assert "and a host has 3.42 GiB: set micro_batch_rows: 1" in advice
    assert found.pairs["smollm2_24l"].largest_micro_batch_rows == 1


def test_what_can_not_fit_is_refused_before_anything_runs(embedded: Params) -> None:
    assert require_fit(embedded, HOST)
    with pytest.raises(UserError, match=r"distill@smollm2_24l needs about .* GiB, and a host has 2 GiB.*larger device"):
        require_fit(embedded, Machine(**{**vars(HOST), "memory_mib": 2048}))


def test_a_gpu_halves_its_batches_so_one_row_is_what_must_fit(tmp_path: Path) -> None:
    params = real_params(tmp_path, LLAMA_8B, micro_batch_rows=16)
    h100 = Machine("H100", "cuda", 81_559, 300e12, "assumed", "bfloat16")
    assert require_fit(params, h100)
    pair = plan(params, h100).pairs["llama31_8b_20l"]
    assert not pair.methods["fused"].fits
    assert 1 <= pair.largest_micro_batch_rows < 16


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_every_preset_says_which_configuration_is_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = plan(Params.load(path), HOST, download=False)
    for entry in (*found.teachers.values(), *found.pairs.values()):
        assert entry.problem is not None
        assert entry.problem.startswith("config.json of hf://")
        assert "hf download " in entry.problem
    assert not require_fit(Params.load(path), HOST)


def test_a_model_that_was_never_fetched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALAMBIQUE_ASSETS", str(tmp_path))
    uri = Params.load(ROOT / "params.yaml").get("teachers.smollm2_135m.model")
    with pytest.raises(NotAtHand, match="has not been fetched yet"):
        shapes(uri, download=False)


def test_the_command_prints_a_table_or_json(
    embedded: Params, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["plan", "--params", str(ROOT / "params.yaml"), "--gpu", "H100", "--memory-gib", "40"]
    assert main(words) == 0
    out = capsys.readouterr().out
    for text in (
        "on H100 with 40 GiB",
        "distill@smollm2_24l fused (chosen)",
        "largest micro_batch_rows 4 (set: 2)",
        "30% of 989.5",
    ):
        assert text in out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["memory_mib"] == 40 * 1024
    assert found["pairs"]["smollm2_24l"]["methods"]["fused"]["fits"] is True
    assert main(["plan", "--gpu", "H1000"]) == 2
    assert "did you mean H100?" in capsys.readouterr().err
