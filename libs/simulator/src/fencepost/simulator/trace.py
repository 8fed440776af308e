"""
A line of a trace: virtual milliseconds, number of the event, kind, words. Written and read here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

_MS: Final = 8
_NUMBER: Final = 7
_KIND: Final = 10


class Told(NamedTuple):
    """One thing that a run told of itself. Several may have the same number: one event did all."""

    at_ms: int
    number: int
    kind: str
    text: str

    @property
    def words(self) -> list[str]:
        return self.text.split(" ")

    @property
    def named(self) -> dict[str, str]:
        """The words that are `name=value`; a value with blanks is cut at the first."""
        return dict(word.split("=", 1) for word in self.words if "=" in word)


def line(at_ms: int, number: int, kind: str, *words: object) -> str:
    assert len(kind) <= _KIND, f"a kind of at most {_KIND} letters, not {kind!r}"
    text = " ".join(str(word) for word in words).replace("\n", " ")
    return f"{at_ms:>{_MS}} {number:>{_NUMBER}} {kind:<{_KIND}} {text}"


def read(written: str) -> Told:
    """
    Takes a line apart again.

    Raises `ValueError` for a line that `line` did not write. A kind has at most ten letters.
    """
    at_ms, number = written.split(None, 2)[:2]
    # Long runs outgrow their columns: the kind begins one blank after the number.
    start = written.index(number, written.index(at_ms) + len(at_ms)) + len(number) + 1
    kind = written[start : start + _KIND].rstrip()
    return Told(int(at_ms), int(number), kind, written[start + _KIND + 1 :])


def read_all(lines: Iterable[str]) -> list[Told]:
    return [read(written) for written in lines]
