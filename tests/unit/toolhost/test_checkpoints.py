"""What a checkpoint reads, sends and remembers, and what a restore makes of it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolhost.driver import Disk, Toolhost, wait_until
from tests.unit.toolhost.keeping import Keeper, Store, put, put_page, told_tree
from tests.unit.toolhost.test_versions import old_pythons

Start = Callable[..., Toolhost]


@pytest.fixture
def store() -> Store:
    return {}


@pytest.fixture
def keeper(host: Toolhost, store: Store) -> Keeper:
    return Keeper(host, store)


@pytest.fixture
def fresh(start: Start, disk: Disk, store: Store) -> Keeper:
    """Another disk, empty and marked."""
    other = Disk(disk.state.parent / "other")
    host = start(on=other)
    assert host.mark()["k"] == "marked"
    return Keeper(host, store)


def fill(root: Path) -> None:
    (root / "empty").mkdir()
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "sub" / "deep" / "a.txt").write_text("a\n")
    (root / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (root / "sub" / "run.sh").chmod(0o755)
    (root / "locked").mkdir()
    (root / "locked" / "secret").write_text("s")
    (root / "locked" / "secret").chmod(0o400)
    (root / "locked").chmod(0o500)
    (root / "shared").mkdir()
    (root / "shared").chmod(0o777)
    (root / "shared" / "w").write_text("w")
    (root / "shared" / "w").chmod(0o666)
    (root / "none").touch()
    (root / "big").write_bytes(os.urandom(700_000) + b"\0" * 600_000)
    (root / "binary").write_bytes(bytes(range(256)) * 300)
    (root / "link").symlink_to("sub/deep")
    (root / "out").symlink_to("/etc/passwd")
    (root / "dangling").symlink_to("nowhere")
    with open(os.fsencode(root) + b"/caf\xe9\xff\n.txt", "wb") as file:
        file.write(b"latin")
    os.symlink(b"to\xff", os.fsencode(root) + b"/l\xff")


def settle() -> None:
    """Lets what was written become old enough that its times can be believed."""
    time.sleep(0.12)


def test_a_restored_tree_is_the_tree(keeper: Keeper, fresh: Keeper):
    root = keeper.host.disk.workspace
    fill(root)
    told = keeper.checkpoint()
    assert told["k"] == "checkpointed", told
    assert (told["journal_seq"], told["skipped"]) == (0, 0)
    before = told_tree(root)
    assert told["files"] == sum(entry[0] == "file" for entry in before.values())
    assert told["size"] == sum(len(entry[3]) for entry in before.values() if entry[0] == "file")
    assert told["sent"] == keeper.bytes == sum(map(len, keeper.store.values()))
    restored = fresh.restore(told["manifest"])
    assert restored["k"] == "restored", restored
    assert (restored["files"], restored["size"]) == (told["files"], told["size"])
    assert told_tree(fresh.host.disk.workspace) == before
    assert fresh.checkpoint(base="")["manifest"] == told["manifest"]
    assert fresh.chunks == 0


def test_an_empty_workspace_is_a_checkpoint_too(keeper: Keeper, fresh: Keeper):
    told = keeper.checkpoint()
    assert (told["files"], told["size"]) == (0, 0)
    assert fresh.restore(told["manifest"])["k"] == "restored"
    assert told_tree(fresh.host.disk.workspace) == {}


def test_the_toolhosts_own_files_and_what_is_no_file_are_left_out(keeper: Keeper):
    root = keeper.host.disk.workspace
    (root / "a").write_text("a")
    alone = keeper.checkpoint()["manifest"]
    (root / ".fencepost-trash").mkdir()
    (root / ".fencepost-trash" / "x").write_text("x")
    (root / ".fencepost-7-0.tmp").write_text("x")
    os.mkfifo(root / "pipe")
    told = keeper.checkpoint()
    assert (told["manifest"], told["skipped"]) == (alone, 1)


def test_a_state_folder_inside_the_workspace_is_neither_kept_nor_wiped(
    start: Start, tmp_path: Path, store: Store
):
    def inside(name: str) -> Keeper:
        disk = Disk(tmp_path / name)
        disk.state = disk.workspace / ".fencepost" / "state"
        disk.state.mkdir(parents=True)
        host = start(on=disk)
        host.mark()
        return Keeper(host, store)

    one, two = inside("one"), inside("two")
    (one.host.disk.workspace / "a").write_text("a")
    (one.host.disk.workspace / ".fencepost" / "mine").write_text("m")
    told = one.checkpoint()
    assert told["files"] == 2
    assert two.restore(told["manifest"])["k"] == "restored"
    assert (two.host.disk.workspace / ".fencepost" / "mine").read_text() == "m"
    assert (two.host.disk.state / "marker.json").exists()


# -- what is sent


def spread(root: Path, files: int = 600) -> None:
    for number in range(files):
        folder = root / f"d{number % 20}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number}").write_bytes(f"{number}".encode() * 1500)


def test_a_change_sends_its_neighbourhood_only(keeper: Keeper):
    root = keeper.host.disk.workspace
    spread(root)
    first = keeper.checkpoint()
    whole = keeper.bytes
    settle()
    (root / "d7" / "f47").write_text("changed")
    second = keeper.checkpoint(base=first["manifest"])
    assert second["manifest"] != first["manifest"]
    assert second["sent"] == keeper.bytes < 700_000 < whole / 3
    assert keeper.chunks <= 3 + 2


def test_what_has_its_old_times_is_neither_read_nor_offered(keeper: Keeper, disk: Disk):
    """Not read: another digest in the cache would stand in the manifest, unseen."""
    spread(disk.workspace, 300)
    settle()
    first = keeper.checkpoint()
    again = keeper.checkpoint(base=first["manifest"])
    assert (again["manifest"], again["sent"], keeper.offered) == (first["manifest"], 0, 0)
    keeper.host.hello()
    cache = disk.state / "snapshot.json"
    told = json.loads(cache.read_text())
    assert told["read"]
    told["read"] = {key: ["ab" * 32] * len(names) for key, names in told["read"].items()}
    cache.write_text(json.dumps(told))
    believed = keeper.checkpoint(base=first["manifest"])
    assert believed["manifest"] != first["manifest"]


def test_without_the_base_everything_is_offered_and_what_is_there_is_not_sent(keeper: Keeper):
    spread(keeper.host.disk.workspace, 100)
    settle()
    first = keeper.checkpoint()
    again = keeper.checkpoint(base="sha256:" + "0" * 64)
    assert again["manifest"] == first["manifest"]
    assert keeper.offered == len(keeper.store)
    assert again["sent"] == 0


def test_a_snapshot_that_was_not_kept_is_not_remembered(keeper: Keeper):
    root = keeper.host.disk.workspace
    spread(root, 100)
    settle()
    told = keeper.serve(keeper.ask_checkpoint())
    keeper.host.send({"k": "kept", "manifest": "sha256:" + "1" * 64})
    keeper.store.clear()
    again = keeper.checkpoint(base=told["manifest"])
    assert again["sent"] > 0


def test_a_change_within_a_tick_of_the_checkpoint_is_seen(keeper: Keeper):
    """Git's race: the same size, and times that the file system cannot tell apart."""
    path = keeper.host.disk.workspace / "f"
    for number in range(20):
        path.write_text(f"{number:04}")
        first = keeper.checkpoint()
        seen = path.stat()
        with path.open("r+") as file:
            file.write(f"{number:03}x")
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        second = keeper.checkpoint(base=first["manifest"])
        assert second["manifest"] != first["manifest"]


