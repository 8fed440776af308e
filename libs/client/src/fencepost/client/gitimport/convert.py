"""
Differences between two trees as tool steps. Only computes; contents come in with the call.

What git shows as text is patched, file by file or all of a commit in one patch; what it does not
is written whole. Where a patch and a whole file could both say it, the patch does: it also checks
what was there before.

    1. what a patch cannot delete (binary files) is deleted;
    2. the patch: deletions, then renames, then the rest;
    3. what a patch cannot write is written.

Steps of one phase touch different paths and may be sent at once; phases follow each other.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fencepost.client.gitimport.diffs import (
    LINK,
    SUBMODULE,
    Entry,
    is_binary,
    quoted,
)
from fencepost.core import limits
from fencepost.core.errors import RefusedError

PATCH_BYTES_MAX: Final = 4 * limits.MIB
"""A patch is cut before it gets longer than this; a single file's may be."""
PATCH_FILES_MAX: Final = 64
"""Files of one patch, so that what its receipt tells of them stays in the ledger."""


@dataclass(frozen=True, slots=True)
class Step:
    """One tool call."""

    tool: str
    args: dict[str, Any]


Phase = tuple[Step, ...]


class Paths:
    """The files that stand in the workspace, and so which folders do."""

    def __init__(self) -> None:
        self._files: set[bytes] = set()
        self._inside: Counter[bytes] = Counter()

    def __contains__(self, path: bytes) -> bool:
        return path in self._files

    def __len__(self) -> int:
        return len(self._files)

    def add(self, path: bytes) -> None:
        if path not in self._files:
            self._files.add(path)
            self._inside.update(_folders(path))

    def remove(self, path: bytes) -> None:
        if path in self._files:
            self._files.remove(path)
            self._inside.subtract(_folders(path))

    def topmost_empty(self, path: bytes) -> bytes:
        """The topmost folder above a removed path in which no file is left, or the path."""
        found = path
        for folder in _folders(path):
            if self._inside[folder]:
                return found
            found = folder
        return found


def _folders(path: bytes) -> Iterator[bytes]:
    """The folders above a path, the innermost first."""
    while (cut := path.rfind(b"/")) > 0:
        path = path[:cut]
        yield path


@dataclass(slots=True)
class _Sorted:
    """What is to be done about the entries of one commit, by the way it is done."""

    delete: list[bytes] = field(default_factory=list)
    patch_away: list[bytes] = field(default_factory=list)
    patch_moves: list[bytes] = field(default_factory=list)
    patch_rest: list[bytes] = field(default_factory=list)
    write: list[Step] = field(default_factory=list)


def contents_needed(entries: Sequence[Entry]) -> list[str]:
    """The ids of the contents that `phases` will want."""
    needed = []
    for entry in entries:
        if _loses_whole(entry) and not _is_utf8(entry.old):
            needed.append(entry.old_id)
        if _gets_whole(entry):
            needed.append(entry.new_id)
    return needed


def phases(
    entries: Sequence[Entry], contents: Mapping[str, bytes], paths: Paths
) -> tuple[Phase, ...]:
    """
    The steps of one commit, in phases. `paths` is what stood before, and is brought up to date.

    Submodules are passed over. Raises `RefusedError` for what no tool can hold.
    """
    todo = _Sorted()
    for entry in entries:
        _sort(entry, contents, todo)
    deletions = _deletions(todo.delete, paths)
    for entry in entries:
        if entry.status in ("D", "R", "T") and entry.old_mode != SUBMODULE:
            paths.remove(entry.old)
    for entry in entries:
        if entry.status != "D" and entry.new_mode != SUBMODULE:
            paths.add(entry.new)
    found: list[Phase] = [deletions, *_patches(todo), tuple(todo.write)]
    return tuple(phase for phase in found if phase)


def submodules(entries: Sequence[Entry]) -> list[bytes]:
    """The submodules that these entries add or move, which are passed over."""
    return [entry.new for entry in entries if entry.new_mode == SUBMODULE]


def _sort(entry: Entry, contents: Mapping[str, bytes], todo: _Sorted) -> None:
    _sort_old(entry, contents, todo)
    if entry.status == "D" or entry.new_mode == SUBMODULE:
        return
    if not _gets_whole(entry):
        patch = todo.patch_moves if entry.status == "R" else todo.patch_rest
        patch.append(entry.sections[-1])
        return
    content = contents[entry.new_id]
    if len(content) > limits.CONTENT_BYTES_MAX:
        raise RefusedError(
            "too_large",
            f"{_shown(entry.new)}: expected at most {limits.CONTENT_BYTES_MAX} bytes,"
            f" got {len(content)}",
            field=_shown(entry.new),
        )
    if entry.new_mode != LINK and _is_utf8(entry.new):
        todo.write.append(_writing(entry.new, entry.new_mode, content))
    else:
        # A name that is not UTF-8 cannot stand in an argument; in a patch it can, quoted.
        todo.patch_rest.append(_creation(entry.new, entry.new_mode, content))


