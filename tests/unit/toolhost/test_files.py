"""File tools: what they leave on the disk, where they refuse to go, and how they are taken back."""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolhost.driver import Disk, Toolhost, digest

Start = Callable[..., Toolhost]


def refused(receipt: dict[str, Any], field: str) -> None:
    assert (receipt["verdict"], receipt["reason"]) == ("refused", "invalid_arguments"), receipt
    assert receipt["detail"].startswith(field + ":"), receipt["detail"]


def failed(receipt: dict[str, Any], error: str) -> None:
    assert (receipt["verdict"], receipt["outcome"]) == ("applied", "failed"), receipt
    assert error in receipt["result"]["error"]
    assert receipt["changes"] == []


def tree(disk: Disk) -> dict[str, Any]:
    """Everything in the workspace: modes, contents, targets."""
    found: dict[str, Any] = {}
    for root, dirs, files in os.walk(disk.workspace):
        for name in dirs + files:
            path = Path(root, name)
            key = str(path.relative_to(disk.workspace))
            if path.is_symlink():
                found[key] = ("link", os.readlink(path))
            elif path.is_dir():
                found[key] = ("dir",)
            else:
                found[key] = ("file", path.stat().st_mode & 0o7777, path.read_bytes())
    return found


# -- write_file


def test_content_comes_in_three_forms(host: Toolhost, disk: Disk):
    raw = bytes(range(256)) * 5000
    body = base64.b64encode(raw).decode()
    receipt = host.apply("s1.1", "write_file", {"path": "b64", "content_b64": body})
    assert receipt["changes"][0]["after"] == digest(raw)
    assert (disk.workspace / "b64").read_bytes() == raw
    reference = {"$blob": digest(raw), "size": len(raw)}
    args = {"path": "ref", "content_ref": reference}
    missing = host.apply("s2.1", "write_file", args)
    assert (missing["verdict"], missing["reason"]) == ("refused", "blob_missing")
    half = len(raw) // 2
    for last, part in ((False, raw[:half]), (True, raw[half:])):
        host.send({"k": "blob", "digest": digest(raw), "size": len(raw), "last": last}, part)
    assert host.apply("s2.2", "write_file", args)["outcome"] == "ok"
    assert (disk.workspace / "ref").read_bytes() == raw
    assert os.listdir(disk.state / "blobs") == []


def test_a_reference_whose_bytes_do_not_have_its_digest_is_missing(host: Toolhost, disk: Disk):
    reference = {"$blob": digest(b"right"), "size": 5}
    host.send({"k": "blob", "digest": digest(b"right"), "size": 5, "last": True}, b"wrong")
    receipt = host.apply("s1.1", "write_file", {"path": "a", "content_ref": reference})
    assert receipt["reason"] == "blob_missing"
    assert tree(disk) == {}
    host.send({"k": "blob", "digest": digest(b"right"), "size": 5, "last": True}, b"right")
    assert (
        host.apply("s1.2", "write_file", {"path": "a", "content_ref": reference})["outcome"] == "ok"
    )


def test_a_content_altered_while_it_waits_is_not_written(host: Toolhost, disk: Disk):
    reference = {"$blob": digest(b"right"), "size": 5}
    host.send({"k": "blob", "digest": digest(b"right"), "size": 5, "last": True}, b"right")
    host.stat()
    (waiting,) = (disk.state / "blobs").iterdir()
    waiting.write_bytes(b"WRONG")
    receipt = host.apply("s1.1", "write_file", {"path": "a", "content_ref": reference})
    assert (receipt["verdict"], receipt["reason"]) == ("refused", "blob_missing")
    assert tree(disk) == {}


def test_modes_are_set_kept_and_told(host: Toolhost, disk: Disk):
    receipt = host.apply("s1.1", "write_file", {"path": "a", "content": "1", "mode": 0o755})
    assert receipt["changes"][0]["mode"] == "0755"
    receipt = host.apply("s2.1", "write_file", {"path": "a", "content": "2"})
    assert "mode" not in receipt["changes"][0]
    assert tree(disk)["a"] == ("file", 0o755, b"2")
    receipt = host.apply("s3.1", "write_file", {"path": "a", "content": "2", "mode": 0o600})
    assert receipt["changes"] == [
        {"path": "a", "before": digest(b"2"), "after": digest(b"2"), "mode": "0600"}
    ]
    assert host.undo("s3.u", of="s3.1")["verdict"] == "applied"
    assert tree(disk)["a"] == ("file", 0o755, b"2")


