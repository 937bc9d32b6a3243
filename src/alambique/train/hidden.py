"""Hidden states of the student's layers, pulled towards those of the teacher's layers that they are mapped to.

After Patient KD (arXiv 1908.09355), which trains BERT on the states of one token; here every position with a target
counts, as in the loss on the logits.

Dimensions: N positions with a target, D hidden size of the student, E of the teacher, L mapped layers of the teacher.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from alambique.core.errors import UserError
from alambique.core.params import Config
from alambique.models.load import SplitModel

Distance = Literal["normalised", "mse"]
_Layer = Annotated[int, Field(ge=0)]
_NAME = "hidden_projections"  # of the module that the student has while it trains


class HiddenConfig(Config):
    """Which hidden states are matched, and how: ``distill.hidden``.

    Attributes:
        map: pairs of a student's and a teacher's layer, counted from 0; a layer's state is what it hands on. ``auto``
            takes each layer of the student but the last, which the logits look after: beside the teacher's layer at the
            same relative depth, or in a pruned teacher beside the last layer before the next one that was kept, so that
            it learns to stand for those that are gone. With a cache, those pairs of which it holds the teacher's state.
        weight: of the mean distance over pairs and positions, beside a loss in nats.
        distance: ``normalised``: squared distance of the states, each divided by its norm (0 to 4); ``mse``: mean of
            squared differences over the dimensions, as they are.
    """

    map: Literal["auto"] | tuple[tuple[_Layer, _Layer], ...] = "auto"  # source: PKD-Skip, arXiv 1908.09355 §3.2
    # assumption; 1 % less held-out KL on the embedded pair (docs/log.md). The paper searches β from 10 to 1,000 over
    # means of 768 dimensions
    weight: float = Field(1.0, gt=0)
    distance: Distance = "normalised"  # source: eq. 7 there; mse is TinyBERT's (arXiv 1909.10351, eq. 8)

    def with_pairs(
        self,
        layers: tuple[int, int],
        kept: Sequence[int] | None,
        held: Sequence[int] | None,
        where: str,
    ) -> "HiddenConfig":
        """With the pairs that ``map`` means.

        Args:
            layers: how many the student and the teacher have.
            kept: the teacher's layers that the student was made of, None for a model of its own.
            held: the teacher's layers whose states a cache holds, None for a live teacher.
            where: the cache, for what it is refused with.

        Raises:
            UserError: a layer that isn't there, one pair twice, or a cache without the states.
        """
        pairs = _by_depth(*layers, kept) if self.map == "auto" else self.map
        if held is not None:
            require_held(self, held, where)
            pairs = tuple(pair for pair in pairs if pair[1] in held)
        for what, number, mapped in zip(("student", "teacher"), layers, zip(*pairs, strict=True), strict=False):
            if max(mapped) >= number:
                raise UserError(
                    f"distill.hidden.map names layer {max(mapped)} of the {what}, whose layers are 0 to {number - 1}."
                )
        if not pairs or len(set(pairs)) < len(pairs):
            found = "the same pair twice" if pairs else "no layer of both"
            raise UserError(f"distill.hidden.map matches {found}: list pairs such as [[3, 5]], each once.")
        return self.model_copy(update={"map": pairs})


def _by_depth(student: int, teacher: int, kept: Sequence[int] | None) -> tuple[tuple[int, int], ...]:
    if kept is not None:
        return tuple((layer, after - 1) for layer, after in enumerate(kept[1:]))
    return tuple((layer, max(0, round((layer + 1) * teacher / student) - 1)) for layer in range(student - 1))


def require_held(config: HiddenConfig, held: Sequence[int], where: str) -> None:
    """Refuse a cache that lacks hidden states, as far as ``map`` names them.

    Raises:
        UserError: begins with ``where``.
    """
    named = () if config.map == "auto" else sorted({teacher for _, teacher in config.map})
    lacking = [layer for layer in named if layer not in held]
    if lacking or not held:
        what = f"hidden states after layers {', '.join(map(str, lacking))}" if lacking else "hidden states"
        raise UserError(
            f"{where} holds no {what}, which distill.hidden asks for: set teacher.hidden_layers to "
            f"{list(named) or 'the layers to match'} (the teacher then reads the rows again), or distill.method to "
            "online."
        )


class Matching:
    """The pairs of one student, and a learned linear map to the teacher's width for each where the widths differ.

    These maps are a module of the student's model, so that optimiser, checkpoints and FSDP2 take them for its own;
    ``remove`` takes them off. They have no bias and begin at random, so that a state keeps its size (assumption).

    Args:
        student: gets the module.
        config: with pairs.
        teacher_size: E.
        seed: of the maps.
    """

    def __init__(self, student: SplitModel, config: HiddenConfig, teacher_size: int, seed: int) -> None:
        assert config.map != "auto"
        self.pairs, self.weight, self._distance, self._model = config.map, config.weight, config.distance, student.model
        self.student_layers = sorted({ours for ours, _ in self.pairs})
        self.teacher_layers = sorted({theirs for _, theirs in self.pairs})
        size, device = student.config.hidden_size, student.head_weight_VD.device
        if size != teacher_size:
            generator = torch.Generator().manual_seed(seed)
            maps = nn.ModuleList(nn.Linear(size, teacher_size, bias=False, device="meta") for _ in self.pairs)
            for linear in maps:
                weight_ED = torch.randn(teacher_size, size, generator=generator) * size**-0.5
                linear.weight = nn.Parameter(weight_ED.to(device))
            self._model.add_module(_NAME, maps)

    @property
    def projections(self) -> Any:
        """The maps, in the order of the pairs; empty where the widths are the same."""
        return getattr(self._model, _NAME, ())

    def remove(self) -> None:
        """Take the maps off the model: they are no part of what is shipped."""
        if self.projections:
            delattr(self._model, _NAME)

    def loss(self, ours: dict[int, Tensor], theirs_NLE: Tensor, denominator: int) -> Tensor:
        """Mean distance over pairs, summed over positions and divided by ``denominator``.

        Args:
            ours: the student's states [N, D] by layer.
            theirs_NLE: the teacher's, after ``teacher_layers``.
            denominator: positions with a target of the whole step.
        """
        total = theirs_NLE.new_zeros((), dtype=torch.promote_types(theirs_NLE.dtype, torch.float32))
        for number, (layer, teacher_layer) in enumerate(self.pairs):
            state_NE = self.projections[number](ours[layer]) if self.projections else ours[layer]
            target_NE = theirs_NLE[:, self.teacher_layers.index(teacher_layer)]
            total = total + distance(state_NE.to(total.dtype), target_NE.to(total.dtype), self._distance)
        return total / (len(self.pairs) * denominator)


def distance(state_NE: Tensor, target_NE: Tensor, kind: Distance) -> Tensor:
    """Summed over positions: the definition."""
    if kind == "mse":
        return F.mse_loss(state_NE, target_NE, reduction="sum") / state_NE.shape[-1]
    return F.mse_loss(F.normalize(state_NE, dim=-1), F.normalize(target_NE, dim=-1), reduction="sum")
