"""What a training run may be told. Every field decides numbers or when they are saved; none names a device."""

import math
from typing import Literal

import torch
from pydantic import Field, model_validator

from alambique.core.params import Config
from alambique.core.products import fast_dtype
from alambique.losses.config import LossConfig
from alambique.train.hidden import HiddenConfig

Method = Literal["online", "dense", "forward_chunked", "fused"]


class DistillConfig(Config):
    """Settings of one training run: the ``distill`` section of params.yaml.

    The budget is ``epochs`` passes over the prepared rows, unless ``steps`` is given, which then wins. The learning
    rate warms up linearly over ``warmup_ratio`` of the steps, then follows half a cosine down to
    ``min_learning_rate_ratio`` of its peak.

    ``method`` says where the teacher's signal comes from and what is built of the logits; ``impl`` only which chunked
    path of the loss does it, where the method is a chunked one:

    - ``online``: the teacher runs beside the student, every step; the divergence is over the whole vocabulary;
    - ``dense``: from the cache, with all logits of a micro-batch at once, in float32;
    - ``forward_chunked``: from the cache, the student's logits all kept, the objective chunk by chunk;
    - ``fused``: from the cache, never more than a chunk of logits.

    Every ``validate_every`` steps, and after the last, the student is compared with its teacher on the valid rows; with
    ``keep: best`` the state of least divergence there is what is shipped.

    ``micro_batch_rows`` (in each process) and ``gradient_checkpointing`` trade time for memory, ``compile`` trades
    minutes at the start for faster layers, and all three change results only by rounding; ``rows_per_step`` is the
    batch that the optimiser sees whatever they are, and whatever the number of processes.
    """

    seed: int = Field(0, ge=0)
    method: Method = "fused"  # source: the least memory and time of the four in the published table
    loss: LossConfig = Field(default_factory=lambda: LossConfig.model_validate({}))
    hidden: HiddenConfig | None = None  # source: the published method matches logits alone
    impl: Literal["auto", "fused", "triton", "tiled", "recompute"] = "auto"  # source: docs/loss.md, which path is best

    epochs: float = Field(1.0, gt=0)  # one pass: what the published figures and the embedded budget use
    steps: int | None = Field(None, ge=1)  # wins over epochs when given
    rows_per_step: int = Field(8, ge=1)  # 8 × 256 tokens: the embedded pair's measured recipe (design §5)
    # At most rows_per_step. 2 × 256 tokens: as fast as the whole step at once on the embedded pair (measured), with
    # less memory, and a stop by signal waits for no more than one micro-batch.
    micro_batch_rows: int = Field(2, ge=1)

    learning_rate: float = Field(3e-4, gt=0)  # measured on the embedded pair: 6e-4 was worse (design §5)
    warmup_ratio: float = Field(0.1, ge=0, lt=1)  # assumption: a tenth, so that short runs warm up too
    min_learning_rate_ratio: float = Field(0.1, ge=0, le=1)  # a tenth of the peak: Chinchilla, arXiv 2203.15556 §B
    weight_decay: float = Field(0.1, ge=0)  # arXiv 2005.14165 §B, kept by Llama (arXiv 2302.13971 §2.3)
    beta1: float = Field(0.9, ge=0, lt=1)  # as weight_decay
    beta2: float = Field(0.95, ge=0, lt=1)  # as weight_decay
    eps: float = Field(1e-8, gt=0)  # arXiv 1412.6980
    max_grad_norm: float = Field(1.0, gt=0)  # as weight_decay

    # bf16: autocast over fp32 weights, as fast as pure bf16 (design §5); auto: fp32 on CPUs that emulate bf16 products
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    compile: bool = False  # assumption: its minutes are lost on short runs
    attention: str = "sdpa"  # the one kernel of transformers that runs on every device
    gradient_checkpointing: bool = False  # assumption: recompute activations only when told that memory is short

    checkpoint_every_seconds: float = Field(120.0, ge=0)  # assumption: two minutes are bearable to lose
    checkpoint_every_steps: int | None = Field(None, ge=1)  # replaces the clock where steps should decide
    validate_every: int | None = Field(None, ge=1)  # assumption: off; each costs a pass over the valid rows
    keep: Literal["last", "best"] = "last"  # source: one pass over the data with a falling rate rarely overfits
    log_every_steps: int = Field(1, ge=1)  # assumption: a step takes seconds, so one host sync a step costs nothing

    @model_validator(mode="after")
    def _consistent(self) -> "DistillConfig":
        if self.method in ("dense", "forward_chunked") and self.impl != "auto":
            raise ValueError(f"impl chooses among chunked paths, and method: {self.method} is none: leave impl out")
        if self.keep == "best" and self.validate_every is None:
            raise ValueError("keep: best needs a measure of better: set validate_every, in steps")
        return self

    @property
    def loss_impl(self) -> str:
        """``impl`` of ``distillation_loss``."""
        return self.method if self.method in ("dense", "forward_chunked") else self.impl

    def resolved(self, device: torch.device) -> "DistillConfig":
        """With the precision that ``auto`` means on ``device``."""
        if self.precision != "auto":
            return self
        return self.model_copy(update={"precision": "bf16" if fast_dtype(device) == "bfloat16" else "fp32"})

    def num_steps(self, num_rows: int) -> int:
        """Optimiser steps for ``num_rows`` prepared rows; the last step of an epoch is filled from the next pass."""
        return self.steps or max(1, math.ceil(self.epochs * num_rows / self.rows_per_step))
