"""
kill -9 at every numbered point between two effects, on one running deployment.

The processes are armed while they run, and whoever dies is started again at once. Afterwards every
step has ended, no effect was there twice, and in the end the whole ledger is verified.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fencepost.client import Client, ledger
from fencepost.core import ids
from fencepost.providers import processes
from fencepost.runtime import crash
from fencepost.runtime.shard_runner import SNAPSHOT_AT_HAND_OVER

from tests.acceptance.conftest import QUICK, RunningStack
from tests.acceptance.walking import (
    PATIENCE_S,
    History,
    Reviver,
    Script,
    Work,
    appending,
    end,
    gone,
    reviving,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.budget(220)]


class Walk:
    """One deployment that is walked through: two sandboxes that stay, others that come and go."""

    def __init__(self, stack: RunningStack, client: Client, script: Script) -> None:
        self.stack = stack
        self.client = client
        self.script = script
        self.history = History(client)
        self.boxes = [Work(stack, client, self.history, box) for box in ("box-a", "box-b")]
        self.reviver: Reviver
        self.rounds = 0

    def tag(self) -> str:
        self.rounds += 1
        return f"r{self.rounds}"

    async def work(self) -> None:
        tag = self.tag()
        await asyncio.gather(*(box.round(f"{tag}-{box.box}") for box in self.boxes))

    async def work_for(self, batches: int) -> None:
        """Works until a shard has so many more. Steps that share batches make fewer of them."""
        shard = ids.shard_of(self.boxes[0].box, self.client.shards)
        had = len(await self._batches(shard))
        for _ in range(batches):
            await self.work()
            if len(await self._batches(shard)) >= had + batches:
                return
        raise AssertionError(f"{batches} rounds made fewer batches than that")

    async def _batches(self, shard: int) -> list[int]:
        return [one.seq async for one in ledger.batches(self.client.link, shard)]

    async def passed(self, *points: str) -> None:
        await until(lambda: self.script.is_done, f"nobody came to {points}")

    async def check(self) -> None:
        for box in self.boxes:
            await box.check()

    async def come_and_go(self) -> None:
        """A sandbox's whole life."""
        box = await self.made()
        await box.round(self.tag())
        await box.check()
        await gone(self.client, box.box)

    async def made(self) -> Work:
        name = f"temp-{self.tag()}"
        await self.client.create_sandbox(name)
        return Work(self.stack, self.client, self.history, name)


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
            for box in walk.boxes:
                await client.create_sandbox(box.box)
            async with reviving(stack) as reviver:
                walk.reviver = reviver
                yield walk
    finally:
        await stack.stop()
        left = stack.processes()
        shutil.rmtree(folder, ignore_errors=True)
        assert not left, left


async def _killed_under_work(walk: Walk, point: str) -> None:
    """Arms the point and works until somebody died there and all is well again."""
    deaths = len(walk.reviver.deaths)
    walk.script.arm(point)
    await walk.work()
    await walk.passed(point)
    # Whoever is to die takes its line out first: the death itself may still be on its way.
    await until(lambda: len(walk.reviver.deaths) > deaths, f"a death at {point}")
    await walk.check()
    assert len(walk.reviver.deaths) == deaths + 1


STEP_POINTS = [
    "gateway_order_received",
    "gateway_frames_sent",
    "gateway_receipt_received",
    "gateway_before_receipts",
    "gateway_after_receipts",
    "before_append",
    "after_append",
    "after_effects",
    "after_events",
]


@pytest.mark.parametrize("point", STEP_POINTS)
async def test_killed_between_two_effects_of_a_step(walk: Walk, point: str) -> None:
    await _killed_under_work(walk, point)


LIFE_POINTS = [
    "gateway_before_create",
    "gateway_after_create",
    "gateway_before_assigned",
    "gateway_after_assigned",
    "gateway_before_found",
    "gateway_after_found",
    "gateway_before_marked",
    "gateway_after_marked",
    "gateway_before_stop",
    "gateway_after_stop",
    "gateway_before_stop_answered",
    "gateway_after_stop_answered",
    "gateway_before_gone",
    "gateway_after_gone",
]


@pytest.mark.parametrize("point", LIFE_POINTS)
async def test_killed_while_a_sandbox_comes_or_goes(walk: Walk, point: str) -> None:
    walk.script.arm(point)
    working = asyncio.create_task(walk.work())
    await walk.come_and_go()
    await working
    await walk.passed(point)
    await walk.check()


