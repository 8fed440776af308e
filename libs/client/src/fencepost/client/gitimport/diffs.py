"""
What `git diff-tree --raw -p` prints, read back: one entry a path, with its part of the patch.

Only computes. Names are bytes: git promises nothing about their letters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

from fencepost.core.errors import FencepostError

Status: TypeAlias = Literal["A", "C", "D", "M", "R", "T"]

FILE: Final = 0o100644
EXECUTABLE: Final = 0o100755
LINK: Final = 0o120000
SUBMODULE: Final = 0o160000
_KIND: Final = 0o170000
_KINDS: Final = (0, FILE, EXECUTABLE, LINK, SUBMODULE)

_RAW: Final = re.compile(
    rb":([0-7]{6}) ([0-7]{6}) ([0-9a-f]+) ([0-9a-f]+) ([A-Z])(\d*)\t([^\t]+)(?:\t([^\t]+))?"
)
# A line of a hunk begins with a blank, a sign or a backslash, so this is always a header.
_SECTION: Final = re.compile(rb"^diff --git ", re.MULTILINE)
_ESCAPES: Final = {ord(k): v for k, v in zip('abtnvfr"\\', b'\a\b\t\n\v\f\r"\\', strict=True)}
_LETTERS: Final = {v: chr(k) for k, v in _ESCAPES.items()}


class UnreadableDiffError(FencepostError):
    """Git printed what this reader does not know. A bug here, or a git from the future."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """
    One difference between two trees. `old` and `new` differ for a rename or a copy only.

    `sections` is its part of the patch: one, or two (away, then back) when the type changed.
    """

    status: Status
    old_mode: int
    new_mode: int
    old_id: str
    new_id: str
    old: bytes
    new: bytes
    sections: tuple[bytes, ...] = ()

    @property
    def changes_type(self) -> bool:
        return self.status == "T"


def read(printed: bytes) -> list[Entry]:
    """
    Reads raw lines and the patch that follows them.

    Raises `UnreadableDiffError` on anything it does not know: a part that were left out would be
    a file that silently differs.
    """
    head, _, patch = printed.partition(b"\n\n") if printed else (b"", b"", b"")
    entries = [_entry(line) for line in head.splitlines() if line]
    sections = _sections(patch)
    wanted = [2 if entry.changes_type else 1 for entry in entries]
    if sum(wanted) != len(sections):
        raise UnreadableDiffError(
            f"git diff-tree: {len(entries)} entries and {len(sections)} parts of a patch"
        )
    found = []
    for entry, count in zip(entries, wanted, strict=True):
        found.append(_with_sections(entry, tuple(sections[:count])))
        del sections[:count]
    return found


def _entry(line: bytes) -> Entry:
    raw = _RAW.fullmatch(line)
    if raw is None or raw[5] not in (b"A", b"C", b"D", b"M", b"R", b"T"):
        raise UnreadableDiffError(f"git diff-tree: an entry that is not known: {line[:200]!r}")
    old_mode, new_mode = int(raw[1], 8), int(raw[2], 8)
    for mode in (old_mode, new_mode):
        if mode not in _KINDS:
            raise UnreadableDiffError(f"git diff-tree: a mode that is not known: {mode:o}")
    old = unquoted(raw[7])
    return Entry(
        status=cast("Status", raw[5].decode()),
        old_mode=old_mode,
        new_mode=new_mode,
        old_id=raw[3].decode(),
        new_id=raw[4].decode(),
        old=old,
        new=unquoted(raw[8]) if raw[8] is not None else old,
    )


def _sections(patch: bytes) -> list[bytes]:
    starts = [match.start() for match in _SECTION.finditer(patch)]
    if bool(patch) != bool(starts) or (starts and starts[0] != 0):
        raise UnreadableDiffError(f"git diff-tree: not a patch: {patch[:200]!r}")
    ends = [*starts[1:], len(patch)]
    return [patch[start:end] for start, end in zip(starts, ends, strict=False)]


def _with_sections(entry: Entry, sections: tuple[bytes, ...]) -> Entry:
    return Entry(
        status=entry.status,
        old_mode=entry.old_mode,
        new_mode=entry.new_mode,
        old_id=entry.old_id,
        new_id=entry.new_id,
        old=entry.old,
        new=entry.new,
        sections=sections,
    )


def is_binary(section: bytes) -> bool:
    """Whether git shows no text of it (by its content, its size, or an attribute)."""
    header = section.partition(b"\n@@ ")[0]
    return b"\nBinary files " in header or b"\nGIT binary patch" in header


def is_same_kind(mode: int, other: int) -> bool:
    return mode & _KIND == other & _KIND


def unquoted(name: bytes) -> bytes:
    """A name as git prints it, C-quoted where it holds unusual letters."""
    if not name.startswith(b'"'):
        return name
    if len(name) < 2 or not name.endswith(b'"'):
        raise UnreadableDiffError(f"git diff-tree: a badly quoted name: {name[:200]!r}")
    out = bytearray()
    at, end = 1, len(name) - 1
    while at < end:
        if name[at] != 0x5C:
            out.append(name[at])
            at += 1
        elif name[at + 1] in _ESCAPES:
            out.append(_ESCAPES[name[at + 1]])
            at += 2
        else:
            try:
                out.append(int(name[at + 1 : at + 4], 8))
            except ValueError as error:
                raise UnreadableDiffError(
                    f"git diff-tree: a badly quoted name: {name[:200]!r}"
                ) from error
            at += 4
    return bytes(out)


def quoted(name: bytes) -> bytes:
    """A name C-quoted, with nothing but printable ASCII in it."""
    out = "".join(
        f"\\{_LETTERS[byte]}"
        if byte in _LETTERS
        else chr(byte)
        if 0x20 <= byte < 0x7F
        else f"\\{byte:03o}"
        for byte in name
    )
    return b'"' + out.encode() + b'"'
