"""What stays alive between the passes, and how large a chunk is."""

import gc

import pytest
import torch

from alambique import LossConfig, distillation_loss
from alambique.losses.chunked import chunk_tokens
from tests.losses.problems import top_k

N, D, V, K = 256, 16, 3000, 8


def living_bytes() -> int:
    """Memory of all tensors that Python holds, saved ones in autograd's contexts included."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes() for thing in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    ("impl", "allowed"),
    [
        ("fused", 2 * N * D + 2 * V * D),  # dH and dW in the inputs' dtype
        ("recompute", 0),
        ("tiled", 4 * N * (K + 2)),  # kept logits, and a logsumexp in two parts
        ("forward_chunked", 4 * N * V),
    ],
)
def test_retained_bytes(impl: str, allowed: int) -> None:
    hidden = torch.randn(N, D).bfloat16().requires_grad_()
    head = torch.randn(V, D).bfloat16().requires_grad_()
    signal = top_k(torch.log_softmax(torch.randn(N, V), -1), K)
    before = living_bytes()
    out = distillation_loss(hidden, head, signal, config=LossConfig(chunk_budget_mib=0.5), impl=impl)
    grown = living_bytes() - before
    assert grown <= allowed + 4 * N + 200  # and the rows' scales, and scalars
    assert grown >= allowed
    out.loss.backward()
    assert hidden.grad is not None


def test_a_chunk_follows_from_the_budget_and_the_vocabulary() -> None:
    assert chunk_tokens(LossConfig(), 128_256) == 1536
    assert chunk_tokens(LossConfig(), 49_152) == 4096
    assert chunk_tokens(LossConfig(temperature=2.0), 128_256) == 768  # logits at both temperatures
    assert chunk_tokens(LossConfig(temperature=2.0, logit_softcap=30.0), 128_256) == 512
    assert chunk_tokens(LossConfig(chunk_budget_mib=1), 128_256) == 2
    assert chunk_tokens(LossConfig(chunk_budget_mib=0.1), 128_256) == 1
