"""Alambique distils large language models into small ones. This page is the public API; a test freezes it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alambique.cache.reader import TeacherCache
    from alambique.core.signal import DenseSignal, TopKSignal
    from alambique.losses.config import LossConfig
    from alambique.losses.distillation import LossOutput, distillation_loss

__all__ = ["DenseSignal", "LossConfig", "LossOutput", "TeacherCache", "TopKSignal", "distillation_loss"]

# Imported when first used: whoever imports a part of the package runs this file, and must neither wait for torch (the
# orchestration, two seconds in each of three processes per stage) nor come to depend on the losses (law 2).
_HOMES = {
    "DenseSignal": "alambique.core.signal",
    "TeacherCache": "alambique.cache.reader",
    "TopKSignal": "alambique.core.signal",
    "LossConfig": "alambique.losses.config",
    "LossOutput": "alambique.losses.distillation",
    "distillation_loss": "alambique.losses.distillation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
