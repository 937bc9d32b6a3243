"""Counting floating-point operations without disturbing them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

# torch's table leaves out the attention kernel that a CPU uses.
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up, in ``flops``, the products and attentions that run inside, by the formulas of torch.utils.flop_counter.

    torch's own FlopCounterMode decomposes operators on the way, which changes the rounding of gradients: a run that
    counts must give the same bits as one that resumed and doesn't. Triton kernels aren't seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and count it."""
        result = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result
