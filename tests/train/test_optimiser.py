import pytest
import torch
from tiny_run import make_student
from torch import nn

from alambique.train.config import DistillConfig
from alambique.train.optimiser import adamw, clip_gradients, learning_rate, set_learning_rate


def test_norms_and_biases_do_not_decay_and_a_tied_head_comes_once() -> None:
    model = make_student(attention_bias=True).model
    groups = adamw(model.named_parameters(), DistillConfig(weight_decay=0.3)).param_groups
    decaying, others = (group["params"] for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert all(p.ndim == 2 for p in decaying)
    assert all(p.ndim == 1 for p in others)
    assert {id(p) for p in [*decaying, *others]} == {id(p) for p in model.parameters()}
    assert len(decaying) + len(others) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out() -> None:
    layer = nn.Linear(3, 3)
    layer.weight.requires_grad_(False)
    assert [g["params"] for g in adamw(layer.named_parameters(), DistillConfig()).param_groups] == [[layer.bias]]


def test_one_step_is_decoupled_adam_by_hand() -> None:
    config = DistillConfig(weight_decay=0.5)
    weight = nn.Parameter(torch.tensor([[2.0, -1.0]]))
    optimiser = adamw([("w", weight)], config)
    set_learning_rate(optimiser, 0.1)
    weight.grad = torch.tensor([[3.0, -0.2]])
    optimiser.step()
    # At the first step the bias-corrected moments are g and g², so the update is the sign of g.
    torch.testing.assert_close(weight.detach(), torch.tensor([[2.0 * 0.95 - 0.1, -1.0 * 0.95 + 0.1]]))


def test_the_rate_warms_up_peaks_and_falls_to_its_floor() -> None:
    config = DistillConfig(learning_rate=1.0, warmup_ratio=0.25, min_learning_rate_ratio=0.1)
    rates = [learning_rate(step, 20, config) for step in range(20)]
    assert rates[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[12] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + 0.10452846), abs=1e-6)  # cos(7π/15)
    assert 0.1 < rates[-1] < 0.12


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_no_step_of_a_short_run_is_wasted(num_steps: int) -> None:
    config = DistillConfig(min_learning_rate_ratio=0.0, warmup_ratio=0.9)
    assert all(learning_rate(step, num_steps, config) > 0 for step in range(num_steps))
    assert learning_rate(num_steps - 1, num_steps, config) == config.learning_rate


def test_clipping_scales_to_the_norm_and_reports_what_it_was() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_gradients(parameters, 1.0).item() == pytest.approx(5.0)
    assert torch.cat([p.grad for p in parameters if p.grad is not None]).norm().item() == pytest.approx(1.0, rel=1e-5)


def test_a_small_gradient_stays_as_it_is() -> None:
    parameter, frozen = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([0.3, 0.4])
    assert clip_gradients([parameter, frozen], 1.0).item() == pytest.approx(0.5)
    assert parameter.grad.tolist() == torch.tensor([0.3, 0.4]).tolist()
    assert clip_gradients([frozen], 1.0).item() == 0


def test_a_norm_that_is_not_finite_is_returned() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([float("nan")])
    assert clip_gradients([parameter], 1.0).isnan()
