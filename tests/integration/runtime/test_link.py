"""The link tells what the client library keeps to itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fencepost.client.embedded import NatsServer
from fencepost.core.errors import UnknownError
from fencepost.runtime.link import Link

from tests.contracts import until

DENYING = """
authorization {
  users = [ { user: u, password: p, permissions: {
    publish: { allow: ["allowed.>", "_INBOX.>"] }, subscribe: { allow: [">"] } } } ]
}
"""


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
