"""
What each entry of a sandbox shard does to the rows of the projection. Only computes.

Rule 1: entries are taken as they are, in order; nothing is decided, refused or repaired here.
Rule 2: a row that an entry rests on and that is not there is a hole, and said to be one.
Rule 3: how many batches are taken together shows nowhere.

The other half is `store`, which reads the rows that a group of batches names and writes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from fencepost.core import limits
from fencepost.core.sandbox import entries as e
from fencepost.core.steps import StepSpec
from fencepost.release_tracker.rows import (
    AttemptRow,
    EpochRow,
    HolderRow,
    RefusalRow,
    Row,
    SandboxRow,
    StepRow,
    name,
    number,
    text,
)
from fencepost.release_tracker.working import Group

VERSION: Final = 2
"""Rises whenever the same ledger would give other rows; the projection is then made again."""


class Names:
    """The keys of all rows that some entries may read."""

    def __init__(self) -> None:
        self.sandboxes: set[str] = set()
        self.steps: set[tuple[str, str]] = set()
        self.holders: set[tuple[str, str, str]] = set()

    def add(self, entries: Iterable[e.SandboxEntry]) -> None:
        for entry in entries:
            if isinstance(entry, e.TermOpened) or not entry.sandbox:
                continue
            sandbox = name(entry.sandbox)
            self.sandboxes.add(sandbox)
            match entry:
                case e.HolderAdded() | e.HolderRemoved():
                    self.holders.add((sandbox, "dag", name(entry.dag)))
                case e.Claimed() | e.Unclaimed():
                    self.holders.add((sandbox, "claim", name(entry.claim)))
                case e.ReceiptRefused():
                    pass  # it moves nothing
                case _:
                    step = getattr(entry, "step", "")
                    if step:
                        self.steps.add((sandbox, name(step)))

    def wanted(self) -> Iterable[tuple[type, str, tuple[list[Any], ...]]]:
        """Rows to be read: their kind, the `by` of `store`'s table of queries, its arguments."""
        if self.sandboxes:
            yield SandboxRow, "sandbox", (list(self.sandboxes),)
            yield EpochRow, "sandbox", (list(self.sandboxes),)
        if self.steps:
            sandboxes, steps = map(list, zip(*self.steps, strict=True))
            yield StepRow, "step", (sandboxes, steps)
            yield AttemptRow, "step", (sandboxes, steps)
        if self.holders:
            sandboxes, kinds, holders = map(list, zip(*self.holders, strict=True))
            yield HolderRow, "key", (sandboxes, kinds, holders)


