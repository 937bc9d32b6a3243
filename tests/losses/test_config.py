"""Bad settings get one sentence that names the key and the remedy."""

from typing import Any

import pytest

from alambique import LossConfig
from alambique.core.errors import UserError
from alambique.core.params import validate


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"divergence": "forward_kll"},
            "distill.loss: divergence = 'forward_kll' is not a divergence; did you mean forward_kl?",
        ),
        (
            {"kd_weight": 0},
            "distill.loss: the section kd_weight and ce_weight are both 0: nothing would be learnt, set one of them",
        ),
        (
            {"tail": "sampled", "temperature": 2},
            "distill.loss: the section tail: sampled needs temperature: 1, draws can't be re-tempered without bias",
        ),
        ({"temprature": 2}, "distill.loss: unknown key temprature; did you mean temperature?"),
        ({"beta": 1}, "distill.loss: beta = 1 should be less than 1"),
        ({"temperature": 0}, "distill.loss: temperature = 0 should be greater than 0"),
    ],
)
def test_sentences(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(LossConfig, values, "distill.loss")
    assert str(caught.value) == sentence


def test_every_field_is_described() -> None:
    for name in LossConfig.model_fields:
        assert name in (LossConfig.__doc__ or ""), name
