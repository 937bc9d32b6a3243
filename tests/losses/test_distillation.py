"""The door: what it refuses, what auto says, dtypes and autocast."""

import logging

import pytest
import torch

from alambique import LossConfig, TopKSignal, distillation_loss
from alambique.core.errors import UserError
from alambique.losses import parallel
from alambique.losses.distillation import PATHS, _announce
from alambique.losses.parallel import Shard
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


@pytest.mark.parametrize("impl", sorted(set(PATHS) - {"fused"}))
def test_the_gradient_filter_is_refused_where_it_is_not(impl: str) -> None:
    assert refused(impl=impl, config=LossConfig(gradient_filter=0.01)) == (
        f"loss: impl {impl} can't filter gradients: choose impl fused, or set gradient_filter: 0."
    )


@pytest.mark.parametrize("impl", sorted(set(PATHS) - {"fused", "recompute"}))
def test_a_spread_head_is_refused_where_it_can_not_be_used(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "shard_of", lambda group, rows: Shard(group, 0, 1))
    assert refused(impl=impl, vocab_group="a group") == (
        f"loss: impl {impl} can't use a head that vocab_group spreads: choose impl fused."
    )
    assert refused(dense_signal=True, vocab_group="a group") == (
        "loss: vocab_group can't be used with a dense signal: pass a top-K signal or a whole head."
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
        for config in (
            LossConfig(),
            LossConfig(),
            LossConfig(chunk_budget_mib=0.001),
            LossConfig(gradient_filter=0.01),
        ):
            distillation_loss(case.hidden, case.weight, case.signal, config=config)
        distillation_loss(case.hidden.half(), case.weight.half(), case.signal)
    assert caplog.messages == [
        "loss: auto chose fused for D 5, V 26, torch.float64, cpu: three matrix products, the gradient is formed in "
        "the forward pass; chunks of 7743232 tokens",
        "loss: auto chose tiled for D 5, V 26, torch.float64, cpu: chunk_budget_mib 0.001 holds only 10 tokens of "
        "logits; chunks of 10 tokens",
        "loss: auto chose fused for D 5, V 26, torch.float64, cpu: it alone has the gradient filter; chunks of 512 "
        "tokens",
        "loss: auto chose recompute for D 5, V 26, torch.float16, cpu: float16 gradients need the loss's scale before "
        "they are rounded; chunks of 7743232 tokens",
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


def test_float16_gradients_survive_when_the_loss_is_scaled() -> None:
    """A GradScaler's factor must be in before anything is rounded to 16 bits, or small gradients are lost as zeros."""
    case = make_case(n=64, v=200, k=20, spread=1.0)
    expected = None
    for dtype, scale in ((torch.float64, 1.0), (torch.float16, 2.0**16)):
        hidden = (case.hidden / 8).half().to(dtype).requires_grad_()
        weight = (case.weight / 8).half().to(dtype)
        out = distillation_loss(hidden, weight, case.signal, vocab_size=case.vocab, denominator=2.0**17)
        (out.loss * scale).backward()
        assert hidden.grad is not None
        found = hidden.grad.double() / scale
        expected = found if expected is None else expected
    assert (found - expected).norm() < 0.01 * expected.norm()


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
