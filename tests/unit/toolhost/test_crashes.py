"""`kill -9` between any two effects, full disks, and what the next toolhost makes of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolhost.driver import Disk, Toolhost, digest
from tests.unit.toolhost.test_files import tree

Start = Callable[..., Toolhost]

FILE_POINTS = [
    "locked", "pre_saved", "begun", "temp_written", "temp_written#2", "exchanged", "effect", "effect#2", "effect#3",
    "before_done", "after_done",
]  # fmt: skip
BIG = "big\n" * 30_000
PATCH = """\
diff --git a/old b/old
--- a/old
+++ b/old
@@ -1 +1 @@
-old
+patched
diff --git a/big b/moved
similarity index 100%
rename from big
rename to moved
diff --git a/gone b/gone
deleted file mode 100644
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-gone
diff --git a/new/deep/file b/new/deep/file
new file mode 100755
--- /dev/null
+++ b/new/deep/file
@@ -0,0 +1 @@
+new
"""
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "create": ("write_file", {"path": "x/y", "content": "new"}),
    "replace_small": ("write_file", {"path": "old", "content": "new"}),
    "replace_big": ("write_file", {"path": "big", "content": "new"}),
    "link": ("write_file", {"path": "old", "symlink_to": "big"}),
    "delete": ("delete_path", {"path": "big"}),
    "delete_tree": ("delete_path", {"path": "dir", "recursive": True}),
    "patch": ("apply_patch", {"patch": PATCH}),
}


def fill(disk: Disk) -> None:
    (disk.workspace / "old").write_text("old\n")
    (disk.workspace / "gone").write_text("gone\n")
    (disk.workspace / "big").write_text(BIG)
    (disk.workspace / "dir" / "sub").mkdir(parents=True)
    (disk.workspace / "dir" / "sub" / "f").write_text("f")


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """What every call does when nothing goes wrong: its changes, and the tree after it."""
    found = {}
    for name, (tool, args) in CALLS.items():
        disk = Disk(tmp_path_factory.mktemp(name))
        fill(disk)
        with Toolhost(disk) as host:
            host.mark()
            receipt = host.apply("s1.1", tool, args)
            assert receipt["outcome"] == "ok"
            found[name] = (receipt["changes"], tree(disk))
    return found


def crashing(start: Start, disk: Disk, point: str) -> Toolhost:
    env = {
        "FENCEPOST_TOOLHOST_CRASH": point,
        "FENCEPOST_TOOLHOST_CRASH_ONCE": str(disk.state.parent / "crashed"),
    }
    return start(env=env)


def died(host: Toolhost) -> bool:
    """Waits for the process; tells whether it came to its point (or has none such)."""
    try:
        return host.process.wait(1.0) == 137
    except subprocess.TimeoutExpired:
        return False


def run_to_the_point(
    host: Toolhost, fence: dict[str, Any], kind: str, call: tuple[str, Any], **more: Any
) -> bool:
    """Sends a call; True when the toolhost died of it, False when it was answered."""
    tool, args = call
    host.send_call(kind, fence, tool, args, **more)
    while not host.ended and not host.frames:
        host.pump(5)
    return host.ended and died(host)


@pytest.mark.parametrize("point", FILE_POINTS)
@pytest.mark.parametrize("name", sorted(CALLS))
def test_s204_a_file_tool_killed_at_any_point_is_applied_once(
    start: Start, disk: Disk, wanted: dict[str, tuple[Any, Any]], name: str, point: str
):
    fill(disk)
    start().mark()
    first = crashing(start, disk, point)
    fence = disk.fence("s1.1")
    crashed = run_to_the_point(first, fence, "apply", CALLS[name])
    assert crashed or "#" in point or point in ("temp_written", "exchanged"), (
        "the point was never passed"
    )
    changes, after = wanted[name]
    tool, args = CALLS[name]
    second = start()
    receipt = second.apply(fence, tool, args)
    assert (receipt["verdict"], receipt["outcome"]) == ("applied", "ok")
    assert receipt["changes"] == changes
    assert receipt["journal_seq"] == 1
    assert tree(disk) == after
    kinds = [record["k"] for record in disk.journal()]
    assert kinds.count("done") == 1
    assert kinds.count("begun") - kinds.count("rolled") == 1
    # And it can still be taken back.
    fresh = Disk(disk.state.parent / "fresh")
    fill(fresh)
    assert second.undo("s1.u", of="s1.1")["verdict"] == "applied"
    assert tree(disk) == tree(fresh)


@pytest.mark.parametrize("point", FILE_POINTS)
@pytest.mark.parametrize("name", ["create", "replace_big", "delete_tree", "patch"])
def test_an_undo_killed_at_any_point_takes_back_once(
    start: Start, disk: Disk, name: str, point: str
):
    fill(disk)
    before = tree(disk)
    host = start()
    host.mark()
    tool, args = CALLS[name]
    assert host.apply("s1.1", tool, args)["outcome"] == "ok"
    host.close_input()
    fence = disk.fence("s1.u", direction="undo")
    crashed = run_to_the_point(crashing(start, disk, point), fence, "undo", ("", None), of="s1.1")
    assert crashed or "#" in point or point in ("temp_written", "exchanged"), (
        "the point was never passed"
    )
    second = start()
    second.send_call("undo", fence, of="s1.1")
    receipt = second.receipt(fence)
    assert (receipt["verdict"], receipt["outcome"]) == ("applied", "ok")
    assert tree(disk) == before


@pytest.mark.parametrize("point", ["rolled_one", "rolled_one#3", "rolled_back"])
def test_a_roll_back_that_is_killed_is_finished_by_the_next(
    start: Start, disk: Disk, wanted: dict[str, tuple[Any, Any]], point: str
):
    fill(disk)
    before = tree(disk)
    start().mark()
    fence = disk.fence("s1.1")
    assert run_to_the_point(crashing(start, disk, "before_done"), fence, "apply", CALLS["patch"])
    (disk.state.parent / "crashed").unlink()
    assert run_to_the_point(crashing(start, disk, point), fence, "apply", CALLS["patch"])
    host = start()
    revoked = host.revoke("s1.1", no=fence["no"])
    assert (revoked["verdict"], revoked["reason"]) == ("revoked", "rolled_back")
    assert tree(disk) == before
    tool, args = CALLS["patch"]
    assert host.apply(fence, tool, args)["reason"] == "revoked"
    assert host.apply("s1.2", tool, args)["changes"] == wanted["patch"][0]


@pytest.mark.parametrize(
    ("point", "verdict", "ran"),
    [
        ("spawned", "applied", 1),  # nothing began: it runs now
        ("begun", "indeterminate", 0),  # began for the journal: never run again
        ("started", "indeterminate", None),
        ("command_over", "indeterminate", 1),
        ("before_done", "indeterminate", 1),
        ("after_done", "applied", 1),
    ],
)
def test_s204_a_command_killed_at_any_point_runs_at_most_once(
    start: Start, disk: Disk, point: str, verdict: str, ran: int | None
):
    start().mark()
    fence = disk.fence("s1.1")
    call = ("run_command", {"shell": "echo x >> ran"})
    assert run_to_the_point(crashing(start, disk, point), fence, "apply", call)
    second = start()
    receipt = second.apply(fence, *call)
    assert receipt["verdict"] == verdict
    path = disk.workspace / "ran"
    lines = path.read_text().count("x") if path.exists() else 0
    assert lines == ran if ran is not None else lines <= 1
    assert second.apply(fence, *call)["verdict"] == verdict
    assert (path.read_text().count("x") if path.exists() else 0) == lines


@pytest.mark.parametrize("point", ["before_marker", "marker_written", "marker_renamed", "opened"])
def test_a_mark_killed_at_any_point_can_be_made_again(start: Start, disk: Disk, point: str):
    start().mark(epoch=7)
    host = crashing(start, disk, point)
    host.send({"k": "mark", "id": "m", "epoch": 8, "session": "B", "nonce": "N8"})
    assert host.wait_dead() == 137
    second = start()
    marker = second.hello()["marker"]
    assert marker["epoch"] == (8 if point in ("marker_renamed", "opened") else 7)
    assert second.mark(epoch=8, session="B", nonce="N8")["k"] == "marked"
    assert second.write("s1.1", "a", "x", epoch=8, session="B")["verdict"] == "applied"


@pytest.mark.parametrize("point", ["before_revoked", "after_revoked"])
def test_a_revocation_killed_at_any_point_can_be_made_again(start: Start, disk: Disk, point: str):
    start().mark()
    host = crashing(start, disk, point)
    host.send_call("revoke", disk.fence("s1.1", direction="revoke", no=1))
    assert host.wait_dead() == 137
    second = start()
    assert second.revoke("s1.1", no=1)["verdict"] == "revoked"
    assert second.write("s1.1", "a", "x", no=1)["reason"] == "revoked"


@pytest.mark.parametrize("point", ["compact_written", "compact_renamed"])
def test_a_compaction_killed_at_any_point_loses_nothing(start: Start, disk: Disk, point: str):
    start().mark()
    host = crashing(start, disk, point)
    body = json.dumps({"path": "many", "content": "x"}).encode()
    sent = 0
    while not host.ended:
        try:
            host.send_call("apply", disk.fence(f"s{sent}.1"), "write_file", body)
        except BrokenPipeError:
            break
        sent += 1
        while sent - len(host.frames) > 64 and not host.ended:
            host.pump(5)
    while host.pump(1):
        pass
    assert host.wait_dead() == 137
    answered = [json.loads(body) for head, body in host.frames if head["k"] == "receipt"]
    assert len(answered) >= 8000
    second = start()
    last = answered[-1]
    assert second.hello()["journal_seq"] >= last["journal_seq"]
    again = second.apply(disk.fence(last["attempt"], no=last["no"]), "write_file", body)
    assert again == last


def test_with_sync_the_same_holds(start: Start, disk: Disk, wanted: dict[str, tuple[Any, Any]]):
    fill(disk)
    host = start("--sync")
    host.mark()
    tool, args = CALLS["patch"]
    assert host.apply("s1.1", tool, args)["changes"] == wanted["patch"][0]
    assert host.undo("s1.u", of="s1.1")["verdict"] == "applied"
    assert host.apply("s2.1", "delete_path", {"path": "dir", "recursive": True})["outcome"] == "ok"
    assert host.apply("s3.1", "run_command", {"shell": "true"})["outcome"] == "ok"


# -- full disks


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Disk]:
    """A disk of one megabyte."""
    root = tmp_path / "small"
    root.mkdir()
    if os.getuid() != 0:
        pytest.skip("only root can mount a small tmpfs")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield Disk(root)
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def test_a_full_disk_is_a_fault_and_nothing_is_half_done(start: Start, small: Disk):
    host = start(on=small)
    host.mark()
    (small.workspace / "a").write_text("kept")
    before = tree(small)
    for name, args in (
        ("s1.1", {"path": "a", "content": "x" * 2_000_000}),
        ("s2.1", {"path": "deep/er/b", "content": "x" * 2_000_000}),
    ):
        receipt = host.apply(small.fence(name), "write_file", args)
        assert (receipt["verdict"], receipt["reason"]) == ("fault", "no_space"), receipt
        assert tree(small) == before
    # With room it works, under the same fence.
    fence = small.fence("s3.1")
    ballast = small.workspace / "ballast"
    ballast.write_bytes(b"x" * 700_000)
    args = {"path": "a", "content": "y" * 500_000}
    assert host.apply(fence, "write_file", args)["reason"] == "no_space"
    ballast.unlink()
    assert host.apply(fence, "write_file", args)["verdict"] == "applied"


def test_a_patch_that_fills_the_disk_is_taken_back_whole(start: Start, small: Disk):
    fill(small)
    host = start(on=small)
    host.mark()
    before = tree(small)
    lines = "".join(f"+{'z' * 60}\n" for _ in range(20_000))
    patch = (
        PATCH
        + f"diff --git a/z b/z\nnew file mode 100644\n--- /dev/null\n+++ b/z\n@@ -0,0 +1,20000 @@\n{lines}"
    )
    receipt = host.apply(small.fence("s1.1"), "apply_patch", {"patch": patch})
    assert (receipt["verdict"], receipt["reason"]) == ("fault", "no_space")
    assert tree(small) == before


def test_a_journal_that_cannot_grow_stops_the_tool_and_keeps_its_word(start: Start, small: Disk):
    host = start(on=small)
    host.mark()
    fence = small.fence("s1.1")
    first = host.apply(fence, "write_file", {"path": "a", "content": "1"})
    ballast = small.state / "ballast"
    with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    verdicts = set()
    for number in range(2, 60):
        receipt = host.apply(
            small.fence(f"s{number}.1"), "write_file", {"path": "a", "content": str(number)}
        )
        verdicts.add((receipt["verdict"], receipt["reason"]))
        if receipt["verdict"] == "applied":
            first, fence = receipt, small.fence(receipt["attempt"], no=receipt["no"])
    assert verdicts <= {("applied", ""), ("fault", "no_space")}
    assert ("fault", "no_space") in verdicts
    content = (small.workspace / "a").read_bytes()
    assert digest(content) == first["changes"][0]["after"]
    ballast.unlink()
    assert (
        host.apply(small.fence("s99.1"), "write_file", {"path": "a", "content": "99"})["verdict"]
        == "applied"
    )
    other = start(on=small)
    assert other.apply(fence, "write_file", {"path": "a", "content": "1"}) == first
    assert (small.workspace / "a").read_text() == "99"


def test_a_content_that_does_not_fit_is_a_fault_not_missing(start: Start, small: Disk):
    host = start(on=small)
    host.mark()
    raw = b"x" * 2_000_000
    host.send({"k": "blob", "digest": digest(raw), "size": len(raw), "last": True}, raw)
    args = {"path": "a", "content_ref": {"$blob": digest(raw), "size": len(raw)}}
    receipt = host.apply(small.fence("s1.1"), "write_file", args)
    assert (receipt["verdict"], receipt["reason"]) == ("fault", "no_space")
    assert list((small.state / "blobs").iterdir()) == []
