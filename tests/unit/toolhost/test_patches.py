"""`apply_patch` against git's own diffs, and every way in which a patch may not apply."""

from __future__ import annotations

import base64
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolhost.driver import Disk, Toolhost, digest
from tests.unit.toolhost.test_files import refused, tree

Start = Callable[..., Toolhost]
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def b64(patch: bytes) -> dict[str, str]:
    return {"patch_b64": base64.b64encode(patch).decode()}


def git(where: Path, *argv: str) -> bytes:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    return subprocess.run(
        ["git", "-c", "core.safecrlf=false", "-c", "core.autocrlf=false", *argv],
        cwd=where, env=env, check=True, capture_output=True,
    ).stdout  # fmt: skip


LETTERS = [
    "alpha",
    "beta",
    "  gamma",
    "",
    "x" * 90,
    "tab\there",
    "é",
    "-- ",
    "--- a/x",
    "+++ b/x",
    "@@ -1 +1 @@",
    "\\ odd",
]
NAMES = [
    b"plain", b"with space", b"tab\tname", b'quo"te', b"back\\slash", "umlaut-é".encode(), b"raw-\xff",
    b"new\nline", b"d/inner", b"d/e/deep", b"b/x", b"a b/c d",
]  # fmt: skip


class RandomTree:
    """Random files, and random edits of them, from one seed."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = os.fsencode(root)
        self.random = random.Random(seed)

    def content(self) -> bytes:
        pick = self.random
        end = pick.choice([b"\n", b"\n", b"\r\n"])
        lines = [pick.choice(LETTERS).encode() for _ in range(pick.randrange(40))]
        if pick.random() < 0.2:
            lines.append(b"latin \xe9\xff")
        data = end.join(lines)
        return data + end if lines and pick.random() < 0.7 else data

    def path(self, name: bytes) -> bytes:
        return os.path.join(self.root, name)

    def write(self, name: bytes, data: bytes) -> None:
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "wb") as file:
            file.write(data)

    def names(self) -> list[bytes]:
        found = []
        for base, dirs, files in os.walk(self.root):
            if b".git" in dirs:
                dirs.remove(b".git")
            dirs.sort()
            found += [os.path.relpath(os.path.join(base, name), self.root) for name in files]
            found += [
                os.path.relpath(os.path.join(base, d), self.root)
                for d in dirs
                if os.path.islink(os.path.join(base, d))
            ]
        return sorted(found)

    def fill(self) -> None:
        for name in self.random.sample(NAMES, 7):
            self.write(name, self.content())
            if self.random.random() < 0.2:
                os.chmod(self.path(name), 0o755)
        if self.random.random() < 0.6:
            os.symlink(b"plain", self.path(b"link"))

    def edit(self) -> None:
        pick = self.random
        for name in self.names():
            change = pick.choice(
                [
                    "none",
                    "edit",
                    "edit",
                    "rewrite",
                    "mode",
                    "delete",
                    "rename",
                    "copy",
                    "type",
                    "empty",
                ]
            )
            path = self.path(name)
            if change == "none" or (
                os.path.islink(path) and change not in ("delete", "rename", "type")
            ):
                continue
            if change in ("edit", "copy"):
                with open(path, "rb") as file:
                    lines = file.read().splitlines(keepends=True)
                for _ in range(pick.randrange(1, 4)):
                    at = pick.randrange(len(lines) + 1)
                    lines[at : at + pick.randrange(2)] = [
                        pick.choice(LETTERS).encode() + b"\n"
                    ] * pick.randrange(3)
                self.write(name + (b"-copy" if change == "copy" else b""), b"".join(lines))
            elif change == "rewrite":
                self.write(name, self.content())
            elif change == "mode":
                os.chmod(path, os.stat(path).st_mode ^ 0o111)
            elif change == "delete":
                os.unlink(path)
            elif change == "rename":
                os.rename(path, path + b"-renamed")
            elif change == "type":
                is_link = os.path.islink(path)
                os.unlink(path)
                if is_link:
                    self.write(name, self.content())
                else:
                    os.symlink(b"else/where", path)
            else:
                self.write(name, b"")
        for name in NAMES:
            if pick.random() < 0.15 and not os.path.lexists(self.path(name)):
                try:
                    self.write(name, self.content())
                except (NotADirectoryError, FileExistsError):
                    continue

    def swap(self) -> None:
        """Two files change names: git tells it as two renames."""
        one, two = [n for n in self.names() if not os.path.islink(self.path(n))][:2]
        os.rename(self.path(one), self.path(b"swapping"))
        os.rename(self.path(two), self.path(one))
        os.rename(self.path(b"swapping"), self.path(two))


DIFF_OPTIONS = [
    [], ["-M"], ["-M", "-C", "--find-copies-harder"], ["--no-renames"], ["-U0"], ["-U20"], ["--full-index", "-M"],
    ["--no-prefix", "-M"], ["-B", "--no-renames"], ["--minimal"], ["--src-prefix=i/", "--dst-prefix=w/"],
]  # fmt: skip


def files_only(found: dict[str, Any]) -> dict[str, Any]:
    return {name: what for name, what in found.items() if what[0] != "dir"}


@needs_git
@pytest.mark.parametrize("seed", range(44))
def test_gits_own_diffs_apply_and_come_back(start: Start, disk: Disk, tmp_path: Path, seed: int):
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q")
    made = RandomTree(repo, seed)
    made.fill()
    git(repo, "add", "-A")
    for name in made.names():
        target = os.path.join(os.fsencode(disk.workspace), name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy2(made.path(name), target, follow_symlinks=False)
    old = git(repo, "write-tree").decode().strip()
    if seed % 7 == 3:
        made.swap()
    else:
        made.edit()
    git(repo, "add", "-A")
    new = git(repo, "write-tree").decode().strip()
    options = DIFF_OPTIONS[seed % len(DIFF_OPTIONS)]
    patch = git(repo, "diff", "--text", *options, old, new)
    shutil.rmtree(repo / ".git")
    wanted = files_only(tree_of(repo))
    if not patch:
        pytest.skip("this seed made no difference")
    before = tree(disk)
    host = start()
    host.mark()
    receipt = host.apply("s1.1", "apply_patch", b64(patch))
    assert (receipt["verdict"], receipt["outcome"]) == ("applied", "ok"), (receipt, patch)
    assert files_only(tree(disk)) == wanted
    for change in receipt["changes"]:
        if (
            change["after"]
            and change["after"].startswith("sha256:")
            and "\ufffd" not in change["path"]
        ):
            assert digest((disk.workspace / change["path"]).read_bytes()) == change["after"]
    assert host.undo("s1.u", of="s1.1")["verdict"] == "applied"
    assert files_only(tree(disk)) == files_only(before)


def tree_of(root: Path) -> dict[str, Any]:
    disk = Disk.__new__(Disk)
    disk.workspace = root
    return tree(disk)


@needs_git
def test_a_file_becomes_a_directory_and_a_directory_a_file(
    start: Start, disk: Disk, tmp_path: Path
):
    repo = tmp_path / "repo"
    for root in (repo, disk.workspace):
        (root / "dir" / "sub").mkdir(parents=True)
        (root / "dir" / "sub" / "f").write_text("f\n")
        (root / "file").write_text("file\n")
    git(repo, "init", "-q")
    git(repo, "add", "-A")
    old = git(repo, "write-tree").decode().strip()
    shutil.rmtree(repo / "dir")
    (repo / "dir").write_text("now a file\n")
    (repo / "file").unlink()
    (repo / "file").mkdir()
    (repo / "file" / "inner").write_text("inner\n")
    git(repo, "add", "-A")
    patch = git(repo, "diff", "--no-renames", old, git(repo, "write-tree").decode().strip())
    before = tree(disk)
    host = start()
    host.mark()
    assert host.apply("s1.1", "apply_patch", b64(patch))["outcome"] == "ok"
    assert (disk.workspace / "dir").read_text() == "now a file\n"
    assert (disk.workspace / "file" / "inner").read_text() == "inner\n"
    assert host.undo("s1.u", of="s1.1")["verdict"] == "applied"
    assert tree(disk) == before


def test_the_result_lists_the_files(host: Toolhost, disk: Disk):
    (disk.workspace / "old").write_text("one\ntwo\n")
    (disk.workspace / "gone").write_text("")
    patch = (
        "From: somebody\nSubject: a mail's head is skipped\n\n---\n old | 2 +-\n\n"
        "diff --git a/old b/new\nsimilarity index 50%\nrename from old\nrename to new\n"
        "--- a/old\n+++ b/new\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
        "diff --git a/gone b/gone\ndeleted file mode 100644\nindex e69de29..0000000\n"
        "diff --git a/empty b/empty\nnew file mode 100755\nindex 0000000..e69de29\n-- \n2.39.5\n"
    )
    receipt = host.apply("s1.1", "apply_patch", {"patch": patch})
    assert receipt["result"] == {
        "files": [
            {"path": "new", "change": "renamed", "hunks": 1, "from": "old"},
            {"path": "gone", "change": "deleted", "hunks": 0},
            {"path": "empty", "change": "created", "hunks": 0},
        ]
    }
    assert tree(disk) == {"new": ("file", 0o644, b"one\n2\n"), "empty": ("file", 0o755, b"")}


def test_a_plain_diff_without_git_headers(host: Toolhost, disk: Disk):
    (disk.workspace / "f").write_text("1\n2\n3\n")
    patch = "--- f\t2024-01-01 00:00:00\n+++ f\t2024-01-02 00:00:00\n@@ -2 +2 @@\n-2\n+two\n"
    assert host.apply("s1.1", "apply_patch", {"patch": patch})["outcome"] == "ok"
    assert (disk.workspace / "f").read_text() == "1\ntwo\n3\n"
    new = "--- /dev/null\n+++ b/g\n@@ -0,0 +1 @@\n+g\n"
    assert host.apply("s2.1", "apply_patch", {"patch": new})["outcome"] == "ok"
    gone = "--- a/g\n+++ /dev/null\n@@ -1 +0,0 @@\n-g\n"
    assert host.apply("s3.1", "apply_patch", {"patch": gone})["outcome"] == "ok"
    assert list(tree(disk)) == ["f"]


def test_one_file_may_be_named_twice(host: Toolhost, disk: Disk):
    (disk.workspace / "f").write_text("1\n")
    one = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-1\n+2\n"
    two = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-2\n+3\n"
    assert host.apply("s1.1", "apply_patch", {"patch": one + two})["outcome"] == "ok"
    assert (disk.workspace / "f").read_text() == "3\n"


HEADER = "--- a/f\n+++ b/f\n"


@pytest.mark.parametrize(
    ("content", "patch", "hunk", "expected", "found"),
    [
        ("1\nX\n3\n", "@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n", 1, "2\n", "X\n"),
        ("1\n2\n", "@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n", 1, "3\n", "the end of the file"),
        # One line further down: offsets are not searched.
        ("0\n1\n2\n3\n", "@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n", 1, "1\n", "0\n"),
        ("1\r\n2\r\n", "@@ -1,2 +1,2 @@\n 1\n-2\n+two\n", 1, "1\n", "1\r\n"),
        ("1\n2", "@@ -1,2 +1,2 @@\n 1\n-2\n+two\n", 1, "2\n", "2"),
        ("1\n2\n", "@@ -1,2 +1,2 @@\n 1\n-2\n\\ No newline at end of file\n+two\n", 1, "2", "2\n"),
        ("1\n2\n3\n", "@@ -1 +1 @@\n-1\n+one\n@@ -3 +3 @@\n-4\n+four\n", 2, "4\n", "3\n"),
        ("1\n", "@@ -9,0 +10 @@\n+x\n", 1, "line 9", "the end of the file"),
    ],
)
def test_a_patch_that_does_not_apply_says_where_and_changes_nothing(
    host: Toolhost, disk: Disk, content: str, patch: str, hunk: int, expected: str, found: str
):
    (disk.workspace / "f").write_bytes(content.encode())
    (disk.workspace / "first").write_text("a\n")
    whole = "--- a/first\n+++ b/first\n@@ -1 +1 @@\n-a\n+b\n" + HEADER + patch
    before = tree(disk)
    receipt = host.apply("s1.1", "apply_patch", {"patch": whole})
    assert (receipt["verdict"], receipt["outcome"]) == ("applied", "failed")
    result = receipt["result"]
    assert result["error"] == "the patch does not apply"
    assert (result["file"], result["hunk"]) == ("f", hunk)
    assert (result["expected"], result["found"]) == (expected, found)
    assert receipt["changes"] == []
    assert tree(disk) == before


def test_what_a_patch_finds_instead_of_its_files(host: Toolhost, disk: Disk):
    (disk.workspace / "there").write_text("x\n")
    (disk.workspace / "dir").mkdir()
    os.symlink("there", disk.workspace / "link")
    change = "@@ -1 +1 @@\n-x\n+y\n"
    cases = {
        f"--- a/no\n+++ b/no\n{change}": ("no", "file", "nothing"),
        f"--- a/link\n+++ b/link\n{change}": ("link", "file", "link"),
        f"--- a/dir\n+++ b/dir\n{change}": ("dir", "file", "dir"),
        "--- /dev/null\n+++ b/there\n@@ -0,0 +1 @@\n+y\n": ("there", "nothing", "file"),
        "diff --git a/there b/link\nsimilarity index 100%\nrename from there\nrename to link\n": (
            "link",
            "nothing",
            "link",
        ),
        "diff --git a/there b/there\ndeleted file mode 100644\n": (
            "there",
            "nothing after the deletion",
            "2 bytes left",
        ),
    }
    before = tree(disk)
    for number, (patch, (file, expected, found)) in enumerate(cases.items()):
        result = host.apply(f"s{number}.1", "apply_patch", {"patch": patch})["result"]
        assert (result["file"], result["expected"], result["found"]) == (file, expected, found)
        assert tree(disk) == before
    assert (
        host.apply("s9.1", "apply_patch", {"patch": f"--- a/there\n+++ b/there\n{change}"})[
            "outcome"
        ]
        == "ok"
    )


GIT = "diff --git a/f b/f\n"


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        ("", "names no file"),
        ("just words\n", "names no file"),
        ("@@ -1 +1 @@\n-a\n+b\n", "without a file header"),
        (GIT + "@@ -1 +1 @@\n-a\n+b\n", "without ---"),
        (HEADER, "without hunks"),
        (HEADER + "@@ -1,2 +1 @@\n-a\n+b\n", "shorter"),
        (HEADER + "@@ -1 +1 @@\n-a\n+b\n+c\n", "longer"),
        (HEADER + "@@ -1 +1 @@\n-a\n+b\n c\n", "longer"),
        (HEADER + "@@ -1 +1 @@\n-a\n-b\n", "counts"),
        (HEADER + "@@ -1 +1 @@\n\\ No newline\n", "nothing before"),
        ("--- a/f\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n", "disagree"),
        (GIT + "--- a/f\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n", "disagree"),
        (GIT + "index 1..2 100644\nGIT binary patch\nliteral 1\nIcmZPo\n", "binary"),
        (GIT + "Binary files a/f and b/f differ\n", "binary"),
        (GIT + "new file mode 160000\n", "mode"),
        (GIT + "rename from f\n", "both names"),
        ('--- "a/f\\q"\n+++ "b/f\\q"\n@@ -1 +1 @@\n-a\n+b\n', "quoted"),
        ("--- a/../f\n+++ b/../f\n@@ -1 +1 @@\n-a\n+b\n", "'..'"),
        ("--- /etc/f\n+++ /etc/f\n@@ -1 +1 @@\n-a\n+b\n", "absolute"),
        ("diff --git a/f b/f\nrename from f\nrename to ../g\n", "'..'"),
        ('--- "a/f\\000"\n+++ "b/f\\000"\n@@ -1 +1 @@\n-a\n+b\n', "NUL"),
    ],
)
def test_a_malformed_patch_is_refused_with_its_line(
    host: Toolhost, disk: Disk, patch: str, problem: str
):
    (disk.workspace / "f").write_text("a\n")
    before = tree(disk)
    receipt = host.apply("s1.1", "apply_patch", {"patch": patch})
    refused(receipt, "patch")
    assert problem in receipt["detail"]
    assert tree(disk) == before


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({}, "patch"),
        ({"patch": 5}, "patch"),
        ({"patch": "x", "patch_b64": ""}, "patch"),
        ({"patch": "x", "fuzz": 2}, "fuzz"),
    ],
)
def test_wrong_arguments_of_apply_patch_name_the_field(host: Toolhost, args: Any, field: str):
    refused(host.apply("s1.1", "apply_patch", args), field)


def test_a_patch_by_reference(host: Toolhost, disk: Disk):
    patch = b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n"
    host.send({"k": "blob", "digest": digest(patch), "size": len(patch), "last": True}, patch)
    args = {"patch_ref": {"$blob": digest(patch), "size": len(patch)}}
    assert host.apply("s1.1", "apply_patch", args)["outcome"] == "ok"
    assert tree(disk) == {"f": ("file", 0o644, b"x\n")}