@pytest.mark.parametrize("point", ["gateway_before_lost", "gateway_after_lost"])
async def test_killed_while_a_loss_is_reported(walk: Walk, point: str) -> None:
    toolhost = await walk.boxes[0].toolhost()
    walk.script.arm(point)
    working = asyncio.create_task(walk.work())
    os.kill(toolhost, signal.SIGKILL)
    await working
    await walk.passed(point)
    await walk.check()


@pytest.mark.parametrize("point", ["gateway_before_attach_failed", "gateway_after_attach_failed"])
async def test_killed_while_a_failed_attach_is_reported(walk: Walk, point: str) -> None:
    """A sandbox that is gone when its gateway comes back."""
    box = await walk.made()
    shown = await box.live()
    walk.reviver.is_paused = True
    end(walk.stack.services["gateway-1"])
    await walk.stack.services["gateway-1"].child.wait(10)
    shutil.rmtree(walk.stack.sandbox_root / shown["native_id"])
    walk.script.arm(point)
    walk.reviver.is_paused = False
    await box.round(walk.tag())
    await walk.passed(point)
    await box.check()
    assert (await box.live())["epoch"] > shown["epoch"]
    await gone(walk.client, box.box)


@pytest.mark.parametrize("point", ["gateway_before_create_failed", "gateway_after_create_failed"])
async def test_killed_while_a_failed_create_is_reported(walk: Walk, point: str) -> None:
    """Something that is no sandbox stands where the sandbox is to be."""
    name = f"temp-{walk.tag()}"
    native = f"{name}-{hashlib.sha256(f'local{chr(10)}{name}'.encode()).hexdigest()[:16]}"
    in_the_way = walk.stack.sandbox_root / native
    in_the_way.touch()
    walk.script.arm(point)
    await walk.client.create_sandbox(name, wait=False)
    await walk.passed(point)
    in_the_way.unlink()
    box = Work(walk.stack, walk.client, walk.history, name)
    await box.live()
    await box.round(walk.tag())
    await box.check()
    await gone(walk.client, name)


TOOLHOST_STEP_POINTS = [
    ("locked",),
    ("pre_saved",),
    ("begun",),
    ("temp_written",),
    ("exchanged",),
    ("effect",),
    ("before_done",),
    ("after_done",),
    ("spawned",),
    ("started",),
    ("command_over",),
    ("effect", "rolled_one"),
    ("effect", "rolled_back"),
]


@pytest.mark.parametrize("points", TOOLHOST_STEP_POINTS, ids="-".join)
async def test_s204_a_toolhost_killed_between_two_effects(
    walk: Walk, points: tuple[str, ...]
) -> None:
    box = walk.boxes[0]
    await box.client.write_file(box.box, "big", walk.tag() * 2_000)
    walk.script.arm(*points)
    step = walk.tag()
    box.content[step] = step * 3_000
    # Replacing a file of more than 2 KiB comes to the points that a new small one does not.
    replaced = await box.client.write_file(box.box, "big", step * 3_000)
    assert replaced.is_ok
    del box.content[step]
    await box.round(walk.tag())
    await walk.passed(*points)
    await box.check()
    shown = await box.live()
    assert (box.workspace_of(shown) / "big").read_text() == step * 3_000


@pytest.mark.parametrize("point", ["before_marker", "marker_written", "marker_renamed", "opened"])
async def test_a_toolhost_killed_while_it_writes_its_marker(walk: Walk, point: str) -> None:
    walk.script.arm(point)
    await walk.come_and_go()
    await walk.passed(point)


async def test_a_toolhost_killed_while_it_ends_what_a_former_one_left(walk: Walk) -> None:
    box = walk.boxes[0]
    step = walk.tag()
    _, undo = appending(step)
    handle = await walk.client.submit(
        box.box,
        "run_command",
        {"shell": f"touch {step}; sleep 60; touch {step}.late"},
        step=step,
        compensation=undo,
    )
    toolhost = await box.toolhost()
    workspace = box.workspace_of(await box.live())
    await until((workspace / step).exists, "the command runs")
    walk.script.arm("ended")
    os.kill(toolhost, signal.SIGKILL)
    await walk.passed("ended")
    outcome = await handle.outcome(timeout_s=PATIENCE_S)
    assert (outcome.state, outcome.reason) == ("indeterminate", "broken"), outcome
    instance = (await box.live())["instance"]
    await until(
        lambda: not _running(instance, "sleep"), "what ran under the former toolhost has ended"
    )
    assert not (workspace / f"{step}.late").exists()
    await walk.work()
    await walk.check()


