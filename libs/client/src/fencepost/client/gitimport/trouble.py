"""
The trouble that an import is put to. It is real: a reclaim kills the sandbox's processes and
removes its disk, and a message that comes twice is the planner's or the toolhost's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from fencepost.client.client import Client
from fencepost.core.errors import FencepostError

LIVE_S_MAX: Final = 120.0
_LOOK_S: Final = 0.05
_LATE_MS: Final = 200


class Reclaims:
    """Takes the sandbox away, one reclaim after the other, while steps are on their way."""

    def __init__(self, client: Client, sandbox: str) -> None:
        self._client = client
        self._sandbox = sandbox
        self._task: asyncio.Task[None] | None = None
        self.count = 0
        self.taken_epoch = 0

    def begin(self) -> None:
        """Begins one, unless the last one still waits for a generation that it could take."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._reclaim())

    async def ended(self) -> None:
        if self._task is not None:
            await self._task

    async def _reclaim(self) -> None:
        async with asyncio.timeout(LIVE_S_MAX):
            while True:
                # Between two generations there is nothing to take, and nobody who answers.
                with contextlib.suppress(FencepostError):
                    view = await self._client.show(self._sandbox)
                    if view["state"] == "live" and view["epoch"] > self.taken_epoch:
                        await self._client.fault(self._sandbox, {"do": "reclaim"}, timeout_s=2.0)
                        self.count += 1
                        self.taken_epoch = view["epoch"]
                        return
                await asyncio.sleep(_LOOK_S)


@contextlib.asynccontextmanager
async def echoes(client: Client, sandbox: str, share: float) -> AsyncIterator[Callable[[], int]]:
    """
    Lets a share of all orders and receipts come a second time, a moment later.

    Gives a function that says, once this has ended, how many did.
    """
    count = 0

    async def let(percent: int) -> int:
        order = {"do": "echo", "percent": percent, "ms": _LATE_MS}
        async with asyncio.timeout(LIVE_S_MAX):
            while True:  # a gateway that has the sandbox answers, and there may be none just now
                with contextlib.suppress(FencepostError):
                    return int((await client.fault(sandbox, order, timeout_s=2.0))["echoed"])
                await asyncio.sleep(_LOOK_S)

    percent = round(100 * share)
    if percent:
        await let(percent)
    yield lambda: count
    if percent:
        count = await let(0)
