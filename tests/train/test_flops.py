import torch
from torch.nn.functional import scaled_dot_product_attention

from alambique.train.flops import FlopCounter


def test_products_cost_two_per_multiply_and_backward_is_seen() -> None:
    left, right = torch.randn(3, 5, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    with FlopCounter() as counter:
        product = left @ right
        assert counter.flops == 2 * 3 * 5 * 7
        product.sum().backward()
    assert counter.flops == 3 * (2 * 3 * 5 * 7)


def test_work_inside_a_custom_function_is_seen() -> None:
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x @ x

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad @ grad

    x = torch.randn(4, 4, requires_grad=True)
    with FlopCounter() as counter:
        Squared.apply(x).sum().backward()
    assert counter.flops == 2 * (2 * 4**3)


def test_the_attention_of_a_cpu_is_counted() -> None:
    query, key, value = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    with FlopCounter() as counter:
        attended = scaled_dot_product_attention(query, key, value)
        assert counter.flops == 2 * 4 * 2 * (2 * 16 * 16 * 8)
        attended.sum().backward()
    assert counter.flops == 2 * 4 * (2 + 5) * (2 * 16 * 16 * 8)
