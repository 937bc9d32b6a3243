"""The distill stage on a tiny Llama: what it ships, what it refuses, and that a stop changes nothing but the clock."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from alambique.core.errors import UserError
from alambique.core.files import read_json, sha256_file, write_json, write_manifest
from alambique.core.params import Params
from alambique.core.places import SHIPPED
from alambique.core.products import fast_dtype
from alambique.core.progress import PROGRESS_FILE
from alambique.core.sources import content_sha256
from alambique.data.dataset import PackedRows, PreparedData
from alambique.heldout import HeldoutConfig, heldout
from alambique.models.load import SplitModel, load_model, load_tokenizer, tokenizer_sha256
from alambique.train.sharded import ALONE, Processes, note_fitting_rows
from pipeline import distill, student, teacher
from tests.tiny_models import save_model, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
ROWS, SEQ_LEN, VOCAB, STEPS = 12, 16, 300, 6
OUT, RESULTS = Path("artifacts/distill/half"), Path("results/distill/half.json")
CURVE = Path("results/distill/half_curve.csv")


def make_rows(rows: int, seed: int) -> PackedRows:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, VOCAB, (rows, SEQ_LEN), generator=generator, dtype=torch.int32)
    documents = (torch.arange(SEQ_LEN) >= 7).to(torch.int32).repeat(rows, 1)
    mask = torch.ones(rows, SEQ_LEN, dtype=torch.bool)
    mask[:, [6, 15]] = False
    return PackedRows(ids, documents, mask)


def params() -> dict[str, Any]:
    return {
        "prepare": {},
        "teacher": {"top_k": 12, "dtype": "float32"},
        "student": {},
        "distill": {"steps": STEPS, "rows_per_step": 4, "micro_batch_rows": 2, "learning_rate": 1e-2,
                    "checkpoint_every_steps": 1},
        "teachers": {"big": {"model": f"file:model#sha256={content_sha256(Path('model'))}", "capture": {}}},
        "pairs": {"half": {"teacher": "big", "student": {"drop_layers": [1, 2]},
                           "distill": {"loss": {"ce_weight": 0.1}}}},
    }  # fmt: skip


def prepare_by_hand(tokenizer_hash: str) -> None:
    folder = Path("artifacts/prepare/big")
    folder.mkdir(parents=True)
    splits = {}
    for seed, (name, num_rows) in enumerate({"train": ROWS, "valid": 2}.items()):
        rows = make_rows(num_rows, seed)
        rows.save(folder / f"{name}.safetensors")
        splits[name] = {"rows": num_rows, "target_tokens": rows.num_target_tokens}
    sources = [{"uri": "file:corpus.txt", "sha256": "5" * 64}]
    facts = {"tokenizer_sha256": tokenizer_hash, "vocab_size": VOCAB, "seq_len": SEQ_LEN, "splits": splits}
    write_manifest(folder, {**facts, "sources": sources})


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which prepare, teacher and student have run."""
    root = tmp_path_factory.mktemp("upstream")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name in ("DVC_ROOT", "ALAMBIQUE_WORK", "ALAMBIQUE_ASSETS"):
            patch.delenv(name, raising=False)
        for name in ("src", "pipeline", "dvc.yaml"):
            Path(name).symlink_to(ROOT / name)
        save_model(Path("model"), tiny_model(LlamaConfig, num_hidden_layers=4), tiny_tokenizer())
        prepare_by_hand(tokenizer_sha256(load_tokenizer(Path("model"))))
        YAML().dump(params(), Path("params.yaml"))
        teacher.run("big")
        student.run("half")
    return root


