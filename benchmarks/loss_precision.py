"""Gradient error of bfloat16 inputs against float64, with a student near its teacher and far from it.

Last line: ``grad_error.<contender>.<near|far>``, the larger of the relative errors ‖g - g64‖/‖g64‖ of the hidden
states' and the head's gradients. Both g have the inputs' dtype as users get them, rounding to bfloat16 included.
"""

from torch import Tensor

from benchmarks import problems
from benchmarks.cases import SMOLLM2_135M, Options, Outcome, Shape
from benchmarks.contenders import BASELINES, Contender, available, ours
from benchmarks.problems import Problem

_CHUNKS = {"chunk_budget_mib": 24}  # 128 tokens at this vocabulary, so that the head's gradient is a sum over chunks
# Only those that compute the same objective: a peer that learns labels or another teacher has another gradient.
CONTENDERS: dict[str, Contender] = {
    "dense": ours("dense"),
    "dense_plain": BASELINES["dense_plain"],
    "forward_chunked": ours("forward_chunked", **_CHUNKS),
    "recompute": ours("recompute", **_CHUNKS),
    "fused": ours("fused", **_CHUNKS),
    "fused_compact": ours("fused", weight_grad="compact", **_CHUNKS),
    "triton": ours("triton", **_CHUNKS),
    "triton_compact": ours("triton", weight_grad="compact", **_CHUNKS),
    "tiled": ours("tiled", **_CHUNKS),
}


def run(options: Options) -> Outcome:
    """Measure all paths; ``only`` keeps contenders."""
    names, notes = available(options.keep(CONTENDERS), options.device)
    out = Outcome(notes=notes, summary={"grad_error": {}})
    shape = Shape(64, 64, 1024) if options.quick else Shape(512, *SMOLLM2_135M)
    for teacher in ("near", "far"):
        problem = problems.make_related(shape, teacher == "near", options.device)
        exact = _exact(problem)
        for name in names:
            problem.clear_gradients()
            loss = CONTENDERS[name].loss(problem)
            loss.backward()
            pairs = zip(problem.gradients(), exact[1:], strict=True)
            errors = [float((g.double() - e).norm() / e.norm()) for g, e in pairs]
            loss_error = abs(loss.item() - exact[0].item()) / abs(exact[0].item())
            out.rows.append(
                {
                    "contender": name, "teacher": teacher, "shape": str(shape), "hidden_error": errors[0],
                    "weight_error": errors[1], "loss_error": loss_error, "loss_nats": exact[0].item(),
                }
            )  # fmt: skip
            out.summary["grad_error"].setdefault(name, {})[teacher] = round(max(errors), 6)
    return out


def _exact(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of the definition in float64, from the same bfloat16 inputs."""
    hidden_ND, weight_VD = (x.detach().double().requires_grad_() for x in (problem.hidden_ND, problem.weight_VD))
    exact = Problem(hidden_ND, weight_VD, problem.signal, problem.labels_N)
    loss = ours("dense").loss(exact)
    loss.backward()
    return loss.detach(), *exact.gradients()
