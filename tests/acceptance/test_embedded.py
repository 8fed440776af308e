"""The embedded servers: ours and no other, on the same data again, gone with their parent."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import nats
import psutil
import pytest
from fencepost.client import embedded
from fencepost.client.embedded import NatsServer, PostgresServer
from fencepost.client.processes import PORT_FIRST, PORT_LAST, Child, StartError, free_port
from fencepost.client.stack import Stack

from tests.contracts import until


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fencepost-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


async def _stored(url: str) -> int:
    connection = await nats.connect(url)
    try:
        return (await connection.jetstream().stream_info("KEPT")).state.messages
    finally:
        await connection.close()


async def test_a_killed_nats_server_has_what_it_acknowledged(folder: Path) -> None:
    server = await NatsServer.start(folder)
    try:
        connection = await nats.connect(server.url)
        await connection.jetstream().add_stream(name="KEPT", subjects=["kept"])
        await connection.jetstream().publish("kept", b"x")
        await connection.close()
        before = (server.pid, server.url)
        server.kill()
        await server.restart()
        assert server.url == before[1]
        assert server.pid != before[0]
        assert await _stored(server.url) == 1
    finally:
        await server.stop()


async def test_another_servers_port_is_not_taken_for_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await NatsServer.start(folder / "first")
    try:
        with pytest.raises(StartError, match="address already in use"):
            await NatsServer.start(folder / "second", port=first.port)
        # And one that answers on the port while ours does not even try to: not ours either.
        monkeypatch.setattr(embedded, "START_S_MAX", 0.5)
        monkeypatch.setattr(embedded, "nats_binary", lambda: Path("/bin/sleep"))
        with pytest.raises(StartError):
            await NatsServer.start(folder / "third", port=first.port)
        assert first.is_running
    finally:
        await first.stop()


async def test_postgres_starts_again_on_its_data_after_a_kill(folder: Path) -> None:
    server = await PostgresServer.start(folder / "data")
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("CREATE TABLE kept (x int)")
    await connection.close()
    server.kill()
    again = await PostgresServer.start(folder / "data")
    try:
        connection = await asyncpg.connect(again.dsn)
        assert await connection.fetchval("SELECT count(*) FROM kept") == 0
        await connection.close()
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(again.dsn.replace("fencepost:", "fencepost:x"))
    finally:
        await again.stop()
    assert not again.is_running


async def test_a_killed_postgres_is_started_again_where_it_was(folder: Path) -> None:
    stack, told = Stack(folder / "data", shards=1), list[str]()
    await stack._start_servers(0, sync_always=False, postgres=True)
    try:
        first = stack.postgres
        assert first is not None
        stack.supervise(told.append)
        first.kill()
        await until(lambda: stack.postgres is not first)
        assert stack.postgres is not None
        assert stack.postgres.dsn == first.dsn
        await (await asyncpg.connect(first.dsn)).close()
        assert told[0].startswith("PostgreSQL ended with -9")
    finally:
        await stack.stop()


async def test_postgres_runs_in_a_folder_that_its_user_cannot_reach(folder: Path) -> None:
    (folder / "closed").mkdir(mode=0o700)
    data = folder / "closed" / "data"
    for _ in range(2):
        server = await PostgresServer.start(data)
        try:
            connection = await asyncpg.connect(server.dsn)
            assert await connection.fetchval("SELECT 1") == 1
            await connection.execute("CREATE TABLE IF NOT EXISTS kept (x int)")
            await connection.close()
        finally:
            await server.stop()
    assert (data / "cluster" / "PG_VERSION").exists()


PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from fencepost.client.embedded import NatsServer
from fencepost.client.processes import Child
async def main():
    server = await NatsServer.start(Path(sys.argv[1]))
    child = Child.start("sleep", ["sleep", "600"], log=Path(sys.argv[1]) / "sleep.log")
    print(server.pid, child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_children_end_with_a_killed_parent(folder: Path, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        line = await asyncio.to_thread(parent.stdout.readline)
        children = [psutil.Process(int(pid)) for pid in line.split()]
        assert len(children) == 2
        parent.send_signal(number)
        parent.wait(10)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


async def test_a_program_that_cannot_start_says_why(folder: Path) -> None:
    with pytest.raises(StartError, match="cannot be started"):
        Child.start("none", [folder / "none"], log=folder / "log")
    child = Child.start("false", ["sh", "-c", "echo why >&2; exit 3"], log=folder / "log")
    assert await child.wait(10) == 3
    assert child.tail() == "why"


async def test_a_stopped_child_ends_although_it_is_paused(folder: Path) -> None:
    child = Child.start("sleep", ["sleep", "600"], log=folder / "log")
    child.send(signal.SIGSTOP)
    assert await child.stop() == -signal.SIGTERM


async def test_a_port_that_is_found_can_be_bound() -> None:
    port = free_port()
    assert PORT_FIRST <= port <= PORT_LAST
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
