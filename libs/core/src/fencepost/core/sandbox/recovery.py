"""
Recovery: how a new generation gets the committed work back before anything new is fenced on it.

Rule 1: restore first, where there is a checkpoint; then what is owed, one step after the other, in
        the order in which disks saw it, each under a fence of its own; then `recovered`.
Rule 2: a replay never touches the step: that was final. It is compared with the first receipt, and
        a difference stops the recovery: a person decides.
Rule 3: another epoch begins anew; what its disk already holds, the disk's journal attests.
Rule 4: what was cut down in the middle and cannot be known is never run again on that disk: the
        disk is given up, and the next one begins anew.
"""

from __future__ import annotations

from typing import Final

import msgspec
from fencepost.core import facts, ids, limits
from fencepost.core.receipts import Change, Receipt
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import join, owed
from fencepost.core.sandbox.admission import refuse, unknown_sandbox
from fencepost.core.sandbox.inputs import (
    CommandReceived,
    OwedEnd,
    OwedPage,
    OwedStep,
    ReceiptReceived,
)
from fencepost.core.sandbox.state import Recovering, Replay, Sandbox, SandboxShard, Step
from fencepost.core.steps import Compensation, RecoverCommand, StepSpec

# The same call may be answered otherwise when it is made again.
_PASSING: Final = frozenset({"grant_expired", "stale_epoch", "stale_session", "no_generation"})
_PATHS_NAMED: Final = 3
_PATH_SHOWN: Final = 60
_ENCODE: Final = msgspec.json.Encoder().encode
_RESTORE_PASSING: Final = frozenset({"no_space", "io_error", "unreachable"})


def needs(sandbox: Sandbox, disk: e.Disk) -> bool:
    """Whether a generation that opens on such a disk has something to get back."""
    if disk == "warm":
        # A restore does not count in the journal: a point from before it has the same length.
        unproven = sandbox.checkpoint is not None and sandbox.restored_seq == sandbox.journal_seq
        return sandbox.recovering is not None or unproven
    return sandbox.owed > 0 or sandbox.checkpoint is not None


def unvouched(sandbox: Sandbox, disk: e.Disk) -> str:
    """
    Why the journal of such a disk cannot tell which of the owed steps it holds already, or "".

    What it has forgotten would be applied on top of what came after it.
    """
    if disk == "restored" and sandbox.checkpoint is None and sandbox.owed:
        behind = sandbox.next_no
    elif disk == "warm" and sandbox.recovering is not None:
        behind = sandbox.recovering.done
    else:
        return ""
    if behind <= limits.FENCES_BEHIND_MAX:
        return ""
    return f"its journal may have forgotten what is owed: {behind} fences"


def condemn(sandbox: Sandbox, reason: str, *, closed_as: str = "condemned") -> list[e.SandboxEntry]:
    """Gives an instance up: it is stopped, and what was on it is lost once it is seen gone."""
    entries: list[e.SandboxEntry] = []
    if sandbox.open:
        entries.append(
            e.EpochClosed(
                sandbox=sandbox.id, epoch=sandbox.epoch, reason=closed_as, evidence=reason[:300]
            )
        )
    return [*entries, e.Condemned(sandbox=sandbox.id, reason=reason[:300])]


# --- restore --------------------------------------------------------------------------------------


def restored(sandbox: Sandbox, value: facts.Restored) -> list[e.SandboxEntry]:
    recovering, checkpoint = sandbox.recovering, sandbox.checkpoint
    if (
        recovering is None
        or checkpoint is None
        or recovering.phase != "restore"
        or not _is_current(sandbox, value)
        or (value.checkpoint, value.manifest) != (checkpoint.id, checkpoint.manifest)
    ):
        return []
    entries: list[e.SandboxEntry] = [
        e.RestoredEntry(
            sandbox=sandbox.id,
            checkpoint=checkpoint.id,
            manifest=checkpoint.manifest,
            epoch=sandbox.epoch,
            session=sandbox.session,
            journal_seq=max(0, value.journal_seq),
            files=max(0, value.files),
            size_bytes=max(0, value.size_bytes),
        )
    ]
    if sandbox.owed == 0:
        entries.append(_recovered(sandbox, "replayed"))
    return entries


def restore_failed(sandbox: Sandbox, value: facts.RestoreFailed) -> list[e.SandboxEntry]:
    recovering, checkpoint = sandbox.recovering, sandbox.checkpoint
    if (
        recovering is None
        or checkpoint is None
        or recovering.phase != "restore"
        or not _is_current(sandbox, value)
        or value.checkpoint != checkpoint.id
    ):
        return []
    entries: list[e.SandboxEntry] = [
        e.RestoreFailedEntry(
            sandbox=sandbox.id,
            checkpoint=checkpoint.id,
            reason=value.reason,
            detail=value.detail[:300],
        )
    ]
    passing = value.reason in _RESTORE_PASSING
    if not passing or recovering.failures + 1 >= limits.RESTORE_TRIES_MAX:
        entries.append(_stopped(sandbox, f"restore_{value.reason}", detail=value.detail))
    return entries


