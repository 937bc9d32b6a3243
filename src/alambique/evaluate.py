"""Benchmarks: which task of lm-eval each one is, and where its data come from (the folders below evals/).

Nothing here imports torch, lm_eval or datasets at the top, so that a mistyped benchmark is refused before hours are
spent; ``scoring`` runs them. Each benchmark has a folder, because that is what DVC watches: a changed or a new one
evaluates only itself.
"""

import importlib.util
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator
from ruamel.yaml import YAML

from alambique.core.errors import UserError, did_you_mean
from alambique.core.params import Config, validate

if TYPE_CHECKING:
    import torch

EVALS = Path("evals")
_SPEC = "benchmark.yaml"
# How a task file of lm-eval names its task or group, without the cost of parsing 14,000 YAML files.
_NAME = re.compile(rb"""^["']?(?:task|group)["']?:[ \t]*["']?([A-Za-z0-9_.\-]+)["']?[ \t]*$""", re.MULTILINE)


class EvaluateSettings(Config):
    """How every model is run, for benchmarks and held-out text alike (``evaluate.settings``)."""

    # bfloat16 is what published models are stored in; auto is float32 on CPUs that would emulate its products
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    softmax_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # an option of lm-eval's; in bf16 answers tie
    attention: str = "sdpa"  # transformers' default
    batch_tokens: int = Field(1024, ge=1)  # padded tokens per forward pass; as fast as any of 512 to 4096 on two cores
    seed: int = 1234  # lm-eval's default for choosing few-shot examples

    def resolved(self, device: "torch.device") -> Self:
        """With the dtype that ``auto`` means on ``device``."""
        from alambique.core.products import fast_dtype  # torch takes seconds to import

        return self.model_copy(update={"dtype": fast_dtype(device)}) if self.dtype == "auto" else self


class BenchmarkConfig(Config):
    """One entry of ``evaluate.benchmarks``; its key names a folder of evals/."""

    limit: int | None = Field(None, ge=1)  # first documents per task, lm-eval's --limit; None = all (published numbers)
    num_fewshot: int | None = Field(None, ge=0)  # None = what the stock definition says
    metric: str | None = None  # None = the benchmark's own, or else the first that lm-eval reports


class Benchmark(Config):
    """``evals/NAME/benchmark.yaml``: a task of lm-eval, by its stock definition, on local data or on its own."""

    task: str  # the lm-eval task or group whose result counts
    metric: str | None = None  # the one that is usually published; None = the first that lm-eval reports
    chance: float | None = Field(None, ge=0, le=1)  # what guessing uniformly among the answers gives
    # Local data; without these two lm-eval loads its own data from the hub.
    data: str | None = None  # URI of a folder of datasets saved to disk: [dataset_name/]split
    stock: str | None = None  # the YAML file of the task, or the folder of a group, below lm_eval/tasks
    rename: dict[str, str] = Field(default_factory=dict)  # column in the data -> in the definition
    override: dict[str, Any] = Field(default_factory=dict)  # keys that local data need otherwise

    @model_validator(mode="after")
    def _local_data_need_a_definition(self) -> Self:
        if (self.data is None) != (self.stock is None):
            raise ValueError("has one of `data` and `stock`, which go together: give both, or neither for hub data")
        return self


