"""One of two processes of test_parallel.py: run with torch's gloo, results saved for the test to compare."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from alambique import LossConfig, distillation_loss
from tests.losses.problems import Case, grads, make_case

CONFIGS = {
    "plain": LossConfig(ce_weight=0.3, z_loss=0.01, chunk_budget_mib=0.004),
    "tempered": LossConfig(divergence="jsd", temperature=2.0, logit_softcap=5.0, chunk_budget_mib=0.004),
    "label": LossConfig(tail="residual_to_label", ce_weight=0.3),
    "reverse": LossConfig(divergence="reverse_kl"),
}
FILTER = LossConfig(gradient_filter=0.1)


class Collectives(TorchDispatchMode):
    """Counts what is sent between processes while it is active, whoever sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # its own operations come by again, on plain tensors
        for kind in ("gather", "reduce_scatter", "allreduce"):
            if func.namespace in ("c10d", "_c10d_functional"):
                self.counts[kind] += kind in func._opname
        return func(*args, **(kwargs or {}))

    def tensor(self) -> torch.Tensor:
        return torch.tensor([self.counts[kind] for kind in ("gather", "reduce_scatter", "allreduce")])


def problem() -> Case:
    """A head of two blocks of 100 rows, the second of which is mostly padding."""
    return make_case(n=8, d=6, v=105, k=5, pad=95)


def vocabulary(rank: int, out: Path) -> None:
    case = problem()
    rows = slice(100 * rank, 100 * rank + 100)
    mine = replace(case, weight=case.weight[rows], bias=case.bias[rows])
    found = {}
    for name, config in CONFIGS.items():
        for impl in ("fused", "recompute"):
            with Collectives() as sent:
                result, gradients = grads(mine, config, impl, vocab_group=dist.group.WORLD)
            tensors = [result.loss.detach(), result.student_mass, *gradients]
            found |= {f"{name}.{impl}.{i}": tensor.contiguous() for i, tensor in enumerate(tensors)}
            found[f"{name}.{impl}.sent"] = sent.tensor()
    result, gradients = grads(mine, FILTER, "auto", vocab_group=dist.group.WORLD)
    found |= {"filter.error": result.filter_error, "filter.hidden": gradients[0]}
    save_file(found, out / f"vocabulary.{rank}.safetensors")


class Tied(nn.Module):
    """Embedding, one layer, and a head that is the embedding."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.table = nn.Parameter(case.weight.clone())
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-1, 1, 36).view(6, 6))
            self.layer.bias.zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.embedding(ids, self.table))


def fsdp(rank: int, out: Path) -> None:
    case = problem()
    rows = slice(4 * rank, 4 * rank + 4)
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for impl in ("fused", "recompute", "tiled", "dense"):
        model = Tied(case)
        fully_shard(model, mesh=mesh)
        hidden = model(torch.arange(8)[rows])
        model.reshard()  # the head is a DTensor again
        with Collectives() as sent:
            result = distillation_loss(
                hidden, model.table, case.signal[rows], vocab_size=case.vocab, denominator=8.0, impl=impl
            )
            found[f"{impl}.sent"] = sent.tensor()
        (result.loss * 2).backward()  # FSDP averages over two processes what is to be summed
        found |= gathered(model, result.loss, impl)
    save_file(found, out / f"fsdp.{rank}.safetensors")


def accumulated(rank: int, out: Path) -> None:
    """One optimizer step of two micro-batches, as FSDP2 has it: parameters stay whole, one reduction at the end."""
    case = problem()
    model = Tied(case)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.set_reshard_after_backward(False)
    total = torch.zeros((), dtype=torch.float64)
    with Collectives() as sent:
        for micro in (0, 1):
            rows = slice(4 * rank + 2 * micro, 4 * rank + 2 * micro + 2)
            model.set_requires_gradient_sync(micro == 1)
            hidden = model(torch.arange(8)[rows])
            result = distillation_loss(
                hidden, model.table, case.signal[rows], vocab_size=case.vocab, denominator=8.0, impl="fused"
            )
            (result.loss * 2).backward()
            total += result.loss.detach()
    model.reshard()
    save_file({**gathered(model, total, "fused"), "sent": sent.tensor()}, out / f"accumulated.{rank}.safetensors")


def replicated(rank: int, out: Path) -> None:
    """DistributedDataParallel around what makes the hidden states; the head is one of its parameters."""
    case = problem()
    rows = slice(4 * rank, 4 * rank + 4)
    wrapped = nn.parallel.DistributedDataParallel(Tied(case))
    hidden = wrapped(torch.arange(8)[rows])
    result = distillation_loss(
        hidden, wrapped.module.table, case.signal[rows], vocab_size=case.vocab, denominator=8.0, impl="fused"
    )
    (result.loss * 2).backward()
    save_file(gathered(wrapped.module, result.loss, "fused"), out / f"replicated.{rank}.safetensors")


def gathered(model: Tied, loss: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """What one process knows after a step."""
    found = {"loss": loss.detach(), "table": model.table.grad, "layer": model.layer.weight.grad}
    return {f"{name}.{key}": x.full_tensor() if isinstance(x, DTensor) else x for key, x in found.items()}


if __name__ == "__main__":
    rank, out = int(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{out / 'rendezvous'}", rank=rank, world_size=2)
    vocabulary(rank, out)
    fsdp(rank, out)
    accumulated(rank, out)
    replicated(rank, out)
    dist.destroy_process_group()
