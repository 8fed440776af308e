"""
What the state owes to the outside, and what each accepted entry makes public.

Everything here is derived: it can be made again after a takeover and by timer, and whoever gets
it twice can tell by attempt, create id or ledger position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fencepost.core import ids
from fencepost.core.machine import Effect, Event
from fencepost.core.sandbox import checkpoints, orders
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.admission import undo_call
from fencepost.core.sandbox.hints import Hints
from fencepost.core.sandbox.state import Replay, Sandbox, SandboxShard, Step, StrayState

_LIFE = (
    e.Requested,
    e.AssignedEntry,
    e.Marking,
    e.Detached,
    e.EpochClosed,
    e.Condemned,
    e.Releasing,
)

# After these a sandbox is looked at: its session, its hold or its recovery is another.
_SETTLING = frozenset(
    {
        e.Attached,
        e.Joined,
        e.Compensated,
        e.Indeterminate,
        e.CheckpointAsked,
        e.CheckpointingEntry,
        e.CheckpointedEntry,
        e.CheckpointFailedEntry,
        e.RestoredEntry,
        e.RestoreFailedEntry,
        e.Replaying,
        e.RecoveryDecided,
        e.Recovered,
        e.EpochOpened,
    }
)


def effects_of(state: SandboxShard, hints: Hints, entry: e.SandboxEntry) -> Iterator[Effect]:
    """What an entry owes at once. Also keeps the hints that follow from it in order."""
    kind = type(entry)
    if kind is e.Fenced:
        sandbox = state.sandboxes[entry.sandbox]  # type: ignore[union-attr]
        step = sandbox.steps.get(entry.step)  # type: ignore[union-attr]
        if entry.spec is not None:  # type: ignore[union-attr]
            hints.push_due(state, entry.spec.deadline_at_ms, sandbox.id, entry.step)  # type: ignore[union-attr]
        if step is not None and step.no == entry.no:  # type: ignore[union-attr]
            dispatch = dispatch_of(sandbox, entry.step, step)  # type: ignore[union-attr]
            if dispatch is not None:
                yield dispatch
    elif kind is e.Parked:
        if entry.spec is not None:  # type: ignore[union-attr]
            hints.push_due(state, entry.spec.deadline_at_ms, entry.sandbox, entry.step)  # type: ignore[union-attr]
    elif kind is e.Committed:
        sandbox = state.sandboxes[entry.sandbox]  # type: ignore[union-attr]
        if sandbox.checkpointing is not None:
            yield from _checkpoint_of(sandbox)
        elif checkpoints.is_due_by_steps(sandbox):
            hints.unsettled[sandbox.id] = None
    elif kind in _SETTLING:
        hints.unsettled[entry.sandbox] = None  # type: ignore[union-attr]
        yield from _recovery_of(state.sandboxes[entry.sandbox], hints.latest_ms)  # type: ignore[union-attr]
        if kind is e.CheckpointedEntry:
            yield from _prune(state.sandboxes[entry.sandbox], hints)  # type: ignore[union-attr]
    elif kind is e.GoneEntry:
        sandbox = state.sandboxes[entry.sandbox]  # type: ignore[union-attr]
        if sandbox.gone and sandbox.checkpoints:  # also those that were begun alone
            yield from _prune(sandbox, hints)
    elif kind is e.StrayFound:
        for stray in state.strays.get(entry.sandbox, ()):  # type: ignore[union-attr]
            yield from _stop_stray(entry.sandbox, stray, hints, hints.latest_ms)  # type: ignore[union-attr]
    elif kind in (e.Created, e.RebuildIntended):
        hints.check_at_ms = 0  # where no gateway was named yet, one is looked for at once
    elif kind in _LIFE:
        sandbox = state.sandboxes[entry.sandbox]  # type: ignore[union-attr]
        if kind is e.Releasing:
            hints.check_at_ms = 0
        yield from _life_of(sandbox, hints, hints.latest_ms)


def effects(state: SandboxShard, hints: Hints, now_ms: int) -> Iterator[Effect]:
    hints.latest_ms = max(hints.latest_ms, now_ms)
    for sandbox_id in list(state.busy):
        sandbox = state.sandboxes[sandbox_id]
        yield from _life_of(sandbox, hints, now_ms)
        yield from _recovery_of(sandbox, now_ms)
        for name in sandbox.fenced:
            dispatch = dispatch_of(sandbox, name, sandbox.steps[name])
            if dispatch is not None:
                yield dispatch
    for sandbox_id, strays in state.strays.items():
        for stray in strays:
            yield from _stop_stray(sandbox_id, stray, hints, now_ms)


def _stop_stray(sandbox_id: str, stray: StrayState, hints: Hints, now_ms: int) -> Iterator[Effect]:
    ref = stray.ref
    gateway = hints.choose_for_authority(sandbox_id, ref.authority, "", now_ms)
    if gateway:
        yield Effect(
            key=f"stray/{sandbox_id}/{ref.native_id}/{ref.instance}/{gateway}",
            since_ms=stray.since_ms,
            target=gateway,
            order=orders.StopOrder(sandbox=sandbox_id, create_id="", ref=ref),
        )


def dispatch_of(sandbox: Sandbox, name: str, step: Step) -> Effect | None:
    """The call of a step's current fence, or None where that fence is not the live one."""
    if (
        not sandbox.open
        or step.session != sandbox.session
        or step.epoch != sandbox.epoch
        or step.phase not in ("apply", "revoke", "undo")
    ):
        return None
    spec = step.spec
    tool, args, digest, attempt = spec.tool, spec.args, spec.digest, step.attempt
    if step.phase == "undo":
        tool, args, digest = undo_call(spec)
        attempt = ids.undo_id(attempt, step.no)
    return Effect(
        key=f"{step.attempt}/{sandbox.id}/{step.no}",
        since_ms=step.since_ms,
        target=sandbox.gateway,
        order=orders.Dispatch(
            fence=orders.Fence(
                sandbox=sandbox.id,
                epoch=step.epoch,
                session=step.session,
                attempt=attempt,
                no=step.no,
                direction=step.phase,
            ),
            step=name,
            tool=tool,
            digest=digest,
            args=args,
            effect=spec.effect,
            of=step.of,
        ),
    )


