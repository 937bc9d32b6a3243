"""The one exception that users are meant to read."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input or a bad environment, told in one sentence: what, where, what to do.

    Stage entry points print the message alone, without a traceback, and exit with status 2. Nothing that retries can
    help, so the orchestration never retries it.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` for the nearest known name, or the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(names)}" if names else ""
