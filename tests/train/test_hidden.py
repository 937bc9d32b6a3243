"""Hidden states matched between layers: against float64, however a step is cut, and gone from what is shipped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import CPU, VOCAB, make_config, make_rows, make_student, train
from torch import Tensor
from transformers import AutoModelForCausalLM

from alambique.core.errors import UserError
from alambique.models.load import SplitModel
from alambique.train.data import StepRows, read_step
from alambique.train.export import export_model
from alambique.train.hidden import HiddenConfig, Matching
from alambique.train.state import Interrupted, Meters, Run
from alambique.train.step import Setup, add_gradients
from tests.tiny_models import tiny_tokenizer

WIDE = 40  # of a teacher that a student of 32 needs projections for
PAIRS = ((0, 1), (1, 0))


def batch() -> StepRows:
    return read_step([3, 0, 6, 9], make_rows(), None, pin=False)


def teacher_of(size: int) -> SplitModel:
    """In float32, whose states are rounded to bfloat16 once; a teacher in bfloat16 rounds by the batch as well."""
    teacher = make_student(tied=False, seed=4, hidden_size=size)
    teacher.model.eval().requires_grad_(False)
    return teacher


def wide_teacher() -> SplitModel:
    return teacher_of(WIDE)


def setup_of(teacher: SplitModel, precision: str = "fp32", **hidden: Any) -> Setup:
    student = make_student()
    config = make_config(precision=precision, method="online", hidden={"map": PAIRS, **hidden})
    assert config.hidden is not None
    matching = Matching(student, config.hidden, teacher.config.hidden_size, seed=0)
    return Setup(student, teacher, config, config.loss, VOCAB, CPU, lambda: False, matching=matching)


def gradients(setup: Setup, micro_batch_rows: int = 4) -> tuple[Tensor, dict[str, Tensor]]:
    run = Run(micro_batch_rows, meters=Meters(flops_per_row=1.0))
    values = add_gradients(setup, run, batch())
    assert values is not None
    found = {name: p.grad.clone() for name, p in setup.student.model.named_parameters() if p.grad is not None}
    setup.student.model.zero_grad()
    return values, found


def states_of(model: SplitModel, rows: StepRows) -> list[Tensor]:
    """By transformers' own option, which gives the embeddings first, and after the last layer what the norm makes."""
    last: list[Tensor] = []
    norm = model.model.model.norm  # type: ignore[union-attr]
    handle = norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))  # type: ignore[operator]
    mask, outputs = rows.labels_RS != -100, []
    for row in range(len(mask)):
        for document in (0, 1):
            here = rows.document_ids_RS[row] == document
            out = model.model(rows.input_ids_RS[row][here][None], output_hidden_states=True, use_cache=False)
            states = [*out.hidden_states[1:-1], last.pop()]
            outputs.append([state[0][mask[row][here]] for state in states])
    handle.remove()
    return [torch.cat(states) for states in zip(*outputs, strict=True)]


