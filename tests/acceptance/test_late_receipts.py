"""
Receipts that come late, dispatches that come twice, and cancels of what runs: on real processes.

The receipts are the toolhost's own; the gateway only holds them back on their way.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from fencepost.client import Client, RefusedError
from fencepost.core.errors import UnknownError
from fencepost.core.sandbox import entries as e
from fencepost.providers import processes

from tests.acceptance.conftest import RunningStack
from tests.acceptance.walking import (
    PATIENCE_S,
    History,
    Work,
    appending,
    reviving,
    until,
)

HOLD_MS = 30_000
DISPATCHES = 'dispatches_total{direction="apply"}'
APPLIED = 'receipts_total{verdict="applied"}'


async def _seen(history: History, kind: type, **fields: Any) -> Any:
    """Waits for an entry of the sandbox `box`."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for entry in await history.of("box"):
            if isinstance(entry, kind) and all(
                getattr(entry, name) == value for name, value in fields.items()
            ):
                return entry
        assert time.monotonic() < deadline, f"no {kind.__name__} {fields}"
        await asyncio.sleep(0.02)


async def _workspace(stack: RunningStack, client: Client) -> Path:
    work = Work(stack, client, History(client), "box")
    return work.workspace_of(await work.live())


@pytest.mark.parametrize("policy", ["retry", "reject"])
async def test_s002_s004_a_200_that_outlives_its_disk_never_commits(
    stack: RunningStack, policy: Literal["retry", "reject"]
) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        history = History(client)
        workspace = await _workspace(stack, client)
        await client.fault("box", {"do": "hold_receipts", "ms": HOLD_MS})
        args, undo = appending("late")
        handle = await client.submit(
            "box", "run_command", args, step="late", compensation=undo, on_moved_epoch=policy
        )
        await until((workspace / "log").exists, "the write is on the first disk")
        await _counted(stack, APPLIED, 1)
        await client.reclaim("box", wait=False)
        await _seen(history, e.EpochClosed, epoch=1)
        await _seen(history, e.EpochOpened, epoch=2, disk="cold")
        answer = await client.fault("box", {"do": "release_receipts"})
        assert answer["released"] >= 1
        outcome = await handle.outcome(timeout_s=PATIENCE_S)
        refused = await _seen(history, e.ReceiptRefused, step="late")
        assert refused.epoch == 1
        workspace = await _workspace(stack, client)
        if policy == "retry":
            assert (outcome.state, outcome.epoch, outcome.attempts) == ("committed", 2, 2)
            assert (workspace / "log").read_text() == "late\n"
        else:
            assert (outcome.state, outcome.evidence) == ("compensated", "lost_with_epoch")
            assert not (workspace / "log").exists()
        committed = [x for x in await history.of("box") if isinstance(x, e.Committed)]
        assert [x.receipt.epoch for x in committed] == ([2] if policy == "retry" else [])
    assert (await stack.verify()).violations == []


async def test_s004_the_control_a_late_200_of_the_live_disk_commits(stack: RunningStack) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        history = History(client)
        workspace = await _workspace(stack, client)
        await client.fault("box", {"do": "hold_receipts", "ms": HOLD_MS})
        args, undo = appending("late")
        handle = await client.submit("box", "run_command", args, step="late", compensation=undo)
        await until((workspace / "log").exists, "the write is on the disk")
        assert (await client.show_step("box", "late"))["state"] == "fenced"
        await client.fault("box", {"do": "release_receipts"})
        outcome = await handle.outcome(timeout_s=PATIENCE_S)
        assert (outcome.state, outcome.epoch, outcome.attempts) == ("committed", 1, 1)
        refused = [x for x in await history.of("box") if isinstance(x, e.ReceiptRefused)]
        assert not refused
    assert (await stack.verify()).violations == []


async def test_s017_a_call_dispatched_twice_is_applied_once_and_gets_the_first_receipt(
    stack: RunningStack,
) -> None:
    """The receipt is held until the planner has dispatched the same fence again."""
    async with await stack.client() as client:
        await client.create_sandbox("box")
        workspace = await _workspace(stack, client)
        await client.fault("box", {"do": "hold_receipts", "ms": HOLD_MS})
        args, undo = appending("twice")
        handle = await client.submit("box", "run_command", args, step="twice", compensation=undo)
        await until((workspace / "log").exists, "the write is on the disk")
        await _counted(stack, DISPATCHES, 2)
        # The second answer is a repetition of the first, and is held too.
        await _counted(stack, APPLIED, 2)
        assert (await client.fault("box", {"do": "release_receipts"}))["released"] >= 2
        outcome = await handle.outcome(timeout_s=PATIENCE_S)
        assert (outcome.state, outcome.attempts) == ("committed", 1)
        assert (workspace / "log").read_text() == "twice\n"
    report = await stack.verify()
    assert (report.violations, report.committed) == ([], 1)


