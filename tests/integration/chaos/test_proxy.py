"""The proxy of `make chaos` does to a connection what it says, and nothing when it passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from scripts.chaos.proxy import Proxy


class Echo:
    """A server that says everything back, and counts what reached it."""

    def __init__(self) -> None:
        self.got = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1024):
                self.got += data
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    proxy = Proxy("test", server.sockets[0].getsockname()[1])
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
        server.close()


class Through:
    """A connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, proxy: Proxy) -> Through:
        return cls(*await asyncio.open_connection("127.0.0.1", proxy.port))

    async def said_back(self, data: bytes, *, seconds: float = 20) -> bytes:
        """What comes back, as much as was sent, or b"" at the end of the connection."""
        self.writer.write(data)
        async with asyncio.timeout(seconds):
            try:
                return await self._reader.readexactly(len(data))
            except (OSError, asyncio.IncompleteReadError):
                return b""

    async def is_silent(self, data: bytes) -> bool:
        self.writer.write(data)
        try:
            async with asyncio.timeout(0.3):
                await self._reader.readexactly(1)
        except TimeoutError:
            return True
        return False


async def test_everything_passes_and_nothing_is_changed(proxy: Proxy) -> None:
    through = await Through.open(proxy)
    data = bytes(range(256)) * 400
    assert await through.said_back(data) == data
    through.writer.close()


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_what_is_stalled_goes_on_afterwards(proxy: Proxy, direction: str, echo: Echo) -> None:
    through = await Through.open(proxy)
    assert await through.said_back(b"one") == b"one"
    proxy.set("stall", direction)  # type: ignore[arg-type]
    assert await through.is_silent(b"two")
    assert echo.got == (b"one" if direction == "up" else b"onetwo")
    proxy.heal()
    assert await through.said_back(b"") == b""
    async with asyncio.timeout(20):
        assert await through._reader.readexactly(3) == b"two"
    through.writer.close()


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_what_was_dropped_is_followed_by_a_cut(proxy: Proxy, direction: str) -> None:
    through = await Through.open(proxy)
    proxy.set("drop", direction)  # type: ignore[arg-type]
    assert await through.is_silent(b"lost")
    proxy.heal()
    assert await through.said_back(b"after") == b"", "a stream with a hole went on"
    again = await Through.open(proxy)
    assert await again.said_back(b"new") == b"new"
    again.writer.close()


@pytest.mark.parametrize("mode", ["delay", "throttle"])
async def test_what_is_slow_arrives_whole(proxy: Proxy, mode: str) -> None:
    through = await Through.open(proxy)
    proxy.set(mode, delay_s=0.05)  # type: ignore[arg-type]
    data = b"slow" * 1000
    assert await through.said_back(data) == data
    through.writer.close()


async def test_a_cut_ends_a_connection_and_a_refusal_every_new_one(proxy: Proxy) -> None:
    through = await Through.open(proxy)
    assert await through.said_back(b"one") == b"one"
    proxy.cut()
    assert await through.said_back(b"two") == b""
    proxy.refuses = True
    refused = await Through.open(proxy)
    assert await refused.said_back(b"three") == b""
    proxy.heal()
    again = await Through.open(proxy)
    assert await again.said_back(b"four") == b"four"
    again.writer.close()