def _sort_old(entry: Entry, contents: Mapping[str, bytes], todo: _Sorted) -> None:
    """What is to be taken away before anything comes."""
    if _loses_whole(entry):
        if _is_utf8(entry.old):
            todo.delete.append(entry.old)
        else:
            todo.patch_away.append(_deletion(entry.old, entry.old_mode, contents[entry.old_id]))
    elif entry.status in ("D", "T") and entry.old_mode != SUBMODULE:
        todo.patch_away.append(entry.sections[0])


def _is_whole(section: bytes) -> bool:
    """Whether the file is handled as a whole, and not by its part of the patch."""
    return is_binary(section) or len(section) > PATCH_BYTES_MAX


def _loses_whole(entry: Entry) -> bool:
    """Whether the old file is deleted as a whole."""
    if entry.old_mode == SUBMODULE or entry.status not in ("D", "R", "T", "M"):
        return False
    if entry.status == "M":
        # Written over, which needs no deletion, unless it can only be patched.
        return _is_whole(entry.sections[0]) and not _is_utf8(entry.old)
    return _is_whole(entry.sections[0])


def _gets_whole(entry: Entry) -> bool:
    """Whether the new file is written as a whole."""
    if entry.status == "D" or entry.new_mode == SUBMODULE:
        return False
    # A copy's source may be gone by the time that the patch is applied.
    return entry.status == "C" or _is_whole(entry.sections[-1])


def _deletions(doomed: Sequence[bytes], paths: Paths) -> Phase:
    """Deletes files and the folders that this empties: where one stood, a file may come."""
    for path in doomed:
        paths.remove(path)
    targets = dict.fromkeys(paths.topmost_empty(path) for path in doomed)
    return tuple(
        Step("delete_path", {"path": target.decode(), "recursive": True}) for target in targets
    )


def _patches(todo: _Sorted) -> list[Phase]:
    whole = [*todo.patch_away, *todo.patch_moves, *todo.patch_rest]
    if len(chunks := _chunks(whole)) <= 1:
        return [tuple(map(_patching, chunks))]
    # Renames are read as of before their patch, so they stay together (two files may change
    # names); what is deleted makes way first, and the rest comes into free places.
    moves = [b"".join(todo.patch_moves)] if todo.patch_moves else []
    return [
        tuple(map(_patching, group))
        for group in (_chunks(todo.patch_away), moves, _chunks(todo.patch_rest))
    ]


def _chunks(sections: Sequence[bytes]) -> list[bytes]:
    found: list[list[bytes]] = []
    size = 0
    for section in sections:
        full = not found or len(found[-1]) >= PATCH_FILES_MAX
        if full or size + len(section) > PATCH_BYTES_MAX:
            found.append([])
            size = 0
        found[-1].append(section)
        size += len(section)
    return [b"".join(chunk) for chunk in found]


def _patching(patch: bytes) -> Step:
    try:
        return Step("apply_patch", {"patch": patch.decode()})
    except UnicodeDecodeError:
        return Step("apply_patch", {"patch_b64": base64.b64encode(patch).decode()})


def _writing(path: bytes, mode: int, content: bytes) -> Step:
    args: dict[str, Any] = {"path": path.decode(), "mode": mode & 0o777}
    try:
        args["content"] = content.decode()
    except UnicodeDecodeError:
        args["content_b64"] = base64.b64encode(content).decode()
    return Step("write_file", args)


def _creation(path: bytes, mode: int, content: bytes) -> bytes:
    """A patch that creates a file with any bytes in it."""
    new = quoted(b"b/" + path)
    head = b"diff --git %s %s\nnew file mode %o\n" % (quoted(b"a/" + path), new, mode)
    if not content:
        return head
    lines = _lines(b"+", content)
    return head + b"--- /dev/null\n+++ %s\n@@ -0,0 +1,%d @@\n%s" % (
        new,
        _line_count(content),
        lines,
    )


def _deletion(path: bytes, mode: int, content: bytes) -> bytes:
    """A patch that deletes a file with any bytes in it."""
    old = quoted(b"a/" + path)
    head = b"diff --git %s %s\ndeleted file mode %o\n" % (old, quoted(b"b/" + path), mode)
    if not content:
        return head
    lines = _lines(b"-", content)
    return head + b"--- %s\n+++ /dev/null\n@@ -1,%d +0,0 @@\n%s" % (
        old,
        _line_count(content),
        lines,
    )


def _lines(sign: bytes, content: bytes) -> bytes:
    ended = content.endswith(b"\n")
    body = sign + (b"\n" + sign).join((content[:-1] if ended else content).split(b"\n")) + b"\n"
    return body if ended else body + b"\\ No newline at end of file\n"


def _line_count(content: bytes) -> int:
    return content.count(b"\n") + (not content.endswith(b"\n"))


def _is_utf8(path: bytes) -> bool:
    try:
        path.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")
