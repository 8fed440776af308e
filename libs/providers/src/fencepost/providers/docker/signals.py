"""
Which containers somebody told to end: the engine's stream of signals, followed while it is open.

`docker stop`, and `docker kill --signal TERM`, are the announcement; the engine says nothing of how
long the container has. An engine that shuts down ends its streams before its containers, so that
it stops them is not heard of here; nor is what happened before the first look.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import aiodocker
import aiohttp
import structlog
from fencepost.providers.docker.channel import FAULTS

_ENDING: Final = frozenset({"15", "2", "SIGTERM", "SIGINT", "TERM", "INT"})
_AGAIN_S: Final = 2.0
_FOREVER: Final = aiohttp.ClientTimeout(total=None, connect=5.0)
_LINE_BYTES_MAX: Final = 1 << 20
_KEPT_MAX: Final = 4096

logger = structlog.get_logger(__name__)


class Signals:
    """`told` holds the ids of containers, the latest of them. Begins by `listen`."""

    def __init__(self, engine: aiodocker.Docker, *, label: str) -> None:
        self._engine = engine
        self._label = label
        self._told: dict[str, None] = {}
        self._since = ""
        self._task: asyncio.Task[None] | None = None

    def listen(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def told(self, native_id: str) -> bool:
        return native_id in self._told

    async def _run(self) -> None:
        complaint = ""
        while True:
            try:
                await self._follow()
                complaint = ""
            except (*FAULTS, AttributeError, TypeError, LookupError) as error:
                if complaint != (complaint := type(error).__name__):
                    logger.warning("notices_not_read", provider="docker", detail=str(error)[:300])
            await asyncio.sleep(_AGAIN_S)

    async def _follow(self) -> None:
        """Reads events until their stream ends, from where the last one ended."""
        filters = {"type": ["container"], "event": ["kill"], "label": [self._label]}
        params: dict[str, Any] = {"filters": json.dumps(filters)}
        if self._since:
            params["since"] = self._since
        async with self._engine._query("events", params=params, timeout=_FOREVER) as stream:
            try:
                await self._read(stream)
            finally:
                stream.close()  # it has no end of its own

    async def _read(self, stream: aiohttp.ClientResponse) -> None:
        held = b""
        async for data in stream.content.iter_any():
            *lines, held = (held + data).split(b"\n")
            for line in filter(None, lines):
                self._take(json.loads(line))
            if len(held) > _LINE_BYTES_MAX:
                raise ValueError("an event of more than a mebibyte")

    def _take(self, event: Any) -> None:
        actor = event["Actor"]
        nanoseconds = int(event["timeNano"])
        self._since = f"{nanoseconds // 10**9}.{nanoseconds % 10**9:09d}"
        if str(actor["Attributes"].get("signal", "")) in _ENDING:
            self._told[str(actor["ID"])] = None
            while len(self._told) > _KEPT_MAX:
                del self._told[next(iter(self._told))]
