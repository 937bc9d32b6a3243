import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FAKE = Path(__file__).with_name("fake_teacher.py")
_spec = importlib.util.spec_from_file_location("fake_teacher", FAKE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["fake_teacher"] = _module  # tests write `import fake_teacher`
_spec.loader.exec_module(_module)


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished cache of four blocks; tests that damage it copy it first."""
    folder = tmp_path_factory.mktemp("captured")
    _module.run(folder / "out", folder / "store")
    return folder / "out"


@pytest.fixture(scope="session")
def fake_teacher() -> ModuleType:
    return _module
