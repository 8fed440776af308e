"""
A channel to a toolhost behind a SWE-ReX server: counted bytes, carried by repeated calls.

SWE-ReX has no stream to a process's input, so both directions are pumped. A call whose answer was
lost is made again with the same counts, and nothing is carried twice.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable
from typing import Final

from fencepost.providers.swerex.server import Calls, Said, Server, Silence

PUMP_BYTES: Final = 512 * 1024
"""A call's arguments are words of a command line, which Linux bounds at 2 MiB in all."""

_DRAINED_BYTES: Final = 1 << 18
_WAIT_MS: Final = 25
_IDLE_S: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
_SILENT_S: Final = 15.0


class PumpedChannel:
    """Implements `protocol.Channel`. One call is under way at a time."""

    def __init__(self, calls: Calls, server: Server, *, instance: str, name: str) -> None:
        self._calls = calls
        self._server = server
        self._instance = instance
        self._name = name
        self._unsent = bytearray()
        self._sent = 0
        self._had = 0
        self._closing = False
        self._open = True
        self._written = asyncio.Event()
        self._moved = asyncio.Event()
        self._ended = asyncio.Event()
        self._pumping: asyncio.Task[None] | None = None
        self._words = ""

    @property
    def buffered_bytes(self) -> int:
        return len(self._unsent)

    def start(self, on_data: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        self._pumping = asyncio.create_task(self._pump(on_data, on_end))

    def write(self, data: bytes) -> None:
        if self._open:
            self._unsent += data
            self._written.set()

    async def drain(self) -> None:
        while self._open and len(self._unsent) > _DRAINED_BYTES:
            self._moved.clear()
            await self._moved.wait()

    async def end(self, *, grace_s: float = 1.0) -> None:
        self._closing = True
        self._written.set()
        if grace_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._ended.wait()
        if self._pumping is not None:
            self._pumping.cancel()
            await asyncio.gather(self._pumping, return_exceptions=True)

    def last_words(self) -> str:
        return self._words

    async def _pump(self, on_data: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        reason = "ended"
        try:
            reason = await self._pump_until_over(on_data)
        finally:
            self._open = False
            self._unsent.clear()
            self._moved.set()
            self._ended.set()
            self._words = self._words or reason
            on_end(reason)

    async def _pump_until_over(self, on_data: Callable[[bytes], None]) -> str:
        idle = 0
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        while True:
            sending = bytes(self._unsent[:PUMP_BYTES])
            self._written.clear()
            answer = await self._calls.agent(
                self._server,
                "pump",
                {
                    "instance": self._instance,
                    "channel": self._name,
                    "at": self._sent,
                    "had": self._had,
                    "data": base64.b64encode(sending).decode(),
                    "close": self._closing and len(self._unsent) <= len(sending),
                    "wait_ms": _WAIT_MS if sending or idle < len(_IDLE_S) - 1 else 0,
                },
            )
            if isinstance(answer, Silence):
                # Unknown whether it was carried: the same counts again, for a while.
                if loop.time() - heard_at > _SILENT_S or answer.fault == "refused":
                    return f"{answer.fault}: {answer.detail}"
                await asyncio.sleep(0.2)
                continue
            heard_at = loop.time()
            if answer.state != "pumped":
                return {"other": "another server or sandbox answers at this address"}.get(
                    answer.state, f"stream is {answer.state}"
                )
            carried = self._carried(answer, len(sending))
            data = self._fresh(answer)
            if carried is None or data is None:
                return "the counts of the stream do not fit"
            if data:
                on_data(data)
            if answer.body.get("ended") is True:
                self._words = f"exit {answer.body.get('exit')}"
                return "end_of_stream"
            idle = 0 if carried or data else min(idle + 1, len(_IDLE_S) - 1)
            if not self._unsent and _IDLE_S[idle]:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_S[idle]):
                        await self._written.wait()

    def _carried(self, answer: Said, sent: int) -> bool | None:
        """Whether the other side took bytes; None where it took what it cannot have."""
        count = int(answer.body["taken"]) - self._sent
        if not 0 <= count <= sent:
            return None
        del self._unsent[:count]
        self._sent += count
        if count > 0:
            self._moved.set()
        return count > 0

    def _fresh(self, answer: Said) -> bytes | None:
        """The bytes that follow; None where what is given does not join to what was had."""
        begins = int(answer.body["from"])
        skip = self._had - begins
        try:
            given = base64.b64decode(answer.body["data"], validate=True)
        except ValueError:
            return None
        if begins < 0 or not 0 <= skip <= len(given):
            return None
        self._had += len(given) - skip
        return given[skip:]
