"""
Takes a shard's state from its log: a snapshot, where one verifies, and the batches after it.

Nothing is skipped: a gap, a newer batch version, an unknown entry kind, another number of shards
or a newer machine mean that the shard is not owned (S-220). The outboxes are filled on the way.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import structlog
from fencepost.contracts import subjects
from fencepost.contracts.messages import BATCH_VERSION, HASH, Batch, Position, Seen, Sent
from fencepost.core.errors import LedgerBrokenError, UnknownError
from fencepost.core.machine import Machine, Place
from fencepost.runtime import snapshots
from fencepost.runtime.outbox import EventMaker, MessageMaker, Outbox
from fencepost.runtime.ports import Bus, Clock, Log, Snapshots, Unknown, Valid

YIELD_BATCHES: Final = 256
"""The loop gets a turn at least this often during a fold."""

logger = structlog.get_logger(__name__)

_BATCH = msgspec.json.Decoder(Batch)


class _Version(msgspec.Struct, frozen=True):
    v: int


def decode_batch(payload: bytes, *, family: str, shard: int) -> Batch:
    """Raises `LedgerBrokenError` on anything that is not a batch of this shard."""
    try:
        batch = _BATCH.decode(payload)
    except msgspec.DecodeError as error:
        try:
            version = msgspec.json.decode(payload, type=_Version).v
        except msgspec.DecodeError:
            version = 0
        raise LedgerBrokenError(f"undecodable batch of version {version}: {error}") from error
    if batch.v > BATCH_VERSION:
        raise LedgerBrokenError(f"a batch of version {batch.v}; this owner knows {BATCH_VERSION}")
    if batch.family != family or batch.shard != shard:
        raise LedgerBrokenError(
            f"a batch of {batch.family}.{batch.shard} in {family}.{shard}'s log"
        )
    return batch


class Shard:
    """A shard's state as of `head`, with everything that its last batch recorded."""

    def __init__(
        self,
        machine: Machine[Any, Any],
        shard: int,
        shards: int,
        *,
        bus: Bus,
        clock: Clock,
    ) -> None:
        self.machine = machine
        self.shard = shard
        self.shards = shards
        self.subject = subjects.ledger(machine.family, shard)
        self.term_type = type(machine.term_opened(0, "", shards, HASH))
        self.state: Any = machine.initial(shard, shards)
        self.hints: Any = machine.new_hints()
        self.head = 0
        self.term = 0
        self.now_ms = 0
        self.positions: dict[str, Position] = {}
        self.last_seen: dict[str, Seen] = {}
        self.recorded_sent = Sent()
        self.pointer = ""
        self.batches_since_snapshot = 0
        self.message_maker = MessageMaker(machine, shard, shards)
        self.events = Outbox(EventMaker(machine, shard), bus, clock)
        self.messages = Outbox(self.message_maker, bus, clock, keeps_links=True)

    def evolve(self, entry: Any, after: int, index: int, now_ms: int) -> None:
        """Changes the state; an error here is a bug that ends the ownership."""
        self.machine.evolve(self.state, entry, Place(after, index), now_ms)

    def check_term(self, entry: Any) -> None:
        """Raises `LedgerBrokenError` on a `term_opened` that this owner could not have written."""
        if entry.shards != self.shards or entry.hash != HASH:
            raise LedgerBrokenError(
                f"{self.subject}: cut for {entry.shards} shards by {entry.hash}, "
                f"this owner is for {self.shards} by {HASH}"
            )
        if entry.machine > self.machine.version:
            raise LedgerBrokenError(
                f"{self.subject}: written by machine version {entry.machine}, "
                f"this owner's is {self.machine.version}"
            )

    def header(self) -> snapshots.Header:
        """The header of a snapshot taken now; only at a moment when nothing is in flight."""
        return snapshots.Header(
            family=self.machine.family,
            machine=self.machine.version,
            shard=self.shard,
            shards=self.shards,
            hash=HASH,
            seq=self.head,
            term=self.term,
            now_ms=self.now_ms,
            positions=self.positions,
            last_seen=self.last_seen,
            sent=Sent(events=self.events.sent, messages=self.messages.sent),
            links=dict(self.messages.sent_links),
        )


