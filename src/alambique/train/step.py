"""The gradients of one optimiser step: however it is cut into micro-batches and processes, one sum over its tokens.

Dimensions: B rows of a micro-batch, S positions, N positions that predict something, D hidden size.
"""

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from alambique.core.errors import UserError
from alambique.core.signal import Signal, StatesSignal
from alambique.losses.config import LossConfig
from alambique.losses.distillation import distillation_loss
from alambique.models.load import SplitModel
from alambique.train.config import DistillConfig
from alambique.train.context import APART, Context
from alambique.train.data import MicroBatch, StepRows
from alambique.train.flops import FlopCounter
from alambique.train.hidden import Matching
from alambique.train.sharded import ALONE, Processes, ShardedStudent, TooLarge
from alambique.train.state import Run


@dataclass(frozen=True)
class Setup:
    """What every step of a run needs and none changes. ``loss`` knows the student's softcap and logit scale.

    ``teacher`` is the live one of the method ``online``; None where the rows carry the signal. ``validate`` compares
    the student with its teacher on held-out rows. Where there are several ``processes`` the student is sharded over
    them; in a ``context`` some of them share rows. ``matching`` is there where hidden states are matched as well.
    """

    student: SplitModel
    teacher: SplitModel | None
    config: DistillConfig
    loss: LossConfig
    vocab_size: int
    device: torch.device
    stop: Callable[[], bool]
    validate: Callable[[SplitModel], dict[str, float]] | None = None
    processes: Processes = ALONE
    context: Context = APART
    matching: Matching | None = None


def add_gradients(setup: Setup, run: Run, batch: StepRows) -> Tensor | None:
    """Leave the step's gradients in ``.grad``; returns its loss, kd and ce, in nats, on the device.

    Where hidden states are matched, a fourth value is their distance, which isn't part of the loss.

    Losses are divided by the target tokens of the whole step. When memory runs out the step starts again with
    micro-batches of half the rows, which ``run`` remembers. None means that the run was asked to stop: the
    gradients are dropped, the model is as it was before.

    Raises:
        UserError: one row alone doesn't fit in memory.
        TooLarge: memory ran out in one of several processes.
    """
    while True:
        _seed(setup.config.seed, run.step, setup.processes.rank)
        with contextlib.suppress(torch.OutOfMemoryError):
            losses = _accumulate(setup, run, batch)
            if losses is None:
                if isinstance(setup.student, ShardedStudent):
                    setup.student.reshard()
                setup.student.model.zero_grad(set_to_none=True)
            return losses
        # Outside the handler: its traceback would keep the failed pass's tensors alive.
        setup.student.model.zero_grad(set_to_none=True)
        _halve(setup, run)


def _seed(seed: int, step: int, rank: int) -> None:
    """Make random numbers (dropout) a function of seed, step and process, so that no interruption or retry shifts them.

    Rank 0 has those of a process alone.
    """
    words = f"{seed}/{step}/{rank}" if rank else f"{seed}/{step}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "big"))


def _halve(setup: Setup, run: Run) -> None:
    if run.micro_batch_rows == 1:
        raise UserError(
            f"one row of this data doesn't fit in the memory of {setup.device} beside the model: "
            "set distill.gradient_checkpointing, prepare shorter rows (prepare.seq_len), share rows between GPUs "
            "(ALAMBIQUE_CONTEXT_PROCESSES), or use a larger one."
        )
    run.micro_batch_rows = (run.micro_batch_rows + 1) // 2
    if setup.processes.size > 1:
        raise TooLarge(run.micro_batch_rows)
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
    print(f"out of memory: going on with micro-batches of {run.micro_batch_rows} rows", file=sys.stderr)


def _accumulate(setup: Setup, run: Run, batch: StepRows) -> Tensor | None:
    """One backward pass for each micro-batch; autocast spans them all, so that each weight is cast once a step."""
    losses = torch.zeros(4 if setup.matching else 3, device=setup.device)
    ends = range(0, batch.num_rows, run.micro_batch_rows)
    with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.config.precision == "bf16"):
        for start, micro in zip(ends, batch.micro_batches(run.micro_batch_rows, setup.device), strict=True):
            if setup.stop():
                return None
            if isinstance(setup.student, ShardedStudent):
                setup.student.begin_micro_batch(last=start == ends[-1])
            if len(micro.labels_N) == 0:
                _idle(setup, micro)
                continue
            with _flop_counter(run, micro.num_rows / setup.processes.context) as counter:
                losses += _micro_step(setup, run, micro, max(1, batch.num_target_tokens), counter)
    setup.processes.sum_(losses)
    return losses