@pytest.fixture
def project(upstream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    shutil.copytree(upstream, root, symlinks=True)
    monkeypatch.chdir(root)
    for name in ("DVC_ROOT", "ALAMBIQUE_WORK", "ALAMBIQUE_ASSETS"):
        monkeypatch.delenv(name, raising=False)
    return root


def shipped() -> dict[str, bytes]:
    """What must come out the same whatever happened on the way."""
    return {path.name: path.read_bytes() for path in [*sorted(OUT.iterdir()), CURVE]}


@pytest.fixture(scope="module")
def whole(upstream: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an uninterrupted run ships."""
    root = tmp_path_factory.mktemp("whole") / "project"
    shutil.copytree(upstream, root, symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        distill.run("half")
        return shipped()


def test_the_student_loads_and_generates(project: Path) -> None:
    distill.run("half")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(OUT), AutoTokenizer.from_pretrained(OUT)
    assert model.dtype == getattr(torch, fast_dtype(torch.device("cpu")))
    assert model.config.num_hidden_layers == 2
    assert model.get_input_embeddings().weight.shape[0] == 320
    prompt = tokenizer("the cat", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert written.shape[1] == prompt["input_ids"].shape[1] + 5
    before = AutoModelForCausalLM.from_pretrained("artifacts/student/half", dtype=model.dtype)
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)


def test_results_and_lineage(project: Path) -> None:
    distill.run("half")
    results = read_json(RESULTS)
    assert results["steps"] == STEPS
    assert results["num_tokens"] == STEPS * 4 * SEQ_LEN
    assert results["num_target_tokens"] == STEPS * 4 * (SEQ_LEN - 2)
    for name in ("tokens_per_s", "target_tokens_per_s", "tflop_per_s", "peak_mib", "seconds"):
        assert results[name] > 0, name
    assert (results["method"], results["loss_impl"]) == ("fused", "fused")
    with CURVE.open() as stream:
        curve = list(csv.DictReader(stream))
    columns = ["step", "tokens", "loss_nats", "kd_nats", "ce_nats", "learning_rate", "grad_norm"]
    assert list(curve[0]) == columns
    assert [int(point["step"]) for point in curve] == list(range(1, STEPS + 1))
    for point in curve:
        mixed = float(point["kd_nats"]) + 0.1 * float(point["ce_nats"])
        assert float(point["loss_nats"]) == pytest.approx(mixed, rel=1e-5)
    assert results["loss_nats"] == {"first": float(curve[0]["loss_nats"]), "last": float(curve[-1]["loss_nats"])}
    manifest = read_json(OUT / "manifest.json")
    for name, recorded in manifest["files"].items():
        assert sha256_file(OUT / name) == recorded["sha256"]
    assert manifest["config"]["loss"]["ce_weight"] == 0.1
    card = (OUT / "README.md").read_text()
    for said in (params()["teachers"]["big"]["model"], "`file:corpus.txt` (sha256 555", *manifest["lineage"].values()):
        assert said in card
    assert "ce_weight = 0.1" in card
    assert [path.name for path in Path(".work/distill").glob("*/*") if path.is_file()] == [SHIPPED]


def change(**settings: Any) -> None:
    changed = params()
    changed["pairs"]["half"]["distill"] |= settings
    YAML().dump(changed, Path("params.yaml"))


def test_online_runs_the_captured_teacher_and_reads_no_row_of_its_cache(project: Path) -> None:
    change(method="online")
    for shard in Path("artifacts/teacher/big").glob("*.safetensors"):
        shard.write_bytes(bytes(shard.stat().st_size))
    distill.run("half")
    results = read_json(RESULTS)
    assert (results["method"], results["steps"]) == ("online", STEPS)
    assert results["tflop_per_s"] > 1.25 * results["model_tflop_per_s"]
    assert "Method: `online`" in (OUT / "README.md").read_text()


def test_online_refuses_another_teacher_than_the_captured_one(project: Path) -> None:
    change(method="online")
    path = Path("artifacts/teacher/big/manifest.json")
    manifest = read_json(path)
    manifest["identity"]["teacher_sha256"] = "0" * 64
    write_json(path, manifest)
    with pytest.raises(UserError) as error:
        distill.run("half")
    assert str(error.value) == (
        f"{params()['teachers']['big']['model']} is no longer the model or tokenizer that artifacts/teacher/big was "
        "captured from: capture it again (`dvc repro`)."
    )


def test_validation_names_the_best_and_ships_it(project: Path) -> None:
    change(validate_every=2, keep="best")
    distill.run("half")
    results = read_json(RESULTS)
    assert list(results["validation"]) == ["2", "4", "6"]
    kls = {step: found["kl_nats"] for step, found in results["validation"].items()}
    assert results["shipped_step"] == int(min(kls, key=lambda step: kls[step]))
    assert results["mfu"] is None  # nobody knows what a CPU can do
    data = PreparedData.open(Path("artifacts/prepare/big"))
    models = [
        SplitModel(load_model(path, dtype="float32", device=torch.device("cpu"))) for path in (Path("model"), OUT)
    ]
    found = heldout(models[0], {"s": models[1]}, data.valid, VOCAB, HeldoutConfig(), torch.device("cpu"))
    assert found["kl_nats"]["s"] == pytest.approx(min(kls.values()), rel=0.02)  # shipped in bf16
    assert f"the weights after step {results['shipped_step']}." in (OUT / "README.md").read_text()


def test_a_second_run_ships_the_same_bytes(project: Path, whole: dict[str, bytes]) -> None:
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "manifest.json"} <= set(whole)
    distill.run("half")
    assert shipped() == whole
    assert read_json(RESULTS)["resumed_from_step"] == 0
    # Killed before DVC had recorded it: DVC removes what it doesn't know, and runs the job again.
    shutil.rmtree(OUT)
    distill.run("half")
    assert shipped() == whole
    assert read_json(RESULTS)["resumed_from_step"] == STEPS - 1
    # The next training forgets those checkpoints.
    change(seed=1)
    distill.run("half")
    assert len(list(Path(".work/distill").iterdir())) == 1
    assert read_json(RESULTS)["resumed_from_step"] == 0


def wait_for_steps(progress: Path, steps: int, process: subprocess.Popen[str]) -> None:
    while not (progress.exists() and progress.read_text().count("loss_nats") >= steps):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.slow
def test_a_stop_is_resumable_and_leaves_no_trace(project: Path, whole: dict[str, bytes]) -> None:
    progress = project / "progress"
    environment = {**os.environ, PROGRESS_FILE: str(progress), "PYTHONPATH": f"{project}:{project}/src"}
    command = [sys.executable, "-m", "pipeline.distill", "half"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for_steps(progress, 1, process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # orchestrators repeat themselves
    _, stderr = process.communicate()
    assert process.returncode == 75, stderr
    assert "; the same command continues from there" in stderr.splitlines()[-1]
    assert not OUT.exists()
    distill.run("half")
    assert read_json(RESULTS)["resumed_from_step"] >= 1
    assert shipped() == whole


# ---- several processes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_stop_with_one_sentence_and_one_goes_on(project: Path, whole: dict[str, bytes]) -> None:
    progress = project / "progress"
    own = {PROGRESS_FILE: str(progress), "PYTHONPATH": f"{project}:{project}/src"}
    own |= {"ALAMBIQUE_TRAIN_PROCESSES": "2", "ALAMBIQUE_CONTEXT_PROCESSES": "2"}  # each row in two halves
    command = [sys.executable, "-m", "pipeline.distill", "half"]
    process = subprocess.Popen(command, env=os.environ | own, stderr=subprocess.PIPE, text=True)
    wait_for_steps(progress, 1, process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 75, stderr
    assert stderr.count("; the same command continues from there") == 1
    assert "Traceback" not in stderr
    assert not OUT.exists()
    distill.run("half")
    assert read_json(RESULTS)["resumed_from_step"] >= 1
    assert shipped().keys() == whole.keys()
    assert len(shipped()[CURVE.name].splitlines()) == 1 + STEPS


def test_what_several_processes_hold_is_shipped_as_that_of_one(
    project: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the processes: rank 0 of two, whose parts are whole."""
    alone = distill.distill
    monkeypatch.setattr(
        distill, "distill", lambda *inputs, processes, **options: alone(*inputs, **options, processes=ALONE)
    )
    distill._run(distill.Job.open("half"), threading.Event(), Processes(0, 2))
    assert read_json(RESULTS)["device"].startswith("2 x cpu")
    for name, data in shipped().items():
        assert data == whole[name] or name == "manifest.json", name
    manifest, wanted = json.loads(shipped()["manifest.json"]), json.loads(whole["manifest.json"])
    assert manifest.pop("device") == f"2 x {wanted.pop('device')}"
    assert manifest == wanted


def test_memory_that_ran_out_starts_all_processes_again(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALAMBIQUE_TRAIN_PROCESSES", "2")
    scratch, tries = distill.Job.open("half").scratch, iter([(1, 75), (None, 0)])

    def launch(number: int, *words: str, grace_seconds: int) -> int:
        fitting, code = next(tries)
        if fitting is not None:
            note_fitting_rows(scratch, fitting)
        assert (number, words, grace_seconds) == (2, ("-m", "pipeline.distill", "half"), 10)
        return code

    monkeypatch.setattr(distill, "launch", launch)
    distill.run("half")
    assert next(tries, None) is None
    assert capsys.readouterr().err == "out of memory: going on with micro-batches of 1 rows per process\n"


@pytest.mark.parametrize(
    ("processes", "context", "settings", "gpus", "message"),
    [
        ("8", "1", {}, 0, "8 processes can't share the 4 rows of a step: raise distill.rows_per_step, lower ALAM"),
        ("8", "4", {"rows_per_step": 1}, 0, "8 processes can't share the 1 rows of a step: raise distill.rows_p"),
        ("2", "3", {}, 0, "ALAMBIQUE_CONTEXT_PROCESSES=3 must divide 2, the number of processes that train: correct"),
        ("1", "-1", {}, 0, "ALAMBIQUE_CONTEXT_PROCESSES=-1 must be a whole number, 0 or more: correct or unset it."),
        ("2", "1", {}, 1, "ALAMBIQUE_TRAIN_PROCESSES=2 needs 2 GPUs, and 1 can be seen: lower it, or make more visib"),
        ("two", "1", {}, 0, "ALAMBIQUE_TRAIN_PROCESSES=two must be a whole number, 0 or more: correct or unset it."),
    ],
)
def test_processes_that_cannot_train_together_are_not_started(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    processes: str,
    context: str,
    settings: dict[str, Any],
    gpus: int,
    message: str,
) -> None:
    monkeypatch.setenv("ALAMBIQUE_TRAIN_PROCESSES", processes)
    monkeypatch.setenv("ALAMBIQUE_CONTEXT_PROCESSES", context)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(distill, "launch", None)
    change(**settings)
    with pytest.raises(UserError, match=message):
        distill.run("half")


def test_other_settings_never_resume_from_these_checkpoints(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise UserError("no space")

    monkeypatch.setattr(distill, "export_model", full_disk)
    with pytest.raises(UserError, match="no space"):
        distill.run("half")
    changed = params()
    changed["pairs"]["half"]["distill"]["seed"] = 1
    YAML().dump(changed, Path("params.yaml"))
    monkeypatch.undo()
    monkeypatch.chdir(project)
    distill.run("half")
    assert read_json(RESULTS)["resumed_from_step"] == 0


def test_it_reads_the_sections_that_it_says(project: Path) -> None:
    read = Params(params())
    resolved = distill.settings(read, "half")
    assert set(read.reads) == {"distill", "pairs.half.distill", "pairs.half.teacher"}
    assert (resolved.distill.learning_rate, resolved.distill.loss.ce_weight) == (1e-2, 0.1)


def test_other_data_than_the_cache_is_refused(project: Path) -> None:
    folder = Path("artifacts/prepare/big")
    make_rows(ROWS, seed=9).save(folder / "train.safetensors")
    facts = {key: value for key, value in read_json(folder / "manifest.json").items() if key != "files"}
    write_manifest(folder, facts)
    with pytest.raises(UserError, match=r"artifacts/teacher/big holds other data from row 0 on: capture it again"):
        distill.run("half")


def test_another_vocabulary_than_the_cache_is_refused(project: Path) -> None:
    path = Path("artifacts/student/half/manifest.json")
    write_json(path, {**read_json(path), "vocab_size": 299})
    with pytest.raises(UserError) as error:
        distill.run("half")
    assert str(error.value) == (
        "artifacts/student/half shares 299 token ids with its teacher, but artifacts/teacher/big was captured over "
        "300: run the student stage again (`dvc repro --force student@half`)."
    )


def test_a_missing_student_is_one_sentence(project: Path) -> None:
    shutil.rmtree("artifacts/student")
    with pytest.raises(UserError, match=r"artifacts/student/half/manifest.json does not exist. Run the student stage"):
        distill.run("half")


def test_too_small_a_disk_is_refused_before_training(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(project)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(UserError, match=r"the distilled half needs about .* MiB in artifacts/distill, but 0 MiB"):
        distill.run("half")


@pytest.mark.parametrize(
    ("keep", "tail", "message"),
    [
        ("sampled", "bucket", "would take draws for a top K: set it to sampled, or the teacher's keep to top_k."),
        ("top_k", "sampled", "would take a top K for draws: set another tail (bucket is the default), or the teacher's "
         "keep to sampled or top_k_and_draws."),
    ],
)  # fmt: skip
def test_a_tail_that_would_misread_the_cache_is_refused_at_once(
    project: Path, monkeypatch: pytest.MonkeyPatch, keep: str, tail: str, message: str
) -> None:
    if keep == "sampled":
        changed = params()
        changed["teacher"] |= {"keep": "sampled", "draws": 6}
        YAML().dump(changed, Path("params.yaml"))
        teacher.run("big")
    change(loss={"tail": tail})
    monkeypatch.setattr(distill, "load_model", None)  # nothing is loaded first
    with pytest.raises(UserError) as error:
        distill.run("half")
    assert str(error.value) == f"artifacts/teacher/big: distill.loss.tail = {tail} {message}"


def test_draws_are_distilled_with_the_sampled_tail(project: Path) -> None:
    changed = params()
    changed["teacher"] |= {"keep": "sampled", "draws": 6}
    changed["pairs"]["half"]["distill"] |= {"loss": {"tail": "sampled"}}
    YAML().dump(changed, Path("params.yaml"))
    teacher.run("big")
    distill.run("half")
    assert f"{ROWS} rows of {SEQ_LEN}, 6 draws (seed 0)" in (OUT / "README.md").read_text()


def test_hidden_states_are_matched_to_the_layers_that_a_pruned_student_stands_for(project: Path) -> None:
    change(method="online", hidden={"weight": 2.0})
    distill.run("half")
    assert read_json(OUT / "manifest.json")["config"]["hidden"]["map"] == [[0, 2]]  # layers 1 and 2 are gone
    distances = read_json(RESULTS)["hidden_loss"]
    with CURVE.open() as stream:
        curve = [float(point["hidden_loss"]) for point in csv.DictReader(stream)]
    assert distances == {"first": curve[0], "last": curve[-1]}
    assert 0 < curve[-1] < curve[0]
    assert "- Hidden states: 1 pairs of layers, normalised, weight 2; mean distance" in (OUT / "README.md").read_text()


def test_a_cache_with_hidden_states_gives_the_distance_of_the_live_teacher(project: Path) -> None:
    change(hidden={"map": [[0, 2]]})
    with pytest.raises(UserError) as error:
        distill.run("half")
    assert str(error.value) == (
        "artifacts/teacher/big holds no hidden states after layers 2, which distill.hidden asks for: set "
        "teacher.hidden_layers to [2] (the teacher then reads the rows again), or distill.method to online."
    )
    changed = YAML(typ="safe").load(Path("params.yaml").read_text())
    changed["teacher"]["hidden_layers"] = [0, 2]
    YAML().dump(changed, Path("params.yaml"))
    teacher.run("big")
    found = {}
    for method in ("fused", "online"):
        changed["pairs"]["half"]["distill"]["method"] = method
        YAML().dump(changed, Path("params.yaml"))
        distill.run("half")
        found[method] = read_json(RESULTS)["hidden_loss"]
    assert found["fused"]["first"] == pytest.approx(found["online"]["first"], rel=1e-5)
    assert found["fused"]["last"] == pytest.approx(found["online"]["last"], rel=0.02)  # top 12 is another signal
    changed["teacher"]["hidden_layers"] = [0, 4]
    YAML().dump(changed, Path("params.yaml"))
    with pytest.raises(UserError, match=r"teacher.hidden_layers names layer 4, but the teacher's layers are 0 to 3\."):
        teacher.run("big")
