from typing import Any

import pytest
import torch

from alambique.core import products
from alambique.core.products import bfloat16_operands, fast_dtype, multiplies

CPU = torch.device("cpu")


def test_the_fast_dtype_is_one_that_the_device_multiplies() -> None:
    for probe, has in (("_is_mkldnn_bf16_supported", torch.bfloat16), ("_is_mkldnn_fp16_supported", torch.float16)):
        assert multiplies(has, "cpu") == getattr(torch.ops.mkldnn, probe)()
    assert multiplies(torch.float32, "cpu")
    assert multiplies(torch.bfloat16, "cuda")
    assert fast_dtype(torch.device("cuda")) == "bfloat16"
    assert fast_dtype(CPU) == ("bfloat16" if multiplies(torch.bfloat16, "cpu") else "float32")


def test_products_of_bfloat16_values_stay_those_of_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(33, 128, generator=generator).bfloat16().float()
    right = torch.randn(128, 257, generator=generator).bfloat16().float()
    exact = left.double() @ right.double()
    with bfloat16_operands():
        found = left @ right
    assert (found - exact).abs().max() <= 1e-6 * (left.abs().double() @ right.abs().double()).max()


def test_the_switch_goes_back_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiplies", lambda dtype, device_type: True)
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, inside = switch.fp32_precision, []

    def fail() -> None:
        with bfloat16_operands():
            inside.append(switch.fp32_precision)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == ["bf16"]
    assert switch.fp32_precision == before
    assert torch.get_float32_matmul_precision() == "highest"  # raises if old and new settings are mixed


def test_a_processor_without_such_products_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiplies", lambda dtype, device_type: False)
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with bfloat16_operands():
        assert switch.fp32_precision != "bf16"
