"""
The receiving end of messages between shards: each counts once, in the sender's order.

A message names the former one of the same sender and receiver. It is taken only when that is the
last seen; a later one waits, and the sender is asked to send again (S-225). While something waits,
the recorded position stays below it, so a new owner reads it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
from fencepost.contracts import subjects
from fencepost.contracts.messages import Seen
from fencepost.core.errors import PoisonedError
from fencepost.runtime.outbox import Envelope
from fencepost.runtime.ports import Bus, Clock, InputMessage

WAITING_PER_SENDER_MAX: Final = 1_000
ASK_AGAIN_MS: Final = 1_000

_DECODER = msgspec.json.Decoder(Envelope, strict=True)


def decode(data: bytes) -> Envelope:
    """Raises `PoisonedError`."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Nested without end, a message ends the reader's stack. It is stored: raised as anything
        # else it would end every owner of the shard, one after the other.
        raise PoisonedError(f"not a message between shards: {error}") from error


class Taken(NamedTuple):
    """A message whose turn it is."""

    envelope: Envelope
    message: InputMessage


class Receiver:
    """Orders what arrives by sender. Holds what waits; `last_seen` belongs to the shard."""

    def __init__(
        self, family: str, shard: int, bus: Bus, clock: Clock, last_seen: Callable[[str], Seen]
    ) -> None:
        self._family = family
        self._shard = shard
        self._bus = bus
        self._clock = clock
        self._last_seen = last_seen
        self._waiting: dict[str, dict[tuple[int, int], Taken]] = {}
        self._asked_ms: dict[str, int] = {}

    def offer(self, envelope: Envelope, message: InputMessage) -> Taken | None:
        """Returns the message when it is its turn; keeps it when it is early; else drops it."""
        seen = self._last_seen(envelope.sender)
        if (envelope.seq, envelope.index) <= (seen.seq, seen.index):
            return None
        taken = Taken(envelope, message)
        if (envelope.prev_seq, envelope.prev_index) == (seen.seq, seen.index):
            return taken
        waiting = self._waiting.setdefault(envelope.sender, {})
        if len(waiting) < WAITING_PER_SENDER_MAX:
            waiting.setdefault((envelope.prev_seq, envelope.prev_index), taken)
        self._ask(envelope.family, envelope.shard, seen)
        return None

    def following(self, sender: str) -> Taken | None:
        """Returns the one that waited for what was just taken of this sender, if any."""
        waiting = self._waiting.get(sender)
        if waiting is None:
            return None
        seen = self._last_seen(sender)
        for key in [
            key
            for key, held in waiting.items()
            if (held.envelope.seq, held.envelope.index) <= (seen.seq, seen.index)
        ]:
            del waiting[key]
        taken = waiting.pop((seen.seq, seen.index), None)
        if not waiting:
            del self._waiting[sender]
            self._asked_ms.pop(sender, None)
        return taken

    def lowest_waiting(self) -> int | None:
        """The lowest stream sequence of what waits: the position must stay below it."""
        return min(
            (taken.message.seq for held in self._waiting.values() for taken in held.values()),
            default=None,
        )

    def ask_again(self) -> None:
        """Asks senders again for what is missing; call it by timer."""
        for held in self._waiting.values():
            envelope = next(iter(held.values())).envelope
            self._ask(envelope.family, envelope.shard, self._last_seen(envelope.sender))

    def _ask(self, family: str, shard: int, seen: Seen) -> None:
        sender = f"{family}.{shard}"
        now = self._clock.monotonic_ms()
        asked = self._asked_ms.get(sender)
        if asked is not None and now - asked < ASK_AGAIN_MS:
            return
        self._asked_ms[sender] = now
        ask = Envelope(
            family=self._family,
            shard=self._shard,
            seq=seen.seq,
            index=seen.index,
            resend=True,
        )
        self._bus.publish_acked(
            subjects.message(family, shard), msgspec.json.encode(ask), lambda _ok: None
        )
