"""A channel over a pod's exec: frames of Kubernetes' own, one byte of which says which stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

import aiohttp

_STDIN: Final = b"\0"
_STDOUT: Final = 1
_STDERR: Final = 2
_ERROR: Final = 3
_MESSAGE_BYTES: Final = 1 << 18
_DRAINED_BYTES: Final = 1 << 18
_WORDS_BYTES: Final = 2_000
_BURIED_S: Final = 5.0


class ExecChannel:
    """
    Implements `protocol.Channel` over an open websocket, which it closes.

    `bury` ends what a toolhost left that did not end by itself.
    """

    def __init__(
        self,
        websocket: aiohttp.ClientWebSocketResponse,
        *,
        sent_first: bytes,
        bury: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._websocket = websocket
        self._bury = bury
        self._burying: asyncio.Task[None] | None = None
        self._unsent: deque[bytes] = deque([sent_first])
        self._unsent_bytes = len(sent_first)
        self._open = True
        self._written = asyncio.Event()
        self._written.set()
        self._moved = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._words = bytearray()
        self._status = ""

    @property
    def buffered_bytes(self) -> int:
        return self._unsent_bytes

    def start(self, on_data: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        self._tasks = [
            asyncio.create_task(self._receive(on_data, on_end)),
            asyncio.create_task(self._send()),
        ]

    def write(self, data: bytes) -> None:
        if self._open:
            self._unsent.append(data)
            self._unsent_bytes += len(data)
            self._written.set()

    async def drain(self) -> None:
        while self._open and self._unsent_bytes > _DRAINED_BYTES:
            self._moved.clear()
            await self._moved.wait()

    async def end(self, *, grace_s: float = 1.0) -> None:
        # The protocol cannot end one direction alone; closing it ends the process's input.
        self._close()
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(max(grace_s, 0.1)):
                await self._websocket.close()
        if self._tasks:
            receiving, sending = self._tasks
            sending.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(grace_s, 0.1)):
                    await asyncio.shield(receiving)
            receiving.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._burying is not None:
            await asyncio.wait({self._burying}, timeout=_BURIED_S)

    def last_words(self) -> str:
        said = bytes(self._words).decode("utf-8", "replace").strip()
        return f"{self._status}: {said}" if said else self._status or "still running"

    def _close(self) -> None:
        self._open = False
        self._unsent.clear()
        self._unsent_bytes = 0
        self._moved.set()
        self._written.set()

    async def _send(self) -> None:
        while self._open:
            if not self._unsent:
                self._written.clear()
                await self._written.wait()
                continue
            data = self._unsent[0]
            try:
                for at in range(0, len(data), _MESSAGE_BYTES):
                    await self._websocket.send_bytes(_STDIN + data[at : at + _MESSAGE_BYTES])
            except (aiohttp.ClientError, OSError):
                return  # the receiving side sees the end and tells it
            if self._unsent and self._unsent[0] is data:
                self._unsent.popleft()
                self._unsent_bytes -= len(data)
            self._moved.set()

    async def _receive(
        self, on_data: Callable[[bytes], None], on_end: Callable[[str], None]
    ) -> None:
        reason = "end_of_stream"
        try:
            async for message in self._websocket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    continue
                stream, data = message.data[:1], message.data[1:]
                if not stream or not data:
                    continue
                if stream[0] == _STDOUT:
                    on_data(data)
                elif stream[0] == _STDERR:
                    self._words += data
                    del self._words[:-_WORDS_BYTES]
                elif stream[0] == _ERROR:
                    self._status = ending(data)
                    break
            if self._websocket.exception() is not None:
                reason = f"read: {self._websocket.exception()}"
        except (aiohttp.ClientError, OSError) as error:
            reason = f"read: {error}"
        finally:
            self._close()
            self._status = self._status or reason
            if self._status != "exit 0":
                self._burying = asyncio.create_task(self._bury())
            self._ended.set()
            on_end(reason)


def ending(status: bytes) -> str:
    """How a command ended, by the status that Kubernetes sends last; for people."""
    try:
        found = json.loads(status)
        if found.get("status") == "Success":
            return "exit 0"
        for cause in (found.get("details") or {}).get("causes") or ():
            if cause.get("reason") == "ExitCode":
                return f"exit {cause.get('message')}"
        return str(found.get("message", "failed"))[:300]
    except (ValueError, AttributeError):
        return "ended without a status"
