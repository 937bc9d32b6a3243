import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from alambique.cli import main
from alambique.models.load import tokenizer_sha256
from tests.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def fake_teacher() -> ModuleType:
    path = Path(__file__).parent / "cache" / "fake_teacher.py"
    spec = importlib.util.spec_from_file_location("cli_fake_teacher", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cache(tmp_path: Path, fake_teacher: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A captured cache, and beside it the tokenizer that its manifest names."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    identity = {**fake_teacher.IDENTITY, "tokenizer_sha256": tokenizer_sha256(tokenizer)}
    monkeypatch.setattr(fake_teacher, "IDENTITY", identity)
    fake_teacher.run(tmp_path / "cache", tmp_path / "store")
    return tmp_path / "cache"


def test_info(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info", str(cache)]) == 0
    out = capsys.readouterr().out
    for text in (
        "14 of 24 positions",
        "279 captured",
        "top 8 of 300",
        "exact (lossless)",
        "in 4 shards",
        "file:fake",
    ):
        assert text in out
    manifest = json.loads((cache / "manifest.json").read_bytes())
    assert f"bytes per token    {manifest['bytes_per_token']:.1f}" in out
    assert f"mean {manifest['tail_mass']['mean']:.4f}; quantiles 1% " in out
    assert "positions      0 to 2      mean 0." in out


def test_verify(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify", str(cache)]) == 0
    assert "4 shards, 14 rows, every byte as captured" in capsys.readouterr().out
    shard = sorted(cache.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.unlink()
    shard.write_bytes(data)
    assert main(["cache", "verify", str(cache)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {shard} differs from the sha256 in its manifest")
    assert error.count("\n") == 1


def test_show_ids_and_tokens(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "show", str(cache), "--row", "2", "--position", "5", "--top", "3"]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert plain[0] == "row 2, position 5: the teacher's next token"
    probabilities = [float(line.split("%")[0]) for line in plain[1:]]
    assert len(plain) == 6
    assert sum(probabilities) == pytest.approx(100, abs=0.2)
    assert probabilities[:3] == sorted(probabilities[:3], reverse=True)
    assert plain[4].endswith("in 5 more entries")
    assert (
        main(["cache", "show", str(cache), "--row", "2", "--position", "5", "--tokenizer", str(tmp_path / "tokenizer")])
        == 0
    )
    named = capsys.readouterr().out.splitlines()
    token_id = int(named[1].split()[1])
    assert named[1].endswith(repr(tiny_tokenizer().decode([token_id])))
    assert named[-2].endswith("in 0 more entries")


def test_show_what_was_not_captured(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "show", str(cache), "--row", "3"]) == 0
    assert capsys.readouterr().out == ("row 3, position 0: not captured (padding, a prompt, or a document's end)\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "CACHE", "--row", "14"], "--row 14 is outside the cache: choose 0 to 13."),
        (["show", "CACHE", "--position", "-1"], "--position -1 is outside the cache: choose 0 to 23."),
        (["show", "CACHE", "--tokenizer", "CACHE"], "has no tokenizer that can be loaded"),
        (["info", "CACHE/none"], "manifest.json does not exist. Capture it again"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    cache: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["cache", *(word.replace("CACHE", str(cache)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_another_tokenizer_is_refused(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_tokenizer(vocab_size=290).save_pretrained(tmp_path / "other")
    assert main(["cache", "show", str(cache), "--tokenizer", str(tmp_path / "other")]) == 2
    assert "is not the tokenizer that" in capsys.readouterr().err


def test_a_missing_shard(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(cache, tmp_path / "copy")
    shard = sorted((tmp_path / "copy").glob("*.safetensors"))[0]
    os.unlink(shard)
    assert main(["cache", "info", str(tmp_path / "copy")]) == 2
    assert f"{shard} is missing." in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["cache"], ["cache", "burn", "x"], ["cache", "show"]])
def test_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: alambique" in capsys.readouterr().err
