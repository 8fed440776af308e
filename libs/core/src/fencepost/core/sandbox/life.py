"""
The life of a sandbox: creates, generations, sessions, holders, and the way to gone.

Rule 1: a generation is what a disk shows. The same nonce, the same instance and a journal at least
        as long as what was committed is the same generation; anything else moves the epoch, up.
Rule 2: nothing is fenced between `epoch_opened` and `attached`.
Rule 3: only an observation of the very instance is evidence that a disk is gone.
Rule 4: the last holder's removal and `releasing` are one batch; nothing is built after it.
"""

from __future__ import annotations

from fencepost.core import facts, limits
from fencepost.core.sandbox import checkpoints, holding, outcomes, recovery, strays
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.admission import refuse, unknown_sandbox, used_before
from fencepost.core.sandbox.hints import Hints
from fencepost.core.sandbox.inputs import CommandReceived
from fencepost.core.sandbox.state import Sandbox, SandboxShard
from fencepost.core.steps import SandboxCommand, spec_problem

# Ending a former session's processes may take as long as a lease.
_MARKING_LEASES = 4


def create(
    state: SandboxShard, hints: Hints, value: CommandReceived, command: SandboxCommand, now_ms: int
) -> list[e.SandboxEntry]:
    """Creates by hand: kept by a claim until `release`, since no DAG holds it."""
    known = state.sandboxes.get(value.sandbox)
    if known is not None:
        if holding.OPERATOR in known.claims and known.spec == command.spec:
            return []  # the same create, sent again
        return refuse(
            value, "create", "sandbox_exists", field="sandbox", detail="this id was used before"
        )
    if unknown_sandbox(state, value, "create")[0].reason == "misrouted":  # type: ignore[union-attr]
        return unknown_sandbox(state, value, "create")
    if used := used_before(state, value.sandbox):
        return refuse(value, "create", "sandbox_exists", field="sandbox", detail=used)
    if value.sandbox in state.strays:
        detail = "something made under this id still runs, and is being stopped"
        return refuse(value, "create", "sandbox_exists", field="sandbox", detail=detail)
    if len(state.sandboxes) >= limits.SANDBOXES_PER_SHARD_MAX:
        return refuse(value, "create", "overloaded", detail="too many sandboxes in this shard")
    spec = command.spec
    if (wrong := spec_problem(spec)) is not None:
        return refuse(value, "create", "out_of_range", field=wrong[0], detail=wrong[1])
    create_id = value.sandbox
    entries: list[e.SandboxEntry] = [
        e.Created(sandbox=value.sandbox, spec=spec, create_id=create_id),
        e.Claimed(sandbox=value.sandbox, claim=holding.OPERATOR, reason=command.reason[:200]),
    ]
    gateway = hints.choose_for_create(value.sandbox, spec.provider, now_ms)
    if gateway:
        entries.append(holding.requested(hints, value.sandbox, create_id, gateway, spec))
    return entries


def release(state: SandboxShard, value: CommandReceived) -> list[e.SandboxEntry]:
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return unknown_sandbox(state, value, "release")
    if holding.OPERATOR not in sandbox.claims:
        if sandbox.releasing or sandbox.gone:
            return []
        return refuse(
            value,
            "release",
            "not_claimed",
            field="sandbox",
            detail="no operator holds it; a DAG's sandbox is released by its DAG",
        )
    return holding.unclaim(sandbox, holding.OPERATOR)


