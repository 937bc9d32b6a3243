"""Peak memory without the memory: every storage that is alive, counted while operations run on shapes alone.

Shapes alone: tensors on the meta device, or torch's fake tensors, which have a device besides and so autocast.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages while it is active, and their peak.

    An allocator's rounding, its cache, and workspaces inside a library's kernels are not seen: what is counted is a
    lower bound that a GPU's high-water mark exceeds by a few per cent.

    Args:
        inputs: tensors that are alive before the region starts, such as the arguments of what is measured.
    """

    def __init__(self, inputs: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}  # by address, with the bytes
        self._upper_bytes = 0  # what is alive, and perhaps some that has died since it was last looked at
        self.peak_bytes = 0
        self._watch(inputs)

    @property
    def live_bytes(self) -> int:
        """Bytes that are alive now."""
        for address in [a for a, (reference, _) in self._live.items() if reference.expired()]:  # type: ignore[no-untyped-call]
            self._upper_bytes -= self._live.pop(address)[1]
        return self._upper_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and look at what it returns; its arguments are still alive, as they are on a device."""
        if func is torch.ops.aten._local_scalar_dense.default and _is_shape_alone(args[0]):
            return 1.0  # there are no values here; one that is read must not stop the count
        if func is torch.ops.aten.nonzero.default and _is_shape_alone(args[0]):  # as if nothing were zero: the most
            out = torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=args[0].device)
            self._watch([out])
            return out
        out = func(*args, **(kwargs or {}))
        self._watch(leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor))
        return out

    def _watch(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # A weak reference keeps the address from being used again, so that it identifies the storage.
            if storage._cdata not in self._live:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
                self._upper_bytes += storage.nbytes()
        if self._upper_bytes > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _is_shape_alone(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)
