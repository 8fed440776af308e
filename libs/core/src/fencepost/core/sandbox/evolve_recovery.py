"""How checkpoints and recovery change a sandbox: the part of `evolve` that is about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from fencepost.core import limits
from fencepost.core.machine import Place
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import owed
from fencepost.core.sandbox.state import (
    Checkpoint,
    Checkpointing,
    Recovering,
    Replay,
    Sandbox,
    Step,
)

# What a restore proves about the store; the other failures are about the disk or the way to it.
_NOT_WHOLE: Final = frozenset({"missing", "corrupt"})

# --- what other entries mean for it ---------------------------------------------------------------


def created(sandbox: Sandbox, place: Place, now_ms: int) -> None:
    origin = sandbox.spec.origin
    if origin is not None:
        sandbox.checkpoint = Checkpoint(
            id=origin.checkpoint, manifest=origin.manifest, namespace=origin.sandbox
        )
    sandbox.owed_after = place.after
    sandbox.checkpoint_at_ms = now_ms


def epoch_opened(sandbox: Sandbox, entry: e.EpochOpened, now_ms: int) -> None:
    """Begins what the generation has to get back, from the start, whatever a former one had."""
    sandbox.recovering = _begun(sandbox, now_ms) if entry.recovering else None
    if entry.disk == "warm":
        return
    sandbox.restored_seq = -1
    if entry.disk == "restored" and not entry.checkpoint:
        older = [line for line in sandbox.lines if line[1] < entry.journal_seq]
        sandbox.lines = [*older, (entry.epoch, entry.journal_seq)]
        return
    sandbox.lines = [(entry.epoch, 0)]
    sandbox.undone = 0


def _begun(sandbox: Sandbox, now_ms: int) -> Recovering:
    phase = "restore" if sandbox.checkpoint is not None else sandbox.spec.recovery
    return Recovering(phase=phase, since_ms=now_ms)


def attached(sandbox: Sandbox, now_ms: int) -> None:
    _hold_anew(sandbox, now_ms)
    if sandbox.recovering is not None:
        sandbox.recovering.since_ms = now_ms


def _hold_anew(sandbox: Sandbox, now_ms: int) -> None:
    held = sandbox.checkpointing
    if held is not None:
        sandbox.checkpointing = Checkpointing(id=held.id, reason=held.reason, since_ms=now_ms)


def committed(sandbox: Sandbox, entry: e.Committed, step: Step) -> None:
    receipt = entry.receipt
    line = entry.line or receipt.epoch
    key = owed.key_of(line, receipt)
    if owed.is_covered(sandbox.checkpoint, key[0], key[1]):
        return
    effect = owed.effect_of(receipt)
    item = owed.item_of(key, entry.attempt, step.spec.digest, effect)
    sandbox.owed += 1
    sandbox.owed_sum = owed.add(sandbox.owed_sum, item)


def replay_refused(sandbox: Sandbox, entry: e.ReceiptRefused) -> bool:
    """Counts a refused receipt of the replay under way; False where it is about something else."""
    replay = sandbox.recovering.replay if sandbox.recovering is not None else None
    if replay is None or replay.name != entry.attempt:
        return False
    replay.refusals += 1
    return True


def releasing(sandbox: Sandbox) -> None:
    sandbox.recovering = None
    sandbox.checkpointing = None
    sandbox.checkpoints_asked = {}


# --- checkpoints ----------------------------------------------------------------------------------


def _asked(sandbox: Sandbox, entry: e.CheckpointAsked, _place: Place, _now_ms: int) -> None:
    sandbox.checkpoints_asked[entry.checkpoint] = entry.reason


def _preempted(sandbox: Sandbox, entry: e.Preempted, _place: Place, _now_ms: int) -> None:
    sandbox.preempted = entry.instance


def _checkpointing(
    sandbox: Sandbox, entry: e.CheckpointingEntry, _place: Place, now_ms: int
) -> None:
    assert sandbox.checkpointing is None, "one checkpoint at a time"
    sandbox.checkpoints += 1
    sandbox.checkpointing = Checkpointing(id=entry.checkpoint, reason=entry.reason, since_ms=now_ms)


def _checkpointed(sandbox: Sandbox, entry: e.CheckpointedEntry, place: Place, now_ms: int) -> None:
    assert sandbox.recovering is None, "what is not whole is no checkpoint"
    sandbox.checkpoint = Checkpoint(
        id=entry.checkpoint,
        manifest=entry.manifest,
        namespace=sandbox.id,
        line=entry.line,
        seq=entry.journal_seq,
        lines=tuple(sandbox.lines),
        at=(place.after, place.index),
    )
    kept = [one for one in sandbox.manifests if one != entry.manifest]
    sandbox.manifests = [*kept, entry.manifest][-limits.CHECKPOINTS_KEPT :]
    sandbox.owed = 0
    sandbox.owed_sum = 0
    sandbox.owed_after = _read_from(sandbox, place)
    sandbox.checkpoint_at_ms = now_ms
    sandbox.checkpoint_failures = 0
    sandbox.checkpoint_retry_ms = 0
    _end_checkpointing(sandbox, entry.checkpoint)


def _read_from(sandbox: Sandbox, place: Place) -> int:
    """From where the ledger has all that may be owed: an open step's arguments may be older."""
    return min((step.at for step in sandbox.steps.values()), default=place.after)


def _end_checkpointing(sandbox: Sandbox, checkpoint: str) -> None:
    sandbox.checkpointing = None
    sandbox.checkpoints_asked.pop(checkpoint, None)


