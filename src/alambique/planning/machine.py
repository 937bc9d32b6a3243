"""The machine that a plan is for: memory, and how fast products are on it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from alambique.core.errors import UserError, did_you_mean
from alambique.core.measure import default_device, device_name
from alambique.core.products import fast_dtype
from alambique.train.peaks import peak_tflop_per_s

# assumption: the published fused run on an H200 made 304 of 989.5 TFLOP/s; other GPUs are taken to be used as well
_GPU_SHARE = 0.3
# assumption: the embedded pair made 0.21 TFLOP/s on two cores, of which each makes 0.89 of the product timed here
_HOST_SHARE = 0.12
# MiB that the driver shows. assumption: the largest product of each name; --memory-gib says otherwise
_GPU_MIB = {
    "B200": 183_359, "H200 NVL": 143_771, "H200": 143_771, "GH200": 97_871, "H100 NVL": 95_830, "H100 PCIe": 81_559,
    "H100": 81_559, "A100": 81_920, "A30": 24_576, "L40S": 46_068, "L40": 46_068, "L4": 23_034,
}  # fmt: skip
_GEMM = (512, 1536, 2048)  # assumption: about a layer's product at 512 tokens
_CGROUP = Path("/sys/fs/cgroup/memory.max")


# MiB resident on a CPU before any model: Python, torch, transformers, a tokenizer and what else a job imports.
# source: measured, torch 2.13 and transformers 5.24 on Linux: 470 after the imports, 530 with a tokenizer
_IMPORTS_MIB = 530.0
# What is resident on a CPU for each byte that lasts, and for each that comes and goes and is kept by malloc.
# source: they fit the runs of the embedded pair in docs/plan.md to 15 %
_LASTING_ON_CPU, _COMING_ON_CPU = 1.26, 1.32
_GPU_ROUNDING = 1.05  # assumption: an allocator rounds up by a few per cent (docs/loss.md)
ERROR = 0.15  # source: the largest error of a prediction that the tests allow


@dataclass(frozen=True)
class Need:
    """One stage: its peak, and where they are predicted its FLOPs and seconds; ``fits`` None where nobody can say."""

    peak_mib: float
    flops: float | None = None
    seconds: float | None = None
    fits: bool | None = None


@dataclass(frozen=True)
class Machine:
    """What a plan is made for."""

    name: str  # what a person calls it
    device: str  # ``cuda`` or ``cpu``; nothing is ever run there
    memory_mib: float  # what a stage may use
    flop_per_s: float  # what a stage is taken to make
    assumed: str  # how that is known
    dtype: str  # what ``auto`` means there

    def need(self, lasting_bytes: float, peak_bytes: float, flops: float | None = None, loading: float = 0.0) -> Need:
        """What a stage needs here whose tensors take ``peak_bytes``, of which ``lasting_bytes`` stay.

        ``loading`` are the bytes of a file that is mapped while its weights are converted: both are resident then.
        """
        if self.device == "cuda":
            peak_mib = _GPU_ROUNDING * peak_bytes / 2**20
        else:
            resident = _LASTING_ON_CPU * lasting_bytes + _COMING_ON_CPU * (peak_bytes - lasting_bytes)
            peak_mib = _IMPORTS_MIB + max(resident, lasting_bytes + loading) / 2**20
        seconds = flops / self.flop_per_s if flops and self.flop_per_s else None
        return Need(peak_mib, flops, seconds, peak_mib <= self.memory_mib)

    def impossible(self, need: Need) -> bool:
        """Whether it can't fit even if the prediction is too high by as much as predictions may be wrong."""
        return need.fits is False and need.peak_mib / (1 + ERROR) > self.memory_mib


def machine(gpu: str | None, memory_gib: float | None, *, timed: bool = True) -> Machine:
    """The GPU of that name, or else the visible one, or else this host; ``timed`` says that time matters.

    Raises:
        UserError: a GPU of that name isn't known, or the memory is none.
    """
    if memory_gib is not None and memory_gib <= 0:
        raise UserError(f"--memory-gib {memory_gib:g} leaves nothing to plan with: give the memory of one device.")
    asked_mib = None if memory_gib is None else memory_gib * 1024
    device = default_device()
    if gpu is None and device.type == "cpu":
        rate = _host_flop_per_s() * _HOST_SHARE if timed else 0.0
        text = f"{rate / 1e12:.3f} TFLOP/s: {_HOST_SHARE:.0%} of a product timed just now (assumption)"
        return Machine(device_name(device), "cpu", asked_mib or host_mib(), rate, text, fast_dtype(device))
    name = gpu or device_name(device)
    peak = peak_tflop_per_s(name)
    if gpu is not None and (peak is None or gpu not in _GPU_MIB):
        raise UserError(f"--gpu {gpu} is not a GPU that alambique has figures of{did_you_mean(gpu, _GPU_MIB)}")
    mib = asked_mib or (_GPU_MIB[gpu] if gpu else torch.cuda.get_device_properties(device).total_memory / 2**20)
    text = f"{_GPU_SHARE:.0%} of {peak} TFLOP/s (assumption)" if peak else "its peak is not known, so times are not"
    return Machine(name, "cuda", mib, (peak or 0.0) * 1e12 * _GPU_SHARE, text, "bfloat16")


def host_mib() -> float:
    """Memory of this host, or less where a container may use less."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP.read_text().strip() if _CGROUP.is_file() else "max"
    return (pages if limit == "max" else min(pages, int(limit))) / 2**20


def _host_flop_per_s() -> float:
    """The best of a few products, in the precision that this host multiplies fastest; a tenth of a second."""
    dtype = getattr(torch, fast_dtype(torch.device("cpu")))
    n, d, m = _GEMM
    left_ND, right_DM = torch.zeros(n, d, dtype=dtype), torch.zeros(d, m, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + 0.1
    while time.perf_counter() < end:
        started = time.perf_counter()
        torch.mm(left_ND, right_DM)
        best = min(best, time.perf_counter() - started)
    return 2 * n * d * m / best


def gib(mib: float) -> str:
    """MiB as GiB, to three digits."""
    return f"{mib / 1024:.3g}" if mib < 1024 * 1000 else f"{mib / 1024:,.0f}"
