"""What each stage's code is: the files that code.yaml lists for it, and one file of their hashes, which DVC watches.

Stage ``code`` writes results/code/STAGE.txt from the list of each stage; whatever runs STAGE depends on that one file.
It starts whenever any code changed, and costs nothing: a file with the same hashes makes nothing stale.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ruamel.yaml import YAML

from alambique.core.errors import UserError
from alambique.core.files import sha256_file, write_bytes


def code_of(stage: str) -> list[Path]:
    """The files that code.yaml lists as the code of ``stage``, folders expanded, sorted; compiled ones don't count.

    Raises:
        UserError: one that it lists isn't there.
    """
    return _expanded(_listed()[stage])


def record() -> None:
    """Write results/code/STAGE.txt for every stage: a line for each file, as `sha256sum` prints it.

    Raises:
        UserError: as for :func:`code_of`.
    """
    for stage, paths in _listed().items():
        lines = [f"{sha256_file(path)}  {path.as_posix()}\n" for path in _expanded(paths)]
        write_bytes(Path("results/code", f"{stage}.txt"), "".join(lines).encode())


def _listed() -> Mapping[str, Sequence[str]]:
    lists: Mapping[str, Sequence[str]] = YAML(typ="safe").load(Path("pipeline/code.yaml").read_text())
    return lists


def _expanded(listed: Sequence[str]) -> list[Path]:
    found = set[Path]()
    for path in map(Path, listed):
        if not path.exists():
            raise UserError(
                f"pipeline/code.yaml lists {path}, which does not exist: take it out there, or bring it back."
            )
        files = path.rglob("*") if path.is_dir() else [path]
        found.update(file for file in files if file.is_file() and file.suffix != ".pyc")
    return sorted(found)
