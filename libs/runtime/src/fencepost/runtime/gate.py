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

    __slots__ = ("_gate", "since")

    def __init__(self, gate: Gate, since: float) -> None:
        self._gate = gate
        self.since = since

    def give_back(self) -> None:
        """Safe to call twice."""
        self._gate.leave(self)


class Gate:
    """First come, first served."""

    def __init__(self, places: int = PLACES) -> None:
        self.free = places
        self._inside: dict[Pass, None] = {}
        self._waiting: deque[asyncio.Future[Pass]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> Pass:
        """Waits for a place, which the caller must give back."""
        if self.free:
            self.free -= 1
            return self._let_in()
        waiter: asyncio.Future[Pass] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._arm()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                waiter.result().give_back()
            raise

    def leave(self, place: Pass) -> None:
        """Hands a place to whoever has waited longest."""
        if place not in self._inside:
            return
        del self._inside[place]
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(self._let_in())
                return
        self.free += 1

    def _let_in(self) -> Pass:
        place = Pass(self, asyncio.get_running_loop().time())
        self._inside[place] = None
        return place

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._look)

    def _look(self) -> None:
        """Only while somebody waits: ends the places of those who have had theirs too long."""
        self._timer = None
        since = asyncio.get_running_loop().time() - PATIENCE_S
        for place in [*self._inside]:
            if self._waiting and place.since <= since:
                place.give_back()
        if self._waiting:
            self._arm()
