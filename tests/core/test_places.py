from pathlib import Path

import pytest

from alambique.core.places import assets_dir, main_checkout, work_dir

NAMES = ("DVC_ROOT", "ALAMBIQUE_ASSETS", "ALAMBIQUE_WORK")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_dvc_it_is_the_current_folder(here: Path) -> None:
    assert main_checkout() == here
    assert assets_dir() == here / ".assets"
    assert work_dir() == here / ".work"


@pytest.mark.parametrize("by", ["environment", "folder"])
def test_an_experiment_shares_the_main_checkouts_folders(here: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = here / ".dvc/tmp/exps/tmpabc123"
    copy.mkdir(parents=True)
    if by == "environment":
        monkeypatch.setenv("DVC_ROOT", str(copy))
    else:
        monkeypatch.chdir(copy)
    assert main_checkout() == here
    assert work_dir() == here / ".work"


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_ROOT", "/somewhere")
    assert assets_dir() == Path("/somewhere/.assets")
    monkeypatch.setenv("ALAMBIQUE_ASSETS", "/big/assets")
    monkeypatch.setenv("ALAMBIQUE_WORK", "/big/work")
    assert (assets_dir(), work_dir()) == (Path("/big/assets"), Path("/big/work"))
