"""Case ``train``: a step of the trainer against a bare one: forward, fused loss, backward, optimiser, nothing around.

Both train the same student on rows of the same pair, in the same precision and micro-batches, by turns: before each of
its steps the trainer is held up for a bare one. That has its rows and their signal ready on the device and passes them
to the loss as the README shows; the trainer reads, clips, schedules, logs and watches. ``--only`` may name the pair, as
for ``methods``.

Last line: ``ratio_to_bare_step`` (medians), and of the trainer alone ``tokens_per_s`` (by the median of its steps) and
``data_wait_share`` (of all of them).
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

_WARM_UP = 2  # steps; source: the first counts FLOPs and allocates the optimiser's state, its pages cost the second


def run(options: Options) -> Outcome:
    """Train undisturbed, then with a bare step before each step; ``options.repeats`` of each count."""
    pair = pairs.open_pair(pairs.chosen(options), options.device)
    student = pair.student()
    steps = options.repeats + _WARM_UP + 1
    result, alone = pairs.train(pair, student, None, options.device, method="fused", steps=steps)
    bare_step, bare = _bare(pair, student, options.device), list[float]()
    _, trained = pairs.train(
        pair, student, None, options.device, lambda: bare.append(timing.timed(bare_step, options.device)),
        method="fused", steps=steps,
    )  # fmt: skip
    alone, trained, bare = alone[_WARM_UP:], trained[_WARM_UP:], bare[_WARM_UP:-1]
    tokens = pair.config.rows_per_step * pair.train.seq_len
    rows = [
        {"contender": name, "pair": pair.name, "median_s": median(runs), "min_s": min(runs), "max_s": max(runs),
         "tokens_per_s": tokens / median(runs), "steps": len(runs)}
        for name, runs in (("trainer alone", alone), ("trainer", trained), ("bare", bare))
    ]  # fmt: skip
    summary = {
        "data_wait_share": result.data_wait_share,
        "tokens_per_s": tokens / median(alone),
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
        torch.clear_autocast_cache()  # the trainer, in whose autocast this may run, is to cast for itself

    return step