def test_a_link_is_written_and_replaced_never_written_through(
    host: Toolhost, disk: Disk, tmp_path: Path
):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    receipt = host.apply("s1.1", "write_file", {"path": "l", "symlink_to": str(outside)})
    assert receipt["changes"] == [{"path": "l", "before": None, "after": f"link:{outside}"}]
    assert os.readlink(disk.workspace / "l") == str(outside)
    receipt = host.write("s2.1", "l", "mine")
    assert receipt["changes"][0]["before"] == f"link:{outside}"
    assert not (disk.workspace / "l").is_symlink()
    assert outside.read_text() == "kept"
    host.undo("s2.u", of="s2.1")
    assert os.readlink(disk.workspace / "l") == str(outside)


def test_a_hard_link_is_broken_not_written_through(host: Toolhost, disk: Disk, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    for name in ("w", "d", "p"):
        os.link(outside, disk.workspace / name)
    host.write("s1.1", "w", "mine")
    host.apply("s2.1", "delete_path", {"path": "d"})
    patch = "--- a/p\n+++ b/p\n@@ -1 +1 @@\n-kept\n\\ No newline at end of file\n+mine\n\\ No newline at end of file\n"
    assert host.apply("s3.1", "apply_patch", {"patch": patch})["outcome"] == "ok"
    assert outside.read_text() == "kept"
    assert (disk.workspace / "w").read_text() == "mine"
    assert (disk.workspace / "p").read_text() == "mine"


@pytest.mark.parametrize("path", ["out/a", "in/a", "in/../a", "loop/a"])
def test_no_write_goes_through_a_linked_directory(
    host: Toolhost, disk: Disk, tmp_path: Path, path: str
):
    (tmp_path / "outside").mkdir()
    (disk.workspace / "real").mkdir()
    os.symlink(tmp_path / "outside", disk.workspace / "out")
    os.symlink("real", disk.workspace / "in")
    os.symlink("loop", disk.workspace / "loop")
    for number, (tool, more) in enumerate(
        [("write_file", {"content": "x"}), ("delete_path", {"missing_ok": True})]
    ):
        refused(host.apply(f"s{number}.1", tool, {"path": path, **more}), "path")
    new = path.replace("in/../", "in/")
    patch = f"diff --git a/{new} b/{new}\nnew file mode 100644\n--- /dev/null\n+++ b/{new}\n@@ -0,0 +1 @@\n+x\n"
    refused(host.apply("s3.1", "apply_patch", {"patch": patch}), "patch")
    assert os.listdir(tmp_path / "outside") == []
    assert os.listdir(disk.workspace / "real") == []
    assert host.write("s9.1", "real/a", "x")["outcome"] == "ok"


BAD_PATHS = [
    "",
    "/etc/x",
    "../x",
    "a/../../x",
    "a/..",
    "..",
    "a\0b",
    "x" * 256,
    "y/" * 2100 + "y",
    ".",
    5,
    None,
]


@pytest.mark.parametrize("path", BAD_PATHS)
@pytest.mark.parametrize("tool", ["write_file", "delete_path"])
def test_a_path_that_is_none_or_leads_out_is_refused(
    host: Toolhost, disk: Disk, tool: str, path: Any
):
    more = {"content": "x"} if tool == "write_file" else {}
    refused(host.apply("s1.1", tool, {"path": path, **more}), "path")
    assert tree(disk) == {}
    assert host.write("s2.1", "x" * 255, "x")["outcome"] == "ok"


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"content": "x"}, "path"),
        ({"path": "a"}, "content"),
        ({"path": "a", "content": "x", "content_b64": ""}, "content"),
        ({"path": "a", "content": 5}, "content"),
        ({"path": "a", "content": "\ud800"}, "content"),
        ({"path": "a", "content_b64": "a"}, "content_b64"),
        ({"path": "a", "content_b64": "a?=="}, "content_b64"),
        ({"path": "a", "content_ref": "sha256:x"}, "content_ref"),
        ({"path": "a", "content_ref": {"$blob": "sha256:../../x", "size": 1}}, "content_ref"),
        ({"path": "a", "content_ref": {"$blob": digest(b""), "size": -1}}, "content_ref"),
        ({"path": "a", "content": "x", "mode": 0o1000}, "mode"),
        ({"path": "a", "content": "x", "mode": "644"}, "mode"),
        ({"path": "a", "content": "x", "create_dirs": 1}, "create_dirs"),
        ({"path": "a", "symlink_to": ""}, "symlink_to"),
        ({"path": "a", "symlink_to": "x", "content": "y"}, "content"),
        ({"path": "a/", "content": "x"}, "path"),
        ({"path": ".fencepost-1-0.tmp", "content": "x"}, "path"),
        ({"path": "a", "content": "x", "colour": "red"}, "colour"),
        ([], "arguments"),
        (b"{", "arguments"),
        (b"\xff", "arguments"),
    ],
)
def test_wrong_arguments_of_write_file_name_the_field(
    host: Toolhost, disk: Disk, args: Any, field: str
):
    refused(host.apply("s1.1", "write_file", args), field)
    assert tree(disk) == {}
    assert [r["k"] for r in disk.journal()] == ["opened"]


