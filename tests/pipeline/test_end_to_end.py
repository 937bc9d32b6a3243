"""The whole pipeline on a tiny model in a checkout of its own: what a user types, and what DVC then reruns.

One checkout serves the whole file, in order: each test changes one thing and looks at which stages ran.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from alambique.core.params import Params
from alambique.core.sources import content_sha256
from alambique.plan import plan
from alambique.planning.machine import machine

ROOT = Path(__file__).resolve().parents[2]
WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "two",
    "old",
    "dogs",
    "ran",
    "over",
    "green",
    "hills",
    "and",
    "rain",
)
pytestmark = pytest.mark.timeout(600)


def documents(count: int) -> list[str]:
    """Distinct made-up sentences; a fixed linear congruence, so that they are the same everywhere."""
    state, texts = 7, []
    for number in range(count):
        words = []
        for _ in range(24):
            state = (state * 1103515245 + 12345) % 2**31
            words.append(WORDS[(state >> 16) % len(WORDS)])
        texts.append(f"{number} {' '.join(words)}.")
    return texts


def build_model(folder: Path, texts: list[str]) -> None:
    """A random Llama of four layers with a byte-level BPE tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # peaked enough that dropping layers does damage
    model.save_pretrained(folder)


def tiny_params(root: Path) -> dict[str, Any]:
    return {
        "prepare": {
            "seq_len": 32, "train_rows": 32, "valid_rows": 4, "seed": 0,
            "corpora": [{"uri": f"file:corpus.txt#sha256={content_sha256(root / 'corpus.txt')}", "format": "text",
                         "separator": "\n\n"}],
        },
        "teacher": {"top_k": 16, "dtype": "float32", "shard_mib": 0.002},
        "student": {},
        "distill": {"seed": 0, "steps": 60, "checkpoint_every_steps": 5, "rows_per_step": 4,
                    "micro_batch_rows": 2, "learning_rate": 3e-3,
                    "precision": "fp32"},
        "evaluate": {"settings": {"dtype": "float32"}, "heldout": {}, "benchmarks": {"tiny": {"limit": 4}}},
        "report": {},
        "teachers": {"tiny": {"model": f"file:models/tiny#sha256={content_sha256(root / 'models/tiny')}",
                              "capture": {}}},
        "pairs": {"tiny_half": {"teacher": "tiny", "student": {"drop_layers": [1, 2]}, "distill": {}}},
    }  # fmt: skip


class Checkout:
    """A git checkout with the project's code, its own data, and one Prefect server for all runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(root / "src"),
            "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@example.invalid",
            "GIT_COMMITTER_NAME": "t", "GIT_COMMITTER_EMAIL": "t@example.invalid",
        }  # fmt: skip
        self.params: dict[str, Any] = {}

    def build(self) -> None:
        for name in ("pipeline", "src", "evals"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("dvc.yaml", ".dvcignore", ".dvc/config", ".dvc/.gitignore", ".gitignore"):
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        texts = documents(120)
        (self.root / "corpus.txt").write_text("\n\n".join(texts))
        build_model(self.root / "models/tiny", texts)
        self._add_benchmark()
        self.params = tiny_params(self.root)
        self.write_params()
        self.command("git", "init", "-q", ".")
        self.command("git", "add", "-A")
        self.command("git", "commit", "-qm", "a checkout")

    def _add_benchmark(self) -> None:
        """A user's own benchmark: a folder in evals/ that reads BoolQ's stock definition on other data."""
        rows = [{"question": t, "passage": t, "label": i % 2} for i, t in enumerate(documents(8))]
        datasets.Dataset.from_list(rows).save_to_disk(self.root / "data/validation")
        (self.root / "evals/tiny").mkdir()
        (self.root / "evals/tiny/benchmark.yaml").write_text(
            "task: boolq\nstock: super_glue/boolq/default.yaml\nmetric: acc\nchance: 0.5\n"
            f"data: file:data#sha256={content_sha256(self.root / 'data')}\noverride: {{training_split: null}}\n"
        )

    def write_params(self) -> None:
        with (self.root / "params.yaml").open("w") as stream:
            YAML().dump(self.params, stream)

    def command(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            words, cwd=self.root, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        assert done.returncode == code, f"{words} ended with {done.returncode}:\n{done.stdout[-6000:]}"
        return done.stdout

    def repro(self) -> list[str]:
        """Run `dvc repro`; return the stages that ran, not those that were skipped or restored."""
        self.write_params()
        output = self.command("dvc", "repro")
        return re.findall(r"Running stage '([^']+)'", output)

    def read(self, path: str) -> Any:
        return json.loads((self.root / path).read_text())


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
        assert set(report["benchmarks"]["tiny"][who]) == {"metric", "value", "stderr", "n"}
    assert {"tokens_per_s", "peak_mib", "cache_bytes_per_token", "num_tokens"} <= set(report["teacher"])
    wanted = {"tokens_per_s", "peak_mib", "tflop_per_s", "seconds", "num_tokens", "loss_impl"}
    assert wanted <= set(report["distill"])
    assert all(report["distill"][key] > 0 for key in wanted - {"loss_impl"})
    assert report["fingerprint"]
    assert (checkout.root / "results/report/tiny_half.md").read_text().startswith("# ")
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


def test_no_artifact_is_on_the_disk_twice(checkout: Checkout) -> None:
    weights = checkout.root / "artifacts/distill/tiny_half/model.safetensors"
    assert weights.stat().st_nlink >= 2  # the checkout's name and the cache's name for one copy


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


def test_one_complete_row_per_pair_and_fingerprint(checkout: Checkout) -> None:
    """Rows so far: tiny_half three times (first, another learning rate, another limit) and tiny_most once."""
    script = (
        "import json, mlflow; mlflow.set_tracking_uri('sqlite:///mlflow.db');"
        "runs = mlflow.search_runs(experiment_names=['pairs'], output_format='list');"
        "print(json.dumps([[r.data.tags['pair'], r.data.tags['fingerprint'], r.data.metrics] for r in runs]))"
    )
    rows = json.loads(checkout.command(sys.executable, "-W", "ignore", "-c", script).strip().splitlines()[-1])
    assert sorted(pair for pair, _, _ in rows) == ["tiny_half", "tiny_half", "tiny_half", "tiny_most"]
    assert len({fingerprint for _, fingerprint, _ in rows}) == 4
    for _, _, metrics in rows:
        for name in (
            "teacher/peak_mib",
            "teacher/tokens_per_s",
            "distill/peak_mib",
            "distill/tokens_per_s",
            "eval/tiny_acc",
        ):
            assert name in metrics


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
