"""What is minimised, and how much memory may be spent on it."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from alambique.core.errors import did_you_mean
from alambique.core.params import Config
from alambique.losses.divergence import DIVERGENCES

Tail = Literal["bucket", "renormalise", "truncate", "residual_to_label", "sampled"]


class LossConfig(Config):
    """The objective of ``distillation_loss``: kd_weight·T²·D + ce_weight·CE + z_loss·lse², in nats per token.

    Attributes:
        divergence: D between teacher and student: forward_kl, reverse_kl, jsd or tvd.
        beta: the teacher's share in the mixture of jsd.
        tail: what becomes of the teacher's mass outside the kept entries of a top-K signal. ``bucket``: one more
            class, on both sides. ``renormalise``: given to the kept entries in proportion. ``truncate``: dropped, the
            loss can be negative. ``residual_to_label``: given to the label. ``sampled``: there is none, the entries
            are draws with weights that sum to one (ids may repeat), unbiased for forward KL.
            Dense signals have no tail.
        temperature: divides the student's logits and the teacher's log-probabilities in D. T² multiplies D before
            gradients are formed; the cross-entropy is not tempered.
        kd_weight, ce_weight, z_loss: weights of D, of the cross-entropy with the labels, and of the squared logsumexp.
        logit_softcap: c in c·tanh(logits/c), as the student's model applies it; None for none.
        logit_scale: factor on the logits before the soft-cap.
        chunk_budget_mib: memory for the buffers that hold one chunk of logits; the chunk's number of tokens follows
            from it and the vocabulary, never from the number of tokens in the call.
        weight_grad: ``accurate`` sums the head's gradient over chunks in float32, ``compact`` in the head's dtype.
        gradient_filter: relative error of the logits' gradient, by norm, up to which vocabulary columns are left out of
            the products of the backward pass; 0 leaves out none.
    """

    divergence: str = "forward_kl"  # source: Hinton et al. 2015
    beta: float = Field(default=0.5, gt=0, lt=1)  # source: the symmetric divergence of Lin 1991
    tail: Tail = "bucket"  # source: design; held-out KL 0.473 against 0.510 renormalised on the embedded pair
    temperature: float = Field(default=1.0, gt=0)  # source: a healed student learns the teacher's own distribution
    kd_weight: float = Field(default=1.0, ge=0)  # assumption: the signal alone
    ce_weight: float = Field(default=0.0, ge=0)  # assumption: as above
    z_loss: float = Field(default=0.0, ge=0)  # assumption: off; PaLM used 1e-4
    logit_softcap: float | None = Field(default=None, gt=0)  # source: most models have none
    logit_scale: float = Field(default=1.0, gt=0)  # source: as above
    chunk_budget_mib: float = Field(default=768, gt=0)  # source: 1,536 tokens at V 128,256: GEMMs are compute-bound
    weight_grad: Literal["accurate", "compact"] = "accurate"  # source: others report 0.7 % more time
    gradient_filter: float = Field(default=0.0, ge=0, lt=1)  # source: exact unless asked for less

    @field_validator("divergence")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in DIVERGENCES:
            raise ValueError(f"is not a divergence{did_you_mean(value, DIVERGENCES)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "LossConfig":
        if self.kd_weight == 0 and self.ce_weight == 0:
            raise ValueError("kd_weight and ce_weight are both 0: nothing would be learnt, set one of them")
        if self.tail == "sampled" and self.temperature != 1:
            raise ValueError("tail: sampled needs temperature: 1, draws can't be re-tempered without bias")
        return self
