"""
Keeps a family's projection up with the ledger: one task, one connection, all shards it can hold.

Batches are read in each ledger stream's order and taken in groups; a group is one transaction that
carries its rows and the positions that they reach. A position is a sequence of the stream that its
shard is in, and an aggregate's rows rest on its own shard's batches alone, so nothing hangs on the
order between streams. A batch at or below its shard's position is passed over,
so each counts exactly once, whatever is read again. A batch that does not follow its shard's
position stops that shard: a person has to look, and nothing is guessed.

Nothing waits for this: while PostgreSQL is away the ledger grows, and is read on from the positions
when it is back. Several replicas share the shards by advisory locks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import structlog
from fencepost.contracts import streams, subjects
from fencepost.contracts.messages import Position
from fencepost.core.errors import FencepostError, LedgerBrokenError, RetryLaterError, UnknownError
from fencepost.release_tracker import migrations, store
from fencepost.release_tracker.families import Family
from fencepost.release_tracker.store import Ledger, MovedElsewhereError, Store
from fencepost.release_tracker.working import ShardStopsError
from fencepost.runtime.fold import decode_batch
from fencepost.runtime.metrics import TrackerMetrics
from fencepost.runtime.ports import InputMessage, InputReader, Inputs, Log, Unknown, Valid

GROUP_BATCHES_MAX: Final = 128
GROUP_BYTES_MAX: Final = 4 * 1024 * 1024
BUFFER_BATCHES_MAX: Final = 512
BUFFER_BYTES_MAX: Final = 16 * 1024 * 1024
CHECK_S: Final = 1.0
"""How often locks are asked for and the tables are looked at, when there is nothing to write."""

RETRY_S_MIN: Final = 0.2
RETRY_S_MAX: Final = 5.0

logger = structlog.get_logger(__name__)


class Buffer:
    """What was read and not yet taken; bounded in number and bytes by what it asks for."""

    def __init__(self) -> None:
        self._messages: deque[InputMessage] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self.error: Exception | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: InputMessage) -> None:
        self._messages.append(message)
        self._bytes += len(message.data)
        self._filled.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._filled.set()

    def room(self, among: int) -> int:
        """For how many more one of so many readers may ask; each gets some while there is any."""
        if self._bytes >= BUFFER_BYTES_MAX:
            return 0
        return -(-max(0, BUFFER_BATCHES_MAX - len(self._messages)) // among)

    async def group(self, timeout_s: float) -> list[InputMessage]:
        """The next messages, at most one group; none when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._filled.wait()
        except TimeoutError:
            return []
        if self.error is not None:
            raise self.error
        taken: list[InputMessage] = []
        size = 0
        while self._messages and len(taken) < GROUP_BATCHES_MAX and size < GROUP_BYTES_MAX:
            message = self._messages.popleft()
            size += len(message.data)
            taken.append(message)
        self._bytes -= size
        if not self._messages:
            self._filled.clear()
        return taken


class Batch(NamedTuple):
    """One batch of one shard, decoded."""

    shard: int
    seq: int
    now_ms: int
    entries: Any


