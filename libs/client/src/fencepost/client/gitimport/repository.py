"""
Asks git: the line of commits, what differs from one to the next, and contents by id.

Only plumbing commands, in an environment of their own: no hooks, no configuration of the user or
the system, no pager, nothing fetched. Of the repository's own configuration nothing runs a program
(no external diff, no text conversion), and what could change the output is overridden.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Final, Literal, Self, TypeAlias

from fencepost.client.gitimport import diffs
from fencepost.client.gitimport.diffs import Entry
from fencepost.core.errors import FencepostError, RefusedError

Order: TypeAlias = Literal["first-parent", "topo"]

_OVERRIDES: Final = (
    "safe.directory=*",
    "core.quotePath=true",
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.commitGraph=false",
    "diff.suppressBlankEmpty=false",
    "log.showSignature=false",
)
_DIFF: Final = (
    "diff-tree",
    "-r",
    "--raw",
    "-p",
    "-M",
    "-l1000",
    "--unified=3",
    "--full-index",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-relative",
    "--submodule=short",
    "--ignore-submodules=none",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


class GitError(FencepostError):
    """A git command failed; what it said is in the message. The repository's fault, or ours."""


def environment() -> dict[str, str]:
    """The environment of every git process here: nothing of the caller's but the search path."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "HOME": "/nonexistent",
        "XDG_CONFIG_HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_PAGER": "cat",
    }


def run(*args: str | Path, given: bytes = b"", env: dict[str, str] | None = None) -> bytes:
    """Runs a git command to its end and gives what it printed. Raises `GitError`."""
    program = shutil.which("git")
    if program is None:
        raise RefusedError("no_git", "git: this command needs the git program", field="git")
    done = subprocess.run(
        [program, *_options(), *map(str, args)],
        input=given,
        capture_output=True,
        check=False,
        env={**environment(), **(env or {})},
    )
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()
        command = next((str(arg) for arg in args if not str(arg).startswith(("-", "/"))), "")
        raise GitError(f"git {command}: {said or f'exit code {done.returncode}'}")
    return done.stdout


def _options() -> list[str]:
    return [word for setting in _OVERRIDES for word in ("-c", setting)]


class Repository:
    """A repository that is only read. A context manager: it keeps one git process for contents."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise RefusedError("no_repository", f"REPO: no folder {folder}", field="REPO")
        self._folder = folder
        try:
            told = self._git("rev-parse", "--absolute-git-dir", "--show-object-format")
        except GitError as error:
            raise RefusedError("no_repository", f"REPO: {folder}: {error}", field="REPO") from error
        git_dir, self.object_format = told.decode().splitlines()
        self._git_dir = Path(git_dir)
        self.empty_tree = self._git("hash-object", "-t", "tree", "--stdin").decode().strip()
        self._contents: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._contents is not None:
            assert self._contents.stdin is not None
            assert self._contents.stdout is not None
            self._contents.stdin.close()
            self._contents.wait()
            self._contents.stdout.close()
            self._contents = None

    def commits(self, revision: str, *, limit: int, order: Order) -> list[tuple[str, str]]:
        """
        The newest `limit` commits (id, tree) up to a revision, oldest first.

        `first-parent` follows first parents alone; `topo` puts all ancestors into one line, in
        which neighbours need not be parent and child. One more comes first where there is an
        older one, with an empty id: what the first is compared with.
        """
        try:
            tip = self._git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
        except GitError as error:
            raise RefusedError(
                "unknown_revision", f"--rev: {revision!r}: {error}", field="--rev"
            ) from error
        way = "--first-parent" if order == "first-parent" else "--topo-order"
        printed = self._git(
            "rev-list", way, f"--max-count={limit + 1}", "--format=%H %T", tip.decode().strip()
        )
        found = []
        for line in printed.decode().splitlines():
            if not line.startswith("commit "):
                commit, _, tree = line.partition(" ")
                found.append((commit, tree))
        found.reverse()
        if len(found) > limit:
            found[0] = ("", found[0][1])
        return found

    def entries(self, before: str, after: str) -> list[Entry]:
        """What differs between two trees, with the patch."""
        return diffs.read(self._git(*_DIFF, before, after))

    def contents(self, ids: Iterable[str]) -> dict[str, bytes]:
        """Contents by their ids. Raises `GitError` for one that the repository lacks."""
        return {id_: self._content(id_) for id_ in dict.fromkeys(ids)}

    def tree_entries(self, tree: str) -> list[tuple[int, str, bytes]]:
        """All files below a tree: mode, id, path."""
        found = []
        for line in self._git("ls-tree", "-r", "-z", "--full-tree", tree).split(b"\0"):
            if line:
                told, _, path = line.partition(b"\t")
                mode, _, id_ = told.decode().split()
                found.append((int(mode, 8), id_, path))
        return found

    def _content(self, id_: str) -> bytes:
        if self._contents is None:
            self._contents = subprocess.Popen(
                ["git", *_options(), f"--git-dir={self._git_dir}", "cat-file", "--batch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment(),
            )
        ask, answer = self._contents.stdin, self._contents.stdout
        assert ask is not None
        assert answer is not None
        ask.write(id_.encode() + b"\n")
        ask.flush()
        return _batched(answer, id_)

    def _git(self, *args: str) -> bytes:
        return run("-C", self._folder, *args)


def _batched(answer: IO[bytes], id_: str) -> bytes:
    """One answer of `git cat-file --batch`."""
    head = answer.readline().split()
    if len(head) != 3 or head[1] != b"blob":
        raise GitError(f"git cat-file: no content {id_}: {b' '.join(head).decode()}")
    content = answer.read(int(head[2]) + 1)
    if len(content) != int(head[2]) + 1:
        raise GitError(f"git cat-file: the content {id_} ended early")
    return content[:-1]
