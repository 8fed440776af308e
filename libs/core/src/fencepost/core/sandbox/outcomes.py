"""
Outcomes: what receipts, deadlines, cancels and moved generations do to open steps.

Rule 1: `committed` only by the join (join.py), on the state that this batch extends.
Rule 2: on a live epoch an attempt is ended as never applied only after its revocation is in the
        journal: a dispatch that is merely late would otherwise still apply (S-203).
Rule 3: an effect that cannot be known is indeterminate: visible, and never run again by itself.
        So is one that the disk's journal may have forgotten: it can neither attest nor deny it.
Rule 4: a cancel is monotonic: after it no new attempt to apply is made (S-191).
"""

from __future__ import annotations

from fencepost.core import ids, limits
from fencepost.core.receipts import Receipt
from fencepost.core.sandbox import checkpoints, join, recovery
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.admission import refuse, undo_call, unknown_sandbox
from fencepost.core.sandbox.inputs import CommandReceived, ReceiptReceived
from fencepost.core.sandbox.state import Sandbox, SandboxShard, Step
from fencepost.core.steps import CancelCommand, ResolveCommand

# A tool that did not run because of these may run when the same fence is sent again.
_PASSING = frozenset(
    {"grant_expired", "blob_missing", "stale_epoch", "stale_session", "no_generation"}
)


def receipt(state: SandboxShard, value: ReceiptReceived) -> list[e.SandboxEntry]:
    """Decides a receipt; anything that does not join is recorded with its reason (bounded)."""
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return []  # nothing of ours to protect, and a stranger must not fill the ledger
    got = value.receipt
    if got is None or not value.mac_ok:
        return _refuse_unread(sandbox, value)
    if got.sandbox != sandbox.id:
        step = sandbox.steps.get(got.step)
        return [] if step is None else _refuse(sandbox, step, value, got, "wrong_sandbox")
    if got.direction == "replay" and recovery.is_about(sandbox, got):
        return recovery.receipt(sandbox, value, got)
    step = sandbox.steps.get(got.step)
    if step is None:
        return _receipt_of_no_open_step(sandbox, value, got)
    if step.phase == "joined" and (got.attempt, got.no) == (step.attempt, step.no):
        return []  # the very receipt that joined, delivered again
    if step.phase in ("parked", "joined", "indeterminate"):
        reason = "late_attempt" if got.attempt != step.attempt else "not_fenced"
        return _refuse(sandbox, step, value, got, reason)
    return _open(sandbox, step, value, got)


def _refuse_unread(sandbox: Sandbox, value: ReceiptReceived) -> list[e.SandboxEntry]:
    got = value.receipt
    step_name = got.step if got is not None else value.step
    step = sandbox.steps.get(step_name)
    if step is None or step.refusals >= limits.REFUSALS_RECORDED_PER_ATTEMPT_MAX:
        return []
    return [
        e.ReceiptRefused(
            sandbox=sandbox.id,
            step=step_name,
            attempt=(got.attempt if got is not None else value.attempt)[:80],
            reason="malformed" if got is None else "bad_mac",
            detail=value.problem[:300],
            gateway=value.gateway,
        )
    ]


def _refuse(
    sandbox: Sandbox, step: Step | None, value: ReceiptReceived, got: Receipt, reason: str
) -> list[e.SandboxEntry]:
    if step is not None and step.refusals >= limits.REFUSALS_RECORDED_PER_ATTEMPT_MAX:
        return []
    return [
        e.ReceiptRefused(
            sandbox=sandbox.id,
            step=got.step,
            attempt=got.attempt[:80],
            reason=reason[:80],
            detail=(got.detail or got.reason)[:300],
            direction=got.direction,
            verdict=got.verdict,
            epoch=got.epoch if type(got.epoch) is int and 0 <= got.epoch < 1 << 53 else -1,
            session=got.session[:80],
            gateway=value.gateway,
        )
    ]