class Projector:
    """
    Projects until it is cancelled.

    `logs` are the ledger's streams, in their order. `why_not_ready` is "" while it runs; else it
    says why readers see old rows.
    """

    def __init__(
        self,
        dsn: str,
        family: Family,
        *,
        inputs: Inputs,
        logs: Sequence[Log],
        shards: int,
        metrics: TrackerMetrics,
        scripts: tuple[migrations.Migration, ...],
    ) -> None:
        self._dsn = dsn
        self._family = family
        self._inputs = inputs
        self._logs = logs
        self._shards = shards
        self._metrics = metrics
        self._scripts = scripts
        self._by_subject = {subjects.ledger(family.name, shard): shard for shard in range(shards)}
        self._positions: dict[int, int] = {}
        self._stopped: dict[int, str] = {}
        self._reached: dict[int, int] = {}
        self._has_moved = False
        self.why_not_ready = "the projection has not started"

    @property
    def stopped(self) -> Mapping[int, str]:
        """Shards that are not projected until a person has looked, and why."""
        return self._stopped

    async def run(self) -> None:
        """Never returns: every failure is told and tried again, later and later."""
        delay_s = RETRY_S_MIN
        while True:
            try:
                await self._session()
            except store.UNREACHABLE as error:
                reason, detail = "postgres", f"PostgreSQL: {error or type(error).__name__}"
            except MovedElsewhereError as error:
                reason, detail = "moved", str(error)
            except RetryLaterError as error:
                reason, detail = "nats", f"NATS: {error}"
            except FencepostError as error:
                reason, detail = type(error).__name__, str(error)
            except Exception as error:
                # A bug: it is told with its trace, and does not end the projection for good.
                logger.exception("projection_failed")
                reason, detail = "bug", f"the projection failed: {type(error).__name__}: {error}"
            self.why_not_ready = detail
            self._metrics.projection_errors.labels(reason).inc()
            if self._has_moved:
                delay_s = RETRY_S_MIN
            logger.warning("projection_waits", reason=reason, detail=detail, delay_s=delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_S_MAX)

    async def _session(self) -> NoReturn:
        """One connection's time, from migrating to whatever ends it."""
        self._has_moved = False
        connection = await store.connect(self._dsn)
        try:
            await migrations.migrate(connection, self._scripts, phases=("pre",))
            incarnations = [
                await self._inputs.incarnation(name, None)
                for name in streams.ledger_names(len(self._logs))
            ]
            self._positions.clear()
            self._stopped = {}  # shown by the first look, not before it has worked
            while True:
                tables = Store(connection, self._family)
                await self._read_on(tables, Ledger(tuple(incarnations), self._shards))
        finally:
            # Not gracefully: a server that does not answer would keep us here.
            connection.terminate()

    async def _read_on(self, tables: Store, ledger: Ledger) -> None:
        """Reads on from the held shards' positions, until one more is held."""
        await self._look(tables, ledger)
        buffer = Buffer()
        readers = await self._open(buffer, ledger.incarnations)
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        try:
            while True:
                group = await buffer.group(CHECK_S)
                if group:
                    await self._take(tables, group)
                if loop.time() - looked_s >= CHECK_S:
                    looked_s = loop.time()
                    if await self._look(tables, ledger):
                        return
        finally:
            for reader in readers:
                await reader.close()

    async def _open(self, buffer: Buffer, incarnations: Sequence[str]) -> list[InputReader]:
        """Opens each stream that has a held shard, from the earliest position in it."""
        self._reached = {}
        for shard, seq in self._positions.items():
            number = self._ledger_of(shard)
            self._reached[number] = min(seq, self._reached.get(number, seq))
        names, count = streams.ledger_names(len(self._logs)), len(self._reached)
        return [
            await self._inputs.open(
                names[number],
                [
                    subject
                    for subject, shard in self._by_subject.items()
                    if self._ledger_of(shard) == number
                ],
                after=Position(incarnation=incarnations[number], seq=after),
                take=buffer.put,
                room=lambda: buffer.room(count),
                fail=buffer.fail,
            )
            for number, after in self._reached.items()
        ]

    def _ledger_of(self, shard: int) -> int:
        """The number of the stream that a shard is in."""
        return shard % len(self._logs)

    async def _look(self, tables: Store, ledger: Ledger) -> bool:
        """
        Looks whether the tables are as this process left them, and takes free shards.

        Returns whether a shard was taken. Raises `MovedElsewhereError` after a wipe: without this
        an idle ledger would leave wiped tables empty.
        """
        await tables.bind(ledger)
        positions = await tables.positions()
        for shard, reached in self._positions.items():
            if positions.get(shard, 0) != reached:
                raise MovedElsewhereError(f"shard {shard}: the tables were wiped or written")
        missing = set(range(self._shards)) - set(self._positions)
        taken = await tables.lock(missing) if missing else []
        if taken:
            # Read again: the former holder may have moved them until it let go.
            positions = await tables.positions()
            self._positions |= {shard: positions.get(shard, 0) for shard in taken}
        self._show_stopped(self._stopped)
        return bool(taken)

    def _show_stopped(self, stopped: Mapping[int, str]) -> None:
        self._stopped = dict(stopped)
        self._metrics.projection_stopped.labels(self._family.name).set(len(stopped))
        self.why_not_ready = "; ".join(stopped[shard] for shard in sorted(stopped))

    def _stop(self, shard: int, reason: str) -> None:
        logger.error("projection_stopped", shard=shard, detail=reason)
        self._metrics.projection_errors.labels("stopped").inc()
        self._show_stopped({**self._stopped, shard: reason})

    async def _take(self, tables: Store, group: Sequence[InputMessage]) -> None:
        """Projects one group in one transaction."""
        batches, moves = self._judge(group)
        try:
            if batches:
                await self._write(tables, batches, moves)
        except ShardStopsError as error:
            # The transaction is undone as a whole; the other shards' batches go without this one.
            self._stop(error.shard, str(error))
            await self._take(tables, group)
            return
        for shard, (_, reached) in moves.items():
            self._positions[shard] = reached
            self._metrics.projected_seq.labels(self._family.name, str(shard)).set(reached)
        self._metrics.projected.inc(len(batches))
        for message in group:
            number = self._ledger_of(self._by_subject.get(message.subject, 0))
            self._reached[number] = max(self._reached.get(number, 0), message.seq)
        self._has_moved = self._has_moved or bool(moves)

    async def _write(
        self, tables: Store, batches: Sequence[Batch], moves: Mapping[int, tuple[int, int]]
    ) -> None:
        names = self._family.names()
        for batch in batches:
            with _attributed(batch):
                names.add(batch.entries)
        async with tables.transaction():
            await tables.move(moves)
            working = await tables.load(names)
            for batch in batches:
                with _attributed(batch):
                    working.apply(batch.shard, batch.seq, batch.now_ms, batch.entries)
                await asyncio.sleep(0)  # a long group must not hold up the API's answers
            await tables.write(working.changed)

    def _judge(
        self, group: Sequence[InputMessage]
    ) -> tuple[list[Batch], dict[int, tuple[int, int]]]:
        """What of a group is new to the tables, and how far it moves each shard's position."""
        batches: list[Batch] = []
        moves: dict[int, tuple[int, int]] = {}
        for message in group:
            shard = self._by_subject.get(message.subject, -1)
            if shard not in self._positions or shard in self._stopped:
                continue
            held = self._positions[shard]
            reached = moves[shard][1] if shard in moves else held
            if message.seq <= reached:
                continue
            try:
                batch = self._decode(message, shard, reached)
            except LedgerBrokenError as error:
                self._stop(shard, str(error))
                continue
            except Exception as error:
                logger.exception("batch_undecodable", shard=shard, seq=message.seq)
                self._stop(shard, _unprojectable(shard, message.seq, error))
                continue
            batches.append(batch)
            moves[shard] = (held, message.seq)
        return batches, moves

    def _decode(self, message: InputMessage, shard: int, reached: int) -> Batch:
        batch = decode_batch(message.data, family=self._family.name, shard=shard)
        if batch.prev != reached:
            raise LedgerBrokenError(
                f"shard {shard}: a gap: the batch at {message.seq} follows {batch.prev},"
                f" the projection is at {reached}"
            )
        entries = self._family.machine.decode_entries(bytes(batch.entries))
        return Batch(shard, message.seq, batch.now_ms, entries)

    async def heads(self) -> dict[int, int]:
        """The ledger's last batch of each shard. Raises `UnknownError`."""
        found: dict[int, int] = {}
        for subject, shard in self._by_subject.items():
            last = await self._logs[self._ledger_of(shard)].last(subject)
            if isinstance(last, Unknown):
                raise UnknownError(f"{subject}: {last.reason}")
            found[shard] = last.seq if isinstance(last, Valid) else 0
        return found

    async def measure(self) -> None:
        """Keeps the lag's metric up, for ever."""
        every = subjects.ledger(self._family.name, 0).rpartition(".")[0] + ".*"
        while True:
            behind = 0
            for number, log in enumerate(self._logs):
                head = await log.last(every)
                if isinstance(head, Unknown):
                    break
                if isinstance(head, Valid):
                    behind += max(0, head.seq - self._reached.get(number, 0))
            else:
                self._metrics.projection_lag.labels(self._family.name).set(behind)
            await asyncio.sleep(CHECK_S)


def _unprojectable(shard: int, seq: int, error: Exception) -> str:
    return f"shard {shard}: the batch at {seq} cannot be projected: {type(error).__name__}: {error}"


@contextlib.contextmanager
def _attributed(batch: Batch) -> Iterator[None]:
    """What fails for a bug stops the shard whose batch it was, and no other one's projection."""
    try:
        yield
    except FencepostError:
        raise
    except Exception as error:
        logger.exception("batch_unprojectable", shard=batch.shard, seq=batch.seq)
        told = _unprojectable(batch.shard, batch.seq, error)
        raise ShardStopsError(batch.shard, told) from error