class Folder:
    """Folds one shard."""

    def __init__(self, shard: Shard, log: Log, store: Snapshots | None) -> None:
        self._shard = shard
        self._log = log
        self._store = store
        self._sent = Sent()

    async def fold(self) -> None:
        """
        Folds up to what the log has. Raises `LedgerBrokenError` or `UnknownError`.

        That nothing newer exists is proven only by the next accepted append.
        """
        shard = self._shard
        last = await self._log.last(shard.subject)
        if isinstance(last, Unknown):
            raise UnknownError(f"{shard.subject}: {last.reason}")
        start = 0
        end = 0
        if isinstance(last, Valid):
            batch = self._decode(last.payload)
            end = last.seq
            self._sent = batch.sent
            start = await self._start(batch, end)
            shard.pointer = batch.snapshot or shard.pointer
        read_from = min(start, shard.events.kept, shard.messages.kept)
        await self._read(read_from, start)
        if shard.head < end:
            raise UnknownError(f"{shard.subject}: the read ended at {shard.head}, below {end}")

    async def _start(self, last: Batch, end: int) -> int:
        """Loads the newest snapshot that verifies; returns its sequence, or 0."""
        shard = self._shard
        header: snapshots.Header | None = None
        if self._store is not None:
            for seq, sha256 in await self._candidates(last.snapshot):
                try:
                    header = await self._load(seq, sha256, end)
                except snapshots.SnapshotError as error:
                    logger.warning(
                        "snapshot_ignored", subject=shard.subject, seq=seq, detail=str(error)
                    )
                    continue
                break
        sent = last.sent
        if header is None:
            shard.events.start_from(sent.events)
            shard.messages.start_from(0)
            return 0
        shard.events.start_from(sent.events)
        shard.messages.start_from(header.sent.messages)
        shard.messages.sent_links.update(header.links)
        shard.message_maker.links.update(header.links)
        return header.seq

    async def _candidates(self, recorded: str) -> list[tuple[int, str]]:
        """The recorded snapshot, then the others of this shard, newest first."""
        shard = self._shard
        assert self._store is not None
        found: list[tuple[int, str]] = []
        seq, dot, sha256 = recorded.partition(".")
        if dot and seq.isdigit():
            data = await self._store.get(
                snapshots.name(shard.machine.family, shard.shard, int(seq), sha256)
            )
            if data is not None and snapshots.digest(data) == sha256:
                return [(int(seq), sha256)]
            why = "not there, or not read" if data is None else "torn"
            logger.warning("snapshot_ignored", subject=shard.subject, seq=int(seq), detail=why)
        elif not recorded:
            return []
        names = await self._store.names(snapshots.prefix(shard.machine.family, shard.shard))
        for text in reversed(names):
            parsed = snapshots.parse_name(text)
            if parsed is not None and parsed[0] != int(seq):
                found.append(parsed)
        return found

    async def _load(self, seq: int, sha256: str, end: int) -> snapshots.Header:
        shard = self._shard
        assert self._store is not None
        if seq > end:
            raise snapshots.SnapshotError(f"of {seq}, newer than the log's end {end}")
        data = await self._store.get(snapshots.name(shard.machine.family, shard.shard, seq, sha256))
        if data is None:
            raise snapshots.SnapshotError("not there")
        if snapshots.digest(data) != sha256:
            raise snapshots.SnapshotError("its digest differs")
        snapshot = snapshots.decode(data)
        snapshots.check(
            snapshot,
            family=shard.machine.family,
            machine=shard.machine.version,
            shard=shard.shard,
            shards=shard.shards,
        )
        header = snapshot.header
        if header.seq != seq:
            raise snapshots.SnapshotError(f"named {seq}, but of {header.seq}")
        try:
            shard.state = shard.machine.decode_state(snapshot.state)
        except Exception as error:
            # Contained: whatever a state's decoder raises, a snapshot is only a cache.
            shard.state = shard.machine.initial(shard.shard, shard.shards)
            raise snapshots.SnapshotError(f"undecodable state: {error}") from error
        shard.head = header.seq
        shard.term = header.term
        shard.now_ms = header.now_ms
        shard.positions = dict(header.positions)
        shard.last_seen = dict(header.last_seen)
        return header

    async def _read(self, read_from: int, start: int) -> None:
        shard = self._shard
        prev: int | None = None if read_from else 0
        count = 0
        async for seq, payload in self._log.read(shard.subject, read_from + 1):
            batch = self._decode(payload)
            if prev is not None and batch.prev != prev:
                raise LedgerBrokenError(
                    f"{shard.subject}: the batch at {seq} follows {batch.prev}, not {prev}"
                )
            if seq > start and batch.prev != shard.head:
                raise LedgerBrokenError(
                    f"{shard.subject}: the batch at {seq} follows {batch.prev}, not {shard.head}"
                )
            prev = seq
            self._take(seq, batch, evolves=seq > start)
            count += 1
            if count % YIELD_BATCHES == 0:
                await asyncio.sleep(0)

    def _take(self, seq: int, batch: Batch, *, evolves: bool) -> None:
        shard = self._shard
        entries = shard.machine.decode_entries(bytes(batch.entries))
        if evolves:
            if batch.term < shard.term:
                raise LedgerBrokenError(
                    f"{shard.subject}: term {batch.term} at {seq} after term {shard.term}"
                )
            for index, entry in enumerate(entries):
                if type(entry) is shard.term_type:
                    shard.check_term(entry)
                shard.evolve(entry, batch.prev, index, batch.now_ms)
            shard.head = seq
            shard.term = batch.term
            shard.now_ms = max(shard.now_ms, batch.now_ms)
            shard.positions = batch.positions
            shard.last_seen = batch.last_seen
            shard.recorded_sent = batch.sent
            if batch.snapshot:
                shard.pointer = batch.snapshot
            shard.batches_since_snapshot += 1
        if seq > shard.events.kept:
            shard.events.add(batch.prev, seq, entries, batch.now_ms)
        if seq > shard.messages.kept:
            if seq <= self._sent.messages:
                shard.messages.skip(seq, entries, batch.now_ms)
            else:
                shard.messages.add(batch.prev, seq, entries, batch.now_ms)

    def _decode(self, payload: bytes) -> Batch:
        shard = self._shard
        return decode_batch(payload, family=shard.machine.family, shard=shard.shard)
