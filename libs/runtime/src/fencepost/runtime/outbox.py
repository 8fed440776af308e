"""
What an accepted batch publishes into streams: events, and messages to other shards.

Publications go out in ledger order, at least once; `sent` is the ledger sequence up to which all
of them were acknowledged, and it is recorded in later batches so that the next owner publishes
from there (S-222). What does not fit into the window is not kept: it is read from the ledger
again when there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec
from fencepost.contracts import subjects
from fencepost.contracts.messages import Seen
from fencepost.core import ids
from fencepost.core.machine import Machine
from fencepost.runtime.ports import Bus, Clock

WINDOW_MAX: Final = 20_000
RESEND_MS: Final = 2_000
RESEND_MS_MAX: Final = 10_000


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    A message from one shard to another, as stored.

    (`seq`, `index`) is its identity: the sender's ledger sequence, and its place among that
    batch's messages. (`prev_seq`, `prev_index`) is the former one of the same sender to the same
    receiver; (0, 0) for the first. `resend` asks the addressed shard to send again what it sent
    to (`family`, `shard`) after (`seq`, `index`); such an ask carries no body.
    """

    family: str
    shard: int
    seq: int
    index: int
    prev_seq: int = 0
    prev_index: int = 0
    resend: bool = False
    aggregate: str = ""
    body: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def sender(self) -> str:
        return f"{self.family}.{self.shard}"


Item = tuple[str, bytes]


class Maker(Protocol):
    """Turns an accepted batch's entries into what is published; called in ledger order."""

    def make(self, seq: int, entries: Sequence[Any], now_ms: int) -> list[Item]: ...


_ENCODE = msgspec.json.Encoder().encode


class EventMaker:
    """
    Public events. Each body gets `position` {shard, seq, index} and `at_ms`.

    `index` is the entry's index in its batch; a second event of one entry has `part` 1 as well.
    """

    def __init__(self, machine: Machine[Any, Any], shard: int) -> None:
        self._machine = machine
        self._shard = shard

    def make(self, seq: int, entries: Sequence[Any], now_ms: int) -> list[Item]:
        items: list[Item] = []
        for index, entry in enumerate(entries):
            for part, event in enumerate(self._machine.events_of(entry)):
                position = {"shard": self._shard, "seq": seq, "index": index}
                if part:
                    position["part"] = part
                body = {**event.body, "position": position, "at_ms": now_ms}
                items.append((event.subject, _ENCODE(body)))
        return items


class MessageMaker:
    """Messages to other shards. `links` holds the last one made for each receiver."""

    def __init__(self, machine: Machine[Any, Any], shard: int, shards: int) -> None:
        self._machine = machine
        self._shard = shard
        self._shards = shards
        self.links: dict[str, Seen] = {}

    def make(self, seq: int, entries: Sequence[Any], now_ms: int) -> list[Item]:
        _ = now_ms
        items: list[Item] = []
        for entry in entries:
            for message in self._machine.messages_of(entry):
                receiver = subjects.message(
                    message.family, ids.shard_of(message.aggregate, self._shards)
                )
                previous = self.links.get(receiver, Seen(0, 0))
                envelope = Envelope(
                    family=self._machine.family,
                    shard=self._shard,
                    seq=seq,
                    index=len(items),
                    prev_seq=previous.seq,
                    prev_index=previous.index,
                    aggregate=message.aggregate,
                    body=msgspec.Raw(_ENCODE(message.body)),
                )
                self.links[receiver] = Seen(seq, len(items))
                items.append((receiver, _ENCODE(envelope)))
        return items


class Resender:
    """
    Makes again what was sent to one receiver after a position. Give it the batches from that
    position's own on, in order.

    The chain of a batch is made whole before anything of it is passed over: what the asker has
    already is left out, and each of the others still names the one before it.
    """

    def __init__(self, machine: Machine[Any, Any], shard: int, shards: int, ask: Envelope) -> None:
        self._receiver = subjects.message(ask.family, ask.shard)
        self._after = Seen(ask.seq, ask.index)
        self._maker = MessageMaker(machine, shard, shards)
        self._maker.links[self._receiver] = self._after

    def make(self, seq: int, entries: Sequence[Any], now_ms: int) -> list[Item]:
        items = self._maker.make(seq, entries, now_ms)
        return [
            item
            for index, item in enumerate(items)
            if item[0] == self._receiver and self._is_missing(seq, index)
        ]

    def _is_missing(self, seq: int, index: int) -> bool:
        return (seq, index) > (self._after.seq, self._after.index)


