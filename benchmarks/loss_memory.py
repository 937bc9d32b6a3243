"""Peak memory of the loss, its inputs included, by number of tokens; counted on meta tensors, measured on a GPU.

Last line: ``peak_gib.<contender>.<tokens>`` and ``retained_gib`` alike (what lives between forward and backward besides
the inputs); on a GPU both are measured, and ``counted_gib`` has the counts.
"""

from typing import Any

import torch

from alambique.planning.counting import CountedMemory
from benchmarks import problems
from benchmarks.cases import LLAMA31_8B, Options, Outcome, Shape
from benchmarks.contenders import ALL, available, failures, first_line

TOKENS = (8192, 16_384, 32_768, 65_536, 131_072, 262_144)
CONTENDERS = [
    "dense", "dense_plain", "forward_chunked", "recompute", "fused", "fused_compact", "triton", "triton_compact",
    "tiled", "liger", "torch_lce",
]  # fmt: skip
MEASURED = [*CONTENDERS, "liger_kl", "cce"]
_GIB = 2**30


def run(options: Options) -> Outcome:
    """Count, and on a GPU measure as well; ``only`` keeps contenders."""
    out = Outcome()
    tokens = (256, 512) if options.quick else TOKENS
    on_gpu = options.device.type == "cuda"
    names, out.notes = available(
        options.keep(MEASURED if on_gpu else CONTENDERS), options.device if on_gpu else torch.device("meta")
    )
    hidden, vocab = (64, 1024) if options.quick else LLAMA31_8B
    keys = ("counted_gib", "counted_retained_gib", "peak_gib", "retained_gib")
    found: dict[str, dict[str, dict[str, float]]] = {key: {} for key in keys}
    for name in names:
        for count in tokens:
            shape = Shape(count, hidden, vocab)
            row = _row(name, shape, options.device, out.notes)
            out.rows.append(row)
            for key in keys:
                if row[key] is not None:
                    found[key].setdefault(name, {})[str(count)] = round(row[key], 4)
    if not on_gpu:
        found["peak_gib"], found["retained_gib"] = found["counted_gib"], found["counted_retained_gib"]
    out.summary = {"method": "measured" if on_gpu else "counted", **found}
    return out


def _row(name: str, shape: Shape, device: torch.device, notes: list[str]) -> dict[str, Any]:
    counted: tuple[float, float] | tuple[None, None] = (None, None)
    measured: tuple[float, float] | tuple[None, None] = (None, None)
    try:
        counted = count_gib(name, shape)
    except failures(name) as error:
        _note(notes, f"{name} can't be counted on meta tensors: {first_line(error)}")
    if device.type == "cuda":
        try:
            measured = measure_gib(name, shape, device)
        except torch.OutOfMemoryError:
            _note(notes, f"{name} does not fit this GPU at {shape.tokens} tokens.")
        except failures(name) as error:
            _note(notes, f"{name} can't run at {shape.tokens} tokens: {first_line(error)}")
    return {
        "contender": name, "tokens": shape.tokens, "hidden": shape.hidden, "vocab": shape.vocab,
        "counted_gib": counted[0], "counted_retained_gib": counted[1],
        "peak_gib": measured[0], "retained_gib": measured[1],
    }  # fmt: skip


def _note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def count_gib(name: str, shape: Shape) -> tuple[float, float]:
    """Peak of one step with its inputs, and what is retained between forward and backward without them, in GiB."""
    problem = problems.make(shape, torch.bfloat16, "meta")
    with CountedMemory(problem.tensors()) as memory:
        inputs = memory.live_bytes
        loss = ALL[name].loss(problem)
        retained = memory.live_bytes - inputs
        loss.backward()
    return memory.peak_bytes / _GIB, retained / _GIB


def measure_gib(name: str, shape: Shape, device: torch.device) -> tuple[float, float]:
    """As ``count_gib``, by the CUDA allocator's high-water mark."""
    problem = problems.make(shape, torch.bfloat16, device)
    torch.cuda.empty_cache()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    loss = ALL[name].loss(problem)
    retained = torch.cuda.memory_allocated(device) - before
    loss.backward()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / _GIB, retained / _GIB