def _receipt_of_no_open_step(
    sandbox: Sandbox, value: ReceiptReceived, got: Receipt
) -> list[e.SandboxEntry]:
    finished = sandbox.finished.get(got.step)
    if finished is None or finished.refusals >= limits.REFUSALS_RECORDED_PER_ATTEMPT_MAX:
        return []
    ended_by_apply = finished.state == "committed"
    attempt = got.attempt.partition(":")[0]  # an undo's has a suffix
    if finished.attempt == attempt and ended_by_apply == (got.direction == "apply"):
        return []  # the very receipt that ended it, delivered again
    return _refuse(sandbox, None, value, got, "step_final")


def _open(
    sandbox: Sandbox, step: Step, value: ReceiptReceived, got: Receipt
) -> list[e.SandboxEntry]:
    tool, digest, attempt = step.spec.tool, step.spec.digest, step.attempt
    if step.phase == "undo":
        tool, _, digest = undo_call(step.spec)
        attempt = ids.undo_id(attempt, step.no)
    elif step.phase == "revoke":
        tool = got.tool  # a revocation runs no tool; what it names is the revoked call's
    why = join.why_not(
        sandbox,
        step,
        got,
        gateway=value.gateway,
        direction=step.phase,  # type: ignore[arg-type]
        attempt=attempt,
        tool=tool,
        digest=digest if step.phase != "revoke" else got.digest,
    )
    if why:
        return _refuse(sandbox, step, value, got, why)
    if got.verdict == "running":
        return []
    if step.phase == "apply":
        return _applied(sandbox, step, value, got)
    if step.phase == "revoke":
        return _revoked(sandbox, step, value, got)
    return _undone(sandbox, step, value, got)


def _applied(
    sandbox: Sandbox, step: Step, value: ReceiptReceived, got: Receipt
) -> list[e.SandboxEntry]:
    match got.verdict:
        case "applied" | "attested" if step.spec.commit_after != "receipt":
            return [
                e.Joined(
                    sandbox=sandbox.id,
                    step=got.step,
                    attempt=step.attempt,
                    receipt=got,
                    gateway=value.gateway,
                )
            ]
        case "applied" | "attested":
            return [
                checkpoints.committed(sandbox, got.step, step, got),
                *wake(sandbox, ended=got.step),
            ]
        case "indeterminate":
            return _give_up(sandbox, got.step, step, got.reason or "no_record", got.detail)
        case "refused" if got.reason == "too_old":
            # Forgotten by the journal: it may have been applied.
            return _give_up(sandbox, got.step, step, "too_old", got.detail)
        case "refused" if got.reason not in _PASSING:
            # The disk refused it for good (bad arguments, revoked): nothing was touched.
            # It is revoked all the same before it is called never applied (rule 2).
            reason = got.reason[:80]
            entry = _fence(sandbox, got.step, step, "revoke", reason=reason, no=sandbox.next_no)
            return [*_refuse(sandbox, step, value, got, got.reason), entry]
        case _:
            return _refuse(sandbox, step, value, got, got.reason or got.verdict)


def _revoked(
    sandbox: Sandbox, step: Step, value: ReceiptReceived, got: Receipt
) -> list[e.SandboxEntry]:
    match got.verdict:
        case "revoked":
            undone = got.reason in ("rolled_back", "undone")
            entries: list[e.SandboxEntry] = [
                e.Revoked(
                    sandbox=sandbox.id,
                    step=got.step,
                    attempt=step.attempt,
                    epoch=got.epoch,
                    journal=got.reason[:80] or "never_began",
                )
            ]
            evidence: e.Evidence = "undone" if undone else "never_applied"
            return entries + _end(sandbox, got.step, step, step.reason, evidence, detail=got.detail)
        case "already_done":
            # What is done may be an earlier attempt, carried into this one.
            of = got.of if got.of.startswith(f"{got.step}.") else step.attempt
            return [
                _fence(
                    sandbox,
                    got.step,
                    step,
                    "undo",
                    reason=step.reason,
                    no=sandbox.next_no,
                    of=of[:80],
                )
            ]
        case "indeterminate":
            return _give_up(sandbox, got.step, step, got.reason or "no_record", got.detail)
        case "refused" if got.reason not in _PASSING:
            # Neither revoked nor shown to be done: not to be known, and asking again is no help.
            return _give_up(sandbox, got.step, step, got.reason or "not_revoked", got.detail)
        case _:
            return _refuse(sandbox, step, value, got, got.reason or got.verdict)


