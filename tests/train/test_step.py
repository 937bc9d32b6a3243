from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_run import CPU, VOCAB, RandomTeacher, make_config, make_live_teacher, make_rows, make_student
from torch import Tensor

from alambique.core.errors import UserError
from alambique.core.signal import TopKSignal
from alambique.data.dataset import PackedRows
from alambique.losses.config import LossConfig
from alambique.models.load import SplitModel
from alambique.train.data import StepRows, read_step
from alambique.train.state import Meters, Run
from alambique.train.step import Setup, add_gradients

ROWS = [3, 0, 6, 9]


def make_setup(student: SplitModel, **changes: Any) -> Setup:
    loss = LossConfig(ce_weight=0.5)
    config = make_config(precision="fp32", **changes)
    teacher = make_live_teacher() if config.method == "online" else None
    return Setup(student, teacher, config, loss, VOCAB, CPU, stop=lambda: False)


def make_batch(packed: PackedRows | None = None, live: bool = False) -> StepRows:
    packed = packed or make_rows()
    teacher: Any = None if live else RandomTeacher(packed)
    return read_step(ROWS, packed, teacher, pin=False)


def counted(micro_batch_rows: int) -> Run:
    """A run that has counted its FLOPs already."""
    return Run(micro_batch_rows, meters=Meters(flops_per_row=1.0))


def gradients_of(student: SplitModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in student.model.named_parameters() if p.grad is not None}


def step_gradients(micro_batch_rows: int, tied: bool = True, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    student = make_student(tied)
    setup = make_setup(student, **changes)
    losses = add_gradients(setup, counted(micro_batch_rows), make_batch(live=setup.teacher is not None))
    assert losses is not None
    return losses, gradients_of(student)


METHODS = ["online", "dense", "forward_chunked", "fused"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("micro_batch_rows", [1, 2, 3])
def test_gradients_do_not_depend_on_the_micro_batch(micro_batch_rows: int, method: str) -> None:
    whole_losses, whole = step_gradients(4, method=method)
    losses, parts = step_gradients(micro_batch_rows, method=method)
    torch.testing.assert_close(losses, whole_losses)
    assert parts.keys() == whole.keys()
    for name, gradient in parts.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "choice", [{"method": name} for name in METHODS[1:]] + [{"impl": "fused"}, {"impl": "recompute"}]
)
def test_gradients_are_those_of_the_plain_mean_over_target_tokens(tied: bool, choice: dict[str, str]) -> None:
    """The definition in a few lines: full logits, autograd, and the teacher's tail as one class."""
    losses, gradients = step_gradients(2, tied, **choice)
    student, batch = make_student(tied), make_batch()
    mask = batch.labels_RS != -100
    hidden_RSD = student.hidden(batch.input_ids_RS, batch.document_ids_RS)
    logq = (hidden_RSD[mask] @ student.head_weight_VD.T)[:, :VOCAB].double().log_softmax(-1)
    ids, logp = batch.signal.ids_NK[mask], batch.signal.logprobs_NK[mask].double()
    logq_K = logq.gather(1, ids)
    rest_p, rest_q = batch.signal.tail_mass_N[mask].double(), 1 - logq_K.exp().sum(-1)
    kd = ((logp.exp() * (logp - logq_K)).sum(-1) + rest_p * (rest_p / rest_q).log()).mean()
    ce = -logq.gather(1, batch.labels_RS[mask][:, None]).mean()
    (kd + 0.5 * ce).backward()
    torch.testing.assert_close(losses, torch.stack([kd + 0.5 * ce, kd, ce]).float().detach())
    for name, gradient in gradients_of(student).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("impl", ["auto", "recompute"])
def test_online_is_the_divergence_over_the_whole_vocabulary(impl: str) -> None:
    """The live teacher in bf16 as it stands, its distribution over the shared ids alone."""
    losses, gradients = step_gradients(2, method="online", impl=impl)
    student, batch, teacher = make_student(), make_batch(), make_live_teacher()
    mask = batch.labels_RS != -100
    hidden_RSD = student.hidden(batch.input_ids_RS, batch.document_ids_RS)
    logq = (hidden_RSD[mask] @ student.head_weight_VD.T)[:, :VOCAB].double().log_softmax(-1)
    teacher_ND = teacher.hidden(batch.input_ids_RS, batch.document_ids_RS)[mask].double()
    logp = (teacher_ND @ teacher.head_weight_VD.double().T)[:, :VOCAB].log_softmax(-1)
    kd = (logp.exp() * (logp - logq)).sum(-1).mean()
    ce = -logq.gather(1, batch.labels_RS[mask][:, None]).mean()
    (kd + 0.5 * ce).backward()
    torch.testing.assert_close(losses, torch.stack([kd + 0.5 * ce, kd, ce]).float().detach())
    for name, gradient in gradients_of(student).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in teacher.model.parameters())


