"""Which student: a model of its own, or what is left of the teacher after leaving out layers, channels and heads.

Dimensions: L teacher layers, I MLP channels of a layer, G groups of heads (a key-value head with its query heads).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from alambique.core.errors import UserError
from alambique.core.params import Config
from alambique.models.importance import Importance

_DEPTH = ("drop_layers", "drop_block", "keep_uniform", "drop_by_influence")


class LayerBlock(Config):
    """Consecutive layers, counted from 0; with ``measured``, the block that turns the hidden states least."""

    first: Annotated[int, Field(ge=0)] | Literal["measured"]
    count: int = Field(ge=1)


class Width(Config):
    """How wide the layers are after pruning. What isn't named stays; the hidden size always stays."""

    intermediate_size: int | None = Field(None, ge=1)  # MLP channels, those of least mean |activation| go
    num_key_value_heads: int | None = Field(None, ge=1)  # each with its query heads, those that add least go

    @model_validator(mode="after")
    def _something(self) -> "Width":
        if self.intermediate_size is None and self.num_key_value_heads is None:
            raise ValueError("must set intermediate_size, num_key_value_heads, or both")
        return self


class Measurement(Config):
    """On what the teacher is measured, where a strategy needs it."""

    # assumption: 16; one row of 256 tokens chose the same layers as 32 of them on the embedded pair (docs/log.md)
    rows: int = Field(default=16, ge=1)  # first rows of the train split
    attention: str = "sdpa"  # the one kernel of transformers that runs on every device


class StudentConfig(Config):
    """Which student: a ``model``, or the teacher pruned in depth (one of four ways), in ``width``, or both."""

    model: str | None = None  # URI of a model with the teacher's vocabulary
    drop_layers: list[int] | None = None  # the teacher without these layers, counted from 0
    drop_block: LayerBlock | None = None  # the teacher without a run of layers
    # so many of the teacher's layers, evenly spaced, first and last included
    keep_uniform: int | None = Field(None, ge=1)
    # the teacher without so many layers, those of least block influence (ShortGPT, arXiv 2403.03853)
    drop_by_influence: int | None = Field(None, ge=1)
    width: Width | None = None  # by activation importance (Minitron, arXiv 2407.14679)
    measure: Measurement = Measurement()

    @model_validator(mode="after")
    def _one_student(self) -> "StudentConfig":
        chosen = [name for name in ("model", *_DEPTH) if getattr(self, name) is not None]
        if len(chosen) > 1 or (not chosen and self.width is None):
            names = ", ".join(("model", *_DEPTH))
            found = " and ".join(chosen) or "none"
            raise ValueError(f"must set exactly one of {names}, not {found} (or `width`, alone or beside a depth)")
        if self.model is not None and self.width is not None:
            raise ValueError("sets both model and width, but only the teacher is ever pruned: leave one out")
        return self

    @property
    def strategy(self) -> str:
        """What chose the student: the key that was set, ``width`` where depth stays."""
        return next((name for name in ("model", *_DEPTH) if getattr(self, name) is not None), "width")

    @property
    def measured_depth(self) -> int | None:
        """How many layers go that the teacher must be measured to choose; None where none are chosen so."""
        if self.drop_block is not None and self.drop_block.first == "measured":
            return self.drop_block.count
        return self.drop_by_influence

    @property
    def measured(self) -> bool:
        """Whether the teacher must be run on the corpus to make this student."""
        return self.width is not None or self.measured_depth is not None

    def require(self, num_layers: int, intermediate_size: int | None, key_value_heads: int | None) -> None:
        """Check against the teacher's sizes what can be checked before it is measured; None for one that it lacks.

        Raises:
            UserError: nothing or everything would be left, or a width isn't smaller than the teacher's.
        """
        if self.measured_depth is not None:
            _require_count(self.strategy, self.measured_depth, num_layers)
        else:
            self.kept_layers(num_layers)
        limits = (("intermediate_size", intermediate_size), ("num_key_value_heads", key_value_heads))
        for name, limit in limits:
            wanted = getattr(self.width, name, None)
            if wanted is not None and limit is not None and not wanted < limit:
                raise UserError(f"width.{name} = {wanted} must be smaller than the teacher's {limit}: leave it out.")

    def kept_layers(self, num_layers: int, importance: Importance | None = None) -> list[int]:
        """The teacher's layers that a pruned student keeps, ascending; ``importance`` where it is ``measured``.

        Raises:
            UserError: an index outside the teacher, twice the same, or nothing or everything is left.
        """
        if self.keep_uniform is not None:
            return _evenly_spaced(self.keep_uniform, num_layers)
        name, dropped = self.strategy, self._dropped(importance)
        wrong = [index for index in dropped if not 0 <= index < num_layers]
        if wrong:
            raise UserError(f"{name} names layer {wrong[0]}, but the teacher's layers are 0 to {num_layers - 1}.")
        if len(set(dropped)) != len(dropped):
            raise UserError(f"{name} names a layer twice: list each layer once.")
        if name in _DEPTH:
            _require_count(name, len(dropped), num_layers)
        return [index for index in range(num_layers) if index not in set(dropped)]

    def _dropped(self, importance: Importance | None) -> list[int]:
        if self.drop_by_influence is not None:
            assert importance is not None
            return _least(importance.block_influence, self.drop_by_influence)
        if self.drop_block is not None:
            first = self.drop_block.first
            if first == "measured":
                assert importance is not None
                first = _least(importance.block_distance, 1)[0]
            return list(range(first, first + self.drop_block.count))
        return self.drop_layers or []


