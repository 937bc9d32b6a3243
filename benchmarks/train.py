"""Case ``train``: a step of the trainer against a bare one: forward, fused loss, backward, optimiser, nothing around.

Both train the same student on rows of the same pair, in the same precision and micro-batches, a few steps at a time by
turns. The bare step has its rows and their signal ready on the device and passes them to the loss as the README shows;
the trainer reads, clips, schedules, logs and watches. ``--only`` may name the pair, as for ``methods``.

Last line: ``ratio_to_bare_step`` (medians of steps, the first of each turn left out), ``tokens_per_s`` by the trainer's
median, ``data_wait_share`` of all its steps.
"""

from collections.abc import Callable
from statistics import median

import torch

from alambique.losses.config import LossConfig
from alambique.losses.distillation import distillation_loss
from alambique.models.load import SplitModel
from alambique.train.data import StepRows, read_step, rows_of_step
from alambique.train.optimiser import adamw
from benchmarks import pairs, timing
from benchmarks.cases import Options, Outcome

_STEPS = 5  # of a turn; source: few enough that both see the same disturbances; the first is a warm-up


def run(options: Options) -> Outcome:
    """Take turns, as many as ``options.repeats``."""
    pair = pairs.open_pair(pairs.chosen(options), options.device)
    student = pair.student()
    bare_step = _bare(pair, student, options.device)
    trained: list[float] = []
    bare: list[float] = []
    waited, total = 0.0, 0.0
    for turn in range(options.repeats):
        result, seconds = pairs.train(pair, student, None, options.device, method="fused", steps=_STEPS, seed=turn)
        trained += seconds[1:]
        waited, total = waited + result.data_wait_share * result.seconds, total + result.seconds
        bare += [timing.timed(bare_step, options.device) for _ in range(len(seconds))][1:]
    tokens = pair.config.rows_per_step * pair.train.seq_len
    rows = [
        {"contender": name, "pair": pair.name, "median_s": median(runs), "min_s": min(runs), "max_s": max(runs),
         "tokens_per_s": tokens / median(runs), "steps": len(runs)}
        for name, runs in (("trainer", trained), ("bare", bare))
    ]  # fmt: skip
    summary = {
        "data_wait_share": waited / total,
        "tokens_per_s": tokens / median(trained),
        "ratio_to_bare_step": timing.ratio(trained, bare),
    }
    return Outcome(rows, summary, [f"time is {timing.clock(options.device)}; waiting for data counts as elapsed time"])


def _bare(pair: pairs.Pair, student: SplitModel, device: torch.device) -> Callable[[], None]:
    """One optimiser step, over and over on the same rows."""
    config = pair.config
    numbers = rows_of_step(0, config.rows_per_step, pair.train.num_rows, config.seed)
    batch: StepRows = read_step(numbers, pair.train, pair.cache, pin=False)
    micro_batches = list(batch.micro_batches(config.micro_batch_rows, device))
    known = {"logit_softcap": student.logit_softcap, "logit_scale": student.logit_scale}
    loss: LossConfig = config.loss.model_copy(update=known)
    optimiser = adamw(student.model.named_parameters(), config)
    low = config.precision == "bf16"

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            for micro in micro_batches:
                hidden_ND = micro.select(student.hidden(micro.input_ids_BS, micro.document_ids_BS))
                assert micro.signal is not None  # the pair has a cache
                output = distillation_loss(
                    hidden_ND.bfloat16() if low else hidden_ND,
                    student.head_weight_VD,
                    micro.signal,
                    labels_N=micro.labels_N,
                    vocab_size=pair.vocab_size,
                    denominator=batch.num_target_tokens,
                    config=loss,
                )
                output.loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step