class Working(Group):
    SHARD = "shard"

    def __init__(self) -> None:
        super().__init__()
        self.sandboxes: dict[str, SandboxRow] = {}
        self.epochs: dict[tuple[str, int], EpochRow] = {}
        self.steps: dict[tuple[str, str], StepRow] = {}
        self.attempts: dict[tuple[str, str, int, int], AttemptRow] = {}
        self.holders: dict[tuple[str, str, str], HolderRow] = {}

    def take(self, row: Row) -> None:
        """Takes a row as it stands in the table."""
        match row:
            case SandboxRow():
                self.sandboxes[row.sandbox] = row
            case EpochRow():
                self.epochs[row.sandbox, row.epoch] = row
            case StepRow():
                self.steps[row.sandbox, row.step] = row
            case AttemptRow():
                self.attempts[row.sandbox, row.step, row.admitted_seq, row.ordinal] = row
            case HolderRow():
                self.holders[row.sandbox, row.kind, row.holder] = row
            case RefusalRow():
                raise AssertionError("refusals are never read back")

    def apply_one(self, entry: Any) -> None:
        _BY_KIND[type(entry)](self, entry)

    # --- rows -----------------------------------------------------------------------------

    def _sandbox(self, entry: Any) -> SandboxRow:
        row = self.sandboxes.get(name(entry.sandbox))
        if row is None:
            raise self._hole(f"sandbox {entry.sandbox}")
        row.changed_at_ms, row.changed_seq = self._now_ms, self._seq
        return self._change(row)

    def _epoch(self, sandbox: str, epoch: int) -> EpochRow:
        row = self.epochs.get((sandbox, epoch))
        if row is None:
            raise self._hole(f"epoch {epoch} of sandbox {sandbox}")
        return self._change(row)

    def _step(self, entry: Any) -> StepRow:
        row = self.steps.get((name(entry.sandbox), name(entry.step)))
        if row is None:
            raise self._hole(f"step {entry.step} of sandbox {entry.sandbox}")
        return self._change(row)

    def _attempt(self, step: StepRow) -> AttemptRow:
        row = self.attempts.get((step.sandbox, step.step, step.admitted_seq, step.ordinal))
        if row is None:
            raise self._hole(f"attempt {step.attempt} of sandbox {step.sandbox}")
        return self._change(row)

    def _admit(self, entry: e.Parked | e.Fenced, spec: StepSpec) -> StepRow:
        row = StepRow(
            sandbox=name(entry.sandbox),
            step=name(entry.step),
            shard=self._shard,
            state="pending",
            tool=text(spec.tool),
            digest=text(spec.digest),
            effect=spec.effect,
            on_moved_epoch=spec.on_moved_epoch,
            attempts_max=number(spec.attempts_max),
            deadline_at_ms=number(spec.deadline_at_ms),
            admitted_at_ms=self._now_ms,
            admitted_seq=self._seq,
        )
        self.steps[row.sandbox, row.step] = row
        return self._change(row)

    def _attempt_of(self, step: StepRow, entry: e.Parked | e.Fenced) -> AttemptRow:
        """The attempt that an entry names: a new one, or the step's latest."""
        step.attempt, step.ordinal = text(entry.attempt), entry.ordinal
        key = (step.sandbox, step.step, step.admitted_seq, entry.ordinal)
        row = self.attempts.get(key)
        if row is None:
            row = AttemptRow(
                sandbox=step.sandbox,
                step=step.step,
                admitted_seq=step.admitted_seq,
                ordinal=entry.ordinal,
                attempt=text(entry.attempt),
                state="pending",
                made_at_ms=self._now_ms,
            )
            self.attempts[key] = row
        return self._change(row)

    def _end_attempt(self, step: StepRow, state: str) -> AttemptRow:
        row = self._attempt(step)
        row.state, row.ended_at_ms = state, self._now_ms
        return row

    def _end_step(self, step: StepRow, state: str) -> None:
        step.state = state
        step.ended_at_ms, step.ended_seq, step.ended_index = self._now_ms, self._seq, self._index

    # --- entries about sandboxes ----------------------------------------------------------

    def term_opened(self, entry: e.TermOpened) -> None:
        """Terms are the ledger's own affair; the position alone moves."""

    def created(self, entry: e.Created) -> None:
        spec = entry.spec
        # The provider's own options are left out: they may hold credentials.
        row = SandboxRow(
            sandbox=name(entry.sandbox),
            shard=self._shard,
            provider=text(spec.provider),
            image=text(spec.image),
            network=spec.network,
            memory_mb=number(spec.memory_mb),
            processes=number(spec.processes),
            rebuild=spec.rebuild,
            recovery=spec.recovery,
            checkpoint=text(spec.origin.checkpoint) if spec.origin is not None else "",
            creates=text(entry.create_id),
            created_at_ms=self._now_ms,
            created_seq=self._seq,
            changed_at_ms=self._now_ms,
            changed_seq=self._seq,
        )
        self.sandboxes[row.sandbox] = self._change(row)

    def rebuild_intended(self, entry: e.RebuildIntended) -> None:
        row = self._sandbox(entry)
        row.creates = f"{row.creates} {text(entry.create_id)}".strip()
        row.is_condemned = False
        row.state = row.word()

    def requested(self, entry: e.Requested) -> None:
        self._sandbox(entry).gateway = text(entry.gateway)

    def assigned(self, entry: e.AssignedEntry) -> None:
        row = self._sandbox(entry)
        row.settle(entry.create_id)
        self._refer(row, entry)

    def _refer(self, row: SandboxRow, entry: e.AssignedEntry | e.Marking) -> None:
        ref = entry.ref
        row.has_ref = True
        row.authority, row.native_id = text(ref.authority), text(ref.native_id)
        row.provider, row.ref_instance = text(ref.provider), text(ref.instance)
        row.state = row.word()

    def create_failed(self, entry: e.CreateFailedEntry) -> None:
        row = self._sandbox(entry)
        row.reason = text(entry.reason)
        if row.is_releasing and not entry.ambiguous:
            row.settle(entry.create_id)

    def epoch_opened(self, entry: e.EpochOpened) -> None:
        row = self._sandbox(entry)
        row.epoch, row.is_open = entry.epoch, True
        row.instance, row.session = text(entry.instance), ""
        if entry.disk != "warm":
            row.journal_seq = 0
        row.recovered_steps = 0
        row.recovering = ""
        if entry.recovering:
            row.recovering = "restore" if row.checkpoint else row.recovery
        row.state = row.word()
        epoch = EpochRow(
            sandbox=row.sandbox,
            epoch=entry.epoch,
            disk=entry.disk,
            evidence=text(entry.evidence),
            owed=number(entry.owed),
            instance=row.instance,
            opened_at_ms=self._now_ms,
            opened_seq=self._seq,
        )
        self.epochs[row.sandbox, row.epoch] = self._change(epoch)

    def marking(self, entry: e.Marking) -> None:
        self._refer(self._sandbox(entry), entry)

    def attached(self, entry: e.Attached) -> None:
        row = self._sandbox(entry)
        row.session, row.gateway = text(entry.session), text(entry.gateway)
        row.journal_seq = number(entry.journal_seq)
        row.reason = ""
        row.state = row.word()
        epoch = self._epoch(row.sandbox, entry.epoch)
        epoch.session, epoch.gateway = row.session, row.gateway
        if epoch.attached_at_ms is None:
            epoch.attached_at_ms = self._now_ms

    def detached(self, entry: e.Detached) -> None:
        row = self._sandbox(entry)
        if row.session == text(entry.session):
            row.session = ""
        row.reason = text(entry.reason)
        row.state = row.word()

    def epoch_closed(self, entry: e.EpochClosed) -> None:
        row = self._sandbox(entry)
        row.is_open, row.session = False, ""
        row.reason = text(entry.reason)
        row.state = row.word()
        epoch = self._epoch(row.sandbox, entry.epoch)
        epoch.closed_at_ms = self._now_ms
        epoch.closed_reason, epoch.closed_evidence = text(entry.reason), text(entry.evidence)

    def condemned(self, entry: e.Condemned) -> None:
        row = self._sandbox(entry)
        row.is_condemned, row.reason = True, text(entry.reason)
        row.state = row.word()

    def releasing(self, entry: e.Releasing) -> None:
        row = self._sandbox(entry)
        row.is_releasing, row.reason = True, text(entry.reason)
        row.state = row.word()

    def stop_answered(self, entry: e.StopAnsweredEntry) -> None:
        self._sandbox(entry).stop_answer = text(entry.answer)

    def gone(self, entry: e.GoneEntry) -> None:
        row = self._sandbox(entry)
        if row.has_ref and row.ref_instance == text(entry.instance):
            row.has_ref = False
            row.authority = row.native_id = row.ref_instance = row.instance = ""
        row.is_gone = row.is_gone or (row.is_releasing and not row.has_ref and not row.creates)
        row.state = row.word()

    def stray(self, entry: e.StrayFound | e.StrayGone) -> None:
        """Of no sandbox's row: what runs is under its name only. Its events show it."""

    def holder_added(self, entry: e.HolderAdded) -> None:
        self._hold(entry, "dag", entry.dag, acquisition=entry.acquisition)

    def holder_removed(self, entry: e.HolderRemoved) -> None:
        self._let_go(entry, "dag", entry.dag)

    def told(self, entry: e.ToldEntry) -> None:
        """What a DAG was told is of its own shard to show."""

    def claimed(self, entry: e.Claimed) -> None:
        self._hold(entry, "claim", entry.claim, reason=entry.reason)

    def unclaimed(self, entry: e.Unclaimed) -> None:
        self._let_go(entry, "claim", entry.claim)

    def _hold(
        self, entry: Any, kind: str, holder: str, *, acquisition: str = "", reason: str = ""
    ) -> None:
        row = HolderRow(
            sandbox=self._sandbox(entry).sandbox,
            kind=kind,
            holder=name(holder),
            acquisition=text(acquisition),
            reason=text(reason),
            added_at_ms=self._now_ms,
            added_seq=self._seq,
        )
        self.holders[row.sandbox, kind, row.holder] = self._change(row)

    def _let_go(self, entry: Any, kind: str, holder: str) -> None:
        row = self.holders.get((self._sandbox(entry).sandbox, kind, name(holder)))
        if row is not None and row.removed_seq is None:
            row.removed_at_ms, row.removed_seq = self._now_ms, self._seq
            self._change(row)

    # --- entries about steps --------------------------------------------------------------

    def parked(self, entry: e.Parked) -> None:
        step = self._admit(entry, entry.spec) if entry.spec is not None else self._step(entry)
        step.state, step.reason = "pending", text(entry.reason)
        self._attempt_of(step, entry).reason = step.reason

    def fenced(self, entry: e.Fenced) -> None:
        step = self._admit(entry, entry.spec) if entry.spec is not None else self._step(entry)
        attempt = self._attempt_of(step, entry)
        step.state = attempt.state = "fenced"
        step.epoch = attempt.epoch = entry.epoch
        step.reason, step.detail = text(entry.reason), text(entry.error)
        if entry.direction == "apply" and entry.counted:
            step.tries += 1
        attempt.direction, attempt.no = entry.direction, number(entry.no)
        attempt.session, attempt.of = text(entry.session), text(entry.of)
        attempt.reason, attempt.error = step.reason, step.detail
        if attempt.fenced_at_ms is None:
            attempt.fenced_at_ms = self._now_ms

    def revoked(self, entry: e.Revoked) -> None:
        self._attempt(self._step(entry)).journal = text(entry.journal)

    def committed(self, entry: e.Committed) -> None:
        sandbox, step, receipt = self._sandbox(entry), self._step(entry), entry.receipt
        result = bytes(receipt.result)
        step.outcome, step.result_bytes = receipt.outcome, len(result)
        step.result = result if len(result) <= limits.INLINE_BYTES_MAX else None
        step.journal_seq = number(receipt.journal_seq)
        step.reason = step.detail = ""
        self._end_attempt(step, "committed")
        self._end_step(step, "committed")
        sandbox.steps_committed += 1
        seq = receipt.of_seq if receipt.verdict == "attested" and receipt.of_seq else None
        written = step.journal_seq if seq is None else number(seq)
        line = number(entry.line or receipt.epoch)
        covered = line == sandbox.checkpoint_line and written <= sandbox.checkpoint_seq
        if step.effect == "workspace" and not covered:
            sandbox.steps_owed += 1
        sandbox.journal_seq = max(sandbox.journal_seq, step.journal_seq)

    def joined(self, entry: e.Joined) -> None:
        sandbox = self._sandbox(entry)
        sandbox.journal_seq = max(sandbox.journal_seq, number(entry.receipt.journal_seq))

    # --- checkpoints and recovery -----------------------------------------------------------

    def passed(self, entry: Any) -> None:
        """Of a checkpoint that is not there yet, or a replay under way, no row tells."""
        self._sandbox(entry)

    def checkpointed(self, entry: e.CheckpointedEntry) -> None:
        row = self._sandbox(entry)
        row.checkpoint, row.checkpoint_at_ms = text(entry.checkpoint), self._now_ms
        row.checkpoint_line, row.checkpoint_seq = number(entry.line), number(entry.journal_seq)
        row.steps_owed = 0

    def restored(self, entry: e.RestoredEntry) -> None:
        row = self._sandbox(entry)
        row.recovering = row.recovery
        row.journal_seq = max(row.journal_seq, number(entry.journal_seq))

    def replayed(self, entry: e.Replayed) -> None:
        row = self._sandbox(entry)
        row.recovered_steps += 1
        row.journal_seq = max(row.journal_seq, number(entry.journal_seq))

    def told_of(self, entry: e.OwedTold) -> None:
        self._sandbox(entry).recovered_steps += len(entry.steps)

    def recovery_stopped(self, entry: e.RecoveryStopped) -> None:
        row = self._sandbox(entry)
        row.recovering, row.reason = "stopped", text(entry.reason)

    def recovery_decided(self, entry: e.RecoveryDecided) -> None:
        row = self._sandbox(entry)
        row.reason = ""
        row.recovering = {"tell": "tell", "accept": row.recovery}.get(entry.decision, "stopped")

    def recovered(self, entry: e.Recovered) -> None:
        row = self._sandbox(entry)
        row.recovering = row.reason = ""
        if entry.mode == "told":
            row.steps_owed = number(entry.replayed)
        if entry.lost:
            row.checkpoint, row.checkpoint_at_ms = "", None
            row.checkpoint_line = row.checkpoint_seq = 0
        row.state = row.word()

    def compensated(self, entry: e.Compensated) -> None:
        sandbox, step = self._sandbox(entry), self._step(entry)
        attempt = self._end_attempt(step, "compensated")
        attempt.reason, attempt.evidence = text(entry.reason), entry.evidence
        attempt.detail = text(entry.detail)
        step.reason, step.evidence, step.detail = attempt.reason, attempt.evidence, attempt.detail
        step.state = "compensated"
        if entry.final:
            self._end_step(step, "compensated")
            sandbox.steps_compensated += 1

    def cancelled(self, entry: e.Cancelled) -> None:
        step = self._step(entry)
        step.is_cancelled, step.reason = True, text(entry.reason)

    def indeterminate(self, entry: e.Indeterminate) -> None:
        step = self._step(entry)
        attempt = self._attempt(step)
        step.state = attempt.state = "indeterminate"
        step.reason = attempt.reason = text(entry.reason)
        step.detail = attempt.detail = text(entry.detail)

    def resolved(self, entry: e.Resolved) -> None:
        sandbox, step = self._sandbox(entry), self._step(entry)
        self._end_attempt(step, entry.state).evidence = "resolved"
        self._end_step(step, entry.state)
        step.evidence = "resolved"
        step.resolved_by, step.resolved_note = text(entry.who), text(entry.note)
        if entry.state == "committed":
            sandbox.steps_committed += 1
        else:
            sandbox.steps_compensated += 1

    # --- refusals -------------------------------------------------------------------------

    def refused(self, entry: e.Refused) -> None:
        row = self.sandboxes.get(name(entry.sandbox))
        if row is not None:
            row.commands_refused += 1
            self._change(row)
        self._change(
            RefusalRow(
                shard=self._shard,
                seq=self._seq,
                index=self._index,
                kind="command",
                sandbox=name(entry.sandbox),
                step=name(entry.id),
                command=text(entry.command),
                reason=text(entry.reason),
                field=text(entry.field),
                detail=text(entry.detail),
                at_ms=self._now_ms,
            )
        )

    def receipt_refused(self, entry: e.ReceiptRefused) -> None:
        self._change(
            RefusalRow(
                shard=self._shard,
                seq=self._seq,
                index=self._index,
                kind="receipt",
                sandbox=name(entry.sandbox),
                step=name(entry.step),
                attempt=text(entry.attempt),
                reason=text(entry.reason),
                detail=text(entry.detail),
                direction=text(entry.direction),
                verdict=text(entry.verdict),
                epoch=number(entry.epoch),
                session=text(entry.session),
                gateway=text(entry.gateway),
                at_ms=self._now_ms,
            )
        )