@pytest.mark.parametrize("tool", ["read_file", "format_disk", ""])
def test_a_tool_that_does_not_mutate_is_refused(host: Toolhost, tool: str):
    refused(host.apply("s1.1", tool, {"path": "a"}), "tool")


def test_what_the_tree_does_not_allow_is_a_failed_tool(host: Toolhost, disk: Disk):
    (disk.workspace / "dir").mkdir()
    (disk.workspace / "file").write_text("x")
    os.mkfifo(disk.workspace / "fifo")
    failed(host.write("s1.1", "dir", "x"), "is a directory")
    failed(host.write("s2.1", "file/below", "x"), "not a directory")
    failed(host.write("s3.1", "fifo", "x"), "not a regular file")
    args = {"path": "no/such/dir", "content": "x", "create_dirs": False}
    failed(host.apply("s4.1", "write_file", args), "no such directory")
    failed(host.apply("s5.1", "delete_path", {"path": "fifo"}), "not a regular file")
    # It is recorded as any outcome is: the agent hears the same again.
    assert disk.journal()[-1]["r"]["outcome"] == "failed"
    assert len(tree(disk)) == 3 if not (disk.workspace / "fifo").is_fifo() else True


def test_a_device_or_socket_is_never_opened(host: Toolhost, disk: Disk):
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(disk.workspace)
        try:
            server.bind("sock")
        finally:
            os.chdir(here)
        failed(host.write("s1.1", "sock", "x"), "not a regular file")
        head, result = host.read("read_file", {"path": "sock"})
        assert not head["ok"]
        assert "not a regular file" in result["error"]


def test_names_that_are_not_utf8_are_kept(host: Toolhost, disk: Disk):
    receipt = host.write("s1.1", "n\udcff", "x")
    assert receipt["outcome"] == "ok"
    assert receipt["changes"][0]["path"] == "n\ufffd"
    assert os.listdir(os.fsencode(disk.workspace)) == [b"n\xff"]
    assert host.undo("s1.u", of="s1.1")["verdict"] == "applied"
    assert os.listdir(disk.workspace) == []


def test_state_inside_the_workspace_is_out_of_reach(start: Start, disk: Disk):
    disk.state = disk.workspace / ".fencepost"
    host = start()
    host.mark()
    os.symlink(".fencepost", disk.workspace / "link")
    for number, path in enumerate([".fencepost/marker.json", ".fencepost", "./.fencepost/pre/x"]):
        refused(host.apply(f"s{number}.1", "write_file", {"path": path, "content": "x"}), "path")
    refused(host.apply("s8.1", "delete_path", {"path": ".fencepost", "recursive": True}), "path")
    for path in (".fencepost/marker.json", "link/marker.json"):
        head, result = host.read("read_file", {"path": path})
        assert not head["ok"]
        assert "state" in result["error"]
    listed = host.good("list_dir", {"path": ".", "recursive": True})["entries"]
    assert not any("marker" in entry["path"] for entry in listed)
    assert host.write("s9.1", "fencepost", "x")["outcome"] == "ok"


# -- delete_path


