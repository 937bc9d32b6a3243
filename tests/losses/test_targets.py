"""The teacher's side: tail rules, empty and repeated slots, temperature."""

import math

import pytest
import torch

from alambique import TopKSignal
from alambique.losses.targets import TAIL_FLOOR, Kept, kept_entries, temper

P = torch.tensor([[0.5, 0.2, 0.1], [0.6, 0.3, 0.0]], dtype=torch.float64)
IDS = torch.tensor([[4, 1, 7], [2, 0, 0]], dtype=torch.int16)
SIGNAL = TopKSignal(IDS, P.log(), 1 - P.sum(-1))
LABELS = torch.tensor([1, 5])


def kept(tail: str, vocab: int = 10) -> Kept:
    return kept_entries(SIGNAL, LABELS, tail, vocab, torch.float64)  # type: ignore[arg-type]


def close(actual: torch.Tensor, expected: list[float] | list[list[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_bucket_keeps_the_tail() -> None:
    found = kept("bucket")
    close(found.log_p_CK.exp(), P.tolist())
    close(found.log_r_C.exp(), [0.2, 0.1])
    assert found.filled_CK.tolist() == [[True, True, True], [True, True, False]]


def test_renormalise_spreads_it() -> None:
    found = kept("renormalise")
    close(found.log_p_CK.exp(), [[0.625, 0.25, 0.125], [2 / 3, 1 / 3, 0.0]])
    close(found.log_r_C.exp(), [0.0, 0.0])


def test_truncate_drops_it_after_tempering() -> None:
    found = temper(kept("truncate"), "truncate", 1.0, None, floored=False)
    close(found.log_p_CK.exp(), P.tolist())
    close(found.log_r_C.exp(), [0.0, 0.0])


def test_residual_goes_to_the_label_kept_or_not() -> None:
    found = kept("residual_to_label")
    assert found.ids_CK.tolist() == [[4, 1, 7, 1], [2, 0, 0, 5]]
    close(found.log_p_CK.exp(), [[0.5, 0.4, 0.1, 0.0], [0.6, 0.3, 0.0, 0.1]])
    assert found.filled_CK.tolist() == [[True, True, True, False], [True, True, False, True]]
    close(found.log_r_C.exp(), [0.0, 0.0])


def test_repeated_draws_add_up() -> None:
    draws = TopKSignal(torch.tensor([[3, 8, 3, 3]]), torch.full((1, 4), 0.25).log().double(), torch.zeros(1))
    found = kept_entries(draws, None, "sampled", 10, torch.float64)
    assert found.ids_CK[found.filled_CK].tolist() == [3, 8]
    torch.testing.assert_close(found.log_p_CK[found.filled_CK].exp(), torch.tensor([0.75, 0.25], dtype=torch.float64))


def test_without_other_columns_there_is_no_tail() -> None:
    assert kept("bucket", vocab=3).log_r_C.tolist() == [-math.inf, pytest.approx(math.log(0.1))]


def test_a_negative_tail_is_rounding() -> None:
    signal = TopKSignal(IDS, P.log(), torch.tensor([-1e-8, 0.1]))
    assert kept_entries(signal, None, "bucket", 10, torch.float32).log_r_C[0] == -torch.inf


def test_tempering_is_normalised_and_the_floor_binds_the_target_only() -> None:
    found = temper(kept("bucket"), "bucket", 2.0, torch.tensor([0.5, 0.0], dtype=torch.float64), floored=False)
    torch.testing.assert_close(found.log_p_CK.exp().sum(-1) + found.log_r_C.exp(), torch.ones(2, dtype=torch.float64))
    ratio = found.log_p_CK[0, 0] - found.log_p_CK[0, 1]
    assert ratio.item() == pytest.approx(math.log(0.5 / 0.2) / 2)
    assert (found.log_r_C[0] - found.log_p_CK[0, 0]).item() == pytest.approx(math.log(0.2 / 0.5) / 2 + 0.5)
    floored = temper(kept("renormalise"), "renormalise", 1.0, None, floored=True)
    assert floored.log_r_C.exp().tolist() == pytest.approx([TAIL_FLOOR] * 2)


def test_an_uncaptured_position_stays_finite_or_empty() -> None:
    nothing = TopKSignal(torch.zeros(1, 2, dtype=torch.int32), torch.full((1, 2), -torch.inf), torch.ones(1))
    for tail in ("bucket", "renormalise", "truncate", "residual_to_label"):
        found = kept_entries(nothing, torch.tensor([3]), tail, 10, torch.float32)  # type: ignore[arg-type]
        found = temper(found, tail, 2.0, torch.zeros(1), floored=False)  # type: ignore[arg-type]
        assert not found.log_p_CK.isnan().any()
        assert not found.log_r_C.isnan().any()
