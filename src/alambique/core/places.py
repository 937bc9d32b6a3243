"""Folders outside DVC: they belong to the main checkout, so that experiments in temporary copies share them."""

import os
import shutil
from pathlib import Path

_EXPERIMENTS = "/.dvc/tmp/exps/"  # where `dvc exp run --temp` and `--queue` put their copies of the checkout
SHIPPED = "shipped"  # a file in the scratch folder of a training that has ended


def main_checkout() -> Path:
    """The checkout that a person works in, also when DVC runs a stage in a temporary copy below it.

    DVC names its root in ``DVC_ROOT``; a stage started by hand runs in the root itself.
    """
    root = os.environ.get("DVC_ROOT") or str(Path.cwd())
    return Path(root.split(_EXPERIMENTS, 1)[0])


def assets_dir() -> Path:
    """Downloads and converted models: ``ALAMBIQUE_ASSETS``, or ``.assets`` in the main checkout. Safe to delete."""
    return Path(os.environ.get("ALAMBIQUE_ASSETS") or main_checkout() / ".assets")


def work_dir() -> Path:
    """Checkpoints and captured shards that survive a kill: ``ALAMBIQUE_WORK``, or ``.work`` in the main checkout."""
    return Path(os.environ.get("ALAMBIQUE_WORK") or main_checkout() / ".work")


def forget_shipped(spare: Path | None = None) -> None:
    """Remove the checkpoints of trainings whose student is shipped, but for those in ``spare``.

    They outlive their job, because a kill may come before DVC has recorded what it made: DVC then runs it again.
    """
    for mark in work_dir().glob(f"distill/*/{SHIPPED}"):
        if mark.parent != spare:
            shutil.rmtree(mark.parent, ignore_errors=True)
