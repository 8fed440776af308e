"""Real nats-server, real provider, real toolhost; the gateway's session runs in the test's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fencepost.client.embedded import NatsServer
from fencepost.providers.process import ProcessProvider
from fencepost.runtime import streams
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import GatewayMetrics
from fencepost.sandbox_gateway.blobs import NatsBlobs
from fencepost.sandbox_gateway.session import GatewaySession, Options

from tests.integration.sandbox_gateway.control import MASTER, SHARDS, Control, wait_for


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = await NatsServer.start(tmp_path / "nats", sync_always=False)
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def control(nats: NatsServer) -> AsyncIterator[Control]:
    link = await Link.connect(nats.url, name="control")
    try:
        await streams.declare(link, SHARDS, create=True)
        yield await Control(link).listen()
    finally:
        await link.close()


class PausableClock:
    """A monotonic clock that a test can move on, as it moves for a stopped process."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self.ahead_ms = 0

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ms() + self.ahead_ms


class Running:
    """One gateway session in this process."""

    def __init__(self, session: GatewaySession, link: Link, metrics: GatewayMetrics) -> None:
        self.session = session
        self.link = link
        self.metrics = metrics
        self.stopping = asyncio.Event()
        self.clock: Any = session._clock
        self.task = asyncio.create_task(session.run(self.stopping))

    @property
    def id(self) -> str:
        return self.session.id

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"fencepost_{name}", labels) or 0.0

    async def stop(self) -> str:
        self.stopping.set()
        return await self.task


StartGateway = Callable[..., Awaitable[Running]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sandboxes"


@pytest.fixture
async def start_gateway(
    nats: NatsServer, control: Control, root: Path
) -> AsyncIterator[StartGateway]:
    started: list[Running] = []

    async def start(*, isolate: bool = True, **options: Any) -> Running:
        link = await Link.connect(nats.url, name="gateway")
        metrics = GatewayMetrics()
        settings = {"shards": SHARDS, "master": MASTER, "heartbeat_ms": 200, "allow_faults": True}
        heartbeat_ms = options.get("heartbeat_ms", 200)
        provider = ProcessProvider(root, isolate=isolate, heartbeat_ms=heartbeat_ms)
        session = GatewaySession(
            link,
            providers={"process": provider},
            options=Options(**{**settings, **options}),
            clock=PausableClock(),
            metrics=metrics,
            blob_store=NatsBlobs(link),
        )
        running = Running(session, link, metrics)
        started.append(running)
        await wait_for(
            lambda: any(seen.gateway == session.id for seen in control.seen), "a session"
        )
        return running

    try:
        yield start
    finally:
        for running in started:
            await running.stop()
            await running.link.close()


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> Running:
    return await start_gateway()
