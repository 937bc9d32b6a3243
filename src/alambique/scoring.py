"""One benchmark of one model, scored by lm-eval exactly as it would score it, with less memory and time.

Dimensions: B requests in a batch, S positions, T the last positions whose logits count, V vocabulary.
"""

import contextlib
import itertools
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # lm-eval encodes one text at a time
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor

from alambique.core.errors import UserError
from alambique.core.measure import device_name, peak_mib, versions
from alambique.core.progress import Progress
from alambique.evaluate import (
    EVALS,
    Benchmark,
    BenchmarkConfig,
    EvaluateSettings,
    check_benchmarks,
    read_benchmark,
    render_tasks,
)
from alambique.models.load import load_model, load_tokenizer

# A request as lm-eval hands it down: (context, continuation) as text, then the token ids of each.
Request = tuple[tuple[str, str], list[int], list[int]]
Fetch = Callable[[str], Path]


class ScoringLM(HFLM):  # type: ignore[misc]
    """lm-eval's model, whose output head runs only from the first position that a batch scores.

    The stock class builds logits and log-probabilities for every position, [B, S, V], and then drops those of the
    context. Here batches are formed as there, but the model is asked for the last T positions only; the stock code
    then finds the same rows, because it counts from the end. Requests that differ in one last token share a row.
    """

    batch_tokens = 1024
    batch_size_per_gpu: int
    _keep = 0  # transformers' "all positions"

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            logits_BTV: Tensor = self.model(inps, logits_to_keep=self._keep, use_cache=False).logits
        return logits_BTV

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        answers: dict[int, tuple[float, bool]] = {}
        stock_size: int = self.batch_size_per_gpu
        with contextlib.redirect_stderr(sys.__stderr__), Progress("scoring", len(requests), "requests") as progress:
            for batch in _batches(requests, self.batch_tokens):
                chosen = [requests[index] for index in batch]
                self._keep = _positions_to_keep(chosen, self.max_length)
                self.batch_size_per_gpu = len(batch)  # the stock code must not split what belongs together
                answers |= zip(batch, super()._loglikelihood_tokens(chosen, disable_tqdm=True), strict=True)
                progress.update(len(batch))
        self.batch_size_per_gpu = stock_size
        return [answers[index] for index in range(len(requests))]


