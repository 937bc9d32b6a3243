"""What params.yaml alone can tell is wrong is told before anything runs."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from alambique.core.errors import UserError
from pipeline.check import check_params

ROOT = Path(__file__).parents[2]


def check(folder: Path, teacher: dict[str, Any], distill: dict[str, Any]) -> None:
    """Check params.yaml with its teacher's capture and its pair's distill section changed."""
    yaml = YAML(typ="safe")
    tree = yaml.load((ROOT / "params.yaml").read_text())
    tree["teachers"]["smollm2_135m"]["capture"] = teacher
    tree["pairs"]["smollm2_24l"]["distill"] = distill
    yaml.dump(tree, folder / "params.yaml")
    check_params(folder / "params.yaml")


@pytest.mark.parametrize(
    ("teacher", "distill"),
    [
        ({"keep": "sampled"}, {"loss": {"tail": "sampled"}}),
        ({"keep": "sampled"}, {"method": "online"}),
        ({"keep": "top_k_and_draws", "top_k": 5, "draws": 3}, {"loss": {"tail": "sampled"}}),
        ({}, {"method": "online", "loss": {"tail": "sampled"}}),
    ],
)
def test_a_loss_that_suits_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: dict[str, Any], distill: dict[str, Any]
) -> None:
    monkeypatch.chdir(ROOT)  # evals/ is found from the checkout
    check(tmp_path, teacher, distill)


@pytest.mark.parametrize(
    ("teacher", "distill", "message"),
    [
        (
            {},
            {"loss": {"tail": "bucket"}},
            "distill.loss.tail = bucket would take draws for a top K: set it to sampled, or the teacher's keep to "
            "top_k.",
        ),
        (
            {"keep": "top_k"},
            {},
            "distill.loss.tail = sampled would take a top K for draws: set another tail (bucket is the default), or "
            "the teacher's keep to sampled or top_k_and_draws.",
        ),
    ],
)
def test_a_loss_that_would_misread_its_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    teacher: dict[str, Any],
    distill: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError) as caught:
        check(tmp_path, teacher, distill)
    assert str(caught.value) == f"{tmp_path / 'params.yaml'}: pairs.smollm2_24l: {message}"


def test_hidden_states_that_no_cache_will_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    hidden = {"hidden": {"map": [[3, 4], [7, 9]]}}
    check(tmp_path, {"hidden_layers": [4, 9]}, hidden)
    check(tmp_path, {}, {"method": "online", **hidden})
    with pytest.raises(UserError) as caught:
        check(tmp_path, {"hidden_layers": [4]}, hidden)
    assert str(caught.value) == (
        f"{tmp_path / 'params.yaml'}: teachers.smollm2_135m holds no hidden states after layers 9, which "
        "distill.hidden asks for: set teacher.hidden_layers to [4, 9] (the teacher then reads the rows again), or "
        "distill.method to online."
    )