def _is_current(sandbox: Sandbox, value: facts.Restored | facts.RestoreFailed) -> bool:
    return sandbox.live and (value.epoch, value.session, value.gateway) == (
        sandbox.epoch,
        sandbox.session,
        sandbox.gateway,
    )


# --- what the owner reads in the ledger -----------------------------------------------------------


def owed_step(sandbox: Sandbox, value: OwedStep) -> list[e.SandboxEntry]:
    """Hands out a fence for the next owed step. One that does not follow is not it."""
    recovering = _waiting(sandbox, value.epoch, "replay")
    if recovering is None or recovering.replay is not None or value.key <= recovering.key:
        return []
    if value.key[2] != value.step:
        return []
    no = sandbox.next_no
    return [
        e.Replaying(
            sandbox=sandbox.id,
            step=value.step,
            attempt=value.attempt,
            name=ids.replay_id(value.attempt, no),
            no=no,
            epoch=sandbox.epoch,
            session=sandbox.session,
            key=value.key,
            tool=value.tool,
            digest=value.digest,
            args=value.args,
            effect=value.accepted or value.effect,
            item=owed.item_of(value.key, value.attempt, value.digest, value.effect),
        )
    ]


def owed_page(sandbox: Sandbox, value: OwedPage) -> list[e.SandboxEntry]:
    """Takes the next owed steps that are told, and ends the recovery after the last of them."""
    recovering = _waiting(sandbox, value.epoch, "tell")
    if recovering is None or not value.items or len(value.items) > limits.OWED_PAGE:
        return []
    before, total = recovering.key, 0
    for one in value.items:
        if one.key <= before:
            return []
        before = one.key
        total = owed.add(total, owed.item_of(one.key, one.attempt, one.digest, one.effect))
    told = recovering.done + len(value.items) - recovering.kept
    page = e.OwedTold(
        sandbox=sandbox.id,
        epoch=sandbox.epoch,
        steps=[e.OwedName(one.step, one.attempt, one.tool) for one in value.items],
        told=told,
        of=sandbox.owed - recovering.kept,
        key=before,
        sum=total,
    )
    done = recovering.done + len(value.items)
    if done < sandbox.owed:
        return [page]
    return [page, *_end(sandbox, done, owed.add(recovering.sum, total), told=told)]


def owed_end(sandbox: Sandbox, value: OwedEnd) -> list[e.SandboxEntry]:
    """The ledger has no more of them: that must be all, or the state and the ledger differ."""
    recovering = _waiting(sandbox, value.epoch, "replay") or _waiting(sandbox, value.epoch, "tell")
    if recovering is None or recovering.replay is not None:
        return []
    told = recovering.done - recovering.kept if recovering.phase == "tell" else 0
    return _end(sandbox, recovering.done, recovering.sum, told=told)


def _waiting(sandbox: Sandbox, epoch: int, phase: str) -> Recovering | None:
    recovering = sandbox.recovering
    if recovering is None or recovering.phase != phase:
        return None
    return recovering if sandbox.live and epoch == sandbox.epoch else None


def _end(sandbox: Sandbox, done: int, total: int, *, told: int = 0) -> list[e.SandboxEntry]:
    recovering = sandbox.recovering
    assert recovering is not None
    if done != sandbox.owed or total != sandbox.owed_sum:
        detail = f"{done} of {sandbox.owed} owed steps are in the ledger"
        return [_stopped(sandbox, "list_differs", detail=detail)]
    mode = "accepted" if recovering.without else "replayed"
    if recovering.phase == "tell":
        mode = "told"
    return [_recovered(sandbox, mode, done=done - told, told=told)]


def _recovered(sandbox: Sandbox, mode: str, *, done: int = 0, told: int = 0) -> e.Recovered:
    recovering = sandbox.recovering
    assert recovering is not None
    checkpoint = sandbox.checkpoint
    return e.Recovered(
        sandbox=sandbox.id,
        epoch=sandbox.epoch,
        mode=mode,  # type: ignore[arg-type]
        replayed=done,
        told=told,
        checkpoint=checkpoint.id if checkpoint is not None and not recovering.lost else "",
        kept=recovering.kept_key,
        lost=recovering.lost,
        without=recovering.without,
    )


# --- replays --------------------------------------------------------------------------------------


