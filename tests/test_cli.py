import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig

from alambique.cache.capture import capture
from alambique.cache.config import CaptureConfig
from alambique.cli import main
from alambique.core.files import write_manifest
from alambique.core.sources import content_sha256
from alambique.data.dataset import PackedRows, PreparedData
from alambique.models.load import SplitModel, load_model, tokenizer_sha256
from tests.tiny_models import save_model, tiny_model, tiny_tokenizer


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
        "rows scored twice  1: mean KL 0.0e+00 nats, 100.00% same top-1",
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


def test_a_cache_of_draws(tmp_path: Path, fake_teacher: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    fake_teacher.run(tmp_path / "cache", tmp_path / "store", keep="sampled", draws=40, seed=3)
    assert main(["cache", "info", str(tmp_path / "cache")]) == 0
    out = capsys.readouterr().out
    assert "kept               40 draws (seed 3) of 300 tokens\n" in out
    assert "mass not kept" not in out
    assert main(["cache", "show", str(tmp_path / "cache"), "--row", "2", "--position", "5", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "row 2, position 5: draws of the teacher's next token, by weight"
    assert len(lines) == 4
    weights = [float(line.split("%")[0]) for line in lines[1:]]
    assert sum(weights) == pytest.approx(100, abs=0.1)
    assert weights[0] * 0.4 == pytest.approx(round(weights[0] * 0.4), abs=0.01)  # a count of 40
    more = int(lines[3].split()[2])
    assert 0 < more < 38  # slots that merged draws left empty are not shown


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


def test_diff_of_equal_caches(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(cache, tmp_path / "copy")
    assert main(["cache", "diff", str(cache), str(tmp_path / "copy")]) == 0
    assert capsys.readouterr().out == "equal: 14 rows in 4 shards of the same sha256\n"


def test_diff_of_settings_and_distributions(
    cache: Path, tmp_path: Path, fake_teacher: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = fake_teacher.FakeTeacher()
    teacher.logit_scale = 1.05
    rows = fake_teacher.make_rows(20)
    fake_teacher.run(tmp_path / "other", tmp_path / "store2", teacher=teacher, rows=rows, top_k=9)
    assert main(["cache", "diff", str(cache), str(tmp_path / "other")]) == 1
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    found = {name: value.strip() for name, value in lines.items()}
    assert found["top_k"] == "8 | 9"
    assert found["num_rows"] == "14 | 20"
    assert found["rows in common"] == "14 of 14 | of 20"
    first, second = (json.loads((path / "manifest.json").read_bytes()) for path in (cache, tmp_path / "other"))
    assert found["bytes per token"] == f"{first['bytes_per_token']:.1f} | {second['bytes_per_token']:.1f}"
    assert found["rows_sha256"] == f"{first['rows_sha256'][:12]}… | {second['rows_sha256'][:12]}…"
    assert "identity.dtype" not in found
    assert found["compared: rows, positions"] == "13, 279"
    assert float(found["mean KL, nats"]) > 1e-4
    assert float(found["largest KL, nats"]) > float(found["mean KL, nats"])
    assert float(found["largest |Δ logprob|, nats"]) > 0.01
    assert found["same top-1"].endswith("%")
    assert 50 < float(found["mass on ids that both keep"].rstrip("%")) < 100
    assert main(["cache", "diff", str(cache), str(tmp_path / "other"), "--rows", "2"]) == 1
    assert "compared: rows, positions        2, " in capsys.readouterr().out


def test_diff_with_draws_compares_settings_only(
    cache: Path, tmp_path: Path, fake_teacher: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_teacher.run(tmp_path / "draws", tmp_path / "store2", keep="sampled")
    assert main(["cache", "diff", str(cache), str(tmp_path / "draws")]) == 1
    out = capsys.readouterr().out
    assert "draws differ by chance, so the distributions are not compared" in out
    assert "mean KL" not in out


def test_diff_of_other_data_shows_the_fields_and_then_says_why_no_more(
    cache: Path, tmp_path: Path, fake_teacher: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = fake_teacher.make_rows(4)
    rows.input_ids_RS[:] = 7
    fake_teacher.run(tmp_path / "other", tmp_path / "store2", rows=rows)
    assert main(["cache", "diff", str(cache), str(tmp_path / "other")]) == 2
    printed = capsys.readouterr()
    assert "rows_sha256" in printed.out
    assert printed.err.splitlines()[-1] == (
        f"error: {cache} and {tmp_path / 'other'} have no row in common: name two caches of the same prepared data."
    )


def test_diff_of_no_rows(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "diff", str(cache), str(cache), "--rows", "0"]) == 2
    assert capsys.readouterr().err == "error: --rows 0 compares nothing: choose at least 1.\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, prepared rows and the cache captured from them, in the current folder."""
    save_model(tmp_path / "model", tiny_model(LlamaConfig), tiny_tokenizer())
    ids = torch.randint(6, 300, (6, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    rows = PackedRows(ids, torch.zeros_like(ids), (torch.arange(16) < 15).repeat(6, 1))
    (tmp_path / "prepared").mkdir()
    for split in ("train", "valid"):
        rows.save(tmp_path / f"prepared/{split}.safetensors")
    counts = {"rows": rows.num_rows, "target_tokens": rows.num_target_tokens}
    write_manifest(tmp_path / "prepared", {"splits": {"train": counts, "valid": counts}})
    monkeypatch.chdir(tmp_path)
    recapture(tmp_path, rows)
    return tmp_path


def recapture(project: Path, rows: PackedRows, sharper: float = 1.0, **identity: str) -> None:
    """Make the cache ``captured``, by a teacher whose logits are ``sharper`` than the model's."""
    pin = content_sha256(project / "model")
    origin = {"teacher": f"file:model#sha256={pin}", "teacher_sha256": pin, "dtype": "float32", "attention": "sdpa"}
    device = torch.device("cpu")
    teacher = SplitModel(load_model(project / "model", dtype="float32", device=device))
    teacher.logit_scale *= sharper
    config = CaptureConfig(top_k=8, dtype="float32", batch_tokens=64, shard_mib=1)
    shutil.rmtree(project / "scratch", ignore_errors=True)
    out, store = project / "captured", project / "scratch"
    capture(rows, lambda: teacher, out, store, {**origin, **identity}, config, 300, device)


RESCORE = ["cache", "rescore", "captured", "--data", "prepared"]


def test_rescore_finds_todays_teacher_the_same(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RESCORE) == 0
    out = capsys.readouterr().out
    then = json.loads(Path("captured/manifest.json").read_bytes())["rescored"]
    assert then["rows"] == 1
    assert f"compared: rows, positions        1, {then['positions']} | 1, 15" in out
    assert f"mean KL, nats                    {then['mean_kl_nats']:.3g} | " in out
    assert "mean KL within 0.01 nats: this teacher is still the cache's" in out
    assert "engine" not in out
    assert "device" not in out


def test_rescore_spreads_a_teacher_that_several_gpus_split(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads(Path("captured/manifest.json").read_bytes())
    manifest["identity"] |= {"device_map": None, "tensor_parallel": 2}
    Path("captured/manifest.json").write_text(json.dumps(manifest))
    assert main(RESCORE) == 0
    assert "mean KL within 0.01 nats" in capsys.readouterr().out


def test_rescore_shows_another_teacher_or_engine(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recapture(project, PreparedData.open(Path("prepared")).train, sharper=3.0)
    manifest = json.loads(Path("captured/manifest.json").read_bytes())
    manifest["engine"]["device"], manifest["rescored"] = "NVIDIA Z9", None
    Path("captured/manifest.json").write_text(json.dumps(manifest))
    assert main(RESCORE) == 1
    out = capsys.readouterr().out
    assert "device                           NVIDIA Z9 | cpu (" in out
    assert "same top-1                       not known | " in out
    assert "mean KL above 0.01 nats: capture it again here, or go back to its engine" in out


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"dtype": "float8"}, "captured: identity: dtype = 'float8' should be 'float32', 'bfloat16' or 'float16'"),
        ({"teacher_sha256": "0" * 64}, f"but the cache is of {'0' * 64}."),
    ],
)
def test_rescore_of_an_identity_that_loads_nothing(
    project: Path, capsys: pytest.CaptureFixture[str], identity: dict[str, str], message: str
) -> None:
    recapture(project, PreparedData.open(Path("prepared")).train, **identity)
    assert main(RESCORE) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_rescore_without_its_data(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RESCORE[:-1], "elsewhere"]) == 2
    assert "error: elsewhere/manifest.json does not exist." in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["cache"], ["cache", "burn", "x"], ["cache", "show"], ["cache", "diff", "x"]])
def test_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: alambique" in capsys.readouterr().err


def test_report_writes_the_page_over_all_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'index.html'}\n"
    assert "No pair has a report yet" in (tmp_path / "index.html").read_text()
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
