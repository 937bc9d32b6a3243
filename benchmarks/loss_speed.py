"""Time of one step of the loss, forward and backward, against what else computes it, side by side in one process.

Last line: ``ratio_to.<contender>.<shape>.<dtype>``, our median time over theirs (less than 1 is faster), where ours is
the path that ``ours`` names; ``filtered`` has the gradient filter on real logits, or null where those can't be had.

``--only`` keeps shapes (as ``2048x576x49152``), dtypes (``float32``) or contenders, whichever it names; with it the
filter is measured if it names ``filtered``.
"""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from alambique.core.errors import UserError
from alambique.losses.distillation import PATHS
from benchmarks import baselines, problems, timing
from benchmarks.cases import LLAMA31_8B, LLAMA32_1B, SMOLLM2_135M, Options, Outcome, Shape
from benchmarks.contenders import ALL, Contender, available, failures, first_line, ours
from benchmarks.problems import Problem

CONTENDERS = [
    "fused", "triton", "tiled", "recompute", "forward_chunked", "dense", "dense_plain", "liger", "liger_kl",
    "torch_lce", "cce",
]  # fmt: skip
CPU_SHAPES = (*(Shape(tokens, *SMOLLM2_135M) for tokens in (512, 1024, 2048)), Shape(1024, *LLAMA32_1B))
GPU_SHAPES = tuple(Shape(tokens, *LLAMA31_8B) for tokens in (1024, 8192, 32_768))
GRADIENT_FILTER = 0.003  # relative error of the logits' gradient
_FILTER_ROWS = 2048  # tokens of real text
QUICK_SHAPES = (Shape(256, 64, 1024),)


def run(options: Options) -> Outcome:
    """Time all contenders at all shapes and dtypes."""
    on_gpu = options.device.type == "cuda"
    names, notes = available(options.keep(CONTENDERS), options.device)
    ours_name = "triton" if on_gpu and "triton" in PATHS else "fused"
    if ours_name not in names:
        names.insert(0, ours_name)
    out = Outcome(notes=notes, summary={"ours": ours_name, "ratio_to": {}})
    shapes = {str(shape): shape for shape in (QUICK_SHAPES if options.quick else GPU_SHAPES if on_gpu else CPU_SHAPES)}
    dtypes = {_name(dtype): dtype for dtype in ((torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16))}
    for shape in options.keep(shapes) if options.only != ("filtered",) else ():
        for dtype in options.keep(dtypes):
            _compare(shapes[shape], dtypes[dtype], ours_name, names, options, out)
    out.summary["filtered"] = _filtered(options, out)
    return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(
    shape: Shape, dtype: torch.dtype, ours_name: str, names: list[str], options: Options, out: Outcome
) -> None:
    problem = problems.make(shape, dtype, options.device)
    steps: dict[str, Callable[[], object]] = {"three_gemms": _three_gemms(problem)}
    steps["three_gemms"]()
    for name in names:
        step = _step(problem, ALL[name])
        try:
            step()
        except torch.OutOfMemoryError:
            out.notes.append(f"{name} does not fit at {shape}.")
            torch.cuda.empty_cache()
        except failures(name) as error:
            out.notes.append(f"{name} can't do {shape} in {_name(dtype)}: {first_line(error)}")
        else:
            steps[name] = step
    seconds = timing.interleaved(steps, options.repeats, options.device)
    for name, runs in seconds.items():
        against = timing.ratio(seconds[ours_name], runs)
        out.rows.append(
            {
                "contender": name, "shape": str(shape), "dtype": _name(dtype), "median_s": statistics.median(runs),
                "min_s": min(runs), "max_s": max(runs), "ours_to_theirs": against, "repeats": options.repeats,
                "clock": timing.clock(options.device),
            }
        )  # fmt: skip
        if name != ours_name:
            per_shape = out.summary["ratio_to"].setdefault(name, {}).setdefault(str(shape), {})
            per_shape[_name(dtype)] = round(against, 4)


def _step(problem: Problem, contender: Contender) -> Callable[[], object]:
    def step() -> None:
        problem.clear_gradients()
        contender.loss(problem).backward()
        problem.clear_gradients()

    return step


def _three_gemms(problem: Problem) -> Callable[[], object]:
    hidden_ND, weight_VD = problem.hidden_ND.detach(), problem.weight_VD.detach()
    logits_NV = torch.empty(hidden_ND.shape[0], weight_VD.shape[0], dtype=hidden_ND.dtype, device=hidden_ND.device)
    return lambda: baselines.three_gemms(hidden_ND, weight_VD, logits_NV)


def _filtered(options: Options, out: Outcome) -> dict[str, float] | None:
    """The gradient filter on real logits in float32, where columns differ as they do in training."""
    if options.quick or (options.only and "filtered" not in options.only):
        return None
    try:
        from benchmarks import embedded

        problem = embedded.problem(_FILTER_ROWS, options.device)
    except (UserError, ModuleNotFoundError) as error:
        out.notes.append(f"filtered: {error}")
        return None
    exact, filtered = ours("fused"), ours("fused", gradient_filter=GRADIENT_FILTER)
    gradients = [_gradients(problem, contender) for contender in (exact, filtered)]
    errors = [float((b - a).norm() / a.norm()) for a, b in zip(*gradients, strict=True)]
    steps = {"three_gemms": _three_gemms(problem), "fused": _step(problem, exact), "filtered": _step(problem, filtered)}
    seconds = timing.interleaved(steps, options.repeats, options.device)
    against = timing.ratio(seconds["filtered"], seconds["three_gemms"])
    shape = f"{_FILTER_ROWS}x{problem.weight_VD.shape[1]}x{problem.weight_VD.shape[0]}"
    for name, runs in seconds.items():
        out.rows.append(
            {
                "contender": f"{name}, real logits", "shape": shape, "dtype": "float32",
                "median_s": statistics.median(runs), "min_s": min(runs), "max_s": max(runs),
                "ours_to_theirs": timing.ratio(seconds["filtered"], runs), "repeats": options.repeats,
                "clock": timing.clock(options.device),
                "grad_error": max(errors) if name == "filtered" else None,
            }
        )  # fmt: skip
    return {"ratio_to_three_gemms": round(against, 4), "grad_error": max(errors), "gradient_filter": GRADIENT_FILTER}


def _gradients(problem: Problem, contender: Contender) -> list[Tensor]:
    problem.clear_gradients()
    contender.loss(problem).backward()
    return [grad.clone() for grad in problem.gradients()]
