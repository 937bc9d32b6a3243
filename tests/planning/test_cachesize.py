import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from transformers import LlamaConfig

from alambique.cache.config import CaptureConfig
from alambique.planning.cachesize import by_formula, predict

MODEL = LlamaConfig(vocab_size=49_152)


@pytest.fixture(scope="module")
def fake_teacher() -> ModuleType:
    path = Path(__file__).parents[1] / "cache" / "fake_teacher.py"
    spec = importlib.util.spec_from_file_location("planning_fake_teacher", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"shard_mib": 0.1}, {"codec": "quantized"}], ids=str)
def test_a_sample_tells_what_another_capture_will_take(
    fake_teacher: ModuleType, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Within 5 %: the fake teacher's words pack like no other's, so a formula could not."""
    rows = fake_teacher.make_rows(60)
    fake_teacher.run(tmp_path / "there", tmp_path / "store", rows=rows)
    config = CaptureConfig.model_validate({**fake_teacher.CONFIG.model_dump(), **changes})
    size = predict(MODEL, config, "float32", fake_teacher.SEQ_LEN, 60, tmp_path / "there")
    made = fake_teacher.run(tmp_path / "new", tmp_path / "other", rows=rows, **changes)
    assert size.source == "sample"
    assert size.bytes_per_token == pytest.approx(made.bytes_per_token, rel=0.05)


@pytest.mark.parametrize("changes", [{"top_k": 20}, {"keep": "sampled"}], ids=str)
def test_a_cache_that_holds_less_tells_nothing(
    fake_teacher: ModuleType, tmp_path: Path, changes: dict[str, object]
) -> None:
    fake_teacher.run(tmp_path / "there", tmp_path / "store")
    config = CaptureConfig.model_validate({**fake_teacher.CONFIG.model_dump(), **changes})
    assert predict(MODEL, config, "float32", 24, 60, tmp_path / "there").source == "formula"
    assert predict(MODEL, fake_teacher.CONFIG, "bfloat16", 24, 60, tmp_path / "there").source == "formula"


# docs/cache-format.md: 24,576 positions in one shard; of draws 3,919.
@pytest.mark.parametrize(
    ("settings", "vocab", "logits", "rows", "measured"),
    [
        ({}, 49_152, "bfloat16", 96, 198),
        ({}, 128_256, "bfloat16", 96, 202),
        ({}, 201_088, "bfloat16", 96, 205),
        ({}, 49_152, "float32", 96, 226),
        ({"codec": "quantized"}, 49_152, "bfloat16", 96, 195),
        ({"codec": "quantized"}, 128_256, "bfloat16", 96, 202),
        ({"codec": "quantized"}, 201_088, "bfloat16", 96, 206),
    ],
)
def test_the_formula_gives_what_was_measured(
    settings: dict[str, object], vocab: int, logits: str, rows: int, measured: float
) -> None:
    config = CaptureConfig.model_validate(settings)
    size = by_formula(LlamaConfig(vocab_size=vocab), config, logits, 256, rows)
    assert size.source == "formula"
    assert size.bytes_per_token == pytest.approx(measured, rel=0.05)


def test_hidden_states_are_counted(fake_teacher: ModuleType, tmp_path: Path) -> None:
    rows, model = (
        fake_teacher.make_rows(60),
        LlamaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=6, num_attention_heads=4),
    )
    fake_teacher.run(tmp_path / "there", tmp_path / "store", rows=rows)
    config = CaptureConfig.model_validate({**fake_teacher.CONFIG.model_dump(), "hidden_layers": (1, 4), "shard_mib": 1})
    size = predict(model, config, "float32", fake_teacher.SEQ_LEN, 60, tmp_path / "there")
    made = fake_teacher.run(tmp_path / "new", tmp_path / "other", rows=rows, hidden_layers=(1, 4), shard_mib=1)
    assert size.source == "sample"
    assert size.bytes_per_token == pytest.approx(made.bytes_per_token, rel=0.05)
    wide = CaptureConfig.model_validate({"hidden_layers": (1, 4)})
    assert by_formula(MODEL, wide, "float32", 256, 96).bytes_per_token == pytest.approx(226 + 2 * 2 * 4096, rel=0.05)


def test_a_cut_to_a_mass_is_bounded() -> None:
    config = CaptureConfig.model_validate({"codec": "top_p", "top_p": 0.9})
    size = by_formula(MODEL, config, "bfloat16", 256, 96)
    assert size.source == "at most"
    assert size.bytes_per_token > 108
