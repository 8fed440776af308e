"""
Makes git histories that hold everything awkward that a history can hold. The same seed makes the
same commits.

Each of `KINDS` changes a tree in one way; a commit is one to three of them, and every kind comes
in turn before any comes by chance. Written with `git fast-import`, so any bytes can be a name.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

from fencepost.client.gitimport.repository import environment

FILE, EXECUTABLE, LINK, SUBMODULE = 0o100644, 0o100755, 0o120000, 0o160000
Tree = dict[bytes, tuple[int, bytes]]

NAMES = (
    b"plain.txt",
    b"two words.txt",
    b" leading and trailing ",
    b"tab\there",
    b"new\nline",
    b'quo"te',
    b"back\\slash",
    b"-dash",
    b"a/b",
    b"b/a",
    b"x b/x",
    "üñí-🙂.txt".encode(),
    b"latin-\xe9.txt",
    b"\xff\xfe",
    b"folder-\x80/inner",
    b"dev/null",
    b"deep/er/and/deep/er/still.py",
    b"--- a",
    b"dot.",
    b"...",
    b"glob[*]?",
    b"$HOME",
)
LINES = (
    b"def f(x):",
    b"    return x",
    b"",
    b"--- a/plain.txt",
    b"+++ b/plain.txt",
    b"@@ -1,2 +1,2 @@",
    b"diff --git a/x b/x",
    b"-- ",
    b"\\ No newline at end of file",
    b"rename from here",
    b"tabs\tand\x0cfeeds",
    b"a lone\rreturn",
    "grüße 🙂".encode(),
    b"latin \xe9\xff",
    b"GIT binary patch",
    b" trailing blanks   ",
)


class History:
    """One branch's tree as it grows, and the random choices."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.tree: Tree = {}
        self.count = 0

    def fresh(self) -> bytes:
        """A path at which something may stand."""
        while True:
            self.count += 1
            name = self.random.choice(NAMES)
            if self.random.random() < 0.7:
                folder = self.random.choice((b"src", b"docs", b"src/inner", b"f\xf6lder", b"t e"))
                name = folder + b"/" + name
            if self.random.random() < 0.6:
                name += b"%d" % self.count
            if self.is_free(name):
                return name

    def is_free(self, path: bytes) -> bool:
        parts = path.split(b"/")
        above = {b"/".join(parts[:n]) for n in range(1, len(parts) + 1)}
        return not above & self.tree.keys() and not any(
            other.startswith(path + b"/") for other in self.tree
        )

    def pick(self, suits: Callable[[int, bytes], bool]) -> bytes | None:
        found = sorted(path for path, (mode, data) in self.tree.items() if suits(mode, data))
        return self.random.choice(found) if found else None

    def text(self, lines: int = 30, end: bytes = b"\n") -> bytes:
        count = self.random.randint(1, lines)
        chosen = [
            self.random.choice(LINES) + b" %d" % self.random.randint(0, 9)
            if self.random.random() < 0.6
            else self.random.choice(LINES)
            for _ in range(count)
        ]
        return end.join(chosen) + (end if self.random.random() < 0.8 else b"")

    def binary(self, size: int = 3_000) -> bytes:
        return b"\0" + self.random.randbytes(self.random.randint(1, size))


def _is_text(mode: int, data: bytes) -> bool:
    return mode in (FILE, EXECUTABLE) and bool(data) and b"\0" not in data[:8000]


def _is_file(mode: int, _data: bytes) -> bool:
    return mode in (FILE, EXECUTABLE)


def _is_binary(mode: int, data: bytes) -> bool:
    return _is_file(mode, data) and b"\0" in data[:8000]


def _is_link(mode: int, _data: bytes) -> bool:
    return mode == LINK


def _is_submodule(mode: int, _data: bytes) -> bool:
    return mode == SUBMODULE


def add_text(h: History) -> None:
    h.tree[h.fresh()] = (FILE, h.text())


def add_crlf(h: History) -> None:
    h.tree[h.fresh()] = (FILE, h.text(end=b"\r\n"))


def add_empty(h: History) -> None:
    h.tree[h.fresh()] = (h.random.choice((FILE, EXECUTABLE)), b"")