@pytest.mark.parametrize("point", ["before_revoked", "after_revoked"])
async def test_a_toolhost_killed_while_it_revokes(walk: Walk, point: str) -> None:
    """A step that waits behind a running command is cancelled: its fence is revoked first."""
    box = walk.boxes[0]
    slow, waiting = walk.tag(), walk.tag()
    args = {"shell": f"touch {slow}; while ! test -e {slow}.go; do sleep 0.05; done"}
    _, undo = appending(slow)
    running = await walk.client.submit(box.box, "run_command", args, step=slow, compensation=undo)
    workspace = box.workspace_of(await box.live())
    await until((workspace / slow).exists, "the command runs")
    await walk.client.submit(box.box, "write_file", path=f"f/{waiting}", content="", step=waiting)
    await until_fenced(walk, box, waiting)
    walk.script.arm(point)
    cancelling = asyncio.create_task(walk.client.cancel(box.box, waiting, timeout_s=PATIENCE_S))
    await walk.passed(point)
    (workspace / f"{slow}.go").touch()
    assert (await running.outcome(timeout_s=PATIENCE_S)).state in ("indeterminate", "committed")
    cancelled = await cancelling
    assert cancelled.state == "compensated", cancelled
    assert not (workspace / "f" / waiting).exists()
    await walk.work()
    await walk.check()


async def until_fenced(walk: Walk, box: Work, step: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(getattr(entry, "step", "") == step for entry in await walk.history.of(box.box)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def _running(instance: str, program: str) -> list[int]:
    found = []
    for pid in processes.find(processes.INSTANCE, instance):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        if name == program:
            found.append(pid)
    return found


@pytest.mark.parametrize("point", ["after_fold", "after_term_opened"])
async def test_killed_again_while_taking_over(walk: Walk, point: str) -> None:
    walk.script.arm(point)
    working = asyncio.create_task(walk.work())
    await asyncio.sleep(0.05)
    end(walk.stack.services["planner-1"])
    await working
    await walk.passed(point)
    await walk.check()


@pytest.mark.parametrize("point", ["after_messages", "after_answers"])
async def test_killed_between_what_is_sent(walk: Walk, point: str) -> None:
    await _killed_under_work(walk, point)


@pytest.mark.parametrize("point", ["before_snapshot", "after_snapshot"])
async def test_killed_around_a_snapshot_at_the_hand_over(walk: Walk, point: str) -> None:
    # A hand-over makes a snapshot only of a shard with enough batches since the last.
    await walk.work_for(SNAPSHOT_AT_HAND_OVER)
    walk.script.arm(point)
    working = asyncio.create_task(walk.work())
    os.kill(walk.stack.services["planner-1"].pid, signal.SIGTERM)
    await working
    await walk.passed(point)
    await walk.check()


@pytest.mark.parametrize("after_ms", [0, 3, 12, 40])
async def test_the_server_killed_under_work(walk: Walk, after_ms: int) -> None:
    working = asyncio.create_task(walk.work())
    await asyncio.sleep(after_ms / 1000)
    os.kill(walk.stack.nats.pid, signal.SIGKILL)
    await working
    await walk.check()
    assert walk.reviver.deaths[-1] == "nats-server"


async def test_all_killed_at_once(walk: Walk) -> None:
    working = asyncio.create_task(walk.work())
    await asyncio.sleep(0.02)
    for service in walk.stack.services.values():
        end(service)
    os.kill(walk.stack.nats.pid, signal.SIGKILL)
    await working
    await walk.check()


async def test_every_point_of_the_runtime_was_walked() -> None:
    walked = {*STEP_POINTS, *LIFE_POINTS} | {
        "gateway_before_lost",
        "gateway_after_lost",
        "gateway_before_attach_failed",
        "gateway_after_attach_failed",
        "gateway_before_create_failed",
        "gateway_after_create_failed",
        "after_fold",
        "after_term_opened",
        "after_messages",
        "after_answers",
        "before_snapshot",
        "after_snapshot",
    }
    assert walked == set(crash.POINTS)


async def test_after_the_walk_the_ledger_is_clean_and_nothing_too_much_runs(walk: Walk) -> None:
    assert walk.script.is_done
    shown = [await box.live() for box in walk.boxes]
    report = await walk.stack.verify()
    assert report.violations == []
    assert report.committed >= sum(
        outcome.is_committed for box in walk.boxes for outcome in box.outcomes.values()
    )
    homes = {found["native_id"] for found in shown}
    await until(
        lambda: (
            {path.name for path in walk.stack.sandbox_root.iterdir() if path.name[0] != "."}
            == homes
        ),
        "only the sandboxes that live have a folder",
    )
    toolhosts = [pid for box in walk.boxes for pid in [await box.toolhost()]]
    running = {process.pid for process in walk.stack.processes()}
    services = {service.pid for service in walk.stack.services.values()}
    assert running == {*services, *toolhosts, walk.stack.nats.pid}
