"""
Git's differences as tool steps, applied by a real toolhost, end as git's own tree.

No stack and no planner: this is about what the steps say. The history holds every awkward thing
(`tests/git_histories.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fencepost.client import cli
from fencepost.client.gitimport import convert, diffs, trees
from fencepost.client.gitimport.commits import converted, files_of
from fencepost.client.gitimport.repository import GitError, Order, Repository
from fencepost.core import tools
from fencepost.core.errors import RefusedError
from typer.testing import CliRunner

from tests import git_histories
from tests.unit.toolhost.driver import Disk, Toolhost


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history")
    return git_histories.make(folder / "repository.git", commits=300, seed=20)


def _apply(host: Toolhost, step: convert.Step, number: int) -> None:
    assert tools.check(step.tool, step.args) is None, "the shard would refuse this"
    receipt = host.apply(f"s{number}.1", step.tool, step.args)
    assert (receipt["verdict"], receipt["outcome"]) == ("applied", "ok"), receipt


def _tree(files: Any, scratch: Path, object_format: str = "sha1") -> str:
    return trees.write_tree(files, scratch, object_format)


@pytest.mark.parametrize(("order", "limit"), [("first-parent", 1_000), ("topo", 120)])
def test_any_history_becomes_steps_that_end_as_gits_tree(
    history: Path, tmp_path: Path, order: Order, limit: int
) -> None:
    disk = Disk(tmp_path / "disk")
    number = 0
    used = set()
    with Repository(history) as repository, Toolhost(disk) as host:
        assert host.mark()["k"] == "marked"
        line = repository.commits("main", limit=limit, order=order)
        assert len(line) >= min(limit, 300)
        for at, one in enumerate(converted(repository, line)):
            for phase in one.phases:
                for step in phase:
                    number += 1
                    used.add(step.tool)
                    _apply(host, step, number)
            if at % 60 and at + 1 < len(line):
                continue
            files, submodules = files_of(repository, one.tree)
            found = trees.listed(disk.workspace, "sha1")
            assert _tree(found, tmp_path / "s") == _tree(files, tmp_path / "s"), one.commit
        assert used == {"apply_patch", "write_file", "delete_path"}
        assert submodules, "the last tree has one, and it is left out"
    empty = [p for p in disk.workspace.rglob("*") if p.is_dir() and not any(p.iterdir())]
    assert empty == [], "git keeps no empty folders"


def test_a_tree_without_submodules_is_the_commits_own(tmp_path: Path) -> None:
    folder = git_histories.make(tmp_path / "r.git", commits=5, seed=3)
    with Repository(folder) as repository:
        ((commit, tree),) = repository.commits("main", limit=5, order="first-parent")[-1:]
        assert commit
        files, submodules = files_of(repository, tree)
        assert submodules == []
        assert _tree(files, tmp_path / "s") == tree


def test_one_byte_or_one_mode_makes_another_tree(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a").write_bytes(b"one\n")

    def tree() -> str:
        return _tree(trees.listed(work, "sha1"), tmp_path / "s")

    first = tree()
    assert first == tree()
    (work / "a").chmod(0o755)
    second = tree()
    (work / "a").write_bytes(b"one\r\n")
    third = tree()
    assert len({first, second, third}) == 3
    (work / trees.TRASH).mkdir()
    assert tree() == third, "the toolhost's own folder is no part of it"
    (work / ".fencepost").write_bytes(b"anybody's")
    assert tree() != third


def test_the_newest_commits_stand_on_what_was_before_them(history: Path) -> None:
    with Repository(history) as repository:
        whole = repository.commits("main", limit=10_000, order="first-parent")
        last = repository.commits("main", limit=7, order="first-parent")
        assert last[1:] == whole[-7:]
        assert last[0] == ("", whole[-8][1])


def test_an_unknown_revision_and_a_folder_without_a_repository_are_refused(
    history: Path, tmp_path: Path
) -> None:
    with Repository(history) as repository:
        with pytest.raises(RefusedError, match="--rev") as refused:
            repository.commits("--output=x", limit=1, order="first-parent")
        assert refused.value.field == "--rev"
        with pytest.raises(GitError, match="no content"):
            repository.contents(["0" * 40])
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RefusedError, match="REPO"):
            Repository(folder)


def test_the_callers_configuration_has_no_say(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Repository(history) as repository:
        line = repository.commits("main", limit=20, order="first-parent")
        plain = [one.phases for one in converted(repository, line)]
    config = tmp_path / "config"
    config.write_text(
        "[diff]\n  noprefix = true\n  external = false\n  algorithm = minimal\n"
        "[core]\n  quotePath = false\n  attributesFile = /dev/null\n[color]\n  ui = always\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=0")
    with Repository(history) as repository:
        assert [one.phases for one in converted(repository, line)] == plain


@pytest.mark.parametrize(
    "name", [b"plain", b'a "b" \\ c\t\n\r\x07', "ü🙂".encode(), b"\xff\x80\x00"]
)
def test_a_quoted_name_is_read_back(name: bytes) -> None:
    quoted = diffs.quoted(name)
    assert quoted.isascii()
    assert b"\n" not in quoted
    assert diffs.unquoted(quoted) == name


@pytest.mark.parametrize("name", [b'"', b'"abc', b'"\\9"', b'"\\x41"'])
def test_a_badly_quoted_name_is_an_error(name: bytes) -> None:
    with pytest.raises(diffs.UnreadableDiffError):
        diffs.unquoted(name)


RAW = b":100644 100644 %s %s M\ta\n" % (b"1" * 40, b"2" * 40)
SECTION = b"diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n+diff --git a/b b/b\n"


def test_every_entry_needs_its_part_of_the_patch() -> None:
    (entry,) = diffs.read(RAW + b"\n" + SECTION)
    assert entry.sections == (SECTION,)
    for printed in (RAW, RAW + b"\n", RAW + RAW + b"\n" + SECTION, RAW + b"\n" + SECTION * 2):
        with pytest.raises(diffs.UnreadableDiffError):
            diffs.read(printed)
    assert diffs.read(b"") == []


def test_a_mode_or_a_status_that_is_not_known_is_an_error() -> None:
    for wrong in (RAW.replace(b"100644", b"100600"), RAW.replace(b" M\t", b" U\t"), b"x" + RAW):
        with pytest.raises(diffs.UnreadableDiffError):
            diffs.read(wrong + b"\n" + SECTION)


def _entry(status: diffs.Status, path: bytes, section: bytes, **more: Any) -> diffs.Entry:
    fields = {"old_mode": diffs.FILE, "new_mode": diffs.FILE, "old_id": "1", "new_id": "2"}
    return diffs.Entry(
        **{"status": status, "old": path, "new": path, "sections": (section,), **fields, **more}
    )


BINARY = b"diff --git a/%s b/%s\nindex 1..2\nBinary files a/%s and b/%s differ\n"


def _binary(status: diffs.Status, path: bytes) -> diffs.Entry:
    return _entry(status, path, BINARY % (path, path, path, path))


def test_a_deleted_binary_file_takes_the_folder_with_it_that_it_empties() -> None:
    paths = convert.Paths()
    for path in (b"a/b/one", b"a/b/two", b"a/c"):
        paths.add(path)
    doomed = [_binary("D", b"a/b/one"), _binary("D", b"a/b/two")]
    ((step,),) = convert.phases(doomed, {}, paths)
    assert step == convert.Step("delete_path", {"path": "a/b", "recursive": True})
    paths.add(b"a/b/one")
    paths.add(b"a/b/two")
    ((step,),) = convert.phases(doomed[:1], {}, paths)
    assert step.args["path"] == "a/b/one", "control: the other one stays"


def test_a_binary_file_is_deleted_before_the_patch_and_written_after_it() -> None:
    paths = convert.Paths()
    paths.add(b"gone")
    entries = [_binary("A", b"come"), _binary("D", b"gone"), _entry("M", b"a", SECTION)]
    found = convert.phases(entries, {"2": b"\0"}, paths)
    assert [[step.tool for step in phase] for phase in found] == [
        ["delete_path"],
        ["apply_patch"],
        ["write_file"],
    ]
    assert b"come" in paths
    assert b"gone" not in paths


def test_a_binary_file_whose_name_is_not_utf8_is_patched_in() -> None:
    ((step,),) = convert.phases([_binary("A", b"\xff")], {"2": b"\0x\n\0y"}, convert.Paths())
    assert step.tool == "apply_patch"
    assert step.args["patch"] == (
        'diff --git "a/\\377" "b/\\377"\nnew file mode 100644\n--- /dev/null\n+++ "b/\\377"\n'
        "@@ -0,0 +1,2 @@\n+\0x\n+\0y\n\\ No newline at end of file\n"
    )


def test_many_files_are_cut_into_patches_that_hold_a_few_each() -> None:
    entries = [
        _entry(
            "A",
            b"f%d" % number,
            b"diff --git a/f%d b/f%d\nnew file mode 100644\n" % ((number,) * 2),
        )
        for number in range(convert.PATCH_FILES_MAX + 1)
    ]
    ((one, other),) = convert.phases(entries, {}, convert.Paths())
    assert one.args["patch"].count("diff --git") == convert.PATCH_FILES_MAX
    assert other.args["patch"].count("diff --git") == 1


def test_a_text_too_long_for_a_patch_is_written_whole() -> None:
    long = (
        b"diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n+" + b"y" * convert.PATCH_BYTES_MAX
    )
    entry = _entry("M", b"a", long)
    assert convert.contents_needed([entry]) == ["2"]
    ((step,),) = convert.phases([entry], {"2": b"y"}, convert.Paths())
    assert step == convert.Step("write_file", {"path": "a", "mode": 0o644, "content": "y"})


def test_a_content_that_no_sandbox_takes_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fencepost.core.limits.CONTENT_BYTES_MAX", 3)
    entry = _binary("A", b"big")
    convert.phases([entry], {"2": b"\0\0\0"}, convert.Paths())
    with pytest.raises(RefusedError, match="big") as refused:
        convert.phases([entry], {"2": b"\0\0\0\0"}, convert.Paths())
    assert refused.value.reason == "too_large"


def test_the_command_looks_before_it_starts_anything(history: Path, tmp_path: Path) -> None:
    for words, field in (
        ([str(history), "--rev", "nothing"], "--rev"),
        ([str(history), "--order", "any"], "--order"),
        ([str(tmp_path)], "REPO"),
    ):
        found = CliRunner().invoke(cli.app, ["import-git", *words])
        assert isinstance(found.exception, RefusedError)
        assert found.exception.field == field