def _undone(
    sandbox: Sandbox, step: Step, value: ReceiptReceived, got: Receipt
) -> list[e.SandboxEntry]:
    match got.verdict:
        case "applied" | "attested" if got.outcome == "ok":
            return _end(
                sandbox,
                got.step,
                step,
                step.reason,
                "undone",
                detail=got.detail,
                journal_seq=got.journal_seq,
            )
        case "applied" | "attested":
            return _undo_failed(sandbox, got.step, step, got.detail or "the undo command failed")
        case "refused" if got.reason == "nothing_to_undo":
            return _end(sandbox, got.step, step, step.reason, "never_applied", detail=got.detail)
        case "refused" if got.reason == "overwritten":
            return _give_up(sandbox, got.step, step, "overwritten", got.detail)
        case "indeterminate":
            return _give_up(sandbox, got.step, step, got.reason or "no_record", got.detail)
        case "refused" if got.reason not in _PASSING:
            return _undo_failed(sandbox, got.step, step, f"{got.reason}: {got.detail}")
        case _:
            return _refuse(sandbox, step, value, got, got.reason or got.verdict)


def _undo_failed(sandbox: Sandbox, name: str, step: Step, error: str) -> list[e.SandboxEntry]:
    # A failed compensation leaves the step open and visible, never "compensated" (S-21).
    if step.undo_tries >= limits.UNDO_TRIES_MAX:
        return _give_up(sandbox, name, step, "undo_failed", error)
    return [
        _fence(
            sandbox,
            name,
            step,
            "undo",
            reason=step.reason,
            no=sandbox.next_no,
            of=step.of,
            error=error[:300],
        )
    ]


def _give_up(
    sandbox: Sandbox, name: str, step: Step, reason: str, detail: str
) -> list[e.SandboxEntry]:
    return [_indeterminate(sandbox, name, step, reason, detail), *wake(sandbox, ended=name)]


def _indeterminate(
    sandbox: Sandbox, name: str, step: Step, reason: str, detail: str
) -> e.Indeterminate:
    return e.Indeterminate(
        sandbox=sandbox.id,
        step=name,
        attempt=step.attempt,
        reason=reason[:80],
        detail=detail[:300],
    )


def _is_forgotten(step: Step, no: int) -> bool:
    """Whether the journal may drop what it has of the step before the fence `no` is taken."""
    return no - step.since_no > limits.FENCES_BEHIND_MAX


def _fence(
    sandbox: Sandbox,
    name: str,
    step: Step,
    direction: str,
    *,
    reason: str,
    no: int,
    of: str = "",
    error: str = "",
    counted: bool = True,
) -> e.Fenced:
    """
    A fence for revoking or undoing the step's latest attempt, under the current session.

    `of` is the attempt whose effect is taken back, where that is not the latest one.
    """
    return e.Fenced(
        sandbox=sandbox.id,
        step=name,
        attempt=step.attempt,
        ordinal=step.ordinal,
        no=no,
        epoch=sandbox.epoch,
        session=sandbox.session,
        direction=direction,  # type: ignore[arg-type]
        of=of or step.attempt,
        reason=reason,
        error=error,
        counted=counted,
    )


def _end(
    sandbox: Sandbox,
    name: str,
    step: Step,
    reason: str,
    evidence: e.Evidence,
    *,
    detail: str = "",
    journal_seq: int = 0,
) -> list[e.SandboxEntry]:
    """Ends the step: its latest attempt has been taken back, or is known never to apply."""
    return [
        e.Compensated(
            sandbox=sandbox.id,
            step=name,
            attempt=step.attempt,
            reason=reason or "cancelled",
            evidence=evidence,
            final=True,
            detail=detail[:300],
            epoch=step.epoch,
            journal_seq=journal_seq,
        ),
        *wake(sandbox, ended=name),
    ]


def _requeue(sandbox: Sandbox, name: str, step: Step, reason: str) -> e.Parked:
    return e.Parked(
        sandbox=sandbox.id,
        step=name,
        attempt=ids.attempt_id(name, step.ordinal + 1),
        ordinal=step.ordinal + 1,
        reason=reason,
    )


