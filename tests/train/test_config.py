import pytest
import torch

from alambique.core.errors import UserError
from alambique.core.params import validate
from alambique.train.config import DistillConfig


@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        ({}, 24),
        ({"epochs": 0.5}, 12),
        ({"epochs": 2, "rows_per_step": 100}, 4),
        ({"epochs": 0.001}, 1),
        ({"epochs": 3, "steps": 5}, 5),
    ],
)
def test_the_budget_is_epochs_unless_steps_are_given(settings: dict[str, float], num_steps: int) -> None:
    config = DistillConfig.model_validate(settings)
    assert config.num_steps(192) == num_steps


@pytest.mark.parametrize(
    ("settings", "loss_impl"),
    [
        ({}, "auto"),
        ({"method": "online"}, "auto"),
        ({"method": "dense"}, "dense"),
        ({"method": "forward_chunked"}, "forward_chunked"),
        ({"impl": "recompute"}, "recompute"),
    ],
)
def test_the_method_decides_the_path_and_impl_only_which_chunked_one(settings: dict[str, str], loss_impl: str) -> None:
    assert DistillConfig.model_validate(settings).loss_impl == loss_impl


def test_a_path_that_the_method_does_not_use_is_refused() -> None:
    with pytest.raises(UserError, match=r"impl chooses among chunked paths, and method: dense is none: leave impl out"):
        validate(DistillConfig, {"method": "dense", "impl": "tiled"}, "params.yaml: distill")
    with pytest.raises(UserError, match="impl"):
        validate(DistillConfig, {"impl": "dense"}, "params.yaml: distill")


def test_a_mistyped_key_names_the_right_one() -> None:
    with pytest.raises(UserError, match=r"unknown key learning_rat; did you mean learning_rate\?"):
        validate(DistillConfig, {"learning_rat": 1e-4}, "params.yaml: distill")


def test_the_best_needs_a_measure() -> None:
    with pytest.raises(UserError, match=r"keep: best needs a measure of better: set validate_every, in steps"):
        validate(DistillConfig, {"keep": "best"}, "params.yaml: distill")
    assert DistillConfig.model_validate({"keep": "best", "validate_every": 10}).validate_every == 10


@pytest.mark.parametrize(("key", "value"), [("learning_rate", 0), ("beta2", 1), ("warmup_ratio", 1), ("epochs", -1)])
def test_values_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"distill: {key} = {value} should be"):
        validate(DistillConfig, {key: value}, "params.yaml: distill")


def test_auto_precision_is_what_the_device_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, precision in (("bfloat16", "bf16"), ("float32", "fp32")):
        monkeypatch.setattr("alambique.train.config.fast_dtype", lambda device, dtype=dtype: dtype)
        assert DistillConfig().resolved(torch.device("cpu")).precision == precision
        for asked in ("bf16", "fp32"):
            assert DistillConfig(precision=asked).resolved(torch.device("cpu")).precision == asked