def fact(state: SandboxShard, hints: Hints, value: facts.Fact, now_ms: int) -> list[e.SandboxEntry]:
    """Decides one fact. A fact about nothing that is open is passed over: it came late."""
    if isinstance(value, facts.Stray):
        return strays.found(state, value)
    if isinstance(value, facts.StopAnswered | facts.Gone) and strays.is_about(state, value):
        return strays.heard(state, value)
    sandbox = state.sandboxes.get(value.sandbox)
    if isinstance(value, facts.Assigned) and (
        sandbox is None or value.create_id not in sandbox.creates
    ):
        return strays.latecomer(state, value)
    if sandbox is None or sandbox.gone:
        return []
    match value:
        case facts.Assigned():
            if strays.is_about(state, value):
                return []  # a stop of it is owed: it is nobody's any more
            return _assigned(sandbox, value)
        case facts.CreateFailed():
            return _create_failed(sandbox, value)
        case facts.Found():
            return _found(sandbox, hints, value, now_ms)
        case facts.Marked():
            return _marked(sandbox, value)
        case facts.AttachFailed():
            return _attach_failed(sandbox, hints, value, now_ms)
        case facts.Lost():
            return _lost(sandbox, hints, value, now_ms)
        case facts.StopAnswered():
            return _stop_answered(sandbox, hints, value, now_ms)
        case facts.Gone():
            return _gone(sandbox, hints, value.ref, "observed_gone", now_ms)
        case facts.Orphaned():
            return holding.orphaned(state, value)
        case facts.Checkpointed():
            return checkpoints.checkpointed(sandbox, value)
        case facts.CheckpointFailed():
            return checkpoints.failed(sandbox, value)
        case facts.Restored():
            return recovery.restored(sandbox, value)
        case facts.RestoreFailed():
            return recovery.restore_failed(sandbox, value)
        case facts.Preempting():
            return checkpoints.preempting(sandbox, value)


def _assigned(sandbox: Sandbox, value: facts.Assigned) -> list[e.SandboxEntry]:
    if value.create_id not in sandbox.creates:
        return []
    return [
        e.AssignedEntry(
            sandbox=sandbox.id,
            create_id=value.create_id,
            ref=value.ref,
            capabilities=value.capabilities,
        ),
        *(
            holding.told_late(sandbox, value.ref)
            if sandbox.releasing
            else holding.told_all(sandbox, "assigned", ref=value.ref)
        ),
    ]


def _create_failed(sandbox: Sandbox, value: facts.CreateFailed) -> list[e.SandboxEntry]:
    created = sandbox.creates.get(value.create_id)
    if created is None or created.gateway != value.gateway:
        return []
    # One call's failure settles nothing: an order that was repeated may have made, or may yet
    # make, what would then run with no ledger naming it. Only a stop's answer ends the id.
    ambiguous = not value.settled if sandbox.releasing else value.ambiguous
    entries: list[e.SandboxEntry] = [
        e.CreateFailedEntry(
            sandbox=sandbox.id,
            create_id=value.create_id,
            reason=value.reason[:300],
            ambiguous=ambiguous,
        )
    ]
    if sandbox.releasing and not ambiguous:
        others = [name for name in sandbox.creates if name != value.create_id]
        if sandbox.ref is None and not others:
            evidence = holding.settled_evidence(sandbox, "never_created")
            entries.append(e.GoneEntry(sandbox=sandbox.id, instance="", evidence=evidence))
            entries += holding.told_gone(sandbox, evidence)
    elif sandbox.releasing:
        entries += holding.told_ambiguous(sandbox)
    return entries


