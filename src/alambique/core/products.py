"""Which matrix products a device has, and float32 results of bfloat16 operands on a CPU."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Literal

import torch


@functools.cache
def multiplies(dtype: torch.dtype, device_type: str) -> bool:
    """Whether the device has matrix products of this dtype; a CPU without them emulates a product in 8 times float32's.

    Source: measured, torch 2.13 on an AVX2 processor, 512 × 576 × 49,152 in bfloat16.
    """
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    probe = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, probe)())  # type: ignore[no-untyped-call]


def fast_dtype(device: torch.device) -> Literal["bfloat16", "float32"]:
    """What ``auto`` means where a dtype is asked for: bfloat16, or float32 on a CPU that would emulate it."""
    return "bfloat16" if multiplies(torch.bfloat16, device.type) else "float32"


@contextlib.contextmanager
def bfloat16_operands() -> Iterator[None]:
    """On a CPU, take the operands of float32 products as bfloat16 values, which they must be; sums stay float32.

    torch 2.13 has no product on a CPU that returns float32 from bfloat16 tensors, but oneDNN has one behind this
    switch. It rounds each operand to bfloat16, which changes nothing in one that was upcast from it, so that the result
    is that of the float32 product to the order of sums. Source: measured, 256 × 576 × 49,152 on an AMX processor: 2.5
    times float32's speed, the largest error against float64 half of float32's. The switch is one for the process:
    another thread's float32 products are rounded meanwhile.
    """
    if not multiplies(torch.bfloat16, "cpu"):
        yield
        return
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before
