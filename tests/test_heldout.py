import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, LlamaConfig

from alambique.core.errors import UserError
from alambique.data.dataset import PackedRows
from alambique.heldout import HeldoutConfig, heldout, shares
from alambique.models.load import SplitModel
from alambique.train.sharded import Processes
from tests.tiny_models import tiny_model

# R rows, S positions, N tokens, V vocabulary
CPU = torch.device("cpu")
V = 300


def model(config_class: Any = LlamaConfig, shift: float = 0.0, **settings: Any) -> SplitModel:
    made = tiny_model(config_class, **settings)
    if shift:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(shift * torch.randn(parameter.shape, generator=generator) * parameter.std())
    return SplitModel(made)


def packed(num_rows: int = 5, seq_len: int = 16) -> PackedRows:
    """Rows of two documents and some padding; the last token of a document has no target."""
    ids_RS = torch.randint(6, V, (num_rows, seq_len), dtype=torch.int32)
    documents_RS = torch.zeros(num_rows, seq_len, dtype=torch.int32)
    mask_RS = torch.ones(num_rows, seq_len, dtype=torch.bool)
    for row in range(num_rows):
        cut, end = 4 + row, seq_len - row
        documents_RS[row, cut:], documents_RS[row, end:] = 1, -1
        mask_RS[row, cut - 1], mask_RS[row, end - 1 :] = False, False
    return PackedRows(ids_RS, documents_RS, mask_RS)


def plain(teacher: SplitModel, student: SplitModel, rows: PackedRows) -> dict[str, float]:
    """The definitions, document by document and token by token, in float64."""
    kl, agree, nll = [], [], []
    for row in range(rows.num_rows):
        for document in (0, 1):
            where = (rows.document_ids_RS[row] == document).nonzero()[:, 0]
            ids = rows.input_ids_RS[row, where].long()
            with torch.no_grad():
                p_SV, q_SV = (
                    m.model(input_ids=ids[None]).logits[0, :, :V].double().log_softmax(-1) for m in (teacher, student)
                )
            for i in range(len(ids) - 1):
                kl.append(float((p_SV[i].exp() * (p_SV[i] - q_SV[i])).sum()))
                agree.append(float(p_SV[i].argmax() == q_SV[i].argmax()))
                nll.append(-float(q_SV[i, ids[i + 1]]))
    n = len(kl)
    return {"kl": sum(kl) / n, "agreement": sum(agree) / n, "perplexity": math.exp(sum(nll) / n), "n": n}


@pytest.mark.parametrize(
    ("config_class", "settings"),
    [(LlamaConfig, {}), (Gemma2Config, {"final_logit_softcapping": 3.0, "attention": "eager"})],
)
def test_figures_are_the_plain_definitions(config_class: Any, settings: dict[str, Any]) -> None:
    teacher, student = model(config_class, **settings), model(config_class, 0.3, **settings)
    rows = packed()
    found = heldout(teacher, {"before": student, "after": teacher}, rows, V, HeldoutConfig(), CPU)
    expected = plain(teacher, student, rows)
    assert found["num_tokens"] == expected["n"] == rows.num_target_tokens
    assert found["kl_nats"]["before"] == pytest.approx(expected["kl"], rel=1e-4)
    assert found["kl_nats"]["before"] > 0.01
    assert found["agreement"]["before"] == pytest.approx(expected["agreement"])
    assert 0 < found["agreement"]["before"] < 1
    assert found["perplexity"]["before"] == pytest.approx(expected["perplexity"], rel=1e-4)
    assert found["kl_nats"]["after"] == 0.0  # the teacher itself
    assert found["agreement"]["after"] == 1.0
    assert found["perplexity"]["after"] == found["perplexity"]["teacher"]
    json.dumps(found, allow_nan=False)


def test_portions_change_only_rounding() -> None:
    teacher, student, rows = model(), model(shift=0.3), packed()
    whole, parts = (
        heldout(teacher, {"before": student}, rows, V, HeldoutConfig(batch_rows=b, chunk_tokens=c), CPU)
        for b, c in ((5, 1000), (2, 3))
    )
    for name in ("kl_nats", "agreement", "perplexity", "calibration_error"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-4)
    assert parts["stderr"]["kl_nats"] == pytest.approx(whole["stderr"]["kl_nats"], rel=1e-4)


