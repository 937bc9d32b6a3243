"""Draws: unbiased, alike on every run, merged and sorted, and never mixed with a top K."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from alambique import LossConfig, TopKSignal, distillation_loss
from alambique.cache.config import CaptureConfig
from alambique.cache.head import Head
from alambique.cache.reader import TeacherCache
from alambique.cache.sampled import MAX_DRAWS, Sampling, draw, merge, sampled_entries
from alambique.core.errors import UserError
from alambique.core.params import validate

D, V = 16, 300
SAMPLED = {"keep": "sampled", "draws": 12, "seed": 3}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make_head(vocab_size: int = V, softcap: float | None = None, scale: float = 1.0) -> Head:
    weight = torch.randn(vocab_size + 20, D)
    weight[vocab_size:] = 50.0  # padding that would take every draw if it weren't cut
    return Head(weight[:vocab_size], None, softcap, scale)


def uniforms(num: int, draws: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(Sampling(draws=draws, seed=seed).uniforms("ab" * 32, num))


def entries(
    hidden_ND: torch.Tensor, head: Head, draws: int, seed: int = 0, logits_mib: int = 8, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sampling = Sampling(draws=draws, seed=seed, top_k=top_k)
    return sampled_entries(hidden_ND, head, uniforms(len(hidden_ND), draws, seed), sampling, logits_mib)


def weights_of(ids_NK: torch.Tensor, log_weights_NK: torch.Tensor, vocab_size: int = V) -> torch.Tensor:
    weights_NV = torch.zeros(len(ids_NK), vocab_size, dtype=torch.float64)
    return weights_NV.scatter_add_(1, ids_NK.long(), log_weights_NK.double().exp())


# ---- the draws themselves


@pytest.mark.parametrize(("vocab_size", "draws"), [(300, 4), (300, 7), (64 * 9, 3), (5, 1), (3, 50), (1, 2)])
def test_a_draw_is_where_its_number_falls_in_the_cumulated_probabilities(vocab_size: int, draws: int) -> None:
    probabilities = torch.softmax(4 * torch.randn(200, vocab_size), -1)
    probabilities[:, ::3] = 0.0 if vocab_size > 3 else probabilities[:, ::3]
    numbers = uniforms(200, draws)
    cumulated = probabilities.double().cumsum(1)
    plain = torch.searchsorted(cumulated, numbers * cumulated[:, -1:], right=True)
    assert torch.equal(draw(probabilities, numbers), plain)


def test_extreme_numbers_draw_only_what_has_mass() -> None:
    probabilities = torch.zeros(2, 200)
    probabilities[:, [70, 131]] = torch.tensor([0.3, 1e-30])
    probabilities[1, 131] = 0.7
    ids = draw(probabilities, torch.tensor([[0.0, 1 - 2.0**-53]], dtype=torch.float64).expand(2, 2).contiguous())
    assert ids.tolist() == [[70, 70], [70, 131]]


def test_each_rare_token_keeps_its_own_share() -> None:
    """Of 1e-8 each: cumulated in float32, whose steps near 1 are 6e-8, most of them could never be drawn."""
    probabilities = torch.full((1, 100_000), 1e-8)
    probabilities[0, 0] = 1 - 1e-3
    edges = probabilities.double().cumsum(1)
    wanted = torch.arange(1, 100_000, 997)
    numbers = (edges[:, wanted] - 0.5e-8) / edges[:, -1:]
    assert torch.equal(draw(probabilities, numbers)[0], wanted)


def test_merging_sorts_by_count_then_id() -> None:
    ids, counts = merge(torch.tensor([[7, 2, 7, 9, 2, 1], [4, 4, 4, 4, 4, 4]]))
    assert ids.tolist() == [[2, 7, 1, 9, 0, 0], [4, 0, 0, 0, 0, 0]]
    assert counts.tolist() == [[2, 2, 1, 1, 0, 0], [6, 0, 0, 0, 0, 0]]


# ---- entries


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"scale": 0.25}, {"softcap": 2.0, "scale": 3.0}])
def test_weights_are_unbiased_for_the_whole_distribution(options: dict[str, float]) -> None:
    head, draws, num = make_head(**options), 20, 4000
    hidden = torch.randn(1, D).expand(num, D)
    z = (hidden[:1].double() @ head.weight_VD.double().T) * head.scale
    p = (z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)).softmax(-1)[0]
    ids, log_weights, tail = entries(hidden, head, draws)
    assert (tail == 0).all()
    mean = weights_of(ids, log_weights).mean(0)
    # Of num · draws draws: six standard deviations by Bernstein's inequality, and the rounding of the weights.
    bound = 6 * (p * (1 - p) / (num * draws)).sqrt() + 12 / (num * draws) + 1e-3 * p
    assert ((mean - p).abs() < bound).all()
    top = torch.zeros_like(p).index_copy(0, p.topk(draws).indices, p.topk(draws).values)
    assert ((top / top.sum() - p).abs() > bound).any()  # as many entries of the top would have been off by more


def test_ids_differ_and_weights_fall_and_sum_to_one() -> None:
    ids, log_weights, tail = entries(torch.randn(300, D), make_head(), 50)
    assert (ids.dtype, log_weights.dtype, tail.dtype) == (torch.int32, torch.float16, torch.float32)
    filled = log_weights.isfinite()
    assert (filled[:, :-1] >= filled[:, 1:]).all()
    assert (log_weights[:, :-1] >= log_weights[:, 1:]).all()
    assert (ids[~filled] == 0).all()
    assert ((log_weights.double().exp().sum(1) - 1).abs() < 1e-3).all()
    for row, count in enumerate(filled.sum(1).tolist()):
        assert len(set(ids[row, :count].tolist())) == count
    counts = (log_weights.double().exp() * 50).round()
    assert (counts.sum(1) == 50).all()


@pytest.mark.parametrize(("draws", "off"), [(1, 0.0), (12, 5.4e-4), (50, 9.2e-4), (100, 9.2e-4), (MAX_DRAWS, 2e-3)])
def test_rounded_weights_still_tell_the_count(draws: int, off: float) -> None:
    counts = torch.arange(1, draws + 1, dtype=torch.float64)
    stored = Sampling(draws=draws, seed=0).log_weights()[1:].double().exp() * draws
    assert torch.equal(stored.round(), counts)
    assert float((stored / counts - 1).abs().max()) <= off


def test_one_draw_and_as_many_slots_as_tokens() -> None:
    ids, log_weights, _ = entries(torch.randn(40, D), make_head(), 1)
    assert ids.shape == (40, 1)
    assert (log_weights == 0).all()
    ids, log_weights, _ = entries(torch.randn(40, D), make_head(7), 500)
    assert ids.shape == (40, 7)
    assert ((log_weights.double().exp().sum(1) - 1).abs() < 2e-3).all()


def test_chunks_change_nothing_and_no_tokens_and_nan() -> None:
    head, hidden = make_head(), torch.randn(333, D)
    whole = entries(hidden, head, 12, logits_mib=1024)
    part = entries(hidden, head, 12, logits_mib=0)
    assert (whole[0] == part[0]).double().mean() > 0.999  # a product of one row may round otherwise than one of many
    ids, log_weights, tail = entries(hidden[:0], head, 12)
    assert (ids.shape, log_weights.shape, tail.shape) == ((0, 12), (0, 12), (0,))
    hidden[1, 0] = float("nan")
    assert entries(hidden[:3], head, 12)[2].isnan().tolist() == [False, True, False]


def test_the_numbers_depend_on_row_and_seed_alone() -> None:
    sampling = Sampling(draws=3, seed=5)
    numbers = sampling.uniforms("0" * 64, 4)
    assert numbers.shape == (4, 3)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.array_equal(numbers, sampling.uniforms("0" * 64, 4))
    # What is written here must never change: caches of equal settings would differ.
    assert numbers[0].tolist() == [0.8610413168117355, 0.8060307855479422, 0.4516969741224013]
    for other in (sampling.uniforms("1" * 64, 4), Sampling(draws=3, seed=6).uniforms("0" * 64, 4)):
        assert not (other == numbers).any()


@pytest.mark.parametrize("top_k", [0, 9])
def test_gradients_approach_those_of_the_whole_distribution(top_k: int) -> None:
    num, draws, seeds = 3, 20, 300
    head = make_head(40)
    teacher_hidden, student = torch.randn(num, D), torch.randn(40, D, dtype=torch.float64) / 4
    p = (teacher_hidden.double() @ head.weight_VD.double().T).softmax(-1)
    hidden = torch.randn(num, D, dtype=torch.float64).requires_grad_()
    q = (hidden @ student.T).softmax(-1)
    exact = (q - p) @ student / num  # the gradient of the mean KL
    found = torch.zeros_like(exact)
    for seed in range(seeds):
        ids, log_weights, tail = entries(teacher_hidden, head, draws, seed, top_k=top_k)
        out = distillation_loss(
            hidden, student, TopKSignal(ids, log_weights, tail), config=LossConfig(tail="sampled"), impl="dense"
        )
        found += torch.autograd.grad(out.loss, hidden)[0] / seeds
    # Var of Σ_v (w_v - p_v)·s_v / N over draws, which are of the rest r: its mass² times the covariance of one draw, by
    # their number.
    rest = p.scatter(1, p.topk(top_k).indices, 0.0)
    mass = rest.sum(1, keepdim=True)
    second = torch.einsum("nv,vd->nd", rest / mass, student**2) - (rest / mass @ student) ** 2
    deviation = mass * (second / (draws * seeds)).sqrt() / num
    assert ((found - exact).abs() < 5 * deviation + 1e-3 * exact.abs().max()).all()
    assert (found - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize(("vocab_size", "top_k"), [(V, 20), (64 * 16 * 4, 5), (40, 39)])
def test_the_top_k_are_exact_and_draws_are_of_the_rest(vocab_size: int, top_k: int) -> None:
    head, hidden = make_head(vocab_size), torch.randn(60, D)
    ids, log_weights, _ = entries(hidden, head, 6, top_k=top_k)
    expected = (hidden.double() @ head.weight_VD.double().T).log_softmax(1)
    weights = weights_of(ids, log_weights, vocab_size)
    top = expected.topk(top_k)
    in_float16 = 1e-5 + 2**-11 * expected.min().abs()  # what rounding does to the logs
    assert ((weights.gather(1, top.indices).log() - top.values).abs() <= in_float16).all()
    rest = expected.exp().scatter(1, top.indices, 0.0).sum(1)
    drawn = weights.scatter(1, top.indices, 0.0)
    assert ((drawn.sum(1) / rest).log().abs() <= 2 * in_float16).all()
    counts = drawn / rest[:, None] * 6
    assert ((counts - counts.round()).abs() < 0.1).all()
    assert (log_weights.diff(dim=1)[log_weights[:, 1:] > -torch.inf] <= 0).all()
    assert (ids[log_weights == -torch.inf] == 0).all()


def test_no_rest_means_no_draws() -> None:
    ids, log_weights, _ = entries(torch.randn(9, D), make_head(30), 4, top_k=30)
    assert ids.shape == (9, 30)
    assert (log_weights > -torch.inf).all()
    assert (ids.sort(1).values == torch.arange(30)).all()


# ---- the capture


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory, fake_teacher: ModuleType) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    fake_teacher.run(folder / "out", folder / "store", **SAMPLED)
    return folder / "out"


def test_a_cache_of_draws(drawn: Path, fake_teacher: ModuleType) -> None:
    cache = TeacherCache.open(drawn)
    cache.verify()
    assert cache.sampled
    assert cache.kept == "12 draws (seed 3)"
    assert cache.manifest["sampling"] == {"draws": 12, "seed": 3, "top_k": 0}
    assert cache.manifest["tail_mass"]["mean"] == 0
    assert cache.top_k == 12
    rows = fake_teacher.make_rows()
    mask, signal = rows.loss_mask_RS, cache.read(range(14))
    teacher = fake_teacher.FakeTeacher()
    head = Head(teacher.head_weight_VD[:300], None, None, 1.0)
    hidden = teacher.hidden(rows.input_ids_RS, rows.document_ids_RS)
    sampling = Sampling(draws=12, seed=3)
    for row, row_hash in enumerate(rows.row_hashes()):
        numbers = torch.from_numpy(sampling.uniforms(row_hash, 24))[mask[row]]
        ids, log_weights, _ = sampled_entries(hidden[row][mask[row]], head, numbers, sampling, 8)
        assert torch.equal(signal.ids_NK[row][mask[row]], ids)
        assert torch.equal(signal.logprobs_NK[row][mask[row]], log_weights)
        assert (signal.tail_mass_N[row][mask[row]] == 0).all()


@pytest.mark.parametrize("batch_tokens", [1, 72, 10_000])
def test_bytes_do_not_depend_on_the_batch_size(
    drawn: Path, tmp_path: Path, fake_teacher: ModuleType, batch_tokens: int
) -> None:
    fake_teacher.run(tmp_path / "out", tmp_path / "store", batch_tokens=batch_tokens, **SAMPLED)
    assert content(tmp_path / "out") == content(drawn)


def test_a_killed_capture_ends_with_the_same_bytes(drawn: Path, tmp_path: Path, fake_teacher: ModuleType) -> None:
    out, store = tmp_path / "out", tmp_path / "store"
    code = f"import sys; sys.path.insert(0, {str(Path(fake_teacher.__file__).parent)!r}); {KILLED}"
    child = subprocess.run([sys.executable, "-c", code, out, store, json.dumps(SAMPLED)], capture_output=True)
    assert child.returncode == -9, child.stderr
    assert not out.exists()
    result = fake_teacher.run(out, store, **SAMPLED)
    assert 1 <= result.reused_blocks < result.num_blocks
    assert content(out) == content(drawn)


KILLED = """
import json, os, pathlib, fake_teacher
teacher = fake_teacher.FakeTeacher()
real = teacher.hidden
def hidden(*batch):
    if len(teacher.rows_seen) >= 4 and list(pathlib.Path(sys.argv[2]).glob("*.json")):
        os.kill(os.getpid(), 9)
    return real(*batch)
