"""Selecting, folding and moving signals."""

import torch

from alambique import DenseSignal, TopKSignal
from alambique.core.signal import StatesSignal


def top_k() -> TopKSignal:
    return TopKSignal(torch.arange(12).view(2, 3, 2), -torch.arange(12.0).view(2, 3, 2), torch.arange(6.0).view(2, 3))


def test_flatten_folds_rows_and_positions() -> None:
    flat = top_k().flatten()
    assert (flat.ids_NK.shape, flat.logprobs_NK.shape, flat.tail_mass_N.shape) == ((6, 2), (6, 2), (6,))
    assert flat.ids_NK[4].tolist() == [8, 9]
    assert flat.tail_mass_N[4] == 4
    assert DenseSignal(torch.zeros(2, 3, 5)).flatten().logprobs_NV.shape == (6, 5)


def test_selection_keeps_the_parts_together() -> None:
    chosen = top_k().flatten()[torch.tensor([5, 0])]
    assert chosen.ids_NK.tolist() == [[10, 11], [0, 1]]
    assert chosen.logprobs_NK.tolist() == [[-10.0, -11.0], [0.0, -1.0]]
    assert chosen.tail_mass_N.tolist() == [5, 0]
    assert chosen.num_tokens == 2
    assert DenseSignal(torch.eye(4))[1:3].logprobs_NV.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    live = StatesSignal(torch.arange(6.0).view(3, 2), torch.ones(5, 2), logit_softcap=30.0)
    assert live[torch.tensor([2])].hidden_ND.tolist() == [[4, 5]]
    assert (live[:2].num_tokens, live[:2].logit_softcap) == (2, 30.0)


def test_moving_moves_all_parts() -> None:
    moved = top_k().to("meta")
    assert {moved.ids_NK.device.type, moved.logprobs_NK.device.type, moved.tail_mass_N.device.type} == {"meta"}
