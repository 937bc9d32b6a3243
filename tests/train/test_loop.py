import json
import multiprocessing
import random
import shutil
import signal
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import astuple
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import tiny_run
import torch
from safetensors.torch import load_file
from tiny_run import NUM_ROWS, SEQ_LEN, make_rows, make_student, train
from transformers.modeling_layers import GradientCheckpointingLayer

from alambique.core.errors import UserError
from alambique.core.progress import PROGRESS_FILE
from alambique.models.load import SplitModel
from alambique.train.state import DistillResult, Interrupted


def weights(student: SplitModel) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in student.model.named_parameters()}


def same_weights(first: SplitModel, second: SplitModel) -> bool:
    return all(torch.equal(value, weights(second)[name]) for name, value in weights(first).items())


def stop_after(polls: int) -> Callable[[], bool]:
    remaining = iter(range(polls))
    return lambda: next(remaining, None) is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[SplitModel, DistillResult]:
    """An uninterrupted run in fp32: 6 steps, 2 epochs."""
    torch.manual_seed(0)
    return train(tmp_path_factory.mktemp("whole"), precision="fp32")


def test_the_loss_falls_and_the_result_adds_up(whole: tuple[SplitModel, DistillResult], tmp_path: Path) -> None:
    _, long = train(tmp_path, epochs=20)
    losses = [point.loss_nats for point in long.curve]
    assert losses[-1] < 0.5 * losses[0]
    _, result = whole
    rows = make_rows()
    assert result.steps == len(result.curve) == 2 * NUM_ROWS // 4
    assert result.num_tokens == result.curve[-1].tokens == 2 * NUM_ROWS * SEQ_LEN
    assert result.num_target_tokens == 2 * rows.num_target_tokens
    assert [point.step for point in result.curve] == [1, 2, 3, 4, 5, 6]
    assert result.tokens_per_s == pytest.approx(result.num_tokens / result.seconds)
    assert result.target_tokens_per_s == pytest.approx(result.num_target_tokens / result.seconds)
    assert result.tflop_per_s > 0
    assert result.peak_mib > 100
    assert 0 <= result.data_wait_share < 1
    assert result.checkpoint_seconds > 0
    assert result.resumed_from_step == 0
    assert result.curve[0].loss_nats == result.curve[0].kd_nats  # ce_weight is 0, and yet ce is shown
    assert result.curve[0].ce_nats > 0


@pytest.mark.parametrize("micro_batch_rows", [1, 3, 4])
def test_the_curve_is_the_same_however_a_step_is_cut(
    whole: tuple[SplitModel, DistillResult], tmp_path: Path, micro_batch_rows: int
) -> None:
    _, result = train(tmp_path, precision="fp32", micro_batch_rows=micro_batch_rows)
    for point, wanted in zip(result.curve, whole[1].curve, strict=True):
        assert astuple(point) == pytest.approx(astuple(wanted), rel=2e-4)


@pytest.mark.parametrize("method", ["online", "dense", "forward_chunked"])
def test_every_method_gives_the_same_curve_however_a_step_is_cut(tmp_path: Path, method: str) -> None:
    one, other = (
        train(tmp_path / str(size), precision="fp32", method=method, micro_batch_rows=size)[1] for size in (1, 4)
    )
    assert one.method == method
    for point, wanted in zip(one.curve, other.curve, strict=True):
        assert astuple(point) == pytest.approx(astuple(wanted), rel=2e-4)


def test_the_cached_methods_have_one_curve_and_the_live_teacher_another(
    whole: tuple[SplitModel, DistillResult], tmp_path: Path
) -> None:
    curves = {
        method: train(tmp_path / method, precision="fp32", method=method)[1].curve
        for method in ("online", "dense", "forward_chunked")
    }
    losses = {method: [point.loss_nats for point in curve] for method, curve in curves.items()}
    fused = [point.loss_nats for point in whole[1].curve]
    assert losses["dense"] == pytest.approx(fused, rel=2e-4)
    assert losses["forward_chunked"] == pytest.approx(fused, rel=2e-4)
    assert abs(losses["online"][0] - fused[0]) > 0.1


def test_a_teacher_of_the_wrong_kind_is_a_programmers_error(tmp_path: Path) -> None:
    for method, teacher in (("online", tiny_run.RandomTeacher(make_rows())), ("fused", tiny_run.make_live_teacher())):
        with pytest.raises(ValueError, match=f"method {method} needs a"):
            tiny_run.distill(
                make_student(), make_rows(), teacher, tiny_run.make_config(method=method),  # type: ignore[arg-type]
                vocab_size=tiny_run.VOCAB, scratch=tmp_path, device=tiny_run.CPU,
            )  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_is_a_function_of_params_data_and_seed(tmp_path: Path, precision: str) -> None:
    first, one = train(tmp_path / "1", precision=precision, checkpoint_every_steps=None, log_every_steps=1)
    torch.manual_seed(99)
    second, two = train(tmp_path / "2", precision=precision, checkpoint_every_steps=2, log_every_steps=4)
    assert one.curve == two.curve
    assert same_weights(first, second)
    third, _ = train(tmp_path / "3", precision=precision, seed=1)
    assert not same_weights(first, third)