def wake(sandbox: Sandbox, *, ended: str = "", no: int | None = None) -> list[e.SandboxEntry]:
    """Hands fences to waiting steps, retries first, as far as there is room; one has `ended`."""
    if not (sandbox.requeued or sandbox.parked) or not sandbox.fences:
        return []
    next_no = sandbox.next_no if no is None else no
    room = min(
        limits.OPEN_STEPS_PER_SANDBOX_MAX - len(sandbox.fenced) + (ended != ""),
        limits.FENCES_AHEAD_MAX - sandbox.fences_ahead(ended) - (next_no - sandbox.next_no),
    )
    woken: list[e.SandboxEntry] = []
    for queue in (sandbox.requeued, sandbox.parked):
        for name in queue:
            if len(woken) >= room:
                return woken
            step = sandbox.steps[name]
            woken.append(
                e.Fenced(
                    sandbox=sandbox.id,
                    step=name,
                    attempt=step.attempt,
                    ordinal=step.ordinal,
                    no=next_no + len(woken),
                    epoch=sandbox.epoch,
                    session=sandbox.session,
                )
            )
    return woken


def lost_with_disk(sandbox: Sandbox, *, final: bool, reason: str) -> list[e.SandboxEntry]:
    """
    Ends what was fenced on a disk that is gone.

    A workspace effect went with it. An external one may have happened: indeterminate. What goes
    on is parked as the next attempt; nothing is fenced before a session is attached.
    """
    entries: list[e.SandboxEntry] = []
    for name in sandbox.fenced:
        step = sandbox.steps[name]
        if step.spec.effect == "external":
            entries.append(
                _indeterminate(sandbox, name, step, "lost_with_epoch", "an external effect")
            )
            continue
        again = (
            not final
            and not step.ended
            and step.spec.on_moved_epoch == "retry"
            and step.tries < step.spec.attempts_max
        )
        entries.append(
            e.Compensated(
                sandbox=sandbox.id,
                step=name,
                attempt=step.attempt,
                reason=step.reason if step.ended and step.reason else reason,
                evidence="lost_with_epoch",
                final=not again,
                epoch=step.epoch,
            )
        )
        if again:
            entries.append(_requeue(sandbox, name, step, "epoch_moved"))
    return entries


def external_at_risk(sandbox: Sandbox) -> list[e.SandboxEntry]:
    """
    Gives up external effects fenced before what may be an older snapshot came back.

    Its journal may have forgotten that one began, so it cannot vouch for it. Nor can the journal of
    a disk on which a checkpoint is to be put back once more.
    """
    return [
        _indeterminate(sandbox, name, step, "restored", "an external effect")
        for name in sandbox.fenced
        if (step := sandbox.steps[name]).spec.effect == "external"
    ]


def settle_on_same_disk(sandbox: Sandbox, now_ms: int) -> list[e.SandboxEntry]:
    """
    Settles, after `attached`, what was fenced under a former session of the same disk.

    The disk's journal decides: an attempt to apply is carried into a new one under the new fence,
    which the toolhost attests, applies for the first time, or calls indeterminate. Where the step
    must not go on (policy, cancel, deadline) it is revoked under the new fence instead. A carried
    attempt does not count as a try. Its own turn after `attached`, on the state that that changed.
    """
    entries: list[e.SandboxEntry] = []
    no = sandbox.next_no
    for name in sandbox.fenced:
        step = sandbox.steps[name]
        if step.session == sandbox.session and step.epoch == sandbox.epoch:
            continue
        moved = "epoch_moved" if step.epoch != sandbox.epoch else "session_moved"
        if _is_forgotten(step, no):
            entries.append(_indeterminate(sandbox, name, step, "too_old", moved))
            continue
        if step.phase == "undo" and moved == "epoch_moved":
            # What is to be undone was a word about other bytes. An older point of the disk may hold
            # an earlier attempt, of which only the step's own record tells: it is asked anew.
            entries.append(_fence(sandbox, name, step, "revoke", reason=step.reason, no=no))
        elif step.phase in ("revoke", "undo"):
            entries.append(
                _fence(
                    sandbox,
                    name,
                    step,
                    step.phase,
                    reason=step.reason,
                    no=no,
                    of=step.of,
                    counted=False,
                )
            )
        elif (
            step.ended
            or now_ms >= step.spec.deadline_at_ms
            or (moved == "epoch_moved" and step.spec.on_moved_epoch == "reject")
        ):
            due = "deadline" if now_ms >= step.spec.deadline_at_ms else moved
            reason = step.reason if step.ended and step.reason else due
            entries.append(_fence(sandbox, name, step, "revoke", reason=reason, no=no))
        else:
            entries += _carry(sandbox, name, step, moved, no)
        no += 1
    return entries + wake(sandbox, no=no)


