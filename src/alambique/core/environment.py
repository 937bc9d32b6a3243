"""Numbers from the environment (docs/environment.md)."""

import os

from alambique.core.errors import UserError


def whole_number(name: str, default: int) -> int:
    """A count; refused with a UserError if it is none."""
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise UserError(f"{name}={text} must be a whole number, 0 or more: correct or unset it.")
    return int(text) if text else default


def seconds(name: str, default: float) -> float:
    """A time; refused with a UserError if it is none."""
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UserError(f"{name}={text} must be a number of seconds, 0 or more: correct or unset it.")
    return value
