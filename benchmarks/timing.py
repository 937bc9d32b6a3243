"""Medians of interleaved runs: whatever disturbs the machine disturbs all contenders alike."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from alambique.core.measure import Stopwatch


def interleaved(
    steps: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each run of each step, in ``repeats`` rounds in which every step runs once; warm them up before."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            seconds[name].append(timed(step, device))
    return seconds


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, see ``clock``."""
    if clock(device) == "cpu time":
        start = time.process_time()
        step()
        return time.process_time() - start
    watch = Stopwatch(device)
    step()
    return watch.seconds()


def clock(device: torch.device) -> str:
    """What is measured: elapsed time; on a CPU with one thread that thread's own, which neighbours disturb less."""
    return "cpu time" if device.type == "cpu" and torch.get_num_threads() == 1 else "elapsed"


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median time over median time."""
    return statistics.median(ours) / statistics.median(theirs)
