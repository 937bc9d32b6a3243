"""Two caches side by side, and one cache against its teacher as it runs today."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from alambique.cache.codec import Arrays
from alambique.cache.config import CaptureConfig
from alambique.cache.drift import Drift, drift, merged, scored_twice
from alambique.cache.reader import TeacherCache
from alambique.cache.score import Rows, Scorer, Teacher
from alambique.core.errors import UserError

# assumption: five times what another arithmetic does to the embedded teacher (0.0019 nats from bf16 to fp32, or from
# sdpa to eager; docs/cache-format.md), so that more than rounding is at work
DRIFT_LIMIT_NATS = 0.01
_NO_SETTINGS = ("files", "shards", "tail_mass", "rescored", "bytes_per_token")  # they follow from rows and settings


def differing_fields(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What identity, engine and settings of two manifests differ in, by dotted name; None where one lacks the field."""
    ours, theirs = _flat(first), _flat(second)
    return {
        name: (ours.get(name), theirs.get(name))
        for name in dict.fromkeys((*ours, *theirs))
        if name.split(".")[0] not in _NO_SETTINGS and ours.get(name) != theirs.get(name)
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def rows_in_common(first: TeacherCache, second: TeacherCache) -> list[tuple[int, int]]:
    """Numbers, in each cache, of the rows of equal content that both hold, in the order of the first.

    Raises:
        UserError: there is none.
    """
    for what, ours, other in (
        ("rows of {} positions", first.seq_len, second.seq_len),
        ("a vocabulary of {} tokens", first.vocab_size, second.vocab_size),
    ):
        if ours != other:
            raise UserError(
                f"{first.path} has {what.format(ours)}, {second.path} has {what.format(other)}: nothing can be "
                "compared, name two caches of the same prepared data."
            )
    theirs = {digest: row for row, digest in enumerate(second.row_hashes)}
    common = [(row, theirs[digest]) for row, digest in enumerate(first.row_hashes) if digest in theirs]
    if not common:
        raise UserError(
            f"{first.path} and {second.path} have no row in common: name two caches of the same prepared data."
        )
    return common


def compare(
    first: TeacherCache, second: TeacherCache, common: list[tuple[int, int]], num_rows: int | None = None
) -> Drift | None:
    """The drift of ``second`` from ``first`` over ``num_rows`` rows in common, evenly spaced (default: all of them).

    None where those rows have no captured position.
    """
    if num_rows is not None and num_rows < len(common):
        common = [common[index] for index in np.linspace(0, len(common) - 1, num_rows).round().astype(int)]
    pairs = ((_captured(first, ours), _captured(second, theirs)) for ours, theirs in common)
    parts = [drift(ours, theirs) for ours, theirs in pairs if len(ours[0])]
    return merged(parts) if parts else None


def rescore(cache: TeacherCache, rows: Rows, load_teacher: Callable[[], Teacher], device: torch.device) -> Drift:
    """Score a sample of a cache's rows with the teacher, each alone as a capture does, and compare with the cache.

    Args:
        cache: of top-K entries.
        rows: prepared rows; those whose content the cache holds count.
        load_teacher: gives the model in the cache's dtype on ``device``; called when there are rows to score.
        device: where the teacher is.

    Raises:
        UserError: the cache holds draws, or none of ``rows``.
    """
    if cache.manifest["sampling"] is not None:
        raise UserError(f"{cache.path} holds draws, not the teacher's most probable tokens, so drift would not show.")
    held = {digest: row for row, digest in enumerate(cache.row_hashes)}
    row_hashes = rows.row_hashes()
    usable = [
        digest in held and bool(mask_S.any()) for digest, mask_S in zip(row_hashes, rows.loss_mask_RS, strict=True)
    ]
    sample = scored_twice(row_hashes, usable)
    if not sample:
        raise UserError(f"{cache.path} holds none of these rows: name the prepared data that it was captured from.")
    scorer = Scorer(
        rows,
        load_teacher(),
        top_k=cache.top_k,
        top_p=cache.manifest["top_p"],
        logits_mib=CaptureConfig().logits_mib,
        batch_rows=1,
        vocab_size=cache.vocab_size,
        device=device,
    )
    pairs = ((row_hashes.index(digest), _captured(cache, held[digest])) for digest in sorted(sample))
    return merged([scorer.drift(row, first) for row, first in pairs])


def _captured(cache: TeacherCache, row: int) -> Arrays:
    """A row's captured positions."""
    signal = cache.read([row]).flatten()
    signal = signal[signal.logprobs_NK[:, 0].isfinite()]
    return signal.ids_NK.numpy(), signal.logprobs_NK.numpy(), signal.tail_mass_N.numpy()