def _life_of(sandbox: Sandbox, hints: Hints, now_ms: int) -> Iterator[Effect]:
    if sandbox.gone:
        return
    for create_id, made in sandbox.creates.items():
        if not made.gateway:
            continue
        order: Any
        if sandbox.releasing:
            order = orders.StopOrder(sandbox=sandbox.id, create_id=create_id, ref=None)
        else:
            order = orders.CreateOrder(
                sandbox=sandbox.id,
                create_id=create_id,
                spec=sandbox.spec,
                labels=_labels(sandbox, create_id),
            )
        yield Effect(
            key=f"create/{create_id}/{made.gateway}/{int(sandbox.releasing)}",
            since_ms=made.since_ms,
            target=made.gateway,
            order=order,
        )
    if sandbox.ref is None:
        return
    if sandbox.releasing or sandbox.condemned:
        yield from _to_authority(
            sandbox,
            hints,
            now_ms,
            "stop",
            orders.StopOrder(sandbox=sandbox.id, create_id="", ref=sandbox.ref),
        )
        return
    marking = sandbox.marking
    if marking is not None and hints.is_alive(marking.gateway, now_ms):
        yield Effect(
            key=f"mark/{sandbox.id}/{marking.session}",
            since_ms=marking.since_ms,
            target=marking.gateway,
            order=orders.MarkOrder(
                sandbox=sandbox.id,
                session=marking.session,
                epoch=marking.epoch,
                nonce=marking.nonce,
            ),
        )
    elif not sandbox.session:
        order = orders.AttachOrder(
            sandbox=sandbox.id, ref=sandbox.ref, spec=sandbox.spec, asked=sandbox.asked
        )
        yield from _to_authority(sandbox, hints, now_ms, "attach", order)


def _recovery_of(sandbox: Sandbox, now_ms: int) -> Iterator[Effect]:
    """What the disk of the live generation is to be made, or kept as."""
    recovering = sandbox.recovering
    if not sandbox.live:
        return
    if recovering is None:
        yield from _checkpoint_of(sandbox)
        return
    checkpoint, replay = sandbox.checkpoint, recovering.replay
    if recovering.phase == "restore" and now_ms >= recovering.retry_at_ms:
        assert checkpoint is not None
        yield Effect(
            key=f"restore/{sandbox.id}/{sandbox.session}/{checkpoint.id}/{recovering.failures}",
            since_ms=recovering.since_ms,
            target=sandbox.gateway,
            order=orders.RestoreOrder(
                sandbox=sandbox.id,
                epoch=sandbox.epoch,
                session=sandbox.session,
                checkpoint=checkpoint.id,
                manifest=checkpoint.manifest,
                namespace=checkpoint.namespace,
            ),
        )
    elif (
        recovering.phase == "replay"
        and replay is not None
        and (replay.epoch, replay.session) == (sandbox.epoch, sandbox.session)
    ):
        yield _replay_of(sandbox, replay)


