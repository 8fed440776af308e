"""
A sandbox is taken away, and the agent's work is there again: the whole deployment, real disks.

Killed at every point of a checkpoint, a restore and a replay, the work is whole all the same.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fencepost.client import Client
from fencepost.client.losses import losses
from fencepost.core.errors import UnknownError
from fencepost.core.sandbox import entries as e
from fencepost.runtime import crash

from tests.acceptance.conftest import QUICK, RunningStack, StartStack
from tests.acceptance.walking import (
    PATIENCE_S,
    History,
    Reviver,
    Script,
    Work,
    end,
    reviving,
    until,
)
from tests.unit.toolhost.keeping import told_tree

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.budget(110)]


class Walk:
    """One deployment; every test makes a sandbox of its own in it."""

    def __init__(self, stack: RunningStack, client: Client, script: Script) -> None:
        self.stack = stack
        self.client = client
        self.script = script
        self.history = History(client)
        self.reviver: Reviver
        self.count = 0

    async def made(self, **spec: Any) -> Work:
        self.count += 1
        name = f"box-{self.count}"
        await self.client.create_sandbox(name, spec=spec)
        return Work(self.stack, self.client, self.history, name)

    async def taken(self, box: Work) -> dict[str, Any]:
        """Takes the disk away, and waits for the next generation to be whole."""
        return await self.whole(box, await self.reclaimed(box))

    async def reclaimed(self, box: Work) -> int:
        """Takes the disk away; gives the epoch that it had."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            before: int = (await box.live())["epoch"]
            try:
                await self.client.fault(box.box, {"do": "reclaim"}, timeout_s=2)
            except UnknownError:  # its gateway has just died, or there is another disk by now
                assert time.monotonic() < deadline
            else:
                return before

    async def whole(self, box: Work, after: int) -> dict[str, Any]:
        shown = await box.live()
        while shown["epoch"] <= after:
            await asyncio.sleep(0.05)
            shown = await box.live()
        return shown


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def walk() -> AsyncIterator[Walk]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-test-"))
    folder.chmod(0o755)
    script = Script(folder / "crash")
    stack = await RunningStack.start(
        folder, environment={**QUICK, **script.environment}, postgres=False, others=False
    )
    try:
        async with await stack.client() as client:
            walk = Walk(stack, client, script)
            async with reviving(stack) as reviver:
                walk.reviver = reviver
                yield walk
            report = await stack.verify()
            assert report.is_clean, report.violations
    finally:
        await stack.stop()
        left = stack.processes()
        shutil.rmtree(folder, ignore_errors=True)
        assert not left, left


async def filled(walk: Walk, **spec: Any) -> tuple[Work, dict[bytes, Any]]:
    """A sandbox with a checkpoint and with steps after it; and its tree."""
    box = await walk.made(**spec)
    await box.round("one")
    await walk.client.run_command(
        box.box,
        "printf 'a\\000b' > f/bin; chmod 755 f/one-w0; ln -s f/one-w1 link; mkdir e",
        undo="true",
    )
    taken = await walk.client.checkpoint(box.box, timeout_s=PATIENCE_S)
    assert taken.manifest.startswith("sha256:")
    await box.round("two")
    return box, contents(told_tree(box.workspace_of(await box.live())))


def contents(tree: dict[bytes, Any]) -> dict[bytes, Any]:
    """A tree without times: a replayed step writes later than it did at first."""
    return {
        path: (what[0], what[1], what[3]) if what[0] == "file" else what
        for path, what in tree.items()
    }


async def tree_of(box: Work) -> dict[bytes, Any]:
    return contents(told_tree(box.workspace_of(await box.live())))


async def test_work_is_there_again_after_two_reclaims(walk: Walk) -> None:
    box, tree = await filled(walk)
    await walk.taken(box)
    assert await tree_of(box) == tree
    await box.round("three")
    after = await tree_of(box)
    await walk.taken(box)
    assert await tree_of(box) == after
    entries = await walk.history.of(box.box)
    assert sum(isinstance(entry, e.RestoredEntry) for entry in entries) == 2


async def test_without_a_checkpoint_every_step_is_replayed(walk: Walk) -> None:
    box = await walk.made()
    await box.round("one")
    tree = await tree_of(box)
    await walk.taken(box)
    assert await tree_of(box) == tree


async def test_a_step_committed_after_a_checkpoint_survives_a_reclaim_at_once(walk: Walk) -> None:
    box = await walk.made(recovery="tell")
    await box.round("one")
    outcome = await walk.client.write_file(
        box.box, "kept", "k", commit_after="checkpoint", timeout_s=PATIENCE_S
    )
    assert outcome.is_ok
    # Nothing in between: no replay under this policy, so only the checkpoint can bring it back.
    await walk.taken(box)
    assert (box.workspace_of(await box.live()) / "kept").read_text() == "k"
    later = await walk.client.write_file(box.box, "lost", "l", timeout_s=PATIENCE_S)
    assert later.is_ok
    await walk.taken(box)
    workspace = box.workspace_of(await box.live())
    assert ((workspace / "kept").exists(), (workspace / "lost").exists()) == (True, False)


async def test_an_announced_preemption_is_answered_with_a_checkpoint(walk: Walk) -> None:
    box = await walk.made(recovery="tell")
    await box.round("one")
    tree = await tree_of(box)
    before = (await box.live())["epoch"]
    await walk.client.fault(box.box, {"do": "preempt", "grace_ms": 5_000})
    await walk.whole(box, before)
    assert await tree_of(box) == tree


