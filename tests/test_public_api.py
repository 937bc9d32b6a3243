"""The public API is frozen: a change here is a change for everyone who uses the library."""

import inspect
import subprocess
import sys

import pytest

import alambique
from alambique import LossConfig, LossOutput, distillation_loss


def test_exports() -> None:
    assert alambique.__all__ == [
        "DenseSignal",
        "LossConfig",
        "LossOutput",
        "TeacherCache",
        "TopKSignal",
        "distillation_loss",
    ]
    for name in alambique.__all__:
        assert getattr(alambique, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'alambique' has no attribute 'distilation_loss'"):
        alambique.distilation_loss  # noqa: B018


def test_signature_of_the_loss() -> None:
    assert list(inspect.signature(distillation_loss).parameters) == [
        "hidden_ND",
        "head_weight_VD",
        "signal",
        "labels_N",
        "weights_N",
        "head_bias_V",
        "vocab_size",
        "denominator",
        "config",
        "impl",
        "weight_grad_VD",
        "vocab_group",
        "drop_rows",
    ]
    assert list(LossOutput.__dataclass_fields__) == [
        "loss",
        "kd",
        "ce",
        "student_mass",
        "entropy",
        "impl",
        "filter_error",
    ]


def test_settings_of_the_loss_and_their_defaults() -> None:
    assert LossConfig().model_dump() == {
        "divergence": "forward_kl",
        "beta": 0.5,
        "tail": "bucket",
        "temperature": 1.0,
        "kd_weight": 1.0,
        "ce_weight": 0.0,
        "z_loss": 0.0,
        "logit_softcap": None,
        "logit_scale": 1.0,
        "chunk_budget_mib": 768,
        "weight_grad": "accurate",
        "gradient_filter": 0.0,
    }


def test_importing_the_package_does_not_wait_for_torch() -> None:
    code = "import sys, alambique; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
