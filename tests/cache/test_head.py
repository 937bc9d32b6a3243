import pytest
import torch

from alambique.cache.head import Head, _largest_in_two_steps, top_entries, top_ids

D, V, PADDED = 16, 300, 320


def make(dtype: torch.dtype, bias: bool = False, softcap: float | None = None, scale: float = 1.0) -> Head:
    weight = torch.randn(PADDED, D).to(dtype)
    weight[V:] = 50.0  # padding that would win every place if it weren't cut
    return Head(weight[:V], torch.randn(PADDED).to(dtype)[:V] if bias else None, softcap, scale)


def reference(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """Full log-softmax in float64."""
    z = hidden.double() @ head.weight_VD.double().T
    if head.bias_V is not None:
        z = z + head.bias_V.double()
    z = z * head.scale
    return (z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)).log_softmax(-1)


@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"softcap": 3.0}, {"scale": 0.25}, {"bias": True, "softcap": 5.0, "scale": 2.0}]
)
@pytest.mark.parametrize("logits_mib", [0, 1, 64])
def test_against_float64(options: dict[str, float], logits_mib: int) -> None:
    head = make(torch.float32, **options)
    hidden = torch.randn(50, D)
    ids, logprobs, tail = top_entries(hidden, head, 20, logits_mib)
    expected, order = reference(hidden, head).topk(20)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), order)
    fp16_rounding = expected.abs() * 2**-11 + 1e-5  # plus that of an fp32 softmax
    assert ((logprobs.double() - expected).abs() <= fp16_rounding).all()
    torch.testing.assert_close(tail.double(), 1 - expected.exp().sum(-1), rtol=0, atol=3e-6)


def test_logprobs_are_the_fp32_ones_rounded_once() -> None:
    head = make(torch.float32)
    hidden = torch.randn(40, D)
    ids, logprobs, tail = top_entries(hidden, head, 10, 8)
    exact = (hidden @ head.weight_VD.T).log_softmax(-1).gather(1, ids.long())
    assert torch.equal(logprobs, exact.half())
    rounded = 1 - logprobs.double().exp().sum(-1)
    assert (tail.double() - (1 - exact.double().exp().sum(-1))).abs().max() < 1e-6 < (tail - rounded).abs().max()


def test_bf16_selects_and_normalises_the_models_own_logits() -> None:
    head = make(torch.bfloat16)
    hidden = torch.randn(40, D).bfloat16()
    ids, logprobs, tail = top_entries(hidden, head, 10, 8)
    full = (hidden @ head.weight_VD.T).float().log_softmax(-1)
    assert torch.equal(logprobs, full.topk(10).values.half())
    assert torch.equal(full.gather(1, ids.long()).half(), logprobs)
    torch.testing.assert_close(tail, 1 - full.topk(10).values.exp().sum(-1), rtol=0, atol=1e-6)


def test_chunks_change_nothing() -> None:
    head = make(torch.float32)
    hidden = torch.randn(333, D)
    whole = top_entries(hidden, head, 12, 1024)
    for part in (top_entries(hidden, head, 12, 0), top_entries(hidden, head, 12, 1)):
        assert torch.equal(whole[0], part[0])
        # A product of one row may round otherwise than one of many: at most to the next fp16 number.
        torch.testing.assert_close(whole[1], part[1], rtol=2**-10, atol=0)
        torch.testing.assert_close(whole[2], part[2], rtol=0, atol=2e-6)


def test_all_of_the_vocabulary_leaves_no_tail() -> None:
    _, logprobs, tail = top_entries(torch.randn(9, D), make(torch.float32), V, 8)
    assert logprobs.shape == (9, V)
    assert tail.min() >= 0
    assert tail.max() < 1e-5


def test_no_tokens_and_nan() -> None:
    head = make(torch.float32)
    ids, logprobs, tail = top_entries(torch.zeros(0, D), head, 5, 8)
    assert (ids.shape, logprobs.shape, tail.shape) == ((0, 5), (0, 5), (0,))
    hidden = torch.randn(3, D)
    hidden[1, 0] = float("nan")
    assert top_entries(hidden, head, 5, 8)[2].isnan().tolist() == [False, True, False]


def test_memory_of_a_chunk_stays_in_its_budget() -> None:
    head = Head(torch.zeros(128_256, 4, dtype=torch.bfloat16), None, None, 1.0)
    assert head.chunk_tokens(256) == 96 * 2**20 // (128_256 * 2)  # a CPU takes less than it may
    assert head.chunk_tokens(8) == 8 * 2**20 // (128_256 * 2)
    assert head.chunk_tokens(0) == 1


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    head = make(torch.float32)
    hidden = torch.randn(60, D)
    all_ids, all_logprobs, _ = top_entries(hidden, head, 40, 8)
    ids, logprobs, tail = top_entries(hidden, head, 40, 8, top_p=0.7)
    filled = logprobs.isfinite()
    counts = filled.sum(-1)
    assert counts.min() >= 1
    assert len(set(counts.tolist())) > 3
    assert torch.equal(ids[filled], all_ids[filled])
    assert torch.equal(logprobs[filled], all_logprobs[filled])
    assert (ids[~filled] == 0).all()
    mass = reference(hidden, head).topk(40).values.exp().cumsum(-1)
    for row, count in enumerate(counts.tolist()):
        assert mass[row, count - 1] >= 0.7 - 1e-5 or count == 40
        assert count == 1 or mass[row, count - 2] < 0.7 + 1e-5
        assert float(tail[row]) == pytest.approx(1 - float(mass[row, count - 1]), abs=3e-6)


def in_two_steps(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    head = Head(torch.empty(logits.shape[1], 1), None, None, 1.0)
    for use, dtype in {"piece": torch.float32, "maxima": torch.float32, "keys": torch.int32}.items():
        head.block(use, len(logits), dtype).fill_(-7 if dtype == torch.int32 else float("nan"))
    sums = torch.full((len(logits), 1), float("nan"))
    return *_largest_in_two_steps(logits, head, 12, sums), sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [12 * 64 * 4, 12 * 64 * 4 + 37, 40_003])
def test_two_step_selection_finds_the_same_logits(vocab: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(30, vocab) * 5).bfloat16().to(dtype)  # with ties
    logits[0, :] = -3.0  # all equal
    logits[1, -20:] = 90.0  # in the columns that fill no group
    logits[2, :40] = float("-inf")
    logits[3] -= 150.0  # exp of these is 0
    ids, top, sums = in_two_steps(logits)
    assert torch.equal(top_ids(logits, Head(torch.empty(vocab, 1), None, None, 1.0), 12), ids)
    logits = logits.float()
    assert all(len(set(row)) == 12 for row in ids.tolist())
    assert torch.equal(logits.gather(1, ids), top)
    assert torch.equal(top, logits.topk(12).values)
    expected = logits.double().logsumexp(1, keepdim=True)
    torch.testing.assert_close(sums.double().log() + top[:, :1].double(), expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_step_selection_keeps_nan(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 12 * 64 * 4).to(dtype)
    logits[0, 77] = float("nan")
    ids, _, sums = in_two_steps(logits)
    if dtype == torch.float32:  # among integers it may be first or last, by its sign
        assert ids[0, 0] == 77
    assert sums.isnan().flatten().tolist() == [True, False]
