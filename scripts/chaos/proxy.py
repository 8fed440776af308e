"""
A TCP proxy between one service and one server, which can be made to misbehave.

A stream that lost bytes is no stream any more, so what `drop` swallowed is followed by a cut. The
other modes lose nothing by themselves: what is held goes on when the mode ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import Final, Literal

from fencepost.client.processes import free_port

Direction = Literal["up", "down"]
"""`up`: from the service to the server; `down`: back."""

Mode = Literal["pass", "drop", "delay", "stall", "throttle"]

MODES: Final[tuple[Mode, ...]] = ("drop", "delay", "stall", "throttle")
_CHUNK: Final = 64 * 1024
_THROTTLE_BYTES_S: Final = 20_000
_SLICE_S: Final = 0.05


@dataclass
class Way:
    """How one direction behaves now. `stall` is half-open: nothing passes, nobody is told."""

    mode: Mode = "pass"
    delay_s: float = 0.0
    swallowed: int = 0


class Proxy:
    """Listens from the moment it is made; `start` serves."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.target = port
        self.ways: dict[Direction, Way] = {"up": Way(), "down": Way()}
        self.refuses = False
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = socket.create_server(("127.0.0.1", free_port()))
        self.port = int(self._socket.getsockname()[1])
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._socket)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    # What goes wrong.

    def set(self, mode: Mode, *directions: Direction, delay_s: float = 0.0) -> None:
        """Changes how directions behave, both when none is named."""
        for direction in directions or ("up", "down"):
            self.ways[direction].mode, self.ways[direction].delay_s = mode, delay_s
        self._changed.set()
        self._changed = asyncio.Event()

    def cut(self) -> None:
        """Resets every connection."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    def heal(self) -> None:
        """Everything passes again; connections that lost bytes are reset."""
        lossy = any(way.swallowed for way in self.ways.values())
        self.refuses = False
        self.set("pass")
        for way in self.ways.values():
            way.swallowed = 0
        if lossy:
            self.cut()

    # What it does.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._join(reader, writer)
        except OSError:
            pass  # the server is down: so is this connection
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            return
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers.add(back)
        pumps = [
            asyncio.ensure_future(self._pump(reader, back, self.ways["up"])),
            asyncio.ensure_future(self._pump(there, writer, self.ways["down"])),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers.discard(back)
            back.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                while data:
                    data = await self._pass(data, writer, way)

    async def _pass(self, data: bytes, writer: asyncio.StreamWriter, way: Way) -> bytes:
        """Hands on what the mode lets through; what is left is offered again."""
        if way.mode == "stall":
            await self._changed.wait()
            return data
        if way.mode == "drop":
            way.swallowed += len(data)
            return b""
        count = len(data)
        if way.mode == "delay":
            await asyncio.sleep(way.delay_s)
        elif way.mode == "throttle":
            count = int(_THROTTLE_BYTES_S * _SLICE_S)
            await asyncio.sleep(_SLICE_S)
        writer.write(data[:count])
        await writer.drain()
        return data[count:]
