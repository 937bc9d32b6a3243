"""The whole pipeline on a tiny model in a checkout of its own: what a user types, and what DVC then reruns.

One checkout serves the whole file, in order: each test changes one thing and looks at which stages ran.
"""

import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from alambique.core.params import Params
from alambique.plan import plan
from alambique.planning.machine import machine
from tests.tiny_checkout import Checkout

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    place = Checkout(tmp_path_factory.mktemp("checkout"))
    place.build()
    return place


# Processor time of importing what a job imports, on the reference machine. Assumption: pieced together from imports
# timed apart (5.7 s for pipeline.evaluate, 0.8 s more for scoring), not timed as one when the machine was fast.
REFERENCE_IMPORT_SECONDS = 6.0


def cpu_seconds(checkout: Checkout, *words: str) -> tuple[float, str]:
    """Processor time of a command and all its children, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = checkout.command(*words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, output


def test_one_command_distils_a_model(checkout: Checkout) -> None:
    """In under 90 s on the reference machine: processor time, scaled by how slow this host is at the moment."""
    bare_import = (sys.executable, "-c", "import alambique.scoring")
    slow = cpu_seconds(checkout, *bare_import)[0]
    seconds, output = cpu_seconds(checkout, sys.executable, "-m", "pipeline.repro")
    slow = max(slow, cpu_seconds(checkout, *bare_import)[0])
    report = checkout.read("results/report/tiny_half.json")
    assert report["kl_nats"]["after"] < report["kl_nats"]["before"]
    assert report["benchmarks"]["tiny"]["after"]["n"] == 4
    assert "tiny_half" in output
    assert "artifacts/distill/tiny_half" in output
    print(f"the whole pipeline: {seconds:.0f} CPU seconds, a bare import {slow:.1f}")
    assert seconds < 90 * max(1.0, slow / REFERENCE_IMPORT_SECONDS)


def test_the_report_keeps_its_contract(checkout: Checkout) -> None:
    report = checkout.read("results/report/tiny_half.json")
    for name in ("kl_nats", "agreement", "perplexity"):
        assert {"before", "after"} <= set(report[name])
    assert report["perplexity"]["teacher"] > 1
    for who in ("teacher", "before", "after"):
        assert set(report["benchmarks"]["tiny"][who]) == {"metric", "value", "stderr", "n", "seconds"}
    assert {"tokens_per_s", "peak_mib", "cache_bytes_per_token", "num_tokens"} <= set(report["teacher"])
    wanted = {"tokens_per_s", "peak_mib", "tflop_per_s", "seconds", "num_tokens", "loss_impl"}
    assert wanted <= set(report["distill"])
    assert all(report["distill"][key] > 0 for key in wanted - {"loss_impl"})
    assert report["fingerprint"]
    assert (checkout.root / "results/report/tiny_half.md").read_text().startswith("# ")
    assert "tiny_half.html" in (checkout.root / "results/report/index.html").read_text()
    assert list((checkout.root / "results/report").glob("tiny_half/*.svg"))


def test_the_distilled_folder_loads_and_generates(checkout: Checkout) -> None:
    folder = checkout.root / "artifacts/distill/tiny_half"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the cat", return_tensors="pt").input_ids
    assert model.config.num_hidden_layers == 2
    assert model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4).shape[1] == ids.shape[1] + 4


def test_the_plan_foretold_memory_and_cache(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout.root)
    found = plan(Params.load(), machine(None, 8), download=False)
    capture, pair = found.teachers["tiny"].capture, found.pairs["tiny_half"]
    report = checkout.read("results/report/tiny_half.json")
    assert capture is not None
    assert capture.peak_mib == pytest.approx(report["teacher"]["peak_mib"], rel=0.15)
    assert pair.methods["fused"].peak_mib == pytest.approx(report["distill"]["peak_mib"], rel=0.15)
    assert pair.parameters == report["student"]["num_parameters"]
    # How well a random teacher's words pack no formula knows: from a sample of its cache.
    measured = report["teacher"]["cache_bytes_per_token"]
    assert found.teachers["tiny"].cache_from == "sample"
    assert found.teachers["tiny"].cache_bytes_per_token == pytest.approx(measured, rel=0.05)
    flops = pair.methods["fused"].flops
    executed = checkout.read("results/distill/tiny_half.json")
    assert flops == pytest.approx(executed["tflop_per_s"] * 1e12 * executed["seconds"], rel=0.05)


def test_nothing_changed_nothing_runs(checkout: Checkout) -> None:
    started = time.monotonic()
    assert checkout.repro() == []
    assert time.monotonic() - started < 5


def test_nothing_changed_in_twenty_pairs(tmp_path: Path) -> None:
    """206 stages, in the processor seconds of the target of 5 s by the clock (docs/log.md)."""
    many = Checkout(tmp_path / "many")
    many.build_pairs(20)
    slow, _ = cpu_seconds(many, sys.executable, "-c", "import alambique.scoring")
    seconds, output = cpu_seconds(many, "dvc", "repro")
    assert many.stages_run(output) == []
    assert output.count("didn't change") == 206
    print(f"20 pairs, nothing to do: {seconds:.1f} CPU seconds, a bare import {slow:.1f}")
    assert seconds < 5 * max(1.0, slow / REFERENCE_IMPORT_SECONDS)


def test_no_artifact_is_on_the_disk_twice(checkout: Checkout) -> None:
    """A file that the cache knew already, such as a teacher's tokenizer, stays a copy until `dvc checkout --relink`."""
    assert checkout.not_linked("*.safetensors") == []
    checkout.command("dvc", "checkout", "--relink")
    assert checkout.not_linked() == []


