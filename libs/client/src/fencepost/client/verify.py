"""
`fencepost verify`: folds the whole recorded ledger from its first entry and checks it.

Snapshots and projections are not looked at: they are caches. Everything comes from FP_LEDGER, and
what cannot be read is an error, never a shorter history.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from fencepost.client import ledger
from fencepost.client.client import Client
from fencepost.contracts.messages import BATCH_VERSION, HASH, Batch
from fencepost.core.errors import LedgerBrokenError
from fencepost.core.machine import Machine, Place
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.machine import SandboxMachine

VIOLATIONS_MAX: Final = 1000
"""More are counted, not kept."""


class Violation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What does not hold, and where: the batch's sequence in FP_LEDGER and the entry's number."""

    invariant: str
    family: str
    shard: int
    detail: str
    seq: int = 0
    index: int = 0
    sandbox: str = ""

    def __str__(self) -> str:
        where = f"{self.family}.{self.shard}"
        if self.seq:
            where += f" at {self.seq}.{self.index}"
        return f"{where}: {self.detail}"


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
    known = await ledger.history(client.link)
    if not known.is_unbroken:
        report.add(
            Violation(
                invariant="I8",
                family="",
                shard=-1,
                detail=f"the ledger is not whole: {known.messages} messages from {known.first}"
                f" to {known.last}",
            )
        )
    for shard in range(client.shards):
        await _verify_shard(client, SandboxMachine(), shard, report)
    return report


async def _verify_shard(
    client: Client, machine: Machine[Any, Any], shard: int, report: Report
) -> None:
    fold = _Fold(machine, shard, client.shards)
    try:
        async for recorded in ledger.batches(client.link, shard, family=machine.family):
            report.batches += 1
            for violation in fold.take(recorded, report):
                report.add(violation)
            if fold.is_broken:
                break
    except LedgerBrokenError as error:
        report.add(fold.violation("I8", str(error)))
    report.shards += 1
    report.terms += fold.term
    report.sandboxes += len(getattr(fold.state, "sandboxes", ()))


class _Fold:
    """One shard's fold, with what is checked from batch to batch."""

    def __init__(self, machine: Machine[Any, Any], shard: int, shards: int) -> None:
        self._machine = machine
        self._shard = shard
        self._shards = shards
        self._seq = 0
        self._last: Batch | None = None
        self._index = 0
        self.term = 0
        self.state = machine.initial(shard, shards)
        self.is_broken = False

    def violation(self, invariant: str, detail: str, *, sandbox: str = "") -> Violation:
        return Violation(
            invariant=invariant,
            family=self._machine.family,
            shard=self._shard,
            detail=detail,
            seq=self._seq,
            index=self._index,
            sandbox=sandbox,
        )

    def take(self, recorded: ledger.Recorded, report: Report) -> Iterator[Violation]:
        batch = recorded.batch
        former, self._seq, self._index = self._seq, recorded.seq, 0
        yield from self._check_batch(batch, former)
        entries = self._machine.decode_entries(bytes(batch.entries))
        yield from self._check_term(batch, entries)
        for index, entry in enumerate(entries):
            self._index = index
            report.entries += 1
            _count(report, entry)
            yield from self._check_entry(entry)
            try:
                self._machine.evolve(self.state, entry, Place(batch.prev, index), batch.now_ms)
            except Exception as error:
                self.is_broken = True
                kind = type(entry).__name__
                detail = f"{kind} does not follow from what was before: {error!r}"
                yield self.violation("I8", detail, sandbox=getattr(entry, "sandbox", ""))
                return
        self._last = batch

    def _check_batch(self, batch: Batch, former: int) -> Iterator[Violation]:
        last = self._last
        if batch.v > BATCH_VERSION:
            yield self.violation("I8", f"batch version {batch.v}, not {BATCH_VERSION}")
        if (batch.family, batch.shard) != (self._machine.family, self._shard):
            yield self.violation("I8", f"a batch of {batch.family}.{batch.shard}")
        if batch.prev != former:
            yield self.violation("I8", f"names {batch.prev} as the former batch, which is {former}")
        if last is None:
            return
        if batch.now_ms < last.now_ms:
            yield self.violation("I8", f"time went back by {last.now_ms - batch.now_ms} ms")
        for stream, position in last.positions.items():
            now = batch.positions.get(stream)
            if now is None or (now.incarnation == position.incarnation and now.seq < position.seq):
                yield self.violation("I8", f"the position in {stream} went back")

    def _check_term(self, batch: Batch, entries: Any) -> Iterator[Violation]:
        opened = entries[0] if entries and isinstance(entries[0], e.TermOpened) else None
        if opened is not None:
            if opened.term != self.term + 1 or batch.term != opened.term:
                yield self.violation("I8", f"term {opened.term} opened after term {self.term}")
            if (opened.shards, opened.hash) != (self._shards, HASH):
                yield self.violation("I8", f"cut for {opened.shards} shards by {opened.hash}")
            self.term = opened.term
        elif batch.term != self.term:
            yield self.violation("I8", f"a batch of term {batch.term} inside term {self.term}")
        if self._last is not None and opened is None and batch.owner != self._last.owner:
            yield self.violation("I8", f"{batch.owner} appended in the term of {self._last.owner}")

    def _check_entry(self, entry: Any) -> Iterator[Violation]:
        """What must hold of an entry on the state before it, seen without the deciding code."""
        sandbox = getattr(self.state, "sandboxes", {}).get(getattr(entry, "sandbox", ""))
        if sandbox is None:
            return
        if isinstance(entry, e.Committed):
            yield from self._check_commit(entry, sandbox)
        elif isinstance(entry, e.EpochOpened) and entry.epoch <= sandbox.epoch:
            yield self.violation(
                "I8", f"epoch {entry.epoch} opened after {sandbox.epoch}", sandbox=sandbox.id
            )
        elif isinstance(entry, e.Releasing) and (sandbox.holders or sandbox.claims):
            yield self.violation("I6", "released while it was held", sandbox=sandbox.id)

    def _check_commit(self, entry: e.Committed, sandbox: Any) -> Iterator[Violation]:
        receipt, step = entry.receipt, sandbox.steps.get(entry.step)
        wrong = []
        if not sandbox.open:
            wrong.append("its epoch was closed")
        if (receipt.epoch, receipt.session) != (sandbox.epoch, sandbox.session):
            wrong.append(
                f"receipt of epoch {receipt.epoch}, session {receipt.session};"
                f" live were {sandbox.epoch}, {sandbox.session}"
            )
        if (receipt.after.epoch, receipt.after.session) != (receipt.epoch, receipt.session):
            wrong.append("the marker moved during the write")
        if entry.gateway != sandbox.gateway:
            wrong.append(f"stamped by {entry.gateway}, attached was {sandbox.gateway}")
        if step is None or step.attempt != entry.attempt or receipt.attempt != entry.attempt:
            wrong.append("not the latest open attempt of its step")
        elif receipt.digest != step.spec.digest:
            wrong.append("a receipt about other arguments")
        for detail in wrong:
            yield self.violation("I1", f"{entry.attempt} committed: {detail}", sandbox=sandbox.id)


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