def test_packed_documents_give_the_gradients_of_documents_alone() -> None:
    """Each document in a row of its own, padded: attention, positions, targets and the mean know no difference."""
    packed = make_rows()
    packed_losses, together = step_gradients(2)
    alone, signal = separate_documents(packed)
    batch = read_step(list(range(alone.num_rows)), alone, signal, pin=False)
    assert batch.num_target_tokens == make_batch().num_target_tokens
    student = make_student()
    losses = add_gradients(make_setup(student), counted(3), batch)
    assert losses is not None
    torch.testing.assert_close(losses, packed_losses)
    for name, gradient in gradients_of(student).items():
        torch.testing.assert_close(gradient, together[name], rtol=1e-4, atol=1e-7)


def separate_documents(packed: PackedRows) -> tuple[PackedRows, Any]:
    """The documents of ``ROWS`` one a row, from position 0 on, and their signal."""
    teacher = RandomTeacher(packed)
    places = [(row, packed.document_ids_RS[row] == number) for row in ROWS for number in (0, 1)]
    fields = [packed.input_ids_RS, packed.document_ids_RS, packed.loss_mask_RS]
    fields += [teacher.signal.ids_NK, teacher.signal.logprobs_NK, teacher.signal.tail_mass_N]
    moved = [torch.zeros(len(places), *field.shape[1:], dtype=field.dtype) for field in fields]
    moved[1].fill_(-1)
    for place, (row, mask_S) in enumerate(places):
        for field, target in zip(fields, moved, strict=True):
            target[place, : int(mask_S.sum())] = field[row, mask_S]
    teacher.signal = TopKSignal(*moved[3:])
    return PackedRows(*moved[:3]), teacher


def test_a_frozen_head_gets_no_gradient() -> None:
    student = make_student(tied=False)
    student.head_weight_VD.requires_grad_(False)
    add_gradients(make_setup(student), counted(2), make_batch())
    assert student.head_weight_VD.grad is None
    assert "model.embed_tokens.weight" in gradients_of(student)


def test_recomputed_activations_give_the_same_gradients() -> None:
    _, plain = step_gradients(2)
    student = make_student()
    student.model.train()
    student.model.activation_checkpointing_enable()
    for run in (counted(2), Run(2)):
        student.model.zero_grad()
        add_gradients(make_setup(student), run, make_batch())
        for name, gradient in gradients_of(student).items():
            torch.testing.assert_close(gradient, plain[name])
    plain_run = Run(2)
    add_gradients(make_setup(make_student()), plain_run, make_batch())
    assert run.meters.flops_per_row > 1.2 * plain_run.meters.flops_per_row  # recomputation is work done


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bf16_differs_by_rounding_only_and_keeps_fp32_gradients(checkpointing: bool) -> None:
    _, exact = step_gradients(2)
    student = make_student()
    student.model.train()
    if checkpointing:
        student.model.activation_checkpointing_enable()
    setup = make_setup(student)
    add_gradients(replace(setup, config=make_config(precision="bf16")), counted(2), make_batch())
    for name, gradient in gradients_of(student).items():
        assert gradient.dtype == torch.float32
        assert (gradient - exact[name]).norm() < 0.05 * exact[name].norm(), name


def test_flops_are_counted_once_and_counting_changes_nothing() -> None:
    student, run = make_student(), Run(2)
    losses = add_gradients(make_setup(student), run, make_batch())
    uncounted_losses, uncounted = step_gradients(2)
    assert losses is not None
    assert torch.equal(losses, uncounted_losses)
    assert all(torch.equal(gradient, uncounted[name]) for name, gradient in gradients_of(student).items())
    # 6 FLOPs per weight and token for the layers; the head counts its targets only.
    layer_weights = sum(p.numel() for n, p in student.model.named_parameters() if p.ndim == 2 and "embed" not in n)
    batch = make_batch()
    seq_len, targets = batch.input_ids_RS.shape[1], int((batch.labels_RS[:2] != -100).sum())
    head = student.head_weight_VD.numel()
    # QKᵀ and PV of 16 × 16 positions: 2 products forward, 5 backward (one recomputed), 2 layers of width 32.
    attention = 2 * 7 * 2 * seq_len * seq_len * 32
    wanted = 6 * layer_weights * seq_len + 6 * head * targets / 2 + attention
    assert run.meters.flops_per_row == pytest.approx(wanted, rel=0.02)
    # The convention: three times the forward pass, nothing recomputed.
    assert run.meters.model_flops_per_row == pytest.approx(wanted - attention / 7, rel=0.02)


