"""
Whether a caller's value is of the kind that is expected, before anything is sent or waited for.

One function for each kind, for the Python client and the command line alike. Each gives the value
back, or raises `RefusedError` that names the field, what was expected, and what was given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

from fencepost.core import limits
from fencepost.core.errors import RefusedError

SECONDS_MAX: Final = 30 * 24 * 3600
"""Nobody waits for longer; above it milliseconds no longer fit what they are sent in."""

WHOLE_MAX: Final = 2**63 - 1

TEXT_BYTES_MAX: Final = 8 * limits.KIB
_SHOWN_MAX: Final = 80


def refused(field: str, expected: str, value: object, *, reason: str = "bad_arguments") -> NoReturn:
    """Raises. The value is shown cut short, and only in characters that can be printed."""
    shown = ascii(value)
    if len(shown) > _SHOWN_MAX:
        shown = f"{shown[:_SHOWN_MAX]}…"
    raise RefusedError(
        reason, f"{field}: expected {expected}, got {shown}", field=field, expected=expected
    )


def seconds(field: str, value: object, *, or_none: bool = False) -> float:
    """
    A time to wait for; `or_none` says that it may be as short as none at all.

    What is not a number would make every comparison with it false, and wait for ever or never.
    """
    least = "from 0" if or_none else "of more than 0"
    expected = f"seconds, {least} up to {SECONDS_MAX}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        refused(field, expected, value)
    if not (value >= 0 if or_none else value > 0) or value > SECONDS_MAX:
        refused(field, expected, value, reason="out_of_range")
    return value


def whole(field: str, value: object, low: int, high: int = WHOLE_MAX) -> int:
    """An integer within bounds; `True` is none."""
    if type(value) is not int or not low <= value <= high:
        refused(field, f"an integer from {low} to {high}", value, reason="out_of_range")
    return value


def number(field: str, value: object) -> float:
    """A number that can be compared with others."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refused(field, "a finite number", value)
    return value


def text(field: str, value: object, *, bytes_max: int = TEXT_BYTES_MAX, empty: bool = True) -> str:
    """Text that UTF-8 can carry, within the bound."""
    if not isinstance(value, str):
        refused(field, "text", value)
    size = utf8(field, value)
    if size > bytes_max:
        refused(field, f"at most {bytes_max} bytes", value, reason="out_of_range")
    if not empty and not value:
        refused(field, "text that is not empty", value)
    return value


def utf8(field: str, value: str) -> int:
    """How many bytes it takes; refuses what UTF-8 cannot carry."""
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        refused(field, "text in UTF-8, without lone surrogates", value)


def texts(field: str, value: object, *, bytes_max: int = limits.NAME_BYTES_MAX) -> list[str]:
    """A list of texts. One text alone is no list: its letters would be taken for names."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        refused(field, "a list of texts", value)
    return [text(f"{field}[{n}]", one, bytes_max=bytes_max) for n, one in enumerate(value)]


def flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        refused(field, "true or false", value)
    return value


def one_of(field: str, value: object, allowed: Iterable[str]) -> str:
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        refused(field, " or ".join(words), value)
    return value


def mapping(field: str, value: object) -> dict[str, Any]:
    """An object whose names are text."""
    if not isinstance(value, Mapping):
        refused(field, "an object", value)
    for name in value:
        if not isinstance(name, str):
            refused(field, "an object whose names are text", name)
    return dict(value)
