"""Medians of interleaved runs: whatever disturbs the machine disturbs all contenders alike."""

import statistics
from collections.abc import Callable, Mapping

import torch

from alambique.core.measure import Stopwatch


def interleaved(
    steps: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each run of each step: one run to warm up, then ``repeats`` rounds in which every step runs once."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    watch = Stopwatch(device)
    for _ in range(repeats):
        for name, step in steps.items():
            watch.restart()
            step()
            seconds[name].append(watch.seconds())
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median time over median time."""
    return statistics.median(ours) / statistics.median(theirs)