def twin(setup: Setup, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The definition in float64, one document at a time: distance, and the gradients of ``weight`` times it."""
    assert setup.teacher is not None
    assert setup.matching is not None
    rows = batch()
    with setup.teacher.recording([0, 1]) as found:
        setup.teacher.hidden(rows.input_ids_RS, rows.document_ids_RS)
    mask = rows.labels_RS != -100
    theirs = [found[layer][mask].bfloat16().double() for layer in (0, 1)]
    for packed, alone in zip(theirs, states_of(setup.teacher, rows), strict=True):
        torch.testing.assert_close(packed, alone.double(), rtol=2**-8, atol=1e-6)
    student = SplitModel(setup.student.model.double())
    ours, total = states_of(student, batch()), torch.zeros((), dtype=torch.float64)
    for number, (layer, teacher_layer) in enumerate(PAIRS):
        state, target = ours[layer], theirs[teacher_layer]
        if setup.matching.projections:
            state = state @ setup.matching.projections[number].weight.T
        if kind == "normalised":
            unit, wanted = state / state.norm(dim=1, keepdim=True), target / target.norm(dim=1, keepdim=True)
            total = total + ((unit - wanted) ** 2).sum(dim=1).mean() / len(PAIRS)
        else:
            total = total + ((state - target) ** 2).mean() / len(PAIRS)
    (setup.matching.weight * total).backward()
    named = setup.student.model.named_parameters()
    return total.detach(), {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize("kind", ["normalised", "mse"])
@pytest.mark.parametrize("size", [32, WIDE])
def test_distance_and_gradients_are_those_of_float64(size: int, kind: str) -> None:
    setup = setup_of(teacher_of(size), distance=kind, weight=3.0)
    nothing = setup.config.loss.model_copy(update={"kd_weight": 0.0})  # so that no other gradient hides this one
    values, found = gradients(replace(setup, loss=nothing))
    total, wanted = twin(setup, kind)
    torch.testing.assert_close(values[3].double(), total, rtol=1e-5, atol=0)
    assert len([name for name in found if "projections" in name]) == (2 if size == WIDE else 0)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name].double(), gradient, rtol=1e-4, atol=1e-6, msg=f"{name} differs")
    alone = gradients(replace(setup_of(teacher_of(size)), matching=None))
    both = gradients(setup_of(teacher_of(size), distance=kind, weight=3.0))
    assert torch.equal(both[0][:3], alone[0])
    for name, gradient in alone[1].items():
        torch.testing.assert_close(both[1][name], gradient + found[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("micro_batch_rows", [1, 2, 3])
def test_no_gradient_depends_on_the_micro_batch(micro_batch_rows: int) -> None:
    setup = setup_of(wide_teacher())
    whole_values, whole = gradients(setup)
    values, parts = gradients(setup, micro_batch_rows)
    torch.testing.assert_close(values, whole_values)
    assert parts.keys() == whole.keys()
    for name, gradient in parts.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-7)


def test_recomputed_and_rounded_activations_give_the_same_gradients_to_rounding() -> None:
    _, exact = gradients(setup_of(wide_teacher()))
    setup = setup_of(wide_teacher())
    setup.student.model.train()
    setup.student.model.activation_checkpointing_enable()
    _, recomputed = gradients(setup, 2)
    _, rounded = gradients(setup_of(wide_teacher(), "bf16"), 2)
    for name, gradient in exact.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-4, atol=1e-7)
        assert 0 < (rounded[name] - gradient).norm() < 0.05 * gradient.norm(), name


def run(scratch: Path, **changes: Any) -> tuple[SplitModel, Any]:
    hidden = {"map": PAIRS, "weight": 2.0}
    return train(scratch, method="online", hidden=hidden, precision="fp32", teacher_size=WIDE, **changes)


def test_a_resumed_run_ends_with_the_same_bytes_and_ships_no_projection(tmp_path: Path) -> None:
    student, whole = run(tmp_path / "whole")
    distances = [point.hidden_loss for point in whole.curve]
    assert distances[-1] < 0.9 * distances[0]
    polls = iter(range(7))
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", stop=lambda: next(polls, None) is None)
    again, resumed = run(tmp_path / "cut")
    assert resumed.resumed_from_step == 3
    assert resumed.curve == whole.curve
    names = [name for name, _ in student.model.named_parameters()]
    assert names == [name for name, _ in make_student().model.named_parameters()]
    for (name, one), (_, other) in zip(student.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    export_model(student.model, tiny_tokenizer(), tmp_path / "out", "fp32", "card", {})
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]


def test_the_map_follows_depth_or_what_was_pruned() -> None:
    auto = HiddenConfig()
    own = auto.with_pairs((6, 12), None, None, "the cache")
    assert own.map == ((0, 1), (1, 3), (2, 5), (3, 7), (4, 9))  # Patient KD's own: every second layer, but the last
    pruned = auto.with_pairs((4, 7), [0, 1, 5, 6], None, "the cache")
    assert pruned.map == ((0, 0), (1, 4), (2, 5))  # layer 1 stands for 1 to 4
    assert auto.with_pairs((6, 12), None, (3, 9, 11), "the cache").map == ((1, 3), (4, 9))
    assert max(t for _, t in auto.with_pairs((5, 3), None, None, "").map) == 1  # a student deeper than its teacher


@pytest.mark.parametrize(
    ("pairs", "held", "said"),
    [
        ([[0, 4]], None, "distill.hidden.map names layer 4 of the teacher, whose layers are 0 to 3."),
        ([[2, 0]], None, "distill.hidden.map names layer 2 of the student, whose layers are 0 to 1."),
        ([[0, 1], [0, 1]], None, "distill.hidden.map matches the same pair twice: list pairs such as [[3, 5]], each "
                                 "once."),
        ("auto", (3,), "distill.hidden.map matches no layer of both: list pairs such as [[3, 5]], each once."),
        ([[0, 1], [1, 2]], (1,), "the cache holds no hidden states after layers 2, which distill.hidden asks for: set "
                                 "teacher.hidden_layers to [1, 2] (the teacher then reads the rows again), or "
                                 "distill.method to online."),
        ("auto", (), "the cache holds no hidden states, which distill.hidden asks for: set teacher.hidden_layers to "
                     "the layers to match (the teacher then reads the rows again), or distill.method to online."),
    ],
)  # fmt: skip
def test_pairs_that_cannot_be_matched_are_refused(pairs: Any, held: Any, said: str) -> None:
    config = HiddenConfig.model_validate({"map": pairs})
    with pytest.raises(UserError) as error:
        config.with_pairs((2, 4), None, held, "the cache")
    assert str(error.value) == said
