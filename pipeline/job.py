"""What every stage's job shares: one line for a user's error, a quick end, and a name for its scratch folder."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from alambique.core.errors import UserError
from alambique.core.files import sha256_file, sha256_json
from alambique.core.params import Config
from pipeline.code import code_of

EXIT_USER_ERROR = 2


def job_main(run: Callable[..., None]) -> int:
    """Call ``run`` with the command line's words; a UserError becomes one line on stderr and exit status 2."""
    try:
        run(*sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def leave(status: int) -> NoReturn:
    """End the process at once: results are on disk, and taking torch and transformers apart takes a second or two."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def fingerprint(stage: str, settings: Config, *manifests: Path) -> str:
    """Name everything that decides a job's result, for a scratch folder that only the same job may resume from.

    Hashes the resolved settings, the manifests of the inputs, and the code that pipeline/code.yaml lists for ``stage``.
    Returns 16 hex digits.
    """
    return sha256_json(
        {
            "stage": stage,
            "settings": settings.model_dump(mode="json"),
            "inputs": [sha256_file(path) for path in manifests],
            "code": {str(path): sha256_file(path) for path in code_of(stage)},
        }
    )[:16]
