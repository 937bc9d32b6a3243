"""Who may share rows, without any other process; that sharing changes nothing is tested in test_sharded.py."""

from typing import Any

import pytest
from tiny_run import CPU, make_student
from transformers import LlamaConfig, Phi3Config

from alambique.core.errors import UserError
from alambique.models.load import SplitModel
from alambique.train.context import Context, require_shareable
from alambique.train.sharded import Processes
from tests.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("size", "context", "seq_len", "rows_per_step", "message"),
    [
        (
            4,
            3,
            12,
            4,
            r"^ALAMBIQUE_CONTEXT_PROCESSES=3 must divide 4, the number of processes that train: correct it or",
        ),
        (1, 2, 12, 4, r"^ALAMBIQUE_CONTEXT_PROCESSES=2 must divide 1, the number of processes that train"),
        (
            4,
            4,
            10,
            4,
            r"^ALAMBIQUE_CONTEXT_PROCESSES=4 can't share rows of 10 tokens evenly: choose a divisor or another",
        ),
        (8, 2, 12, 3, r"^8 processes can't share the 3 rows of a step: raise distill.rows_per_step, lower ALAM"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    size: int, context: int, seq_len: int, rows_per_step: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        require_shareable(Processes(0, size, context), seq_len, rows_per_step)


def test_what_can_be_is_not() -> None:
    require_shareable(Processes(0, 8, 2), seq_len=12, rows_per_step=4)
    require_shareable(Processes(0, 8, 8), seq_len=16, rows_per_step=1)
    require_shareable(Processes(), seq_len=7, rows_per_step=1)


def flash() -> SplitModel:
    model = tiny_model(LlamaConfig)
    model.config._attn_implementation = "flash_attention_2"
    return SplitModel(model)


def stretched() -> SplitModel:
    rope: Any = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    return SplitModel(
        tiny_model(Phi3Config, rope_parameters=rope | {"original_max_position_embeddings": 32, "factor": 2.0})
    )


@pytest.mark.parametrize(
    ("make", "context", "message"),
    [
        (
            make_student,
            4,
            "can't share out the 4 heads and 2 key-value heads of a llama model evenly: choose a divisor",
        ),
        (lambda: SplitModel(tiny_model(LlamaConfig, attention="eager")), 2, "can't share out attention: eager: choose"),
        (flash, 2, "with attention: flash_attention_2 takes single rows: set distill.micro_batch_rows to 1"),
        (stretched, 2, "can't share out a phi3 model whose rotary embeddings change with the length of what it reads"),
    ],
)
def test_a_model_that_cannot_be_shared_out_is_refused(make: Any, context: int, message: str) -> None:
    with pytest.raises(UserError, match=f"^ALAMBIQUE_CONTEXT_PROCESSES={context} {message}"):
        Context(Processes(0, context, context), CPU).open([make()], micro_batch_rows=2)
