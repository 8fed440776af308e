"""
Runs a machine on its shard: takes over, turns inputs into batches, makes the effects.

    inputs ──▶ decide, evolve ──▶ ONE batch ──▶ append ──▶ acknowledged ──▶ effects, publications

Rule 1: one batch is in flight, and nothing leaves before it is acknowledged: no effect, event,
message or answer.
Rule 2: a refused append that is not one's own ends the ownership; so does an error in `evolve`.
The state, which is ahead of the log by at most one batch, is dropped, never rolled back.
Rule 3: an append without an answer is neither: it is found out by reading forward, and sent again
under the same id and the same expected sequence.
Rule 4: what is answered to the outside is read between two batches, and only when a batch of this
term was accepted within the asker's bound.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog
from fencepost.contracts.messages import BATCH_VERSION, HASH, Batch, Position, Seen, Sent
from fencepost.core import limits
from fencepost.core.errors import (
    FencepostError,
    LedgerBrokenError,
    OwnershipLostError,
    PoisonedError,
    UnknownError,
)
from fencepost.core.machine import Effect, Machine
from fencepost.runtime import crash, exchange, snapshots
from fencepost.runtime.fold import Folder, Shard, decode_batch
from fencepost.runtime.gate import Gate
from fencepost.runtime.metrics import RunnerMetrics
from fencepost.runtime.outbox import Envelope, Outbox, Resender
from fencepost.runtime.ports import (
    AppendRefused,
    AppendUnknown,
    Bus,
    Clock,
    ClockSkewedError,
    InputMessage,
    InputReader,
    Inputs,
    Log,
    Snapshots,
    Unknown,
    Valid,
)

T = TypeVar("T")

CLOCK_SKEW_MS_MAX: Final = 5_000
TICKS_MAX: Final = 128
POSITIONS_LAZY_MS: Final = 1_000
SWEEP_MS: Final = 1_000
SNAPSHOT_EVERY: Final = 2_000
SNAPSHOT_AT_HAND_OVER: Final = 100
LANE_MESSAGES_MAX: Final = 4_096
VOLATILE_MAX: Final = 50_000
VOLATILE_SHARE: Final = limits.BATCH_INPUTS_MAX * 3 // 8
PROOF_MS: Final = 1_000
RETRY_S_MIN: Final = 0.01
RETRY_S_MAX: Final = 1.0

_HEADER_BYTES_MAX: Final = 32 * limits.KIB
_ENTRIES_BYTES_STOP: Final = (
    limits.BATCH_BYTES_MAX - limits.INPUT_ENTRIES_BYTES_MAX - _HEADER_BYTES_MAX
)
_VOLATILE: Final = "volatile"

assert _ENTRIES_BYTES_STOP > limits.INPUT_ENTRIES_BYTES_MAX

logger = structlog.get_logger(__name__)
_ENCODE = msgspec.json.Encoder().encode


class Durable(NamedTuple):
    """
    One durable input of a shard.

    `source` is its name towards the machine, `stream` its name in the recorded positions, `share`
    how many of its inputs one batch may take.
    """

    source: str
    stream: str
    filters: list[str]
    share: int = limits.BATCH_INPUTS_MAX
    is_exchange: bool = False


class EvolveFailedError(FencepostError):
    """`evolve` raised: a bug. Nothing of the batch was appended."""


class _Lane:
    """What was read of one durable input and not yet taken."""

    __slots__ = ("durable", "left", "position", "queue", "reader", "receiver", "taking")

    def __init__(self, durable: Durable, position: Position) -> None:
        self.durable = durable
        self.position = position
        self.queue: deque[InputMessage] = deque()
        self.taking: InputMessage | None = None
        self.left: deque[Any] = deque()
        self.reader: InputReader | None = None
        self.receiver: exchange.Receiver | None = None

    def room(self) -> int:
        return LANE_MESSAGES_MAX - len(self.queue)


class _Turn:
    """What one turn makes: the entries of the next batch, and who waits for it."""

    __slots__ = ("accepted", "chunks", "entries", "inputs", "now_ms", "size")

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.entries: list[Any] = []
        self.chunks: list[bytes] = []
        self.size = 0
        self.inputs = 0
        self.accepted: list[Callable[[int], None]] = []

    @property
    def is_full(self) -> bool:
        return self.size >= _ENTRIES_BYTES_STOP or self.inputs >= limits.BATCH_INPUTS_MAX


class _Ask(NamedTuple):
    """A question; a batch counted above `after` was begun after it was asked."""

    after: int
    max_age_ms: int
    read: Callable[[Any], Any]
    future: asyncio.Future[Any]


class ShardRunner:
    """
    Owns one shard. Made for one ownership: after the end, another takeover needs another runner.

    `perform` gets effects after their batch was accepted, again by timer while they are owed; it
    must not block. `accepted` hears of every accepted batch's entries (for metrics and logs).
    `gate` is shared by the runners of a process.
    """

    def __init__(
        self,
        machine: Machine[Any, Any],
        shard: int,
        shards: int,
        *,
        owner: str,
        log: Log,
        bus: Bus,
        clock: Clock,
        inputs: Inputs,
        durables: Sequence[Durable],
        perform: Callable[[list[Effect]], None],
        metrics: RunnerMetrics,
        snapshot_store: Snapshots | None = None,
        accepted: Callable[[Sequence[Any]], None] | None = None,
        snapshot_every: int = SNAPSHOT_EVERY,
        effect_repeat_ms: int = limits.EFFECT_REPEAT_MS,
        sweep_ms: int = SWEEP_MS,
        gate: Gate | None = None,
    ) -> None:
        self.machine = machine
        self.shard = Shard(machine, shard, shards, bus=bus, clock=clock)
        self.owner = owner
        # A batch is known again by its id. An owner that was one before, and folded a stale read,
        # opens its former term once more: without this it would take its former batches for these.
        self._ownership = secrets.token_hex(6)
        self.is_owner = False
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._log = log
        self._bus = bus
        self._clock = clock
        self._inputs = inputs
        self._durables = list(durables)
        self._perform = perform
        self._metrics = metrics
        self._store = snapshot_store
        self._accepted_cb = accepted
        self._snapshot_every = snapshot_every
        self._effect_repeat_ms = effect_repeat_ms
        self._sweep_ms = sweep_ms
        self._gate = gate or Gate()
        self._lanes: list[_Lane] = []
        self._volatile: deque[tuple[Any, Callable[[int], None] | None]] = deque()
        self._asks: list[_Ask] = []
        self._owed: dict[str, tuple[int, int]] = {}
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._side: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._stopping = False
        self._batches = 0
        self._first = 0
        self._entry_counts: dict[type, int] = {}
        self._proven_ms = 0
        self._proven_batch = 0
        self._positions_since_ms: int | None = None
        self._sweep_at_ms = 0
        self._tick_muted_ms = 0
        self._snapshot_busy = False
        self._refilling: set[int] = set()
        self._state_lost = False
        self._label = str(shard)
        self.log = logger.bind(family=machine.family, shard=shard)

    # Taking over.

    async def start(self) -> None:
        """
        Takes the shard over and runs it; returns when it is owned.

        Raises `UnknownError` (try again), `OwnershipLostError` (somebody else was faster),
        `LedgerBrokenError`, `InputLostError` or `ClockSkewedError` (do not own).
        """
        began_ms = self._clock.monotonic_ms()
        shard = self.shard
        await self._check_clock()
        await Folder(shard, self._log, self._store).fold()
        crash.point("after_fold")
        await self._open_lanes()
        await self._open_term()
        crash.point("after_term_opened")
        self.is_owner = True
        shard.events.release()
        shard.messages.release()
        self._sweep(at_once=True)
        for lane in self._lanes:
            await self._open_reader(lane)
        self._task = asyncio.create_task(self._run(), name=f"shard-{shard.subject}")
        took_ms = self._clock.monotonic_ms() - began_ms
        self._metrics.takeover_seconds.observe(took_ms / 1000)
        self.log.info("shard_owned", term=shard.term, seq=shard.head, took_ms=took_ms)

    async def _check_clock(self) -> None:
        server_ms = await self._log.server_now_ms()
        skew_ms = self._clock.now_ms() - server_ms
        if abs(skew_ms) > CLOCK_SKEW_MS_MAX:
            raise ClockSkewedError(
                f"this clock is {skew_ms} ms from the server's; at most {CLOCK_SKEW_MS_MAX} may be"
            )

    async def _open_lanes(self) -> None:
        """Checks every durable input against its recorded position, before the term is opened."""
        for durable in self._durables:
            recorded = self.shard.positions.get(durable.stream)
            incarnation = await self._inputs.incarnation(durable.stream, recorded)
            position = recorded or Position(incarnation=incarnation, seq=0)
            lane = _Lane(durable, position)
            if durable.is_exchange:
                lane.receiver = exchange.Receiver(
                    self.machine.family, self.shard.shard, self._bus, self._clock, self._last_seen
                )
            self._lanes.append(lane)

    async def _open_reader(self, lane: _Lane) -> None:
        def take(message: InputMessage) -> None:
            lane.queue.append(message)
            self.wake()

        def fail(error: Exception) -> None:
            self._failure = self._failure or error
            self.wake()

        lane.reader = await self._inputs.open(
            lane.durable.stream,
            lane.durable.filters,
            after=lane.position,
            take=take,
            room=lane.room,
            fail=fail,
        )

    async def _open_term(self) -> None:
        shard = self.shard
        shard.term += 1
        turn = _Turn(max(self._clock.now_ms(), shard.now_ms))
        entry = self.machine.term_opened(shard.term, self.owner, shard.shards, HASH)
        self._add(turn, [entry])
        self._publish(turn, await self._append(turn))

    # Inputs from the outside.

    def wake(self) -> None:
        """Something is to be done."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def submit(self, value: Any, accepted: Callable[[int], None] | None = None) -> bool:
        """
        Takes a volatile input; `accepted(seq)` follows once what it led to is in the ledger.

        A hint is taken at once. False: not owned, or too many are waiting; the sender repeats.
        """
        if not self.is_owner:
            return False
        shard = self.shard
        now_ms = max(self._clock.now_ms(), shard.now_ms)
        try:
            if self.machine.take_hint(shard.state, shard.hints, value, now_ms):
                self.wake()
                return True
        except Exception:
            # Contained: hints decide no safety, and the sender is not ours to trust.
            self.log.exception("hint_failed")
            return False
        if len(self._volatile) >= VOLATILE_MAX:
            self._metrics.inputs_dropped.inc()
            return False
        self._volatile.append((value, accepted))
        self.wake()
        return True

    async def ask(self, read: Callable[[Any], T], *, max_age_ms: int = PROOF_MS) -> T:
        """
        Reads the state as the log has it, with a proof that is at most `max_age_ms` old.

        The proof is an accepted batch of this term; without one a batch is appended. Raises
        `OwnershipLostError` when there is none to be had.
        """
        if not self.is_owner:
            raise OwnershipLostError(f"{self.shard.subject} is not owned here")
        future: asyncio.Future[T] = self._loop.create_future()
        self._asks.append(_Ask(self._batches, max_age_ms, read, future))
        self.wake()
        return await future

    async def prove(self, max_age_ms: int = PROOF_MS) -> None:
        """Returns once a batch of this term was accepted within the last `max_age_ms`."""
        await self.ask(lambda _state: None, max_age_ms=max_age_ms)

    async def entries_at(self, after: int) -> Sequence[Any]:
        """Reads the entries of the batch that follows a sequence. Raises `UnknownError`."""
        got = await self._log.next_after(self.shard.subject, after)
        if not isinstance(got, Valid):
            raise UnknownError(f"{self.shard.subject}: no batch to be read after {after}")
        batch = self._decode(got.payload)
        return self.machine.decode_entries(bytes(batch.entries))

    async def batches_after(self, after: int) -> AsyncIterator[tuple[int, bytes]]:
        """
        Yields the accepted batches above a sequence: the former one's sequence, and the entries.

        Up to the head of this moment. Raises `UnknownError` when the read is cut.
        """
        shard = self.shard
        head = shard.head
        async for seq, payload in self._log.read(shard.subject, after + 1):
            if seq > head:
                return
            batch = self._decode(payload)
            yield batch.prev, bytes(batch.entries)

    async def stop(self, *, hand_over: bool = True) -> None:
        """
        Ends the ownership after the batch in flight.

        With `hand_over` a snapshot is taken and recorded first, so that the next owner starts
        fast; another may take the shard over at any moment, which is no error.
        """
        self._stopping = True
        self.wake()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if hand_over and not self._state_lost and self._failure is None and self.is_owner:
            try:
                await self._hand_over()
            except (OwnershipLostError, UnknownError, AppendUnknown) as error:
                self.log.info("hand_over_without_snapshot", detail=str(error))
        await self._end(None)

    # The loop.

    async def _run(self) -> None:
        try:
            while not self._stopping:
                await self._cycle()
        except OwnershipLostError as error:
            self.log.info("ownership_lost", detail=str(error))
            await self._end(error)
        except UnknownError as error:
            # Asked to stop while the log is silent: the next owner reads what became of the batch.
            self.log.warning("ownership_ended_unproven", detail=str(error))
            await self._end(error)
        except Exception as error:
            # Contained: whatever it is, this shard's state is dropped and the process goes on.
            self.log.exception("ownership_ended", detail=str(error))
            await self._end(error)

    async def _cycle(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._answer_asks()
        place = await self._gate.enter()
        try:
            turn = self._decide()
            seq = 0 if turn is None else await self._append(turn)
        finally:
            place.give_back()
        if turn is None:
            self._housekeeping()
            await self._wait()
            return
        crash.point("after_append")
        self._after(turn, seq)
        self._housekeeping()

    async def _wait(self) -> None:
        now_ms = self._clock.monotonic_ms()
        until_ms = self._sweep_at_ms - now_ms
        if self._positions_since_ms is not None:
            until_ms = min(until_ms, self._positions_since_ms + POSITIONS_LAZY_MS - now_ms)
        due_ms = self.machine.next_due_ms(self.shard.state, self.shard.hints)
        if due_ms is not None:
            wait_ms = due_ms - max(self._clock.now_ms(), self.shard.now_ms)
            until_ms = min(until_ms, max(wait_ms, self._tick_muted_ms - now_ms))
        if self._has_work() or self._stopping or self._failure is not None:
            return
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(max(until_ms, 1) / 1000, self.wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _has_work(self) -> bool:
        return bool(
            self._volatile or self._asks or any(lane.queue or lane.left for lane in self._lanes)
        )

    def _answer_asks(self) -> None:
        """Answers what is proven. The state is the log's here: nothing is in flight."""
        if not self._asks:
            return
        now_ms = self._clock.monotonic_ms()
        waiting: list[_Ask] = []
        for ask in self._asks:
            if ask.future.done():
                continue
            if now_ms - self._proven_ms > ask.max_age_ms and self._proven_batch <= ask.after:
                waiting.append(ask)
                continue
            try:
                ask.future.set_result(ask.read(self.shard.state))
            except Exception as error:
                # Contained: the asker gets it.
                ask.future.set_exception(error)
        self._asks = waiting

    # One turn.

    def _decide(self) -> _Turn | None:
        """Decides what is waiting; None when nothing is to be appended."""
        shard = self.shard
        turn = _Turn(max(self._clock.now_ms(), shard.now_ms))
        mono_ms = self._clock.monotonic_ms()
        self._tick(turn, mono_ms)
        # Whoever came first in a batch that was full comes last in the next: none starves.
        count = len(self._lanes) + 1
        for offset in range(count):
            which = (self._first + offset) % count
            if which == 0:
                self._take_volatile(turn)
            else:
                self._take_lane(turn, self._lanes[which - 1])
        if turn.is_full:
            self._first = (self._first + 1) % count
        forced = bool(self._asks) or (
            self._positions_since_ms is not None
            and mono_ms - self._positions_since_ms >= POSITIONS_LAZY_MS
        )
        if turn.entries or forced:
            return turn
        for accepted in turn.accepted:
            accepted(shard.head)
        return None

    def _tick(self, turn: _Turn, mono_ms: int) -> None:
        """Time comes before every other input of the batch (S-07)."""
        shard = self.shard
        if mono_ms < self._tick_muted_ms:
            return
        for _ in range(TICKS_MAX):
            due_ms = self.machine.next_due_ms(shard.state, shard.hints)
            if due_ms is None or due_ms > turn.now_ms or turn.is_full:
                return
            before = len(turn.entries)
            self._take(turn, self.machine.tick(), "tick", "", 0)
            if len(turn.entries) == before:
                due_ms = self.machine.next_due_ms(shard.state, shard.hints)
                if due_ms is not None and due_ms <= turn.now_ms:
                    # A tick that was due and made nothing would be due at once again.
                    self._tick_muted_ms = mono_ms + 50
                return

    def _take_volatile(self, turn: _Turn) -> None:
        share = VOLATILE_SHARE
        queue = self._volatile
        while queue and share > 0 and not turn.is_full:
            value, accepted = queue.popleft()
            self._take(turn, value, _VOLATILE, "", 0)
            if accepted is not None:
                turn.accepted.append(accepted)
            share -= 1

    def _take_lane(self, turn: _Turn, lane: _Lane) -> None:
        share = lane.durable.share
        while share > 0 and not turn.is_full:
            if lane.left:
                message = lane.taking
                assert message is not None
                self._take(
                    turn, lane.left.popleft(), lane.durable.source, message.subject, message.seq
                )
                share -= 1
                if not lane.left:
                    self._done(lane, message)
                continue
            if not lane.queue:
                return
            message = lane.queue.popleft()
            if len(lane.queue) == LANE_MESSAGES_MAX // 2 and lane.reader is not None:
                lane.reader.poke()
            if lane.receiver is not None:
                share -= self._take_exchange(turn, lane, message)
                continue
            lane.left.extend(self._decode_input(turn, lane.durable.source, message, message.data))
            lane.taking = message
            if not lane.left:
                self._done(lane, message)

    def _decode_input(
        self, turn: _Turn, source: str, message: InputMessage, data: bytes
    ) -> Sequence[Any]:
        try:
            return self.machine.decode(source, message.subject, data)
        except Exception as error:
            # Contained: an input that cannot be understood is recorded and passed over (S-221).
            self._poison(turn, source, message.subject, message.seq, error)
            return ()

    def _done(self, lane: _Lane, message: InputMessage) -> None:
        """Everything up to this message is taken."""
        lane.taking = None
        lane.position = Position(incarnation=lane.position.incarnation, seq=message.seq)
        if self._positions_since_ms is None:
            self._positions_since_ms = self._clock.monotonic_ms()

    def _take(self, turn: _Turn, value: Any, source: str, subject: str, seq: int) -> None:
        turn.inputs += 1
        shard = self.shard
        try:
            entries = self.machine.decide(shard.state, shard.hints, value, turn.now_ms)
            if entries:
                chunk = self._encode(entries)
        except Exception as error:
            # Contained: `decide` changes nothing, so the input alone is set aside (S-221).
            self._poison(turn, source, subject, seq, error)
            return
        if entries:
            self._evolve(turn, entries, chunk)

    def _encode(self, entries: Sequence[Any]) -> bytes:
        chunk = self.machine.encode_entries(entries)[1:-1]
        if len(chunk) > limits.INPUT_ENTRIES_BYTES_MAX:
            raise PoisonedError(
                f"entries of {len(chunk)} bytes; at most {limits.INPUT_ENTRIES_BYTES_MAX} may be"
            )
        return chunk

    def _add(self, turn: _Turn, entries: Sequence[Any]) -> None:
        self._evolve(turn, entries, self._encode(entries))

    def _evolve(self, turn: _Turn, entries: Sequence[Any], chunk: bytes) -> None:
        shard = self.shard
        index = len(turn.entries)
        try:
            for entry in entries:
                shard.evolve(entry, shard.head, index, turn.now_ms)
                index += 1
        except Exception as error:
            self._state_lost = True
            raise EvolveFailedError(
                f"{shard.subject}: {type(error).__name__} in evolve: {error}"
            ) from error
        turn.entries.extend(entries)
        turn.chunks.append(chunk)
        turn.size += len(chunk) + 1

    def _poison(self, turn: _Turn, source: str, subject: str, seq: int, error: Exception) -> None:
        self._metrics.inputs_poisoned.labels(source).inc()
        detail = f"{type(error).__name__}: {error}"[:500]
        if isinstance(error, PoisonedError):
            self.log.error("input_poisoned", source=source, subject=subject, seq=seq, detail=detail)
        else:
            self.log.error(
                "input_poisoned", source=source, subject=subject, seq=seq, exc_info=error
            )
        shard = self.shard
        value = self.machine.poison(source, subject, seq, detail)
        entries = self.machine.decide(shard.state, shard.hints, value, turn.now_ms)
        if entries:
            self._add(turn, entries)

    # Messages between shards.

    def _last_seen(self, sender: str) -> Seen:
        return self.shard.last_seen.get(sender, Seen(0, 0))

    def _take_exchange(self, turn: _Turn, lane: _Lane, message: InputMessage) -> int:
        """Takes a message, and those that waited for it; returns how many inputs that were."""
        receiver = lane.receiver
        assert receiver is not None
        count = 0
        try:
            envelope = exchange.decode(message.data)
        except PoisonedError as error:
            self._poison(turn, lane.durable.source, message.subject, message.seq, error)
            self._done(lane, message)
            return 1
        if envelope.resend:
            self._spawn(self._send_again(envelope))
        else:
            taken = receiver.offer(envelope, message)
            if taken is None:
                self._metrics.messages_early.inc()
            while taken is not None:
                count += self._take_envelope(turn, lane, taken)
                taken = receiver.following(envelope.sender)
        self._done(lane, message)
        return max(count, 1)

    def _take_envelope(self, turn: _Turn, lane: _Lane, taken: exchange.Taken) -> int:
        envelope, message = taken
        self.shard.last_seen = {
            **self.shard.last_seen,
            envelope.sender: Seen(envelope.seq, envelope.index),
        }
        values = self._decode_input(turn, lane.durable.source, message, bytes(envelope.body))
        for value in values:
            self._take(turn, value, lane.durable.source, message.subject, message.seq)
        return len(values)

    async def _send_again(self, ask: Envelope) -> None:
        """Publishes again what was sent to one receiver after a position."""
        shard = self.shard
        maker = Resender(self.machine, shard.shard, shard.shards, ask)
        from_seq = max(ask.seq, 1)
        try:
            async for seq, payload in self._log.read(shard.subject, from_seq):
                if seq > shard.head:
                    return
                batch = self._decode(payload)
                entries = self.machine.decode_entries(bytes(batch.entries))
                for subject, data in maker.make(seq, entries, batch.now_ms):
                    self._bus.publish_acked(subject, data, lambda _ok: None)
        except (UnknownError, FencepostError) as error:
            self.log.warning("resend_failed", detail=str(error), asker=ask.sender)

    # Append.

    def _positions(self) -> dict[str, Position]:
        positions: dict[str, Position] = dict(self.shard.positions)
        for lane in self._lanes:
            position = lane.position
            if lane.receiver is not None:
                lowest = lane.receiver.lowest_waiting()
                if lowest is not None and lowest <= position.seq:
                    position = Position(incarnation=position.incarnation, seq=lowest - 1)
            positions[lane.durable.stream] = position
        return positions

    def _batch(self, turn: _Turn) -> Batch:
        shard = self.shard
        self._batches += 1
        return Batch(
            v=BATCH_VERSION,
            id=f"{self.owner}.{self._ownership}.{shard.shard}.{shard.term}.{self._batches}",
            family=self.machine.family,
            shard=shard.shard,
            term=shard.term,
            owner=self.owner,
            prev=shard.head,
            now_ms=turn.now_ms,
            positions=self._positions(),
            last_seen=shard.last_seen,
            sent=Sent(events=shard.events.sent, messages=shard.messages.sent),
            entries=msgspec.Raw(b"[" + b",".join(turn.chunks) + b"]"),
            snapshot=shard.pointer,
        )

    async def _append(self, turn: _Turn) -> int:
        """Appends a batch and returns its sequence. Raises `OwnershipLostError`."""
        shard = self.shard
        batch = self._batch(turn)
        payload = _ENCODE(batch)
        if len(payload) > limits.NATS_PAYLOAD_BYTES_MAX:
            self._state_lost = True
            raise LedgerBrokenError(f"{shard.subject}: a batch of {len(payload)} bytes")
        shard.positions = batch.positions
        shard.recorded_sent = batch.sent
        self._positions_since_ms = None
        began_ms = self._clock.monotonic_ms()
        crash.point("before_append")
        try:
            seq = await self._append_surely(batch, payload)
        except BaseException:
            # The state is ahead of the log by a batch that may or may not be there.
            self._state_lost = True
            raise
        self._proven_ms, self._proven_batch = began_ms, self._batches
        self._metrics.append_seconds.observe((self._clock.monotonic_ms() - began_ms) / 1000)
        self._metrics.batches.inc()
        self._metrics.batch_bytes.inc(len(payload))
        if turn.entries:
            self._metrics.batch_entries.inc(len(turn.entries))
        return seq

    async def _append_surely(self, batch: Batch, payload: bytes) -> int:
        shard = self.shard
        delay_s = RETRY_S_MIN
        while True:
            try:
                return await self._log.append(shard.subject, payload, batch.prev)
            except AppendRefused as error:
                refused = str(error)
            except AppendUnknown as error:
                self._metrics.appends_unknown.inc()
                self.log.warning("append_unknown", detail=str(error), term=shard.term)
                refused = ""
            # Read forward from the expected sequence: what stands there decides, and may be
            # our own batch, accepted with a lost answer (S-211).
            got = await self._log.next_after(shard.subject, batch.prev)
            if isinstance(got, Valid):
                there = self._decode(got.payload)
                if there.id == batch.id:
                    return got.seq
                raise OwnershipLostError(
                    f"{shard.subject}: {there.owner} in term {there.term} was accepted at "
                    f"{got.seq}, after {batch.prev}"
                )
            if self._stopping and isinstance(got, Unknown):
                raise UnknownError(f"{shard.subject}: stopped while the log cannot be reached")
            # Absent may be a stale read, or the append may still be on its way: the same batch
            # under the same condition can be accepted once at most.
            if refused and not isinstance(got, Unknown):
                self.log.warning("append_refused_unseen", detail=refused)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_S_MAX)

    def _decode(self, payload: bytes) -> Batch:
        return decode_batch(payload, family=self.machine.family, shard=self.shard.shard)

    def _advance(self, turn: _Turn, seq: int) -> None:
        shard = self.shard
        shard.head = seq
        shard.now_ms = turn.now_ms
        shard.batches_since_snapshot += 1

    # After the acknowledgement.

    def _publish(self, turn: _Turn, seq: int) -> None:
        """Moves the head, then publishes what the batch says to the outside."""
        shard = self.shard
        prev = shard.head
        self._advance(turn, seq)
        shard.events.add(prev, seq, turn.entries, turn.now_ms)
        crash.point("after_events")
        shard.messages.add(prev, seq, turn.entries, turn.now_ms)
        crash.point("after_messages")

    def _after(self, turn: _Turn, seq: int) -> None:
        """Makes the effects, publishes, answers; in this order, since effects are waited for."""
        shard = self.shard
        effects: list[Effect] = []
        counts = self._entry_counts
        for entry in turn.entries:
            effects.extend(self.machine.effects_of(shard.state, shard.hints, entry))
            kind = type(entry)
            counts[kind] = counts.get(kind, 0) + 1
        if effects:
            self._remember(effects)
            self._metrics.effects.inc(len(effects))
            self._perform_safely(effects)
        crash.point("after_effects")
        self._publish(turn, seq)
        if self._accepted_cb is not None and turn.entries:
            self._accepted_cb(turn.entries)
        for accepted in turn.accepted:
            accepted(seq)
        crash.point("after_answers")

    def _perform_safely(self, effects: list[Effect]) -> None:
        try:
            self._perform(effects)
        except Exception:
            # Contained: an effect is owed until it is answered, and made again by timer.
            self.log.exception("perform_failed")

    def _remember(self, effects: Iterable[Effect]) -> None:
        at_ms = self._clock.monotonic_ms() + self._effect_repeat_ms
        for effect in effects:
            self._owed[effect.key] = (at_ms, self._effect_repeat_ms)

    def _sweep(self, *, at_once: bool = False) -> None:
        """Makes again what is still owed and was made long enough ago; forgets what is not."""
        shard = self.shard
        now_ms = self._clock.monotonic_ms()
        self._sweep_at_ms = now_ms + self._sweep_ms
        ledger_ms = max(self._clock.now_ms(), shard.now_ms)
        owed: dict[str, tuple[int, int]] = {}
        again: list[Effect] = []
        for effect in self.machine.effects(shard.state, shard.hints, ledger_ms):
            known = self._owed.get(effect.key)
            if known is None or at_once:
                again.append(effect)
                owed[effect.key] = (now_ms + self._effect_repeat_ms, self._effect_repeat_ms)
            elif known[0] <= now_ms:
                again.append(effect)
                delay_ms = min(known[1] * 2, limits.EFFECT_REPEAT_MS_MAX)
                owed[effect.key] = (now_ms + delay_ms, delay_ms)
            else:
                owed[effect.key] = known
        self._owed = owed
        if again:
            self._metrics.effects_repeated.inc(len(again))
            self._perform_safely(again)

    def _housekeeping(self) -> None:
        """Timers; the state is the log's here."""
        if self._clock.monotonic_ms() >= self._sweep_at_ms:
            self._sweep()
            self._watch_outboxes()
            for lane in self._lanes:
                if lane.receiver is not None:
                    lane.receiver.ask_again()
            self._measure()
        if self.shard.batches_since_snapshot >= self._snapshot_every:
            self._start_snapshot()

    def _watch_outboxes(self) -> None:
        shard = self.shard
        for kind, outbox in (("events", shard.events), ("messages", shard.messages)):
            self._metrics.publish_lag.labels(kind, self._label).set(outbox.waiting)
            repeated = outbox.repeat()
            if repeated:
                self._metrics.publish_repeated.labels(kind).inc(repeated)
            if outbox.is_behind(shard.head) and outbox.has_room:
                self._refill(outbox)

    def _measure(self) -> None:
        waiting = len(self._volatile) + sum(len(lane.queue) for lane in self._lanes)
        self._metrics.inputs_lag.labels(self._label).set(waiting)
        counts, self._entry_counts = self._entry_counts, {}
        for kind, count in counts.items():
            config: Any = getattr(kind, "__struct_config__", None)
            self._metrics.entries.labels(str(getattr(config, "tag", kind.__name__))).inc(count)

    def _refill(self, outbox: Outbox) -> None:
        if id(outbox) not in self._refilling:
            self._refilling.add(id(outbox))
            self._spawn(self._refill_from_log(outbox))

    async def _refill_from_log(self, outbox: Outbox) -> None:
        shard = self.shard
        try:
            before = -1
            # What was accepted while reading is read as well, until there is nothing left.
            while before < outbox.kept < shard.head and outbox.has_room:
                before = outbox.kept
                async for seq, payload in self._log.read(shard.subject, outbox.kept + 1):
                    if seq > shard.head or not outbox.has_room:
                        break
                    batch = self._decode(payload)
                    entries = self.machine.decode_entries(bytes(batch.entries))
                    outbox.add(batch.prev, seq, entries, batch.now_ms)
        except UnknownError as error:
            self.log.warning("publications_not_read", detail=str(error))
        finally:
            self._refilling.discard(id(outbox))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._side.add(task)
        task.add_done_callback(self._side.discard)

    # Snapshots.

    def _start_snapshot(self) -> None:
        if self._store is None or self._snapshot_busy:
            return
        self._snapshot_busy = True
        self.shard.batches_since_snapshot = 0
        data, seq = self._encode_snapshot()
        self._spawn(self._store_snapshot(data, seq))

    def _encode_snapshot(self) -> tuple[bytes, int]:
        shard = self.shard
        data = snapshots.encode(shard.header(), self.machine.encode_state(shard.state))
        return data, shard.head

    async def _store_snapshot(self, data: bytes, seq: int) -> None:
        """Stores a snapshot; a later batch records it. Failing is no error: it is a cache."""
        store, shard = self._store, self.shard
        assert store is not None
        family = self.machine.family
        sha256 = snapshots.digest(data)
        try:
            crash.point("before_snapshot")
            await store.put(snapshots.name(family, shard.shard, seq, sha256), data)
            former, shard.pointer = shard.pointer, snapshots.pointer(seq, sha256)
            crash.point("after_snapshot")
            self._metrics.snapshots.labels("stored").inc()
            keep = {seq, int(former.partition(".")[0] or 0)}
            for text in await store.names(snapshots.prefix(family, shard.shard)):
                parsed = snapshots.parse_name(text)
                if parsed is not None and parsed[0] not in keep and parsed[0] < seq:
                    await store.delete(text)
        except Exception as error:
            # Contained: without a snapshot the next fold is longer, nothing else.
            self._metrics.snapshots.labels("failed").inc()
            self.log.warning("snapshot_failed", detail=f"{type(error).__name__}: {error}")
        finally:
            self._snapshot_busy = False

    async def _hand_over(self) -> None:
        shard = self.shard
        if self._store is None or shard.batches_since_snapshot < SNAPSHOT_AT_HAND_OVER:
            if self._positions_since_ms is None:
                return
        else:
            data, seq = self._encode_snapshot()
            await self._store_snapshot(data, seq)
        turn = _Turn(max(self._clock.now_ms(), shard.now_ms))
        self._publish(turn, await self._append(turn))

    # The end.

    async def _end(self, error: Exception | None) -> None:
        """Drops everything; from here on nothing is answered. Safe to call twice."""
        was_owner, self.is_owner = self.is_owner, False
        if error is not None:
            self._state_lost = True
        for lane in self._lanes:
            if lane.reader is not None:
                await lane.reader.close()
                lane.reader = None
        for task in tuple(self._side):
            task.cancel()
        await asyncio.gather(*self._side, return_exceptions=True)
        for ask in self._asks:
            if not ask.future.done():
                ask.future.set_exception(
                    OwnershipLostError(f"{self.shard.subject} is no longer owned here")
                )
        self._asks.clear()
        self._volatile.clear()
        if not self.ended.done():
            self.ended.set_result(error)
        if was_owner:
            self._measure()
            for kind in ("events", "messages"):
                self._metrics.publish_lag.labels(kind, self._label).set(0)
            self._metrics.inputs_lag.labels(self._label).set(0)
            reason = "stopped" if error is None else type(error).__name__
            self._metrics.ownerships_lost.labels(reason).inc()
