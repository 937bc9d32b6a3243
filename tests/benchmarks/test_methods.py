import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from alambique.core.errors import UserError
from benchmarks import methods, pairs, run
from benchmarks.cases import Options

CPU = torch.device("cpu")
KEYS = {"peak_mib", "seconds_per_iteration", "tflop_per_s", "kl_nats", "loss_peak_gib"}


@pytest.mark.slow
def test_the_last_line_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command line, and in a process of its own, as a user runs it."""
    assert run.main(["methods", "--quick", "--skip-tests", "--device", "cpu", "--only", "online"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(summary) == ["online"]
    assert summary["online"].keys() == KEYS
    assert all(summary["online"][key] > 0 for key in KEYS - {"loss_peak_gib"})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods measured in this process: starting four takes a minute on a busy machine."""

    def measured(
        name: str, group: list[str], steps: int, device: torch.device, notes: list[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((method, methods.measure(name, method, steps, device)) for method in group)

    monkeypatch.setattr(methods, "_in_processes", measured)


def test_methods_differ_in_memory_and_work_and_not_in_what_they_learn(here: None) -> None:
    out = methods.run(Options(CPU, quick=True))
    assert list(out.summary) == list(methods.METHODS) == ["online", "dense", "forward_chunked", "fused"]
    alone = {method: figures["loss_peak_gib"]["262144"] for method, figures in out.summary.items()}
    assert alone["fused"] < alone["forward_chunked"] < alone["dense"]
    assert alone["fused"] < alone["online"]  # which holds the teacher's head and states as well
    kls = [out.summary[method]["kl_nats"] for method in ("dense", "forward_chunked", "fused")]
    assert kls == pytest.approx([kls[0]] * 3, rel=1e-3)  # one objective, one budget: rounding alone
    rows = {row["method"]: row for row in out.rows}
    extra = {method: row["executed_tflop_per_s"] / row["tflop_per_s"] for method, row in rows.items()}
    assert 0.9 < extra["fused"] < 1.1
    assert extra["online"] > 1.2
    assert rows["online"]["loss_impl"] == rows["fused"]["loss_impl"] == "fused"


def test_processes_take_turns_and_do_not_wait_for_those_that_left() -> None:
    """Threads stand for the processes: three of them, and the second fails at its third step."""
    turns = methods.Turns(3, get_context("spawn"))
    order: list[int] = []

    def work(index: int) -> None:
        for step in range(4):
            turns.wait(index)
            order.append(index)
            if index == 1 and step == 2:
                break
        turns.leave(index)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3), timeout=60))
    assert order == [0, 1, 2] * 3 + [0, 2]


def _refuse(name: str, method: str, steps: int, device: torch.device) -> dict[str, object]:
    if method == "dense":
        raise UserError("one row of this data doesn't fit.")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.slow
def test_a_method_that_can_not_run_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "measure", _refuse)
    out = methods.run(Options(CPU, quick=True, only=("dense", "fused")))
    assert out.summary == {}
    assert "dense: one row of this data doesn't fit." in out.notes
    assert "fused: its process was killed, most often because memory ran out." in out.notes


def test_the_published_shapes_are_those_of_the_table() -> None:
    shape = pairs.RANDOM["llama31_8b_random"]()
    assert (shape.hidden, shape.vocab, shape.seq_len) == (4096, 128_256, 8192)
    layer = shape.hidden * shape.hidden * 2 * (1 + shape.kv_heads / shape.heads) + 3 * shape.hidden * shape.intermediate
    embeddings = 2 * shape.vocab * shape.hidden
    assert shape.layers * layer + embeddings == pytest.approx(8.03e9, rel=0.001)
    assert shape.student_layers * layer + embeddings == pytest.approx(3.23e9, rel=0.001)


def test_a_pair_of_params_needs_its_cache_and_student(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "params.yaml").write_text((Path(__file__).parents[2] / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    assert pairs.chosen(Options(CPU)) == "smollm2_24l"
    assert pairs.chosen(Options(CPU, only=("fused", "llama31_8b_random"))) == "llama31_8b_random"
    command = "run dvc repro teacher@smollm2_135m student@smollm2_24l"
    with pytest.raises(UserError, match=re.escape(f"smollm2_24l has no cache or student yet: {command}.")):
        pairs.open_pair("smollm2_24l", CPU)
    with pytest.raises(UserError, match=r"smollm2_24 is no pair of params.yaml; did you mean smollm2_24l\?"):
        pairs.open_pair("smollm2_24", CPU)
