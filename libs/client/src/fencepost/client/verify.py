"""
`fencepost verify`: folds the whole recorded ledger from its first entry and checks it.

Snapshots and projections are not looked at: they are caches. Everything comes from the ledger, and
what cannot be read is an error, never a shorter history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from fencepost.client import ledger
from fencepost.client.client import Client
from fencepost.client.verify_links import Sender, Taken, read_taken
from fencepost.contracts import streams
from fencepost.contracts.messages import BATCH_VERSION, HASH, Batch, Seen
from fencepost.core import invariants
from fencepost.core.dag.machine import DagMachine
from fencepost.core.errors import LedgerBrokenError
from fencepost.core.invariants import ShardAuditor
from fencepost.core.machine import Machine, Place, TermOpened
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.machine import SandboxMachine

VIOLATIONS_MAX: Final = 1000
"""More are counted, not kept."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """What does not hold, and where: the batch's sequence in the ledger and the entry's number."""

    invariant: str
    family: str
    shard: int
    seq: int
    index: int
    detail: str

    def __str__(self) -> str:
        return f"{self.family}.{self.shard} at {self.seq}.{self.index}: {self.detail}"


class Report(msgspec.Struct, kw_only=True):
    """What was read and what was found wrong."""

    is_clean: bool = True
    violations: list[Violation] = []
    violation_count: int = 0
    batches: int = 0
    entries: int = 0
    shards: int = 0
    terms: int = 0
    sandboxes: int = 0
    dags: int = 0
    committed: int = 0
    compensated: int = 0
    refused: int = 0
    receipts_refused: int = 0
    indeterminate: int = 0

    def add(self, violation: Violation) -> None:
        self.is_clean = False
        self.violation_count += 1
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(violation)


async def verify(client: Client) -> Report:
    """Reads and checks everything; raises `UnknownError` when some of it cannot be read."""
    report = Report()
    for number, name in enumerate(streams.ledger_names(client.ledgers)):
        known = await ledger.history(client.link, name)
        if not known.is_unbroken:
            report.add(
                Violation(
                    invariant="I8",
                    family="ledger",
                    shard=number,
                    seq=known.first,
                    index=0,
                    detail=f"{name} is not whole: {known.messages} messages from {known.first} "
                    f"to {known.last}",
                )
            )
    machines: tuple[Machine[Any, Any], ...] = (SandboxMachine(), DagMachine())
    # Before any sender is read: what was taken by then was sent by then.
    taken = await read_taken(client, [machine.family for machine in machines])
    for shard in range(client.shards):
        for machine in machines:
            await _verify_shard(client, machine, shard, report, taken)
    return report


async def _verify_shard(
    client: Client, machine: Machine[Any, Any], shard: int, report: Report, taken: Taken
) -> None:
    fold = _Fold(machine, shard, client.shards)
    sender = Sender(machine, shard, client.shards, taken)
    try:
        async for recorded in ledger.batches(
            client.link, shard, family=machine.family, ledgers=client.ledgers
        ):
            report.batches += 1
            for violation in fold.take(recorded, report):
                report.add(violation)
            if fold.is_broken:
                break
            sender.take(recorded)
        else:
            for seen, detail in sender.unsent():
                report.add(fold.violation("I8", detail, at=seen))
    except LedgerBrokenError as error:
        report.add(fold.violation("I8", str(error)))
    if fold.auditor is not None:
        for found in fold.auditor.finish():
            report.add(fold.audited(found))
    report.shards += 1
    report.terms += fold.term
    report.sandboxes += len(getattr(fold.state, "sandboxes", ()))
    report.dags += len(getattr(fold.state, "dags", ()))


class _Fold:
    """
    One shard's fold.

    The fold shows that every batch follows the former one, and that the machine can follow them
    with its assertions. The auditor judges the sandbox family's entries by themselves.
    """

    def __init__(self, machine: Machine[Any, Any], shard: int, shards: int) -> None:
        self._machine = machine
        self._shard = shard
        self._shards = shards
        self._seq = 0
        self._index = 0
        self._last: Batch | None = None
        self.auditor = (
            ShardAuditor(machine.family, shard) if machine.family == SandboxMachine.family else None
        )
        self.term = 0
        self.state = machine.initial(shard, shards)
        self.is_broken = False

    def violation(self, invariant: str, detail: str, *, at: Seen | None = None) -> Violation:
        return Violation(
            invariant=invariant,
            family=self._machine.family,
            shard=self._shard,
            seq=self._seq if at is None else at.seq,
            index=self._index if at is None else at.index,
            detail=detail,
        )

    def audited(self, found: invariants.Violation) -> Violation:
        return Violation(
            invariant=found.invariant,
            family=self._machine.family,
            shard=found.shard,
            seq=found.seq,
            index=found.index,
            detail=found.detail,
        )

    def take(self, recorded: ledger.Recorded, report: Report) -> Iterator[Violation]:
        batch, former = recorded.batch, self._seq
        self._seq, self._index = recorded.seq, 0
        entries = self._machine.decode_entries(bytes(batch.entries))
        yield from self._check_batch(batch)
        if self.auditor is None:
            yield from self._check_frame(batch, former, entries)
        else:
            for found in self.auditor.take(
                seq=recorded.seq,
                prev=batch.prev,
                term=batch.term,
                owner=batch.owner,
                now_ms=batch.now_ms,
                entries=entries,
            ):
                yield self.audited(found)
        for index, entry in enumerate(entries):
            self._index = index
            report.entries += 1
            _count(report, entry)
            if isinstance(entry, TermOpened):
                self.term = entry.term
                if (entry.shards, entry.hash) != (self._shards, HASH):
                    yield self.violation("I8", f"cut for {entry.shards} shards by {entry.hash}")
            try:
                self._machine.evolve(self.state, entry, Place(batch.prev, index), batch.now_ms)
            except (AssertionError, LookupError, ValueError, TypeError, AttributeError) as error:
                self.is_broken = True
                yield self.violation(
                    "I8", f"{type(entry).__name__} does not follow from what was before: {error!r}"
                )
                return
        self._last = batch

    def _check_batch(self, batch: Batch) -> Iterator[Violation]:
        if batch.v > BATCH_VERSION:
            yield self.violation("I8", f"batch version {batch.v}, not {BATCH_VERSION}")
        if (batch.family, batch.shard) != (self._machine.family, self._shard):
            yield self.violation("I8", f"a batch of {batch.family}.{batch.shard}")
        for stream, position in (self._last.positions if self._last else {}).items():
            now = batch.positions.get(stream)
            if now is None or (now.incarnation == position.incarnation and now.seq < position.seq):
                yield self.violation("I8", f"the position in {stream} went back")

    def _check_frame(
        self, batch: Batch, former: int, entries: Sequence[Any]
    ) -> Iterator[Violation]:
        """What the auditor checks where there is one."""
        last = self._last
        opens = bool(entries) and isinstance(entries[0], TermOpened)
        if batch.prev != former:
            yield self.violation("I8", f"follows {batch.prev}, the last batch was {former}")
        if batch.term != self.term + opens:
            yield self.violation("I8", f"a batch of term {batch.term} after term {self.term}")
        if last is not None and batch.now_ms < last.now_ms:
            yield self.violation("I8", f"time {batch.now_ms} after {last.now_ms}")
        if last is not None and not opens and batch.owner != last.owner:
            yield self.violation("I8", f"term {batch.term} is {last.owner}'s, not {batch.owner}'s")


def _count(report: Report, entry: Any) -> None:
    match entry:
        case e.Committed():
            report.committed += 1
        case e.Compensated(final=True):
            report.compensated += 1
        case e.Refused():
            report.refused += 1
        case e.ReceiptRefused():
            report.receipts_refused += 1
        case e.Indeterminate():
            report.indeterminate += 1
        case _:
            pass
