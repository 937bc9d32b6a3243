"""The door: what it refuses, what auto says, dtypes and autocast."""

import logging

import pytest
import torch

from alambique import LossConfig, TopKSignal, distillation_loss
from alambique.core.errors import UserError
from alambique.losses.distillation import _announce
from tests.losses.problems import dense, make_case


def refused(
    *, impl: str = "fused", dense_signal: bool = False, config: LossConfig | None = None, **options: object
) -> str:
    case = dense(make_case()) if dense_signal else make_case()
    options.setdefault("vocab_size", case.vocab)
    with pytest.raises(UserError) as caught:
        distillation_loss(case.hidden, case.weight, case.signal, config=config or LossConfig(), impl=impl, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_refusals_name_the_option_and_the_remedy() -> None:
    assert refused(impl="fuse") == "loss: impl fuse does not exist; did you mean fused?"
    assert refused(impl="tiled", dense_signal=True) == (
        "loss: impl tiled can't use a dense signal: choose impl fused, or a top-K signal."
    )
    assert refused(impl="dense", weight_grad_VD=torch.zeros(26, 5)) == (
        "loss: impl dense can't fill weight_grad_VD: choose impl fused, or leave the buffer out."
    )
    assert refused(impl="recompute", config=LossConfig(gradient_filter=0.01)) == (
        "loss: impl recompute can't filter gradients: choose impl fused, or set gradient_filter: 0."
    )
    assert refused(config=LossConfig(ce_weight=1)) == (
        "loss: ce_weight > 0 needs labels: pass labels_N, or set ce_weight: 0."
    )
    assert refused(config=LossConfig(tail="residual_to_label")) == (
        "loss: tail: residual_to_label needs labels: pass labels_N, or choose tail: bucket."
    )
    assert refused(config=LossConfig(divergence="reverse_kl", tail="truncate")) == (
        "loss: divergence: reverse_kl is infinite with tail: truncate, which leaves the teacher no mass outside the "
        "kept entries: choose tail: bucket."
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(7, 4)}, r"hidden \(7, 4\) and head \(26, 5\) are not \[N, D\] and \[V, D\]"),
        ({"labels_N": torch.zeros(6)}, r"labels \(6,\) is not \[N\] with N = 7"),
        ({"weights_N": torch.zeros(7, 1)}, r"weights \(7, 1\) is not \[N\] with N = 7"),
        ({"signal": make_case(n=6).signal}, "the signal has 6 tokens, the hidden states 7"),
        ({"vocab_size": 27}, "vocab_size 27 is not within the head's 26 rows"),
        ({"weight_grad_VD": torch.zeros(5, 26)}, r"weight_grad \(5, 26\) is not of the head's shape"),
        ({"signal": dense(make_case(v=20)).signal}, "the dense signal has 20 columns, fewer than 26"),
        ({"signal": make_case(v=20).teacher}, "the teacher's head has 20 rows, fewer than 26"),
    ],
)
def test_shapes_that_do_not_fit(change: dict[str, object], message: str) -> None:
    case = make_case()
    arguments = {"hidden": case.hidden, "signal": case.signal, **change}
    with pytest.raises(ValueError, match=message):
        distillation_loss(arguments.pop("hidden"), case.weight, arguments.pop("signal"), **arguments)  # type: ignore[arg-type]


def test_auto_says_what_it_chose_and_why_once(caplog: pytest.LogCaptureFixture) -> None:
    _announce.cache_clear()
    case = make_case()
    with caplog.at_level(logging.INFO, logger="alambique"):
        for config in (LossConfig(), LossConfig(), LossConfig(chunk_budget_mib=0.001)):
            distillation_loss(case.hidden, case.weight, case.signal, config=config)
    assert caplog.messages == [
        "loss: auto chose fused for D 5, V 26, torch.float64, cpu: three matrix products, the gradient is formed in "
        "the forward pass; chunks of 7743232 tokens",
        "loss: auto chose tiled for D 5, V 26, torch.float64, cpu: chunk_budget_mib 0.001 holds only 10 tokens of "
        "logits; chunks of 10 tokens",
    ]


@pytest.mark.parametrize("impl", ["dense", "fused", "recompute", "tiled", "forward_chunked"])
@pytest.mark.parametrize(
    ("hidden", "head"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_gradients_come_in_their_inputs_dtypes(hidden: str, head: str, impl: str) -> None:
    case = make_case()
    h = case.hidden.to(getattr(torch, hidden)).requires_grad_()
    w = case.weight.to(getattr(torch, head)).requires_grad_()
    out = distillation_loss(h, w, case.signal, vocab_size=case.vocab, impl=impl)
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert h.grad.dtype == h.dtype
    assert w.grad.dtype == w.dtype


@pytest.mark.parametrize("impl", ["dense", "fused", "recompute", "tiled", "forward_chunked"])
def test_autocast_changes_nothing(impl: str) -> None:
    case = make_case().to(torch.float32)
    results = []
    for enabled in (False, True):
        hidden = case.hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = distillation_loss(hidden, case.weight, case.signal, vocab_size=case.vocab, impl=impl)
        out.loss.backward()
        results.append((out.loss.detach(), hidden.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_uncaptured_positions_teach_nothing_by_the_bucket() -> None:
    case = make_case()
    nothing = TopKSignal(torch.zeros(7, 2, dtype=torch.int32), torch.full((7, 2), -torch.inf), torch.ones(7))
    hidden = case.hidden.clone().requires_grad_()
    out = distillation_loss(hidden, case.weight, nothing)
    out.loss.backward()
    assert abs(out.loss.item()) < 1e-12
    assert hidden.grad.abs().max() < 1e-12