def settle(sandbox: Sandbox) -> list[e.SandboxEntry]:
    """Hands out the fence of the replay under way anew, where the session moved."""
    recovering = sandbox.recovering
    replay = recovering.replay if recovering is not None else None
    if recovering is None or replay is None or not sandbox.live or recovering.phase != "replay":
        return []
    if (replay.epoch, replay.session) == (sandbox.epoch, sandbox.session):
        return []
    no = sandbox.next_no
    return [
        e.Replaying(
            sandbox=sandbox.id,
            step=replay.step,
            attempt=replay.attempt,
            name=ids.replay_id(replay.attempt, no),
            no=no,
            epoch=sandbox.epoch,
            session=sandbox.session,
            key=replay.key,
            tool=replay.tool,
            digest=replay.digest,
            args=replay.args,
            effect=replay.effect,
            item=replay.item,
            reason="session_moved",
        )
    ]


def is_about(sandbox: Sandbox, got: Receipt) -> bool:
    """Tells whether a receipt speaks of the step that is being applied again."""
    recovering = sandbox.recovering
    replay = recovering.replay if recovering is not None else None
    return replay is not None and got.step == replay.step


def receipt(sandbox: Sandbox, value: ReceiptReceived, got: Receipt) -> list[e.SandboxEntry]:
    """Decides the receipt of the replay under way."""
    recovering = sandbox.recovering
    replay = recovering.replay if recovering is not None else None
    assert recovering is not None, "it is about a replay"
    assert replay is not None, "it is about a replay"
    why = join.why_not(
        sandbox,
        _as_step(replay),
        got,
        gateway=value.gateway,
        direction="replay",
        attempt=replay.name,
        tool=replay.tool,
        digest=replay.digest,
    )
    if why or recovering.phase != "replay":
        return _refuse(replay, value, got, why or "recovery_stopped")
    match got.verdict:
        case "running":
            return []
        case "applied" | "attested":
            return _applied(sandbox, recovering, replay, got)
        case "indeterminate":
            return _cut_down(sandbox, replay, got)
        case "refused" if got.reason not in _PASSING and got.reason != "blob_missing":
            return [_stopped(sandbox, got.reason or "refused", replay=replay, detail=got.detail)]
        case _:
            return _again(sandbox, replay, value, got)


def _as_step(replay: Replay) -> Step:
    """The fence of a replay, as the join looks at fences."""
    spec = StepSpec(
        tool=replay.tool,
        args=replay.args,
        digest=replay.digest,
        compensation=Compensation(kind="pre_image"),
        attempts_max=1,
        deadline_at_ms=0,
    )
    return Step(
        spec=spec, attempt=replay.name, epoch=replay.epoch, session=replay.session, no=replay.no
    )


def _refuse(
    replay: Replay, value: ReceiptReceived, got: Receipt, reason: str
) -> list[e.SandboxEntry]:
    if replay.refusals >= limits.REFUSALS_RECORDED_PER_ATTEMPT_MAX:
        return []
    epoch = got.epoch if type(got.epoch) is int and 0 <= got.epoch < 1 << 53 else -1
    return [
        e.ReceiptRefused(
            sandbox=value.sandbox,
            step=replay.step,
            attempt=replay.name,
            reason=reason[:80],
            detail=(got.detail or got.reason)[:300],
            direction="replay",
            verdict=got.verdict,
            epoch=epoch,
            session=got.session[:80],
            gateway=value.gateway,
        )
    ]


def _applied(
    sandbox: Sandbox, recovering: Recovering, replay: Replay, got: Receipt
) -> list[e.SandboxEntry]:
    found = owed.effect_of(got)
    if not owed.is_same(replay.effect, found):
        stopped = _stopped(sandbox, "differs", replay=replay, detail=_otherwise(got), found=found)
        return [msgspec.structs.replace(stopped, changes=_shown(got.changes))]
    entry = _replayed(sandbox, recovering, replay, found, verdict=got.verdict)
    return [
        msgspec.structs.replace(entry, journal_seq=got.journal_seq),
        *_next(sandbox, recovering, replay),
    ]


def _otherwise(got: Receipt) -> str:
    """How people are told of a difference: where it may be, as far as a line has room for it."""
    detail = "came to something else than its first receipt says"
    named = [_short(change.path) for change in got.changes[:_PATHS_NAMED]]
    if not named:
        return detail
    more = len(got.changes) - len(named)
    return f"{detail}; this time: {', '.join(named)}" + (f" and {more} more" if more else "")


def _short(path: str) -> str:
    return path if len(path) <= _PATH_SHOWN else f"…{path[-_PATH_SHOWN:]}"


def _shown(changes: list[Change]) -> tuple[Change, ...]:
    """As many of them as an entry has room for."""
    shown: list[Change] = []
    left = limits.CHANGES_SHOWN_BYTES
    for change in changes[: limits.CHANGES_SHOWN_MAX]:
        left -= len(_ENCODE(change))
        if left < 0:
            break
        shown.append(change)
    return tuple(shown)