def test_a_change_with_its_old_times_put_back_is_seen(keeper: Keeper):
    path = keeper.host.disk.workspace / "f"
    path.write_text("one")
    settle()
    first = keeper.checkpoint()
    seen = path.stat()
    path.write_text("two")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert keeper.checkpoint(base=first["manifest"])["manifest"] != first["manifest"]


def test_what_is_read_beside_a_living_process_is_not_remembered(keeper: Keeper, disk: Disk):
    """Who has a file mapped can write to it without another time."""
    path = disk.workspace / "f"
    path.write_text("one")
    settle()
    seen = disk.state.stat()
    cookie = hashlib.sha256(f"{seen.st_dev}:{seen.st_ino}".encode()).hexdigest()[:16]
    left = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "FENCEPOST_FENCE": f"{cookie}:s1.1"},
    )
    try:
        first = keeper.checkpoint()
    finally:
        left.communicate(b"\n")
    keeper.host.hello()
    told = json.loads((disk.state / "snapshot.json").read_text())
    assert told["read"] == {}
    again = keeper.checkpoint(base=first["manifest"])
    keeper.host.hello()
    assert again["sent"] == 0
    assert len(json.loads((disk.state / "snapshot.json").read_text())["read"]) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"v":1}', b'{"v":1,"manifest":1,"read":[],"more":[]}'])  # fmt: skip