def _replay_of(sandbox: Sandbox, replay: Replay) -> Effect:
    return Effect(
        key=f"replay/{sandbox.id}/{replay.no}",
        since_ms=replay.since_ms,
        target=sandbox.gateway,
        order=orders.Dispatch(
            fence=orders.Fence(
                sandbox=sandbox.id,
                epoch=replay.epoch,
                session=replay.session,
                attempt=replay.name,
                no=replay.no,
                direction="replay",
            ),
            step=replay.step,
            tool=replay.tool,
            digest=replay.digest,
            args=replay.args,
            of=replay.attempt,
        ),
    )


def _checkpoint_of(sandbox: Sandbox) -> Iterator[Effect]:
    taking = sandbox.checkpointing
    if taking is None or not sandbox.whole or not checkpoints.is_quiet(sandbox):
        return
    newest = sandbox.checkpoint
    # What is not whole in the store is no base: what it lacks would be lacking in the next one.
    own = newest is not None and newest.namespace == sandbox.id and not newest.is_broken
    yield Effect(
        key=f"checkpoint/{sandbox.id}/{sandbox.session}/{taking.id}",
        since_ms=taking.since_ms,
        target=sandbox.gateway,
        order=orders.CheckpointOrder(
            sandbox=sandbox.id,
            epoch=sandbox.epoch,
            session=sandbox.session,
            checkpoint=taking.id,
            base=newest.manifest if newest is not None and own else "",
            reason=taking.reason,
        ),
    )


def _prune(sandbox: Sandbox, hints: Hints) -> Iterator[Effect]:
    """
    Made once, and not again: what one prune leaves in the store, the next one takes.

    Nobody reads what is dropped: a checkpoint counts only while the ledger may name it.
    """
    gateway = sandbox.gateway
    if sandbox.gone and not hints.is_alive(gateway, hints.latest_ms):
        gateway = hints.choose_for_create(sandbox.id, sandbox.spec.provider, hints.latest_ms)
    if gateway:
        keep = [] if sandbox.gone else list(sandbox.manifests)
        yield Effect(
            key=f"prune/{sandbox.id}/{sandbox.checkpoints}/{len(keep)}",
            since_ms=hints.latest_ms,
            target=gateway,
            order=orders.PruneOrder(sandbox=sandbox.id, keep=keep),
        )


def _to_authority(
    sandbox: Sandbox, hints: Hints, now_ms: int, what: str, order: Any
) -> Iterator[Effect]:
    assert sandbox.ref is not None
    gateway = hints.choose_for_authority(sandbox.id, sandbox.ref.authority, sandbox.gateway, now_ms)
    if gateway:
        yield Effect(
            key=f"{what}/{sandbox.id}/{sandbox.ref.instance}/{gateway}/{sandbox.waiting_since_ms}",
            since_ms=sandbox.waiting_since_ms,
            target=gateway,
            order=order,
        )


def _labels(sandbox: Sandbox, create_id: str) -> dict[str, str]:
    dag, acquisition = next(iter(sandbox.holders.items()), ("", sandbox.id))
    return {
        "sandbox": sandbox.id,
        "create_id": create_id,
        "dag": dag,
        "acquisition": acquisition,
    }


def events_of(entry: e.SandboxEntry) -> list[Event]:
    """The public events of one entry; the runtime adds its ledger position and time."""
    kind = type(entry)
    if kind is e.Committed:
        return [_committed(entry)]  # type: ignore[arg-type]
    if kind is e.Fenced:
        return [_fenced(entry)]  # type: ignore[arg-type]
    make = _STEP_EVENTS.get(kind)
    if kind is e.Refused:
        return _refused(entry)  # type: ignore[arg-type]
    if make is not None:
        state, fields = make
        step = entry.step  # type: ignore[union-attr]
        body = {"sandbox": entry.sandbox, "step": step, "state": state}  # type: ignore[union-attr]
        body.update({name: getattr(entry, name) for name in fields})
        return [Event(f"fp.v1.event.step.{entry.sandbox}.{step}.{state}", body)]  # type: ignore[union-attr]
    told = _SANDBOX_EVENTS.get(kind)
    if told is not None:
        return [_sandbox_event(entry, told[0], told[1])]
    return []


