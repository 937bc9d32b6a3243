"""Everything that computes a loss from hidden states: this library's paths, the plain dense loss, and peers.

A contender that can't run on a device says why; a peer whose job isn't quite ours says what it does instead.

Dimension letters: N tokens, D hidden size, V vocabulary, K kept entries.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from alambique.losses.config import LossConfig
from alambique.losses.distillation import PATHS, distillation_loss
from benchmarks import baselines
from benchmarks.problems import Problem

_TEACHER_HIDDEN = 64  # a teacher head this small makes its product negligible beside the student's


@dataclass(frozen=True)
class Contender:
    """A way to the loss.

    Attributes:
        loss: problem to a differentiable scalar.
        job: what it computes, where that isn't the forward KL with a tail bucket against top-K.
        refuses: why it can't run on a device, or None.
    """

    loss: Callable[[Problem], Tensor]
    job: str = ""
    refuses: Callable[[torch.device], str | None] = lambda device: None


def ours(impl: str, **settings: object) -> Contender:
    """One of ``distillation_loss``'s paths."""
    config = LossConfig.model_validate(settings)

    def loss(problem: Problem) -> Tensor:
        return distillation_loss(problem.hidden_ND, problem.weight_VD, problem.signal, config=config, impl=impl).loss

    def refuses(device: torch.device) -> str | None:
        if impl not in PATHS:
            return f"impl {impl} does not exist here"
        if impl == "triton" and device.type == "cpu":
            return "kernels run on a CPU only under Triton's interpreter, whose time means nothing"
        return None

    return Contender(loss, refuses=refuses)


OURS: dict[str, Contender] = {
    "dense": ours("dense"),
    "forward_chunked": ours("forward_chunked"),
    "recompute": ours("recompute"),
    "fused": ours("fused"),
    "fused_compact": ours("fused", weight_grad="compact"),
    "triton": ours("triton"),
    "triton_compact": ours("triton", weight_grad="compact"),
    "tiled": ours("tiled", weight_grad="compact"),
}
BASELINES: dict[str, Contender] = {
    "dense_plain": Contender(
        lambda problem: baselines.dense_loss(problem.hidden_ND, problem.weight_VD, problem.signal)
    ),
}


def _liger_jsd(problem: Problem) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    hidden_ND, weight_VD = problem.hidden_ND, problem.weight_VD
    teacher_ND = hidden_ND.detach()[:, :_TEACHER_HIDDEN].contiguous()
    teacher_VD = weight_VD.detach()[:, :_TEACHER_HIDDEN].contiguous()
    chunked = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False)
    loss: Tensor = chunked(hidden_ND, weight_VD, teacher_ND, teacher_VD, problem.labels_N)
    return loss


def _liger_kl(problem: Problem) -> Tensor:
    from liger_kernel.transformers.fused_linear_kl_div import LigerFusedLinearKLDivLoss

    weight_VD = problem.weight_VD
    target_NV = torch.full(
        (problem.hidden_ND.shape[0], weight_VD.shape[0]), 1.0 / weight_VD.shape[0], dtype=weight_VD.dtype,
        device=weight_VD.device,
    )  # fmt: skip
    loss: Tensor = LigerFusedLinearKLDivLoss(accum_dtype=torch.float32)(problem.hidden_ND, weight_VD, target_NV)
    return loss


def _torch_lce(problem: Problem) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    loss: Tensor = torch.nn.functional.linear_cross_entropy(
        problem.hidden_ND, problem.weight_VD, problem.labels_N, options=options
    )
    return loss


def _cce(problem: Problem) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    impl = "cce" if problem.hidden_ND.is_cuda else "torch_compile"
    loss: Tensor = linear_cross_entropy(problem.hidden_ND, problem.weight_VD, problem.labels_N, impl=impl)
    return loss


def _needs(package: str, gpu: bool = False) -> Callable[[torch.device], str | None]:
    def refuses(device: torch.device) -> str | None:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install 'alambique[bench]')"
        return "its kernels are for GPUs" if gpu and device.type != "cuda" else None

    return refuses


def _needs_torch_lce(device: torch.device) -> str | None:
    absent = not hasattr(torch.nn, "LinearCrossEntropyOptions")
    return f"torch {torch.__version__} has no chunked linear_cross_entropy (2.13 does)" if absent else None


PEERS: dict[str, Contender] = {
    "liger": Contender(
        _liger_jsd,
        "chunked JSD at beta 0 (forward KL) against a dense teacher given as hidden states and head; the teacher's "
        f"hidden size is {_TEACHER_HIDDEN}, so that its product costs nothing, and its own cross-entropy is weighted 0",
        _needs("liger_kernel"),
    ),
    "liger_kl": Contender(
        _liger_kl,
        "FusedLinearKLDiv against a dense [N, V] target, which it must be given",
        _needs("liger_kernel", True),
    ),
    "torch_lce": Contender(_torch_lce, "cross-entropy with labels alone, no teacher", _needs_torch_lce),
    "cce": Contender(
        _cce,
        "cross-entropy with labels alone, no teacher; on a CPU its compiled dense fallback, not its kernels",
        _needs("cut_cross_entropy"),
    ),
}
ALL: dict[str, Contender] = {**BASELINES, **OURS, **PEERS}


def failures(name: str) -> tuple[type[Exception], ...]:
    """What a peer may raise without stopping a benchmark: it has conditions of its own. Ours may raise nothing."""
    if name not in PEERS:
        return ()
    plain = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, ImportError, NotImplementedError)
    if importlib.util.find_spec("triton") is None:
        return plain
    from triton.errors import TritonError

    return (*plain, TritonError)


def first_line(error: Exception) -> str:
    """An error in a note's length."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def available(names: list[str], device: torch.device) -> tuple[list[str], list[str]]:
    """Those of ``names`` that run on ``device``, and notes on the others and on peers' jobs."""
    notes = []
    for name in names:
        why = ALL[name].refuses(device)
        if why is not None:
            notes.append(f"{name}: not run here: {why}.")
        elif ALL[name].job:
            notes.append(f"{name}: {ALL[name].job}.")
    return [name for name in names if ALL[name].refuses(device) is None], notes
