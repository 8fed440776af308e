"""A channel over the stream of an `exec`: a toolhost in a container, its source sent first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError
from aiodocker.execs import Exec
from aiodocker.stream import Stream
from fencepost.providers import leftovers
from fencepost.providers.docker import container

FAULTS: Final = (DockerError, aiohttp.ClientError, OSError, TimeoutError, ValueError)
"""What the way to an engine, or the engine itself, may fail with."""

_DRAINED_BYTES: Final = 1 << 18
_LAST_WORDS_BYTES: Final = 2_000
_ENDS_WITH_STREAM_S: Final = 2.0
_LOOK_S: Final = 0.02


class ExecChannel:
    """
    Writes go straight to the connection's transport, so that they neither wait nor need a task.

    The transport is aiodocker's: its own `write_in` waits, and its `close` cannot end one
    direction alone, which is how a toolhost is asked to end.
    """

    def __init__(
        self, holder: DockerContainer, started: Exec, stream: Stream, *, python: str, name: str
    ) -> None:
        self._holder = holder
        self._exec = started
        self._stream = stream
        self._python = python
        self._name = name
        self._transport: Any = _transport_of(stream)
        self._on_data: Callable[[bytes], None] | None = None
        self._on_end: Callable[[str], None] | None = None
        self._said = bytearray()
        self._ending = ""
        self._code: Any = None
        self._open = True
        self._ended = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._burying: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        holder: DockerContainer,
        command: list[str],
        source: bytes,
        *,
        name: str,
        environment: dict[str, str],
    ) -> ExecChannel:
        """Starts a toolhost. Raises one of `FAULTS`."""
        started = await holder.exec(
            command,
            stdin=True,
            user="0:0",
            workdir="/",
            environment={**environment, leftovers.CHANNEL: name},
        )
        stream = started.start(detach=False)
        await stream.__aenter__()
        channel = cls(holder, started, stream, python=command[0], name=name)
        channel.write(source)
        return channel

    @property
    def buffered_bytes(self) -> int:
        if not self._open or self._transport is None:
            return 0
        return int(self._transport.get_write_buffer_size())

    def start(self, on_data: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        self._on_data, self._on_end = on_data, on_end
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        reason = "end_of_stream"
        try:
            while (message := await self._stream.read_out()) is not None:
                if message.stream == 2:
                    self._said += message.data
                    del self._said[:-_LAST_WORDS_BYTES]
                elif self._on_data is not None:
                    self._on_data(message.data)
        except FAULTS as error:
            reason = f"read: {error or type(error).__name__}"
        self._close(reason)

    def write(self, data: bytes) -> None:
        if self._open and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def drain(self) -> None:
        while self.buffered_bytes > _DRAINED_BYTES and not self._transport.is_closing():
            await asyncio.sleep(0.002)

    async def end(self, *, grace_s: float = 1.0) -> None:
        if self._open:
            transport = self._transport
            if grace_s > 0 and self._reading is not None and transport is not None:
                with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
                    if transport.can_write_eof():
                        transport.write_eof()
                        async with asyncio.timeout(grace_s):
                            await self._ended.wait()
            self._close("ended")
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._burying is not None:
            await asyncio.shield(self._burying)

    def _close(self, reason: str) -> None:
        if not self._open:
            return
        self._open = False
        self._ended.set()
        self._burying = asyncio.get_running_loop().create_task(self._bury())
        if self._on_end is not None:
            self._on_end(reason)

    def last_words(self) -> str:
        """How the toolhost ended and the end of what it wrote to standard error."""
        said = bytes(self._said).decode("utf-8", "replace").strip()
        ending = self._ending or "ending not seen"
        return f"{ending}: {said}" if said else ending

    async def _bury(self) -> None:
        """
        A toolhost ends with its stream, and its tools with it; one that does not is killed, from
        inside, and so is what a killed one left.
        """
        with contextlib.suppress(*FAULTS):
            await self._stream.close()
        with contextlib.suppress(*FAULTS):
            if not await self._is_over(_ENDS_WITH_STREAM_S):
                await self._kill("0:0")
                await self._is_over(_ENDS_WITH_STREAM_S)
            if self._code not in (0, None):
                await self._kill(f"{container.TOOL_UID}:{container.TOOL_UID}", leftovers.AFTER)

    async def _kill(self, user: str, *words: str) -> None:
        killer = await self._holder.exec(
            [self._python, "-I", "-S", "-c", leftovers.KILL, self._name, *words], user=user
        )
        await killer.start(detach=True)

    async def _is_over(self, seconds: float) -> bool:
        """Waits for the end of the exec; an engine that does not know it any more counts too."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            try:
                found = await self._exec.inspect()
            except DockerError as error:
                if error.status != 404:
                    raise
                self._ending = "its container is not there"
                return True
            if not found.get("Running", True):
                code = self._code = found.get("ExitCode")
                self._ending = f"exit {code}" if isinstance(code, int) else "ended"
                return True
            if loop.time() >= until:
                self._ending = "still running"
                return False
            await asyncio.sleep(_LOOK_S)


def _transport_of(stream: Stream) -> Any:
    """The connection under an open stream, or None where it broke at once."""
    response = stream._resp
    connection = None if response is None else response.connection
    return None if connection is None else connection.transport