@pytest.mark.parametrize("polls", [1, 2, 5, 11])
@pytest.mark.parametrize("changes", [{"precision": "fp32"}, {"precision": "bf16"}, {"method": "online"}], ids=str)
def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path, changes: dict[str, str], polls: int) -> None:
    """Each step polls twice (two micro-batches), so odd numbers stop in the middle of a step."""
    whole, result = train(tmp_path / "whole", **changes)
    with pytest.raises(Interrupted) as stopped:
        train(tmp_path / "cut", checkpoint_every_steps=100, stop=stop_after(polls), **changes)
    assert stopped.value.step == polls // 2
    resumed, rest = train(tmp_path / "cut", checkpoint_every_steps=100, **changes)
    assert rest.resumed_from_step == polls // 2
    assert same_weights(resumed, whole)
    assert rest.curve == result.curve
    assert rest.num_target_tokens == result.num_target_tokens


def test_a_run_that_lost_its_last_checkpoint_resumes_from_the_one_before(
    whole: tuple[SplitModel, DistillResult], tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        train(tmp_path, precision="fp32", stop=stop_after(9))
    newest = max(tmp_path.iterdir()) / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    resumed, rest = train(tmp_path, precision="fp32")
    assert rest.resumed_from_step == 3
    assert same_weights(resumed, whole[0])
    assert rest.curve == whole[1].curve


@pytest.mark.parametrize("log_every_steps", [1, 4])
def test_a_loss_that_is_not_finite_stops_with_step_and_rows(tmp_path: Path, log_every_steps: int) -> None:
    student, calls = make_student(), iter(range(100))
    hidden = student.hidden

    def overflowing(input_ids_BS: torch.Tensor, document_ids_BS: torch.Tensor) -> torch.Tensor:
        factor = torch.inf if next(calls) == 5 else 1.0  # the second micro-batch of the third step
        return hidden(input_ids_BS, document_ids_BS) * factor

    student.hidden = overflowing  # type: ignore[method-assign]
    rows = ", ".join(map(str, tiny_run.step_rows(step=2)))
    with pytest.raises(UserError) as error:
        train(tmp_path, student, log_every_steps=log_every_steps)
    assert str(error.value) == (
        "step 3 has a loss of nan nats and a gradient norm of nan, on rows "
        f"{rows} of the prepared train split: "
        "lower distill.learning_rate, or look at those rows."
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_too_small_a_disk_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=10))
    with pytest.raises(UserError, match=r"keeping two checkpoints needs about .* MiB in .*, but 0 MiB are free"):
        train(tmp_path)


def test_dashboards_see_loss_rate_and_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRESS_FILE, str(tmp_path / "progress"))
    _, result = train(tmp_path / "scratch")
    lines = [json.loads(line) for line in (tmp_path / "progress").read_text().splitlines()]
    shown = [line for line in lines if "loss_nats" in line]
    assert [line["loss_nats"] for line in shown] == [point.loss_nats for point in result.curve]
    assert [line["learning_rate"] for line in shown] == [point.learning_rate for point in result.curve]
    assert shown[-1]["done"] == shown[-1]["total"] == result.num_tokens
    assert shown[-1]["tokens_per_s"] > 0


# ---- validation


class Scripted:
    """A validation whose divergences are given, one for each call; it keeps what the student was at each."""

    def __init__(self, *kls: float) -> None:
        self.kls, self.seen = list(kls), list[dict[str, torch.Tensor]]()

    def __call__(self, student: SplitModel) -> dict[str, float]:
        student.model.eval()
        self.seen.append({name: value.clone() for name, value in weights(student).items()})
        return {"kl_nats": self.kls.pop(0), "agreement": 0.5, "perplexity": 9.0, "calibration_error": 0.1}


def test_validation_comes_on_schedule_and_after_the_last_step_and_changes_nothing(
    whole: tuple[SplitModel, DistillResult], tmp_path: Path
) -> None:
    scripted = Scripted(0.3, 0.2)
    student, result = train(tmp_path, precision="fp32", validate_every=4, validate=scripted)
    assert [found.step for found in result.validations] == [4, 6]
    assert [found.kl_nats for found in result.validations] == [0.3, 0.2]
    assert same_weights(student, whole[0])
    assert result.curve == whole[1].curve
    assert result.validation_seconds > 0
    assert student.model.training


