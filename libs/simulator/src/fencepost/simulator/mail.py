"""
Messages between the two families' shards, over simulated streams.

What is sent, kept, repeated, ordered and asked for again is decided by the live runtime's own
outbox and receiver; only the streams and the way to them are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from fencepost.contracts import subjects
from fencepost.contracts.messages import Batch, Seen
from fencepost.runtime import exchange
from fencepost.runtime.outbox import Envelope, MessageMaker, Outbox, Resender
from fencepost.runtime.ports import InputMessage
from fencepost.simulator.ledger import SimulatedLog, Stored
from fencepost.simulator.world import Process, World

if TYPE_CHECKING:
    from fencepost.simulator.owner import Hold

_BATCH = msgspec.json.Decoder(Batch)


class Publication(NamedTuple):
    """One message on its way into a stream: an effect like any other."""

    subject: str
    data: bytes
    answered: Callable[[bool], None]


class Post:
    """The durable streams of messages. `woken(family, shard)` is told that one has a new one."""

    def __init__(
        self, world: World, logs: Mapping[str, SimulatedLog], woken: Callable[[str, int], None]
    ) -> None:
        self.world = world
        self._logs = logs
        self._woken = woken

    def put(self, process: Process, sent: Publication) -> None:
        world = self.world
        family, _, number = sent.subject.removeprefix(f"{subjects.PREFIX}.message.").partition(".")
        if process.is_cut("log") or process.is_cut(family) or world.hit("message_lost"):
            return
        delayed = world.hit("message_delayed")
        delay_ms = world.between(200, 5_000) if delayed else world.between(0, 5)
        world.after(delay_ms, self._arrived, process, process.life, family, int(number), sent)
        if world.hit("message_repeated"):
            late_ms = world.between(0, 8_000)
            world.after(late_ms, self._stored, family, int(number), sent)

    def _arrived(
        self, process: Process, life: int, family: str, shard: int, sent: Publication
    ) -> None:
        self._stored(family, shard, sent)
        if not self.world.hit("message_answer_lost"):
            self.world.answer(1, process, life, sent.answered, (True,))

    def _stored(self, family: str, shard: int, sent: Publication) -> None:
        stream = self._logs[family].inputs["messages"][shard]
        if self.world.hit("message_poisoned"):
            stream.append(sent.subject, b'{"nonsense":')
        stream.append(sent.subject, sent.data)
        self._woken(family, shard)


class _Bus:
    """What outbox and receiver publish by: each publication becomes an effect of the hold."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold

    def publish_acked(self, subject: str, data: bytes, answered: Callable[[bool], None]) -> None:
        self._hold.publish(Publication(subject, data, answered))


class _Clock:
    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic_ms(self) -> int:
        return self._world.now_ms


class Mail:
    """The messages of one hold: what it sends, and in which order it takes what it got."""

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.last_seen: dict[str, Seen] = {}
        self.read_seq = 0
        bus: Any = _Bus(hold)
        clock: Any = _Clock(hold.world)
        machine, shard, shards = hold.machine, hold.shard, hold.planner.shards
        self._maker = MessageMaker(machine, shard, shards)
        self.outbox = Outbox(
            self._maker, bus, clock, window=hold.world.options.window, keeps_links=True
        )
        self._receiver = exchange.Receiver(machine.family, shard, bus, clock, self._seen)

    def _seen(self, sender: str) -> Seen:
        return self.last_seen.get(sender, Seen(0, 0))

    # --- taking over ----------------------------------------------------------------------

    def start_from(self, sent: int, links: Mapping[str, Seen]) -> None:
        """Begins where a snapshot says that all was acknowledged."""
        self.outbox.start_from(sent)
        self.outbox.sent_links.update(links)
        self._maker.links.update(links)

    def folded(self, stored: Stored, batch: Batch, entries: Sequence[Any], sent: int) -> None:
        """Takes a batch of the log; `sent` is how far the newest one says that all was sent."""
        if stored.seq <= self.outbox.kept:
            return
        if stored.seq <= sent:
            self.outbox.skip(stored.seq, entries, batch.now_ms)
        else:
            self.outbox.add(batch.prev, stored.seq, entries, batch.now_ms)

    def accepted(self, prev: int, seq: int, entries: Sequence[Any], now_ms: int) -> None:
        self.outbox.add(prev, seq, entries, now_ms)

    # --- by timer -------------------------------------------------------------------------

    def look(self) -> None:
        """Sends again, asks again, and reads from the log what the window had no room for."""
        self.outbox.repeat()
        self._receiver.ask_again()
        outbox, hold = self.outbox, self.hold
        if outbox.is_behind(hold.head) and outbox.has_room:
            hold.log.read(hold.planner, hold.shard, outbox.kept, self._refill)

    def _refill(self, batches: list[Stored]) -> None:
        hold = self.hold
        if hold.ended:
            return
        for stored in batches:
            if stored.seq > hold.head or not self.outbox.has_room:
                return
            batch = _BATCH.decode(stored.payload)
            entries = hold.machine.decode_entries(bytes(batch.entries))
            self.outbox.add(batch.prev, stored.seq, entries, batch.now_ms)

    # --- taking ---------------------------------------------------------------------------

    def position(self) -> int:
        """What may be recorded: below everything that still waits for an earlier message."""
        lowest = self._receiver.lowest_waiting()
        return self.read_seq if lowest is None else min(self.read_seq, lowest - 1)

    def take(self, seq: int, subject: str, data: bytes) -> list[bytes]:
        """
        Returns the bodies whose turn it is, in order. Raises `PoisonedError`.
        """
        self.read_seq = seq
        envelope = exchange.decode(data)
        if envelope.resend:
            self._send_again(envelope)
            return []
        bodies: list[bytes] = []
        taken = self._receiver.offer(envelope, InputMessage(seq, subject, data))
        while taken is not None:
            said = taken.envelope
            self.last_seen = {**self.last_seen, said.sender: Seen(said.seq, said.index)}
            bodies.append(bytes(said.body))
            taken = self._receiver.following(envelope.sender)
        return bodies

    def _send_again(self, ask: Envelope) -> None:
        """Publishes again what was sent to one receiver after a position."""
        hold = self.hold

        def answered(batches: list[Stored]) -> None:
            if hold.ended:
                return
            maker = Resender(hold.machine, hold.shard, hold.planner.shards, ask)
            for stored in batches:
                if stored.seq > hold.head:
                    return
                batch = _BATCH.decode(stored.payload)
                entries = hold.machine.decode_entries(bytes(batch.entries))
                for subject, data in maker.make(stored.seq, entries, batch.now_ms):
                    hold.publish(Publication(subject, data, lambda _ok: None))

        # The batch of the position itself may hold later messages: the reading begins before it.
        hold.log.read(hold.planner, hold.shard, max(ask.seq - 1, 0), answered)