_BY_KIND: Final[dict[type, Callable[[Working, Any], None]]] = {
    e.TermOpened: Working.term_opened,
    e.Refused: Working.refused,
    e.Created: Working.created,
    e.RebuildIntended: Working.rebuild_intended,
    e.Requested: Working.requested,
    e.AssignedEntry: Working.assigned,
    e.CreateFailedEntry: Working.create_failed,
    e.EpochOpened: Working.epoch_opened,
    e.Marking: Working.marking,
    e.Attached: Working.attached,
    e.Detached: Working.detached,
    e.EpochClosed: Working.epoch_closed,
    e.Condemned: Working.condemned,
    e.Parked: Working.parked,
    e.Fenced: Working.fenced,
    e.Revoked: Working.revoked,
    e.Joined: Working.joined,
    e.Committed: Working.committed,
    e.Compensated: Working.compensated,
    e.Cancelled: Working.cancelled,
    e.Indeterminate: Working.indeterminate,
    e.Resolved: Working.resolved,
    e.ReceiptRefused: Working.receipt_refused,
    e.HolderAdded: Working.holder_added,
    e.HolderRemoved: Working.holder_removed,
    e.ToldEntry: Working.told,
    e.Claimed: Working.claimed,
    e.Unclaimed: Working.unclaimed,
    e.Releasing: Working.releasing,
    e.StopAnsweredEntry: Working.stop_answered,
    e.GoneEntry: Working.gone,
    e.StrayFound: Working.stray,
    e.StrayGone: Working.stray,
    e.CheckpointAsked: Working.passed,
    e.CheckpointingEntry: Working.passed,
    e.CheckpointedEntry: Working.checkpointed,
    e.CheckpointFailedEntry: Working.passed,
    e.RestoredEntry: Working.restored,
    e.RestoreFailedEntry: Working.passed,
    e.Replaying: Working.passed,
    e.Replayed: Working.replayed,
    e.OwedTold: Working.told_of,
    e.RecoveryStopped: Working.recovery_stopped,
    e.RecoveryDecided: Working.recovery_decided,
    e.Recovered: Working.recovered,
    e.Preempted: Working.passed,
}