@pytest.mark.parametrize(("kls", "shipped"), [((0.3, 0.1, 0.2), 4), ((0.1, 0.2, 0.3), 2), ((0.3, 0.2, 0.1), 6)])
def test_the_best_is_kept_however_many_steps_follow(tmp_path: Path, kls: tuple[float, ...], shipped: int) -> None:
    scripted = Scripted(*kls)
    student, result = train(tmp_path, validate_every=2, keep="best", checkpoint_every_steps=1, validate=scripted)
    assert result.shipped_step == shipped
    assert len(result.curve) == result.steps == 6
    assert all(torch.equal(value, scripted.seen[shipped // 2 - 1][name]) for name, value in weights(student).items())


@pytest.mark.parametrize("polls", [5, 9])
def test_the_best_survives_a_stop(tmp_path: Path, polls: int) -> None:
    """Stopped in the third and in the fifth step: the best is of the second, or of the fourth."""
    whole, result = train(tmp_path / "a", validate_every=2, keep="best", validate=Scripted(0.2, 0.1, 0.3))
    kls = Scripted(0.2, 0.1, 0.3)
    with pytest.raises(Interrupted):
        train(tmp_path / "b", validate_every=2, keep="best", validate=kls, stop=stop_after(polls))
    resumed, rest = train(tmp_path / "b", validate_every=2, keep="best", validate=kls)
    assert rest.resumed_from_step == polls // 2
    assert (rest.shipped_step, rest.validations, rest.curve) == (4, result.validations, result.curve)
    assert same_weights(resumed, whole)


def test_a_damaged_best_is_refused(tmp_path: Path) -> None:
    class Damaging(Scripted):
        def __call__(self, student: SplitModel) -> dict[str, float]:
            if len(self.kls) == 1:
                path = tmp_path / "step_00000003" / "weights.safetensors"
                path.write_bytes(path.read_bytes()[:-1])
            return super().__call__(student)

    with pytest.raises(
        UserError, match=r"checkpoint .*step_00000003, the best one, is damaged .*: set distill.keep: l"
    ):
        train(tmp_path, validate_every=3, keep="best", validate=Damaging(0.1, 0.2))


def test_dashboards_see_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRESS_FILE, str(tmp_path / "progress"))
    train(tmp_path / "scratch", validate_every=3, validate=Scripted(0.3, 0.2))
    lines = [json.loads(line) for line in (tmp_path / "progress").read_text().splitlines()]
    assert [line["valid_kl_nats"] for line in lines if "valid_kl_nats" in line] == [0.3, 0.2]


# ---- compiled layers


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="nothing to compile with")
def test_compiled_layers_learn_the_same(whole: tuple[SplitModel, DistillResult], tmp_path: Path) -> None:
    student, result = train(tmp_path, precision="fp32", compile=True, epochs=2)
    assert all(
        layer._compiled_call_impl is not None  # type: ignore[attr-defined]
        for layer in student.model.modules()
        if isinstance(layer, GradientCheckpointingLayer)
    )
    losses = [point.loss_nats for point in result.curve]
    assert losses == pytest.approx([point.loss_nats for point in whole[1].curve], rel=1e-3)
    assert result.tflop_per_s > 0  # counted before anything was compiled
    student.model.save_pretrained(tmp_path / "out")
    assert {name.split(".")[0] for name in load_file(tmp_path / "out/model.safetensors")} == {"model"}


def test_without_a_compiler_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(UserError, match=r"distill.compile needs a C\+\+ compiler, and there is no g\+\+ or clang"):
        train(tmp_path, compile=True)


# ---- real kills of real processes


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., BaseProcess]]:
    """Start a run in a process of its own, forked from one that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_run"])

    def start(*paths: Path) -> BaseProcess:
        process = context.Process(target=tiny_run.train_and_save, args=paths)
        process.start()
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(tiny_run.__file__).parent))  # the server knows no other way to tiny_run
        yield start


def finish(process: BaseProcess) -> None:
    process.join()
    assert process.exitcode == 0


def kill_after(process: BaseProcess, progress: Path, steps: int, extra_seconds: float) -> None:
    """Kill the run once it has reported so many steps; anywhere in the next one, or while it saves a checkpoint."""
    while process.is_alive():
        if progress.exists() and progress.read_text().count("\n") >= steps:
            time.sleep(extra_seconds)
            process.kill()
            process.join()
            return
        time.sleep(0.001)


@pytest.mark.slow
def test_ten_kills_end_with_the_same_bytes(tmp_path: Path, start: Callable[..., BaseProcess]) -> None:
    seed = time.time_ns()
    print(f"kills drawn with seed {seed}")  # shown if the test fails
    chance = random.Random(seed)
    finish(start(tmp_path / "whole", tmp_path / "a", tmp_path / "p"))
    for kill in range(10):
        progress = tmp_path / f"p{kill}"
        process = start(tmp_path / "cut", tmp_path / "b", progress)
        kill_after(process, progress, chance.randrange(1, 4), chance.uniform(0, 0.05))
        assert process.exitcode == -signal.SIGKILL, "the run ended before it could be killed"
    finish(start(tmp_path / "cut", tmp_path / "b", tmp_path / "q"))
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"curve.json", "model.safetensors"} <= set(files)  # the curve tells rates and rows' losses, step by step
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    last = "step_00000059"
    for name in ("weights.safetensors", "optimiser.safetensors"):
        assert (tmp_path / "whole" / last / name).read_bytes() == (tmp_path / "cut" / last / name).read_bytes(), name
