"""Hidden states in a cache: what is kept, whence it may come, and that a cache without them knows nothing of it."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from alambique.cache.codecs import exact
from alambique.cache.config import CaptureConfig
from alambique.cache.reader import TeacherCache
from alambique.cache.states import HiddenStates
from alambique.cache.store import plan_blocks
from alambique.cli import main
from alambique.core.errors import UserError

LAYERS = (2, 5)
# As many rows in a block as without hidden states, which take 2 · 16 bytes each.
SETTINGS = {"hidden_layers": LAYERS, "shard_mib": 4 * 24 * (8 * 2.7 + 64) / 2**20 + 1e-9}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, fake_teacher: ModuleType) -> Path:
    folder = tmp_path_factory.mktemp("states")
    fake_teacher.run(folder / "out", folder / "store", **SETTINGS)
    return folder


def test_the_states_of_captured_positions_come_back_in_bfloat16(
    made: Path, fake_teacher: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, rows, teacher = TeacherCache.open(made / "out"), fake_teacher.make_rows(), fake_teacher.FakeTeacher()
    cache.verify()
    assert cache.states == HiddenStates(layers=LAYERS, size=16)
    main(["cache", "info", str(made / "out")])
    assert "hidden states      after layers 2, 5\n" in capsys.readouterr().out
    hidden_RSE = teacher.hidden(rows.input_ids_RS, rows.document_ids_RS)
    wanted = torch.stack([layer * hidden_RSE for layer in LAYERS], dim=2) * rows.loss_mask_RS[..., None, None]
    assert torch.equal(cache.read_states(range(14), LAYERS), wanted.bfloat16())
    assert torch.equal(cache.read_states([9, 3], [5]), wanted[[9, 3], :, 1:].bfloat16())
    assert cache.manifest["bytes_per_token"] > 64


def test_the_signal_beside_them_is_what_it_is_alone(made: Path, captured: Path) -> None:
    ours, alone = (TeacherCache.open(path) for path in (made / "out", captured))
    assert (alone.states, len(ours.manifest["shards"])) == (None, len(alone.manifest["shards"]))
    for one, other in zip(vars(ours.read(range(14))).values(), vars(alone.read(range(14))).values(), strict=True):
        assert torch.equal(one, other)


def test_a_cache_without_them_is_named_by_what_it_always_was(captured: Path) -> None:
    manifest = json.loads((captured / "manifest.json").read_bytes())
    assert "hidden" not in manifest
    depends_on = {
        **{name: manifest[name] for name in ("identity", "engine", "vocab_size", "seq_len", "top_k", "top_p")},
        "codec": ["exact", exact.VERSION], "sampling": None, "derived_from": None,
    }  # fmt: skip
    blocks = plan_blocks(TeacherCache.open(captured).row_hashes, 4, depends_on)
    assert [f"{block.name}.safetensors" for block in blocks] == [shard["file"] for shard in manifest["shards"]]
    assert b'"hidden"' not in (captured / manifest["shards"][0]["file"]).read_bytes()


class Never:
    """A teacher that must not be loaded."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"the teacher was asked for {name}")


@pytest.mark.parametrize("settings", [{"shard_mib": 1}, {"codec": "quantized"}, {"hidden_layers": ()}])
def test_an_earlier_capture_serves_other_blocks_and_codecs_and_none(
    made: Path, tmp_path: Path, fake_teacher: ModuleType, settings: dict[str, object]
) -> None:
    settings = {**SETTINGS, **settings}
    fake_teacher.run(tmp_path / "out", made / "store", teacher=Never(), **settings)
    fake_teacher.run(tmp_path / "anew", tmp_path / "store", **settings)
    assert content(tmp_path / "out") == content(tmp_path / "anew")


def test_fewer_entries_are_cut_and_the_states_go_along(made: Path, tmp_path: Path, fake_teacher: ModuleType) -> None:
    fake_teacher.run(tmp_path / "out", made / "store", teacher=Never(), **SETTINGS, top_k=5)
    cache, whole = TeacherCache.open(tmp_path / "out"), TeacherCache.open(made / "out")
    cache.verify()
    assert (cache.top_k, cache.manifest["derived_from"]) == (5, {"top_k": 8, "top_p": 1.0})
    assert torch.equal(cache.read_states(range(14), LAYERS), whole.read_states(range(14), LAYERS))


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}])
def test_other_layers_are_captured_anew_and_it_says_so(
    made: Path, tmp_path: Path, fake_teacher: ModuleType, capsys: pytest.CaptureFixture[str], settings: dict[str, int]
) -> None:
    fake_teacher.run(tmp_path / "first", tmp_path / "store")
    for layers in ((2,), (2, 3)):
        result = fake_teacher.run(
            tmp_path / "out", tmp_path / "store", **{**SETTINGS, "hidden_layers": layers, **settings}
        )
        assert result.reused_blocks == 0
    wanted = f"top {settings.get('top_k', 8)} with the hidden states after layers 2"
    assert f"capture: the store holds top 8, not {wanted}, so all is scored\n" in capsys.readouterr().err


def test_rows_that_are_added_and_a_batch_too_large_change_no_byte(tmp_path: Path, fake_teacher: ModuleType) -> None:
    store = tmp_path / "store"
    fake_teacher.run(tmp_path / "ten", store, rows=fake_teacher.make_rows(10), **SETTINGS)
    teacher = fake_teacher.FakeTeacher(largest_batch=1)
    fake_teacher.run(tmp_path / "all", store, teacher=teacher, **SETTINGS)
    assert 0 < sum(teacher.rows_seen) < 14
    fake_teacher.run(tmp_path / "anew", tmp_path / "other", **SETTINGS)
    assert content(tmp_path / "all") == content(tmp_path / "anew")


def test_a_damaged_state_is_found_when_it_is_read(made: Path, tmp_path: Path, fake_teacher: ModuleType) -> None:
    fake_teacher.run(tmp_path / "out", made / "store", **SETTINGS)
    cache = TeacherCache.open(tmp_path / "out")
    bits = cache.read_states([5], LAYERS).view(torch.uint8).numpy().tobytes()[:64]
    file = tmp_path / "out" / cache.manifest["shards"][1]["file"]
    data = bytearray(file.read_bytes())
    place = data.find(bits)
    assert place > 0
    data[place + 3] ^= 4
    file.unlink()
    file.write_bytes(data)
    cache = TeacherCache.open(tmp_path / "out")
    cache.read([5])  # the signal is whole
    with pytest.raises(
        UserError, match=rf"row 5 in {file} is damaged: its hidden states fail their checksum\. Capture"
    ):
        cache.read_states([5], LAYERS)
    with pytest.raises(UserError, match="differs from the sha256 in its manifest"):
        cache.verify()


@pytest.mark.parametrize("layers", [[3, 1], [1, 1], [-1]])
def test_layers_are_ascending_and_few_enough(layers: list[int]) -> None:
    with pytest.raises(ValueError, match="must be ascending, from 0 on, each once"):
        CaptureConfig.model_validate({"hidden_layers": layers})
    with pytest.raises(UserError, match=r"teacher.hidden_layers names layer 9, but the teacher's layers are 0 to 5\."):
        CaptureConfig(hidden_layers=(1, 9)).states(6, 16)
