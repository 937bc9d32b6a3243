import gc
import weakref
from pathlib import Path

import pytest
import torch
from tiny_run import CPU, VOCAB, make_config, make_live_teacher, make_rows, make_student

from alambique.core.progress import PROGRESS_FILE
from alambique.heldout import HeldoutConfig, heldout
from alambique.train.validation import FIGURES, validator


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_the_held_out_comparison_without_the_teacher(precision: str) -> None:
    teacher, rows = make_live_teacher(), make_rows(num_rows=5)
    config = HeldoutConfig.model_validate({"batch_rows": 2})
    validate = validator(teacher, rows, VOCAB, make_config(precision=precision, micro_batch_rows=2), CPU)
    students = {"one": make_student(), "two": make_student(seed=7)}
    wanted = heldout(teacher, students, rows, VOCAB, config, CPU)
    gone = weakref.ref(teacher.model)
    del teacher
    gc.collect()
    assert gone() is None  # but for its head
    for name, student in students.items():
        found = validate(student)
        assert found.keys() == set(FIGURES)
        for figure, value in found.items():
            exact = {"rel": 1e-6} if precision == "fp32" else {"rel": 0.05, "abs": 0.03}  # a wide one: bf16, 60 tokens
            assert value == pytest.approx(wanted[figure][name], **exact), figure
    assert validate(students["one"])["kl_nats"] != validate(students["two"])["kl_nats"]


def test_dropout_is_off_and_gradients_are_not_wanted_and_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    student = make_student(attention_dropout=0.5)
    student.model.train()
    validate = validator(make_live_teacher(), make_rows(num_rows=2), VOCAB, make_config(), CPU)
    torch.manual_seed(0)
    capsys.readouterr()
    monkeypatch.setenv(PROGRESS_FILE, str(tmp_path / "progress"))
    assert validate(student) == validate(student)
    assert capsys.readouterr().err == ""  # the trainer's bar is the job's
    assert not (tmp_path / "progress").exists()
    assert all(p.grad is None for p in student.model.parameters())
