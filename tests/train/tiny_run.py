"""A training run small enough for tests: a two-layer Llama, random rows, and a teacher that says random things."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from alambique.core.progress import PROGRESS_FILE
from alambique.core.signal import TopKSignal
from alambique.data.dataset import PackedRows
from alambique.models.load import SplitModel
from alambique.train.config import DistillConfig
from alambique.train.data import rows_of_step
from alambique.train.loop import distill
from alambique.train.sharded import ALONE
from alambique.train.state import DistillResult

VOCAB, PADDED_VOCAB, NUM_ROWS, SEQ_LEN, TOP_K = 90, 96, 12, 16, 8
CPU = torch.device("cpu")
PROCESSES = ALONE  # those that ``train`` trains with


def make_student(tied: bool = True, seed: int = 1, **changes: Any) -> SplitModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{"vocab_size": PADDED_VOCAB, **changes}, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return SplitModel(LlamaForCausalLM(config))


def make_rows(num_rows: int = NUM_ROWS, seq_len: int = SEQ_LEN) -> PackedRows:
    """Two documents in each row, the second cut off by padding; lengths differ between rows."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB, (num_rows, seq_len), generator=generator, dtype=torch.int32)
    documents = torch.zeros((num_rows, seq_len), dtype=torch.int32)
    for row in range(num_rows):
        documents[row, 3 + row % 5 :] = 1
        documents[row, seq_len - row % 4 :] = -1 if row % 4 else 1
    mask = torch.zeros_like(documents, dtype=torch.bool)
    mask[:, :-1] = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    return PackedRows(ids, documents, mask)


class RandomTeacher:
    """Reads like a TeacherCache; the signal of a row depends on nothing but its number."""

    def __init__(self, rows: PackedRows, confidence: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(3)
        logits = confidence * torch.randn((rows.num_rows, rows.seq_len, VOCAB), generator=generator)
        logprobs, ids = logits.log_softmax(-1).topk(TOP_K)
        self.signal = TopKSignal(ids, logprobs, 1 - logprobs.exp().sum(-1))

    def read(self, rows: list[int]) -> TopKSignal:
        return self.signal[torch.tensor(rows)]


def make_live_teacher() -> SplitModel:
    """A model of its own, in bf16 and with more padded rows than the student."""
    teacher = make_student(tied=False, seed=4, vocab_size=PADDED_VOCAB + 4)
    teacher.model.eval().requires_grad_(False).to(torch.bfloat16)
    return teacher


def make_config(**changes: Any) -> DistillConfig:
    settings = {
        "rows_per_step": 4, "micro_batch_rows": 2, "epochs": 2, "learning_rate": 1e-2, "checkpoint_every_steps": 1,
        "precision": "bf16",
    }  # fmt: skip
    return DistillConfig.model_validate({**settings, **changes})


def step_rows(step: int) -> list[int]:
    """Row numbers of a step, counted from 0, of the run that ``train`` makes by default."""
    return rows_of_step(step, make_config().rows_per_step, NUM_ROWS, seed=0)


def train(scratch: Path, student: SplitModel | None = None, **changes: Any) -> tuple[SplitModel, DistillResult]:
    student, rows = student or make_student(), changes.pop("rows", None) or make_rows()
    hooks = {"stop": changes.pop("stop", lambda: False), "validate": changes.pop("validate", None)}
    teacher: Any = make_live_teacher() if changes.get("method") == "online" else RandomTeacher(rows)
    result = distill(
        student, rows, teacher, make_config(**changes), vocab_size=VOCAB, scratch=scratch, device=CPU,
        processes=PROCESSES, **hooks,
    )  # fmt: skip
    return student, result


def train_and_save(scratch: Path, out: Path, progress: Path) -> None:
    """A longer run, 60 steps with a checkpoint after each and random numbers (dropout), for a process of its own."""
    os.environ[PROGRESS_FILE] = str(progress)
    student, result = train(scratch, make_student(attention_dropout=0.1), epochs=20)
    student.model.save_pretrained(out)
    (out / "curve.json").write_text(json.dumps([asdict(point) for point in result.curve]))