def test_a_damaged_cache_is_none(keeper: Keeper, disk: Disk, damage: bytes):
    (disk.workspace / "f").write_text("one")
    settle()
    first = keeper.checkpoint()
    keeper.host.hello()
    (disk.state / "snapshot.json").write_bytes(damage)
    assert keeper.checkpoint(base=first["manifest"])["manifest"] == first["manifest"]


def test_a_large_file_is_cut_in_blocks(keeper: Keeper, fresh: Keeper):
    root = keeper.host.disk.workspace
    (root / "huge").write_bytes(os.urandom(512 * 1024) * 3 + os.urandom(100))
    first = keeper.checkpoint()
    assert max(map(len, keeper.store.values())) == 512 * 1024
    settle()
    with (root / "huge").open("ab") as file:
        file.write(b"more")
    second = keeper.checkpoint(base=first["manifest"])
    assert second["sent"] < 4000
    assert fresh.restore(second["manifest"])["k"] == "restored"
    assert told_tree(fresh.host.disk.workspace) == told_tree(root)


def test_a_file_of_very_many_blocks_is_restored(keeper: Keeper, fresh: Keeper):
    """The blocks of two such files come between each other."""
    root = keeper.host.disk.workspace
    for name in ("one", "two"):
        with (root / name).open("wb") as file:
            file.truncate(65 * 512 * 1024)
            file.write(name.encode())
    told = keeper.checkpoint()
    assert fresh.restore(told["manifest"])["k"] == "restored"
    for name in ("one", "two"):
        made = fresh.host.disk.workspace / name
        assert made.read_bytes() == (root / name).read_bytes()


def test_a_long_hole_takes_no_room_when_it_is_restored(keeper: Keeper, fresh: Keeper):
    root = keeper.host.disk.workspace
    for name, tail in (("hole", b""), ("tail", b"end")):
        with (root / name).open("wb") as file:
            file.write(b"start")
            file.truncate(200 * 512 * 1024)
            file.seek(0, os.SEEK_END)
            file.write(tail)
    told = keeper.checkpoint()
    assert fresh.restore(told["manifest"])["k"] == "restored"
    for name in ("hole", "tail"):
        made = fresh.host.disk.workspace / name
        assert made.read_bytes() == (root / name).read_bytes()
        assert made.stat().st_blocks * 512 < 8 * 1024 * 1024


@pytest.mark.parametrize("before", [0, 3])
def test_what_no_restore_would_take_is_no_checkpoint_and_is_not_read(keeper: Keeper, before: int):
    """Of few chunks, since all of its blocks are alike; the bound is on the sum of all files."""
    for number in range(before):
        with (keeper.host.disk.workspace / f"a{number}").open("wb") as file:
            file.truncate(256 * 1024)
    with (keeper.host.disk.workspace / "hole").open("wb") as file:
        file.truncate((262_144 - before + 1) * 512 * 1024)
    failed = keeper.checkpoint()
    assert (failed["k"], failed["reason"]) == ("checkpoint_failed", "too_large")


def test_many_files_make_indexes_above_the_pages(keeper: Keeper, fresh: Keeper):
    root = keeper.host.disk.workspace
    for folder in range(40):
        (root / f"folder-with-a-rather-long-name-{folder:04}").mkdir()
        for number in range(60):
            (root / f"folder-with-a-rather-long-name-{folder:04}" / f"{number}").touch()
    told = keeper.checkpoint()
    pages = [json.loads(data) for data in keeper.store.values() if data[:1] == b"{"]
    assert len(pages) > 5
    assert fresh.restore(told["manifest"])["k"] == "restored"
    assert told_tree(fresh.host.disk.workspace) == told_tree(root)


# -- between two steps


def test_a_checkpoint_waits_for_the_command_before_it(keeper: Keeper):
    host = keeper.host
    command = host.disk.fence("s1.1")
    host.send_call("apply", command, "run_command", {"shell": "sleep 0.3; echo x > made"})
    number = keeper.ask_checkpoint()
    after = host.disk.fence("s2.1")
    host.send_call("apply", after, "write_file", {"path": "later", "content": "l"})
    told = keeper.serve(number)
    assert (told["files"], told["journal_seq"]) == (1, 1)
    assert host.receipt(command)["outcome"] == "ok"
    assert host.receipt(after)["verdict"] == "applied"