def test_padded_rows_of_a_head_get_no_probability() -> None:
    teacher, student, rows = model(), model(shift=0.3), packed()
    before = heldout(teacher, {"after": student}, rows, V, HeldoutConfig(), CPU)
    with torch.no_grad():
        for each in (teacher, student):
            each.head_weight_VD[V:] = 100.0
    assert heldout(teacher, {"after": student}, rows, V, HeldoutConfig(), CPU) == before


def test_the_standard_error_is_the_spread_of_repeated_draws() -> None:
    teacher, student = model(), model(shift=0.3)
    draws = [heldout(teacher, {"a": student}, packed(12), V, HeldoutConfig(batch_rows=12), CPU) for _ in range(60)]
    kl_T = torch.tensor([draw["kl_nats"]["a"] for draw in draws])
    told = sum(draw["stderr"]["kl_nats"]["a"] for draw in draws) / len(draws)
    assert told == pytest.approx(float(kl_T.std()), rel=0.3)  # the spread of 60 draws is itself known to 9 %


def test_one_row_has_no_standard_error() -> None:
    found = heldout(model(), {"a": model(shift=0.3)}, packed(), V, HeldoutConfig(rows=1), CPU)
    assert found["num_rows"] == 1
    assert found["stderr"]["kl_nats"] == {"a": None}


def test_calibration_error_is_confidence_against_correctness() -> None:
    teacher, rows = model(), packed()
    found = heldout(teacher, {}, rows, V, HeldoutConfig(), CPU)
    with torch.no_grad():
        hidden_RSD = teacher.hidden(rows.input_ids_RS.long(), rows.document_ids_RS)
        probability_RSV = teacher.logits(hidden_RSD)[..., :V].double().softmax(-1)
    confidence_N, top_N = (x[rows.loss_mask_RS] for x in probability_RSV.max(-1))
    correct_N = top_N == rows.input_ids_RS.roll(-1, 1)[rows.loss_mask_RS]
    error = 0.0
    for bin_ in range(15):
        inside_N = (confidence_N >= bin_ / 15) & (confidence_N < (bin_ + 1) / 15)
        error += float((confidence_N[inside_N] - correct_N[inside_N].double()).sum().abs())
    assert found["calibration_error"]["teacher"] == pytest.approx(error / rows.num_target_tokens, rel=1e-4)


class LargestVocabularyTensor(TorchDispatchMode):
    """The most rows of any tensor whose last dimension is the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim > 1 and result.shape[-1] in (V, 320):
            self.rows = max(self.rows, result.numel() // result.shape[-1])
        return result


def test_no_tensor_holds_tokens_times_vocabulary_beyond_a_chunk() -> None:
    teacher, student, rows = model(), model(shift=0.3), packed()
    with LargestVocabularyTensor() as seen:
        heldout(teacher, {"a": student}, rows, V, HeldoutConfig(chunk_tokens=7), CPU)
    assert 0 < seen.rows <= 32  # the head's transposed weight [D = 32, V]; chunks are smaller


def test_no_target_is_refused() -> None:
    rows = packed()
    empty = PackedRows(rows.input_ids_RS, rows.document_ids_RS, torch.zeros_like(rows.loss_mask_RS))
    with pytest.raises(UserError, match=r"^The valid split holds no target token: raise `prepare.valid_rows`\.$"):
        heldout(model(), {}, empty, V, HeldoutConfig(), CPU)


def test_a_head_smaller_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"^The output head has 320 rows, but the prepared data 400 token ids\.$"):
        heldout(model(), {}, packed(), 400, HeldoutConfig(), CPU)


@pytest.mark.parametrize(("count", "batch_rows", "size"), [(12, 5, 2), (7, 2, 4), (3, 4, 4), (8, 2, 1)])
def test_processes_share_the_batches_and_run_equally_many(count: int, batch_rows: int, size: int) -> None:
    taken = [shares(count, batch_rows, Processes(rank, size)) for rank in range(size)]
    assert len({len(batches) for batches in taken}) == 1
    rows = [row for batches in taken for batch, counts in batches if counts for row in range(batch.start, batch.stop)]
    assert sorted(rows) == list(range(count))
    assert all(batch.stop <= count for batches in taken for batch, _ in batches)