teacher.hidden = hidden
fake_teacher.run(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), teacher=teacher, **json.loads(sys.argv[3]))
"""


@pytest.mark.parametrize("settings", [{"codec": "top_p"}, {"codec": "exact", "shard_mib": 1}])
def test_another_codec_or_block_needs_no_teacher(
    drawn: Path, tmp_path: Path, fake_teacher: ModuleType, settings: dict[str, object]
) -> None:
    fake_teacher.run(tmp_path / "first", tmp_path / "store", **SAMPLED)
    teacher = fake_teacher.FakeTeacher()
    fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=teacher, **SAMPLED, **settings)
    assert teacher.rows_seen == []
    ours, theirs = TeacherCache.open(tmp_path / "out").read(range(14)), TeacherCache.open(drawn).read(range(14))
    assert torch.equal(ours.ids_NK, theirs.ids_NK)
    assert torch.equal(ours.logprobs_NK, theirs.logprobs_NK)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"top_k": 12}, SAMPLED, "the store holds top 12, not 12 draws (seed 3)"),
        (SAMPLED, {"top_k": 12}, "the store holds 12 draws (seed 3), not top 12"),
        (SAMPLED, {"top_k": 5}, "the store holds 12 draws (seed 3), not top 5"),
        (SAMPLED, {**SAMPLED, "draws": 6}, "the store holds 12 draws (seed 3), not 6 draws (seed 3)"),
        (SAMPLED, {**SAMPLED, "seed": 4}, "the store holds 12 draws (seed 3), not 12 draws (seed 4)"),
    ],
)
def test_draws_and_a_top_k_never_serve_each_other(
    tmp_path: Path,
    fake_teacher: ModuleType,
    capsys: pytest.CaptureFixture[str],
    first: dict[str, object],
    second: dict[str, object],
    message: str,
) -> None:
    fake_teacher.run(tmp_path / "first", tmp_path / "store", **first)
    result = fake_teacher.run(tmp_path / "second", tmp_path / "store", **second)
    assert result.reused_blocks == 0
    assert f"capture: {message}, so all is scored" in capsys.readouterr().err
    names = [{path.name for path in (tmp_path / name).glob("*.safetensors")} for name in ("first", "second")]
    assert not names[0] & names[1]


def test_a_cache_of_a_top_k_and_draws(tmp_path: Path, fake_teacher: ModuleType) -> None:
    mixed = {"keep": "top_k_and_draws", "top_k": 7, "draws": 4}
    fake_teacher.run(tmp_path / "out", tmp_path / "store", **mixed)
    fake_teacher.run(tmp_path / "again", tmp_path / "again_store", batch_tokens=24, **mixed)
    assert content(tmp_path / "out") == content(tmp_path / "again")
    cache = TeacherCache.open(tmp_path / "out")
    cache.verify()
    assert (cache.top_k, cache.kept, cache.sampled) == (11, "top 7 and 4 draws of the rest (seed 0)", True)
    fake_teacher.run(tmp_path / "top", tmp_path / "top_store", top_k=7)
    ours, top = cache.read(range(14)), TeacherCache.open(tmp_path / "top").read(range(14))
    mask = fake_teacher.make_rows().loss_mask_RS
    found = weights_of(ours.ids_NK[mask], ours.logprobs_NK[mask]).gather(1, top.ids_NK[mask].long())
    torch.testing.assert_close(found, top.logprobs_NK[mask].double().exp(), rtol=2e-3, atol=0)
    with pytest.raises(UserError, match=r"teacher\.top_k = 301 is larger than the vocabulary"):
        fake_teacher.run(tmp_path / "large", tmp_path / "large_store", keep="top_k_and_draws", top_k=301)


def test_more_draws_than_tokens_and_a_large_top_k_are_fine(tmp_path: Path, fake_teacher: ModuleType) -> None:
    fake_teacher.run(tmp_path / "out", tmp_path / "store", keep="sampled", draws=400, top_k=60_000)
    cache = TeacherCache.open(tmp_path / "out")
    cache.verify()
    assert (cache.top_k, cache.kept) == (300, "400 draws (seed 0)")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"keep": "sampled", "top_p": 0.9, "codec": "top_p"},
            "teacher: the section can't cut draws to a mass: top_p = 0.9 needs keep = top_k",
        ),
        ({"keep": "drawn"}, "teacher: keep = 'drawn' should be 'top_k', 'sampled' or 'top_k_and_draws'"),
        ({"draws": 0}, "teacher: draws = 0 should be greater than or equal to 1"),
        ({"draws": 2049}, "teacher: draws = 2049 should be less than or equal to 2048"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(CaptureConfig, settings, "teacher")
    assert str(caught.value) == message