def _idle(setup: Setup, micro: MicroBatch) -> None:
    """Nothing here to learn from; but where parameters are sharded the others wait for this process's passes."""
    if not isinstance(setup.student, ShardedStudent):
        return
    hidden_BSD = setup.student.hidden(micro.input_ids_BS, micro.document_ids_BS)
    maps = [linear.weight for linear in setup.matching.projections] if setup.matching else []
    for parameter in (setup.student.head_weight_VD, setup.student.head_bias_V, *maps):
        if parameter is not None and parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    torch.autograd.backward(hidden_BSD, torch.zeros_like(hidden_BSD))


def _micro_step(setup: Setup, run: Run, micro: MicroBatch, denominator: int, counter: FlopCounter | None) -> Tensor:
    """Forward, loss and backward of one micro-batch; returns its share of the step's loss, kd and ce, and distance."""
    student, impl, matching = setup.student, setup.config.loss_impl, setup.matching
    # First, so that a live teacher's activations are gone before the student's come.
    signal, theirs_NLE = _signal(setup, micro)
    before = counter.flops if counter else 0
    with student.recording(matching.student_layers if matching else ()) as states:
        hidden_ND = micro.select(student.hidden(micro.input_ids_BS, micro.document_ids_BS))
    if counter:
        head_flops = 2 * len(hidden_ND) * student.head_weight_VD.numel()
        rows_worth = micro.num_rows / setup.processes.context
        run.meters.model_flops_per_row = 3 * (counter.flops - before + head_flops) / rows_worth
    if setup.config.precision == "bf16":
        hidden_ND = hidden_ND.to(torch.bfloat16)  # what autocast would feed the head's product
    distances, weight = [], 0.0
    if matching:
        assert theirs_NLE is not None
        ours = {layer: micro.select(states.pop(layer)) for layer in matching.student_layers}
        distances, weight = [matching.loss(ours, theirs_NLE, denominator)], matching.weight
    with torch.autocast(setup.device.type, enabled=False):
        output = distillation_loss(
            hidden_ND,
            student.head_weight_VD,
            signal,
            labels_N=micro.labels_N,
            head_bias_V=student.head_bias_V,
            vocab_size=setup.vocab_size,
            denominator=denominator,
            config=setup.loss,
            impl=impl,
            weight_grad_VD=_head_gradient(student, impl),
            drop_rows=False,  # rows without a target were left out on the CPU
        )
        torch.autograd.backward([output.loss, *(weight * distance for distance in distances)])
    run.meters.loss_impl = output.impl
    assert output.ce is not None  # labels were given
    return torch.stack([output.loss.detach(), output.kd, output.ce, *(distance.detach() for distance in distances)])


def _signal(setup: Setup, micro: MicroBatch) -> tuple[Signal, Tensor | None]:
    """What the cache holds of these rows, or the live teacher's hidden states, whose logits too come in chunks.

    And the states [N, L, E] of the layers to match, as bfloat16 like those of a cache.
    """
    if micro.signal is not None:
        return micro.signal, micro.states_NLE
    teacher, layers = setup.teacher, setup.matching.teacher_layers if setup.matching else ()
    assert teacher is not None
    with (
        torch.no_grad(),
        torch.autocast(setup.device.type, enabled=False),  # it computes as when it is captured
        teacher.recording(layers) as found,
    ):
        hidden_BSD = teacher.hidden(micro.input_ids_BS, micro.document_ids_BS)
    states = [micro.select(found.pop(layer)).to(torch.bfloat16) for layer in layers]
    signal = StatesSignal(
        micro.select(hidden_BSD),
        teacher.head_weight_VD,
        teacher.head_bias_V,
        teacher.logit_softcap,
        teacher.logit_scale,
    )
    return signal, torch.stack(states, dim=1) if states else None


def _head_gradient(student: SplitModel, impl: str) -> Tensor | None:
    """The head's ``.grad``, for the loss to add to: one [V, D] array less than if autograd did it.

    Autograd still adds the embeddings' part of a tied weight. None where there is nothing to add, or no way.
    """
    weight_VD = student.head_weight_VD
    if impl == "dense" or not weight_VD.requires_grad:
        return None
    if weight_VD.grad is None:
        weight_VD.grad = torch.zeros_like(weight_VD)
    return weight_VD.grad


@contextlib.contextmanager
def _flop_counter(run: Run, num_rows: float) -> Iterator[FlopCounter | None]:
    """Count what happens inside, once in a run; None ever after."""
    if run.meters.flops_per_row:
        yield None
        return
    with FlopCounter() as counter:
        yield counter
    run.meters.flops_per_row = counter.flops / num_rows
