"""Inputs of the loss benchmarks: a head, hidden states, and a teacher's top-K signal.

Dimension letters: N tokens, D hidden size, V vocabulary, K kept entries.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from alambique.core.signal import TopKSignal
from benchmarks.cases import TOP_K, Shape

LOGIT_STD = 4.0  # assumption: spread of a trained model's logits at one position
NEAR_NOISE = 0.1  # assumption: teacher's logits around the student's after healing; about 0.005 nats of KL


@dataclass
class Problem:
    """One call of the loss; ``hidden_ND`` and ``weight_VD`` want gradients."""

    hidden_ND: Tensor
    weight_VD: Tensor
    signal: TopKSignal
    labels_N: Tensor

    def tensors(self) -> Iterator[Tensor]:
        """All inputs."""
        yield from (self.hidden_ND, self.weight_VD, self.labels_N)
        yield from (self.signal.ids_NK, self.signal.logprobs_NK, self.signal.tail_mass_N)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Those of the last step."""
        assert self.hidden_ND.grad is not None
        assert self.weight_VD.grad is not None
        return self.hidden_ND.grad, self.weight_VD.grad

    def clear_gradients(self) -> None:
        """Drop the gradients of the last step."""
        self.hidden_ND.grad = self.weight_VD.grad = None


def make(shape: Shape, dtype: torch.dtype, device: torch.device | str, top_k: int = TOP_K, seed: int = 0) -> Problem:
    """Random inputs; on the meta device shapes alone.

    The signal's entries are distinct and have no relation to the student, which costs the same time as any others.
    """
    n, d, v = shape.tokens, shape.hidden, shape.vocab
    generator = None if torch.device(device).type == "meta" else torch.Generator(device).manual_seed(seed)
    hidden_ND = torch.randn(n, d, generator=generator, device=device).to(dtype)
    weight_VD = torch.randn(v, d, generator=generator, device=device).mul_(LOGIT_STD / d**0.5).to(dtype)
    first_N1 = torch.randint(v, (n, 1), generator=generator, device=device)
    ids_NK = (first_N1 + torch.arange(top_k, device=device) * (v // top_k)) % v
    log_p_NL = torch.randn(n, top_k + 1, generator=generator, device=device).mul_(2).sort(1, descending=True)[0]
    log_p_NL = log_p_NL.log_softmax(1)
    signal = TopKSignal(ids_NK.int(), log_p_NL[:, :-1].half(), log_p_NL[:, -1].exp())
    labels_N = ids_NK[:, 0].clone()
    return Problem(hidden_ND.requires_grad_(), weight_VD.requires_grad_(), signal, labels_N)


def make_related(shape: Shape, near: bool, device: torch.device, top_k: int = TOP_K, seed: int = 0) -> Problem:
    """A bfloat16 problem whose teacher is the student's own distribution, slightly disturbed, or one of its own."""
    problem = make(shape, torch.bfloat16, device, top_k, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    noise_NV = torch.randn(shape.tokens, shape.vocab, generator=generator, device=device)
    teacher_NV = noise_NV.mul_(NEAR_NOISE if near else LOGIT_STD)
    if near:
        teacher_NV += problem.hidden_ND.detach().float() @ problem.weight_VD.detach().float().t()
    logprobs_NK, ids_NK = torch.log_softmax(teacher_NV.double(), 1).topk(top_k, 1)
    tail_N = 1 - logprobs_NK.exp().sum(1)
    problem.signal = TopKSignal(ids_NK.int(), logprobs_NK.half(), tail_N.float())
    problem.labels_N = ids_NK[:, 0].clone()
    return problem
