"""One of two processes of test_parallel.py: run with torch's gloo, results saved for the test to compare."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from alambique import LossConfig, distillation_loss
from tests.losses.problems import Case, grads, make_case

CONFIGS = {
    "plain": LossConfig(ce_weight=0.3, z_loss=0.01, chunk_budget_mib=0.004),
    "tempered": LossConfig(divergence="jsd", temperature=2.0, logit_softcap=5.0, chunk_budget_mib=0.004),
}


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
            result, gradients = grads(mine, config, impl, vocab_group=dist.group.WORLD)
            tensors = [result.loss.detach(), result.student_mass, *gradients]
            found |= {f"{name}.{impl}.{i}": tensor.contiguous() for i, tensor in enumerate(tensors)}
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
        model.reshard()
        with CommDebugMode() as comm:
            result = distillation_loss(
                hidden, model.table, case.signal[rows], vocab_size=case.vocab, denominator=8.0, impl=impl
            )
            gathers = dict(comm.get_comm_counts())
        (result.loss * 2).backward()  # FSDP averages over two processes what is to be summed
        found[f"{impl}.loss"] = result.loss.detach()
        found[f"{impl}.table"] = model.table.grad.full_tensor()
        found[f"{impl}.layer"] = model.layer.weight.grad.full_tensor()
        found[f"{impl}.gathers"] = torch.tensor(sum(gathers.values()))
    save_file(found, out / f"fsdp.{rank}.safetensors")


if __name__ == "__main__":
    rank, out = int(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{out / 'rendezvous'}", rank=rank, world_size=2)
    vocabulary(rank, out)
    fsdp(rank, out)
    dist.destroy_process_group()