def _found(sandbox: Sandbox, hints: Hints, value: facts.Found, now_ms: int) -> list[e.SandboxEntry]:
    if sandbox.releasing or sandbox.condemned or sandbox.ref is None:
        return []
    if value.asked is not None and value.asked != sandbox.asked:
        return []  # read before something else was learned of this disk: it may be out of date
    ref, marking = sandbox.ref, sandbox.marking
    named = (value.ref.authority, value.ref.provider, value.ref.native_id)
    if named != (ref.authority, ref.provider, ref.native_id):
        return []
    if value.session in (sandbox.session, marking.session if marking else None):
        return []  # the same finding, reported again
    if (
        marking is not None
        and marking.gateway != value.gateway
        and hints.is_alive(marking.gateway, now_ms)
        and now_ms - marking.since_ms < hints.lease_ms
    ):
        return []  # another living gateway is writing the marker: one at a time
    if untrusted := _untrusted(sandbox, value):
        return recovery.condemn(sandbox, untrusted)
    entries: list[e.SandboxEntry] = []
    epoch, nonce = sandbox.epoch, sandbox.nonce
    moved = _moved(sandbox, value)
    if moved is not None:
        disk, evidence = moved
        if unvouched := recovery.unvouched(sandbox, disk):
            return recovery.condemn(sandbox, unvouched)
        if sandbox.open:
            entries.append(
                e.EpochClosed(
                    sandbox=sandbox.id, epoch=epoch, reason="disk_changed", evidence=evidence
                )
            )
        epoch, nonce = epoch + 1, value.nonce_fresh
        entries += _opened(sandbox, value, disk, evidence)
    elif sandbox.session:
        entries.append(
            e.Detached(
                sandbox=sandbox.id, session=sandbox.session, reason="replaced_by_new_session"
            )
        )
    entries.append(
        e.Marking(
            sandbox=sandbox.id,
            epoch=epoch,
            session=value.session,
            gateway=value.gateway,
            nonce=nonce,
            ref=value.ref,
            journal_seq=value.journal_seq,
        )
    )
    return entries


def _opened(
    sandbox: Sandbox, value: facts.Found, disk: e.Disk, evidence: str
) -> list[e.SandboxEntry]:
    """Opens the next epoch on what was found, and ends what cannot be on it."""
    recovers = recovery.needs(sandbox, disk)
    checkpoint = sandbox.checkpoint if disk != "warm" else None
    opened = e.EpochOpened(
        sandbox=sandbox.id,
        epoch=sandbox.epoch + 1,
        nonce=value.nonce_fresh,
        instance=value.ref.instance,
        disk=disk if checkpoint is None else "restored",
        evidence=evidence,
        owed=sandbox.owed if disk != "warm" or recovers else 0,
        recovering=recovers,
        checkpoint=checkpoint.id if checkpoint is not None else "",
        blank=disk == "cold",
        journal_seq=value.journal_seq if disk == "restored" else 0,
    )
    if disk == "cold":
        return [opened, *outcomes.lost_with_disk(sandbox, final=False, reason="epoch_moved")]
    if disk == "restored" or evidence == "other_instance" or recovers:
        # Bytes that come under another instance may be a snapshot's, taken at this very length. And
        # once a checkpoint is put back, the journal speaks of the tree that stood there before: it
        # does not answer for what the steps since the last restore did outside.
        return [opened, *outcomes.external_at_risk(sandbox)]
    return [opened]


def _untrusted(sandbox: Sandbox, value: facts.Found) -> str:
    """
    Why nothing can be concluded from what this disk shows, or "".

    A marker of an epoch that this ledger never gave: a marker only goes up, so no epoch that could
    be opened for this disk would ever be written to it. No marker where this very instance had
    one: its bytes may still be there while the journal that vouched for them is not, so an effect
    could be called lost, done again, and stand twice.
    """
    marker = value.marker
    if marker is not None and 0 < sandbox.epoch < marker.epoch:
        return f"marker of epoch {marker.epoch}, ahead of the ledger"
    if marker is None and sandbox.nonce_on_disk and value.ref.instance == sandbox.instance:
        return "the marker of this instance is gone"
    return _taken_back(sandbox, value)


def _taken_back(sandbox: Sandbox, value: facts.Found) -> str:
    """
    Why an older point of this disk cannot be gone on from, or "".

    It may hold effects of steps that ended as not applied, and nothing would ever take them back:
    those that were undone since, and, from before the present generation, those that were lost
    with one. A checkpoint takes the place of all that.
    """
    marker = value.marker
    if marker is None or sandbox.checkpoint is not None or sandbox.compensated == 0:
        return ""
    if marker.nonce not in (sandbox.nonce, sandbox.nonce_on_disk):
        return "an older point, from before this generation"
    if value.journal_seq < sandbox.undone:
        return (
            f"an older point, at journal {value.journal_seq}: {sandbox.undone} took an effect back"
        )
    return ""


