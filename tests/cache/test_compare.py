from pathlib import Path
from types import ModuleType

import pytest
import torch

from alambique.cache.compare import compare, differing_fields, rescore, rows_in_common
from alambique.cache.drift import drift, merged
from alambique.cache.reader import TeacherCache
from alambique.core.errors import UserError

CPU = torch.device("cpu")


def biased(fake_teacher: ModuleType, factor: float) -> object:
    """A teacher whose logits are sharper by ``factor``."""
    teacher = fake_teacher.FakeTeacher()
    teacher.logit_scale = factor
    return teacher


def test_fields_that_differ_are_settings_not_what_follows_from_them(
    captured: Path, tmp_path: Path, fake_teacher: ModuleType
) -> None:
    fake_teacher.run(tmp_path / "out", tmp_path / "store", top_k=5, codec="quantized", rows=fake_teacher.make_rows(12))
    first, second = (TeacherCache.open(path).manifest for path in (captured, tmp_path / "out"))
    found = differing_fields(first, second)
    codec_kl = found.pop("codec_kl_nats")
    assert codec_kl[0] == 0 < codec_kl[1]
    assert set(found) == {"codec", "lossless", "top_k", "num_rows", "num_tokens", "rows_sha256"}
    assert found["top_k"] == (8, 5)
    assert differing_fields(first, first) == {}
    versions = {**first, "engine": {**first["engine"], "versions": {"torch": "1"}}}
    assert differing_fields(first, versions)["engine.versions.torch"][1] == "1"
    assert differing_fields(first, versions)["engine.versions.pcodec"][1] is None


def test_rows_are_matched_by_content(captured: Path, tmp_path: Path, fake_teacher: ModuleType) -> None:
    rows = fake_teacher.make_rows(14)
    part = type(rows)(*(tensor[[9, 2, 5]] for tensor in (rows.input_ids_RS, rows.document_ids_RS, rows.loss_mask_RS)))
    fake_teacher.run(tmp_path / "out", tmp_path / "store", rows=part)
    whole, few = TeacherCache.open(captured), TeacherCache.open(tmp_path / "out")
    pairs = rows_in_common(whole, few)
    assert pairs == [(2, 1), (5, 2), (9, 0)]
    found = compare(whole, few, pairs)
    assert found is not None
    assert (found.rows, found.mean_kl_nats, found.same_top1) == (3, 0.0, 1.0)
    assert found.positions == int(part.loss_mask_RS.sum())


def test_compared_against_both_signals(captured: Path, tmp_path: Path, fake_teacher: ModuleType) -> None:
    fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=biased(fake_teacher, 1.05))
    first, second = TeacherCache.open(captured), TeacherCache.open(tmp_path / "out")
    pairs, mask_RS = rows_in_common(first, second), fake_teacher.make_rows().loss_mask_RS
    found = compare(first, second, pairs)
    ours, theirs = first.read(range(14))[mask_RS], second.read(range(14))[mask_RS]
    whole = drift(
        *((s.ids_NK.numpy(), s.logprobs_NK.numpy(), s.tail_mass_N.numpy()) for s in (ours, theirs))
    ).model_copy(update={"rows": 13})  # row 3 has no captured position
    assert found is not None
    assert found.model_dump() == pytest.approx(whole.model_dump(), rel=1e-12)
    assert found.mean_kl_nats > 1e-3


def test_some_rows_evenly_spaced(captured: Path, tmp_path: Path, fake_teacher: ModuleType) -> None:
    fake_teacher.run(tmp_path / "out", tmp_path / "store", teacher=biased(fake_teacher, 1.05))
    first, second = TeacherCache.open(captured), TeacherCache.open(tmp_path / "out")
    pairs = rows_in_common(first, second)
    parts = [compare(first, second, [pairs[row]]) for row in (0, 6, 13)]  # 6.5 rounds to even
    assert compare(first, second, pairs, 3) == merged([part for part in parts if part is not None])
    assert compare(first, second, pairs, 99) == compare(first, second, pairs)
    assert compare(first, second, [(3, 3)]) is None


def test_nothing_in_common(captured: Path, tmp_path: Path, fake_teacher: ModuleType) -> None:
    rows = fake_teacher.make_rows(4)
    rows.input_ids_RS += 1
    rows.input_ids_RS %= 300
    fake_teacher.run(tmp_path / "out", tmp_path / "store", rows=rows)
    with pytest.raises(UserError) as caught:
        rows_in_common(TeacherCache.open(captured), TeacherCache.open(tmp_path / "out"))
    assert str(caught.value) == (
        f"{captured} and {tmp_path / 'out'} have no row in common: name two caches of the same prepared data."
    )


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("seq_len", 32, "has rows of 24 positions, OTHER has rows of 32 positions: nothing can be compared"),
        ("vocab_size", 320, "has a vocabulary of 300 tokens, OTHER has a vocabulary of 320 tokens: nothing can be"),
    ],
)
def test_other_shapes(captured: Path, attribute: str, value: int, message: str) -> None:
    first, second = TeacherCache.open(captured), TeacherCache.open(captured)
    setattr(second, attribute, value)
    with pytest.raises(UserError) as caught:
        rows_in_common(first, second)
    assert message.replace("OTHER", str(captured)) in str(caught.value)


def test_rescoring_finds_the_same_teacher_and_another(captured: Path, fake_teacher: ModuleType) -> None:
    cache, rows = TeacherCache.open(captured), fake_teacher.make_rows(20)
    same = rescore(cache, rows, fake_teacher.FakeTeacher, CPU)
    assert same.model_dump() == cache.manifest["rescored"]
    other = rescore(cache, rows, lambda: biased(fake_teacher, 1.05), CPU)
    assert other.mean_kl_nats > 1e-3
    assert (other.rows, other.positions) == (same.rows, same.positions)


def test_rescoring_needs_rows_of_the_cache_before_it_loads_anything(captured: Path, fake_teacher: ModuleType) -> None:
    rows = fake_teacher.make_rows(4)
    rows.input_ids_RS[:] = 7
    with pytest.raises(UserError, match="holds none of these rows: name the prepared data that it was captured from"):
        rescore(TeacherCache.open(captured), rows, lambda: pytest.fail("loaded"), CPU)


def test_draws_are_not_rescored(tmp_path: Path, fake_teacher: ModuleType) -> None:
    fake_teacher.run(tmp_path / "out", tmp_path / "store", keep="sampled")
    with pytest.raises(UserError, match="holds draws, not the teacher's most probable tokens, so drift would not show"):
        rescore(TeacherCache.open(tmp_path / "out"), fake_teacher.make_rows(), fake_teacher.FakeTeacher, CPU)