def test_a_learning_rate_reruns_training_and_what_follows(checkout: Checkout) -> None:
    first = checkout.read("results/report/tiny_half.json")
    checkout.params["distill"]["learning_rate"] = 1e-3
    ran = checkout.repro()
    assert set(ran) == {
        "distill@tiny_half", "evaluate@distill-tiny_half-tiny", "evaluate_heldout@tiny_half", "report@tiny_half"
    }  # fmt: skip
    assert checkout.read("results/report/tiny_half.json")["fingerprint"] != first["fingerprint"]


def test_going_back_restores_from_the_run_cache(checkout: Checkout) -> None:
    checkout.params["distill"]["learning_rate"] = 3e-3
    assert checkout.repro() == []


def test_a_benchmark_limit_trains_nothing(checkout: Checkout) -> None:
    checkout.params["evaluate"]["benchmarks"]["tiny"]["limit"] = 6
    assert {name.split("@")[0] for name in checkout.repro()} == {"evaluate", "evaluate_teacher", "report"}
    assert checkout.read("results/report/tiny_half.json")["benchmarks"]["tiny"]["after"]["n"] == 6


def test_a_second_pair_leaves_the_teacher_alone(checkout: Checkout) -> None:
    checkout.params["pairs"]["tiny_most"] = {
        "teacher": "tiny",
        "student": {"drop_layers": [2]},
        "distill": {"steps": 4},
    }
    ran = checkout.repro()
    assert ran
    assert all("tiny_most" in name for name in ran), ran
    assert checkout.read("results/distill/tiny_most.json")["steps"] == 4


FIGURES = {
    "teacher/peak_mib",
    "teacher/tokens_per_s",
    "distill/peak_mib",
    "distill/tokens_per_s",
    "eval/tiny_acc",
}  # fmt: skip


def test_one_complete_row_per_pair_and_fingerprint(checkout: Checkout) -> None:
    """Rows so far: tiny_half three times (first, another learning rate, another limit) and tiny_most once."""
    found = checkout.rows()
    assert sorted(row["tags"]["pair"] for row in found) == ["tiny_half", "tiny_half", "tiny_half", "tiny_most"]
    assert len({row["tags"]["fingerprint"] for row in found}) == 4
    assert all(row["metrics"].keys() >= FIGURES for row in found)