def _moved(sandbox: Sandbox, value: facts.Found) -> tuple[e.Disk, str] | None:
    """The kind of disk and the evidence, where what was found is another generation."""
    marker = value.marker
    instance_same = value.ref.instance == sandbox.instance
    if sandbox.epoch == 0:
        # Never opened. A marker that is there already is not ours (a recycled disk): cold, too.
        return "cold", "first_generation" if marker is None else "foreign_marker"
    if marker is None:
        if sandbox.open and instance_same:
            return None  # this epoch was opened for this disk and its marker never written
        # A warm or restored epoch was opened on a disk that had a marker: this one is another.
        return "cold", "no_marker"
    if marker.nonce not in (sandbox.nonce, sandbox.nonce_on_disk):
        # Perhaps an older point of this disk, from before its present generation: what it holds of
        # the open steps is for its journal to say.
        return "restored", "other_nonce"
    if value.journal_seq < sandbox.journal_seq:
        # An older snapshot of this very disk, restored (S-205).
        return "restored", f"journal {value.journal_seq} behind ledger {sandbox.journal_seq}"
    if not instance_same:
        return "warm", "other_instance"
    if not sandbox.open:
        return "warm", "epoch_was_closed"
    return None


def _marked(sandbox: Sandbox, value: facts.Marked) -> list[e.SandboxEntry]:
    marking = sandbox.marking
    if (
        marking is None
        or sandbox.releasing
        or value.session != marking.session
        or value.gateway != marking.gateway
        or value.epoch != marking.epoch
        or value.nonce != marking.nonce
        or value.instance != marking.ref.instance
        or not sandbox.open
        or marking.epoch != sandbox.epoch
    ):
        return []
    if value.journal_seq < sandbox.journal_seq:
        # An older snapshot, or an empty disk, came between the finding and the marking. Found
        # again, it shows.
        return [e.Detached(sandbox=sandbox.id, session=marking.session, reason="journal_went_back")]
    return [
        e.Attached(
            sandbox=sandbox.id,
            epoch=marking.epoch,
            session=marking.session,
            gateway=marking.gateway,
            journal_seq=value.journal_seq,
        ),
        *holding.told_all(sandbox, "ready", epoch=marking.epoch),
    ]


def _attach_failed(
    sandbox: Sandbox, hints: Hints, value: facts.AttachFailed, now_ms: int
) -> list[e.SandboxEntry]:
    if value.observed == "gone" and value.ref == sandbox.ref:
        return _gone(sandbox, hints, value.ref, "observed_gone", now_ms)
    if value.condemned and value.ref == sandbox.ref and not sandbox.condemned:
        return recovery.condemn(sandbox, value.reason)
    if sandbox.marking is not None and value.session == sandbox.marking.session:
        return [e.Detached(sandbox=sandbox.id, session=value.session, reason=value.reason[:300])]
    return []


def _lost(sandbox: Sandbox, hints: Hints, value: facts.Lost, now_ms: int) -> list[e.SandboxEntry]:
    if value.observed == "gone" and value.ref == sandbox.ref:
        return _gone(sandbox, hints, value.ref, f"lost: {value.reason}"[:300], now_ms)
    marking = sandbox.marking
    if value.session == sandbox.session or (marking and value.session == marking.session):
        return [e.Detached(sandbox=sandbox.id, session=value.session, reason=value.reason[:300])]
    return []


def _stop_answered(
    sandbox: Sandbox, hints: Hints, value: facts.StopAnswered, now_ms: int
) -> list[e.SandboxEntry]:
    if sandbox.ref != value.ref:
        return []
    capabilities = sandbox.capabilities
    if (
        value.answer in ("accepted", "not_found")
        and capabilities is not None
        and not capabilities.observes_gone
    ):
        # The best that this provider can ever show; the evidence says so.
        return _gone(sandbox, hints, value.ref, "stop_accepted", now_ms)
    if sandbox.stop_answer == f"{value.ref.instance}/{value.answer}/{value.detail[:300]}":
        return []  # a stop is asked for until the end: only another answer is news
    return [
        e.StopAnsweredEntry(
            sandbox=sandbox.id,
            instance=value.ref.instance,
            answer=value.answer,
            detail=value.detail[:300],
        ),
        *holding.told_stop(sandbox, value),
    ]


