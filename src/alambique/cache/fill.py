"""Several processes fill one store: each takes blocks that no other has, and a capture then finds them all there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from alambique.cache.capture import CaptureJob
from alambique.cache.config import CaptureConfig
from alambique.cache.score import Rows, Teacher
from alambique.cache.states import HiddenStates
from alambique.cache.store import Store
from alambique.core.errors import UserError


def parse_part(word: str) -> tuple[int, int]:
    """Read "I/N", the I-th of N processes.

    Raises:
        UserError: it is something else.
    """
    number, slash, count = word.partition("/")
    if not (slash and number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise UserError(f"{word} is no part of a capture: write I/N, such as 1/2 and 2/2 for two processes.")
    return int(number), int(count)


def fill(
    rows: Rows,
    load_teacher: Callable[[], Teacher],
    store: Path,
    identity: dict[str, Any],
    config: CaptureConfig,
    vocab_size: int,
    device: torch.device,
    part: tuple[int, int],
    states: HiddenStates | None = None,
) -> None:
    """Score what ``store`` lacks beside other processes that do the same; the other arguments are those of ``capture``.

    Blocks are taken one at a time, by whoever is free, so a slow or killed process leaves its share to the others, but
    for the block it was at. ``part`` only tells how many share the work, for the progress shown.

    Raises:
        UserError: as ``capture``.
    """
    job = CaptureJob(rows, load_teacher, Store(store), identity, config, vocab_size, device, states)
    job.plan()
    job.require_space(None)
    job.run(part)
