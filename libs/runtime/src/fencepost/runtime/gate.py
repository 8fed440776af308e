"""
Lets only a few of a process's shards append at once.

The server takes one message after the other into a stream, and syncs each. Appends that wait there
gain nothing, but shards that wait here go on gathering inputs: their next batches are fewer and
larger. A lone append never waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

PLACES: Final = 2
"""One is being synced while the next one is on its way."""
PATIENCE_S: Final = 0.05
"""
After this long a place is given to another, whatever its holder waits for: a shard whose append
gets no answer must not hold up the others.
"""


class Pass:
    """One place, until it is given back."""

    __slots__ = ("_gate", "_timer")

    def __init__(self, gate: Gate) -> None:
        self._gate: Gate | None = gate
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self.give_back)

    def give_back(self) -> None:
        """Safe to call twice."""
        gate, self._gate = self._gate, None
        if gate is not None:
            self._timer.cancel()
            gate.leave()


class Gate:
    """First come, first served."""

    def __init__(self, places: int = PLACES) -> None:
        self._free = places
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> Pass:
        """Waits for a place, which the caller must give back."""
        if self._free:
            self._free -= 1
            return Pass(self)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.leave()
            raise
        return Pass(self)

    def leave(self) -> None:
        """Hands a place to whoever has waited longest."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1