def _replayed(
    sandbox: Sandbox,
    recovering: Recovering,
    replay: Replay,
    effect: str,
    *,
    verdict: str,
    accepted: bool = False,
) -> e.Replayed:
    return e.Replayed(
        sandbox=sandbox.id,
        step=replay.step,
        attempt=replay.attempt,
        name=replay.name,
        epoch=sandbox.epoch,
        verdict=verdict,  # type: ignore[arg-type]
        effect=effect,
        journal_seq=0,
        no=recovering.done + 1,
        of=sandbox.owed,
        accepted=accepted,
    )


def _next(sandbox: Sandbox, recovering: Recovering, replay: Replay) -> list[e.SandboxEntry]:
    """What follows on a replay that is done: nothing, until the last one, which ends it."""
    done = recovering.done + 1
    if done < sandbox.owed:
        return []
    return _end(sandbox, done, owed.add(recovering.sum, replay.item))


def _cut_down(sandbox: Sandbox, replay: Replay, got: Receipt) -> list[e.SandboxEntry]:
    """A command that began and left no record is on this disk in part, perhaps."""
    if sandbox.spec.rebuild and sandbox.recoveries_failed < limits.REPLAY_DISCARDS_MAX:
        return condemn(sandbox, f"a replay of {replay.step} cannot be known: {got.reason}")
    reason = got.reason or "indeterminate"
    return [_stopped(sandbox, reason, replay=replay, detail=got.detail)]


def _again(
    sandbox: Sandbox, replay: Replay, value: ReceiptReceived, got: Receipt
) -> list[e.SandboxEntry]:
    """Nothing was touched: the same fence is sent again by timer, as often as refusals are kept."""
    reason = got.reason or got.verdict
    if got.verdict == "refused" and reason in _PASSING:
        return []
    if replay.refusals + 1 >= limits.REFUSALS_RECORDED_PER_ATTEMPT_MAX:
        return [_stopped(sandbox, reason, replay=replay, detail=got.detail)]
    return _refuse(replay, value, got, reason)


def _stopped(
    sandbox: Sandbox,
    reason: str,
    *,
    replay: Replay | None = None,
    detail: str = "",
    found: str = "",
) -> e.RecoveryStopped:
    return e.RecoveryStopped(
        sandbox=sandbox.id,
        epoch=sandbox.epoch,
        reason=reason[:80],
        step=replay.step if replay is not None else "",
        attempt=replay.attempt if replay is not None else "",
        detail=detail[:300],
        expected=replay.effect if replay is not None else "",
        found=found,
    )


# --- an operator's word ---------------------------------------------------------------------------


def decide(
    state: SandboxShard, value: CommandReceived, command: RecoverCommand
) -> list[e.SandboxEntry]:
    """Takes one of the three ways out of a recovery that stopped."""
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return unknown_sandbox(state, value, "recover")
    recovering = sandbox.recovering
    if recovering is None or recovering.phase != "stopped":
        detail = "no recovery of this sandbox has stopped"
        return refuse(value, "recover", "not_stopped", field="sandbox", detail=detail)
    if not sandbox.live:
        detail = "its session is gone: a new one goes on, or begins anew"
        return refuse(value, "recover", "no_live_epoch", field="sandbox", detail=detail)
    decided = e.RecoveryDecided(
        sandbox=sandbox.id,
        epoch=sandbox.epoch,
        decision=command.decision,
        who=command.who[:200],
        note=command.note[:1000],
    )
    match command.decision:
        case "discard":
            reason = f"discarded by {command.who[:200]}"
            return [decided, *condemn(sandbox, reason, closed_as="discarded")]
        case "tell" if sandbox.owed == 0 and sandbox.checkpoint is not None:
            gone = msgspec.structs.replace(
                _recovered(sandbox, "told"), checkpoint="", lost=sandbox.checkpoint.id
            )
            return [decided, gone]
        case "tell":
            return [decided]
        case "accept":
            return [decided, *_accepted(sandbox, recovering)]


def _accepted(sandbox: Sandbox, recovering: Recovering) -> list[e.SandboxEntry]:
    if recovering.reason == "list_differs":
        return [_recovered(sandbox, "accepted", done=recovering.done)]
    replay = recovering.replay
    if replay is None:
        # The disk stands for the checkpoint that could not be restored.
        if sandbox.owed or sandbox.checkpoint is None:
            return []
        accepted = _recovered(sandbox, "accepted")
        return [msgspec.structs.replace(accepted, without=sandbox.checkpoint.id)]
    entry = _replayed(
        sandbox,
        recovering,
        replay,
        recovering.found or replay.effect,
        verdict="applied" if recovering.found else "",
        accepted=True,
    )
    return [entry, *_next(sandbox, recovering, replay)]
