"""`kill -9` between any two effects of a checkpoint and of a restore, and the next."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable

import pytest

from tests.unit.toolhost.driver import Disk, Toolhost
from tests.unit.toolhost.keeping import Keeper, Store, told_tree
from tests.unit.toolhost.test_checkpoints import fill, settle
from tests.unit.toolhost.test_crashes import crashing, died

Start = Callable[..., Toolhost]


def serve_to_the_point(keeper: Keeper, number: str) -> bool:
    """Serves a job until its toolhost dies; False when it was finished instead."""
    host = keeper.host
    try:
        while not host.ended:
            while host.frames:
                if keeper.answer(number) is not None:
                    return died(host)
            host.pump(5)
    except BrokenPipeError:  # it died of the frame before
        pass
    return died(host)


@pytest.mark.parametrize(
    "point",
    ["locked", "checkpoint_begun", "checkpoint_offer", "checkpoint_sent", "checkpoint_offer#2", "checkpoint_read", "cache_written"],
)  # fmt: skip
def test_a_checkpoint_killed_at_any_point_is_made_again(start: Start, disk: Disk, point: str):
    fill(disk.workspace)
    (disk.workspace / "more").write_bytes(os.urandom(9 << 20))  # more chunks than one offer has
    store: Store = {}
    host = start()
    host.mark()
    settle()
    first = Keeper(host, store).checkpoint()
    host.hello()
    host.close_input()
    before = told_tree(disk.workspace)
    (disk.workspace / "more").write_bytes(os.urandom(9 << 20))
    settle()
    dying = Keeper(crashing(start, disk, point), store)
    number = dying.ask_checkpoint(base=first["manifest"])
    if point == "cache_written":
        told = dying.serve(number)
        dying.host.send({"k": "kept", "manifest": told["manifest"]})
        assert dying.host.wait_dead() == 137
    else:
        assert serve_to_the_point(dying, number)
    # The old one is whole, whatever became of the new one.
    other = Disk(disk.state.parent / "other")
    host = start(on=other)
    host.mark()
    assert Keeper(host, store).restore(first["manifest"])["k"] == "restored"
    assert told_tree(other.workspace) == before
    again = Keeper(start(), store).checkpoint(base=first["manifest"])
    assert again["k"] == "checkpointed"
    third = Disk(disk.state.parent / "third")
    host = start(on=third)
    host.mark()
    assert Keeper(host, store).restore(again["manifest"])["k"] == "restored"
    assert told_tree(third.workspace) == told_tree(disk.workspace)


RESTORE_POINTS = [
    "locked", "restoring", "restore_wiped", "restore_file", "restore_file#3", "restore_block",
    "restore_block#2", "restore_mode", "restore_mode#2", "before_restored", "after_restored",
]  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str, object]:
    """A store, the manifest of a checkpoint in it, and its tree."""
    disk = Disk(tmp_path_factory.mktemp("kept"))
    fill(disk.workspace)
    store: Store = {}
    with Toolhost(disk) as host:
        host.mark()
        return store, Keeper(host, store).checkpoint()["manifest"], told_tree(disk.workspace)


@pytest.mark.parametrize("point", RESTORE_POINTS)
def test_a_restore_killed_at_any_point_is_made_again_whole(
    start: Start, disk: Disk, kept: tuple[Store, str, object], point: str
):
    store, manifest, tree = kept
    start().mark()
    dying = Keeper(crashing(start, disk, point), store)
    assert serve_to_the_point(dying, dying.ask_restore(manifest)), "the point was never passed"
    kinds = [record["k"] for record in disk.journal()]
    if point == "after_restored":
        assert kinds == ["opened", "restoring", "restored"]
    else:
        assert "restored" not in kinds
    host = start()
    if "restoring" in kinds and point != "after_restored":
        refused = host.write("s1.1", "mine", "m")
        assert (refused["verdict"], refused["reason"]) == ("fault", "restoring")
        assert not host.read("list_dir", {})[0]["ok"]
    told = Keeper(host, store).restore(manifest)
    assert told["k"] == "restored", told
    assert told_tree(disk.workspace) == tree
    assert [record["k"] for record in disk.journal()].count("restored") == 1
    assert host.write("s1.2", "mine", "m")["verdict"] == "applied"


@pytest.mark.parametrize("point", ["restore_file", "restore_undone"])
def test_a_restore_that_fails_and_is_killed_leaves_nothing_that_counts(
    start: Start, disk: Disk, kept: tuple[Store, str, object], point: str
):
    store, manifest, tree = kept
    start().mark()
    torn = {name: data for name, data in store.items() if len(data) < 512 * 1024}
    assert len(torn) < len(store)
    dying = Keeper(crashing(start, disk, point), torn)
    assert serve_to_the_point(dying, dying.ask_restore(manifest))
    host = start()
    assert host.write("s1.1", "mine", "m")["reason"] == "restoring"
    assert Keeper(host, torn).restore(manifest)["reason"] == "missing"
    assert told_tree(disk.workspace) == {}
    assert Keeper(host, store).restore(manifest)["k"] == "restored"
    assert told_tree(disk.workspace) == tree


def test_another_checkpoint_may_follow_an_unfinished_restore(
    start: Start, disk: Disk, kept: tuple[Store, str, object]
):
    store, manifest, _ = kept
    start().mark()
    dying = Keeper(crashing(start, disk, "restore_file#3"), store)
    page = {"v": 1, "k": "root", "entries": 0, "files": 0, "size": 0, "c": []}
    assert serve_to_the_point(dying, dying.ask_restore(manifest))
    data = json.dumps(page).encode()
    empty = hashlib.sha256(data).hexdigest()
    host = start()
    told = Keeper(host, {empty: data}).restore("sha256:" + empty, checkpoint="c2")
    assert told["k"] == "restored"
    assert told_tree(disk.workspace) == {}


def test_what_was_restored_is_remembered_over_a_compaction(start: Start, disk: Disk):
    store: Store = {}
    (disk.workspace / "a").write_text("a")
    host = start()
    host.mark()
    manifest = Keeper(host, store).checkpoint()["manifest"]
    other = Disk(disk.state.parent / "other")
    host = start(on=other)
    host.mark()
    keeper = Keeper(host, store)
    assert keeper.restore(manifest)["k"] == "restored"
    for number in range(2 * 4096 + 10):
        fence = other.fence(f"r{number}.1", direction="revoke")
        host.send_call("revoke", fence)
        host.receipt_bytes(fence)
    kinds = [record["k"] for record in other.journal()]
    assert kinds[:3] == ["base", "opened", "restored"]
    assert keeper.restore(manifest)["k"] == "restored"
    assert Keeper(start(on=other), store).restore(manifest)["k"] == "restored"


def test_a_synced_restore_is_the_same(start: Start, disk: Disk, kept: tuple[Store, str, object]):
    store, manifest, tree = kept
    host = start("--sync")
    host.mark()
    assert Keeper(host, store).restore(manifest)["k"] == "restored"
    assert told_tree(disk.workspace) == tree


def test_a_dead_gateways_grant_ends_a_restore(
    start: Start, disk: Disk, kept: tuple[Store, str, object]
):
    store, manifest, _ = kept
    host = start()
    host.mark()
    keeper = Keeper(host, store)
    number = keeper.ask_restore(manifest)
    keeper.answer(number)
    host.send({"k": "grant", "ms": 1})
    assert keeper.serve(number)["reason"] == "unreachable"
