"""Which student: what each way of pruning leaves, and what is refused before anything runs."""

from typing import Any

import pytest
import torch

from alambique.core.errors import UserError
from alambique.core.params import validate
from alambique.models.importance import Importance
from alambique.models.student import StudentConfig, decide, scores

# Of six layers; blocks of two start at five places.
IMPORTANCE = Importance(
    num_tokens=10,
    block_influence=[0.9, 0.02, 0.3, 0.01, 0.02, 0.123456789],
    block_distance=[0.8, 0.4, 0.2, 0.05, 0.3],
    channels_LI=torch.tensor([[1.0, 4.0, 2.0, 3.0]]).double().repeat(6, 1),
    groups_LG=torch.tensor([[2.0, 2.0, 1.0]] * 5 + [[0.1, 0.2, 3.0]]).double(),
)


def of(**values: Any) -> StudentConfig:
    return validate(StudentConfig, values, "params.yaml: student")


def test_which_layers_are_kept() -> None:
    assert StudentConfig(drop_layers=[1, 3]).kept_layers(5) == [0, 2, 4]
    block = of(drop_block={"first": 14, "count": 6})
    assert block.kept_layers(30) == [*range(14), *range(20, 30)]
    assert StudentConfig(keep_uniform=4).kept_layers(10) == [0, 3, 6, 9]
    assert StudentConfig(keep_uniform=1).kept_layers(10) == [0]
    assert not StudentConfig(drop_layers=[1, 3]).measured
    for count in range(1, 30):
        kept = StudentConfig(keep_uniform=count).kept_layers(30)
        assert len(set(kept)) == count
        assert kept == sorted(kept)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drop_layers": [1, 30]}, "drop_layers names layer 30, but the teacher's layers are 0 to 29"),
        ({"drop_layers": [-1]}, "drop_layers names layer -1, but"),
        ({"drop_layers": [3, 3]}, "drop_layers names a layer twice"),
        ({"drop_layers": []}, "drop_layers drops 0 of the teacher's 30 layers"),
        ({"drop_block": {"first": 0, "count": 30}}, "drop_block drops 30 of the teacher's 30 layers"),
        ({"drop_block": {"first": 28, "count": 3}}, "drop_block names layer 30"),
        ({"drop_block": {"first": "measured", "count": 30}}, "drop_block drops 30 of the teacher's 30 layers"),
        ({"drop_by_influence": 31}, "drop_by_influence drops 31 of the teacher's 30 layers"),
        ({"keep_uniform": 30}, "keep_uniform = 30 must be smaller than the teacher's 30 layers"),
        ({"width": {"intermediate_size": 1536}}, "width.intermediate_size = 1536 must be smaller than the teacher's"),
        ({"width": {"num_key_value_heads": 9}}, "width.num_key_value_heads = 9 must be smaller than the teacher's 3"),
    ],
)
def test_bad_layers_are_refused_in_one_sentence(values: dict[str, Any], message: str) -> None:
    config = of(**values)
    with pytest.raises(UserError, match=message):
        config.require(30, 1536, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "must set exactly one of model, drop_layers, drop_block, keep_uniform, drop_by_influence, not none"),
        ({"model": "hf://a/b", "drop_layers": [1]}, "not model and drop_layers"),
        ({"drop_layer": [1]}, "unknown key drop_layer; did you mean drop_layers?"),
        ({"drop_by_influence": 2, "keep_uniform": 4}, "not keep_uniform and drop_by_influence"),
        ({"model": "hf://a/b", "width": {"intermediate_size": 8}}, "sets both model and width, but only the teacher"),
        ({"width": {}}, "width must set intermediate_size, num_key_value_heads, or both"),
        ({"width": {"hidden_size": 8}}, r"unknown key width\.hidden_size"),
        ({"widht": {"intermediate_size": 8}}, r"unknown key widht; did you mean width\?"),
        ({"drop_by_influense": 2}, r"unknown key drop_by_influense; did you mean drop_by_influence\?"),
        ({"drop_layers": [1], "measure": {"row": 2}}, r"unknown key measure\.row; did you mean rows\?"),
        ({"drop_block": {"start": 1, "count": 2}}, r"unknown key drop_block.start"),
        ({"drop_block": {"first": "mesured", "count": 2}}, "drop_block.first = 'mesured' .*should be 'measured'"),
        ({"drop_block": {"first": -1, "count": 2}}, "drop_block.first = -1 should be greater than or equal to 0"),
    ],
)
def test_bad_student_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        of(**values)


def test_the_least_influential_layers_go() -> None:
    config = of(drop_by_influence=2)
    assert config.measured
    assert config.strategy == "drop_by_influence"
    assert decide(config, 6, IMPORTANCE).layers == [0, 2, 4, 5]  # layers 1 and 4 are equal: the lower one goes


def test_the_block_that_turns_the_states_least_goes() -> None:
    config = of(drop_block={"first": "measured", "count": 2})
    assert config.measured
    assert decide(config, 6, IMPORTANCE).layers == [0, 1, 2, 5]


def test_width_goes_with_any_depth_or_alone() -> None:
    config = of(width={"intermediate_size": 2, "num_key_value_heads": 2}, drop_layers=[0])
    assert config.measured
    cut = decide(config, 6, IMPORTANCE)
    assert cut.layers == [1, 2, 3, 4, 5]
    assert cut.channels is not None
    assert cut.groups is not None
    assert cut.channels.tolist() == [[1, 3]] * 6  # those of 4.0 and 3.0, in the teacher's order
    assert cut.groups.tolist() == [[0, 1]] * 5 + [[1, 2]]
    alone = decide(of(width={"intermediate_size": 3}), 6, IMPORTANCE)
    assert alone.layers == [0, 1, 2, 3, 4, 5]
    assert alone.groups is None
    assert of(width={"intermediate_size": 3}).strategy == "width"


def test_scores_are_short_enough_for_results() -> None:
    found = scores(IMPORTANCE, decide(of(width={"intermediate_size": 2}), 6, IMPORTANCE))
    assert found["tokens"] == 10
    assert found["block_influence"][-1] == 0.123457
    assert found["channels_share_kept"] == [0.7] * 6
    assert found["groups"][5] == [0.1, 0.2, 3.0]
    plain = Importance(10, [0.1, 0.2], [0.3])
    assert set(scores(plain, decide(of(drop_by_influence=1), 2, plain))) == {
        "tokens",
        "block_influence",
        "block_distance",
    }