class _Record:
    """One batch's publications that are not all acknowledged."""

    __slots__ = ("items", "left", "sent_ms", "seq", "subjects", "waits_ms")

    def __init__(self, seq: int, items: list[Item | None], subjects_: list[str]) -> None:
        self.seq = seq
        self.subjects = subjects_
        self.items = items
        self.left = len(items)
        self.sent_ms = 0
        self.waits_ms = RESEND_MS


class Outbox:
    """
    Publishes what a maker makes of accepted batches, and tells how far that was acknowledged.

    `sent`: every publication of a batch up to this sequence is acknowledged. `kept`: every batch
    up to this one has been through the maker. A batch above `kept` must be read from the ledger
    and given again; `is_behind` says so. `sent_links`: the last acknowledged item of each subject.
    """

    def __init__(
        self,
        maker: Maker,
        bus: Bus,
        clock: Clock,
        *,
        window: int = WINDOW_MAX,
        keeps_links: bool = False,
    ) -> None:
        self._maker = maker
        self._bus = bus
        self._clock = clock
        self._window = window
        self._keeps_links = keeps_links
        self._records: deque[_Record] = deque()
        self._held = True
        self._count = 0
        self.sent = 0
        self.kept = 0
        self.sent_links: dict[str, Seen] = {}

    @property
    def waiting(self) -> int:
        """Publications that are not acknowledged."""
        return self._count

    @property
    def has_room(self) -> bool:
        return self._count < self._window

    def start_from(self, sent: int) -> None:
        """Everything up to this sequence is acknowledged already."""
        assert not self._records
        self.sent = self.kept = sent

    def is_behind(self, head: int) -> bool:
        """Tells whether batches up to `head` must be read from the ledger again."""
        return self.kept < head

    def add(self, prev: int, seq: int, entries: Sequence[Any], now_ms: int) -> None:
        """Takes an accepted batch, `prev` being the one before it."""
        if prev > self.kept or seq <= self.kept or not self.has_room:
            return
        items = self._maker.make(seq, entries, now_ms)
        self.kept = seq
        if not items:
            if not self._records:
                self.sent = seq
            return
        record = _Record(seq, list(items), [item[0] for item in items] if self._keeps_links else [])
        self._records.append(record)
        self._count += len(items)
        if not self._held:
            self._publish(record)

    def skip(self, seq: int, entries: Sequence[Any], now_ms: int) -> None:
        """Takes a batch whose publications are known to be acknowledged."""
        items = self._maker.make(seq, entries, now_ms)
        if self._keeps_links:
            self._link(seq, [item[0] for item in items])
        self.kept = self.sent = seq

    def release(self) -> None:
        """Begins to publish: what was added before belonged to a takeover not yet accepted."""
        self._held = False
        for record in tuple(self._records):
            self._publish(record)

    def repeat(self) -> int:
        """Publishes again, in order, what has not been acknowledged in time; returns how many."""
        if self._held or not self._records:
            return 0
        now = self._clock.monotonic_ms()
        first = self._records[0]
        if now - first.sent_ms < first.waits_ms:
            return 0
        count = 0
        for record in tuple(self._records):
            record.waits_ms = min(record.waits_ms * 2, RESEND_MS_MAX)
            count += record.left
            self._publish(record)
        return count

    def _publish(self, record: _Record) -> None:
        record.sent_ms = self._clock.monotonic_ms()
        for index, item in enumerate(tuple(record.items)):
            if item is not None:
                self._bus.publish_acked(item[0], item[1], self._answered(record, index))

    def _answered(self, record: _Record, index: int) -> Callable[[bool], None]:
        def answered(ok: bool) -> None:
            if not ok or record.items[index] is None:
                return
            record.items[index] = None
            record.left -= 1
            self._count -= 1
            if record.left == 0 and self._records and self._records[0] is record:
                self._advance()

        return answered

    def _advance(self) -> None:
        while self._records and self._records[0].left == 0:
            record = self._records.popleft()
            self.sent = record.seq
            self._link(record.seq, record.subjects)
        if not self._records:
            self.sent = self.kept

    def _link(self, seq: int, subjects_: list[str]) -> None:
        for index, subject in enumerate(subjects_):
            self.sent_links[subject] = Seen(seq, index)
