"""
Real servers for the integration tests: containers where a Docker engine answers, else the wheels'.

`FENCEPOST_TEST_SERVERS` decides, where it is set: `docker`, `wheels`, or `auto`, which starts an
engine where none answers and one can be started. Both forms have `url` (or `dsn`); only the
embedded ones can be killed and started again, so tests that need this ask for `embedded_nats`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fencepost.client.embedded import NatsServer, PostgresServer

from tests import engine as engines
from tests import servers


@pytest.fixture(scope="session")
def any_engine() -> Iterator[engines.Engine | str]:
    """A Docker engine, or the reason why there is none."""
    try:
        started = engines.start()
    except engines.NoEngineError as error:
        yield str(error)
        return
    yield started
    engines.stop(started)


@pytest.fixture(scope="session")
def engine(any_engine: engines.Engine | str) -> engines.Engine:
    """A Docker engine; the test is skipped, with the reason, where none can be had."""
    if isinstance(any_engine, str):
        pytest.skip(f"no Docker engine: {any_engine}")
    return any_engine


@pytest.fixture(scope="session")
def server_engine(request: pytest.FixtureRequest) -> engines.Engine | None:
    """The engine that NATS and PostgreSQL run on, or None: then the wheels' are started."""
    asked = os.environ.get("FENCEPOST_TEST_SERVERS", "")
    assert asked in ("", "auto", "docker", "wheels"), (
        "FENCEPOST_TEST_SERVERS: expected auto, docker or wheels"
    )
    if asked == "wheels":
        return None
    if asked == "":
        return engines.answering()
    found: engines.Engine | str = request.getfixturevalue("any_engine")
    if isinstance(found, engines.Engine):
        return found
    assert asked != "docker", f"FENCEPOST_TEST_SERVERS=docker, and no engine: {found}"
    return None


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
async def nats_server(tmp_path: Path, server_engine: engines.Engine | None) -> AsyncIterator[Any]:
    """A nats-server with JetStream and synced writes; `url`."""
    if server_engine is not None:
        async with servers.nats(server_engine, tmp_path) as url:
            yield servers.Nats(url)
        return
    server = await NatsServer.start(tmp_path / "nats")
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def postgres_server(
    tmp_path: Path, server_engine: engines.Engine | None
) -> AsyncIterator[Any]:
    """A PostgreSQL with an empty database; `dsn`."""
    if server_engine is not None:
        async with servers.postgres(server_engine) as dsn:
            yield servers.Postgres(dsn)
        return
    server = await PostgresServer.start(tmp_path / "postgres")
    try:
        yield server
    finally:
        await server.stop()
