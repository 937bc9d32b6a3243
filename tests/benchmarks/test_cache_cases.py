import torch

from alambique.cache.codec import codec_names
from benchmarks import cache_cases
from benchmarks.cases import Options
from benchmarks.teacher_data import widen

QUICK = Options(torch.device("cpu"), quick=True, repeats=1)


def test_every_codec_is_measured_and_exact_is_summarised() -> None:
    outcome = cache_cases.run(QUICK)
    assert [row["codec"] for row in outcome.rows] == codec_names()
    assert all(row["exact"] for row in outcome.rows if row["lossless"])
    assert [row["codec"] for row in outcome.rows if not row["lossless"]] == ["quantized"]
    assert set(outcome.summary) == {"bytes_per_token", "decode_tokens_per_s", "encode_tokens_per_s", "exact"}
    assert outcome.summary["bytes_per_token"]["300"] == outcome.rows[0]["bytes_per_token"]
    assert 50 < outcome.rows[0]["bytes_per_token"] < 604  # raw: 100 ids and logprobs, and the tail


def test_only_keeps_what_it_names() -> None:
    outcome = cache_cases.run(Options(torch.device("cpu"), quick=True, repeats=1, only=("top_p",)))
    assert [row["codec"] for row in outcome.rows] == ["top_p"]


def test_a_widened_head_keeps_the_rows_it_had() -> None:
    weight = torch.randn(20, 4)
    wide = widen(weight, 50)
    assert wide.shape == (50, 4)
    assert {tuple(row) for row in weight.tolist()} < {tuple(row) for row in wide.tolist()}
