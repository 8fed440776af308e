"""
`fencepost reshard`: the recorded history, cut anew into another number of shards or ledgers.

Offline, from one server into an empty deployment on another (or another account): the source is
read and never shortened, so going back is starting the services on it again.

Rule 1: a fence, not a promise, keeps the source still. Every shard of it gets a `term_opened` of
        ours first, by which any owner that still lives is refused from then on, and an empty batch
        of the same term last: accepted, it proves that nothing came in between.
Rule 2: nothing may be on its way. Every durable input must have been read to its end, and every
        message between shards taken; the chains of messages go on where they ended.
Rule 3: entries stay what they are, in the order in which each aggregate met them and with the
        time they were decided at. What moves is their place; states are compared without it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from fencepost.client import ledger
from fencepost.client.client import Client
from fencepost.client.verify import Report, verify
from fencepost.contracts import streams, subjects
from fencepost.contracts.messages import BATCH_VERSION, HASH, Batch, Position, Seen, Sent
from fencepost.core import ids
from fencepost.core.dag.machine import DagMachine
from fencepost.core.errors import LedgerBrokenError, RefusedError, UnknownError
from fencepost.core.machine import Machine, Place, TermOpened
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.runtime import streams as deployed
from fencepost.runtime.chunks.jetstream import JetStreamChunks
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.objects import Objects
from fencepost.runtime.outbox import MessageMaker
from fencepost.runtime.ports import Absent, AppendRefused, AppendUnknown, Unknown

OWNER: Final = "reshard"
SHARDS_MAX: Final = 1024
_APPEND_TRIES: Final = 5
_QUEUE_MAX: Final = 256
_CHUNKS_AT_ONCE: Final = 16
_ENCODE: Final = msgspec.json.Encoder().encode

Key = tuple[str, int]
"""A family and a shard."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, and what two independent looks at it say."""

    shards_before: int
    shards: int
    ledgers_before: int
    ledgers: int
    batches: int
    entries: int
    aggregates: int
    forgotten: int
    contents: int
    chunks: int
    verified: Report


async def reshard(source: Client, target: Client) -> Result:
    """
    Writes the source's history into the target, which has no entry yet, and verifies it there.

    Raises `RefusedError` where the source is not at rest or the target not empty, and
    `LedgerBrokenError` where what was written is not what was read; the source is whole in
    either case, and the target is then of no use.
    """
    await _refuse_unless_empty(target)
    old = _Cut(source.shards)
    sealed = await _seal(source)
    await _refuse_unless_drained(source, sealed)
    # From here on until all is verified, no service starts on the target.
    await deployed.put_meta(target.link, streams.MOVING, streams.MOVING_BEGUN)
    writer = _Writer(target)
    try:
        async for recorded in _in_order(source, sealed):
            key = recorded.batch.family, recorded.batch.shard
            is_public = recorded.seq <= sealed[key].sent.events
            await writer.write(recorded, old.take(recorded), is_public=is_public)
        old.refuse_unless_all_was_taken()
        old.refuse_unless_whole()
        await _prove_still(source, sealed)
        await writer.finish()
    finally:
        await writer.stop()
    contents = await copy_contents(source, target)
    chunks = await copy_chunks(source, target)
    forgotten = compare(old.states(), writer.cut.states())
    report = await verify(target)
    if not report.is_clean:
        raise LedgerBrokenError(f"the new ledger does not verify: {report.violations[0]}")
    switch = await deployed.read_meta(source.link, streams.SWEEP_MODE)
    if switch is not None:  # else sweeping that a person switched off would go on
        await deployed.put_meta(target.link, streams.SWEEP_MODE, switch)
    await deployed.put_meta(target.link, streams.MOVING, streams.MOVING_ENDED)
    return Result(
        shards_before=source.shards,
        shards=target.shards,
        ledgers_before=source.ledgers,
        ledgers=target.ledgers,
        batches=writer.batches,
        entries=writer.entries,
        aggregates=old.aggregates(),
        forgotten=forgotten,
        contents=contents,
        chunks=chunks,
        verified=report,
    )


def machines() -> dict[str, Machine[Any, Any]]:
    return {SandboxMachine.family: SandboxMachine(), DagMachine.family: DagMachine()}


