"""Two processes that share a student (FSDP2, gloo on a CPU) against one that has it whole."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sharded_worker import COMPILED, RUNS, make, stop_here
from tiny_run import CPU, VOCAB, RandomTeacher, make_config, make_rows, make_student, step_rows, train

from alambique.core.errors import UserError
from alambique.train.checkpoint import weights
from alambique.train.data import read_step
from alambique.train.sharded import Processes, TooLarge, fitting_rows, note_fitting_rows
from alambique.train.state import Interrupted, Run
from alambique.train.step import Setup, add_gradients

ROOT = Path(__file__).parents[2]
LAUNCH = "import sys; from alambique.models.ranks import launch; sys.exit(launch(2, *sys.argv[1:]))"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes made; ``single`` holds the checkpoint of one process that was stopped after three steps."""
    folder = tmp_path_factory.mktemp("two")
    with pytest.raises(Interrupted):
        make("tied", folder / "single", checkpoint_every_steps=100, stop=stop_here(1, 13))
    assert "Warning" not in launched(folder)
    return folder


def launched(*words: str | Path) -> str:
    command = [sys.executable, "-c", LAUNCH, "-m", "tests.train.sharded_worker", *map(str, words)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=850 if words[1:] else 250, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def assert_same(out: Path, name: str, student: Any, result: Any) -> None:
    found = json.loads((out / f"{name}.json").read_text())
    rows_per_step = (RUNS | {"compiled": COMPILED}).get(name, {}).get("rows_per_step", 4)
    assert len(found["curve"]) == len(result.curve) == 2 * 12 // rows_per_step
    for point, wanted in zip(found["curve"], result.curve, strict=True):
        for key, value in point.items():
            assert value == pytest.approx(getattr(wanted, key), rel=1e-4), (wanted.step, key)
    assert found["num_target_tokens"] == result.num_target_tokens
    assert found["shipped_step"] == result.shipped_step
    for validation, wanted in zip(found["validations"], result.validations, strict=True):
        assert validation == pytest.approx(asdict(wanted), rel=1e-4)
    tensors = load_file(out / f"{name}.safetensors")
    assert tensors.keys() == {key for key, _ in weights(student.model)}
    for key, value in weights(student.model):
        torch.testing.assert_close(tensors[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if name != "bf16"])
def test_two_processes_learn_what_one_learns(name: str, out: Path, tmp_path: Path) -> None:
    assert_same(out, name, *make(name, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="nothing to compile with")
def test_two_processes_with_compiled_layers_learn_what_one_learns(tmp_path: Path) -> None:
    launched(tmp_path, "compiled")
    assert_same(tmp_path, "compiled", *make("compiled", tmp_path / "one"))


@pytest.mark.slow
def test_processes_that_share_rows_hold_half_of_the_positions(out: Path) -> None:
    """Of one row a step, which data parallel could not share; and nothing is computed for all positions."""
    for rank in (0, 1):
        assert max(json.loads((out / f"lengths.context.{rank}.json").read_text())) == 8
        assert max(json.loads((out / f"lengths.tied.{rank}.json").read_text())) == 16


@pytest.mark.slow
def test_a_model_that_cannot_be_shared_out_is_found_out_before_it_trains(out: Path) -> None:
    first, second = (json.loads((out / f"contexts.{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["plain"] == first["sinks"] == "nothing"
    assert re.fullmatch(
        r"UserError: LlamaForCausalLM gives hidden states that differ by \d+% when 2 processes share a row: "
        "unset ALAMBIQUE_CONTEXT_PROCESSES, or choose another model.",
        first["mixing"],
    )


@pytest.mark.slow
def test_bfloat16_rounds_in_two_processes_as_much_as_in_one(out: Path, tmp_path: Path) -> None:
    """Rounding decides what such a run learns: two differ as one does that is cut otherwise."""
    exact, one = (
        [point.loss_nats for point in make("bf16", tmp_path / name, precision=name)[1].curve]
        for name in ("fp32", "bf16")
    )
    two = [point["loss_nats"] for point in json.loads((out / "bf16.json").read_text())["curve"]]
    errors = [max(abs(a / b - 1) for a, b in zip(curve, exact, strict=True)) for curve in (one, two)]
    assert 0 < errors[1] < 3 * errors[0] < 0.03


@pytest.mark.slow
def test_the_head_is_sent_once_a_step_and_layers_with_every_pass(out: Path) -> None:
    """Two steps, two micro-batches each, two layers: gathered forward and backward; head and embeddings are a group."""
    for rank in (0, 1):
        counts = json.loads((out / f"sent.{rank}.json").read_text())
        assert counts["gather"] == 2 * (2 * 2 * 2 + 1)
        assert counts["reduce_scatter"] == 2 * (2 * 2 + 1)


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_another_number_of_processes(out: Path, tmp_path: Path) -> None:
    whole = make("tied", tmp_path)
    assert json.loads((out / "resumed.json").read_text())["resumed_from_step"] == 3
    assert_same(out, "resumed", *whole)
    student, result = make("tied", out / "stopped")
    assert result.resumed_from_step == 5
    assert_same(out, "tied", student, result)
    assert [point.loss_nats for point in result.curve] == pytest.approx(
        [point.loss_nats for point in whole[1].curve], rel=1e-4
    )


@pytest.mark.slow
def test_what_ends_one_process_ends_all(out: Path) -> None:
    first, second = (json.loads((out / f"said.{rank}.json").read_text()) for rank in (0, 1))
    assert first["stop"] == second["stop"] == "Interrupted: stopped after step 5; the same command continues from there"
    assert first["speaks"] is not second["speaks"]
    assert (first["unreadable"], second["unreadable"]) == ("Stopped: ", "UserError: shard 3 is damaged.")
    rows = ", ".join(map(str, step_rows(step=2)))
    assert first["nan"] == second["nan"]
    assert first["nan"].startswith("UserError: step 3 has a loss of nan nats and a gradient norm of nan, on rows")
    assert f"on rows {rows} of the prepared train split" in first["nan"]


def test_each_process_reads_its_rows_and_counts_the_targets_of_all() -> None:
    packed = make_rows()
    teacher: Any = RandomTeacher(packed)
    rows = [3, 0, 6, 9, 1]
    whole = read_step(rows, packed, teacher, pin=False)
    parts = [read_step(rows, packed, teacher, False, rank, 2) for rank in (0, 1)]
    for part, mine in zip(parts, ([3, 6, 1], [0, 9, 3]), strict=True):
        assert part.rows == rows
        assert part.num_target_tokens == whole.num_target_tokens
        assert torch.equal(part.input_ids_RS, packed.input_ids_RS[mine].long())
    assert (parts[1].labels_RS[2] == -100).all()  # it fills the last process's part
    counted = [int((part.labels_RS != -100).sum()) for part in parts]
    assert counted[0] != counted[1]
    assert sum(counted) == whole.num_target_tokens


def test_neighbours_read_the_same_rows_and_each_its_part_of_the_targets() -> None:
    packed = make_rows()
    teacher: Any = RandomTeacher(packed)
    rows = [3, 0, 6, 9, 1]
    pairs = [read_step(rows, packed, teacher, False, rank, 2) for rank in (0, 1)]
    for rank in range(4):
        wanted, positions = pairs[rank // 2], slice(8 * (rank % 2), 8 * (rank % 2) + 8)
        found = read_step(rows, packed, teacher, False, rank, 4, 2)
        assert torch.equal(found.input_ids_RS, wanted.input_ids_RS)
        assert torch.equal(found.labels_RS, wanted.labels_RS[:, positions])
        assert wanted.signal is not None
        assert found.signal is not None
        for field in ("ids_NK", "logprobs_NK", "tail_mass_N"):
            assert torch.equal(getattr(found.signal, field), getattr(wanted.signal, field)[:, positions])
        assert found.num_target_tokens == wanted.num_target_tokens


def test_memory_that_runs_out_in_one_of_several_is_for_all_to_begin_again(tmp_path: Path) -> None:
    student, packed = make_student(), make_rows()
    teacher: Any = RandomTeacher(packed)

    def out_of_memory(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    student.hidden = out_of_memory  # type: ignore[method-assign]
    config = make_config(precision="fp32")
    setup = Setup(student, None, config, config.loss, VOCAB, CPU, lambda: False, processes=Processes(1, 2))
    batch = read_step([3, 0, 6, 9], packed, teacher, False, 1, 2)
    with pytest.raises(TooLarge) as error:
        add_gradients(setup, Run(2), batch)
    assert error.value.rows == 1
    with pytest.raises(UserError, match="one row of this data doesn't fit"):
        add_gradients(setup, Run(1), batch)
    note_fitting_rows(tmp_path, error.value.rows)
    assert fitting_rows(tmp_path) == 1
    _, result = train(tmp_path, precision="fp32", micro_batch_rows=4)
    assert result.micro_batch_rows == 1
