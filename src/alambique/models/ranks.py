"""Several processes for one model: starting them, their process group, and tensor parallel on top of it.

In tensor parallel transformers splits every layer between the processes, one for each GPU. Only rank 0 has rows, the
head and somewhere to write; the others follow its forward passes and know nothing but what it sends them.

Dimensions: B rows, S positions.
"""

import ctypes
import hashlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from alambique.core.errors import UserError

if TYPE_CHECKING:
    from alambique.models.load import SplitModel

_STOP, _LOAD = (0, 0), (-1, -1)  # sent in place of the shape of the next rows
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PATIENCE = timedelta(hours=2)  # source: transformers' own, because processes load at different speeds


def local_rank() -> int | None:
    """The number of this process among those that :func:`launch` started, or None."""
    rank = os.environ.get("LOCAL_RANK")
    return None if rank is None else int(rank)


def launch(processes: int, *words: str, grace_seconds: int = 5) -> int:
    """Run ``python WORDS`` in ``processes`` processes as torchrun does.

    Called instead of torchrun's command line because that one hides exit statuses behind its own. If one process ends
    badly the others are stopped.

    Args:
        processes: how many.
        words: what each runs.
        grace_seconds: from a signal to this process until they are killed. 5 is an assumption, for work that is on disk
            as soon as it is finished.

    Returns:
        0, or the exit status of a process that failed (128 + N for signal N), a refusal (2) before any other.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes say what is wrong
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port, as torchrun --standalone
        run_id=str(os.getpid()),
        max_restarts=0,  # a retry is the business of whoever started this
        local_addr="localhost",
        shutdown_timeout=grace_seconds,
    )
    try:
        elastic_launch(config, sys.executable)(*words)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        code = 2 if 2 in codes else error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


class Group:
    """The process group of the processes that :func:`launch` or torchrun started.

    Args:
        device: of this process. Tensors on a GPU go by NCCL, those on the CPU by gloo.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Self:
        if sys.platform == "linux":  # torchrun starts each in a session of its own, where nobody would look for it
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)
        self._store, rank, size = next(rendezvous("env://", timeout=_PATIENCE))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=self._store,
            rank=rank,
            world_size=size,
            device_id=self._device if on_gpu else None,
            timeout=_PATIENCE,
        )
        self.leads = rank == 0
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            dist.destroy_process_group()

    def is_first(self, sentence: str) -> bool:
        """Whether no other process has asked this about ``sentence``: what all have to say, one says."""
        return bool(self._store.add(hashlib.sha256(sentence.encode()).hexdigest(), 1) == 1)


class Ranks(Group):
    """The processes of tensor parallel; leaving it as rank 0 sends the others home."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._in_step = True  # false where one process may be in a forward pass, or in loading, that rank 0 has left

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self.leads and self._in_step:
            self._send(_STOP)
        super().__exit__(kind, value, tb)

    def lead(self, load: "Callable[[], SplitModel]") -> "Leader":
        """Load the model in every process; to be called by rank 0."""
        self._send(_LOAD)
        self._in_step = False
        model = load()
        self._in_step = True
        return Leader(model, self)

    def follow(self, load: "Callable[[], SplitModel]") -> None:
        """Run the forward passes of rank 0, until it has done; to be called by the others."""
        if self._receive() == _STOP:
            return
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # rank 0 shows one
        model = load()
        with torch.inference_mode():
            while (shape := self._receive()) != _STOP:
                input_ids_BS, document_ids_BS = self.exchanged(torch.empty(2, *shape, dtype=torch.int32))
                model.hidden(input_ids_BS, document_ids_BS)

    def hidden(self, model: "SplitModel", input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        """A forward pass in step with the others; to be called by rank 0.

        Raises:
            UserError: out of memory: the others may not be, so no smaller batch can be tried.
        """
        self._send(tuple(input_ids_BS.shape))
        self._in_step = False
        try:
            self.exchanged(torch.stack([input_ids_BS, document_ids_BS]))
            hidden_BSD = model.hidden(input_ids_BS, document_ids_BS)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{input_ids_BS.numel()} tokens don't fit in the memory of {dist.get_world_size()} tensor-parallel "
                "processes: lower teacher.batch_tokens, or raise teacher.tensor_parallel."
            ) from error
        self._in_step = True
        return hidden_BSD

    def exchanged(self, message: Tensor) -> Tensor:
        """What rank 0 holds, in every process."""
        message = message.to(self._device)
        dist.broadcast(message, src=0)
        return message

    def _send(self, shape: tuple[int, ...]) -> None:
        self.exchanged(torch.tensor(shape, dtype=torch.int64))

    def _receive(self) -> tuple[int, ...]:
        return tuple(self.exchanged(torch.zeros(2, dtype=torch.int64)).tolist())


class Leader:
    """A model that is split over processes, as rank 0 sees it: backbone and head apart, as in ``SplitModel``."""

    def __init__(self, model: "SplitModel", ranks: Ranks) -> None:
        self.head_weight_VD, self.head_bias_V = model.head_weight_VD, model.head_bias_V
        self.logit_softcap, self.logit_scale = model.logit_softcap, model.logit_scale
        self._model, self._ranks = model, ranks

    def hidden(self, input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        """As ``SplitModel.hidden``, computed by all processes."""
        return self._ranks.hidden(self._model, input_ids_BS, document_ids_BS)

    def recording(self, layers: Sequence[int]) -> AbstractContextManager[dict[int, Tensor]]:
        """As ``SplitModel.recording``: every process has the whole of a layer's output."""
        return self._model.recording(layers)
