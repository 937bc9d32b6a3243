import os
import subprocess
import time
from pathlib import Path

import pytest

from alambique.core.places import SHIPPED, assets_dir, forget_shipped, main_checkout, work_dir

MAKEFILE = Path(__file__).parents[2] / "Makefile"
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


def test_prune_forgets_only_old_work_that_no_cache_uses(here: Path) -> None:
    ages = {"teacher/h/idle": 31, "teacher/h/used": 31, "teacher/h/new": 29, "distill/old": 31, "distill/new": 29}
    for name, days in ages.items():
        path = here / "scratch dir" / name
        if name.startswith("teacher"):
            path = path.with_suffix(".safetensors")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        else:
            (path / "step_00000001").mkdir(parents=True)
        os.utime(path, (time.time() - days * 86_400 - 60,) * 2)
    os.link(here / "scratch dir/teacher/h/used.safetensors", here / "cache.safetensors")
    receipt = here / "scratch dir/teacher/h/used.json"
    receipt.touch()
    os.utime(receipt, (0, 0))
    command = ["make", "-f", str(MAKEFILE), "prune"]
    subprocess.run(command, env={**os.environ, "ALAMBIQUE_WORK": "scratch dir"}, check=True, capture_output=True)
    left = {path.name for path in (here / "scratch dir").glob("*/*/*")} | {p.name for p in here.glob("*/distill/*")}
    assert left == {"used.safetensors", "used.json", "new.safetensors", "step_00000001", "new"}
    subprocess.run([*command, "DAYS=28"], env={**os.environ, "ALAMBIQUE_WORK": "scratch dir"}, check=True)
    assert {path.name for path in (here / "scratch dir").glob("*/*/*")} == {"used.safetensors", "used.json"}


def test_checkpoints_of_shipped_students_are_forgotten(here: Path) -> None:
    for name in ("done", "latest", "running"):
        (here / ".work/distill" / name / "step_00000001").mkdir(parents=True)
    for name in ("done", "latest"):
        (here / ".work/distill" / name / SHIPPED).touch()
    forget_shipped(spare=work_dir() / "distill/latest")
    assert {path.name for path in here.glob(".work/distill/*")} == {"latest", "running"}
    forget_shipped()
    assert {path.name for path in here.glob(".work/distill/*")} == {"running"}


def test_prune_of_nothing(here: Path) -> None:
    subprocess.run(["make", "-f", str(MAKEFILE), "prune"], check=True)
    assert [path.name for path in here.iterdir()] == [".work"]