def test_steps_wait_and_reads_are_answered_while_a_checkpoint_is_taken(keeper: Keeper):
    host = keeper.host
    (host.disk.workspace / "f").write_text("one")
    number = keeper.ask_checkpoint()
    _, body = host.expect(lambda head: head["k"] == "offer")
    fence = host.disk.fence("s1.1")
    host.send_call("apply", fence, "write_file", {"path": "f", "content": "two"})
    assert host.good("read_file", {"path": "f"})["content"] == "one"
    host.heartbeats.clear()
    wait_until(lambda: host.pump(0.2) or bool(host.heartbeats))
    host.send({"k": "want", "id": number}, body)
    assert keeper.serve(number)["k"] == "checkpointed"
    assert host.receipt(fence)["verdict"] == "applied"


def test_a_checkpoint_can_be_given_up(keeper: Keeper):
    host = keeper.host
    (host.disk.workspace / "f").write_text("one")
    number, waiting = keeper.ask_checkpoint(), keeper.ask_checkpoint()
    host.expect(lambda head: head["k"] == "offer" and head["id"] == number)
    for one in (waiting, number):
        host.send({"k": "abort", "id": one})
        assert keeper.serve(one)["reason"] == "unreachable"
    assert host.write("s1.1", "f", "two")["verdict"] == "applied"


@pytest.mark.parametrize(
    ("wrong", "reason"), [({"epoch": 6}, "stale_epoch"), ({"session": "B"}, "stale_session")]
)
def test_another_fence_is_refused(keeper: Keeper, wrong: dict[str, Any], reason: str):
    assert keeper.checkpoint(**wrong)["reason"] == reason
    good = keeper.checkpoint()
    assert good["k"] == "checkpointed"
    assert keeper.restore(good["manifest"], **wrong)["reason"] == reason
    assert keeper.restore(good["manifest"])["k"] == "restored"


@pytest.mark.parametrize(
    "head", [{"checkpoint": 1}, {"checkpoint": "a/b"}, {"epoch": True}, {"session": None}]
)
def test_a_malformed_request_is_refused(host: Toolhost, head: dict[str, Any]):
    good = {"k": "checkpoint", "id": "x", "checkpoint": "c1", "epoch": 7, "session": "A"}
    host.send({**good, **head})
    assert host.expect(lambda head: head.get("id") == "x")[0]["reason"] == "invalid_arguments"
    host.send({"k": "restore", "id": "y", "checkpoint": "c", "epoch": 7, "session": "A"})
    assert "manifest" in host.expect(lambda head: head.get("id") == "y")[0]["detail"]


def test_a_new_session_ends_a_checkpoint(keeper: Keeper):
    (keeper.host.disk.workspace / "f").write_text("one")
    number = keeper.ask_checkpoint()
    keeper.host.expect(lambda head: head["k"] == "offer")
    assert keeper.host.mark(epoch=8, session="B", nonce="N8")["k"] == "marked"
    assert keeper.serve(number)["k"] == "checkpoint_failed"


def test_a_file_that_changes_while_it_is_read_fails_the_checkpoint(keeper: Keeper):
    path = keeper.host.disk.workspace / "f"
    with path.open("wb") as file:
        for number in range(20):  # more blocks than one offer has
            file.write(bytes([number]) * 512 * 1024)
    number = keeper.ask_checkpoint()
    keeper.host.expect(lambda head: head["k"] == "offer")
    with path.open("r+b") as file:
        file.write(b"other")
    keeper.host.send({"k": "want", "id": number})
    failed = keeper.serve(number)
    assert (failed["k"], failed["reason"]) == ("checkpoint_failed", "busy")
    assert keeper.checkpoint()["k"] == "checkpointed"


# -- restoring


def test_a_repeated_restore_touches_nothing(keeper: Keeper, fresh: Keeper):
    (keeper.host.disk.workspace / "f").write_text("one")
    told = keeper.checkpoint()
    first = fresh.restore(told["manifest"])
    assert fresh.host.write("s1.1", "f", "two")["verdict"] == "applied"
    again = fresh.restore(told["manifest"])
    assert (again["k"], again["files"], again["journal_seq"]) == ("restored", first["files"], 1)
    assert (fresh.host.disk.workspace / "f").read_text() == "two"