def test_a_tree_is_deleted_whole_and_comes_back_whole(host: Toolhost, disk: Disk):
    deep = disk.workspace / "d" / "e"
    deep.mkdir(parents=True)
    (deep / "f").write_bytes(b"\0" * 100_000)
    os.symlink("nowhere", deep / "l")
    before = tree(disk)
    failed(host.apply("s1.1", "delete_path", {"path": "d"}), "not empty")
    receipt = host.apply("s2.1", "delete_path", {"path": "d", "recursive": True})
    assert receipt["changes"] == [{"path": "d", "before": "dir", "after": None}]
    assert tree(disk) == {}
    undone = host.undo("s2.u", of="s2.1")
    assert undone["changes"] == [{"path": "d", "before": None, "after": "dir"}]
    assert tree(disk) == before


def test_deleting_what_is_not_there(host: Toolhost, disk: Disk):
    failed(host.apply("s1.1", "delete_path", {"path": "a"}), "no such path")
    receipt = host.apply("s2.1", "delete_path", {"path": "a", "missing_ok": True})
    assert (receipt["outcome"], receipt["changes"]) == ("ok", [])
    (disk.workspace / "empty").mkdir()
    assert host.apply("s3.1", "delete_path", {"path": "empty"})["outcome"] == "ok"


def test_deleting_a_link_leaves_its_target(host: Toolhost, disk: Disk):
    (disk.workspace / "t").write_text("kept")
    os.symlink("t", disk.workspace / "l")
    assert host.apply("s1.1", "delete_path", {"path": "l"})["outcome"] == "ok"
    assert tree(disk) == {"t": ("file", 0o644, b"kept")}


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({}, "path"),
        ({"path": "a", "recursive": "yes"}, "recursive"),
        ({"path": "a", "missing_ok": 1}, "missing_ok"),
        ({"path": "a", "force": True}, "force"),
    ],
)
def test_wrong_arguments_of_delete_path_name_the_field(host: Toolhost, args: Any, field: str):
    refused(host.apply("s1.1", "delete_path", args), field)


# -- undo


@pytest.mark.parametrize("size", [10, 5_000, 200_000])
@pytest.mark.parametrize("more_names", [False, True])
def test_a_replaced_file_comes_back(host: Toolhost, disk: Disk, size: int, more_names: bool):
    path = disk.workspace / "a"
    path.write_bytes(os.urandom(size))
    path.chmod(0o640)
    if more_names:
        os.link(path, disk.workspace / "other")
    before = tree(disk)
    host.write("s1.1", "a", "new")
    assert path.read_text() == "new"
    receipt = host.undo("s1.u", of="s1.1")
    assert receipt["verdict"] == "applied"
    assert receipt["of"] == "s1.1"
    assert tree(disk) == before
    again = host.undo("s1.u2", of="s1.1")
    assert (again["verdict"], again["changes"]) == ("applied", [])
    assert tree(disk) == before


@pytest.mark.parametrize("size", [10, 5_000, 200_000])
def test_a_pre_image_is_not_what_another_name_leads_to(host: Toolhost, disk: Disk, size: int):
    before = os.urandom(size)
    (disk.workspace / "a").write_bytes(before)
    os.link(disk.workspace / "a", disk.workspace / "other")
    host.write("s1.1", "a", "new")
    host.apply("s2.1", "run_command", {"shell": "echo in place >> other"})
    assert host.undo("s1.u", of="s1.1")["verdict"] == "applied"
    assert (disk.workspace / "a").read_bytes() == before


def test_created_directories_go_with_the_undo_unless_used(host: Toolhost, disk: Disk):
    host.write("s1.1", "x/y/a", "1")
    host.write("s2.1", "x/b", "2")
    receipt = host.undo("s1.u", of="s1.1")
    assert [change["path"] for change in receipt["changes"]] == ["x/y/a", "x/y"]
    assert tree(disk) == {"x": ("dir",), "x/b": ("file", 0o644, b"2")}


@pytest.mark.parametrize("content", ["D", "C"])
def test_s209_an_undo_does_not_destroy_a_later_steps_work(host: Toolhost, disk: Disk, content: str):
    host.write("sB.1", "a", "B")
    host.write("sC.1", "a", "C")
    host.write("sD.1", "a", content)  # even the same bytes are D's, not C's
    receipt = host.undo("sC.u", of="sC.1")
    assert (receipt["verdict"], receipt["reason"]) == ("refused", "overwritten")
    assert (disk.workspace / "a").read_text() == content
    # Without D in the way it is restored.
    assert host.undo("sD.u", of="sD.1")["verdict"] == "applied"
    assert host.undo("sC.u2", of="sC.1")["verdict"] == "applied"
    assert (disk.workspace / "a").read_text() == "B"


