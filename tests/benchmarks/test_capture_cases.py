import torch

from benchmarks import capture_cases
from benchmarks.cases import Options


def test_summary_and_the_largest_tensor() -> None:
    """The softmax of all rows at once would be 4 · 31 · 300 fp32 numbers; a batch of two rows makes half of them."""
    outcome = capture_cases.run(Options(torch.device("cpu"), quick=True, repeats=1))
    assert set(outcome.summary) == {"ratio_to_forward", "ratio_with_draws", "peak_mib", "largest_tensor_mib"}
    assert 0 < outcome.summary["ratio_to_forward"] < 5
    assert outcome.summary["largest_tensor_mib"] == 2 * 31 * 300 * 4 / 2**20  # a row's last position has no target
