"""
Sending commands durably, as few synced messages as possible.

Rule 1: every step of one loop turn that goes to one shard travels in one message; a lone step in
        one of its own, on the subject that names it. While some messages are on their way, what is
        less than a full one waits for the first answer and gathers more: the server syncs one after
        the other anyway.
Rule 2: a message is sent again, on the same subject, until the server answered: its subject is its
        identity, so a repeat is refused (10077) and stored once.
Rule 3: this module does not know outcomes; it reports what was not accepted, and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from fencepost.client import ulid
from fencepost.client.waiting import Waiting
from fencepost.contracts import subjects
from fencepost.core import limits
from fencepost.core.errors import FencepostError, RefusedError, RetryLaterError, UnknownError
from fencepost.runtime.link import ApiError, Link
from nats.aio.msg import Msg

PACK_BYTES_MAX: Final = limits.COMMAND_BYTES_MAX
PACK_STEPS_MAX: Final = 128
_ACK_S: Final = 2.0
_PAUSE_S: Final = 0.1
_SEND_S_MAX: Final = 30.0
_ALREADY_THERE: Final = 10077
_ENVELOPE_BYTES: Final = 64
_AHEAD_MAX: Final = 2
_PATIENCE_S: Final = 0.05
"""A message that is on its way for longer holds nothing up any more."""


class _Ack(msgspec.Struct, frozen=True):
    stream: str = ""
    seq: int = 0
    error: ApiError | None = None


_decode_ack = msgspec.json.Decoder(_Ack).decode


def _judge(message: Msg | None) -> tuple[bool, FencepostError | None]:
    """
    Reads a stream's answer: (whether it was there before, what went wrong).

    `RetryLaterError` is worth another try of the same message; anything else is final.
    """
    if message is None:
        return False, RetryLaterError("no answer")
    if not message.data:
        return False, RetryLaterError("no stream takes it now")
    try:
        ack = _decode_ack(message.data)
    except msgspec.DecodeError:
        return False, RefusedError("not_accepted", f"not a stream's answer: {message.data[:80]!r}")
    if ack.error is None:
        return False, None
    if ack.error.err_code == _ALREADY_THERE:
        return True, None
    problem = f"{ack.error.description} ({ack.error.err_code})"
    if ack.error.code in (400, 403):
        return False, RefusedError("not_accepted", problem)
    return False, RetryLaterError(problem)


async def publish_durably(
    link: Link, subject: str, payload: bytes, *, seconds: float = _SEND_S_MAX
) -> bool:
    """
    Publishes to a stream until the server answered; False when the subject was already taken.

    Raises `RetryLaterError` when no answer came in time: then it may be stored or not.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    error: FencepostError = RetryLaterError("no answer")
    while (left := deadline - asyncio.get_running_loop().time()) > 0:
        try:
            message: Msg | None = await link.call(subject, payload, timeout_s=min(_ACK_S, left))
        except UnknownError:
            message = None
        was_there, problem = _judge(message)
        if problem is None:
            return not was_there
        if not isinstance(problem, RetryLaterError):
            raise problem
        error = problem
        await asyncio.sleep(_PAUSE_S)
    raise RetryLaterError(f"{subject}: not acknowledged within {seconds:g} s: {error}")


