"""Files that are either whole or absent: atomic writes, hashes, locks, manifests."""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alambique.core.errors import UserError

MANIFEST = "manifest.json"
_BLOCK = 1 << 20


def sha256_bytes(data: bytes) -> str:
    """Hex sha256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sha256_folder(folder: Path) -> str:
    """Hex sha256 of a folder's content: of the sorted lines ``SHA256  RELATIVE/PATH`` of all its files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    lines = sorted(f"{sha256_file(path)}  {path.relative_to(folder).as_posix()}\n" for path in files)
    return sha256_bytes("".join(lines).encode())


def content_sha256(path: Path) -> str:
    """The hash that a pin names: of a file's bytes, or of a folder's sorted list."""
    return sha256_folder(path) if path.is_dir() else sha256_file(path)


def sha256_json(value: Any) -> str:
    """Hex sha256 of the canonical JSON form (sorted keys, no spaces) of ``value``."""
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def _prefix(target: Path) -> str:
    """How scratch names for ``target`` begin, with our process id; what killed writers of it have left is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    ours = f".{target.name}.{os.uname().nodename}-"  # other hosts, on a shared disk, have process ids of their own
    for left in target.parent.glob(f"{glob.escape(ours)}*.part"):
        writer = left.name.removeprefix(ours).partition("-")[0]
        if writer.isdigit() and not _is_alive(int(writer)):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
    return f"{ours}{os.getpid()}-"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Give a scratch path beside ``target`` to write a file to; on success it replaces ``target``, synced to disk.

    An exception or a kill leaves ``target`` as it was. Scratch files are called ``.NAME.HOST-PID-*.part``, and
    the next writer removes those of killed ones.
    """
    handle, name = tempfile.mkstemp(prefix=_prefix(target), suffix=".part", dir=target.parent)
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        with scratch.open("rb") as stream:
            os.fsync(stream.fileno())
        scratch.chmod(0o644)  # mkstemp makes 0600, which would survive into shared caches
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically."""
    with atomic_path(path) as scratch:
        scratch.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically; NaN and infinity are refused because JSON has none."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path, remedy: str = "") -> Any:
    """Parse a JSON file; ``remedy`` is appended to the sentence when it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist. {remedy}".strip()) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}). {remedy}".strip()) from error


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give an empty scratch folder that becomes ``target`` on success, replacing what was there."""
    scratch = Path(tempfile.mkdtemp(prefix=_prefix(target), suffix=".part", dir=target.parent))
    try:
        yield scratch
        for path in scratch.rglob("*"):
            if path.is_file() and path.stat().st_mode & 0o777 == 0o600:
                path.chmod(0o644)  # safetensors writes 0600, which would survive into shared caches
        scratch.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        scratch.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold ``lock`` (a file that stays behind, empty) against other processes; the kernel frees it if this one dies."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link ``source`` to ``target`` (one copy on disk), or copy it where the filesystem can't."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with atomic_path(target) as scratch:
            shutil.copyfile(source, scratch)


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Hash every file in ``folder`` and write ``manifest.json``: ``facts`` plus ``files`` = {path: {sha256, bytes}}."""
    files = {
        path.relative_to(folder).as_posix(): {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    manifest = {**facts, "files": files}
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_manifest(folder: Path, remedy: str) -> dict[str, Any]:
    """Read ``folder``'s manifest; ``remedy`` says what to do when it is missing or damaged."""
    manifest = read_json(folder / MANIFEST, remedy)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise UserError(f"{folder / MANIFEST} is not a manifest. {remedy}")
    return manifest


def require_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Refuse to start work that can't fit on the disk.

    Raises:
        UserError: fewer than ``needed_bytes`` are free on the filesystem of ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise UserError(
            f"{what} needs about {needed_bytes / 2**20:,.0f} MiB in {folder}, but {free / 2**20:,.0f} MiB are free: "
            "free some space, or move the checkout to a larger disk."
        )