def _refused(entry: e.Refused) -> list[Event]:
    if not ids.is_id(entry.sandbox):
        return []  # no subject can be made of it, so nobody can be listening there
    fields = ("reason", "field", "detail", "digest")
    if entry.command == "step" and ids.is_id(entry.id):
        body = {"sandbox": entry.sandbox, "step": entry.id, "state": "refused"}
        body.update({name: getattr(entry, name) for name in fields})
        return [Event(f"fp.v1.event.step.{entry.sandbox}.{entry.id}.refused", body)]
    return [_sandbox_event(entry, "refused", ("command", "id", *fields[:3]))]


def _committed(entry: e.Committed) -> Event:
    receipt = entry.receipt
    return Event(
        f"fp.v1.event.step.{entry.sandbox}.{entry.step}.committed",
        {
            "sandbox": entry.sandbox,
            "step": entry.step,
            "state": "committed",
            "attempt": entry.attempt,
            "epoch": receipt.epoch,
            "outcome": receipt.outcome,
            "result": receipt.result,
            "of": receipt.of,
        },
    )


def _fenced(entry: e.Fenced) -> Event:
    return Event(
        f"fp.v1.event.step.{entry.sandbox}.{entry.step}.fenced",
        {
            "sandbox": entry.sandbox,
            "step": entry.step,
            "state": "fenced",
            "attempt": entry.attempt,
            "epoch": entry.epoch,
            "direction": entry.direction,
            "reason": entry.reason,
            "error": entry.error,
        },
    )


def _sandbox_event(entry: Any, kind: str, fields: tuple[str, ...]) -> Event:
    body = {"sandbox": entry.sandbox, "kind": kind}
    body.update({name: getattr(entry, name) for name in fields})
    return Event(f"fp.v1.event.sandbox.{entry.sandbox}.{kind}", body)


_STEP_EVENTS: dict[type, tuple[str, tuple[str, ...]]] = {
    e.Parked: ("pending", ("attempt", "reason")),
    e.Compensated: ("compensated", ("attempt", "reason", "evidence", "final", "detail", "epoch")),
    e.Indeterminate: ("indeterminate", ("attempt", "reason", "detail")),
    e.Resolved: ("resolved", ("attempt", "state", "who", "note")),
    e.ReceiptRefused: ("receipt_refused", ("attempt", "reason", "detail", "epoch", "gateway")),
}

_SANDBOX_EVENTS: dict[type, tuple[str, tuple[str, ...]]] = {
    e.Created: ("created", ("create_id",)),
    e.EpochOpened: (
        "epoch_opened",
        ("epoch", "disk", "evidence", "owed", "instance", "recovering", "checkpoint"),
    ),
    e.Attached: ("attached", ("epoch", "session", "gateway")),
    e.Detached: ("detached", ("session", "reason")),
    e.EpochClosed: ("epoch_closed", ("epoch", "reason", "evidence")),
    e.Condemned: ("condemned", ("reason",)),
    e.RebuildIntended: ("rebuild_intended", ("create_id", "epoch")),
    e.CreateFailedEntry: ("create_failed", ("create_id", "reason", "ambiguous")),
    e.Releasing: ("releasing", ("reason",)),
    e.StopAnsweredEntry: ("stop_answered", ("answer", "detail")),
    e.GoneEntry: ("gone", ("instance", "evidence")),
    e.StrayFound: ("stray_found", ("ref", "create_id", "dag", "acquisition")),
    e.StrayGone: ("stray_gone", ("ref", "evidence")),
    e.CheckpointAsked: ("checkpoint_asked", ("checkpoint", "reason")),
    e.CheckpointedEntry: (
        "checkpointed",
        (
            "checkpoint",
            "manifest",
            "epoch",
            "journal_seq",
            "reason",
            "files",
            "size_bytes",
            "sent_bytes",
        ),
    ),
    e.CheckpointFailedEntry: ("checkpoint_failed", ("checkpoint", "reason", "detail")),
    e.RestoredEntry: ("restored", ("checkpoint", "manifest", "epoch", "files", "size_bytes")),
    e.RestoreFailedEntry: ("restore_failed", ("checkpoint", "reason", "detail")),
    e.Replayed: ("replayed", ("step", "attempt", "epoch", "verdict", "no", "of", "accepted")),
    e.OwedTold: ("owed", ("epoch", "steps", "told", "of")),
    e.RecoveryStopped: (
        "recovery_stopped",
        ("epoch", "reason", "step", "attempt", "detail", "expected", "found", "changes"),
    ),
    e.RecoveryDecided: ("recovery_decided", ("epoch", "decision", "who", "note")),
    e.Recovered: (
        "recovered",
        ("epoch", "mode", "replayed", "told", "checkpoint", "lost", "without"),
    ),
    e.Preempted: ("preempting", ("instance", "grace_ms")),
}