def test_an_undo_does_not_destroy_what_a_command_changed(host: Toolhost, disk: Disk):
    host.write("s1.1", "a", "1")
    host.apply("s2.1", "run_command", {"shell": "echo more >> a"})
    assert host.undo("s1.u", of="s1.1")["reason"] == "overwritten"
    assert (disk.workspace / "a").read_text() == "1more\n"


def test_an_undo_of_nothing(host: Toolhost, disk: Disk):
    assert host.undo("s1.u", of="s1.1")["reason"] == "nothing_to_undo"
    failed(host.apply("s2.1", "delete_path", {"path": "a"}), "no such path")
    assert host.undo("s2.u", of="s2.1")["reason"] == "nothing_to_undo"
    host.revoke("s3.1")
    assert host.undo("s3.u", of="s3.1")["reason"] == "nothing_to_undo"


def test_an_undo_finds_the_first_apply_through_its_attestation(host: Toolhost, disk: Disk):
    host.write("s1.1", "a", "x")
    host.mark(epoch=8, session="B", nonce="N8")
    new = {"epoch": 8, "session": "B"}
    assert host.write("s1.2", "a", "x", **new)["verdict"] == "attested"
    # The planner gives an undo the step's own digest.
    fence = disk.fence("s1.u", direction="undo", **new)
    args = json.dumps({"path": "a", "content": "x"}).encode()
    host.send_call("undo", fence, of="s1.2", digest=digest(args))
    undone = host.receipt(fence)
    assert (undone["verdict"], undone["of"]) == ("applied", "s1.2")
    assert tree(disk) == {}
    # Undone is undone: the step would have to be applied again.
    assert host.write("s1.3", "a", "x", **new)["verdict"] == "applied"
    assert host.undo("s1.v", of="s1.1", **new)["result"] == {"already_undone": True}


def test_an_undo_under_a_stale_fence_is_refused(host: Toolhost, disk: Disk):
    host.write("s1.1", "a", "x")
    assert host.undo("s1.u", of="s1.1", epoch=6)["reason"] == "stale_epoch"
    assert host.undo("s1.v", of="s1.1", session="Z")["reason"] == "stale_session"
    assert tree(disk) == {"a": ("file", 0o644, b"x")}
    assert host.undo("s1.w", of="s1.1")["verdict"] == "applied"


# -- reading


def test_reads_follow_links_only_inside(host: Toolhost, disk: Disk, tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "f").write_text("secret")
    inner = disk.workspace / "d" / "e"
    inner.mkdir(parents=True)
    (inner / "f").write_text("fine")
    links = {
        "abs_in": str(disk.workspace.resolve() / "d" / "e" / "f"), "rel_in": "d/e/f", "dir_in": "d",
        "d/up": "../d/e", "abs_out": str(tmp_path / "secret"), "rel_out": "../secret",
        "dir_out": "../outside", "d/far": "../../secret", "loop": "loop", "root": "/",
    }  # fmt: skip
    for name, target in links.items():
        os.symlink(target, disk.workspace / name)
    for path in ("abs_in", "rel_in", "dir_in/e/f", "d/up/f", "dir_in/up/f"):
        assert host.good("read_file", {"path": path})["content"] == "fine"
    for path in ("abs_out", "rel_out", "dir_out/f", "d/far", "dir_in/far", "root/etc/hostname"):
        head, result = host.read("read_file", {"path": path})
        assert not head["ok"]
        assert "leaves the workspace" in result["error"], path
    assert "too many" in host.read("read_file", {"path": "loop"})[1]["error"]
    assert host.good("stat", {"path": "abs_out"})["type"] == "link"
    found = host.good("search", {"pattern": "secret|fine"})["matches"]
    assert [match["path"] for match in found] == ["d/e/f"]


def test_read_file_says_what_was_cut(host: Toolhost, disk: Disk):
    (disk.workspace / "a").write_text("aé" * 1_000_000)
    result = host.good("read_file", {"path": "a"})
    assert result["size"] == 3_000_000
    assert result["length"] + result["cut"] == 3_000_000
    assert 1_048_570 < result["length"] <= 1_048_576
    assert "\ufffd" not in result["content"]
    assert host.good("read_file", {"path": "a", "offset": 3, "limit": 3})["content"] == "aé"
    (disk.workspace / "b").write_bytes(b"\xff\0")
    assert host.good("read_file", {"path": "b"})["lossy"] is True
    raw = host.good("read_file", {"path": "b", "encoding": "base64"})
    assert base64.b64decode(raw["content_b64"]) == b"\xff\0"


