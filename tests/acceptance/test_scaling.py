"""Planners are added and taken away under load: shards move in seconds, and no step is lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import pytest
from fencepost.client import Client
from fencepost.client.outcome import StepOutcome
from fencepost.client.stack import STOP_S_MAX, Service
from fencepost.core.sandbox import entries as e

from tests.acceptance.conftest import RunningStack, StartStack
from tests.acceptance.test_takeover import owners, spread
from tests.acceptance.walking import LOG, PATIENCE_S, History, Work, appending

BOXES = 8
MOVED_S_MAX = 20.0
"""Generous: a loaded machine starts a process in seconds."""


class Load:
    """Each sandbox gets step after step, the next once the last was answered, until it is told."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self.outcomes: dict[str, list[StepOutcome]] = {}
        self.longest_s = 0.0

    def start(self, boxes: list[str]) -> None:
        self._tasks = [asyncio.create_task(self._run(box)) for box in boxes]

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    @property
    def count(self) -> int:
        return sum(map(len, self.outcomes.values()))

    async def more(self, number: int = 4 * BOXES) -> None:
        """Waits until so many more steps were answered."""
        wanted = self.count + number
        async with asyncio.timeout(PATIENCE_S):
            while self.count < wanted:
                await asyncio.sleep(0.02)

    async def _run(self, box: str) -> None:
        done = self.outcomes.setdefault(box, [])
        while not self._is_over:
            step = f"{box}-{len(done)}"
            args, undo = appending(step)
            asked_at = time.monotonic()
            handle = await self._client.submit(
                box, "run_command", args, step=step, compensation=undo
            )
            done.append(await handle.outcome(timeout_s=PATIENCE_S))
            self.longest_s = max(self.longest_s, time.monotonic() - asked_at)


async def moved(client: Client, planners: int, act: Callable[[], None]) -> float:
    """Acts, and waits until this many planners share all shards evenly. Gives the seconds."""
    started = time.monotonic()
    act()
    await spread(client, planners)
    return time.monotonic() - started


async def terminated(service: Service) -> float:
    started = time.monotonic()
    assert await service.stop() == 0, "it ended by itself, not by the SIGKILL that follows"
    return time.monotonic() - started


async def check(stack: RunningStack, client: Client, load: Load) -> None:
    history = History(client)
    for box, outcomes in load.outcomes.items():
        work = Work(stack, client, history, box)
        log = work.workspace_of(await work.live()) / LOG
        # No session was lost, so nothing is unknown, and nothing was taken back.
        assert {(x.state, x.outcome, x.attempts) for x in outcomes} == {("committed", "ok", 1)}
        steps = [x.step for x in outcomes]
        assert log.read_text().split() == steps
        ends = Counter(x.step for x in await history.of(box) if isinstance(x, e.Committed))
        assert ends == Counter(steps)


@pytest.mark.timeout(240)
@pytest.mark.budget(90)
async def test_planners_come_and_go_under_load_and_every_step_commits_once(
    start_stack: StartStack,
) -> None:
    stack = await start_stack()
    async with await stack.client() as client:
        boxes = [f"box-{number}" for number in range(BOXES)]
        await asyncio.gather(*(client.create_sandbox(box) for box in boxes))
        load = Load(client)
        load.start(boxes)
        took: dict[str, float] = {}
        for planners in (2, 3):
            fresh = stack.add("planner")
            took[f"to_{planners}"] = await moved(client, planners, fresh.start)
            await load.more()
        # SIGTERM hands over: the others need not wait until it counts as dead.
        for planners, name in ((2, "planner-1"), (1, "planner-2")):
            took[f"sigterm_{name}"] = await terminated(stack.services[name])
            assert took[f"sigterm_{name}"] < STOP_S_MAX
            took[f"to_{planners}_again"] = await moved(client, planners, lambda: None)
            await load.more()
        # As `docker-compose restart planner` does: the last one ends, and comes again.
        only = stack.services["planner-3"]
        former = {batch.owner for batch in (await owners(client)).values()}
        took["sigterm_last"] = await terminated(only)
        only.start()
        async with asyncio.timeout(PATIENCE_S):
            while {batch.owner for batch in (await owners(client)).values()} & former:
                await asyncio.sleep(0.05)
        await load.more()
        await load.stop()
        print({name: round(seconds, 2) for name, seconds in took.items()})  # shown with -rP
        print(f"{load.count} steps, the longest took {load.longest_s:.2f} s")
        assert all(seconds < MOVED_S_MAX for seconds in took.values()), took
        await check(stack, client, load)
    report = await stack.verify()
    assert report.violations == []
    assert report.committed == load.count