def _checkpoint_failed(
    sandbox: Sandbox, entry: e.CheckpointFailedEntry, _place: Place, now_ms: int
) -> None:
    delay_ms = limits.CHECKPOINT_RETRY_MS << min(sandbox.checkpoint_failures, 10)
    sandbox.checkpoint_failures += 1
    sandbox.checkpoint_retry_ms = now_ms + min(delay_ms, limits.CHECKPOINT_RETRY_MS_MAX)
    _end_checkpointing(sandbox, entry.checkpoint)


# --- recovery -------------------------------------------------------------------------------------


def _of(sandbox: Sandbox) -> Recovering:
    assert sandbox.recovering is not None, "only what recovers goes on with it"
    return sandbox.recovering


def _restored(sandbox: Sandbox, entry: e.RestoredEntry, _place: Place, _now_ms: int) -> None:
    recovering = _of(sandbox)
    recovering.phase = sandbox.spec.recovery
    sandbox.journal_seq = max(sandbox.journal_seq, entry.journal_seq)
    sandbox.restored_seq = sandbox.journal_seq
    _mark_broken(sandbox, is_broken=False)


def _restore_failed(
    sandbox: Sandbox, entry: e.RestoreFailedEntry, _place: Place, now_ms: int
) -> None:
    recovering = _of(sandbox)
    recovering.retry_at_ms = now_ms + (limits.RESTORE_RETRY_MS << recovering.failures)
    recovering.failures += 1
    if entry.reason in _NOT_WHOLE:
        _mark_broken(sandbox, is_broken=True)


def _mark_broken(sandbox: Sandbox, *, is_broken: bool) -> None:
    checkpoint = sandbox.checkpoint
    if checkpoint is not None and checkpoint.is_broken != is_broken:
        sandbox.checkpoint = msgspec.structs.replace(checkpoint, is_broken=is_broken)


def _replaying(sandbox: Sandbox, entry: e.Replaying, _place: Place, now_ms: int) -> None:
    assert entry.no >= sandbox.next_no, "fence numbers rise"
    sandbox.next_no = entry.no + 1
    recovering = _of(sandbox)
    refusals = recovering.replay.refusals if recovering.replay is not None else 0
    recovering.replay = Replay(
        step=entry.step,
        attempt=entry.attempt,
        name=entry.name,
        no=entry.no,
        epoch=entry.epoch,
        session=entry.session,
        key=entry.key,
        tool=entry.tool,
        digest=entry.digest,
        args=entry.args,
        effect=entry.effect,
        item=entry.item,
        since_ms=now_ms,
        refusals=refusals,
    )


def _replayed(sandbox: Sandbox, entry: e.Replayed, _place: Place, _now_ms: int) -> None:
    recovering = _of(sandbox)
    replay = recovering.replay
    assert replay is not None, "only what was being applied again has been"
    assert replay.step == entry.step, "one step is applied again at a time"
    recovering.done += 1
    recovering.sum = owed.add(recovering.sum, replay.item)
    recovering.key = replay.key
    recovering.replay = None
    recovering.found = ""
    sandbox.journal_seq = max(sandbox.journal_seq, entry.journal_seq)


def _told(sandbox: Sandbox, entry: e.OwedTold, _place: Place, _now_ms: int) -> None:
    recovering = _of(sandbox)
    recovering.done += len(entry.steps)
    recovering.sum = owed.add(recovering.sum, entry.sum)
    recovering.key = entry.key


def _stopped(sandbox: Sandbox, entry: e.RecoveryStopped, _place: Place, _now_ms: int) -> None:
    recovering = _of(sandbox)
    recovering.stopped_in = recovering.phase
    recovering.phase = "stopped"
    recovering.reason = entry.reason
    recovering.detail = entry.detail
    recovering.found = entry.found


def _decided(sandbox: Sandbox, entry: e.RecoveryDecided, _place: Place, _now_ms: int) -> None:
    recovering = _of(sandbox)
    in_restore = recovering.stopped_in == "restore"
    recovering.reason = recovering.detail = ""
    if entry.decision == "accept" and in_restore and sandbox.checkpoint is not None:
        recovering.without = sandbox.checkpoint.id
    if entry.decision == "accept":
        recovering.phase = sandbox.spec.recovery if in_restore else "replay"
        if recovering.stopped_in == "tell":
            recovering.phase = "tell"
    elif entry.decision == "tell":
        recovering.phase = "tell"
        recovering.replay = None
        if in_restore and sandbox.checkpoint is not None:
            recovering.lost = sandbox.checkpoint.id
        if recovering.stopped_in == "replay":
            recovering.kept = recovering.done
            recovering.kept_sum = recovering.sum
            recovering.kept_key = recovering.key


def _recovered(sandbox: Sandbox, entry: e.Recovered, place: Place, now_ms: int) -> None:
    recovering = _of(sandbox)
    if entry.mode == "told":
        sandbox.owed = recovering.kept
        sandbox.owed_sum = recovering.kept_sum
        if recovering.lost:
            sandbox.checkpoint = None
            sandbox.owed_after = _read_from(sandbox, place)
    sandbox.recovering = None
    sandbox.recoveries_failed = 0
    _hold_anew(sandbox, now_ms)


BY_KIND: dict[type, Callable[[Sandbox, Any, Place, int], None]] = {
    e.CheckpointAsked: _asked,
    e.CheckpointingEntry: _checkpointing,
    e.CheckpointedEntry: _checkpointed,
    e.CheckpointFailedEntry: _checkpoint_failed,
    e.RestoredEntry: _restored,
    e.RestoreFailedEntry: _restore_failed,
    e.Replaying: _replaying,
    e.Replayed: _replayed,
    e.OwedTold: _told,
    e.RecoveryStopped: _stopped,
    e.RecoveryDecided: _decided,
    e.Recovered: _recovered,
    e.Preempted: _preempted,
}
