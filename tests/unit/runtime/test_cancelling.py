"""Stopping while something comes in, and without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.service import _Broker
from nats.errors import ConnectionReconnectingError

from tests.contracts import until

END = SimpleNamespace(headers={"Status": "204"}, data=b"")


class Subscribed:
    async def unsubscribe(self) -> None:
        pass


class Silent:
    """A link whose server says nothing by itself; `take` hands an answer to whoever reads."""

    def __init__(self) -> None:
        self.nc = SimpleNamespace(new_inbox=lambda: "inbox", is_closed=False)
        self.take: Callable[[Any], None] | None = None
        self.sent = 0

    async def subscribe_raw(self, subject: str, take: Callable[[Any], None]) -> Subscribed:
        self.take = take
        return Subscribed()

    def on_lost(self, call: Callable[[], None]) -> None:
        pass

    def off_lost(self, call: Callable[[], None]) -> None:
        pass

    @contextmanager
    def asking(self, subject: str, denied: Callable[[Any], None]) -> Iterator[None]:
        yield

    def send(self, command: bytes, *, droppable: bool = True) -> bool:
        self.sent += 1
        return True


async def test_a_cancel_that_comes_together_with_the_answer_is_a_cancel() -> None:
    link = Silent()
    reading = asyncio.create_task(JetStreamLog(link)._chunk("subject", 1))  # type: ignore[arg-type]
    await until(lambda: link.sent == 1)
    assert link.take is not None
    link.take(END)
    reading.cancel()
    await asyncio.wait({reading}, timeout=10)
    # Swallowed, whoever stops the reader would wait for its end for ever.
    assert reading.cancelled()


async def test_an_answer_alone_ends_a_read() -> None:
    link = Silent()
    reading = asyncio.create_task(JetStreamLog(link)._chunk("subject", 1))  # type: ignore[arg-type]
    await until(lambda: link.sent == 1)
    assert link.take is not None
    link.take(END)
    assert await reading == []


class Away:
    async def drain(self) -> None:
        raise ConnectionReconnectingError


async def test_a_broker_ends_without_a_connection_too() -> None:
    broker = _Broker("nats://127.0.0.1:1", logger=None)
    broker._connection = Away()  # type: ignore[assignment]
    await broker.stop()
