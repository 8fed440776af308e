"""What a decoder's error says of the field that was wrong; every family's commands use it."""

from __future__ import annotations


def field_in(error: str) -> str:
    """The path that msgspec names at the end of its message, and the field that it quotes."""
    _, _, path = error.rpartition("`$")
    path = path.strip("`.") if "`$" in error else ""
    for quote in ("missing required field `", "unknown field `"):
        _, found, rest = error.partition(quote)
        if found:
            return f"{path}.{rest.split('`')[0]}".lstrip(".")
    return path