def add_binary(h: History) -> None:
    h.tree[h.fresh()] = (h.random.choice((FILE, EXECUTABLE)), h.binary())


def add_large_text(h: History) -> None:
    h.tree[h.fresh()] = (FILE, h.text(4_000))


def add_large_binary(h: History) -> None:
    h.tree[h.fresh()] = (FILE, h.binary(200_000))


def add_link(h: History) -> None:
    target = h.random.choice((b"plain.txt", b"../up", b"/abs/olute", b"gone \xe9", b"a\nb"))
    h.tree[h.fresh()] = (LINK, target)


def add_submodule(h: History) -> None:
    h.tree[h.fresh()] = (SUBMODULE, b"%040x" % h.random.getrandbits(160))


def edit_text(h: History) -> None:
    path = h.pick(_is_text)
    if path is None:
        return
    mode, data = h.tree[path]
    lines = data.splitlines(keepends=True)
    for _ in range(h.random.randint(1, 4)):
        at = h.random.randrange(len(lines) + 1)
        del lines[at : at + h.random.randint(0, 2)]
        lines.insert(at, h.random.choice(LINES) + b"\n")
    h.tree[path] = (mode, b"".join(lines))


def edit_end(h: History) -> None:
    """Takes the last line's end away, or puts one there."""
    path = h.pick(_is_text)
    if path is not None:
        mode, data = h.tree[path]
        h.tree[path] = (mode, data[:-1] if data.endswith(b"\n") else data + b"\n")


def empty_text(h: History) -> None:
    path = h.pick(_is_text)
    if path is not None:
        h.tree[path] = (h.tree[path][0], b"")


def fill_empty(h: History) -> None:
    path = h.pick(lambda mode, data: _is_file(mode, data) and not data)
    if path is not None:
        h.tree[path] = (FILE, h.text())


def edit_binary(h: History) -> None:
    path = h.pick(_is_binary)
    if path is not None:
        h.tree[path] = (h.tree[path][0], h.binary())


def text_to_binary(h: History) -> None:
    path = h.pick(_is_text)
    if path is not None:
        h.tree[path] = (h.tree[path][0], h.binary())


def binary_to_text(h: History) -> None:
    path = h.pick(_is_binary)
    if path is not None:
        h.tree[path] = (h.tree[path][0], h.text())


def change_mode(h: History) -> None:
    path = h.pick(_is_file)
    if path is not None:
        mode, data = h.tree[path]
        h.tree[path] = (EXECUTABLE if mode == FILE else FILE, data)


def change_mode_and_text(h: History) -> None:
    path = h.pick(_is_text)
    if path is not None:
        mode, data = h.tree[path]
        h.tree[path] = (EXECUTABLE if mode == FILE else FILE, data + b"one more\n")


def change_link(h: History) -> None:
    path = h.pick(_is_link)
    if path is not None:
        h.tree[path] = (LINK, h.tree[path][1] + b"x")


def change_submodule(h: History) -> None:
    path = h.pick(_is_submodule)
    if path is not None:
        h.tree[path] = (SUBMODULE, b"%040x" % h.random.getrandbits(160))


def delete_any(h: History) -> None:
    path = h.pick(lambda _mode, _data: True)
    if path is not None and len(h.tree) > 3:
        del h.tree[path]


def delete_binary(h: History) -> None:
    path = h.pick(_is_binary)
    if path is not None:
        del h.tree[path]


def delete_folder(h: History) -> None:
    path = h.pick(lambda _mode, _data: True)
    if path is not None and b"/" in path:
        folder = path.rpartition(b"/")[0] + b"/"
        for other in [other for other in h.tree if other.startswith(folder)]:
            del h.tree[other]


def rename(h: History) -> None:
    path = h.pick(_is_file)
    if path is not None:
        h.tree[h.fresh()] = h.tree.pop(path)


def rename_link(h: History) -> None:
    path = h.pick(_is_link)
    if path is not None:
        h.tree[h.fresh()] = h.tree.pop(path)


def rename_and_edit(h: History) -> None:
    path = h.pick(lambda mode, data: _is_text(mode, data) and len(data) > 200)
    if path is not None:
        mode, data = h.tree.pop(path)
        h.tree[h.fresh()] = (EXECUTABLE if h.random.random() < 0.3 else mode, data + b"moved\n")


