"""What a run knows about itself: where it stands, what it has used, and what it reports at the end."""

import csv
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_ENDS = ("loss_nats", "hidden_loss")


class Interrupted(Exception):
    """The run was asked to stop; a checkpoint holds its ``step`` completed steps, and the same call continues."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}; the same command continues from there")
        self.step = step


@dataclass(frozen=True)
class CurvePoint:
    """One optimiser step; losses are sums over its target tokens divided by their number, before the update.

    ``step`` counts from 1, ``tokens`` are all positions of the rows so far, ``grad_norm`` is the norm before clipping.
    ``hidden_loss`` is the distance of matched hidden states, no part of ``loss_nats``: what is minimised is
    loss_nats + weight · hidden_loss. 0 where none are matched.
    """

    step: int
    tokens: int
    loss_nats: float
    kd_nats: float
    ce_nats: float
    learning_rate: float
    grad_norm: float
    hidden_loss: float = 0.0


@dataclass(frozen=True)
class Validation:
    """The student against its teacher on the valid rows after ``step`` steps: see :mod:`alambique.train.validation`."""

    step: int
    kl_nats: float
    agreement: float
    perplexity: float
    calibration_error: float


@dataclass
class Meters:
    """What the completed steps have used, across interruptions; steps that were lost and repeated count once.

    ``flops_per_row`` is counted, not estimated: forward, loss and backward as executed, with recomputation and a live
    teacher. ``model_flops_per_row`` is what the student needs whatever the method: three times its forward pass (PaLM,
    arXiv 2204.02311, appendix B), which is counted too.
    ``loss_impl`` is the path of the loss that ran, also when the configuration says auto.
    """

    seconds: float = 0.0
    data_wait_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    validation_seconds: float = 0.0
    num_target_tokens: int = 0
    flops_per_row: float = 0.0
    model_flops_per_row: float = 0.0
    loss_impl: str = ""


@dataclass
class Run:
    """The state of a run that isn't in the model or the optimiser; ``step`` is the number of completed steps."""

    micro_batch_rows: int
    step: int = 0
    curve: list[CurvePoint] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    meters: Meters = field(default_factory=Meters)

    def best_step(self, is_kept: Callable[[int], bool]) -> int:
        """The step of least divergence on the valid rows, of those that are kept and the one just made."""
        candidates = [found for found in self.validations if found.step == self.step or is_kept(found.step)]
        return min(candidates, key=lambda found: found.kl_nats).step if candidates else self.step

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> "Run":
        """Rebuild from :meth:`to_json`."""
        curve = [CurvePoint(**point) for point in state["curve"]]
        validations = [Validation(**found) for found in state["validations"]]
        return cls(state["micro_batch_rows"], state["step"], curve, validations, Meters(**state["meters"]))


@dataclass(frozen=True)
class DistillResult:
    """What a run measured; the student itself was trained in place.

    ``num_tokens`` are all positions of the rows trained on, ``num_target_tokens`` those with a target. ``seconds``
    is the time of the steps, without checkpoints and validations; the rates divide by it, and ``data_wait_share`` is
    the part of it that the loop waited for rows. ``peak_mib`` is that of the process that needed most, the others are
    of all together. ``tflop_per_s`` counts what was executed, ``model_tflop_per_s`` what
    the student needs whatever the method (see :class:`Meters`); ``mfu`` is the latter's share of what the devices can
    do, None where that isn't known. ``shipped_step`` is the step whose weights the student has: the last, or the best.
    """

    method: str
    steps: int
    num_tokens: int
    num_target_tokens: int
    seconds: float
    tokens_per_s: float
    target_tokens_per_s: float
    tflop_per_s: float
    model_tflop_per_s: float
    mfu: float | None
    data_wait_share: float
    checkpoint_seconds: float
    validation_seconds: float
    peak_mib: float
    loss_impl: str
    micro_batch_rows: int
    resumed_from_step: int
    shipped_step: int
    validations: list[Validation]
    curve: list[CurvePoint]

    def measured(self) -> dict[str, Any]:
        """All of it but the curve, of which the ends stay, in dictionaries: DVC's metrics know no lists."""
        found = asdict(self)
        del found["curve"]
        by_step = {str(one.pop("step")): one for one in found.pop("validations")}
        ends = {name: {"first": getattr(self.curve[0], name), "last": getattr(self.curve[-1], name)} for name in _ENDS}
        if not self.curve[0].hidden_loss:
            del ends["hidden_loss"]
        return {**found, **({"validation": by_step} if by_step else {}), **ends}

    def curve_csv(self) -> str:
        """The curve as a table, with ``hidden_loss`` where states were matched."""
        names = [field.name for field in fields(CurvePoint) if field.name != "hidden_loss" or self.curve[0].hidden_loss]
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(names)
        table.writerows([getattr(point, name) for name in names] for point in self.curve)
        return text.getvalue()
