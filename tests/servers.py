"""NATS and PostgreSQL as containers, by testcontainers, for tests that only need a server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from tests.engine import NATS, POSTGRES, Engine

START_S = 60.0
PASSWORD = "only-for-tests"
_CONFIG = """\
listen: "0.0.0.0:4222"
max_payload: 1MB
max_pending: 256MB
jetstream { store_dir: "/data", max_memory_store: 1GB, sync_interval: always }
"""


@dataclass(frozen=True)
class Nats:
    url: str


@dataclass(frozen=True)
class Postgres:
    dsn: str


@asynccontextmanager
async def nats(engine: Engine, folder: Path) -> AsyncIterator[str]:
    """A nats-server that syncs before it acknowledges, as deployments must; its URL."""
    config = folder / "nats.conf"
    config.write_text(_CONFIG)
    with _environment(engine):
        from testcontainers.core.container import DockerContainer

        container = (
            DockerContainer(NATS)
            .with_command("nats-server --config /etc/nats/fencepost.conf")
            .with_volume_mapping(str(config), "/etc/nats/fencepost.conf", "ro")
            .with_exposed_ports(4222)
        )
        async with _running(container, 4222, _nats_answers) as place:
            yield f"nats://{place}"


@asynccontextmanager
async def postgres(engine: Engine) -> AsyncIterator[str]:
    """A PostgreSQL with the empty database `fencepost`; its DSN."""
    with _environment(engine):
        from testcontainers.core.container import DockerContainer

        container = (
            DockerContainer(POSTGRES)
            .with_env("POSTGRES_USER", "fencepost")
            .with_env("POSTGRES_PASSWORD", PASSWORD)
            .with_env("POSTGRES_DB", "fencepost")
            .with_exposed_ports(5432)
        )
        async with _running(container, 5432, _postgres_answers) as place:
            yield f"postgresql://fencepost:{PASSWORD}@{place}/fencepost"


@contextmanager
def _environment(engine: Engine) -> Iterator[None]:
    """testcontainers reads the engine's address and its own settings from the environment."""
    from testcontainers.core import config

    before = os.environ.get("DOCKER_HOST")
    os.environ["DOCKER_HOST"] = engine.host
    config.testcontainers_config.ryuk_disabled = True
    try:
        yield
    finally:
        if before is None:
            del os.environ["DOCKER_HOST"]
        else:
            os.environ["DOCKER_HOST"] = before


@asynccontextmanager
async def _running(
    container: Any, port: int, answers: Callable[[str], Awaitable[bool]]
) -> AsyncIterator[str]:
    try:
        await asyncio.to_thread(container.start)
        host = await asyncio.to_thread(container.get_container_host_ip)
        place = f"{host}:{await asyncio.to_thread(container.get_exposed_port, port)}"
        until = asyncio.get_running_loop().time() + START_S
        while not await answers(place):
            if asyncio.get_running_loop().time() > until:
                raise AssertionError(f"no answer within {START_S:.0f} s: {container.get_logs()}")
            await asyncio.sleep(0.02)
        yield place
    finally:
        await asyncio.to_thread(container.stop)
        container.get_docker_client().client.close()


async def _nats_answers(place: str) -> bool:
    """A published port takes connections before the server does: only its greeting counts."""
    host, _, port = place.rpartition(":")
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                line = await reader.readline()
            finally:
                writer.close()
        return bool(json.loads(line.removeprefix(b"INFO ") or b"{}").get("jetstream"))
    except (OSError, ValueError, TimeoutError):
        return False


async def _postgres_answers(place: str) -> bool:
    dsn = f"postgresql://fencepost:{PASSWORD}@{place}/fencepost"
    try:
        connection = await asyncpg.connect(dsn, timeout=2.0)
        await connection.close()
    except (OSError, TimeoutError, asyncpg.PostgresError):
        return False
    return True
