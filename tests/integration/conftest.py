"""
Real servers for the integration tests: containers where a Docker engine answers, else the wheels'.

Both forms have `url` (or `dsn`); only the embedded ones can be killed and started again, so tests
that need this ask for `embedded_nats`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fencepost.client.embedded import NatsServer, PostgresServer


def docker_answers() -> bool:
    """Tells whether a Docker engine can be used here."""
    if os.environ.get("FENCEPOST_TESTS_EMBEDDED") == "1" or shutil.which("docker") is None:
        return False
    found = subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=20)
    return found.returncode == 0


DOCKER = docker_answers()


class _Nats:
    def __init__(self, url: str) -> None:
        self.url = url


class _Postgres:
    def __init__(self, dsn: str) -> None:
        self.dsn = dsn


@pytest.fixture
async def embedded_nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A nats-server of this test's own, which it may kill and start again."""
    server = await NatsServer.start(tmp_path / "nats")
    try:
        yield server
    finally:
        if server.is_running:
            await server.stop()


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[Any]:
    """A nats-server with JetStream and synced writes; `url`."""
    if not DOCKER:
        server = await NatsServer.start(tmp_path / "nats")
        try:
            yield server
        finally:
            await server.stop()
        return
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    container = (
        DockerContainer("nats:2.12-alpine")
        .with_command("-js")
        .with_exposed_ports(4222)
        .waiting_for(LogMessageWaitStrategy("Server is ready"))
    )
    await asyncio.to_thread(container.start)
    try:
        port = container.get_exposed_port(4222)
        yield _Nats(f"nats://{container.get_container_host_ip()}:{port}")
    finally:
        await asyncio.to_thread(container.stop)


@pytest.fixture
async def postgres_server(tmp_path: Path) -> AsyncIterator[Any]:
    """A PostgreSQL with an empty database; `dsn`."""
    if not DOCKER:
        server = await PostgresServer.start(tmp_path / "postgres")
        try:
            yield server
        finally:
            await server.stop()
        return
    from testcontainers.postgres import PostgresContainer

    container = PostgresContainer("postgres:16-alpine", driver=None)
    await asyncio.to_thread(container.start)
    try:
        yield _Postgres(container.get_connection_url())
    finally:
        await asyncio.to_thread(container.stop)