def rename_and_edit_binary(h: History) -> None:
    path = h.pick(lambda mode, data: _is_binary(mode, data) and len(data) > 1_000)
    if path is not None:
        mode, data = h.tree.pop(path)
        h.tree[h.fresh()] = (mode, data[:-5] + b"moved")


def rename_folder(h: History) -> None:
    path = h.pick(lambda _mode, _data: True)
    if path is None or b"/" not in path:
        return
    folder = path.rpartition(b"/")[0] + b"/"
    target = h.fresh() + b"/"
    for other in [other for other in h.tree if other.startswith(folder)]:
        h.tree[target + other[len(folder) :]] = h.tree.pop(other)


def rename_into_itself(h: History) -> None:
    """`x` becomes `x/x`: a folder where its own file stood."""
    path = h.pick(_is_text)
    if path is not None:
        h.tree[path + b"/" + path.rpartition(b"/")[2]] = h.tree.pop(path)


def rename_out_of_itself(h: History) -> None:
    """`x/y` becomes `x`: a file where its own folder stood."""
    path = h.pick(_is_text)
    if path is not None and b"/" in path:
        folder = path.rpartition(b"/")[0]
        moved = h.tree[path]
        for other in [other for other in h.tree if other.startswith(folder + b"/")]:
            del h.tree[other]
        h.tree[folder] = moved


def copy(h: History) -> None:
    path = h.pick(_is_file)
    if path is not None:
        h.tree[h.fresh()] = h.tree[path]


def copy_and_delete(h: History) -> None:
    """One becomes two elsewhere: git tells a rename and a copy of the same source."""
    path = h.pick(lambda mode, data: _is_file(mode, data) and len(data) > 50)
    if path is not None:
        found = h.tree.pop(path)
        h.tree[h.fresh()] = found
        h.tree[h.fresh()] = found


def swap(h: History) -> None:
    one, other = h.pick(_is_file), h.pick(_is_file)
    if one is not None and other is not None:
        h.tree[one], h.tree[other] = h.tree[other], h.tree[one]


def file_to_link(h: History) -> None:
    path = h.pick(_is_file)
    if path is not None:
        h.tree[path] = (LINK, b"points/else\xffwhere")


def link_to_file(h: History) -> None:
    path = h.pick(_is_link)
    if path is not None:
        h.tree[path] = (FILE, h.text() if h.random.random() < 0.5 else h.binary())


def file_to_folder(h: History) -> None:
    path = h.pick(_is_file)
    if path is not None:
        del h.tree[path]
        h.tree[path + b"/one"] = (FILE, h.text())
        h.tree[path + b"/two\xfe"] = (FILE, h.binary())


def link_to_folder(h: History) -> None:
    path = h.pick(_is_link)
    if path is not None:
        del h.tree[path]
        h.tree[path + b"/inside"] = (FILE, h.binary())


def folder_to(h: History, made: tuple[int, bytes]) -> None:
    path = h.pick(lambda _mode, _data: True)
    if path is not None and b"/" in path:
        folder = path.split(b"/")[0]
        for other in [other for other in h.tree if other.startswith(folder + b"/")]:
            del h.tree[other]
        h.tree[folder] = made


def folder_to_text(h: History) -> None:
    folder_to(h, (FILE, h.text()))


def folder_to_binary(h: History) -> None:
    folder_to(h, (FILE, h.binary()))


def folder_to_link(h: History) -> None:
    folder_to(h, (LINK, b"was/a/folder"))


def file_to_submodule(h: History) -> None:
    path = h.pick(_is_file)
    if path is not None:
        h.tree[path] = (SUBMODULE, b"%040x" % h.random.getrandbits(160))


def submodule_to_file(h: History) -> None:
    path = h.pick(_is_submodule)
    if path is not None:
        h.tree[path] = (FILE, h.text() if h.random.random() < 0.5 else h.binary())


def submodule_to_folder(h: History) -> None:
    path = h.pick(_is_submodule)
    if path is not None:
        del h.tree[path]
        h.tree[path + b"/file"] = (FILE, h.text())