def test_what_this_generation_did_is_never_replaced(keeper: Keeper, fresh: Keeper):
    (keeper.host.disk.workspace / "f").write_text("one")
    told = keeper.checkpoint()
    host = fresh.host
    assert host.write("s1.1", "mine", "m")["verdict"] == "applied"
    refused = fresh.restore(told["manifest"])
    assert (refused["k"], refused["reason"]) == ("restore_failed", "not_empty")
    assert (host.disk.workspace / "mine").read_text() == "m"
    # What is there from before is: the next generation has done nothing yet.
    assert host.mark(epoch=8, session="B", nonce="N8")["k"] == "marked"
    after = fresh.restore(told["manifest"], epoch=8, session="B")
    assert (after["k"], after["journal_seq"]) == ("restored", 1)
    assert sorted(told_tree(host.disk.workspace)) == [b"f"]


def test_a_generation_begins_with_one_checkpoint_only(keeper: Keeper, fresh: Keeper):
    """A late repeat of an order that was given up must not undo the one that was not."""
    root = keeper.host.disk.workspace
    (root / "f").write_text("one")
    one = keeper.checkpoint()
    (root / "f").write_text("other")
    two = keeper.checkpoint()
    (fresh.host.disk.workspace / "from the image").write_text("i")
    assert fresh.restore(two["manifest"], checkpoint="c2")["k"] == "restored"
    assert fresh.restore(one["manifest"], checkpoint="c1")["reason"] == "not_empty"
    assert told_tree(fresh.host.disk.workspace).keys() == {b"f"}
    assert (fresh.host.disk.workspace / "f").read_text() == "other"


@pytest.mark.parametrize(("direction", "kept"), [("replay", True), ("apply", False)])
def test_in_a_later_generation_only_replays_may_stand_on_a_restored_tree(
    keeper: Keeper, fresh: Keeper, direction: str, kept: bool
):
    (keeper.host.disk.workspace / "f").write_text("one")
    told = keeper.checkpoint()
    host = fresh.host
    assert fresh.restore(told["manifest"])["k"] == "restored"
    assert host.write("s1.1:r5", "later", "l", direction=direction)["verdict"] == "applied"
    assert host.mark(epoch=8, session="B", nonce="N8")["k"] == "marked"
    again = fresh.restore(told["manifest"], epoch=8, session="B")
    assert (again["k"], again["journal_seq"]) == ("restored", 1)
    assert (host.disk.workspace / "later").exists() is kept
    fence = {"epoch": 8, "session": "B", "direction": "replay"}
    repeated = host.write("s1.1:r6", "later", "l", **fence)
    assert repeated["verdict"] == ("attested" if kept else "applied")
    assert repeated.get("of_seq", 0) == (1 if kept else 0)
    assert (host.disk.workspace / "later").read_text() == "l"
    third = host.write("s1.1:r7", "later", "l", **fence)
    assert (third["verdict"], third["of_seq"]) == ("attested", 1 if kept else 2)


def test_a_step_from_before_a_restore_is_neither_attested_nor_undone(keeper: Keeper, disk: Disk):
    host = keeper.host
    told = keeper.checkpoint()
    first = disk.fence("s1.1")
    assert host.apply(first, "write_file", {"path": "a", "content": "a"})["verdict"] == "applied"
    assert host.mark(epoch=8, session="B", nonce="N8")["k"] == "marked"
    live = {"epoch": 8, "session": "B"}
    assert keeper.restore(told["manifest"], **live)["k"] == "restored"
    assert host.undo("s1.u", of="s1.1", **live)["reason"] == "nothing_to_undo"
    assert host.revoke("s1.9", **live)["verdict"] == "revoked"
    old = host.write("s9.1", "a", "a", no=first["no"], **live)
    assert (old["verdict"], old["reason"]) == ("refused", "too_old")
    assert host.write("s1.2", "a", "a", **live)["verdict"] == "applied"
    assert host.write("s1.3", "a", "a", **live)["verdict"] == "attested"


