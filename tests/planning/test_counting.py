import pytest
import torch

from alambique.planning.counting import CountedMemory
from benchmarks import problems
from benchmarks.cases import Shape
from benchmarks.loss_memory import count_gib

MIB = 2**20


def test_counts_what_lives_and_its_peak() -> None:
    held = torch.empty(MIB, dtype=torch.uint8, device="meta")
    with CountedMemory([held]) as memory:
        first = torch.empty(2 * MIB, dtype=torch.uint8, device="meta")
        second = first + 1
        assert memory.live_bytes == 5 * MIB
        del first
        view = second[: MIB // 2]
        del second
        assert memory.live_bytes == 3 * MIB  # a view keeps the whole storage
        del view
        assert memory.live_bytes == MIB
    assert memory.peak_bytes == 5 * MIB


def test_counts_what_autograd_saves() -> None:
    x = torch.empty(MIB // 4, device="meta", requires_grad=True)
    with CountedMemory([x]) as memory:
        y = x.exp().sum()
        assert memory.live_bytes == 2 * MIB + 4  # x, its exponential for the backward pass, and the sum
        y.backward()
        del y
        assert memory.live_bytes == 2 * MIB  # x and its gradient


def test_arguments_count_while_an_operation_runs() -> None:
    with CountedMemory() as memory:
        torch.empty(MIB, dtype=torch.uint8, device="meta").add(1)
    assert memory.peak_bytes == 2 * MIB


def test_counts_real_tensors_alike() -> None:
    with CountedMemory() as memory:
        torch.zeros(MIB, dtype=torch.uint8).add(1)
    assert memory.peak_bytes == 2 * MIB
    assert memory.live_bytes == 0


def test_reading_a_value_does_not_stop_the_count() -> None:
    with CountedMemory() as memory:
        x = torch.empty(8, device="meta")
        assert x.sum().item() == 1.0
        assert x.nonzero().shape == (8, 1)
        assert memory.live_bytes == 32
    assert memory.peak_bytes == 32 + 64  # beside the eight indices


@pytest.mark.parametrize(("name", "lowest", "highest"), [("dense_plain", 2.9, 3.4), ("fused", 0, 0.2)])
def test_the_grid_of_logits_is_seen(name: str, lowest: float, highest: float) -> None:
    shape = Shape(2048, 64, 32_768)  # 0.25 GiB of float32 logits; buffers of fused fit a budget that holds them all
    peak, retained = count_gib(name, shape)
    grid = shape.tokens * shape.vocab * 4 / 2**30
    if name == "fused":
        outputs = (shape.tokens + shape.vocab) * shape.hidden * 2 / 2**30
        assert retained == pytest.approx(outputs, rel=0.01)
    else:
        assert lowest * grid < peak < highest * grid
        assert retained > 0.9 * grid


def test_a_problem_on_meta_has_the_real_one_s_shapes() -> None:
    shape = Shape(4, 8, 256)
    for one, two in zip(
        problems.make(shape, torch.float32, "meta", 10).tensors(),
        problems.make(shape, torch.float32, "cpu", 10).tensors(),
        strict=True,
    ):
        assert one.shape == two.shape
        assert one.dtype == two.dtype
