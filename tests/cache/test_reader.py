import json
import os
import random
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch

from alambique.cache.reader import TeacherCache
from alambique.core.errors import UserError
from alambique.core.signal import TopKSignal

FUZZ_CASES = int(os.environ.get("ALAMBIQUE_FUZZ_CASES", "400"))  # 10,000 in a thorough run: three minutes


@pytest.fixture
def cache(captured: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(captured, tmp_path / "cache")
    return tmp_path / "cache"


def shards(cache: Path) -> list[Path]:
    manifest = json.loads((cache / "manifest.json").read_bytes())
    return [cache / shard["file"] for shard in manifest["shards"]]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def test_facts_and_shapes(cache: Path) -> None:
    teacher = TeacherCache.open(cache)
    assert (teacher.num_rows, teacher.seq_len, teacher.top_k, teacher.vocab_size) == (14, 24, 8, 300)
    assert teacher.manifest["identity"]["uri"] == "file:fake"
    signal = teacher.read([13, 0])
    assert (signal.ids_NK.shape, signal.logprobs_NK.shape, signal.tail_mass_N.shape) == (
        (2, 24, 8),
        (2, 24, 8),
        (2, 24),
    )
    assert (signal.ids_NK.dtype, signal.logprobs_NK.dtype) == (torch.int32, torch.float16)
    assert signal.tail_mass_N.dtype == torch.float32
    teacher.verify()


def test_positions_that_were_not_captured_are_empty(cache: Path, fake_teacher: ModuleType) -> None:
    signal = TeacherCache.open(str(cache)).read(range(14))  # a plain string, as the README writes it
    masked = ~fake_teacher.make_rows().loss_mask_RS
    assert masked[3].all()
    assert (signal.ids_NK[masked] == 0).all()
    assert signal.logprobs_NK[masked].isneginf().all()
    assert (signal.tail_mass_N[masked] == 1).all()
    mass = signal.logprobs_NK.float().exp().sum(-1) + signal.tail_mass_N
    assert (mass - 1).abs().max() < 2e-3  # fp16 logprobs


def test_rows_are_independent_of_order_and_batch(cache: Path) -> None:
    teacher = TeacherCache.open(cache)
    every = teacher.read(range(14))
    order = random.Random(1).choices(range(14), k=40)
    batch = TeacherCache.open(cache).read(order)
    assert torch.equal(batch.ids_NK, every.ids_NK[order])
    assert torch.equal(batch.logprobs_NK, every.logprobs_NK[order])
    assert torch.equal(batch.tail_mass_N, every.tail_mass_N[order])
    assert teacher.read([]).ids_NK.shape == (0, 24, 8)


@pytest.mark.parametrize("row", [-1, 14])
def test_a_row_outside_is_an_index_error(cache: Path, row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} of a cache with 14 rows"):
        TeacherCache.open(cache).read([row])


def test_require_accepts_its_own_data(cache: Path, fake_teacher: ModuleType) -> None:
    rows = fake_teacher.make_rows()
    TeacherCache.open(cache).require(rows.row_hashes(), fake_teacher.IDENTITY["tokenizer_sha256"])
    assert TeacherCache.open(cache).row_hashes == rows.row_hashes()


def test_require_refuses_another_tokenizer_and_other_data(cache: Path, fake_teacher: ModuleType) -> None:
    teacher, tokenizer = TeacherCache.open(cache), fake_teacher.IDENTITY["tokenizer_sha256"]
    hashes = fake_teacher.make_rows().row_hashes()
    with pytest.raises(UserError, match=r"captured with the tokenizer 111111111111…, but the data was made with 222"):
        teacher.require(hashes, "2" * 64)
    with pytest.raises(UserError, match=r"holds 14 rows, but the data has 13: capture it again"):
        teacher.require(hashes[:-1], tokenizer)
    with pytest.raises(UserError, match=r"holds other data from row 5 on: capture it again"):
        teacher.require([*hashes[:5], "0" * 64, *hashes[6:]], tokenizer)


def test_a_deleted_shard(cache: Path) -> None:
    shards(cache)[1].unlink()
    with pytest.raises(UserError, match=rf"{shards(cache)[1].name} is missing\. Capture it again"):
        TeacherCache.open(cache)


def test_a_truncated_shard(cache: Path) -> None:
    os.truncate(shards(cache)[2], 100)
    with pytest.raises(UserError, match=rf"{shards(cache)[2].name} has 100 bytes instead of \d+, so it is damaged"):
        TeacherCache.open(cache)


def test_swapped_shards(cache: Path) -> None:
    first, second = shards(cache)[:2]
    first.rename(cache / "x")
    second.rename(first)
    (cache / "x").rename(second)
    manifest = json.loads((cache / "manifest.json").read_bytes())
    for file in (first, second):  # even with the sizes and hashes that the files now have
        manifest["files"][file.name]["bytes"] = file.stat().st_size
    (cache / "manifest.json").write_text(json.dumps(manifest))
    teacher = TeacherCache.open(cache)
    with pytest.raises(UserError, match=rf"{first.name} is damaged: its name is {second.stem}, not {first.stem}"):
        teacher.read([0])
    with pytest.raises(UserError, match="differs from the sha256"):
        teacher.verify()


def test_a_hostile_header_cannot_make_the_reader_allocate(cache: Path) -> None:
    """The length of a safetensors header, and the sizes that a manifest claims."""
    manifest = json.loads((cache / "manifest.json").read_bytes())
    shards(cache)[0].write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    manifest["files"][shards(cache)[0].name]["bytes"] = 10
    (cache / "manifest.json").write_text(json.dumps({**manifest, "seq_len": 1 << 25, "top_k": 300}))
    with pytest.raises(UserError, match="it is not a safetensors file"):
        TeacherCache.open(cache).read([0])


def read_unharmed(cache: Path, named: str, reference: TopKSignal) -> bool:
    """Whether a damaged cache still reads, which it may only with the true values; else one sentence says where."""
    try:
        signal = TeacherCache.open(cache).read(range(14))
    except UserError as caught:
        error = str(caught)
    else:
        assert torch.equal(signal.ids_NK, reference.ids_NK)
        assert torch.equal(signal.logprobs_NK, reference.logprobs_NK)
        assert torch.equal(signal.tail_mass_N, reference.tail_mass_N)
        return True
    assert named in error
    assert "\n" not in error
    return False


def test_every_flipped_byte_is_found(cache: Path) -> None:
    """By ``verify`` at any offset, and by ``read`` wherever it could change what is read."""
    reference = TeacherCache.open(cache).read(range(14))
    silent = 0
    for number, shard in enumerate(shards(cache)):
        whole = shard.read_bytes()
        for offset in range(number, len(whole), 37):
            flip(shard, offset, bit=offset % 8)
            with pytest.raises(UserError, match=shard.name):
                TeacherCache.open(cache).verify()
            silent += read_unharmed(cache, shard.name, reference)
            shard.write_bytes(whole)
    assert silent < 4  # spaces and names in a safetensors header


def damage(rng: random.Random, data: bytes) -> bytes:
    """One random way to ruin a file."""
    changed = bytearray(data)
    kind = rng.randrange(6)
    at = rng.randrange(len(changed))
    if kind == 0:
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del changed[at:]
    elif kind == 2:
        changed[at:at] = rng.randbytes(rng.randrange(1, 40))
    elif kind == 3:
        length = rng.randrange(1, 64)
        changed[at : at + length] = rng.randbytes(length)
    elif kind == 4:
        digits = [i for i, byte in enumerate(changed[:4000]) if 48 <= byte <= 57]
        changed[rng.choice(digits)] = 48 + rng.randrange(10)
    else:
        digits = [i for i, byte in enumerate(changed[:4000]) if 48 <= byte <= 57]
        at = rng.choice(digits)
        changed[at:at] = b"9" * rng.randrange(1, 25)
    return bytes(changed)


def test_fuzzed_files_give_one_clear_error_each(cache: Path) -> None:
    """Half of the cases also get past the size check, as a damaged manifest or a clever enemy would."""
    rng = random.Random(5)
    whole = {path: path.read_bytes() for path in cache.iterdir()}
    reference = TeacherCache.open(cache).read(range(14))
    outcomes = {"error": 0, "same": 0}
    for case in range(FUZZ_CASES):
        path = rng.choice(sorted(whole))
        path.write_bytes(damage(rng, whole[path]))
        if case % 2 and path.suffix == ".safetensors":
            manifest = json.loads(whole[cache / "manifest.json"])
            manifest["files"][path.name]["bytes"] = path.stat().st_size
            (cache / "manifest.json").write_text(json.dumps(manifest))
        outcomes["same" if read_unharmed(cache, str(cache), reference) else "error"] += 1
        for damaged, content in whole.items():
            damaged.write_bytes(content)
    assert outcomes["error"] > outcomes["same"]
