"""Started by test_ranks.py in two processes: rank 0 scores rows with a model that both hold half of."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from alambique.core.errors import UserError
from alambique.models.load import SplitModel, load_model
from alambique.models.ranks import Ranks

CPU = torch.device("cpu")


def load() -> SplitModel:
    model = SplitModel(load_model(Path(sys.argv[1]), dtype="float32", device=CPU, tensor_parallel=2))
    model.gather_head()
    model.check(CPU)
    return model


def lead(ranks: Ranks) -> None:
    teacher = ranks.lead(load)
    local = sum(parameter.to_local().numel() for parameter in teacher._model.model.model.layers[0].mlp.parameters())
    found = {"local": torch.tensor(local)}
    with torch.inference_mode():
        for rows in (2, 1):  # batches of different size
            ids_BS = torch.arange(rows * 12, dtype=torch.int32).reshape(rows, 12) + 5
            documents_BS = (torch.arange(12) >= 5).int().repeat(rows, 1)
            with teacher.recording([0]) as states:
                hidden_BSD = teacher.hidden(ids_BS, documents_BS)
            found[f"state_{rows}"] = states[0]
            found[f"logits_{rows}"] = hidden_BSD @ teacher.head_weight_VD.T
    save_file(found, sys.argv[2])
    if sys.argv[3] == "refuse":
        raise UserError("no more")
    if sys.argv[3] == "no memory":
        teacher._model.hidden = out_of_memory
        teacher.hidden(ids_BS, documents_BS)


def out_of_memory(*_: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


if __name__ == "__main__":
    try:
        with Ranks(CPU) as ranks:
            lead(ranks) if ranks.leads else ranks.follow(load)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
