"""A service that cannot start says why in one line, and its exit code says whose the next move is."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fencepost.client.embedded import nats_binary
from fencepost.client.processes import Child, free_port
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.runtime import streams
from fencepost.runtime.link import Link

pytestmark = pytest.mark.budget(60)

REFUSED = 2
HUB = """
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{store}" }}
accounts {{
  HUB {{ jetstream: enabled, users: [
    {{ user: all, password: p }}
    {{ user: few, password: p, permissions: {{ publish: ["_INBOX.>"], subscribe: [">"] }} }}
  ] }}
  BARE {{ users: [ {{ user: bare, password: p }} ] }}
}}
"""


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[str]:
    """A server with a user who may do all, one who may do nothing, one without JetStream."""
    port = free_port()
    config = tmp_path / "nats.conf"
    config.write_text(HUB.format(port=port, store=tmp_path / "store"))
    server = Child.start("nats-server", [nats_binary(), "-c", config], log=tmp_path / "nats.log")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace_s=10)


async def _link(address: str) -> Link:
    async with asyncio.timeout(60):
        return await Link.connect(f"nats://{address}", name="test")


async def test_who_may_not_ask_or_has_no_jetstream_hears_it_soon(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "REFUSED_S", 0.5)
    for user, reason, said in (
        ("few", "denied", r"STREAM.INFO.KV_FP_META: denied: .* do not let few publish"),
        ("bare", "no_jetstream", "bare is in an account without JetStream"),
    ):
        link = await _link(f"{user}:p@{place}")
        async with asyncio.timeout(30):
            with pytest.raises(RefusedError, match=said) as raised:
                await streams.declare_at_start(link, 2, create=True, within_s=600)
        assert raised.value.reason == reason
        await link.close()
    link = await _link(f"all:p@{place}")
    await streams.declare_at_start(link, 2, create=True)
    await link.close()


async def test_a_denial_that_is_healed_in_time_is_none(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The users of a server that is about to read them again."""
    monkeypatch.setattr(streams, "REFUSED_S", 600)
    link = await _link(f"all:p@{place}")
    asked = 0
    declare = streams.declare

    async def denied_at_first(*args: object, **options: object) -> None:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise streams.DeniedError("not yet")
        await declare(link, 2, create=True)

    monkeypatch.setattr(streams, "declare", denied_at_first)
    await streams.declare_at_start(link, 2, create=True, within_s=600)
    assert asked == 3
    await link.close()


async def test_a_server_without_jetstream_is_asked_until_the_time_is_over(tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "nats.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\n')
    server = Child.start("nats-server", [nats_binary(), "-c", config], log=tmp_path / "nats.log")
    try:
        link = await _link(f"127.0.0.1:{port}")
        with pytest.raises(UnknownError, match="Is JetStream switched on") as raised:
            await streams.declare_at_start(link, 2, create=True, within_s=0.5)
        assert not isinstance(raised.value, streams.NoJetStreamError), "a peer may have it"
        await link.close()
    finally:
        await server.stop(grace_s=10)


async def test_a_service_ends_with_one_line_and_a_code(place: str, tmp_path: Path) -> None:
    async def started(module: str, **settings: str) -> tuple[str, int | None, str]:
        environment = {
            **os.environ,
            "FENCEPOST_DATA": str(tmp_path),
            "FENCEPOST_RECEIPT_KEY": "only for these tests",
            "FENCEPOST_LOG_FORMAT": "json",
            **{f"FENCEPOST_{name.upper()}": value for name, value in settings.items()},
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"fencepost.{module}"),
            env=environment,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(process.communicate(), 120)
        return module, process.returncode, said.decode()

    nobody = f"nats://127.0.0.1:{free_port()}"
    found = await asyncio.gather(
        started("planner", nats_url=f"nats://all:wrong@{place}"),
        started("sweeper", nats_url=f"nats://few:p@{place}"),
        started("sandbox_gateway", nats_url=f"tls://all:p@{place}"),
        started("release_tracker", nats_url="nats://a:0"),
        started("planner", nats_url=nobody, receipt_key="short"),
    )
    for (module, code, said), word in zip(
        found,
        (
            "does not take all",
            "do not let few publish",
            "TLS expected",
            "FENCEPOST_NATS_URL: expected a port",
            "FENCEPOST_RECEIPT_KEY: at least 16 characters",
        ),
        strict=True,
    ):
        assert code == REFUSED, (module, said)
        assert "Traceback" not in said, said
        last = said.splitlines()[-1]
        assert word in last
        assert not last.startswith("{")
        assert "wrong" not in said
