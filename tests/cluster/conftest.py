"""
The `world` of these tests: three nats-servers, streams at R3, the four services, PostgreSQL.

    async with judged(world) as load: ...   # agents work; afterwards everything must settle and hold

One world serves a whole module, since each takes seconds to start; it runs on the module's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fencepost.client import Client

from scripts.chaos import checks
from scripts.chaos.settling import Settling
from scripts.chaos.workload import Workload
from scripts.chaos.world import Shape, World

SHAPE = Shape(
    planners=2,
    gateways=2,
    is_cluster=True,
    has_disks=False,
    has_power=False,
    has_proxies=False,
)


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """How often each fault strikes: once, or with `--long` again and again."""
    return 8 if request.config.getoption("--long") else 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-cluster-"))
    folder.chmod(0o755)
    world = await World.open(folder, SHAPE)
    try:
        yield world
    finally:
        await world.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(loop_scope="module")
async def client(world: World) -> AsyncIterator[Client]:
    async with await Client.connect(world.nats_url, name="test", wait_s=30) as client:
        yield client


class Load:
    """Agents at work, and how many of their steps were told as committed so far."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    @property
    def committed(self) -> int:
        return self._workload.told.states()["committed"]

    async def goes_on(self, *, seconds: float = 90) -> None:
        """Waits until a few more steps were committed."""
        goal = self.committed + 5
        async with asyncio.timeout(seconds):
            while self.committed < goal:
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def judged(world: World, client: Client, name: str) -> AsyncIterator[Load]:
    """Lets agents work, then settles everything and compares what they were told with what is."""
    workload = Workload(world, client, seed=1, name=name)
    await workload.start(boxes=3, dags=1)
    load = Load(workload)
    await load.goes_on()
    try:
        yield load
    finally:
        # Before `stop`, since an agent may wait for what only a healed world can give.
        await world.heal()
        await workload.stop()
    settling = Settling(world, client, workload)
    await settling.run()
    assert settling.stuck == []
    found = await checks.check(world, client, workload.told)
    assert found.problems == []
    assert found.on_disk > 0
    assert workload.told.states()["committed"] == load.committed
