"""A checkout of its own with a tiny model, text and benchmark: the project's real pipeline, in seconds a stage."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from ruamel.yaml import YAML
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from alambique.core.files import content_sha256
from alambique.core.params import Params

ROOT = Path(__file__).resolve().parents[1]
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

READ_ROWS = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
runs = client.search_runs([client.get_experiment_by_name("pairs").experiment_id])
def names(run, path=None):
    for entry in client.list_artifacts(run.info.run_id, path):
        if entry.is_dir:
            yield from names(run, entry.path)
        else:
            yield entry.path
print(json.dumps([r.data.to_dictionary() | {
    "status": r.info.status,
    "artifacts": sorted(names(r)),
    "datasets": sorted([i.dataset.name, i.dataset.digest] for i in r.inputs.dataset_inputs),
    "versions": len(client.search_model_versions(f"run_id = '{r.info.run_id}'")),
} for r in runs]))
"""


def say(sentence: str) -> None:
    """One line with the time, for those who watch a long test."""
    print(f"{time.strftime('%H:%M:%S')} {sentence}", flush=True)


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


# `dvc commit` would write dvc.lock once for each stage.
ALL_DONE = """
import json
from pathlib import Path
from dvc.repo import Repo
from dvc.stage.serialize import to_single_stage_lockfile
from ruamel.yaml import YAML

repo = Repo()
for stage in repo.index.stages:
    for out in stage.outs:
        path = Path(out.def_path) if Path(out.def_path).suffix else Path(out.def_path, "file")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(out.def_path)
stages, code = {}, {}
with repo.lock:
    for stage in repo.index.stages:
        for each in [*stage.deps, *stage.outs]:
            if each.def_path in code:
                each.hash_info, each.meta = code[each.def_path]
                continue
            each.save()
            if each.def_path.startswith(("src/", "pipeline/")):
                code[each.def_path] = each.hash_info, each.meta
        stage.commit()
        stages[stage.name] = to_single_stage_lockfile(stage)
YAML().dump(json.loads(json.dumps({"schema": "2.0", "stages": stages})), Path("dvc.lock"))
"""


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
        self._copy_code()
        texts = documents(120)
        (self.root / "corpus.txt").write_text("\n\n".join(texts))
        build_model(self.root / "models/tiny", texts)
        self._add_benchmark()
        self.params = tiny_params(self.root)
        self._start_git()

    def build_pairs(self, count: int) -> None:
        """The project with ``count`` pairs, as if all were done: made-up outputs, and a dvc.lock that knows them."""
        self.root.mkdir(exist_ok=True)
        self._copy_code()
        self.params = dict(Params.load(ROOT / "params.yaml").tree)
        (pair,) = self.params["pairs"].values()
        self.params["pairs"] = {f"pair_{number:02}": pair for number in range(count)}
        self._start_git()
        self.command(sys.executable, "-c", ALL_DONE)

    def _copy_code(self) -> None:
        for name in ("pipeline", "src", "evals"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("dvc.yaml", ".dvcignore", ".dvc/config", ".dvc/.gitignore", ".gitignore"):
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)

    def _start_git(self) -> None:
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
        return self.stages_run(self.command("dvc", "repro"))

    @staticmethod
    def stages_run(output: str) -> list[str]:
        """Stages that DVC says it has run, not those that were skipped or restored."""
        return re.findall(r"Running stage '([^']+)'", output)

    def commit(self) -> None:
        """Commit all that Git doesn't ignore."""
        self.command("git", "add", "-A")
        self.command("git", "commit", "--allow-empty", "-qm", "as it is")

    def not_linked(self, pattern: str = "*") -> list[str]:
        """Files of stages that don't share their bytes with DVC's cache, by a second name for one inode."""
        cached = {path.stat().st_ino for path in (self.root / ".dvc/cache/files").rglob("*") if path.is_file()}
        tops = (self.root / "artifacts", self.root / "results")
        files = [path for top in tops for path in top.rglob(pattern) if path.is_file()]
        files = [path for path in files if path.name != "index.html"]  # over all pairs: no stage's, DVC doesn't have it
        assert files
        return [str(path) for path in files if path.stat().st_nlink < 2 or path.stat().st_ino not in cached]

    def read(self, path: str) -> Any:
        return json.loads((self.root / path).read_text())

    def rows(self, uri: str = "sqlite:///mlflow.db") -> list[dict[str, Any]]:
        """The rows of MLflow's experiment *pairs*: data, status, names of artifacts and inputs, registered versions."""
        out = self.command(sys.executable, "-W", "ignore", "-c", READ_ROWS, uri)
        found: list[dict[str, Any]] = json.loads(out.strip().splitlines()[-1])
        return found