CHECKPOINT_POINTS = [
    "gateway_checkpoint_stored",
    "gateway_before_checkpointed",
    "gateway_after_checkpointed",
    "checkpoint_sent",
    "cache_written",
]


@pytest.mark.parametrize("point", CHECKPOINT_POINTS)
async def test_killed_while_a_checkpoint_is_taken(walk: Walk, point: str) -> None:
    box, _ = await filled(walk)
    walk.script.arm(point)
    await walk.client.write_file(
        box.box, "kept", point, commit_after="checkpoint", timeout_s=PATIENCE_S
    )
    await until(lambda: walk.script.is_done, f"nobody came to {point}")
    tree = await tree_of(box)
    await walk.taken(box)
    assert await tree_of(box) == tree
    await box.round("three")
    await box.check()


RESTORE_POINTS = [
    "gateway_restore_begun",
    "gateway_before_restored",
    "gateway_after_restored",
    "restoring",
    "restore_file",
    "after_restored",
    # Of the replay that follows: a step's own.
    "effect",
    "after_done",
]


@pytest.mark.parametrize("point", RESTORE_POINTS)
async def test_killed_while_the_work_is_brought_back(walk: Walk, point: str) -> None:
    box, tree = await filled(walk)
    walk.script.arm(point)
    before = await walk.reclaimed(box)
    await until(lambda: walk.script.is_done, f"nobody came to {point}")
    await walk.whole(box, before)
    assert await tree_of(box) == tree
    await box.round("three")
    await box.check()


async def test_a_planner_killed_during_recovery_goes_on_with_it(walk: Walk) -> None:
    box, _ = await filled(walk)
    for number in range(20):
        await walk.client.write_file(box.box, f"more/{number}", f"{number}")
    tree = await tree_of(box)
    before = await walk.reclaimed(box)
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not any(isinstance(x, e.Replayed) for x in await walk.history.of(box.box)):
        assert asyncio.get_running_loop().time() < deadline, "nothing is replayed"
        await asyncio.sleep(0.01)
    end(walk.stack.services["planner-1"])
    await walk.whole(box, before)
    assert await tree_of(box) == tree
    await box.round("three")
    await box.check()


async def test_a_folder_keeps_the_checkpoints_where_it_is_set(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-chunks-"))
    try:
        monkeypatch.setenv("FENCEPOST_CHECKPOINT_STORE", f"file://{folder}")
        monkeypatch.setenv("FENCEPOST_SHARDS", "no number")  # control: another stack's
        stack = await start_stack()
        async with await stack.client() as client:
            await client.create_sandbox("box", spec={"recovery": "tell"})
            await client.fault("box", {"do": "echo", "percent": 100, "ms": 200})
            done = await client.write_file("box", "kept", "k", commit_after="checkpoint")
            assert done.is_ok
            assert len(list((folder / "box").rglob("*"))) >= 3
            await client.reclaim("box", timeout_s=PATIENCE_S)
            assert await client.read_file("box", "kept") == "k"
            await client.release("box", timeout_s=PATIENCE_S)
            chunks = folder / "box"
            await until(
                lambda: not [path for path in chunks.rglob("*") if path.is_file()],
                "what a sandbox that is gone has left is dropped",
            )
    finally:
        shutil.rmtree(folder)


# Of a file whose first line is another one each time.
PATCH = """\
--- a/f
+++ b/f
@@ -8,3 +8,3 @@
 8
-9
+nine
 10
"""


async def test_what_a_recovery_cannot_bring_back_is_told_whole(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-chunks-"))
    try:
        monkeypatch.setenv("FENCEPOST_CHECKPOINT_STORE", f"file://{folder}")
        stack = await start_stack()
        async with await stack.client() as client:

            async def stopped() -> bool:
                return bool((await losses(client, "box")).stopped)

            await client.create_sandbox("box")
            await client.run_command("box", "(mktemp -u; seq 2 12) > f", undo="true", step="dice")
            await client.apply_patch("box", PATCH, step="after")
            await client.fault("box", {"do": "reclaim"})
            while not await stopped():
                await asyncio.sleep(0.1)
            told = await losses(client, "box")
            assert (told.stopped, told.step, told.is_cut) == ("differs", "after", False)
            (one,) = told.differs
            assert (one.path, one.expected != one.found) == ("f", True)
            assert "this time: f" in (await client.show("box"))["recovering"]["detail"]
            await client.recover("box", "accept", who="me", timeout_s=PATIENCE_S)
            await client.checkpoint("box", timeout_s=PATIENCE_S)
            await client.write_file("box", "late", "l", step="late")
            for path in (folder / "box").rglob("*"):
                if path.is_file():
                    path.unlink()
            await client.fault("box", {"do": "reclaim"})
            while not await stopped():
                await asyncio.sleep(0.1)
            assert (await losses(client, "box")).stopped == "restore_missing"
            await client.recover("box", "tell", who="me", timeout_s=PATIENCE_S)
            while (await client.show("box"))["state"] != "live":
                await asyncio.sleep(0.1)
            told = await losses(client, "box")
            assert [step.step for step in told.given_up] == ["dice", "after", "late"]
            assert (told.stopped, len(told.lost)) == ("", 1)
    finally:
        shutil.rmtree(folder)


async def test_every_point_of_a_recovery_is_walked() -> None:
    assert set(crash.RECOVERY_POINTS) <= {*CHECKPOINT_POINTS, *RESTORE_POINTS}
