"""
The tree id of a folder, as `git write-tree` gives it: what an import is measured by.

Contents are hashed here, so that no attribute, filter or ignore file has a say; the trees are
git's own work, in a scratch repository.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from fencepost.client.gitimport.diffs import EXECUTABLE, FILE, LINK
from fencepost.client.gitimport.repository import run
from fencepost.core.errors import FencepostError

TRASH: Final = ".fencepost-trash"
"""What the toolhost may keep beside a workspace's files; no tool can make this name."""


class OddFileError(FencepostError):
    """Something that no git tree can hold stands in the folder: a socket, a device, a pipe."""


class Listed(NamedTuple):
    """One file of a tree."""

    mode: int
    id: str
    path: bytes


def listed(folder: Path, object_format: str) -> list[Listed]:
    """Every file below a folder. Empty folders are no part of it, as in git."""
    return [
        one
        for item in folder.iterdir()
        if item.name != TRASH
        for one in _listed(item, os.fsencode(item.name), object_format)
    ]


def _listed(item: Path, path: bytes, object_format: str) -> Iterator[Listed]:
    mode = item.lstat().st_mode
    if stat.S_ISDIR(mode):
        for inner in item.iterdir():
            yield from _listed(inner, path + b"/" + os.fsencode(inner.name), object_format)
    elif stat.S_ISLNK(mode):
        # Not through `Path`, which would tidy the target up.
        target = os.readlink(os.fsencode(item))  # noqa: PTH115
        yield Listed(LINK, _blob_id(target, object_format), path)
    elif stat.S_ISREG(mode):
        kind = EXECUTABLE if mode & stat.S_IXUSR else FILE
        yield Listed(kind, _blob_id(item.read_bytes(), object_format), path)
    else:
        raise OddFileError(f"{path!r} is no file, no folder and no link")


def _blob_id(content: bytes, object_format: str) -> str:
    digest = hashlib.new(object_format, usedforsecurity=False)
    digest.update(b"blob %d\0" % len(content))
    digest.update(content)
    return digest.hexdigest()


def write_tree(files: Iterable[tuple[int, str, bytes]], scratch: Path, object_format: str) -> str:
    """The id of the tree that holds exactly these files. `scratch` is a folder of its own."""
    git_dir = scratch / "git"
    if not git_dir.exists():
        run("init", "--quiet", "--bare", f"--object-format={object_format}", git_dir)
    index = scratch / "index"
    index.unlink(missing_ok=True)
    env = {"GIT_DIR": str(git_dir), "GIT_INDEX_FILE": str(index)}
    given = b"".join(b"%06o %s\t%s\0" % (mode, id_.encode(), path) for mode, id_, path in files)
    run("update-index", "-z", "--index-info", given=given, env=env)
    # The contents stay where they are: their ids are all that a tree is made of.
    return run("write-tree", "--missing-ok", env=env).decode().strip()