def stock_tasks() -> Path:
    """The folder of lm-eval's own task definitions, found without importing lm-eval."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UserError("lm_eval is not installed in this Python: run `make repro`, or use .venv/bin/python.")
    return Path(spec.origin).parent / "tasks"


def read_benchmark(name: str, evals: Path = EVALS) -> Benchmark:
    """Read ``evals/<name>/benchmark.yaml``; a UserError has the nearest right name, or what to write or to correct."""
    path = evals / name / _SPEC
    if path.is_file():
        return validate(Benchmark, YAML(typ="safe").load(path.read_text()), str(path))
    local = sorted(found.parent.name for found in evals.glob(f"*/{_SPEC}"))
    if name in (known := _stock_names()):
        raise UserError(
            f"evaluate.benchmarks.{name}: {path} does not exist; lm-eval has a task {name}, so "
            f"write `task: {name}` there."
        )
    others = f"; folders of {evals}/: {', '.join(local)}; `lm_eval ls tasks` lists lm-eval's tasks"
    nearest = (did_you_mean(name, names) for names in (local, known))  # this project's first: lm-eval has 14,000
    near = next((hint for hint in nearest if hint.startswith("; did")), others)
    raise UserError(f"evaluate.benchmarks.{name}: neither {evals}/ nor lm-eval knows {name}{near}")


def check_benchmarks(benchmarks: Mapping[str, BenchmarkConfig], evals: Path = EVALS) -> None:
    """Refuse benchmarks that can't run; free for local data, else about two seconds.

    Raises:
        UserError: an unknown name or task, with the nearest right one; or few-shot examples that local data don't have.
    """
    for name, config in benchmarks.items():
        spec = read_benchmark(name, evals)
        if spec.stock is None and spec.task not in (known := _stock_names()):
            hint = did_you_mean(spec.task, known)
            raise UserError(f"{evals / name / _SPEC}: lm-eval has no task {spec.task}{hint}")
        if config.num_fewshot and "training_split" in spec.override and not spec.override.get("fewshot_split"):
            raise UserError(
                f"evaluate.benchmarks.{name}: num_fewshot = {config.num_fewshot}, but the local data of {spec.task} "
                "have no examples to show beside the evaluated ones: set it to 0."
            )


@cache
def _stock_names() -> set[str]:
    names: set[str] = set()
    for folder, _, files in os.walk(stock_tasks()):
        for file in files:
            if file.endswith(".yaml"):
                names.update(match.decode() for match in _NAME.findall(Path(folder, file).read_bytes()))
    return names


def render_tasks(spec: Benchmark, data: Path, limit: int | None, folder: Path) -> list[Path]:
    """Write task files for lm-eval into ``folder`` that include the stock ones and differ only in where the data are.

    Of each task ``limit`` documents will be evaluated; the others are not even read.

    Returns:
        Folders for ``TaskManager(include_path=...)``, in order: later ones override earlier ones.
    """
    from lm_eval.tasks._yaml_loader import load_yaml  # lazy: imports lm_eval

    stock = stock_tasks() / str(spec.stock)
    if not stock.exists():
        raise UserError(f"evals/{spec.task}/{_SPEC}: stock = {spec.stock} is not below {stock_tasks()}.")
    for source in [stock] if stock.is_file() else sorted(stock.glob("*.yaml")):
        definition = {**load_yaml(source, resolve_func=False), **spec.override}
        if isinstance(name := definition.get("task"), str):
            dataset = _data_of(definition, spec, data, limit)
            rendered = {"include": str(source), **spec.override, "dataset_kwargs": dataset}
            with (folder / f"{name}.yaml").open("w") as stream:
                YAML(typ="safe").dump(rendered, stream)
                stream.write(f"custom_dataset: !function {__name__}.{local_dataset.__name__}\n")
    return [folder] if stock.is_file() else [stock, folder]


def _data_of(definition: dict[str, Any], spec: Benchmark, data: Path, limit: int | None) -> dict[str, Any]:
    """Keyword arguments of :func:`local_dataset` for one task."""
    subset = data / str(definition.get("dataset_name"))
    evaluated = str(definition.get("test_split") or definition.get("validation_split"))  # lm-eval's preference
    others = {str(split) for kind in ("training", "fewshot") if (split := definition.get(f"{kind}_split"))} - {
        evaluated
    }
    return {
        "folder": str(subset if subset.is_dir() else data),
        "rows": {evaluated: limit, **dict.fromkeys(sorted(others))},
        "rename": spec.rename,
    }


def local_dataset(folder: str, rows: dict[str, int | None], rename: dict[str, str], **_metadata: Any) -> dict[str, Any]:
    """Load the splits of a task, for lm-eval's ``custom_dataset``; booleans become the integers 0 and 1.

    In memory, because processing a dataset that is mapped from disk writes cache files beside it.
    """
    import datasets

    splits: dict[str, Any] = {}
    for split, count in rows.items():
        dataset = datasets.load_from_disk(str(Path(folder, split)), keep_in_memory=True)
        if count is not None:
            dataset = dataset.select(range(min(count, len(dataset))))
        for old, new in rename.items():
            dataset = dataset.rename_column(old, new)
            if dataset.features[new].dtype == "bool":
                dataset = dataset.cast_column(new, datasets.Value("int64"))
        splits[split] = dataset
    return splits