async def test_s195_a_used_id_is_answered_by_the_first_step_also_after_a_kill(
    stack: RunningStack,
) -> None:
    args, undo = appending("once")
    async with await stack.client() as client:
        await client.create_sandbox("box")
        first = await client.step("box", "run_command", args, step="once", compensation=undo)
        assert first.is_ok
    planner = stack.services["planner-1"]
    planner.kill()
    planner.start()
    await planner.ready()
    async with await stack.client() as client:
        again = await client.step(
            "box", "run_command", args, step="once", compensation=undo, timeout_s=PATIENCE_S
        )
        assert (again.state, again.position) == ("committed", first.position)
        with pytest.raises(RefusedError) as raised:
            await client.step(
                "box",
                "run_command",
                {"shell": "echo other >> log"},
                step="once",
                compensation=undo,
                timeout_s=PATIENCE_S,
            )
        assert (raised.value.reason, raised.value.field) == ("id_reused", "step")
        other, undo = appending("other")
        assert (
            await client.step("box", "run_command", other, step="other", compensation=undo)
        ).is_ok, "the control: another id"
        assert await client.read_file("box", "log") == "once\nother\n"
    assert (await stack.verify()).violations == []


async def _counted(stack: RunningStack, metric: str, count: int) -> None:
    """Waits until the gateway has counted so many."""
    url = f"{stack.services['gateway-1'].http_url}/metrics"
    deadline = time.monotonic() + PATIENCE_S
    while True:
        async with httpx.AsyncClient() as http:
            said = (await http.get(url)).text
        found = re.search(re.escape(metric) + " ([0-9.]+)", said)
        if found is not None and float(found[1]) >= count:
            return
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.1)


async def _cancel(client: Client, box: str) -> None:
    """Cancels, again while nobody answers."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            await client.cancel(box, "slow", timeout_s=PATIENCE_S)
        except UnknownError:
            assert time.monotonic() < deadline
        else:
            return


def _sleepers(instance: str) -> list[int]:
    """The processes of a sandbox that sleep for a command."""
    found = []
    for pid in processes.find(processes.INSTANCE, instance):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == b"sleep":
            found.append(pid)
    return found


END_BY = ["cancel", "deadline", "cancel_and_kill_gateway", "cancel_and_kill_planner", "control"]


async def _run_and_end(client: Client, stack: RunningStack, by: str) -> None:
    box = f"box-{by}"
    await client.create_sandbox(box)
    work = Work(stack, client, History(client), box)
    shown = await work.live()
    workspace = work.workspace_of(shown)
    handle = await client.submit(
        box,
        "run_command",
        {"shell": "touch STARTED; sleep 3; touch PROOF"},
        step="slow",
        compensation={"kind": "command", "args": {"argv": ["rm", "-f", "STARTED", "PROOF"]}},
        deadline_ms=1_500 if by == "deadline" else 60_000,
    )
    await until((workspace / "STARTED").exists, "the command runs")
    if by.startswith("cancel"):
        cancelling = asyncio.create_task(_cancel(client, box))
        if by != "cancel":
            name = "gateway-1" if by.endswith("gateway") else "planner-1"
            os.kill(stack.services[name].pid, signal.SIGKILL)
        await cancelling
    outcome = await handle.outcome(timeout_s=PATIENCE_S)
    proof_at_the_end = (workspace / "PROOF").exists()
    assert not _sleepers(shown["instance"])
    if by == "control":
        assert outcome.is_ok
        assert proof_at_the_end
    elif outcome.state == "committed":
        # Who was to hear the cancel was killed, and it came too late: the step is true.
        assert by.startswith("cancel_and"), outcome
        assert proof_at_the_end
    else:
        assert outcome.state in ("indeterminate", "compensated"), outcome
        await asyncio.sleep(3.5)
        assert not (workspace / "PROOF").exists()
    await work.round(f"after-{by}")
    await work.check()


async def test_s184_s198_a_step_is_not_ended_before_its_command_is(stack: RunningStack) -> None:
    """`sleep 3; touch PROOF`: once the step was reported ended, the proof never comes."""
    async with await stack.client() as client, reviving(stack):
        calm = [by for by in END_BY if not by.startswith("cancel_and")]
        await asyncio.gather(*(_run_and_end(client, stack, by) for by in calm))
        for by in END_BY:
            if by not in calm:
                await _run_and_end(client, stack, by)
    assert (await stack.verify()).violations == []
