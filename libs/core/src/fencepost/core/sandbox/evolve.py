"""
How entries change the state: one function per kind. Never refuses, never looks outside.

An entry that does not fit the state is a bug or a broken ledger and fails an assertion: the
owner stops, and nobody goes on from a state that nobody can explain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fencepost.core import ids, limits
from fencepost.core.machine import Place, TermOpened
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import evolve_recovery, news
from fencepost.core.sandbox.state import (
    Create,
    Finished,
    MarkingState,
    Sandbox,
    SandboxShard,
    Step,
    StrayState,
)


def evolve(state: SandboxShard, entry: e.SandboxEntry, place: Place, now_ms: int) -> None:
    _BY_KIND[type(entry)](state, entry, place, now_ms)


def _term_opened(state: SandboxShard, entry: TermOpened, _place: Place, _now_ms: int) -> None:
    assert entry.term == state.term + 1, "a term does not follow its predecessor"
    assert entry.shards == state.shards, "the number of shards changed under the ledger"
    state.term = entry.term
    state.owner = entry.owner


def _refused(state: SandboxShard, entry: e.Refused, _place: Place, _now_ms: int) -> None:
    sandbox = state.sandboxes.get(entry.sandbox)
    if sandbox is not None:
        sandbox.refused += 1
    if entry.reason == "poison":
        state.poisoned += 1


def _created(state: SandboxShard, entry: e.Created, place: Place, now_ms: int) -> None:
    assert entry.sandbox not in state.sandboxes, "a sandbox is created once"
    sandbox = Sandbox(id=entry.sandbox, spec=entry.spec)
    sandbox.creates[entry.create_id] = Create(create_id=entry.create_id, since_ms=now_ms)
    sandbox.creates_made = 1
    evolve_recovery.created(sandbox, place, now_ms)
    state.sandboxes[entry.sandbox] = sandbox
    state.busy[entry.sandbox] = None


def _rebuild_intended(
    state: SandboxShard, entry: e.RebuildIntended, _place: Place, now_ms: int
) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    assert not sandbox.releasing, "nothing is built for a sandbox that is being released"
    sandbox.creates[entry.create_id] = Create(create_id=entry.create_id, since_ms=now_ms)
    sandbox.creates_made += 1
    sandbox.condemned = False
    state.busy[sandbox.id] = None


def _requested(state: SandboxShard, entry: e.Requested, _place: Place, now_ms: int) -> None:
    made = state.sandboxes[entry.sandbox].creates[entry.create_id]
    made.gateway = entry.gateway
    made.place = made.place or entry.place
    made.since_ms = now_ms


def _assigned(state: SandboxShard, entry: e.AssignedEntry, _place: Place, now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    sandbox.asked += 1
    made = sandbox.creates.pop(entry.create_id)
    sandbox.ref = entry.ref
    sandbox.capabilities = entry.capabilities
    if sandbox.releasing:
        news.set_news(sandbox, news.PENDING)
    sandbox.gateway = made.gateway
    sandbox.waiting_since_ms = now_ms
    _note_busy(state, sandbox)


def _create_failed(
    state: SandboxShard, entry: e.CreateFailedEntry, _place: Place, now_ms: int
) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    made = sandbox.creates[entry.create_id]
    if sandbox.releasing and not entry.ambiguous:
        del sandbox.creates[entry.create_id]
        return
    if sandbox.releasing:
        news.set_news(sandbox, news.AMBIGUOUS)
    made.ambiguous = made.ambiguous or entry.ambiguous
    made.failures += 1
    made.gateway = ""
    made.since_ms = now_ms


def _epoch_opened(state: SandboxShard, entry: e.EpochOpened, _place: Place, now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    assert entry.epoch == sandbox.epoch + 1, "epochs rise by one and are never reused"
    assert not sandbox.open, "an epoch is closed before the next one opens"
    sandbox.epoch = entry.epoch
    sandbox.open = True
    sandbox.nonce = entry.nonce
    sandbox.instance = entry.instance
    sandbox.session = ""
    if entry.disk != "warm":
        sandbox.journal_seq = 0
    if entry.disk == "cold" or entry.blank:
        sandbox.nonce_on_disk = ""
    evolve_recovery.epoch_opened(sandbox, entry, now_ms)
    _note_busy(state, sandbox)


def _marking(state: SandboxShard, entry: e.Marking, _place: Place, now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    sandbox.asked += 1
    assert sandbox.open, "a marker is written for an open epoch"
    assert entry.epoch == sandbox.epoch, "a marker is written for the current epoch"
    sandbox.ref = entry.ref
    # What was read of the disk is what it has from now on, also where this marking comes to
    # nothing: the next reading shows whether an older point of it came back meanwhile.
    sandbox.journal_seq = max(sandbox.journal_seq, entry.journal_seq)
    sandbox.marking = MarkingState(
        epoch=entry.epoch,
        session=entry.session,
        gateway=entry.gateway,
        nonce=entry.nonce,
        ref=entry.ref,
        since_ms=now_ms,
    )
    _note_busy(state, sandbox)


def _attached(state: SandboxShard, entry: e.Attached, _place: Place, now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    sandbox.asked += 1
    assert sandbox.open, "only an open epoch is attached to"
    assert entry.epoch == sandbox.epoch, "only the current epoch is attached to"
    sandbox.session = entry.session
    sandbox.gateway = entry.gateway
    sandbox.marking = None
    sandbox.nonce_on_disk = sandbox.nonce
    # What the disk had at this moment is what it must have from now on: less is a restored
    # snapshot, even when nothing of it was committed (S-205).
    sandbox.journal_seq = entry.journal_seq
    evolve_recovery.attached(sandbox, now_ms)
    _note_busy(state, sandbox)


def _detached(state: SandboxShard, entry: e.Detached, _place: Place, now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    sandbox.asked += 1
    if sandbox.session == entry.session:
        sandbox.session = ""
    if sandbox.marking is not None and sandbox.marking.session == entry.session:
        sandbox.marking = None
    sandbox.waiting_since_ms = now_ms
    _note_busy(state, sandbox)


def _epoch_closed(state: SandboxShard, entry: e.EpochClosed, _place: Place, now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    sandbox.asked += 1
    assert entry.epoch == sandbox.epoch, "only the current epoch is closed"
    sandbox.open = False
    sandbox.session = ""
    sandbox.marking = None
    # What was asked for is begun anew on the next disk, what policy wanted perhaps not.
    sandbox.checkpointing = None
    sandbox.waiting_since_ms = now_ms
    _note_busy(state, sandbox)


def _condemned(state: SandboxShard, entry: e.Condemned, _place: Place, _now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    assert not sandbox.open, "the epoch of a condemned instance is closed"
    sandbox.condemned = True
    if sandbox.recovering is not None:
        sandbox.recoveries_failed += 1
    _note_busy(state, sandbox)


def _parked(state: SandboxShard, entry: e.Parked, place: Place, now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    if entry.spec is not None:
        step = Step(
            spec=entry.spec, ordinal=1, attempt=entry.attempt, since_ms=now_ms, at=place.after
        )
        sandbox.steps[entry.step] = step
        sandbox.parked[entry.step] = None
        state.open_steps += 1
        return
    step = sandbox.steps[entry.step]
    assert entry.ordinal == step.ordinal + 1, "attempts rise by one"
    step.phase = "parked"
    step.ordinal = entry.ordinal
    step.attempt = entry.attempt
    step.refusals = 0
    step.receipt = None
    sandbox.joined.pop(entry.step, None)
    sandbox.fenced.pop(entry.step, None)
    sandbox.requeued[entry.step] = None
    _note_busy(state, sandbox)


def _fenced(state: SandboxShard, entry: e.Fenced, place: Place, now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    assert entry.no >= sandbox.next_no, "fence numbers rise"
    name = entry.step
    if entry.spec is not None:
        step = Step(spec=entry.spec, at=place.after)
        sandbox.steps[name] = step
        state.open_steps += 1
    else:
        step = sandbox.steps[name]
        if step.phase == "parked":
            sandbox.parked.pop(name, None)
            sandbox.requeued.pop(name, None)
        elif step.phase == "joined":
            step.receipt = None
            sandbox.joined.pop(name, None)
    if entry.direction == "apply":
        step.phase = "apply"
        step.refusals = 0
        if not entry.of:
            step.since_no = entry.no
        if entry.counted:
            step.tries += 1
    else:
        step.phase = entry.direction  # type: ignore[assignment]
        step.ended = True
        if entry.direction == "undo" and entry.counted:
            step.undo_tries += 1
    step.ordinal = entry.ordinal
    step.attempt = entry.attempt
    step.epoch = entry.epoch
    step.session = entry.session
    step.no = entry.no
    step.of = entry.of
    if entry.reason:
        step.reason = entry.reason
    step.since_ms = now_ms
    sandbox.next_no = entry.no + 1
    sandbox.fenced[name] = None
    state.busy[sandbox.id] = None


def _cancelled(state: SandboxShard, entry: e.Cancelled, _place: Place, _now_ms: int) -> None:
    step = state.sandboxes[entry.sandbox].steps[entry.step]
    step.ended = True
    step.reason = entry.reason


def _revoked(_state: SandboxShard, _entry: e.Revoked, _place: Place, _now_ms: int) -> None:
    """Evidence only: the `compensated` beside it is what changes the step."""


def _joined(state: SandboxShard, entry: e.Joined, _place: Place, _now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    step = sandbox.steps[entry.step]
    assert step.attempt == entry.attempt, "only the latest attempt joins"
    step.phase = "joined"
    step.receipt = entry.receipt
    step.gateway = entry.gateway
    sandbox.joined[entry.step] = None
    sandbox.journal_seq = max(sandbox.journal_seq, entry.receipt.journal_seq)


def _committed(state: SandboxShard, entry: e.Committed, place: Place, _now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    step = _close(state, entry, "committed", place)
    sandbox.committed += 1
    if step.spec.effect == "workspace":
        evolve_recovery.committed(sandbox, entry, step)
    sandbox.journal_seq = max(sandbox.journal_seq, entry.receipt.journal_seq)


def _compensated(state: SandboxShard, entry: e.Compensated, place: Place, _now_ms: int) -> None:
    if not entry.final:
        return  # the attempt ended; the next one is in the entry that follows
    sandbox = state.sandboxes[entry.sandbox]
    _close(state, entry, "compensated", place)
    sandbox.compensated += 1
    sandbox.journal_seq = max(sandbox.journal_seq, entry.journal_seq)
    if entry.evidence == "undone":
        sandbox.undone = max(sandbox.undone, entry.journal_seq)


def _indeterminate(state: SandboxShard, entry: e.Indeterminate, _place: Place, _now: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    step = sandbox.steps[entry.step]
    step.phase = "indeterminate"
    step.reason = entry.reason
    step.receipt = None
    sandbox.joined.pop(entry.step, None)
    sandbox.fenced.pop(entry.step, None)
    _note_busy(state, sandbox)


def _resolved(state: SandboxShard, entry: e.Resolved, place: Place, _now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    _close(state, entry, entry.state, place)
    if entry.state == "committed":
        sandbox.committed += 1
    else:
        sandbox.compensated += 1


def _receipt_refused(
    state: SandboxShard, entry: e.ReceiptRefused, _place: Place, _now_ms: int
) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    if entry.direction == "replay" and evolve_recovery.replay_refused(sandbox, entry):
        return
    step = sandbox.steps.get(entry.step)
    if step is not None:
        step.refusals += 1
        return
    finished = sandbox.finished.get(entry.step)
    if finished is not None:
        finished.refusals += 1


def _holder_added(state: SandboxShard, entry: e.HolderAdded, _place: Place, _now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    assert not sandbox.releasing, "no holder is added to what is being released"
    sandbox.holders[entry.dag] = entry.acquisition
    _note_keepers(sandbox)
    sandbox.held_ever += 1


def _holder_removed(
    state: SandboxShard, entry: e.HolderRemoved, _place: Place, _now_ms: int
) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    sandbox.holders.pop(entry.dag, None)
    sandbox.debtors[news.key_of(entry.dag, entry.acquisition)] = (entry.dag, entry.acquisition)
    _note_keepers(sandbox)


def _note_keepers(sandbox: Sandbox) -> None:
    """Who keeps it has changed; with nobody left, `releasing` follows in the same batch."""
    kept = news.kept(sandbox)
    if kept is not None and sandbox.debtors:
        news.set_news(sandbox, kept)


def _told(state: SandboxShard, entry: e.ToldEntry, _place: Place, _now_ms: int) -> None:
    sandbox = state.sandboxes.get(entry.sandbox)
    if sandbox is None or entry.phase == "refused":
        return  # about an acquisition that never came to hold this sandbox
    key = news.key_of(entry.dag, entry.acquisition)
    if entry.phase == "gone":
        sandbox.debtors.pop(key, None)
        sandbox.told.pop(key, None)
        sandbox.untold.pop(key, None)
        _note_ended(state, sandbox)
    elif entry.phase == "releasing":
        said = news.heard(entry.phase, entry.reason, entry.evidence)
        sandbox.told[key] = said
        now = sandbox.news
        if now is not None and said == news.heard(now.phase, now.reason, now.evidence):
            sandbox.untold.pop(key, None)
    else:
        sandbox.told[key] = entry.phase


def _claimed(state: SandboxShard, entry: e.Claimed, _place: Place, _now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    sandbox.claims[entry.claim] = entry.reason
    _note_keepers(sandbox)


def _unclaimed(state: SandboxShard, entry: e.Unclaimed, _place: Place, _now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    sandbox.claims.pop(entry.claim, None)
    _note_keepers(sandbox)


def _releasing(state: SandboxShard, entry: e.Releasing, _place: Place, now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    assert not sandbox.holders, "a held sandbox is never released"
    assert not sandbox.claims, "a claimed sandbox is never released"
    sandbox.releasing = True
    evolve_recovery.releasing(sandbox)
    news.set_news(sandbox, news.PENDING)
    sandbox.waiting_since_ms = now_ms
    _note_busy(state, sandbox)


def _stop_answered(
    state: SandboxShard, entry: e.StopAnsweredEntry, _place: Place, _now_ms: int
) -> None:
    """A signal about a request: news for those who wait, never evidence of the sandbox itself."""
    sandbox = state.sandboxes[entry.sandbox]
    sandbox.stop_answer = f"{entry.instance}/{entry.answer}/{entry.detail}"
    if sandbox.releasing:
        news.set_news(sandbox, news.answered(entry.answer, entry.detail))


def _gone(state: SandboxShard, entry: e.GoneEntry, _place: Place, _now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    if sandbox.ref is not None and sandbox.ref.instance == entry.instance:
        sandbox.ref = None
        sandbox.instance = ""
        sandbox.nonce_on_disk = ""
    if sandbox.releasing and sandbox.ref is None and not sandbox.creates:
        sandbox.gone = True
        news.set_news(sandbox, news.gone(entry.evidence))
    _note_busy(state, sandbox)
    _note_ended(state, sandbox)


def _stray_found(state: SandboxShard, entry: e.StrayFound, _place: Place, now_ms: int) -> None:
    stray = StrayState(ref=entry.ref, observes_gone=entry.observes_gone, since_ms=now_ms)
    state.strays.setdefault(entry.sandbox, []).append(stray)


def _stray_gone(state: SandboxShard, entry: e.StrayGone, _place: Place, _now_ms: int) -> None:
    left = [stray for stray in state.strays[entry.sandbox] if stray.ref != entry.ref]
    if left:
        state.strays[entry.sandbox] = left
    else:
        del state.strays[entry.sandbox]


def _close(
    state: SandboxShard,
    entry: e.Committed | e.Compensated | e.Resolved,
    final: Literal["committed", "compensated"],
    place: Place,
) -> Step:
    sandbox, name, attempt = state.sandboxes[entry.sandbox], entry.step, entry.attempt
    step = sandbox.steps.pop(name)
    assert step.attempt == attempt, "only the latest attempt ends a step"
    sandbox.fenced.pop(name, None)
    sandbox.parked.pop(name, None)
    sandbox.requeued.pop(name, None)
    sandbox.joined.pop(name, None)
    state.open_steps -= 1
    sandbox.finished[name] = Finished(
        final,
        attempt,
        step.spec.digest,
        place.after,
        place.index,
    )
    if len(sandbox.finished) > limits.FINISHED_WINDOW:
        oldest = next(iter(sandbox.finished))
        del sandbox.finished[oldest]
        minted_ms = ids.ulid_ms(oldest)
        if minted_ms is not None and minted_ms > sandbox.finished_floor_ms:
            sandbox.finished_floor_ms = minted_ms
    if not sandbox.fenced:
        _note_busy(state, sandbox)
    _note_ended(state, sandbox)
    return step


def _recovery(state: SandboxShard, entry: Any, place: Place, now_ms: int) -> None:
    sandbox = state.sandboxes[entry.sandbox]
    evolve_recovery.BY_KIND[type(entry)](sandbox, entry, place, now_ms)
    _note_busy(state, sandbox)


def _note_ended(state: SandboxShard, sandbox: Sandbox) -> None:
    """Notes a sandbox that owes nothing any more, and lets the oldest such go."""
    if not sandbox.gone or sandbox.steps or sandbox.debtors or sandbox.id in state.ended:
        return
    state.ended[sandbox.id] = None
    if len(state.ended) > limits.GONE_REMEMBERED_PER_SHARD:
        oldest = next(iter(state.ended))
        del state.ended[oldest]
        state.busy.pop(oldest, None)
        state.forgotten[oldest] = state.sandboxes.pop(oldest).epoch
    if len(state.forgotten) > limits.GONE_NAMES_PER_SHARD:
        name = next(iter(state.forgotten))
        del state.forgotten[name]
        minted_ms = ids.ulid_ms(name)
        if minted_ms is None:
            state.names_used_up = True
        else:
            state.forgotten_floor_ms = max(state.forgotten_floor_ms, minted_ms)


def _note_busy(state: SandboxShard, sandbox: Sandbox) -> None:
    """Keeps the list of sandboxes to which, or for which, something is owed."""
    idle = sandbox.gone or (
        sandbox.session != ""
        and not sandbox.fenced
        and not sandbox.releasing
        and not sandbox.creates
        and sandbox.marking is None
        and sandbox.recovering is None
        and sandbox.checkpointing is None
    )
    if idle:
        state.busy.pop(sandbox.id, None)
    else:
        state.busy[sandbox.id] = None


_BY_KIND: dict[type, Callable[[SandboxShard, Any, Place, int], None]] = {
    TermOpened: _term_opened,
    e.Refused: _refused,
    e.Created: _created,
    e.RebuildIntended: _rebuild_intended,
    e.Requested: _requested,
    e.AssignedEntry: _assigned,
    e.CreateFailedEntry: _create_failed,
    e.EpochOpened: _epoch_opened,
    e.Marking: _marking,
    e.Attached: _attached,
    e.Detached: _detached,
    e.EpochClosed: _epoch_closed,
    e.Condemned: _condemned,
    e.Parked: _parked,
    e.Fenced: _fenced,
    e.Revoked: _revoked,
    e.Joined: _joined,
    e.Committed: _committed,
    e.Compensated: _compensated,
    e.Cancelled: _cancelled,
    e.Indeterminate: _indeterminate,
    e.Resolved: _resolved,
    e.ReceiptRefused: _receipt_refused,
    e.HolderAdded: _holder_added,
    e.HolderRemoved: _holder_removed,
    e.ToldEntry: _told,
    e.Claimed: _claimed,
    e.Unclaimed: _unclaimed,
    e.Releasing: _releasing,
    e.StopAnsweredEntry: _stop_answered,
    e.GoneEntry: _gone,
    e.StrayFound: _stray_found,
    e.StrayGone: _stray_gone,
    **dict.fromkeys(evolve_recovery.BY_KIND, _recovery),
}