def aggregate_of(family: str, entry: Any) -> str:
    """Whose entry it is; "" for what was addressed to nobody (a message nobody could read)."""
    return str(getattr(entry, "sandbox" if family == SandboxMachine.family else "dag"))


def shard_for(family: str, entry: Any, *, former: int, shards: int) -> int:
    """Where an entry belongs; what is nobody's stays with its former shard, as far as it can."""
    aggregate = aggregate_of(family, entry)
    return ids.shard_of(aggregate, shards) if ids.is_id(aggregate) else former % shards


def refuse_unless_known(
    recorded: ledger.Recorded, machine: Machine[Any, Any], entries: Sequence[Any]
) -> None:
    """Entries are written anew, so what a newer version said in them would be lost here."""
    where = f"{recorded.batch.family}.{recorded.batch.shard} at {recorded.seq}"
    for entry in entries:
        if isinstance(entry, TermOpened) and entry.machine > machine.version:
            raise RefusedError(
                "newer_version",
                f"{where}: machine version {entry.machine} wrote it, this one is "
                f"{machine.version}: use the newest version",
            )
    written = machine.encode_entries(entries)
    if written == bytes(recorded.batch.entries):
        return
    before, after = msgspec.json.decode(recorded.batch.entries), msgspec.json.decode(written)
    for old, new in zip(before, after, strict=True):
        if unknown := sorted(old.keys() - new.keys()):
            raise RefusedError(
                "newer_version",
                f"{where}: {old.get('kind')} has {', '.join(unknown)}, which this version does "
                "not know: use the newest version",
            )


class _Cut:
    """The fold of a whole ledger, and the chains of messages between its shards."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self._machines = machines()
        self._states: dict[Key, Any] = {}
        self._makers: dict[Key, MessageMaker] = {}
        self._last: dict[Key, Batch] = {}
        for family, machine in self._machines.items():
            for shard in range(shards):
                self._states[family, shard] = machine.initial(shard, shards)
                self._makers[family, shard] = MessageMaker(machine, shard, shards)

    def take(self, recorded: ledger.Recorded) -> Sequence[Any]:
        """Folds one batch and returns its entries."""
        batch = recorded.batch
        key = batch.family, batch.shard
        machine = self._machines[batch.family]
        entries = machine.decode_entries(bytes(batch.entries))
        refuse_unless_known(recorded, machine, entries)
        self.fold(key, entries, prev=batch.prev, seq=recorded.seq, now_ms=batch.now_ms)
        self._last[key] = batch
        return entries

    def fold(self, key: Key, entries: Sequence[Any], *, prev: int, seq: int, now_ms: int) -> None:
        machine = self._machines[key[0]]
        try:
            for index, entry in enumerate(entries):
                machine.evolve(self._states[key], entry, Place(prev, index), now_ms)
        except (AssertionError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise LedgerBrokenError(
                f"{key[0]}.{key[1]} of {self.shards} at {seq}: {type(entry).__name__} does not "
                f"follow from what was before: {error!r}"
            ) from error
        self._makers[key].make(seq, entries, now_ms)

    def refuse_unless_all_was_taken(self) -> None:
        """Compares the last message made for each receiver with the last that it took."""
        for (family, shard), maker in self._makers.items():
            for receiver, made in maker.links.items():
                _, _, _, to_family, to_shard = receiver.split(".")
                last = self._last.get((to_family, int(to_shard)))
                seen = last.last_seen.get(f"{family}.{shard}") if last is not None else None
                if seen != made:
                    raise RefusedError(
                        "not_drained",
                        f"messages of {family}.{shard} to {to_family}.{to_shard} are on their way: "
                        "start the services again, let them come to rest, and stop them",
                    )

    def refuse_unless_whole(self) -> None:
        """A recovery compares what it has got back with places in the ledger: it ends first."""
        for (family, _), state in self._states.items():
            held = state.sandboxes if family == SandboxMachine.family else {}
            for id_, sandbox in held.items():
                if sandbox.recovering is not None:
                    raise RefusedError(
                        "not_at_rest",
                        f"sandbox {id_} is recovering: start the services again, let it end "
                        "(`fencepost sandbox show` says what it waits for), and stop them",
                    )

    def seen_by(self, key: Key) -> dict[str, Seen]:
        """What this shard has to have seen of every other's messages, so that the next one fits."""
        receiver = subjects.message(*key)
        return {
            f"{family}.{shard}": maker.links[receiver]
            for (family, shard), maker in self._makers.items()
            if receiver in maker.links
        }

    def aggregates(self) -> int:
        return sum(len(found) for found in self.states().values())

    def states(self) -> dict[str, dict[str, Any]]:
        """Every aggregate's state without places, by family and id."""
        found: dict[str, dict[str, Any]] = {family: {} for family in self._machines}
        for (family, _), state in self._states.items():
            held = state.sandboxes if family == SandboxMachine.family else state.dags
            found[family].update((id_, without_places(value)) for id_, value in held.items())
        return found