def test_nothing_is_applied_and_nothing_read_before_a_restore_is_whole(
    keeper: Keeper, fresh: Keeper
):
    root = keeper.host.disk.workspace
    (root / "a").write_text("a")
    (root / "b").write_bytes(b"b" * 200_000)
    told = keeper.checkpoint()
    host = fresh.host
    number = fresh.ask_restore(told["manifest"])
    fresh.answer(number)
    head, answer = host.read("read_file", {"path": "a"})
    assert (head["ok"], answer["reason"]) == (False, "overloaded")
    host.send({"k": "abort", "id": number})
    assert fresh.serve(number)["k"] == "restore_failed"
    refused = host.write("s1.1", "mine", "m")
    assert (refused["verdict"], refused["reason"]) == ("fault", "restoring")
    assert fresh.checkpoint()["reason"] == "restoring"
    assert fresh.restore(told["manifest"])["k"] == "restored"
    assert told_tree(host.disk.workspace) == told_tree(root)
    assert host.write("s1.2", "mine", "m")["verdict"] == "applied"


def test_a_restore_that_fails_leaves_an_empty_disk(keeper: Keeper, fresh: Keeper):
    root = keeper.host.disk.workspace
    fill(root)
    told = keeper.checkpoint()
    lost = max(keeper.store, key=lambda name: len(keeper.store[name]))
    data = keeper.store.pop(lost)
    failed = fresh.restore(told["manifest"])
    assert (failed["k"], failed["reason"]) == ("restore_failed", "missing")
    assert told_tree(fresh.host.disk.workspace) == {}
    keeper.store[lost] = data[:-1] + b"?"
    assert fresh.restore(told["manifest"])["reason"] == "corrupt"
    assert told_tree(fresh.host.disk.workspace) == {}
    keeper.store[lost] = data
    assert fresh.restore(told["manifest"])["k"] == "restored"
    assert told_tree(fresh.host.disk.workspace) == told_tree(root)


def root_of(store: Store, *entries: Any, packs: Any = (), **root: Any) -> str:
    page = put_page(store, {"v": 1, "k": "page", "packs": list(packs), "e": list(entries)})
    files = [entry for entry in entries if type(entry) is list and entry[1] in ("s", "f", "F")]
    size = sum(entry[4] for entry in files if len(entry) > 4)
    told = {"v": 1, "k": "root", "entries": len(entries), "files": len(files), "size": size}
    return "sha256:" + put_page(store, {**told, "c": [[page, 0, 0]], **root})