def test_a_live_teacher_is_work_but_not_the_students() -> None:
    runs = {}
    for method in ("online", "fused"):
        runs[method] = Run(2)
        add_gradients(make_setup(make_student(), method=method), runs[method], make_batch(live=method == "online"))
    online, fused = (runs[method].meters for method in ("online", "fused"))
    assert online.flops_per_row > 1.25 * fused.flops_per_row  # a teacher as large as the student: a third of its work
    assert online.model_flops_per_row == fused.model_flops_per_row


class FailsOnce:
    """Runs out of memory on micro-batches above ``limit`` rows, after some gradients were already added."""

    def __init__(self, student: SplitModel, limit: int, after: int = 0) -> None:
        self.student, self.limit, self.after, self.calls = student, limit, after, 0
        self.original = student.hidden

    def __call__(self, input_ids_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
        self.calls += 1
        if len(input_ids_BS) > self.limit and self.calls > self.after:
            raise torch.OutOfMemoryError("no memory left")
        return self.original(input_ids_BS, document_ids_BS)


@pytest.mark.parametrize(("micro_batch_rows", "limit", "after", "left"), [(4, 1, 0, 1), (2, 1, 1, 1), (3, 2, 0, 2)])
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_step(
    capsys: pytest.CaptureFixture[str], micro_batch_rows: int, limit: int, after: int, left: int
) -> None:
    whole_losses, whole = step_gradients(4)
    student, run = make_student(), counted(micro_batch_rows)
    student.hidden = FailsOnce(student, limit, after)  # type: ignore[method-assign]
    losses = add_gradients(make_setup(student), run, make_batch())
    assert losses is not None
    torch.testing.assert_close(losses, whole_losses)
    for name, gradient in gradients_of(student).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-7)
    assert run.micro_batch_rows == left
    assert f"out of memory: going on with micro-batches of {left} rows" in capsys.readouterr().err


def test_a_row_that_never_fits_is_the_users_to_solve() -> None:
    student = make_student()
    student.hidden = FailsOnce(student, limit=0)  # type: ignore[method-assign]
    with pytest.raises(UserError) as error:
        add_gradients(make_setup(student), counted(4), make_batch())
    assert str(error.value) == (
        "one row of this data doesn't fit in the memory of cpu beside the model: set "
        "distill.gradient_checkpointing, prepare shorter rows (prepare.seq_len), share rows between GPUs "
        "(ALAMBIQUE_CONTEXT_PROCESSES), or use a larger one."
    )


def test_dropout_is_a_function_of_seed_and_step() -> None:
    def masked(step: int, seed: int, noise: int) -> Tensor:
        student = make_student(attention_dropout=0.5)
        student.model.train()
        torch.manual_seed(noise)
        run = Run(4, step=step, meters=Meters(flops_per_row=1.0))
        losses = add_gradients(make_setup(student, seed=seed), run, make_batch())
        assert losses is not None
        return losses

    assert torch.equal(masked(5, 0, noise=1), masked(5, 0, noise=2))
    assert not torch.equal(masked(5, 0, noise=1), masked(6, 0, noise=1))
    assert not torch.equal(masked(5, 0, noise=1), masked(5, 1, noise=1))


def test_a_stop_between_micro_batches_leaves_no_gradients() -> None:
    student = make_student()
    polls = iter([False, True])
    setup = replace(make_setup(student), stop=lambda: next(polls))
    assert add_gradients(setup, counted(2), make_batch()) is None
    assert not gradients_of(student)


def test_rows_without_targets_add_nothing() -> None:
    packed = make_rows()
    packed.loss_mask_RS[torch.tensor(ROWS[:2])] = False
    student = make_student()
    losses = add_gradients(make_setup(student), counted(2), make_batch(packed))
    assert losses is not None
    assert losses[0] > 0
    packed.loss_mask_RS[:] = False
    student = make_student()
    losses = add_gradients(make_setup(student), counted(2), make_batch(packed))
    assert losses is not None
    assert losses.tolist() == [0, 0, 0]
    assert not gradients_of(student)
