from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import make_config, make_student

from alambique.core.errors import UserError
from alambique.train import checkpoint
from alambique.train.optimiser import adamw

Trained = tuple[torch.nn.Module, torch.optim.AdamW]


def fresh() -> Trained:
    model = make_student().model
    return model, adamw(model.named_parameters(), make_config())


def update(model: torch.nn.Module, optimiser: torch.optim.AdamW, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimiser.step()


def state(model: torch.nn.Module, optimiser: torch.optim.AdamW) -> list[torch.Tensor]:
    moments = [value for p in model.parameters() for _, value in sorted(optimiser.state[p].items())]
    return [p.detach().clone() for p in model.parameters()] + [value.clone() for value in moments]


def three_checkpoints(folder: Path) -> dict[int, list[torch.Tensor]]:
    model, optimiser = fresh()
    states = {}
    for step in (1, 2, 3):
        update(model, optimiser, seed=step)
        checkpoint.save(folder, step, model, optimiser, {"step": step})
        states[step] = state(model, optimiser)
    return states


def restored(folder: Path) -> tuple[Any, list[torch.Tensor]]:
    model, optimiser = fresh()
    saved = checkpoint.restore(folder, model, optimiser)
    return saved, state(model, optimiser) if saved else []


def test_the_newest_comes_back_bit_for_bit_and_goes_on_alike(tmp_path: Path) -> None:
    states = three_checkpoints(tmp_path)
    model, optimiser = fresh()
    assert checkpoint.restore(tmp_path, model, optimiser) == {"step": 3}
    assert all(map(torch.equal, state(model, optimiser), states[3]))
    update(model, optimiser, seed=4)
    whole_model, whole_optimiser = fresh()
    for seed in (1, 2, 3, 4):
        update(whole_model, whole_optimiser, seed)
    assert all(map(torch.equal, state(model, optimiser), state(whole_model, whole_optimiser)))


def test_two_are_kept_and_nothing_else_is_left(tmp_path: Path) -> None:
    three_checkpoints(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    assert {p.suffix for p in tmp_path.rglob("*") if p.is_file()} == {".safetensors", ".json"}


def test_a_spared_one_stays_beside_the_last_two(tmp_path: Path) -> None:
    model, optimiser = fresh()
    for step in range(1, 6):
        update(model, optimiser, seed=step)
        checkpoint.save(tmp_path, step, model, optimiser, {}, spare=1 if step < 5 else 4)
        if step == 4:
            assert [checkpoint.is_there(tmp_path, step) for step in (1, 2, 3, 4)] == [True, False, True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]


def test_the_weights_of_one_step_can_be_had_alone(tmp_path: Path) -> None:
    states = three_checkpoints(tmp_path)
    model, optimiser = fresh()
    checkpoint.load_weights(tmp_path, 2, model)
    loaded = [p.detach() for p in model.parameters()]
    assert all(map(torch.equal, loaded, states[2][: len(loaded)]))
    assert not optimiser.state
    flip_a_byte(tmp_path / "step_00000003/weights.safetensors")
    with pytest.raises(
        UserError, match=r"the best one, is damaged \(weights.safetensors doesn't match its hash\): set"
    ):
        checkpoint.load_weights(tmp_path, 3, model)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("weights.safetensors", "weights.safetensors doesn't match its hash"),
        ("optimiser.safetensors", "optimiser.safetensors doesn't match its hash"),
        ("state.json", "state.json doesn't match its hash"),
        ("manifest.json", "is not valid JSON"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    states = three_checkpoints(tmp_path)
    damaged = tmp_path / "step_00000003" / name
    damaged.write_bytes(damaged.read_bytes()[:-7]) if name == "manifest.json" else flip_a_byte(damaged)
    saved, tensors = restored(tmp_path)
    assert saved == {"step": 2}
    assert all(map(torch.equal, tensors, states[2]))
    message = capsys.readouterr().err
    assert f"checkpoint {tmp_path / 'step_00000003'} is damaged" in message
    assert reason in message
    assert not damaged.exists()


def test_a_missing_file_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three_checkpoints(tmp_path)
    (tmp_path / "step_00000003/optimiser.safetensors").unlink()
    assert restored(tmp_path)[0] == {"step": 2}
    assert "optimiser.safetensors is missing" in capsys.readouterr().err


def test_without_a_whole_one_the_run_starts_afresh(tmp_path: Path) -> None:
    assert restored(tmp_path)[0] is None
    three_checkpoints(tmp_path)
    for path in tmp_path.rglob("weights.safetensors"):
        flip_a_byte(path)
    assert restored(tmp_path)[0] is None


def test_half_written_ones_are_not_seen_and_go(tmp_path: Path) -> None:
    three_checkpoints(tmp_path)
    (tmp_path / "step_00000003").rename(tmp_path / ".step_00000003.abc.part")
    assert restored(tmp_path)[0] == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_the_space_needed_leaves_out_what_is_there(tmp_path: Path) -> None:
    model, _ = fresh()
    numel = sum(p.numel() for p in model.parameters())
    assert checkpoint.bytes_needed(model, tmp_path) == 3 * 12 * numel
    assert checkpoint.bytes_needed(model, tmp_path, spared=1) == 4 * 12 * numel
    three_checkpoints(tmp_path)
    assert 0.5 * 12 * numel < checkpoint.bytes_needed(model, tmp_path) <= 12 * numel