ZERO = 1_000_000_000
HOSTILE: dict[str, list[Any]] = {
    "up": [["../x", "s", 0o644, ZERO, 0]],
    "up_inside": [["a", "d", 0o755], ["a/../../x", "s", 0o644, ZERO, 0]],
    "absolute": [["/fencepost-escaped", "s", 0o644, ZERO, 0]],
    "empty": [["", "s", 0o644, ZERO, 0]],
    "dot": [["./x", "s", 0o644, ZERO, 0]],
    "nul": [["a\0b", "s", 0o644, ZERO, 0]],
    "not_bytes": [["\u1234", "s", 0o644, ZERO, 0]],
    "no_text": [[7, "s", 0o644, ZERO, 0]],
    "long_name": [["n" * 256, "s", 0o644, ZERO, 0]],
    "long_path": [["/".join(["n" * 200] * 30), "s", 0o644, ZERO, 0]],
    "through_a_link": [["a", "l", "/tmp"], ["a/x", "s", 0o644, ZERO, 0]],
    "through_a_file": [["a", "s", 0o644, ZERO, 0], ["a/x", "s", 0o644, ZERO, 0]],
    "no_parent": [["a/x", "s", 0o644, ZERO, 0]],
    "twice": [["a", "s", 0o644, ZERO, 0], ["a", "s", 0o644, ZERO, 0]],
    "twice_a_dir": [["a", "d", 0o755], ["a", "d", 0o755]],
    "disorder": [["b", "d", 0o755], ["a", "d", 0o755]],
    "trash": [[".fencepost-trash", "d", 0o755]],
    "temporary": [[".fencepost-1-0.tmp", "s", 0o644, ZERO, 0]],
    "setuid": [["a", "s", 0o4755, ZERO, 0]],
    "mode": [["a", "s", True, ZERO, 0]],
    "dir_mode": [["a", "d", -1]],
    "time": [["a", "s", 0o644, 1 << 70, 0]],
    "size": [["a", "s", 0o644, ZERO, -1]],
    "kind": [["a", "x", 0o644, ZERO, 0]],
    "fields": [["a", "s", 0o644]],
    "no_list": ["a"],
    "link_nul": [["a", "l", "x\0y"]],
    "link_empty": [["a", "l", ""]],
    "link_number": [["a", "l", 7]],
    "no_pack": [["a", "s", 0o644, ZERO, 5]],
    "blocks": [["a", "f", 0o644, ZERO, 600_000, ["00" * 32]]],
    "blocks_many": [["a", "f", 0o644, ZERO, 5, ["00" * 32, "00" * 32]]],
    "blocks_none": [["a", "f", 0o644, ZERO, 0, []]],
    "blocks_text": [["a", "f", 0o644, ZERO, 5, "00"]],
    "digest": [["a", "f", 0o644, ZERO, 5, ["zz" * 32]]],
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_page_is_refused_and_leaves_nothing(fresh: Keeper, store: Store, name: str):
    outside = fresh.host.disk.state.parent
    before = sorted(path.name for path in outside.iterdir())
    failed = fresh.restore(root_of(store, *HOSTILE[name]))
    assert (failed["k"], failed["reason"]) == ("restore_failed", "corrupt"), failed
    assert told_tree(fresh.host.disk.workspace) == {}
    assert sorted(path.name for path in outside.iterdir()) == before
    assert not os.path.lexists("/fencepost-escaped")
    good = root_of(store, ["a", "d", 0o755], ["a/x", "s", 0o644, ZERO, 0], ["b", "l", "/tmp"])
    assert fresh.restore(good)["k"] == "restored"


@pytest.mark.parametrize(
    "root",
    [
        {"entries": 3}, {"files": 0}, {"size": 1}, {"entries": True}, {"size": 1.0}, {"c": None},
        {"c": [[]]}, {"c": [["00"]]}, {"v": 2}, {"k": "index"}, {"entries": 1 << 40},
    ],
)  # fmt: skip
def test_a_root_that_is_wrong_is_refused(fresh: Keeper, store: Store, root: dict[str, Any]):
    entries = [["a", "d", 0o755], ["a/x", "s", 0o644, ZERO, 0]]
    assert fresh.restore(root_of(store, *entries, **root))["reason"] == "corrupt"
    assert fresh.restore(root_of(store, *entries))["k"] == "restored"


def test_packs_must_fit_their_files(fresh: Keeper, store: Store):
    pack = put(store, b"hello")
    entry = ["a", "s", 0o644, ZERO, 5]
    for packs in ([[pack, 4]], [[pack, 6]], [[pack, 5], [pack, 5]], [[pack]], [[pack, 0]]):
        assert fresh.restore(root_of(store, entry, packs=packs))["reason"] == "corrupt"
    two = [["a", "s", 0o644, ZERO, 3], ["b", "s", 0o644, ZERO, 3]]
    assert fresh.restore(root_of(store, *two, packs=[[pack, 5], [pack, 5]]))["reason"] == "corrupt"
    assert fresh.restore(root_of(store, entry, packs=[[pack, 5]]))["k"] == "restored"
    assert (fresh.host.disk.workspace / "a").read_text() == "hello"


def test_an_endless_tree_of_indexes_is_refused(fresh: Keeper, store: Store):
    page = put_page(store, {"v": 1, "k": "page", "packs": [], "e": []})
    for _ in range(12):
        page = put_page(store, {"v": 1, "k": "index", "c": [[page, 0, 0]]})
    told = {"v": 1, "k": "root", "entries": 0, "files": 0, "size": 0, "c": [[page, 0, 0]]}
    assert fresh.restore("sha256:" + put_page(store, told))["reason"] == "corrupt"


def test_the_gateways_window_is_bounded(keeper: Keeper, fresh: Keeper):
    spread(keeper.host.disk.workspace, 400)
    told = keeper.checkpoint()
    assert fresh.restore(told["manifest"])["k"] == "restored"
    assert 0 < fresh.most_asked <= 64


@pytest.mark.skipif(not old_pythons(), reason="no Python 3.8 here")
def test_python_3_8_takes_and_restores_checkpoints(start: Start, disk: Disk, store: Store):
    old = start(python=old_pythons()[-1])
    old.mark()
    fill(disk.workspace)
    told = Keeper(old, store).checkpoint()
    other = Disk(disk.state.parent / "other")
    host = start(on=other, python=old_pythons()[-1])
    host.mark()
    keeper = Keeper(host, store)
    assert keeper.restore(told["manifest"])["k"] == "restored"
    assert told_tree(other.workspace) == told_tree(disk.workspace)
    assert Keeper(start(), store).checkpoint()["manifest"] == told["manifest"]