def _gone(
    sandbox: Sandbox, hints: Hints, ref: facts.Ref, evidence: str, now_ms: int
) -> list[e.SandboxEntry]:
    if ref != sandbox.ref:
        return []  # about another instance: says nothing of this one
    entries: list[e.SandboxEntry] = []
    if sandbox.open:
        entries.append(
            e.EpochClosed(
                sandbox=sandbox.id, epoch=sandbox.epoch, reason="disk_gone", evidence=evidence
            )
        )
    entries.append(e.GoneEntry(sandbox=sandbox.id, instance=ref.instance, evidence=evidence))
    if sandbox.releasing:
        entries += outcomes.lost_with_disk(sandbox, final=True, reason="sandbox_released")
        return entries if sandbox.creates else entries + holding.told_gone(sandbox, evidence)
    entries += outcomes.lost_with_disk(sandbox, final=False, reason="epoch_moved")
    if sandbox.spec.rebuild and not sandbox.creates:
        create_id = f"{sandbox.id}.{sandbox.creates_made + 1}"
        entries.append(
            e.RebuildIntended(sandbox=sandbox.id, create_id=create_id, epoch=sandbox.epoch + 1)
        )
        gateway = hints.choose_for_create(sandbox.id, sandbox.spec.provider, now_ms)
        if gateway:
            entries.append(holding.requested(hints, sandbox.id, create_id, gateway, sandbox.spec))
    return entries


def overdue(hints: Hints, sandbox: Sandbox, now_ms: int) -> list[e.SandboxEntry]:
    """What time alone makes of one sandbox: a dead lease, a create that nobody carries out."""
    if sandbox.open and sandbox.session and hints.lease_expired(sandbox, now_ms):
        return [
            e.EpochClosed(sandbox=sandbox.id, epoch=sandbox.epoch, reason="lease_expired"),
        ]
    for create_id, made in sandbox.creates.items():
        waited = now_ms - made.since_ms
        if made.gateway and (
            # Longer than a lease: a session that was paused that long has fenced itself (S-224).
            hints.is_alive(made.gateway, now_ms, within_ms=hints.lease_ms)
            or waited < hints.lease_ms
        ):
            continue
        if made.failures and waited < min(30_000, 500 << min(made.failures, 6)):
            continue
        gateway = hints.choose_for_create(sandbox.id, sandbox.spec.provider, now_ms, made.place)
        if gateway:
            requested = holding.requested(hints, sandbox.id, create_id, gateway, sandbox.spec)
            first = sandbox.capabilities is None
            return [requested, *(holding.told_all(sandbox, "requested") if first else [])]
    marking = sandbox.marking
    if marking is not None and now_ms - marking.since_ms > hints.lease_ms * _MARKING_LEASES:
        # Its gateway lives and says nothing: without this nobody else would ever be asked.
        return [e.Detached(sandbox=sandbox.id, session=marking.session, reason="marking_timed_out")]
    return (
        holding.late_news(sandbox)
        or _never_to_be_fenced(sandbox)
        or checkpoints.overdue(sandbox, now_ms)
    )


def _never_to_be_fenced(sandbox: Sandbox) -> list[e.SandboxEntry]:
    """Ends one step that waits for a fence which will never be handed out."""
    waiting = sandbox.parked or sandbox.requeued
    if not waiting:
        return []
    capabilities = sandbox.capabilities
    if sandbox.releasing:
        reason = "sandbox_released"
    elif capabilities is not None and not capabilities.generation:
        reason = "no_generation"  # it was parked before the provider was known
    else:
        return []
    name = next(iter(waiting))
    return outcomes.stop_step(sandbox, name, sandbox.steps[name], reason)