def _carry(sandbox: Sandbox, name: str, step: Step, reason: str, no: int) -> list[e.SandboxEntry]:
    return [
        e.Compensated(
            sandbox=sandbox.id,
            step=name,
            attempt=step.attempt,
            reason=reason,
            evidence="carried",
            final=False,
            epoch=step.epoch,
        ),
        e.Fenced(
            sandbox=sandbox.id,
            step=name,
            attempt=ids.attempt_id(name, step.ordinal + 1),
            ordinal=step.ordinal + 1,
            no=no,
            epoch=sandbox.epoch,
            session=sandbox.session,
            of=step.attempt,
            reason=reason,
            counted=False,
        ),
    ]


def cancel(
    state: SandboxShard, value: CommandReceived, command: CancelCommand
) -> list[e.SandboxEntry]:
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return unknown_sandbox(state, value, "cancel")
    step = sandbox.steps.get(value.id)
    if step is None:
        reason = "step_final" if value.id in sandbox.finished else "unknown_step"
        return refuse(value, "cancel", reason, field="step", detail="there is nothing to cancel")
    if step.phase == "indeterminate":
        return refuse(value, "cancel", "indeterminate", field="step", detail="resolve it instead")
    if step.ended:
        return []
    return stop_step(sandbox, value.id, step, command.reason[:300] or "cancelled")


def stop_step(sandbox: Sandbox, name: str, step: Step, reason: str) -> list[e.SandboxEntry]:
    """Ends a step for good: at once where it waits, through the journal where it may have begun."""
    cancelled = e.Cancelled(sandbox=sandbox.id, step=name, attempt=step.attempt, reason=reason)
    if step.phase == "parked":
        return [
            cancelled,
            e.Compensated(
                sandbox=sandbox.id,
                step=name,
                attempt=step.attempt,
                reason=reason,
                evidence="never_applied",
                final=True,
                epoch=step.epoch,
            ),
        ]
    if sandbox.live and (step.epoch, step.session) == (sandbox.epoch, sandbox.session):
        if _is_forgotten(step, sandbox.next_no):
            abandoned = checkpoints.abandon(sandbox) if step.phase == "joined" else []
            return [*abandoned, cancelled, *_give_up(sandbox, name, step, "too_old", reason)]
        fence = _fence(sandbox, name, step, "revoke", reason=reason, no=sandbox.next_no)
        if step.phase == "joined":
            # It would be in the checkpoint, and is to be taken back.
            return [*checkpoints.abandon(sandbox), cancelled, fence]
        return [cancelled, fence]
    # Not live, or already being revoked or undone: settled when a session is attached, or when
    # the disk is seen to be gone.
    return [cancelled]


def resolve(
    state: SandboxShard, value: CommandReceived, command: ResolveCommand
) -> list[e.SandboxEntry]:
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return unknown_sandbox(state, value, "resolve")
    step = sandbox.steps.get(value.id)
    if step is None or step.phase != "indeterminate":
        return refuse(
            value,
            "resolve",
            "not_indeterminate",
            field="step",
            detail="only such steps are resolved",
        )
    return [
        e.Resolved(
            sandbox=sandbox.id,
            step=value.id,
            attempt=step.attempt,
            state=command.as_,
            who=command.who[:200],
            note=command.note[:1000],
        ),
        *wake(sandbox),
    ]
