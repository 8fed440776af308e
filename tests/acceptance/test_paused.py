"""
Processes that are stopped for longer than anybody waits for them, and then go on (SIGSTOP, SIGCONT).

Who was paused does no harm when it comes back: the fence is on the disk and in the ledger. What
runs afterwards is what must run, and a stop leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import psutil
from fencepost.client.stack import Service
from fencepost.core.sandbox import entries as e

from tests.acceptance.conftest import LEASE_MS, RunningStack, StartStack
from tests.acceptance.walking import PATIENCE_S, History, Work, until


async def _one_box(stack: RunningStack, client: object, name: str = "box") -> Work:
    work = Work(stack, client, History(client), name)  # type: ignore[arg-type]
    await work.client.create_sandbox(name)
    return work


async def _gateway_of(work: Work) -> Service:
    parent = psutil.Process(await work.toolhost()).ppid()
    return next(service for service in work.stack.of("gateway") if service.pid == parent)


async def _only_what_must_run(stack: RunningStack, works: list[Work]) -> None:
    wanted = {service.pid for service in stack.services.values()} | {stack.nats.pid}
    wanted |= {await work.toolhost() for work in works}
    await until(
        lambda: {process.pid for process in stack.processes()} == wanted,
        f"only what must run: {stack.processes()}, not {wanted}",
    )


async def test_s192_a_gateway_paused_past_its_lease_does_nothing_of_what_waited_for_it(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(gateways=2)
    async with await stack.client() as client:
        work = await _one_box(stack, client)
        await work.round("before")
        paused = await _gateway_of(work)
        toolhost = await work.toolhost()
        paused.pause()
        # The calls wait in the paused process's socket; the other gateway takes the sandbox over.
        await work.round("while")
        await work.check()
        shown = await work.live()
        # Its toolhost lives as long as it is paused: two on one disk, of which one may write.
        assert psutil.pid_exists(toolhost)
        paused.resume()
        await work.round("after")
        await work.check()
        assert (await work.live())["session"] == shown["session"], "nobody took it back"
        await until(lambda: not psutil.pid_exists(toolhost), "the former toolhost has ended")
        assert await work.toolhost() != toolhost
        entries = await work.history.of("box")
        sessions = [x.session for x in entries if isinstance(x, e.Attached)]
        assert sessions[-1] == shown["session"]
        assert len(sessions) == 2
        await _only_what_must_run(stack, [work])
    report = await stack.verify()
    assert (report.violations, report.indeterminate) == ([], 0)


async def test_s200_a_command_of_a_paused_gateway_ends_before_another_session_begins(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(gateways=2)
    async with await stack.client() as client:
        work = await _one_box(stack, client)
        workspace = work.workspace_of(await work.live())
        handle = await client.submit(
            "box",
            "run_command",
            {"shell": "while true; do date +%s%N >> TICKS; sleep 0.05; done"},
            step="ticking",
            compensation={"kind": "command", "args": {"argv": ["rm", "-f", "TICKS"]}},
        )
        await until((workspace / "TICKS").exists, "the command runs")
        paused = await _gateway_of(work)
        paused.pause()
        outcome = await handle.outcome(timeout_s=PATIENCE_S)
        assert outcome.state == "indeterminate", outcome
        ticks = (workspace / "TICKS").read_text()
        paused.resume()
        await work.round("after")
        await asyncio.sleep(0.3)
        assert (workspace / "TICKS").read_text() == ticks
        await work.check()
        await _only_what_must_run(stack, [work])
    assert (await stack.verify()).violations == []


async def test_a_toolhost_paused_past_the_lease_is_ended_and_replaced(stack: RunningStack) -> None:
    async with await stack.client() as client:
        work = await _one_box(stack, client)
        await work.round("before")
        toolhost = await work.toolhost()
        os.kill(toolhost, signal.SIGSTOP)
        await work.round("while")
        await work.check()
        await until(lambda: not psutil.pid_exists(toolhost), "the paused toolhost was ended")
        with contextlib.suppress(ProcessLookupError):
            os.kill(toolhost, signal.SIGCONT)
        await _only_what_must_run(stack, [work])
    assert (await stack.verify()).violations == []


async def test_a_server_paused_past_every_lease_costs_no_step(start_stack: StartStack) -> None:
    """To everybody else this is a partition: nobody can renew, nobody can append."""
    stack = await start_stack(planners=2, gateways=2)
    async with await stack.client() as client:
        works = [await _one_box(stack, client, f"box-{number}") for number in range(3)]
        working = asyncio.gather(*(work.round(f"{work.box}-a") for work in works))
        await asyncio.sleep(0.05)
        stack.nats.child.send(signal.SIGSTOP)
        await asyncio.sleep(3 * LEASE_MS / 1000)
        stack.nats.child.send(signal.SIGCONT)
        await working
        await asyncio.gather(*(work.round(f"{work.box}-b") for work in works))
        for work in works:
            await work.check()
        await _only_what_must_run(stack, works)
    assert (await stack.verify()).violations == []


async def test_everything_paused_and_resumed_in_another_order(start_stack: StartStack) -> None:
    stack = await start_stack(planners=2, gateways=2)
    async with await stack.client() as client:
        works = [await _one_box(stack, client, f"box-{number}") for number in range(3)]
        working = asyncio.gather(*(work.round(f"{work.box}-a") for work in works))
        await asyncio.sleep(0.02)
        order = ["planner-1", "gateway-1", "planner-2", "gateway-2"]
        for name in order:
            stack.services[name].pause()
            await asyncio.sleep(0.1)
        await asyncio.sleep(2 * LEASE_MS / 1000)
        for name in reversed(order):
            stack.services[name].resume()
            await asyncio.sleep(0.3)
        await working
        for work in works:
            await work.check()
        await _only_what_must_run(stack, works)
    assert (await stack.verify()).violations == []


async def test_a_stop_leaves_nothing_of_paused_services_and_running_commands(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(gateways=2)
    async with await stack.client() as client:
        works = [await _one_box(stack, client, f"box-{number}") for number in range(2)]
        for work in works:
            workspace = work.workspace_of(await work.live())
            await client.submit(
                work.box,
                "run_command",
                {"shell": "touch STARTED; setsid sleep 300 & sleep 300"},
                step="long",
                compensation={"kind": "command", "args": {"argv": ["true"]}},
            )
            await until((workspace / "STARTED").exists, "the command runs")
        instances = {(await work.live())["instance"] for work in works}
        stack.services["gateway-1"].pause()
    await stack.stop()
    await until(lambda: not stack.processes(), "nothing of the stack runs")
    assert not _with(instances)


def _with(instances: set[str]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("FENCEPOST_INSTANCE") in instances:
                found.append(process)
    return found
