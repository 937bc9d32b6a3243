"""The teacher stage on a tiny Llama: what it writes, what it reads, and that a kill costs a block at most."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from alambique.cache.reader import TeacherCache
from alambique.core.errors import UserError
from alambique.core.files import write_manifest
from alambique.core.params import Params
from alambique.core.sources import content_sha256
from alambique.data.dataset import PackedRows, PreparedData
from alambique.models.load import SplitModel, load_model
from pipeline import teacher as stage
from pipeline.job import job_main
from tests.tiny_models import save_model, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
ROWS, SEQ_LEN, VOCAB = 10, 16, 300


def make_rows(rows: int, seed: int) -> PackedRows:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, VOCAB, (rows, SEQ_LEN), generator=generator, dtype=torch.int32)
    documents = (torch.arange(SEQ_LEN) >= 7).to(torch.int32).repeat(rows, 1)
    mask = torch.ones(rows, SEQ_LEN, dtype=torch.bool)
    mask[:, [6, 15]] = False
    return PackedRows(ids, documents, mask)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose prepare stage has run, with a teacher of 320 head rows for 300 tokens."""
    for name in ("src", "pipeline", "dvc.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    save_model(tmp_path / "model", tiny_model(LlamaConfig), tiny_tokenizer())
    folder = tmp_path / "artifacts/prepare/tiny"
    train, valid = make_rows(ROWS, 1), make_rows(2, 2)
    folder.mkdir(parents=True)
    train.save(folder / "train.safetensors")
    valid.save(folder / "valid.safetensors")
    splits = {
        name: {"rows": rows.num_rows, "target_tokens": rows.num_target_tokens}
        for name, rows in (("train", train), ("valid", valid))
    }
    write_manifest(folder, {"tokenizer_sha256": "7" * 64, "vocab_size": VOCAB, "seq_len": SEQ_LEN, "splits": splits})
    write_params(tmp_path)
    for name in ("DVC_ROOT", "ALAMBIQUE_WORK", "ALAMBIQUE_ASSETS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_params(project: Path, top_k: int = 8, **capture: object) -> None:
    pin = content_sha256(project / "model")
    params = {
        # two rows of 16 · 8 · 2.7 bytes in a block
        "teacher": {"top_k": 100, "dtype": "float32", "shard_mib": 2 * 16 * 8 * 2.7 / 2**20 + 1e-9},
        "teachers": {
            "tiny": {"model": f"file:model#sha256={pin}", "capture": {"top_k": top_k, "batch_tokens": 16, **capture}}
        },
    }
    (project / "params.yaml").write_text(json.dumps(params))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_settings_read_their_sections_only(project: Path) -> None:
    params = Params.load()
    resolved = stage.settings(params, "tiny")
    assert (resolved.capture.top_k, resolved.capture.dtype) == (8, "float32")
    assert sorted(set(params.reads)) == ["teacher", "teachers.tiny.capture", "teachers.tiny.model"]


def test_the_cache_is_the_teachers_distribution(project: Path) -> None:
    stage.run("tiny")
    cache, data = TeacherCache.open(Path("artifacts/teacher/tiny")), PreparedData.open(Path("artifacts/prepare/tiny"))
    cache.require(data.train.row_hashes(), "7" * 64)
    cache.verify()
    assert cache.vocab_size == VOCAB
    model = SplitModel(load_model(Path("model"), dtype="float32", device=torch.device("cpu")))
    with torch.no_grad():
        hidden = model.hidden(data.train.input_ids_RS, data.train.document_ids_RS)
        expected = model.logits(hidden)[..., :VOCAB].log_softmax(-1)
    signal_of_rows, mask = cache.read(range(ROWS)), data.train.loss_mask_RS
    top = expected.topk(8)
    assert torch.equal(signal_of_rows.ids_NK[mask].long(), top.indices[mask])
    torch.testing.assert_close(signal_of_rows.logprobs_NK[mask].float(), top.values[mask], rtol=2**-10, atol=1e-5)
    tail = 1 - top.values.exp().sum(-1)
    torch.testing.assert_close(signal_of_rows.tail_mass_N[mask], tail[mask], rtol=0, atol=5e-6)


def test_results_and_identity(project: Path) -> None:
    stage.run("tiny")
    results = json.loads(Path("results/teacher/tiny.json").read_bytes())
    assert results["num_tokens"] == ROWS * (SEQ_LEN - 2)
    assert results["cache_bytes"] == round(results["cache_bytes_per_token"] * results["num_tokens"])
    assert results["tokens_per_s"] > 0
    assert {"peak_mib", "seconds", "mean_tail_mass", "device"} <= set(results)
    manifest = TeacherCache.open(Path("artifacts/teacher/tiny")).manifest
    uri = json.loads(Path("params.yaml").read_bytes())["teachers"]["tiny"]["model"]
    assert manifest["identity"] == {
        "teacher": uri,
        "teacher_sha256": uri.partition("sha256=")[2],
        "tokenizer_sha256": "7" * 64,
        "dtype": "float32",
        "attention": "sdpa",
        "device_map": None,
        "tensor_parallel": 1,
        "temperature": 1.0,
    }


def test_rerun_reuses_every_block_and_gives_the_same_bytes(project: Path) -> None:
    stage.run("tiny")
    first, timing = content(Path("artifacts/teacher/tiny")), Path("results/teacher/tiny.json").read_bytes()
    stage.run("tiny")
    assert content(Path("artifacts/teacher/tiny")) == first
    again = json.loads(Path("results/teacher/tiny.json").read_bytes())
    assert again.pop("reused_blocks") == 5
    assert again == {k: v for k, v in json.loads(timing).items() if k != "reused_blocks"}


@pytest.mark.slow
def test_kill_9_in_mid_capture_then_run_again(project: Path) -> None:
    # The teacher sleeps in each forward pass: a module that Python imports at start-up slows it in the child only.
    (project / "sitecustomize.py").write_text(
        "import time\n"
        "from alambique.models.load import SplitModel\n"
        "fast = SplitModel.hidden\n"
        "SplitModel.hidden = lambda self, *args: (time.sleep(0.2), fast(self, *args))[1]\n"
    )
    env = {**os.environ, "PYTHONPATH": str(project)}
    child = subprocess.Popen([sys.executable, "-m", "pipeline.teacher", "tiny"], env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while len(list(Path(".work/teacher").glob("*/*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not Path("artifacts/teacher/tiny").exists()
    stage.run("tiny")
    assert json.loads(Path("results/teacher/tiny.json").read_bytes())["reused_blocks"] in (2, 3)
    resumed = content(Path("artifacts/teacher/tiny"))
    os.environ["ALAMBIQUE_WORK"] = str(project / "elsewhere")
    try:
        stage.run("tiny")
    finally:
        del os.environ["ALAMBIQUE_WORK"]
    assert content(Path("artifacts/teacher/tiny")) == resumed


def elsewhere(project: Path, monkeypatch: pytest.MonkeyPatch, **capture: object) -> dict[str, bytes]:
    """What one undisturbed job in one process writes."""
    write_params(project, **capture)
    with monkeypatch.context() as patch:
        patch.setenv("ALAMBIQUE_WORK", str(project / "elsewhere"))
        stage.run("tiny")
    return content(Path("artifacts/teacher/tiny"))


@pytest.mark.slow
def test_two_jobs_write_the_bytes_of_one(project: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: str) -> None:
    """The whole way: the flow, two parts in processes of their own, and the job that puts their blocks together."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    env |= {"ALAMBIQUE_CAPTURE_JOBS": "2", "CUDA_VISIBLE_DEVICES": "", "PREFECT_API_URL": prefect_server}
    command = [sys.executable, "-m", "pipeline.run", "teacher", "tiny"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "capture 1/2" in done.stderr
    assert "capture 2/2" in done.stderr
    both = content(Path("artifacts/teacher/tiny"))
    results = json.loads(Path("results/teacher/tiny.json").read_bytes())
    assert results["reused_blocks"] == results["num_blocks"] == 5  # the last job found them all
    assert results["seconds"] > 0
    assert elsewhere(project, monkeypatch) == both


def test_a_part_writes_to_the_store_only(project: Path) -> None:
    stage.run("tiny", "2/2")
    assert len(list(Path(".work/teacher").glob("*/*.safetensors"))) == 5
    assert not Path("artifacts/teacher").exists()
    assert not Path("results").exists()
    with pytest.raises(UserError, match="half is no part of a capture: write I/N"):
        stage.run("tiny", "half")


def test_a_device_map_is_told_and_changes_no_bit_of_the_signal(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = elsewhere(project, monkeypatch).keys()
    one = TeacherCache.open(Path("artifacts/teacher/tiny"))
    expected = one.read(range(ROWS))
    write_params(project, device_map="auto")
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    monkeypatch.setattr(
        "transformers.integrations.accelerate.infer_auto_device_map", lambda *_, **__: {**places, "lm_head": "disk"}
    )
    stage.run("tiny")
    spread = TeacherCache.open(Path("artifacts/teacher/tiny"))
    assert spread.manifest["identity"] == one.manifest["identity"] | {"device_map": "auto"}
    assert names & content(spread.path).keys() == {"manifest.json"}  # another teacher, as far as names go
    found = spread.read(range(ROWS))
    for name in ("ids_NK", "logprobs_NK", "tail_mass_N"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.slow
def test_tensor_parallel_gives_the_signal_to_rounding(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(project, monkeypatch)
    one = TeacherCache.open(Path("artifacts/teacher/tiny"))
    mask = PreparedData.open(Path("artifacts/prepare/tiny")).train.loss_mask_RS
    expected = one.read(range(ROWS))[mask]
    write_params(project, tensor_parallel=2)
    command = [sys.executable, "-m", "pipeline.teacher", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("capture: 100%") == 1  # only one process writes
    split = TeacherCache.open(Path("artifacts/teacher/tiny"))
    split.verify()
    assert split.manifest["identity"] == one.manifest["identity"] | {"tensor_parallel": 2}
    found = split.read(range(ROWS))[mask]
    assert torch.equal(found.ids_NK[:, 0], expected.ids_NK[:, 0])
    # half a bit of float16, and the few 1e-6 that fp32 sums in another order differ by
    torch.testing.assert_close(found.logprobs_NK, expected.logprobs_NK, rtol=2**-10, atol=1e-5)
    torch.testing.assert_close(found.tail_mass_N, expected.tail_mass_N, rtol=0, atol=1e-5)
    results = json.loads(Path("results/teacher/tiny.json").read_bytes())
    assert results["device"].startswith("2 x cpu")


def test_more_processes_than_gpus(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_params(project, tensor_parallel=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(stage, "launch", None)
    with pytest.raises(UserError) as refused:
        stage.run("tiny")
    assert str(refused.value) == (
        "teacher.tensor_parallel = 2 needs 2 GPUs, and 1 can be seen: lower it, or make more visible "
        "(CUDA_VISIBLE_DEVICES)."
    )


def test_k_larger_than_the_vocabulary_is_one_line_and_status_2(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_params(project, top_k=301)
    monkeypatch.setattr("sys.argv", ["teacher", "tiny"])
    monkeypatch.setattr(stage, "fetch_model", None)  # refused before the model is fetched
    assert job_main(stage.run) == 2
    assert capsys.readouterr().err == (
        "error: teacher.top_k = 301 is larger than the vocabulary of 300 tokens: choose at most 300.\n"
    )


def test_changed_code_gets_another_store(project: Path) -> None:
    signal_of = {"teacher": "x"}
    before = stage.store_of(signal_of)
    (project / "src").unlink()
    (project / "src/alambique").mkdir(parents=True)
    for part in (ROOT / "src/alambique").iterdir():
        (project / "src/alambique" / part.name).symlink_to(part)
    (project / "src/alambique/cache").unlink()
    (project / "src/alambique/cache").mkdir()
    (project / "src/alambique/cache/head.py").write_text("changed")
    assert stage.store_of(signal_of) != before
    assert stage.store_of({"teacher": "y"}).parent == before.parent


def test_an_unknown_teacher_or_missing_data(project: Path) -> None:
    with pytest.raises(UserError, match=r"params\.yaml: teachers has no key tinny; did you mean tiny\?"):
        stage.run("tinny")
    Path("artifacts/prepare/tiny/manifest.json").unlink()
    with pytest.raises(UserError, match=r"artifacts/prepare/tiny/manifest\.json does not exist"):
        stage.run("tiny")