class _Flight:
    """One message on its way, until the server answered. Callbacks only: no task, no future."""

    def __init__(
        self, outbox: Outbox, subject: str, payload: bytes, items: Sequence[Waiting], *, lone: bool
    ) -> None:
        self._outbox = outbox
        self._subject = subject
        self._payload = payload
        self._items = items
        self._lone = lone
        self._deadline = outbox.loop.time() + _SEND_S_MAX
        self._timer: asyncio.TimerHandle | None = None
        self._reply = ""
        self._problem: FencepostError = RetryLaterError("no answer")

    def send(self) -> None:
        loop = self._outbox.loop
        if loop.time() >= self._deadline:
            self._end(
                RetryLaterError(
                    f"{self._subject}: not acknowledged within {_SEND_S_MAX:g} s: {self._problem}"
                )
            )
            return
        self._reply = self._outbox.link.expect(self._answered)
        self._timer = loop.call_later(_PATIENCE_S, self._slow)
        self._outbox.link.publish(self._subject, self._payload, self._reply)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._outbox.link.forget(self._reply)

    def _slow(self) -> None:
        self._timer = self._outbox.loop.call_later(_ACK_S - _PATIENCE_S, self._late)
        self._outbox.landed(self)

    def _late(self) -> None:
        self._outbox.link.forget(self._reply)
        self._answered(None)

    def _answered(self, message: Msg | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._outbox.landed(self)
        was_there, problem = _judge(message)
        if isinstance(problem, RetryLaterError):
            self._problem = problem
            self._timer = self._outbox.loop.call_later(_PAUSE_S, self.send)
        elif problem is not None:
            self._end(problem)
        else:
            self._outbox.flights.discard(self)
            if was_there and self._lone:
                self._outbox.taken(self._items[0])

    def _end(self, error: FencepostError) -> None:
        self._outbox.flights.discard(self)
        for item in self._items:
            self._outbox.failed(item, error)


class Outbox:
    """
    Gathers steps and sends them.

    `taken` is called with a lone step whose subject was already used: by an earlier send of the
    same call, or by another call under the same id. `failed` is called with each step that was
    not accepted.
    """

    def __init__(
        self,
        link: Link,
        *,
        taken: Callable[[Waiting], None],
        failed: Callable[[Waiting, FencepostError], None],
    ) -> None:
        self.link = link
        self.loop = asyncio.get_running_loop()
        self.taken = taken
        self.failed = failed
        self.flights: set[_Flight] = set()
        self._gathered: dict[int, list[Waiting]] = {}
        self._ahead: set[_Flight] = set()
        self._is_due = False

    def put(self, item: Waiting) -> None:
        """Sends at the end of this loop turn or soon after, with what else goes to that shard."""
        self._send_soon()
        found = self._gathered.get(item.shard)
        if found is None:
            self._gathered[item.shard] = [item]
        else:
            found.append(item)

    def put_again(self, item: Waiting) -> None:
        """Sends under a fresh message id: the step's own subject is used up."""
        self._send_pack([item])

    def close(self) -> None:
        """Ends what is still being sent; those steps may be stored or not."""
        self._gathered.clear()
        self._ahead.clear()
        for flight in [*self.flights]:
            flight.cancel()
        self.flights.clear()

    def landed(self, flight: _Flight) -> None:
        """A message holds nothing up any more: it was answered, or its answer takes too long."""
        if flight in self._ahead:
            self._ahead.discard(flight)
            if self._gathered:
                self._send_soon()

    def _send_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.loop.call_soon(self._send_gathered)

    def _send_gathered(self) -> None:
        self._is_due = False
        gathered, self._gathered = self._gathered, {}
        for shard, items in gathered.items():
            cut = [items] if len(items) == 1 else packs(items)
            if len(self._ahead) >= _AHEAD_MAX:
                self._gathered[shard] = cut.pop()
            for pack in cut:
                if len(pack) > 1:
                    self._send_pack(pack)
                else:
                    only = pack[0]
                    subject = subjects.command("step", only.sandbox, only.step)
                    self._start(subject, only.command, pack, lone=True)

    def _send_pack(self, pack: list[Waiting]) -> None:
        body = b'{"steps":[' + b",".join([item.command for item in pack]) + b"]}"
        subject = subjects.command("batch", pack[0].sandbox, ulid.mint())
        self._start(subject, body, pack, lone=False)

    def _start(self, subject: str, payload: bytes, items: list[Waiting], *, lone: bool) -> None:
        flight = _Flight(self, subject, payload, items, lone=lone)
        self.flights.add(flight)
        self._ahead.add(flight)
        flight.send()


def packs(items: list[Waiting]) -> list[list[Waiting]]:
    """Cuts a row of steps, in order, into messages within the bounds."""
    found: list[list[Waiting]] = []
    size = PACK_BYTES_MAX + 1
    for item in items:
        length = len(item.command) + 1
        if size + length > PACK_BYTES_MAX - _ENVELOPE_BYTES or len(found[-1]) >= PACK_STEPS_MAX:
            found.append([])
            size = 0
        found[-1].append(item)
        size += length
    return found
