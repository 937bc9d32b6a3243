"""The training loop, top to bottom: rows and signal in, a trained student and its loss curve out."""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from alambique.cache.reader import TeacherCache
from alambique.core.errors import UserError
from alambique.core.files import require_free_space
from alambique.core.measure import Stopwatch, device_name, peak_mib
from alambique.core.progress import Progress
from alambique.data.dataset import PackedRows
from alambique.models.load import SplitModel
from alambique.train import checkpoint
from alambique.train.config import DistillConfig
from alambique.train.context import Context, require_shareable
from alambique.train.data import StepRows, prefetch, read_step, rows_of_step
from alambique.train.hidden import Matching
from alambique.train.optimiser import adamw, clip_gradients, learning_rate, set_learning_rate
from alambique.train.peaks import peak_tflop_per_s
from alambique.train.sharded import ALONE, Processes, ShardedStudent, fitting_rows
from alambique.train.state import CurvePoint, DistillResult, Interrupted, Run, Validation
from alambique.train.step import Setup, add_gradients


def distill(
    student: SplitModel,
    rows: PackedRows,
    teacher: TeacherCache | SplitModel,
    config: DistillConfig,
    *,
    vocab_size: int,
    scratch: Path,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
    validate: Callable[[SplitModel], dict[str, float]] | None = None,
    processes: Processes = ALONE,
) -> DistillResult:
    """Train ``student`` in place on ``rows`` against its teacher: a cache of the same rows, by number, or the model.

    ``student`` has fp32 weights on ``device``, where a live teacher (method ``online``) is as well. ``vocab_size`` ids
    are real; rows of a head beyond them are padding. ``scratch`` holds this run's checkpoints and nothing else: a call
    that finds some continues from the last whole one, bit for bit on a CPU. When ``stop()`` turns true the run saves
    and raises. ``validate`` (of :mod:`alambique.train.validation`) is for a ``config`` that validates.

    Several ``processes`` call this together, each with all of the student, whose parameters are DTensors from here on:
    see :mod:`alambique.train.sharded`, and :mod:`alambique.train.context` where they share rows.

    Raises:
        Interrupted: ``stop()`` was true, in any process; the same call resumes.
        UserError: the loss stopped being finite, one row alone doesn't fit in memory, the disk is too small, there is
            no compiler to compile with, or rows or attention can't be shared.
        TooLarge: memory ran out in one of several processes; the caller notes what fits, and all begin again.
    """
    config = config.resolved(device)
    live, cache = (teacher, None) if isinstance(teacher, SplitModel) else (None, teacher)
    _require_consistent(config, live is not None, validate is not None)
    models = [student] if live is None else [student, live]
    require_shareable(processes, rows.seq_len, config.rows_per_step)
    context = Context(processes, device)
    context.open(models, config.micro_batch_rows)
    matching = _matching(student, config, live, cache)
    if processes.size > 1:
        student = ShardedStudent(student, config.precision, device)
    model = student.model.train()
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    optimiser = adamw(model.named_parameters(), config)
    run = _start(config, model, optimiser, scratch, processes)
    loss = config.loss.model_copy(update={"logit_softcap": student.logit_softcap, "logit_scale": student.logit_scale})

    def stopping() -> bool:
        return processes.any(stop())

    setup = Setup(student, live, config, loss, vocab_size, device, stopping, validate, processes, context, matching)
    num_steps, first_step = config.num_steps(rows.num_rows), run.step
    tokens_per_step, layers = config.rows_per_step * rows.seq_len, matching.teacher_layers if matching else ()

    def read(step: int) -> StepRows:
        numbers = rows_of_step(step, config.rows_per_step, rows.num_rows, config.seed)
        pin = device.type == "cuda"
        return read_step(numbers, rows, cache, pin, processes.rank, processes.size, processes.context, layers)

    done, total = first_step * tokens_per_step, num_steps * tokens_per_step
    with (
        _deterministic(device),
        context.sharing(models),
        Progress("distil", total, done=done) if processes.leads else contextlib.nullcontext() as progress,
        contextlib.closing(prefetch(read, range(first_step, num_steps))) as batches,
    ):
        log = _Log(run, progress, device, tokens_per_step)
        _train(setup, run, optimiser, processes.together(batches), log, num_steps, scratch)
    shipped = run.step if config.keep == "last" else run.best_step(partial(checkpoint.is_there, scratch))
    if shipped != run.step:
        checkpoint.load_weights(scratch, shipped, model)
    if matching:
        matching.remove()
    return _result(run, config, tokens_per_step, device, first_step, shipped, processes)


