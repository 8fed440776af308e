"""
Answers questions to a shard's owner, each in a task of its own, for as long as it owns the shard.

Three answers: what was asked for (`null` for a proven absence), `{"status": "refused", …}` for a
question that cannot be read, `{"status": "unknown", …}` for one that cannot be answered now. A
shard that is no longer owned does not answer at all: its next owner does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fencepost.core.errors import FencepostError, OwnershipLostError
from fencepost.runtime.ports import Bus

_ENCODE = msgspec.json.Encoder().encode


class Questions:
    """`view` answers a message's body; it may raise `msgspec.DecodeError` or `FencepostError`."""

    def __init__(self, bus: Bus, view: Callable[[bytes], Awaitable[Any]]) -> None:
        self._bus = bus
        self._view = view
        self._answering: set[asyncio.Task[None]] = set()

    def take(self, subject: str, data: bytes, reply: str) -> None:
        """Takes one message of the shard's subject for questions."""
        del subject
        if reply:
            task = asyncio.get_running_loop().create_task(self._answer(data, reply))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def close(self) -> None:
        """Ends what is being answered."""
        answering = tuple(self._answering)
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)

    async def _answer(self, data: bytes, reply: str) -> None:
        answer: Any
        try:
            answer = await self._view(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            answer = {"status": "refused", "reason": "malformed", "detail": str(error)}
        except OwnershipLostError:
            # Somebody else owns it, or soon will: no answer is the answer (S-216).
            return
        except FencepostError as error:
            answer = {"status": "unknown", "reason": str(error)}
        self._bus.publish(reply, _ENCODE(answer))
