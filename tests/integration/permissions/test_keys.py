"""Users by nkey and by JWT: the same accounts and grants, and no password anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
from pathlib import Path

import httpx
import pytest
from fencepost.client import users
from fencepost.client.client import Client
from fencepost.client.embedded import NatsServer
from fencepost.client.processes import free_port
from fencepost.contracts import authorization, grants, subjects
from fencepost.contracts.grants import Role
from fencepost.core.errors import RefusedError
from fencepost.runtime import access, streams
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import DeniedError, Link
from fencepost.runtime.ports import Absent, Unknown
from nats.aio.msg import Msg

from tests.integration.permissions import claims

SHARDS = 2


async def _link(server: NatsServer, credentials: Path) -> Link:
    async with asyncio.timeout(60):
        return await Link.connect(server.url, name="test", access=access.read(str(credentials)))


async def _holds(server: NatsServer, credentials: dict[Role, Path]) -> None:
    """What the grants give is had, across accounts, and nothing else."""
    operator = await _link(server, credentials["operator"])
    await streams.declare_at_start(operator, SHARDS, create=True)
    planner = await _link(server, credentials["planner"])
    await streams.declare_at_start(planner, SHARDS, create=False)
    sweeper = await _link(server, credentials["sweeper"])
    head = subjects.ledger("sandbox", 0)
    assert isinstance(await JetStreamLog(planner).last(head), Absent)
    assert isinstance(await JetStreamLog(sweeper).last(head), Unknown)
    # Core messages between accounts, and a request with its answer.
    heard = asyncio.get_running_loop().create_future()
    await planner.subscribe_raw(subjects.GATEWAY_SEEN, heard.set_result)

    def answer(message: Msg) -> None:
        planner.publish(message.reply, b"y")

    await planner.subscribe_raw(f"{subjects.PREFIX}.ask.0", answer)
    await planner.flush()
    gateway = await _link(server, credentials["gateway"])
    gateway.publish(subjects.GATEWAY_SEEN, b"{}")
    await asyncio.wait_for(heard, 30)
    assert (await sweeper.call(f"{subjects.PREFIX}.ask.0", b"", timeout_s=30)).data == b"y"
    with pytest.raises(DeniedError, match=r"do not let .*gateway"):
        await gateway.call(head, b"x", timeout_s=600)
    async with await Client.connect(
        server.url, user=access.read(str(credentials["client"]))
    ) as client:
        assert client.shards == SHARDS
    for link in (operator, planner, sweeper, gateway):
        await link.close()


async def _serves(server: NatsServer, credentials: Path, data: Path) -> None:
    """A service's both connections take them: its own, and its control connection."""
    port = free_port()
    environment = {
        **os.environ,
        "FENCEPOST_NATS_URL": server.url,
        "FENCEPOST_NATS_CREDENTIALS": str(credentials),
        "FENCEPOST_SHARDS": str(SHARDS),
        "FENCEPOST_RECEIPT_KEY": "only for these tests",
        "FENCEPOST_HTTP_PORT": str(port),
        "FENCEPOST_DATA": str(data),
        "FENCEPOST_LOG_FORMAT": "json",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fencepost.planner"),
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    said: list[str] = []

    async def read() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            said.append(line.decode())

    reading = asyncio.create_task(read())
    try:
        async with asyncio.timeout(100), httpx.AsyncClient() as http:
            while True:
                assert process.returncode is None, said
                with contextlib.suppress(httpx.TransportError):
                    answer = await http.get(f"http://127.0.0.1:{port}/readyz")
                    if answer.status_code == 200:
                        break
                await asyncio.sleep(0.1)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0, said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading
    assert not [line for line in said if "denied" in line or "refused" in line]


async def test_users_with_nkeys(tmp_path: Path) -> None:
    folder = tmp_path / "nats"
    credentials = users.make(folder, secrets_folder=tmp_path / "secrets", nkeys=True)
    (folder / users.AUTHORIZATION).write_text(authorization.render(users=users.USERS, nkeys=True))
    told = (folder / users.USERS).read_text() + (folder / users.AUTHORIZATION).read_text()
    for path in credentials.values():
        assert path.read_text().strip() not in told, "the server has public halves alone"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server = await NatsServer.start(
        folder, sync_always=False, extra_config=f"include ./{users.AUTHORIZATION}"
    )
    try:
        await _holds(server, credentials)
        await _serves(server, credentials["planner"], tmp_path)
        stranger = users.make(tmp_path / "other", nkeys=True)["planner"]
        with pytest.raises(RefusedError, match="does not take"):
            await _link(server, stranger)
    finally:
        await server.stop()


def test_users_of_one_kind_are_not_made_into_the_other(tmp_path: Path) -> None:
    first = users.make(tmp_path, nkeys=True)["planner"].read_bytes()
    with pytest.raises(RefusedError, match="users of the other kind"):
        users.make(tmp_path)
    assert users.make(tmp_path, nkeys=True)["planner"].read_bytes() == first, "made once"


async def test_users_with_jwts_of_an_operator(tmp_path: Path) -> None:
    operator = claims.Operator()
    credentials = {
        role: claims.credentials(tmp_path / f"{role}.creds", *operator.user(role))
        for role in grants.ROLES
    }
    server = await NatsServer.start(
        tmp_path / "nats", sync_always=False, extra_config=operator.configuration()
    )
    try:
        await _holds(server, credentials)
        await _serves(server, credentials["planner"], tmp_path)
        token, seed = operator.user("planner")
        stranger, other_seed = claims.Operator().user("planner")
        for name, wrong in (
            ("another_operator", (stranger, other_seed)),
            ("another_seed", (token, other_seed)),
        ):
            with pytest.raises(RefusedError, match="does not take"):
                await _link(server, claims.credentials(tmp_path / name, *wrong))
        link = await _link(server, claims.credentials(tmp_path / "control", token, seed))
        # The connection comes back by the file, after the server was started again.
        back = asyncio.Event()
        link.on_back(back.set)
        await server.restart()
        await asyncio.wait_for(back.wait(), 60)
        await link.close()
    finally:
        await server.stop()
