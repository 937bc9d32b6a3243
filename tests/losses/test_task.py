"""What a call is reduced to: rows without weight, ids that are no columns, and what a GPU would be waited for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alambique import LossConfig, TopKSignal, distillation_loss
from alambique.core.signal import Signal, StatesSignal
from alambique.losses.distillation import PATHS
from tests.losses.problems import assert_same, grads, make_case


class Made(TorchFunctionMode):
    """Names tensors that are made of Python's numbers where meta tensors are."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and out.is_meta:
            self.names.append("tensor")
        return out


class Waits(TorchDispatchMode):
    """Names what a GPU is waited for: values that the host asks for, and what is copied there; meta stands for it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, tensors = func._opname, [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if name in ("nonzero", "_local_scalar_dense", "masked_select", "unique") and tensors[0].is_meta:
            self.names.append(name)
        if name == "nonzero":  # as if nothing were zero
            return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device="meta")
        out = func(*args, **(kwargs or {}))
        if name in ("where", "_to_copy", "copy_") and out.is_meta and not all(tensor.is_meta for tensor in tensors):
            self.names.append(name)
        return out


@contextmanager
def waits() -> Iterator[list[str]]:
    with Waits() as found, Made(found.names):
        yield found.names


def test_waits_are_seen() -> None:
    there = torch.zeros(3, device="meta")
    with waits() as names:
        there.nonzero()
        torch.tensor([1.0], device="meta")
        torch.where(there > 0, there, torch.zeros(()))
        torch.zeros(3).to("meta")
        there.copy_(torch.zeros(3))
    assert names == ["nonzero", "tensor", "where", "_to_copy", "copy_"]


CONFIGS = {
    "plain": LossConfig(),
    "everything": LossConfig(
        divergence="jsd", temperature=2.0, ce_weight=0.5, z_loss=0.01, logit_softcap=5.0, logit_scale=0.5
    ),
    "reverse": LossConfig(divergence="reverse_kl", temperature=2.0, weight_grad="compact"),
    "renormalise": LossConfig(tail="renormalise", temperature=0.5, divergence="tvd"),
    "label": LossConfig(tail="residual_to_label", temperature=2.0),
    "sampled": LossConfig(tail="sampled"),
}


@pytest.mark.parametrize("impl", sorted(set(PATHS) - {"dense"}))
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["top_k", "states"])
def test_no_path_waits_for_a_device(kind: str, name: str, impl: str) -> None:
    hidden = torch.empty(300, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    head = torch.empty(50, 8, device="meta", requires_grad=True)
    ids, logprobs = torch.empty(300, 4, device="meta", dtype=torch.int32), torch.empty(300, 4, device="meta")
    labels = torch.empty(300, device="meta", dtype=torch.int64)
    signal: Signal = TopKSignal(ids, logprobs, logprobs[:, 0])
    if kind == "states":
        if impl in ("tiled", "triton") or CONFIGS[name].tail != "bucket":
            pytest.skip("refused, or the same")
        signal = StatesSignal(hidden.detach(), head.detach(), logit_softcap=3.0)
    for drop_rows, expected in ((False, []), (True, ["nonzero"])):
        with waits() as names:
            out = distillation_loss(
                hidden,
                head,
                signal,
                labels_N=labels,
                denominator=1000,
                config=CONFIGS[name],
                impl=impl,
                drop_rows=drop_rows,
            )
            out.loss.backward()
        assert names == expected


@pytest.mark.parametrize("impl", sorted(PATHS))
@pytest.mark.parametrize("tail", ["bucket", "residual_to_label"])
def test_rows_that_stay_at_no_weight_count_nothing(impl: str, tail: str) -> None:
    case = make_case(n=8)
    case.labels[torch.tensor([0, 5])] = -100
    case.weights[3] = 0
    config = LossConfig(tail=tail, ce_weight=0.5, z_loss=0.01, temperature=2.0)
    assert_same(grads(case, config, impl, drop_rows=False), grads(case, config, impl))
    nothing = replace(case, labels=torch.full_like(case.labels, -100))
    out, gradients = grads(nothing, config, impl, drop_rows=False)
    assert out.loss == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients)


@pytest.mark.parametrize("drop_rows", [True, False])
def test_ids_outside_the_vocabulary_are_refused(drop_rows: bool) -> None:
    case = make_case()
    signal = case.signal
    assert isinstance(signal, TopKSignal)
    for wrong in (case.vocab, -1):
        labels = case.labels.clone()
        labels[2] = wrong
        with pytest.raises(ValueError, match=r"^labels_N has ids outside the vocabulary of 23$"):
            grads(replace(case, labels=labels), LossConfig(), "fused", drop_rows=drop_rows)
        ids = signal.ids_NK.clone()
        ids[4, 1] = wrong
        with pytest.raises(ValueError, match=r"^signal\.ids_NK has ids outside the vocabulary of 23$"):
            grads(replace(case, signal=replace(signal, ids_NK=ids)), LossConfig(), "fused", drop_rows=drop_rows)
    empty = replace(signal, ids_NK=signal.ids_NK.clone())
    empty.ids_NK[0, -1] = 10_000  # its log-probability is -inf: what it names means nothing
    assert_same(grads(replace(case, signal=empty), LossConfig(), "fused"), grads(case, LossConfig(), "fused"))