PLACES: Final = frozenset({"after", "index", "at", "owed_after", "owed_sum"})
"""The fields of a state that say where in the ledger something stands, or are a sum over it."""


def without_places(value: Any) -> Any:
    """A state as plain data, every ledger position in it made zero."""
    if isinstance(value, msgspec.Struct):
        return {
            name: 0 if name in PLACES else without_places(getattr(value, name))
            for name in value.__struct_fields__
        }
    if isinstance(value, dict):
        return {key: without_places(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_places(item) for item in value]
    return bytes(value) if isinstance(value, msgspec.Raw) else value


def compare(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> int:
    """
    Raises `LedgerBrokenError` on the first aggregate that is not what it was.

    A shard forgets what ended long ago by how much it holds, so fewer shards forget earlier and
    more of them later: what is only on one side must have ended. Returns how many those are.
    """
    forgotten = 0
    for family, held in before.items():
        for id_, state in held.items():
            new = after[family].get(id_)
            if new is None and _has_ended(family, state):
                forgotten += 1
            elif new != state:
                raise LedgerBrokenError(
                    f"{family} {id_}: {_difference(state, new)} is not what it was"
                )
        for id_, state in after[family].items():
            if id_ not in held and not _has_ended(family, state):
                raise LedgerBrokenError(f"{family} {id_}: was not there, and has not ended")
    return forgotten


def _has_ended(family: str, state: dict[str, Any]) -> bool:
    if family == SandboxMachine.family:
        return bool(state["gone"]) and not state["steps"]
    return bool(state["closed"] or state["finished"])


def _difference(before: dict[str, Any], after: dict[str, Any] | None) -> str:
    if after is None:
        return "it"
    return ", ".join(name for name in before if before[name] != after.get(name)) or "its fields"


# The source


async def _seal(source: Client) -> dict[Key, Batch]:
    """Opens a term of ours on every shard, which proves its head and fences its owner."""
    sealed: dict[Key, Batch] = {}
    for family, machine in machines().items():
        for shard in range(source.shards):
            last = await ledger.last_batch(
                source.link, shard, family=family, ledgers=source.ledgers
            )
            if last is None:
                continue  # never owned: nothing to cut
            term = last.batch.term + 1
            opened = machine.term_opened(term, OWNER, source.shards, HASH)
            batch = _follow(last, term=term, entries=machine.encode_entries([opened]))
            sealed[family, shard] = await _append_here(source, batch, last.seq)
    if not sealed:
        raise RefusedError("nothing_to_reshard", "the source's ledger is empty")
    return sealed


def _follow(last: ledger.Recorded, *, term: int, entries: bytes) -> Batch:
    return msgspec.structs.replace(
        last.batch,
        id=f"{OWNER}.{last.batch.family}.{last.batch.shard}.{term}.{last.seq}",
        term=term,
        owner=OWNER,
        prev=last.seq,
        entries=msgspec.Raw(entries),
    )


async def _append_here(source: Client, batch: Batch, head: int) -> Batch:
    log = ledger.log_of(source.link, batch.shard, source.ledgers)
    subject = subjects.ledger(batch.family, batch.shard)
    try:
        await log.append(subject, _ENCODE(batch), head, msg_id=batch.id)
    except AppendRefused as error:
        raise RefusedError(
            "not_at_rest", f"{subject} is being written: stop every planner and tracker first"
        ) from error
    except AppendUnknown as error:
        raise UnknownError(f"{subject}: {error}") from error
    return batch


async def _prove_still(source: Client, sealed: dict[Key, Batch]) -> None:
    """An empty batch of our own term, accepted, shows that nobody wrote since we opened it."""
    for (family, shard), batch in sealed.items():
        last = await ledger.last_batch(source.link, shard, family=family, ledgers=source.ledgers)
        assert last is not None, "what was appended is read"
        if last.batch.id != batch.id:
            raise RefusedError(
                "not_at_rest", f"{family}.{shard} was written meanwhile: stop every service first"
            )
        await _append_here(source, _follow(last, term=last.batch.term, entries=b"[]"), last.seq)


async def _refuse_unless_drained(source: Client, sealed: dict[Key, Batch]) -> None:
    for (family, shard), batch in sealed.items():
        for stream, filters in _inputs(family, shard).items():
            position = batch.positions.get(stream, Position(incarnation="", seq=0))
            log = JetStreamLog(source.link, stream=stream)
            for subject in filters:
                found = await log.next_after(subject, position.seq)
                if isinstance(found, Unknown):
                    raise UnknownError(f"{stream}, {subject}: {found.reason}")
                if not isinstance(found, Absent):
                    raise RefusedError(
                        "not_drained",
                        f"{family}.{shard} has not read {stream} up to {found.seq}: start its "
                        "service again, let it come to rest, and stop it",
                    )


def _inputs(family: str, shard: int) -> dict[str, list[str]]:
    messages = {streams.MESSAGES: [subjects.message(family, shard)]}
    if family == SandboxMachine.family:
        return {
            **messages,
            streams.FACTS: subjects.facts_of_shard(shard),
            streams.COMMANDS: subjects.commands_of_shard(shard),
        }
    return {**messages, streams.COMMANDS: subjects.commands_of_dag_shard(shard)}


async def _in_order(source: Client, sealed: Iterable[Key]) -> AsyncIterator[ledger.Recorded]:
    """Merges every shard's batches by their own time; within a shard the order stays."""
    readers = [
        ledger.batches(source.link, shard, family=family, ledgers=source.ledgers)
        for family, shard in sealed
    ]
    heads: list[tuple[int, int, ledger.Recorded]] = []
    for number, reader in enumerate(readers):
        async for recorded in reader:
            heads.append((recorded.batch.now_ms, number, recorded))
            break
    heapq.heapify(heads)
    while heads:
        now_ms, number, recorded = heads[0]
        yield recorded
        following = await anext(readers[number], None)
        if following is None:
            heapq.heappop(heads)
            continue
        if following.batch.now_ms < now_ms:
            raise LedgerBrokenError(f"time goes back at {following.seq}")
        heapq.heapreplace(heads, (following.batch.now_ms, number, following))


# The target


async def _refuse_unless_empty(target: Client) -> None:
    for name in streams.ledger_names(target.ledgers):
        known = await ledger.history(target.link, name)
        if known.messages:
            raise RefusedError(
                "not_empty",
                f"the target's {name} has {known.messages} batches: give it a deployment of its "
                "own, with its streams declared and no service started yet",
            )


async def copy_contents(source: Client, target: Client) -> int:
    """Copies what entries name by digest. Returns how many contents there were."""
    theirs = Objects(source.link, streams.OBJECTS_BLOBS)
    ours = Objects(target.link, streams.OBJECTS_BLOBS)
    names = await theirs.names()
    for name in names:
        content = await theirs.get(name)
        if content is not None:  # else it was let go meanwhile: nothing open names it any more
            await ours.put(name, content)
    return len(names)


async def copy_chunks(source: Client, target: Client) -> int:
    """
    Copies the checkpoints' chunks that the source keeps in JetStream. Returns how many there were.

    What a folder or S3 keeps stays there: both deployments are told the same store.
    """
    theirs, ours = JetStreamChunks(source.link), JetStreamChunks(target.link)
    found = sorted(await theirs.everything())

    async def copy(namespace: str, digest: str) -> None:
        content = await theirs.get(namespace, digest)
        if content is not None:  # else no checkpoint needs it any more
            await ours.put(namespace, digest, content)

    for at in range(0, len(found), _CHUNKS_AT_ONCE):
        await asyncio.gather(*(copy(*each) for each in found[at : at + _CHUNKS_AT_ONCE]))
    return len(found)


class _Part(NamedTuple):
    """What one batch of the source says to one shard of the target."""

    now_ms: int
    entries: Sequence[Any]
    is_public: bool


class _Writer:
    """Appends to every shard of the target at once, and to each in its order."""

    def __init__(self, target: Client) -> None:
        self.cut = _Cut(target.shards)
        self.batches = 0
        self.entries = 0
        self._shards = target.shards
        self._logs = [
            ledger.log_of(target.link, shard, target.ledgers) for shard in range(target.shards)
        ]
        self._machines = machines()
        self._heads: dict[Key, int] = {}
        self._now_ms: dict[Key, int] = {}
        self._public: dict[Key, int] = {}
        self._queues: dict[Key, asyncio.Queue[_Part | None]] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    async def write(
        self, recorded: ledger.Recorded, entries: Sequence[Any], *, is_public: bool
    ) -> None:
        """Takes one batch of the source; `is_public`: all its events were acknowledged there."""
        batch = recorded.batch
        parts: dict[int, list[Any]] = {}
        for entry in entries:
            if not isinstance(entry, TermOpened):
                shard = shard_for(batch.family, entry, former=batch.shard, shards=self._shards)
                parts.setdefault(shard, []).append(entry)
        for shard, part in parts.items():
            await self._put((batch.family, shard), _Part(batch.now_ms, part, is_public))

    async def _put(self, key: Key, item: _Part | None) -> None:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = asyncio.Queue(_QUEUE_MAX)
            self._tasks[key] = asyncio.create_task(self._append_all(key, queue))
        task = self._tasks[key]
        putting = asyncio.ensure_future(queue.put(item))
        await asyncio.wait({putting, task}, return_when=asyncio.FIRST_COMPLETED)
        if not putting.done():
            putting.cancel()
        if task.done():
            task.result()

    async def _append_all(self, key: Key, queue: asyncio.Queue[_Part | None]) -> None:
        while (item := await queue.get()) is not None:
            if key not in self._heads:
                await self._open(key, item.now_ms)
            if not item.is_public:
                self._public.setdefault(key, self._heads[key])
            await self._append(key, item.entries, item.now_ms)

    async def finish(self) -> None:
        """Waits until all is written, and closes each shard with what it has seen and sent."""
        for key in list(self._queues):
            await self._put(key, None)
        await asyncio.gather(*self._tasks.values())
        for family in self._machines:
            for shard in range(self._shards):
                # One with nothing of its own may all the same have taken what others sent it.
                if (family, shard) not in self._heads and self.cut.seen_by((family, shard)):
                    await self._open((family, shard), max(self._now_ms.values()))
        for key in list(self._heads):
            await self._append(key, [], self._now_ms[key], closes=True)

    async def _open(self, key: Key, now_ms: int) -> None:
        opened = self._machines[key[0]].term_opened(1, OWNER, self._shards, HASH)
        await self._append(key, [opened], now_ms)

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _append(
        self, key: Key, entries: Sequence[Any], now_ms: int, *, closes: bool = False
    ) -> None:
        family, shard = key
        prev = self._heads.get(key, 0)
        batch = Batch(
            v=BATCH_VERSION,
            id=f"{OWNER}.{family}.{shard}.{prev}",
            family=family,
            shard=shard,
            term=1,
            owner=OWNER,
            prev=prev,
            now_ms=now_ms,
            positions={},
            last_seen=self.cut.seen_by(key) if closes else {},
            # Every message was taken. From the first event that nobody acknowledged on, the next
            # owner makes them public again, under their new places.
            sent=Sent(events=self._public.get(key, prev), messages=prev),
            entries=msgspec.Raw(self._machines[family].encode_entries(entries)),
        )
        seq = await self._append_surely(batch)
        self.cut.fold(key, entries, prev=prev, seq=seq, now_ms=now_ms)
        self._heads[key], self._now_ms[key] = seq, now_ms
        self.batches += 1
        self.entries += len(entries)

    async def _append_surely(self, batch: Batch) -> int:
        subject = subjects.ledger(batch.family, batch.shard)
        log = self._logs[batch.shard]
        payload = _ENCODE(batch)
        for _ in range(_APPEND_TRIES):
            try:
                return await log.append(subject, payload, batch.prev, msg_id=batch.id)
            except AppendUnknown:
                continue  # a lost answer: the same append again is refused by its condition
            except AppendRefused as error:
                found = await log.next_after(subject, batch.prev)
                if not isinstance(found, Absent | Unknown) and found.payload == payload:
                    return found.seq
                raise RefusedError(
                    "not_empty", f"{subject} is being written by somebody else"
                ) from error
        raise UnknownError(f"{subject}: no append was answered")