def test_list_dir_stat_and_search(host: Toolhost, disk: Disk):
    host.write("s1.1", "d/one.py", "import os\nimport sys\n")
    host.write("s2.1", "d/two.txt", "import re\n")
    (disk.workspace / "bin").write_bytes(b"import\0")
    listed = host.good("list_dir", {"path": "."})
    assert [(e["path"], e["type"]) for e in listed["entries"]] == [("bin", "file"), ("d", "dir")]
    listed = host.good("list_dir", {"path": ".", "recursive": True, "limit": 3})
    assert [e["path"] for e in listed["entries"]] == ["bin", "d", "d/one.py"]
    assert listed["cut"] is True
    found = host.good("search", {"pattern": "^import (os|sys|re)$"})
    assert [(m["path"], m["line"]) for m in found["matches"]] == [
        ("d/one.py", 1),
        ("d/one.py", 2),
        ("d/two.txt", 1),
    ]
    assert found["skipped"] == 1
    found = host.good("search", {"pattern": "import", "glob": "*.py", "path": "d", "limit": 1})
    assert [m["path"] for m in found["matches"]] == ["d/one.py"]
    assert found["cut"] is True
    told = host.good("stat", {"path": "d/one.py"})
    assert (told["type"], told["size"], told["mode"]) == ("file", 21, "0644")
    assert told["digest"] == digest(b"import os\nimport sys\n")
    assert host.good("stat", {"path": "none/at/all"}) == {"exists": False}
    head, _ = host.read("stat", {"path": "d"})
    assert (head["epoch"], head["session"], head["nonce"]) == (7, "A", "N7")


def test_a_search_that_never_ends_is_ended(host: Toolhost, disk: Disk):
    (disk.workspace / "a").write_text("a" * 60 + "!")
    head, result = host.read("search", {"pattern": "(a+)+$"}, timeout_ms=300)
    assert not head["ok"]
    assert result["reason"] == "timeout"
    assert host.good("search", {"pattern": "a!$"})["matches"][0]["line"] == 1


@pytest.mark.parametrize(
    ("tool", "args", "field"),
    [
        ("read_file", {}, "path"),
        ("read_file", {"path": "../a"}, "path"),
        ("read_file", {"path": "/etc/passwd"}, "path"),
        ("read_file", {"path": "a", "offset": -1}, "offset"),
        ("read_file", {"path": "a", "limit": 1 << 21}, "limit"),
        ("read_file", {"path": "a", "encoding": "utf16"}, "encoding"),
        ("list_dir", {"path": ".", "limit": 0}, "limit"),
        ("list_dir", {"path": ".", "recursive": "x"}, "recursive"),
        ("search", {}, "pattern"),
        ("search", {"pattern": "("}, "pattern"),
        ("search", {"pattern": "x", "glob": 5}, "glob"),
        ("stat", {"path": "a", "follow": True}, "follow"),
        ("write_file", {"path": "a", "content": "x"}, "tool"),
        ("nonsense", {}, "tool"),
    ],
)
def test_wrong_arguments_of_read_tools_name_the_field(
    host: Toolhost, tool: str, args: Any, field: str
):
    head, result = host.read(tool, args)
    assert not head["ok"]
    assert result["reason"] == "invalid_arguments"
    assert result["error"].startswith(field + ":"), result


def test_reading_what_is_not_there(host: Toolhost):
    head, result = host.read("read_file", {"path": "a"})
    assert not head["ok"]
    assert result["reason"] == "not_found"


def test_results_are_readable_for_strict_json_readers(host: Toolhost, disk: Disk):
    (disk.workspace / "n\udcff").write_text("x\n")
    (disk.workspace / "t").write_bytes(b"x \xff\n")
    for tool, args in (("list_dir", {"path": "."}), ("search", {"pattern": "x"})):
        _, body = host.ask("read", json.dumps(args).encode(), tool=tool)
        body.decode("utf-8")
        assert "\\ud" not in body.decode()
