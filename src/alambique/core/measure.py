"""What a job used: peak memory and time, measured inside the job and never sampled."""

import platform
import resource
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def peak_mib(device: torch.device) -> float:
    """Peak memory in MiB so far: the CUDA allocator's high-water mark, or the process's peak resident set on a CPU.

    Of a process that uses several GPUs, that of the GPU that needed most.
    """
    if device.type == "cuda":
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))) / 2**20
    if platform.system() == "Linux":  # where ru_maxrss begins with the peak of the process that started this one
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Stopwatch:
    """Seconds since it was made, after waiting for the device's queued work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Start again from zero."""
        self._synchronise()
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Elapsed seconds."""
        self._synchronise()
        return time.perf_counter() - self._start

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def default_device() -> torch.device:
    """The first visible GPU, or the CPU. Which device runs a job never changes what DVC caches."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """What a person calls the device: the GPU's product name, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of Python and of ``packages`` (default: those that decide numbers)."""
    found = {"python": platform.python_version()}
    for package in packages or ("torch", "transformers", "tokenizers", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