def test_an_experiment_in_a_copy_writes_its_row_into_the_checkout(checkout: Checkout) -> None:
    """Another learning rate was trained above, so that only one evaluation and the report have to run here."""
    checkout.commit()
    params = (checkout.root / "params.yaml").read_text()
    output = checkout.command(
        "dvc", "exp", "run", "--temp", "--name", "slower", "-S", "distill.learning_rate=1e-3", "report@tiny_half"
    )
    assert set(checkout.stages_run(output)) == {"evaluate@distill-tiny_half-tiny", "report@tiny_half"}
    assert (checkout.root / "params.yaml").read_text() == params
    (row,) = [row for row in checkout.rows() if row["tags"].get("dvc_exp") == "slower"]
    assert row["status"] == "FINISHED"
    assert row["tags"]["pair"] == "tiny_half"
    assert row["params"]["distill.learning_rate"] == "0.001"
    assert row["metrics"].keys() >= FIGURES
    assert len(list(checkout.root.rglob("mlflow.db"))) == 1


def test_a_second_clone_pulls_and_runs_nothing(checkout: Checkout, tmp_path: Path) -> None:
    checkout.command("dvc", "remote", "add", "--local", "--default", "store", str(tmp_path / "store"))
    checkout.command("dvc", "push", "--run-cache")
    checkout.commit()
    clone = Checkout(tmp_path / "clone")
    checkout.command("git", "clone", "--quiet", ".", str(clone.root))
    clone.command("dvc", "remote", "add", "--local", "--default", "store", str(tmp_path / "store"))
    clone.command("dvc", "pull")
    assert clone.stages_run(clone.command("dvc", "repro")) == []
    assert clone.not_linked() == []
    shutil.rmtree(clone.root / "artifacts")
    clone.command("dvc", "checkout")
    assert clone.not_linked() == []
    # Neither dvc.lock nor a cache: the remote's record of runs is enough.
    for folder in ("artifacts", "results", ".dvc/cache"):
        shutil.rmtree(clone.root / folder)
    (clone.root / "dvc.lock").unlink()
    assert clone.stages_run(clone.command("dvc", "repro", "--pull")) == []
    assert clone.not_linked() == []


@pytest.mark.parametrize("stage", ["teacher", "distill"])
def test_a_killed_stage_continues_and_ends_with_the_same_bytes(checkout: Checkout, stage: str) -> None:
    key = {"teacher": "tiny", "distill": "tiny_half"}[stage]
    folder = checkout.root / f"artifacts/{stage}/{key}"
    wanted = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(checkout.root / ".work", ignore_errors=True)  # so that nothing can be had from an earlier run
    kill_in_the_middle(checkout, stage, key)
    checkout.command("dvc", "repro", "--single-item", "--force", f"{stage}@{key}")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted


def kill_in_the_middle(checkout: Checkout, stage: str, key: str) -> None:
    """Start the stage under dvc, kill -9 everything below it once its scratch folder holds something."""
    process = subprocess.Popen(
        ["dvc", "repro", "--single-item", "--force", f"{stage}@{key}"],
        cwd=checkout.root, env=checkout.env,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    try:
        while not saved_something(checkout.root / ".work" / stage):
            assert process.poll() is None, "the stage ended before it could be killed"
            assert time.monotonic() < deadline, "nothing was saved within a minute"
            time.sleep(0.02)
    finally:
        kill_tree(process.pid)
        process.wait()


def saved_something(folder: Path) -> bool:
    return any(path.suffix == ".safetensors" and not path.name.startswith(".") for path in folder.rglob("*"))


def kill_tree(pid: int) -> None:
    import psutil

    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def test_the_final_weights_are_finite(checkout: Checkout) -> None:
    weights = load_file(checkout.root / "artifacts/distill/tiny_half/model.safetensors")
    assert all(torch.isfinite(tensor.float()).all() for tensor in weights.values())