@dataclass(frozen=True)
class Cut:
    """What stays of a teacher: ``layers``, and of each *teacher* layer these channels and groups; None where all stay.

    All ascending, because order is free: a permuted MLP computes the same.
    """

    layers: Sequence[int]
    channels: Tensor | None = None  # [L, kept channels]
    groups: Tensor | None = None  # [L, kept groups]


def decide(config: StudentConfig, num_layers: int, importance: Importance | None = None) -> Cut:
    """What stays. Equal scores are decided by the lower index, so the same scores give the same student."""
    layers = config.kept_layers(num_layers, importance)
    if config.width is None:
        return Cut(layers)
    assert importance is not None
    return Cut(
        layers,
        _most(importance.channels_LI, config.width.intermediate_size),
        _most(importance.groups_LG, config.width.num_key_value_heads),
    )


def scores(importance: Importance, cut: Cut) -> dict[str, Any]:
    """The scores for results, to six digits: of channels, thousands a layer, only what share of their sum is kept."""
    found: dict[str, Any] = {
        "tokens": importance.num_tokens,
        "block_influence": _rounded(importance.block_influence),
        "block_distance": _rounded(importance.block_distance),
    }
    if importance.groups_LG is not None:
        found["groups"] = [_rounded(groups.tolist()) for groups in importance.groups_LG]
    if importance.channels_LI is not None and cut.channels is not None:
        pairs = zip(importance.channels_LI, cut.channels, strict=True)
        found["channels_share_kept"] = _rounded([float(all_I[kept].sum() / all_I.sum()) for all_I, kept in pairs])
    return found


def _require_count(name: str, dropped: int, num_layers: int) -> None:
    if not 0 < dropped < num_layers:
        raise UserError(f"{name} drops {dropped} of the teacher's {num_layers} layers: drop some, keep some.")


def _evenly_spaced(count: int, num_layers: int) -> list[int]:
    if not count < num_layers:
        raise UserError(f"keep_uniform = {count} must be smaller than the teacher's {num_layers} layers.")
    if count == 1:
        return [0]
    return [round(step * (num_layers - 1) / (count - 1)) for step in range(count)]


def _least(scores: Sequence[float], count: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda index: scores[index])[:count])


def _most(scores_LX: Tensor | None, count: int | None) -> Tensor | None:
    """Indices of the ``count`` highest scores of each layer, ascending, [L, count]."""
    if scores_LX is None or count is None:
        return None
    return torch.argsort(scores_LX, dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
