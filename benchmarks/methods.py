"""Case ``methods``: the published comparison from one trainer: the teacher live, or cached and the loss in three ways.

Each method trains the same student for the same steps in a process of its own, so that its peak is its own. On a CPU,
whose speed drifts, all four are there at once and take turns, step by step; on a GPU one comes after another. Then
comes the loss alone at the published shape, counted on meta tensors. ``--only`` keeps methods, and may name the pair:
one of params.yaml, whose cache and student are there, or ``llama31_8b_random``, the published shapes with random
weights, which needs no files.

Last line, per method: ``peak_mib`` (of training, a live teacher included), ``seconds_per_iteration`` (median of the
steps but the first), ``tflop_per_s``, ``kl_nats`` (held out, after the same steps; null for random weights) and
``loss_peak_gib`` by number of tokens. TFLOP/s follows the published table: the student's own work, the same for all
methods, over the time; what was executed, a live teacher included, is in the rows.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import SpawnContext
from typing import Any, get_args

import torch

from alambique.core.errors import UserError
from alambique.core.signal import StatesSignal
from alambique.heldout import HeldoutConfig, heldout
from alambique.losses.distillation import distillation_loss
from alambique.planning.counting import CountedMemory
from alambique.train.config import Method
from benchmarks import pairs, problems, timing
from benchmarks.cases import LLAMA31_8B, Options, Outcome, Shape
from benchmarks.loss_memory import count_gib

METHODS: tuple[str, ...] = get_args(Method)
LOSS_TOKENS = (32_768, 262_144)  # source: the published comparison of the loss alone
_STEPS, _RANDOM_STEPS, _QUICK_STEPS = 8, 4, 3  # random weights have no divergence to bring down
_ROWS = 8  # of a step, in one micro-batch: with the two of the embedded recipe the logits weigh next to nothing
_NOTES = [
    "peak: while training, a live teacher included; on a CPU of the whole process, on a GPU of the allocator",
    "tflop_per_s: three times the student's forward pass, whatever the method executes; as in the published table",
    "dense is this library's reference, all in float32; loss_speed has the leaner one that a person would write",
    "loss alone: peak with its inputs at D 4096, V 128,256, bfloat16, counted on meta tensors",
]


def run(options: Options) -> Outcome:
    """Train with each method, then count the loss alone."""
    name = pairs.chosen(options)
    out = Outcome(notes=list(_NOTES))
    steps = _QUICK_STEPS if options.quick else _RANDOM_STEPS if name in pairs.RANDOM else _STEPS
    pairs.open_pair(name, options.device)  # refuse what is missing before anything runs
    methods = options.keep(METHODS)
    for group in [methods] if options.device.type == "cpu" else [[method] for method in methods]:
        for method, row in _in_processes(name, group, steps, options.device, out.notes):
            row["loss_peak_gib"] = {str(tokens): _loss_gib(method, tokens, options.quick) for tokens in LOSS_TOKENS}
            out.rows.append(row)
            keys = ("peak_mib", "seconds_per_iteration", "tflop_per_s", "kl_nats", "loss_peak_gib")
            out.summary[method] = {key: row[key] for key in keys}
    return out


class Turns:
    """Lets one of several processes work at a time, each for one step before the next one's."""

    def __init__(self, count: int, context: SpawnContext) -> None:
        self._turn = context.Value("i", 0)
        self._present = context.Array("b", [True] * count)

    def wait(self, index: int) -> None:
        """Pass the turn on, if it is this process's, and wait until it comes back.

        It looks every few milliseconds: whoever waits for a condition and is killed would hold up whoever signals it.
        """
        self._pass_on(index)
        while self._turn.value != index:
            time.sleep(0.005)

    def leave(self, index: int) -> None:
        """Wait for no more turns; also in the name of a process that has died."""
        self._present[index] = False
        self._pass_on(index)

    def _pass_on(self, index: int) -> None:
        others = [*range(index + 1, len(self._present)), *range(index)]
        if self._turn.value == index:
            self._turn.value = next((other for other in others if self._present[other]), index)