def _batches(requests: Sequence[Request], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of requests in lm-eval's order, longest first, with up to ``batch_tokens`` padded tokens at a time."""

    def tokens(index: int) -> tuple[int, ...]:
        return (*requests[index][1], *requests[index][2])

    order = sorted(range(len(requests)), key=lambda index: (-len(tokens(index)), tokens(index)))
    inputs = [list(group) for _, group in itertools.groupby(order, key=lambda index: tokens(index)[:-1])]
    start = 0
    while start < len(inputs):
        size = max(1, batch_tokens // len(tokens(inputs[start][0])))
        yield list(itertools.chain.from_iterable(inputs[start : start + size]))
        start += size


def _positions_to_keep(requests: Sequence[Request], max_length: int) -> int:
    """T: how many last positions of the padded batch hold every scored token; 0 (all) where lm-eval truncates."""
    inputs = [len(context) + len(continuation) - 1 for _, context, continuation in requests]
    if max(inputs) > max_length:
        return 0
    return max(inputs) - min(len(context) - 1 for _, context, _ in requests)


def run_benchmark(
    model_path: Path,
    name: str,
    config: BenchmarkConfig,
    settings: EvaluateSettings,
    device: torch.device,
    fetch: Fetch,
    evals: Path = EVALS,
) -> dict[str, Any]:
    """Score the model in the folder ``model_path`` on the benchmark ``name``; ``fetch`` gets its data.

    Returns:
        JSON-ready: metric, value, stderr, n (documents scored), limit, num_fewshot, chance, all metrics, versions,
        seconds (scoring alone), peak_mib, device.

    Raises:
        UserError: unknown benchmark or metric, missing data, few-shot examples that don't exist.
    """
    check_benchmarks({name: config}, evals)
    settings = settings.resolved(device)
    spec = read_benchmark(name, evals)
    data = fetch(spec.data) if spec.data else None
    with _quiet():
        loaded = _load_tasks(spec, config, data)
        for item in loaded["tasks"].values():
            if config.num_fewshot is not None or item.get_config("num_fewshot") is None:
                item.set_config(key="num_fewshot", value=config.num_fewshot or 0)
            item.set_fewshot_seed(seed=settings.seed)
        lm = ScoringLM(
            pretrained=load_model(model_path, dtype=settings.dtype, device=device, attention=settings.attention),
            tokenizer=load_tokenizer(model_path),
            batch_size=max(1, settings.batch_tokens // 512),  # for tasks that generate; assumption on their length
            softmax_dtype=settings.softmax_dtype,
        )
        lm.batch_tokens = settings.batch_tokens
        started = time.perf_counter()
        found = evaluate(lm=lm, task_dict=loaded, limit=config.limit, log_samples=True)
    seconds = time.perf_counter() - started
    return {
        "benchmark": name,
        **_headline(spec.task, found, config.metric or spec.metric),
        "limit": config.limit,
        "chance": spec.chance,
        "settings": settings.model_dump(mode="json"),
        "versions": {**versions("lm_eval", "torch", "transformers"), "tasks": _versions(spec.task, found)},
        "seconds": round(seconds, 3),
        "peak_mib": round(peak_mib(device), 1),
        "device": device_name(device),
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the bars of lm-eval (one per task), datasets and transformers: this project shows one of its own."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def _load_tasks(spec: Benchmark, config: BenchmarkConfig, data: Path | None) -> Any:
    """Instantiate lm-eval's tasks (its ``TaskDict``): on local data where evals/ names them, else on the hub's."""
    if data is not None:
        with tempfile.TemporaryDirectory() as scratch:
            folders = render_tasks(spec, data, config.limit, Path(scratch))
            return TaskManager(include_path=folders, include_defaults=False).load(spec.task)
    try:
        return TaskManager().load(spec.task)
    except (ConnectionError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"The data of lm-eval's task {spec.task} can't be had ({reason}): evals/ names no local data for it, so "
            "lm-eval asks the hub; go online once, or choose a benchmark with local data."
        ) from error


def _headline(task: str, found: Any, metric: str | None) -> dict[str, Any]:
    """The figure that counts, its standard error, and every other metric of the task or group."""
    row = found["results"][task]
    # lm-eval's keys are "metric,filter"; a task with several filters keeps the first of each metric.
    metrics: dict[str, float] = {}
    for key, value in row.items():
        if "," in key and isinstance(value, (int, float)) and not math.isnan(value):
            metrics.setdefault(key.split(",")[0], float(value))
    figures = [key for key in metrics if not key.endswith("_stderr")]
    metric = metric or figures[0]
    if metric not in figures:
        raise UserError(f"{task} reports {', '.join(figures)}, not {metric}: correct `metric` in params.yaml.")
    leaves = {name: samples for name, samples in found["samples"].items() if samples}
    return {
        "metric": metric,
        "value": metrics[metric],
        "stderr": metrics.get(f"{metric}_stderr", _pooled_stderr(leaves, metric)),
        "n": sum(found["n-samples"][name]["effective"] for name in leaves),
        "num_fewshot": max(found["n-shot"][name] for name in leaves),
        "metrics": metrics,
    }


def _pooled_stderr(leaves: dict[str, list[dict[str, Any]]], metric: str) -> float | None:
    """Standard error over all documents, where lm-eval has none: its own needs two documents in every task."""
    values = [float(sample[metric]) for samples in leaves.values() for sample in samples if metric in sample]
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _versions(task: str, found: Any) -> dict[str, Any]:
    """Version of the task or group, and the versions that occur among a group's members."""
    members = {found["versions"][name] for name in found["samples"] if name != task}
    return {task: found["versions"][task], **({"members": sorted(members, key=str)} if members else {})}
