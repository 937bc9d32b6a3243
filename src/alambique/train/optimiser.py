"""AdamW and its schedule: torch's own, with the parameter groups and the curve that language models use."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from alambique.train.config import DistillConfig


def adamw(named_parameters: Iterable[tuple[str, nn.Parameter]], config: DistillConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters: one fused kernel, and no decay on norms and biases (all of them vectors).

    A parameter that two names share (a tied head) must come once, as ``nn.Module.named_parameters`` gives it.
    """
    trainable = [p for _, p in named_parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(step: int, num_steps: int, config: DistillConfig) -> float:
    """The rate of step ``step``, counted from 0: linear warm-up to the peak, then half a cosine to the floor.

    Step ``warmup`` has the peak. No step has a rate of zero, even with a floor of zero: the curve would reach its
    ends one step before the first and one after the last.
    """
    warmup = min(math.ceil(config.warmup_ratio * num_steps), num_steps - 1)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / (num_steps - warmup)
    floor = config.min_learning_rate_ratio
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` from the next step on, in every group."""
    for group in optimiser.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their joint L2 norm is at most ``max_norm``; returns the norm before, on the device.

    A norm that is not finite stays in the returned value for the caller to find: nothing waits for the device here.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm  # of all processes
    if whole.device.type != "cpu" or not whole <= max_norm:  # on a CPU a look is free, and scaling by 1 is not
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return whole