def _in_processes(
    name: str, methods: Sequence[str], steps: int, device: torch.device, notes: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What :func:`measure` finds of each method; ``notes`` hears of those that fail."""
    context = get_context("spawn")
    turns = Turns(len(methods), context)

    def one(index: int) -> dict[str, Any] | str:
        try:
            with ProcessPoolExecutor(1, context, initializer=_take_turns, initargs=(turns, index)) as pool:
                return pool.submit(measure, name, methods[index], steps, device).result()
        except UserError as error:
            return str(error)
        except BrokenProcessPool:
            return "its process was killed, most often because memory ran out."
        finally:
            turns.leave(index)

    with ThreadPoolExecutor(len(methods)) as threads:
        for method, found in zip(methods, threads.map(one, range(len(methods))), strict=True):
            if isinstance(found, str):
                notes.append(f"{method}: {found}")
            else:
                yield method, found


_wait_for_turn: Callable[[], object] = bool  # in a process of its own: until it is its turn


def _take_turns(turns: Turns, index: int) -> None:
    global _wait_for_turn
    _wait_for_turn = partial(turns.wait, index)


def measure(name: str, method: str, steps: int, device: torch.device) -> dict[str, Any]:
    """Train with one method, in this process; memory and time first, then the held-out divergence."""
    pair = pairs.open_pair(name, device)
    student, teacher = pair.student(), pair.teacher() if method == "online" else None
    rows = {"rows_per_step": _ROWS, "micro_batch_rows": _ROWS} if pair.trained else {}
    result, seconds = pairs.train(
        pair, student, teacher, device, between=_wait_for_turn, method=method, impl="auto", steps=steps, **rows
    )
    _wait_for_turn()  # the others have yet to finish their last step
    median = statistics.median(seconds[1:])
    return {
        "method": method, "pair": name, "steps": steps, "tokens_per_iteration": result.num_tokens // steps,
        "micro_batch_rows": result.micro_batch_rows, "loss_impl": result.loss_impl, "peak_mib": result.peak_mib,
        "seconds_per_iteration": median, "clock": timing.clock(device),
        "tflop_per_s": result.model_tflop_per_s * result.seconds / steps / median,
        "executed_tflop_per_s": result.tflop_per_s * result.seconds / steps / median,
        "kl_nats": _kl_nats(pair, student, teacher, device) if pair.trained or name == "tiny" else None,
    }  # fmt: skip


def _kl_nats(pair: pairs.Pair, student: Any, teacher: Any, device: torch.device) -> float:
    if pair.config.precision == "bf16":
        student.model.to(torch.bfloat16)  # as it is shipped
    student.model.eval()
    config = HeldoutConfig.model_validate({"batch_rows": pair.config.micro_batch_rows})
    found = heldout(teacher or pair.teacher(), {"student": student}, pair.valid, pair.vocab_size, config, device)
    return float(found["kl_nats"]["student"])


def _loss_gib(method: str, tokens: int, quick: bool) -> float:
    """Peak of one step of the loss alone, its inputs included."""
    shape = Shape(tokens // 128, 64, 1024) if quick else Shape(tokens, *LLAMA31_8B)
    if method != "online":
        return count_gib(method, shape)[0]
    problem = problems.make(shape, torch.bfloat16, "meta")
    hidden_ND, weight_VD = problem.hidden_ND, problem.weight_VD
    teacher = StatesSignal(torch.empty_like(hidden_ND), torch.empty_like(weight_VD))
    with CountedMemory([hidden_ND, weight_VD, teacher.hidden_ND, teacher.head_weight_VD]) as memory:
        distillation_loss(hidden_ND, weight_VD, teacher).loss.backward()
    peak_gib: float = memory.peak_bytes / 2**30
    return peak_gib
