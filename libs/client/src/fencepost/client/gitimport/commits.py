"""A line of commits as steps: git is asked for what differs, `convert` says what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fencepost.client.gitimport import convert
from fencepost.client.gitimport.diffs import SUBMODULE
from fencepost.client.gitimport.repository import Repository


class Converted(NamedTuple):
    """One commit. An empty `commit` is what stood before the first."""

    commit: str
    tree: str
    phases: tuple[convert.Phase, ...]


def converted(repository: Repository, line: list[tuple[str, str]]) -> Iterator[Converted]:
    """Converts a line of commits, one at a time; it blocks while git works."""
    paths = convert.Paths()
    before = repository.empty_tree
    for commit, tree in line:
        entries = repository.entries(before, tree)
        contents = repository.contents(convert.contents_needed(entries))
        yield Converted(commit, tree, convert.phases(entries, contents, paths))
        before = tree


def files_of(repository: Repository, tree: str) -> tuple[list[tuple[int, str, bytes]], list[bytes]]:
    """The files of a tree that a sandbox is to hold, and the submodules, which it is not."""
    files, submodules = [], []
    for mode, id_, path in repository.tree_entries(tree):
        if mode == SUBMODULE:
            submodules.append(path)
        else:
            files.append((mode, id_, path))
    return files, submodules
