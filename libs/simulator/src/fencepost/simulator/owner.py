"""
What a replica holds of a shard: the simulator's runtime of the very machines that run live.

A `Hold` is one ownership of one shard: fold, open a term, then turn after turn: decide, one batch,
append, wait, effects one by one. It keeps the rules of the live runner: nothing leaves before its
batch was accepted; a refused append that is not its own ends the hold and drops its state.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from fencepost.contracts.messages import BATCH_VERSION, HASH, Batch, Position, Seen, Sent
from fencepost.core.errors import PoisonedError
from fencepost.core.machine import Effect, Place
from fencepost.simulator.ledger import SimulatedLog, Stored
from fencepost.simulator.mail import Mail, Publication
from fencepost.simulator.recalling import recall
from fencepost.simulator.world import World

if TYPE_CHECKING:
    from fencepost.simulator.replicas import Planner

APPEND_WAIT_MS: Final = 600
READ_WAIT_MS: Final = 400
SWEEP_MS: Final = 500
REPEAT_MS: Final = 800
REPEAT_MS_MAX: Final = 3_200
PROOF_MS: Final = 1_000
LAZY_MS: Final = 1_000
CLOCK_SKEW_MS_MAX: Final = 5_000
TICKS_MAX: Final = 64
VOLATILE_SHARE: Final = 128
LANE_SHARE: Final = 32
INCARNATION: Final = "1"

_BATCH = msgspec.json.Decoder(Batch)
_ENCODE = msgspec.json.Encoder().encode


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class SnapshotBody(msgspec.Struct):
    """What a snapshot carries beside the state."""

    seq: int
    term: int
    now_ms: int
    positions: dict[str, Position]
    state: msgspec.Raw
    last_seen: dict[str, Seen] = {}
    sent: int = 0
    links: dict[str, Seen] = {}


_SNAPSHOT = msgspec.json.Decoder(SnapshotBody)


class _Flight(NamedTuple):
    """The batch that was sent and is not known to be accepted."""

    id: str
    prev: int
    payload: bytes
    entries: list[Any]
    now_ms: int
    sent_at_ms: int


class _Ask(NamedTuple):
    """A question; a batch counted above `after` was begun after it was asked."""

    after: int
    answer: Callable[[Any], None]


class Hold:
    """One ownership of one shard, from the first read to its end."""

    def __init__(self, planner: Planner, shard: int) -> None:
        self.planner = planner
        self.number = planner.takeovers
        self.world: World = planner.world
        self.shard = shard
        self.machine = planner.machine
        self.log: SimulatedLog = planner.log
        self.state: Any = self.machine.initial(shard, planner.shards)
        self.hints: Any = self.machine.new_hints()
        self.head = 0
        self.term = 0
        self.now_ms = 0
        self.positions: dict[str, Position] = {}
        self.owning = False
        self.ended = False
        self.proven_ms = 0
        self.accepted_count = 0
        self.mail = Mail(self) if planner.post is not None else None
        self._lane_orders = list(permutations(self.log.inputs))
        self._asks: list[_Ask] = []
        self._proof_ms = -PROOF_MS
        self._flight: _Flight | None = None
        self._asked = 0
        self._inbox: deque[Any] = deque()
        self._todo: deque[Effect | Publication] = deque()
        self._owed: dict[str, tuple[int, int]] = {}
        self._unrecorded_since_ms: int | None = None
        self._muted_ms = 0
        self._wake_at_ms = 0
        self._must_prove = False

    # --- taking over ----------------------------------------------------------------------

    def start(self) -> None:
        self._ask(self._fold)

    def _ask(self, answer: Callable[[list[Stored]], None], after: int = 0) -> None:
        """Reads the log from `after`; the hold ends when no answer comes to an opening read."""
        self._asked += 1
        asked = self._asked

        def answered(batches: list[Stored]) -> None:
            if not self.ended and asked == self._asked:
                self._asked += 1
                answer(batches)

        def missed() -> None:
            if not self.ended and asked == self._asked:
                if self.owning or self._flight is not None:
                    self._ask(answer, after)
                else:
                    self.end("the log does not answer")

        self.log.read(self.planner, self.shard, after, answered)
        self.planner.after(READ_WAIT_MS, missed)

    def _fold(self, batches: list[Stored]) -> None:
        end = batches[-1].seq if batches else 0
        sent = _BATCH.decode(batches[-1].payload).sent.messages if batches else 0
        self._load_snapshot(end)
        kept = self.head if self.mail is None else min(self.head, self.mail.outbox.kept)
        for stored in batches:
            if stored.seq > kept:
                self._replay(stored, sent)
        if self.mail is not None and "messages" in self.positions:
            self.mail.read_seq = self.positions["messages"].seq
        if abs(self.planner.skew_ms) > CLOCK_SKEW_MS_MAX:
            self.end("this clock is too far off")
            return
        opened = self.machine.term_opened(
            self.term + 1, self.planner.name, self.planner.shards, HASH
        )
        self.term += 1
        now_ms = max(self.planner.clock_ms(), self.now_ms)
        self.machine.evolve(self.state, opened, Place(self.head, 0), now_ms)
        self._send([opened], now_ms)

    def _load_snapshot(self, end: int) -> None:
        for snapshot in reversed(self.log.snapshots[self.shard]):
            if snapshot.seq <= end and digest(snapshot.data) == snapshot.digest:
                body = _SNAPSHOT.decode(snapshot.data)
                self.state = self.machine.decode_state(bytes(body.state))
                self.head, self.term, self.now_ms = body.seq, body.term, body.now_ms
                self.positions = dict(body.positions)
                if self.mail is not None:
                    self.mail.last_seen = dict(body.last_seen)
                    self.mail.start_from(body.sent, body.links)
                return

    def _replay(self, stored: Stored, sent: int) -> None:
        batch = _BATCH.decode(stored.payload)
        entries = self.machine.decode_entries(bytes(batch.entries))
        if self.mail is not None:
            self.mail.folded(stored, batch, entries, sent)
        if stored.seq <= self.head:
            return  # in the snapshot; only what it had not yet sent is of interest
        assert batch.prev == self.head, "a batch does not follow its predecessor"
        for index, entry in enumerate(entries):
            self.machine.evolve(self.state, entry, Place(batch.prev, index), batch.now_ms)
        self.head = stored.seq
        self.term = batch.term
        self.now_ms = max(self.now_ms, batch.now_ms)
        self.positions = dict(batch.positions)
        if self.mail is not None:
            self.mail.last_seen = dict(batch.last_seen)

    # --- one turn -------------------------------------------------------------------------

    def deliver(self, value: Any) -> None:
        """Takes a volatile input; hints at once, whatever may make entries in the next turn."""
        if self.ended or not self.owning:
            return
        now_ms = max(self.planner.clock_ms(), self.now_ms)
        if not self.machine.take_hint(self.state, self.hints, value, now_ms):
            self._inbox.append(value)
        self.turn()

    def turn(self) -> None:
        if self.ended or not self.owning or self._flight is not None:
            return
        self._answer_asks()
        now_ms = max(self.planner.clock_ms(), self.now_ms)
        entries: list[Any] = []
        self._tick(entries, now_ms)
        for _ in range(min(len(self._inbox), VOLATILE_SHARE)):
            self._take(entries, self._inbox.popleft(), now_ms)
        for name in self._lanes():
            self._take_lane(entries, name, now_ms)
        since_ms = self._unrecorded_since_ms
        lazy = since_ms is not None and self.world.now_ms - since_ms >= LAZY_MS
        if entries or lazy or self._must_prove or self._asks:
            self._send(entries, now_ms)
            return
        self._sleep(now_ms)

    def _lanes(self) -> Sequence[str]:
        # No decision may depend on the order between streams: so it is drawn.
        lot = self.world.rng.random()
        if self.mail is None:
            return ("commands", "facts") if lot < 0.5 else ("facts", "commands")
        return self._lane_orders[int(lot * len(self._lane_orders))]

    def _tick(self, entries: list[Any], now_ms: int) -> None:
        for _ in range(TICKS_MAX):
            due_ms = self.machine.next_due_ms(self.state, self.hints)
            if due_ms is None or due_ms > now_ms or self.world.now_ms < self._muted_ms:
                return
            if not self._take(entries, self.machine.tick(), now_ms):
                self._muted_ms = self.world.now_ms + 50
                return

    def _take(self, entries: list[Any], value: Any, now_ms: int) -> bool:
        made = self.machine.decide(self.state, self.hints, value, now_ms)
        for entry in made:
            self.machine.evolve(self.state, entry, Place(self.head, len(entries)), now_ms)
            entries.append(entry)
        return bool(made)

    def _take_lane(self, entries: list[Any], name: str, now_ms: int) -> None:
        stream = self.log.inputs[name][self.shard]
        if self.planner.is_cut("log"):
            return
        if name == "messages":
            self._take_messages(entries, stream.messages, now_ms)
            return
        position = self.positions.get(name)
        seq = position.seq if position is not None else 0
        before = seq
        for subject, data in stream.messages[seq : seq + LANE_SHARE]:
            seq += 1
            try:
                values = self.machine.decode(name, subject, data)
            except PoisonedError as error:
                values = [self.machine.poison(name, subject, seq, str(error))]
            for value in values:
                self._take(entries, value, now_ms)
        if seq != before:
            self.positions = {**self.positions, name: Position(INCARNATION, seq)}
            if self._unrecorded_since_ms is None:
                self._unrecorded_since_ms = self.world.now_ms

    def _take_messages(
        self, entries: list[Any], messages: list[tuple[str, bytes]], now_ms: int
    ) -> None:
        """Takes the messages whose turn it is; those that are early wait (S-225)."""
        mail = self.mail
        assert mail is not None
        before = mail.read_seq
        for seq in range(before + 1, min(len(messages), before + LANE_SHARE) + 1):
            subject, data = messages[seq - 1]
            try:
                bodies = mail.take(seq, subject, data)
            except PoisonedError as error:
                poison = self.machine.poison("messages", subject, seq, str(error))
                self._take(entries, poison, now_ms)
                continue
            for body in bodies:
                for value in self.machine.decode("messages", subject, body):
                    self._take(entries, value, now_ms)
        if mail.read_seq != before and self._unrecorded_since_ms is None:
            self._unrecorded_since_ms = self.world.now_ms

    def _sleep(self, now_ms: int) -> None:
        """Wakes for what is due next, at the latest for lazily recorded positions."""
        due_ms = self.machine.next_due_ms(self.state, self.hints)
        wait_ms = LAZY_MS if due_ms is None else max(due_ms - now_ms, 20)
        at_ms = self.world.now_ms + min(wait_ms, LAZY_MS)
        if self.world.now_ms < self._wake_at_ms <= at_ms:
            return
        self._wake_at_ms = at_ms
        self.planner.after(at_ms - self.world.now_ms, self._woken, at_ms)

    def _woken(self, at_ms: int) -> None:
        if at_ms == self._wake_at_ms:
            self._wake_at_ms = 0
            self.turn()

    # --- append ---------------------------------------------------------------------------

    def _send(self, entries: list[Any], now_ms: int) -> None:
        self.accepted_count += 1
        mail = self.mail
        if mail is not None and mail.position():
            at = Position(INCARNATION, mail.position())
            self.positions = {**self.positions, "messages": at}
        batch_id = self._batch_id()
        batch = Batch(
            v=BATCH_VERSION,
            id=batch_id,
            family=self.machine.family,
            shard=self.shard,
            term=self.term,
            owner=self.planner.name,
            prev=self.head,
            now_ms=now_ms,
            positions=self.recorded_positions(),
            last_seen={} if mail is None else mail.last_seen,
            sent=Sent() if mail is None else Sent(messages=mail.outbox.sent),
            entries=msgspec.Raw(self.machine.encode_entries(entries)),
        )
        self._unrecorded_since_ms = None
        self._must_prove = False
        payload = _ENCODE(batch)
        self._flight = _Flight(batch_id, self.head, payload, entries, now_ms, self.world.now_ms)
        self._append()

    def _batch_id(self) -> str:
        """Unique over all holds: the same term may be opened twice by one replica."""
        planner = self.planner
        return f"{planner.name}.{planner.life}.{self.number}.{self.term}.{self.accepted_count}"

    def recorded_positions(self) -> dict[str, Position]:
        return self.positions

    def expected(self, flight: _Flight) -> int:
        """What the append is conditional on: the head that the batch was decided on."""
        return flight.prev

    def _append(self) -> None:
        flight = self._flight
        assert flight is not None
        self._asked += 1
        asked = self._asked

        def answered(seq: int | None) -> None:
            if self.ended or self._flight is not flight or asked != self._asked:
                return
            if seq is not None:
                self._accepted(seq)
            else:
                self._find_out()

        def missed() -> None:
            if not self.ended and self._flight is flight and asked == self._asked:
                self._find_out()

        self.log.append(self.planner, self.shard, flight.payload, self.expected(flight), answered)
        self.planner.after(APPEND_WAIT_MS, missed)

    def _find_out(self) -> None:
        """Reads forward from the expected sequence: what stands there decides (S-211)."""
        flight = self._flight
        assert flight is not None
        self._ask(self._found_out, after=flight.prev)

    def _found_out(self, batches: list[Stored]) -> None:
        flight = self._flight
        assert flight is not None
        if not batches:
            self._append()  # the same batch on the same head: accepted once at most
            return
        there = _BATCH.decode(batches[0].payload)
        if there.id == flight.id:
            self._accepted(batches[0].seq)
        else:
            self.lost_term(f"{there.owner} in term {there.term} was accepted")

    def lost_term(self, reason: str) -> None:
        self.end(reason)

    def _accepted(self, seq: int) -> None:
        flight = self._flight
        assert flight is not None
        self._flight = None
        self._asked += 1
        self.head = seq
        self.now_ms = flight.now_ms
        self.proven_ms = self.world.now_ms
        self._proof_ms = flight.sent_at_ms
        mail = self.mail
        if not self.owning:
            self.owning = True
            if mail is not None:
                mail.outbox.release()
            self.planner.owned(self)
            self._sweep_now(at_once=True)
            self.planner.after(SWEEP_MS, self._sweep)
        if self.world.hit("crash_after_append"):
            self.planner.crash()
            return
        for entry in flight.entries:
            for effect in self.machine.effects_of(self.state, self.hints, entry):
                self._owed[effect.key] = (self.world.now_ms + REPEAT_MS, REPEAT_MS)
                self._perform(effect)
        if mail is not None:
            mail.accepted(flight.prev, seq, flight.entries, flight.now_ms)
        self.planner.accepted(self)
        self._inbox.extend(recall(self))
        self._snapshot()
        self.turn()

    def _snapshot(self) -> None:
        if len(self.log.batches[self.shard]) % self.planner.snapshot_every:
            return
        body = SnapshotBody(
            self.head,
            self.term,
            self.now_ms,
            self.positions,
            msgspec.Raw(self.machine.encode_state(self.state)),
        )
        if self.mail is not None:
            body.last_seen = self.mail.last_seen
            body.sent = self.mail.outbox.sent
            body.links = dict(self.mail.outbox.sent_links)
        data = _ENCODE(body)
        self.log.put_snapshot(self.shard, self.head, digest(data), data)

    # --- effects --------------------------------------------------------------------------

    def publish(self, sent: Publication) -> None:
        """A message that leaves after its batch was accepted, in order with all other effects."""
        self._perform(sent)

    def _perform(self, effect: Effect | Publication) -> None:
        self._todo.append(effect)
        if len(self._todo) == 1:
            self.planner.after(0, self._perform_next)

    def _perform_next(self) -> None:
        """One effect at a time, so that a crash can come between any two."""
        if self.ended or not self._todo:
            return
        if self.world.hit(self.planner.crashes_between_effects):
            self.planner.crash()
            return
        effect = self._todo.popleft()
        if isinstance(effect, Publication):
            self.planner.publish(effect)
        else:
            self.planner.perform(self, effect)
        if self._todo:
            self.planner.after(0, self._perform_next)

    def _sweep(self) -> None:
        if self.ended:
            return
        self.planner.after(SWEEP_MS, self._sweep)
        if self.mail is not None:
            self.mail.look()
        # An idle owner must still be one before it makes timed effects (S-227).
        if self.world.now_ms - self.proven_ms > PROOF_MS:
            self._must_prove = True
            self.turn()
        else:
            self._sweep_now()

    def _sweep_now(self, *, at_once: bool = False) -> None:
        if self._flight is not None:
            return  # the state is ahead of the log
        now_ms = self.world.now_ms
        owed: dict[str, tuple[int, int]] = {}
        ledger_ms = max(self.planner.clock_ms(), self.now_ms)
        for effect in self.machine.effects(self.state, self.hints, ledger_ms):
            known = self._owed.get(effect.key)
            if known is None or at_once:
                owed[effect.key] = (now_ms + REPEAT_MS, REPEAT_MS)
                self._perform(effect)
            elif known[0] <= now_ms:
                delay_ms = min(known[1] * 2, REPEAT_MS_MAX)
                owed[effect.key] = (now_ms + delay_ms, delay_ms)
                self._perform(effect)
            else:
                owed[effect.key] = known
        self._owed = owed

    # --- questions ------------------------------------------------------------------------

    def ask(self, answer: Callable[[Any], None]) -> None:
        """Answers from the state as the log has it, with a proof of this term; or never."""
        if not self.ended and self.owning:
            self._asks.append(_Ask(self.accepted_count, answer))
            self.turn()

    def _answer_asks(self) -> None:
        """Answers what is proven: nothing is in flight here, so the state is the log's."""
        if not self._asks:
            return
        fresh = self.world.now_ms - self._proof_ms <= PROOF_MS
        asks, self._asks = self._asks, []
        for ask in asks:
            if fresh or self.accepted_count > ask.after:
                ask.answer(self.state)
            else:
                self._asks.append(ask)

    def end(self, reason: str) -> None:
        """Drops the state; another hold may be tried later."""
        if not self.ended:
            self.ended = True
            self._todo.clear()
            self._inbox.clear()
            self._asks.clear()
            self.world.tell("hold ends", self.planner.name, f"shard {self.shard}", reason)
            self.planner.released(self)
