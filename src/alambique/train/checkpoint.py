"""Checkpoints that a kill can't spoil: whole folders of safetensors and JSON, each file hashed; the last two are kept.

Several processes make the same files as one: rank 0 collects whole tensors and writes, each process reads its part. So
a run goes on with any number of processes (docs/decisions/0005).

The order of rows and torch's random numbers are functions of seed and step (:mod:`alambique.train.data`,
:mod:`alambique.train.loop`), so weights, optimiser state and the step number are the whole state of a run.
"""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from alambique.core.errors import UserError
from alambique.core.files import atomic_folder, read_json, read_manifest, sha256_file, write_json, write_manifest
from alambique.train.sharded import ALONE, Processes, collect, part_of

_KEPT = 2  # a damaged one must have a predecessor
_WEIGHTS, _OPTIMISER, _STATE = "weights.safetensors", "optimiser.safetensors", "state.json"
_BYTES_PER_PARAMETER = 12  # fp32 weight and AdamW's two moments


def bytes_needed(model: nn.Module, folder: Path, spared: int = 0) -> int:
    """Disk space that checkpoints may still take: those kept and one being written, less what is there already.

    ``spared`` more than the last two are kept.
    """
    parameters = sum(p.numel() for p in model.parameters())
    there = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return max(0, (_KEPT + spared + 1) * _BYTES_PER_PARAMETER * parameters - there)


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    state: dict[str, Any],
    spare: int | None = None,
    processes: Processes = ALONE,
) -> None:
    """Write the checkpoint of ``step`` completed steps into ``folder``, atomically, then drop all but the last two.

    ``state`` is any JSON value that the caller wants back from :func:`restore`. The checkpoint of step ``spare`` stays.
    All ``processes`` must call this, and leave it when the checkpoint is there.
    """
    with atomic_folder(path_of(folder, step)) if processes.leads else contextlib.nullcontext() as scratch:
        for name, tensors in ((_WEIGHTS, weights(model)), (_OPTIMISER, _optimiser_tensors(model, optimiser))):
            whole = collect(tensors, processes.leads)
            if scratch is not None:
                save_file(whole, scratch / name)
        if scratch is not None:
            write_json(scratch / _STATE, state)
            write_manifest(scratch, {"step": step})
    for old in _newest_first(folder)[_KEPT:] if processes.leads else ():
        if spare is None or old != path_of(folder, spare):
            shutil.rmtree(old)
    processes.any(False)


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` completed steps is, or would be."""
    return folder / f"step_{step:08d}"


def is_there(folder: Path, step: int) -> bool:
    """Whether there is a checkpoint of ``step``."""
    return path_of(folder, step).is_dir()


def load_weights(folder: Path, step: int, model: nn.Module) -> None:
    """Give ``model`` the weights of the checkpoint of ``step``.

    Raises:
        UserError: it is damaged.
    """
    path = path_of(folder, step)
    damage = _damage(path)
    if damage is not None:
        raise UserError(
            f"checkpoint {path}, the best one, is damaged ({damage}): set distill.keep: last, or delete {folder} to "
            "train again."
        )
    _load_weights(path, model)


def restore(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, processes: Processes = ALONE
) -> dict[str, Any] | None:
    """Load the newest whole checkpoint into ``model`` and ``optimiser``; returns its ``state``, or None if none is.

    A damaged one is found by its hashes, named on stderr, removed, and the one before it is used. What a kill left
    half-written is removed as well.
    """
    step = processes.of_first(_newest_whole_step(folder) if processes.leads else None)
    if step is None:
        return None
    path = path_of(folder, step)
    _load(path, model, optimiser)
    state: dict[str, Any] = read_json(path / _STATE)
    return state


def _newest_whole_step(folder: Path) -> int | None:
    for leftover in folder.glob(".step_*.part"):
        shutil.rmtree(leftover)
    for path in _newest_first(folder):
        damage = _damage(path)
        if damage is None:
            return int(path.name.removeprefix("step_"))
        print(f"warning: checkpoint {path} is damaged ({damage}); using the one before it", file=sys.stderr)
        shutil.rmtree(path)
    return None


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step_*"), reverse=True)


def _damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint, or None."""
    try:
        manifest = read_manifest(path, "")
    except UserError as error:
        return str(error)
    for name in (_WEIGHTS, _OPTIMISER, _STATE):
        listed = manifest["files"].get(name)
        if listed is None or not (path / name).is_file():
            return f"{name} is missing"
        if sha256_file(path / name) != listed["sha256"]:
            return f"{name} doesn't match its hash"
    return None


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each once though two names may share it, and the buffers that a model folder would hold."""
    persistent = model.state_dict(keep_vars=True).keys()
    yield from ((name, p.detach()) for name, p in model.named_parameters())
    yield from ((name, b) for name, b in model.named_buffers() if name in persistent)


def _optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            yield f"{name}/{key}", value


def _load_weights(path: Path, model: nn.Module) -> None:
    """Copy tensors into the memory that the fresh run allocated, so that alignment can't change a rounding."""
    with torch.no_grad(), safe_open(path / _WEIGHTS, "pt") as saved:
        for name, value in weights(model):
            value.copy_(part_of(saved.get_tensor(name), value))


def _load(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    _load_weights(path, model)
    parameters = dict(model.named_parameters())
    with safe_open(path / _OPTIMISER, "pt") as saved:
        for name in saved.keys():  # noqa: SIM118 not a mapping
            owner, _, key = name.rpartition("/")
            parameter, value = parameters[owner], saved.get_tensor(name)
            part = part_of(value, parameter) if value.ndim else value  # the step number is one for all parts
            optimiser.state[parameter][key] = part.to(parameter.device, copy=True)