def _matching(
    student: SplitModel, config: DistillConfig, live: SplitModel | None, cache: TeacherCache | None
) -> Matching | None:
    if config.hidden is None:
        return None
    states = cache.states if cache else None
    size = live.config.hidden_size if live else states.size if states else None
    if size is None:
        raise ValueError("distill.hidden needs a cache with hidden states, or a live teacher")
    return Matching(student, config.hidden, size, config.seed)


def _require_consistent(config: DistillConfig, live: bool, validating: bool) -> None:
    if config.compile:
        _require_compiler()
    if live != (config.method == "online"):
        raise ValueError(f"method {config.method} needs {'a live teacher' if not live else 'a cache'}")
    if validating != (config.validate_every is not None):
        raise ValueError("validate and config.validate_every come together")


def _start(
    config: DistillConfig, model: nn.Module, optimiser: torch.optim.AdamW, scratch: Path, processes: Processes
) -> Run:
    """Go on from the last checkpoint, or from the beginning."""
    saved = checkpoint.restore(scratch, model, optimiser, processes)
    spared = int(config.keep == "best")
    require_free_space(
        scratch, checkpoint.bytes_needed(model, scratch, spared), f"keeping {('two', 'three')[spared]} checkpoints"
    )
    run = Run.from_json(saved) if saved else Run(min(config.micro_batch_rows, config.rows_per_step))
    run.micro_batch_rows = min(run.micro_batch_rows, fitting_rows(scratch) or run.micro_batch_rows)
    return run


def _train(
    setup: Setup,
    run: Run,
    optimiser: torch.optim.AdamW,
    batches: Iterator[StepRows],
    log: "_Log",
    num_steps: int,
    scratch: Path,
) -> None:
    """Make the steps that are left, and validations and checkpoints on the way."""
    config, model = setup.config, setup.student.model
    parameters = [p for group in optimiser.param_groups for p in group["params"]]

    def save() -> None:
        log.flush()  # first, so that a loss that isn't finite is never saved
        started = time.monotonic()
        spare = run.best_step(partial(checkpoint.is_there, scratch)) if config.keep == "best" else None
        checkpoint.save(scratch, run.step, model, optimiser, run.to_json(), spare, setup.processes)
        run.meters.checkpoint_seconds += time.monotonic() - started
        log.restart_clock()

    saved_step, saved_at = run.step, time.monotonic()
    compiled = False
    for step in range(run.step, num_steps):
        if config.compile and not compiled and run.meters.flops_per_row:  # compiled products can't be counted
            compiled = _compile(model)
        waiting_since = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - waiting_since
        losses = add_gradients(setup, run, batch)
        if losses is None:
            if run.step > saved_step:
                save()
            raise Interrupted(run.step)
        rate = learning_rate(step, num_steps, config)
        grad_norm = clip_gradients(parameters, config.max_grad_norm)
        set_learning_rate(optimiser, rate)
        if batch.num_target_tokens:  # else one process has no gradients, but several have zeros, on which momentum acts
            optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        run.step += 1
        log.add(batch, rate, torch.cat([losses, grad_norm.reshape(1)]), waited)
        last = run.step == num_steps
        if run.step % config.log_every_steps == 0 or last:
            log.flush()
        better = _validate(setup, run, log, last) and config.keep == "best"
        due = better or _checkpoint_due(config, run.step, time.monotonic() - saved_at)
        if not last and setup.processes.any(due):
            save()
            saved_step, saved_at = run.step, time.monotonic()


def _validate(setup: Setup, run: Run, log: "_Log", last: bool) -> bool:
    """Validate if it is time; whether the student is the best so far."""
    every = setup.config.validate_every
    if setup.validate is None or every is None or (run.step % every and not last):
        return False
    log.flush()
    started = time.monotonic()
    whole = setup.student.whole() if isinstance(setup.student, ShardedStudent) else contextlib.nullcontext()
    with whole, setup.context.whole_rows():
        found = setup.processes.of_first(setup.validate(setup.student))
    setup.student.model.train()
    run.validations.append(Validation(run.step, **found))
    run.meters.validation_seconds += time.monotonic() - started
    log.show({f"valid_{name}": value for name, value in found.items()})
    return run.best_step(lambda step: True) == run.step


def _checkpoint_due(config: DistillConfig, step: int, seconds_since_last: float) -> bool:
    if config.checkpoint_every_steps is not None:
        return step % config.checkpoint_every_steps == 0
    return seconds_since_last >= config.checkpoint_every_seconds


