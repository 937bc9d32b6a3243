"""Rows that are kept: what was measured, on what, with what, and by which code."""

import datetime
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from alambique.core.measure import device_name, versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def code_hash(paths: Iterable[str], root: Path = ROOT) -> str:
    """Short sha256 over the Python files below ``paths`` (relative to ``root``), names and contents."""
    digest = hashlib.sha256()
    for name in paths:
        place = root / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if file.is_file():
                digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def stamp(device: torch.device, measures: Iterable[str]) -> dict[str, Any]:
    """What every recorded row carries besides its figures."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "code": code_hash(measures),
        "device": _processor() if device.type == "cpu" else device_name(device),
        "threads": torch.get_num_threads(),
        "versions": versions("torch", "triton", "liger-kernel", "cut-cross-entropy"),
    }


def commit(root: Path = ROOT) -> str:
    """The checkout's short commit, with ``+`` if tracked files differ from it; ``unknown`` outside git."""
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def append(case: str, rows: list[dict[str, Any]], stamped: dict[str, Any], folder: Path | None = None) -> Path:
    """Append ``rows`` to the case's file, one JSON object a line, and return its path."""
    path = (folder or Path(os.environ.get("ALAMBIQUE_BENCH_RESULTS", RESULTS))) / f"{case}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, **stamped}) + "\n")
    return path


def load(case: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """All rows recorded for a case, oldest first."""
    path = (folder or RESULTS) / f"{case}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"cpu ({names[0] if names else platform.machine()})"
