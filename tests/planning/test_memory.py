"""Counts against tensors that have values: the same code, the same bytes."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen2Config

from alambique.cache.config import CaptureConfig
from alambique.core.signal import TopKSignal
from alambique.losses.config import LossConfig
from alambique.models.load import SplitModel
from alambique.planning import memory
from alambique.planning.counting import CountedMemory
from alambique.planning.shapes import NotAtHand
from alambique.train.config import DistillConfig
from alambique.train.data import StepRows
from alambique.train.state import Run
from alambique.train.step import Setup, add_gradients
from tests.tiny_models import tiny_model

SEQ_LEN, TOP_K = 32, 16
SETTINGS: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
CONFIG = DistillConfig.model_validate({"precision": "fp32", "rows_per_step": 4, "micro_batch_rows": 2})
CAPTURE = CaptureConfig(dtype="float32", top_k=TOP_K, batch_tokens=64)


def train(config: Any, **changes: Any) -> memory.Count:
    settings = CONFIG.model_copy(update=changes)
    return memory.train(config, settings, SEQ_LEN, TOP_K, config, CAPTURE)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_count_at_depth_is_the_line_through_two(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(**SETTINGS)
    lines = [train(config, precision=precision), memory.capture(config, CAPTURE, SEQ_LEN)]
    monkeypatch.setattr(memory, "_MORE", 6)
    for line, whole in zip(
        lines, [train(config, precision=precision), memory.capture(config, CAPTURE, SEQ_LEN)], strict=True
    ):
        assert line.parameters == whole.parameters
        assert line.lasting_bytes == whole.lasting_bytes
        assert line.row_flops == pytest.approx(whole.row_flops)
        assert line.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)


def test_flops_are_those_that_training_counts() -> None:
    config = LlamaConfig(**{**SETTINGS, "num_hidden_layers": 3})
    student = SplitModel(tiny_model(LlamaConfig, num_hidden_layers=3))
    signal = TopKSignal(
        torch.arange(TOP_K).repeat(4, SEQ_LEN, 1),
        torch.full((4, SEQ_LEN, TOP_K), -4.0).half(),
        torch.full((4, SEQ_LEN), 0.5),
    )
    ids = torch.zeros(4, SEQ_LEN, dtype=torch.int64)
    run, setup = Run(2), Setup(student, None, CONFIG, LossConfig(), 320, torch.device("cpu"), lambda: False)
    documents = (torch.arange(SEQ_LEN) > 9).int().repeat(4, 1)
    with CountedMemory(list(student.model.parameters())) as real:
        add_gradients(setup, run, StepRows([0, 1, 2, 3], ids, documents, ids, signal, 4 * SEQ_LEN))
    counted = train(config)
    assert counted.row_flops == run.meters.flops_per_row
    assert counted.peak_bytes - 8 * counted.parameters == pytest.approx(real.peak_bytes, rel=0.02)


@pytest.mark.parametrize("method", ["fused", "online"])
def test_a_loss_of_many_chunks_is_counted_by_a_few(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(**SETTINGS)
    loss = LossConfig(chunk_budget_mib=4 * 320 * 4 * (8 if method == "online" else 1) / 2**20)  # 4 tokens
    few = train(config, method=method, loss=loss, impl="fused")
    monkeypatch.setattr(memory, "_CHUNKS", 1000)
    whole = train(config, method=method, loss=loss, impl="fused")
    assert few.row_flops == pytest.approx(whole.row_flops, rel=0.001)
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.03)


def test_checkpointing_and_smaller_batches_take_less() -> None:
    config = LlamaConfig(**SETTINGS)
    plain = train(config).peak_bytes
    assert train(config, gradient_checkpointing=True).peak_bytes < plain
    assert train(config, micro_batch_rows=1).peak_bytes < plain
    assert train(config, method="dense").peak_bytes > plain


def test_a_live_teacher_s_weights_and_work_are_added() -> None:
    config = LlamaConfig(**SETTINGS)
    alone, live = train(config), train(config, method="online")
    assert live.peak_bytes > alone.peak_bytes + 4 * alone.parameters
    assert live.row_flops > alone.row_flops


def test_another_architecture_is_counted() -> None:
    config = Qwen2Config(**SETTINGS)
    assert train(config).row_flops > 0
    count = memory.capture(config, CAPTURE, SEQ_LEN)
    assert count.peak_bytes > 4 * count.parameters
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert count.parameters == parameters


def test_what_can_not_be_counted_is_said() -> None:
    """Grouped products of experts have no shapes in float32."""
    config = GptOssConfig(**SETTINGS, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(NotAtHand, match="a gpt_oss model can't be counted on shapes alone"):
        train(config, attention="flex_attention")