class _Log:
    """Measurements of steps whose values are still on the device; one wait for the device hands all of them over."""

    def __init__(self, run: Run, progress: Progress | None, device: torch.device, tokens_per_step: int) -> None:
        self._run, self._progress, self._tokens_per_step = run, progress, tokens_per_step
        self._pending: list[tuple[StepRows, float, Tensor]] = []
        self._watch = Stopwatch(device)

    def restart_clock(self) -> None:
        """Leave what just happened out of the time of the steps."""
        self._watch.restart()

    def show(self, figures: dict[str, float]) -> None:
        """Show what isn't of a step, and leave its making out of the time of the steps."""
        if self._progress is not None:
            self._progress.update(0, **figures)
        self.restart_clock()

    def add(self, batch: StepRows, rate: float, values: Tensor, waited_seconds: float) -> None:
        """Take the measurements of the step just made.

        ``values`` are loss, kd, ce, gradient norm, and before the last the distance of hidden states if matched.
        """
        self._pending.append((batch, rate, values))
        self._run.meters.data_wait_seconds += waited_seconds
        self._run.meters.num_target_tokens += batch.num_target_tokens

    def flush(self) -> None:
        """Append the pending steps to the curve and show the last of them.

        Raises:
            UserError: a loss or a gradient wasn't finite.
        """
        if not self._pending:
            return
        for (batch, rate, _), values in zip(
            self._pending, torch.stack([values for *_, values in self._pending]).tolist(), strict=True
        ):
            step = len(self._run.curve) + 1
            loss, kd, ce, *distances, grad_norm = values
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise UserError(_not_finite(step, batch.rows, loss, grad_norm))
            tokens = step * self._tokens_per_step
            self._run.curve.append(CurvePoint(step, tokens, loss, kd, ce, rate, grad_norm, *distances))
        seconds = self._watch.seconds()
        self._watch.restart()
        self._run.meters.seconds += seconds
        tokens = len(self._pending) * self._tokens_per_step
        last = self._run.curve[-1]
        if self._progress is not None:
            self._progress.update(
                tokens,
                loss_nats=last.loss_nats,
                **({"hidden_loss": last.hidden_loss} if last.hidden_loss else {}),
                learning_rate=last.learning_rate,
                tokens_per_s=tokens / seconds,
            )
        self._pending.clear()


def _not_finite(step: int, rows: list[int], loss: float, grad_norm: float) -> str:
    return (
        f"step {step} has a loss of {loss} nats and a gradient norm of {grad_norm}, on rows "
        f"{', '.join(map(str, rows))} of the prepared train split: lower distill.learning_rate, or look at those rows."
    )


@contextlib.contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Refuse kernels whose result depends on chance, where that is free: on a CPU."""
    if device.type != "cpu":
        yield
        return
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # a debugging aid that costs a pass over each new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


def _require_compiler() -> None:
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise UserError(
            "distill.compile needs a C++ compiler, and there is no g++ or clang++: install one, or unset it."
        )


def _compile(model: nn.Module) -> bool:
    """Have each decoder layer compiled when it next runs: one program serves all layers of a kind."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):  # what transformers derives decoder layers from
            layer.compile()
    return True


def _result(
    run: Run,
    config: DistillConfig,
    tokens_per_step: int,
    device: torch.device,
    first_step: int,
    shipped_step: int,
    processes: Processes,
) -> DistillResult:
    meters, num_tokens = run.meters, run.step * tokens_per_step
    rows_per_s = run.step * config.rows_per_step / meters.seconds
    model_tflop_per_s = rows_per_s * meters.model_flops_per_row / 1e12
    peak = peak_tflop_per_s(device_name(device)) if config.precision == "bf16" else None
    return DistillResult(
        method=config.method,
        steps=run.step,
        num_tokens=num_tokens,
        num_target_tokens=meters.num_target_tokens,
        seconds=meters.seconds,
        tokens_per_s=num_tokens / meters.seconds,
        target_tokens_per_s=meters.num_target_tokens / meters.seconds,
        tflop_per_s=rows_per_s * meters.flops_per_row / 1e12,
        model_tflop_per_s=model_tflop_per_s,
        mfu=model_tflop_per_s / (peak * processes.size) if peak else None,
        data_wait_share=meters.data_wait_seconds / meters.seconds,
        checkpoint_seconds=meters.checkpoint_seconds,
        validation_seconds=meters.validation_seconds,
        peak_mib=processes.largest(peak_mib(device)),
        loss_impl=meters.loss_impl,
        micro_batch_rows=run.micro_batch_rows,
        resumed_from_step=first_step,
        shipped_step=shipped_step,
        validations=run.validations,
        curve=run.curve,
    )