def attributes(h: History) -> None:
    """What would change a checkout must change nothing here."""
    if h.is_free(b".gitattributes"):
        h.tree[b".gitattributes"] = (FILE, b"*.txt text eol=crlf\n*.py -diff\n* ident\n")
    h.tree[b"src/ignored.log"] = (FILE, b"$Id$\r\n" + h.text())
    h.tree[b".gitignore"] = (FILE, b"*.log\n")


KINDS: tuple[Callable[[History], None], ...] = (
    add_text, add_crlf, add_empty, add_binary, add_link, add_large_text, add_large_binary,
    add_submodule, edit_text, edit_end, rename, rename_and_edit, rename_link, change_mode,
    change_mode_and_text, change_link, edit_binary, rename_and_edit_binary, add_text, add_binary,
    text_to_binary, binary_to_text, copy, copy_and_delete, swap, file_to_link, link_to_file,
    add_link, link_to_folder, file_to_folder, rename_folder, folder_to_text, add_text, add_binary,
    folder_to_binary, folder_to_link, add_text, rename_into_itself, rename_out_of_itself,
    change_submodule, submodule_to_file, add_submodule, file_to_submodule, submodule_to_folder,
    empty_text, fill_empty, attributes, add_crlf, edit_text, delete_any, delete_binary,
    delete_folder,
)  # fmt: skip
_GROW = (add_text, add_text, add_binary, add_link, add_crlf, edit_text, edit_text, edit_text)


def _quoted(path: bytes) -> bytes:
    return b'"' + b"".join(b"\\%03o" % byte for byte in path) + b'"'


class _Writer:
    """A `git fast-import` stream."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.mark = 0

    def commit(self, branch: bytes, tree: Tree, *, parent: int, merged: int = 0) -> int:
        self.mark += 1
        when = b"%d +0000" % (1_700_000_000 + self.mark)
        self.lines.append(
            b"commit refs/heads/%s\nmark :%d\ncommitter A <a@example.com> %s\ndata 1\nx\n"
            % (branch, self.mark, when)
        )
        if parent:
            self.lines.append(b"from :%d\n" % parent)
        if merged:
            self.lines.append(b"merge :%d\n" % merged)
        self.lines.append(b"deleteall\n")
        for path, (mode, data) in sorted(tree.items()):
            if mode == SUBMODULE:
                self.lines.append(b"M 160000 %s %s\n" % (data, _quoted(path)))
            else:
                self.lines.append(b"M %o inline %s\n" % (mode, _quoted(path)))
                self.lines.append(b"data %d\n%s\n" % (len(data), data))
        return self.mark


def make(folder: Path, *, commits: int, seed: int) -> Path:
    """Makes a bare repository with so many commits on the first-parent line of `main`."""
    history = History(seed)
    writer = _Writer()
    kinds = list(KINDS)
    head = side = side_start = 0
    side_tree: Tree = {}
    for number in range(commits):
        before = dict(history.tree)
        for _ in range(history.random.randint(1, 3)):
            kind: Callable[[History], None]
            if number < 6 or len(history.tree) < 6:
                kind = history.random.choice(_GROW)
            elif kinds:
                kind = kinds.pop(0)
            else:
                kind = history.random.choice(KINDS + _GROW * 2)
            kind(history)
        if number % 25 == 10:
            # A side branch of two commits that the next one merges.
            side_tree = {**before, b"side/%d" % number: (FILE, history.text())}
            side_start = head
            side = writer.commit(b"side", side_tree, parent=side_start)
            side_tree[b"side/binary"] = (FILE, history.binary())
            side = writer.commit(b"side", side_tree, parent=side)
        merged = 0
        if number % 25 == 12 and side:
            merged, side = side, 0
            for path, found in side_tree.items():
                if path.startswith(b"side/") and history.is_free(path):
                    history.tree[path] = found
        head = writer.commit(b"main", history.tree, parent=head, merged=merged)
    env = environment()
    subprocess.run(
        ["git", "init", "--quiet", "--bare", "--initial-branch=main", str(folder)],
        check=True,
        env=env,
    )
    subprocess.run(
        ["git", f"--git-dir={folder}", "fast-import", "--quiet", "--force"],
        input=b"".join(writer.lines) + b"done\n",
        check=True,
        env=env,
        capture_output=True,
    )
    return folder
