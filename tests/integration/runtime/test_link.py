"""The link tells what the client library keeps to itself."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import certifi
import pytest
from fencepost.client.embedded import NatsServer, nats_binary
from fencepost.client.processes import Child, free_port
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.runtime.access import Access
from fencepost.runtime.link import Link
from nats.aio.msg import Msg

from tests.contracts import until

DENYING = """
authorization {
  users = [ { user: u, password: p, permissions: {
    publish: { allow: ["allowed.>", "_INBOX.>"] }, subscribe: { allow: [">"] } } } ]
}
"""


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def test_a_denied_publish_is_heard_of(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path, sync_always=False, extra_config=DENYING)
    try:
        denied: list[str] = []
        url = server.url.replace("nats://", "nats://u:p@")
        link = await Link.connect(url, name="test", on_denied=denied.append)
        link.publish("allowed.x", b"1")
        await link.flush()
        assert denied == []
        link.publish("forbidden.x", b"1")
        await until(lambda: len(denied) == 1)
        assert "forbidden.x" in denied[0]
        await link.close()
    finally:
        await server.stop()


async def test_nothing_is_said_in_the_open_where_encryption_was_asked_for(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path / "nats", sync_always=False, extra_config=DENYING)
    authority = ssl.get_default_verify_paths().cafile or certifi.where()
    try:
        address = f"127.0.0.1:{server.port}"
        for url, access in (
            (f"tls://u:p@{address}", None),
            (f"nats://u:p@{address}", Access(ca=authority)),
            (f"nats://{address}", Access(user="u", password="p", ca=authority)),
        ):
            async with asyncio.timeout(60):
                with pytest.raises(RefusedError, match="TLS expected"):
                    await Link.connect(url, name="test", access=access)
        link = await Link.connect(f"nats://u:p@{address}", name="test")
        assert link.is_connected, "the control"
        await link.close()
    finally:
        await server.stop()
    assert "authentication error" not in (tmp_path / "nats" / "nats.log").read_text()


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_a_user_in_the_address_and_several_servers_and_ipv6(tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "nats.conf"
    config.write_text(
        f'listen: "[::1]:{port}"\nauthorization {{ user: "a@b", password: "p,:/ %" }}\n'
    )
    server = Child.start("nats-server", [nats_binary(), "-c", config], log=tmp_path / "nats.log")
    nobody = f"127.0.0.1:{free_port()}"
    user = "a%40b:p%2C%3A%2F%20%25"
    try:
        for url in (f"nats://{user}@[::1]:{port}", f"{nobody},nats://{user}@[::1]:{port}"):
            async with asyncio.timeout(60):
                link = await Link.connect(url, name="test")
            assert link.user == "a@b"
            await link.close()
        async with asyncio.timeout(60):
            with pytest.raises(RefusedError, match="does not take a@b") as raised:
                await Link.connect(f"nats://a%40b:wrong@[::1]:{port}", name="test")
        assert "wrong" not in str(raised.value)
    finally:
        await server.stop(grace_s=10)


async def test_what_is_too_large_for_the_server_does_not_cost_the_connection(
    tmp_path: Path,
) -> None:
    server = await NatsServer.start(tmp_path, sync_always=False)
    try:
        link = await Link.connect(server.url, name="test")
        lost: list[str] = []
        link.on_lost(lambda: lost.append("lost"))

        def answer(message: Msg) -> None:
            link.publish(message.reply, b"yes")

        await link.subscribe_raw("echo", answer)
        limit = link.nc.max_payload
        with pytest.raises(RefusedError, match=f"at most {limit} bytes") as raised:
            await link.call("echo", b"x" * (limit + 1), timeout_s=60)
        assert raised.value.reason == "too_large"
        got = await link.call("echo", b"x" * limit, timeout_s=60)
        assert got.data == b"yes", "the control"
        assert not lost
        await link.close()
    finally:
        await server.stop()


async def test_a_raising_handler_does_not_end_the_connection(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path, sync_always=False)
    try:
        link = await Link.connect(server.url, name="test")
        heard: list[bytes] = []

        def take(msg: object) -> None:
            heard.append(msg.data)  # type: ignore[attr-defined]
            raise ValueError("not this one")

        await link.subscribe_raw("a", take)
        await link.flush()
        link.publish("a", b"1")
        link.publish("a", b"2")
        await until(lambda: heard == [b"1", b"2"])
        assert link.is_connected
        await link.close()
    finally:
        await server.stop()


async def test_a_waiting_call_ends_when_the_connection_is_lost(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path, sync_always=False)
    link = await Link.connect(server.url, name="test")
    await link.subscribe_raw("silent", lambda _msg: None)
    calling = asyncio.create_task(link.call("silent", b"", timeout_s=60))
    await link.flush()
    assert not calling.done()
    server.kill()
    with pytest.raises(UnknownError):
        await asyncio.wait_for(calling, 20)
    assert link._answers == {}
    await link.close()


async def test_what_is_published_while_away_goes_out_later_in_order(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path, sync_always=False)
    link = await Link.connect(server.url, name="test")
    heard: list[int] = []
    await link.subscribe_raw("n", lambda msg: heard.append(int(msg.data)))
    server.kill()
    await until(lambda: not link.is_connected)
    for number in range(200):
        assert link.publish("n", b"%d" % number)
    await server.restart()
    await until(lambda: len(heard) == 200)
    assert heard == list(range(200))
    for number in range(200, 400):
        link.publish("n", b"%d" % number)
    await until(lambda: len(heard) == 400)
    assert heard == list(range(400))
    await link.close()
    await server.stop()
