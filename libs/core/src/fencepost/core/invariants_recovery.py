"""
The recovery part of the auditor: what a ledger's entries alone can show of checkpoints and replays.

As in `invariants`, nothing is shared with the deciding code but the shapes of the entries.

Rule 1: of each sandbox the owed steps are kept, by name, with their place in the order of disks.
Rule 2: a ledger that was written before there was recovery is judged as it was: terms of a former
        machine owed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from fencepost.core.machine import TermOpened
from fencepost.core.sandbox import entries as e

_MACHINE_THAT_RECOVERS = 2


class Need(Protocol):
    def __call__(self, holds: bool, invariant: str, detail: str, /) -> bool: ...


class _Sandbox(msgspec.Struct):
    """
    `lines`: (first epoch, journal sequence at its start) of the present disk's history.

    `held`: the same of the disk that the checkpoint was taken of.
    """

    epoch: int = 0
    session: str = ""
    lines: list[tuple[int, int]] = []
    effects: dict[str, tuple[str, str]] = {}
    fenced: set[str] = set()
    joined: dict[str, e.Joined] = {}
    owed: dict[str, tuple[int, int]] = {}
    checkpoint: tuple[str, int, int] | None = None
    held: list[tuple[int, int]] = []
    taking: str = ""
    recovering: bool = False
    restored: bool = False
    stopped: bool = False
    done: set[str] = set()
    told: set[str] = set()
    key: tuple[int, int, str] = (0, 0, "")
    replaying: str = ""

    def line_of(self, seq: int) -> int:
        older = [line for line, start in self.lines if start < seq]
        return older[-1] if older else self.epoch


class RecoveryJudge:
    """Takes the entries of one sandbox shard in order; `need` records what does not hold."""

    def __init__(self, need: Need) -> None:
        self._need = need
        self._sandboxes: dict[str, _Sandbox] = {}
        self._recovers = False

    def take(self, entry: Any) -> None:
        if isinstance(entry, TermOpened):
            self._recovers = entry.machine >= _MACHINE_THAT_RECOVERS
            return
        judge = _JUDGES.get(type(entry))
        if judge is not None:
            judge(self, self._sandboxes.setdefault(entry.sandbox, _Sandbox()), entry)

    def _created(self, sandbox: _Sandbox, entry: e.Created) -> None:
        origin = entry.spec.origin
        if origin is not None:
            sandbox.checkpoint = (origin.checkpoint, 0, 0)

    # --- generations ----------------------------------------------------------------------------

    def _epoch_opened(self, sandbox: _Sandbox, entry: e.EpochOpened) -> None:
        owes = bool(sandbox.owed) or sandbox.checkpoint is not None
        if self._recovers and entry.disk == "warm":
            self._need(
                entry.recovering or not sandbox.recovering,
                "I2",
                f"{entry.sandbox}: epoch {entry.epoch} on the same bytes does not "
                f"recover, and the one before it was not whole",
            )
        elif self._recovers:
            self._need(
                entry.recovering == owes and entry.owed == len(sandbox.owed),
                "I2",
                f"{entry.sandbox}: epoch {entry.epoch} opens on a {entry.disk} disk, owing "
                f"{entry.owed} steps; the ledger shows {len(sandbox.owed)}",
            )
        sandbox.epoch, sandbox.session = entry.epoch, ""
        sandbox.recovering = entry.recovering
        sandbox.restored = sandbox.stopped = False
        sandbox.done, sandbox.told = set(), set()
        sandbox.key, sandbox.replaying = (0, 0, ""), ""
        if entry.disk == "restored" and not entry.checkpoint:
            older = [line for line in sandbox.lines if line[1] < entry.journal_seq]
            sandbox.lines = [*older, (entry.epoch, entry.journal_seq)]
        elif entry.disk != "warm":
            sandbox.lines = [(entry.epoch, 0)]

    def _attached(self, sandbox: _Sandbox, entry: e.Attached) -> None:
        sandbox.session = entry.session

    def _epoch_closed(self, sandbox: _Sandbox, _entry: e.EpochClosed) -> None:
        sandbox.session = sandbox.taking = ""

    def _releasing(self, sandbox: _Sandbox, entry: e.Releasing) -> None:
        """Nothing is owed to what is being released; what is left of it ends by itself."""
        self._sandboxes[entry.sandbox] = _Sandbox(
            epoch=sandbox.epoch,
            lines=sandbox.lines,
            effects=sandbox.effects,
            joined=sandbox.joined,
            checkpoint=sandbox.checkpoint,
            held=sandbox.held,
        )

    # --- steps ----------------------------------------------------------------------------------

    def _parked(self, sandbox: _Sandbox, entry: e.Parked) -> None:
        self._leaves(sandbox, entry.step)
        if entry.spec is not None:
            sandbox.effects[entry.step] = entry.spec.effect, entry.spec.commit_after

    def _fenced(self, sandbox: _Sandbox, entry: e.Fenced) -> None:
        self._leaves(sandbox, entry.step)
        if entry.spec is not None:
            sandbox.effects[entry.step] = entry.spec.effect, entry.spec.commit_after
        sandbox.fenced.add(entry.step)
        self._need(
            not sandbox.recovering,
            "I2",
            f"{entry.step} fenced while {entry.sandbox} owes {len(sandbox.owed)} steps",
        )

    def _leaves(self, sandbox: _Sandbox, step: str) -> None:
        sandbox.fenced.discard(step)
        sandbox.joined.pop(step, None)

    def _ended(self, sandbox: _Sandbox, entry: Any) -> None:
        self._leaves(sandbox, entry.step)
        if not isinstance(entry, e.Indeterminate) and getattr(entry, "final", True):
            sandbox.effects.pop(entry.step, None)

    def _joined(self, sandbox: _Sandbox, entry: e.Joined) -> None:
        _, after = sandbox.effects.get(entry.step, ("", ""))
        self._need(after != "receipt", "I2", f"{entry.step} joined, and waits for nothing")
        sandbox.joined[entry.step] = entry

    def _committed(self, sandbox: _Sandbox, entry: e.Committed) -> None:
        effect, after = sandbox.effects.pop(entry.step, ("", "receipt"))
        joined = sandbox.joined.get(entry.step)
        self._leaves(sandbox, entry.step)
        receipt = entry.receipt
        seq = receipt.journal_seq
        if receipt.verdict == "attested" and receipt.of_seq:
            seq = receipt.of_seq
        line = entry.line or receipt.epoch
        if self._recovers:
            self._need(
                line == sandbox.line_of(seq),
                "I2",
                f"{entry.step}: written on line {line}, the disk's history says "
                f"{sandbox.line_of(seq)}",
            )
        covered = self._holds(sandbox, line, seq)
        if after != "receipt":
            self._check_waited(entry, joined, after, covered=covered)
        if effect == "workspace" and not covered:
            sandbox.owed[entry.step] = (line, seq)

    def _check_waited(
        self, entry: e.Committed, joined: e.Joined | None, after: str, *, covered: bool
    ) -> None:
        same = joined is not None and (
            joined.attempt,
            joined.gateway,
            joined.receipt.journal_seq,
            joined.receipt.session,
        ) == (
            entry.attempt,
            entry.gateway,
            entry.receipt.journal_seq,
            entry.receipt.session,
        )
        self._need(same, "I1", f"{entry.step}: committed on another receipt than the one joined")
        beaten = after == "heartbeat" and entry.beat >= entry.receipt.journal_seq
        self._need(covered or beaten, "I2", f"{entry.step}: committed before its {after} came")

    def _holds(self, sandbox: _Sandbox, line: int, seq: int) -> bool:
        if sandbox.checkpoint is None:
            return False
        _, its_line, its_seq = sandbox.checkpoint
        older = [held for held, start in sandbox.held if start < seq]
        return seq <= its_seq and line == (older[-1] if older else its_line)

    # --- checkpoints ----------------------------------------------------------------------------

    def _checkpointing(self, sandbox: _Sandbox, entry: e.CheckpointingEntry) -> None:
        self._need(sandbox.taking == "", "I2", f"{entry.checkpoint} begun beside {sandbox.taking}")
        sandbox.taking = entry.checkpoint

    def _checkpoint_failed(self, sandbox: _Sandbox, entry: e.CheckpointFailedEntry) -> None:
        self._need(entry.checkpoint == sandbox.taking, "I2", f"{entry.checkpoint} was not taken")
        sandbox.taking = ""

    def _checkpointed(self, sandbox: _Sandbox, entry: e.CheckpointedEntry) -> None:
        self._need(
            entry.checkpoint == sandbox.taking and entry.epoch == sandbox.epoch,
            "I2",
            f"{entry.checkpoint} of epoch {entry.epoch}: {sandbox.taking!r} is being taken in "
            f"{sandbox.epoch}",
        )
        self._need(not sandbox.recovering, "I2", f"{entry.checkpoint}: {entry.sandbox} owes")
        unknown = sorted(sandbox.fenced - set(sandbox.joined))
        self._need(
            not unknown, "I2", f"{entry.checkpoint} may hold what {unknown[:3]} did, and may not"
        )
        sandbox.taking = ""
        sandbox.checkpoint = (entry.checkpoint, entry.line, entry.journal_seq)
        sandbox.held = sandbox.lines
        sandbox.owed = {}

    # --- recovery -------------------------------------------------------------------------------

    def _restored(self, sandbox: _Sandbox, entry: e.RestoredEntry) -> None:
        named = sandbox.checkpoint[0] if sandbox.checkpoint is not None else ""
        self._need(
            sandbox.recovering and entry.checkpoint == named and entry.epoch == sandbox.epoch,
            "I2",
            f"{entry.sandbox}: {entry.checkpoint} restored in epoch {entry.epoch}, it is {named}",
        )
        sandbox.restored = True

    def _replaying(self, sandbox: _Sandbox, entry: e.Replaying) -> None:
        step = entry.step
        self._need(
            sandbox.recovering and not sandbox.stopped,
            "I2",
            f"{step} applied again, {entry.sandbox} does not recover",
        )
        self._need(
            sandbox.restored or sandbox.checkpoint is None,
            "I2",
            f"{step} applied again before the checkpoint was restored",
        )
        self._need(step in sandbox.owed, "I2", f"{step} applied again, it is not owed")
        self._need(step not in sandbox.done, "I3", f"{step} applied again twice in one generation")
        self._need(
            sandbox.replaying in ("", step), "I3", f"{step} beside {sandbox.replaying}, at once"
        )
        self._need(
            entry.key[:2] == sandbox.owed.get(step) and entry.key > sandbox.key,
            "S-208",
            f"{step}: {entry.key} after {sandbox.key}, not in the order in which disks saw it",
        )
        named = f"{entry.attempt}:r{entry.no}"
        self._need(entry.name == named, "S-196", f"{step}: the replay is named {entry.name}")
        sandbox.replaying = step

    def _replayed(self, sandbox: _Sandbox, entry: e.Replayed) -> None:
        self._need(
            sandbox.recovering and entry.step == sandbox.replaying,
            "I3",
            f"{entry.step} was applied again, {sandbox.replaying!r} was fenced for it",
        )
        sandbox.done.add(entry.step)
        sandbox.key = (*sandbox.owed.get(entry.step, (0, 0)), entry.step)
        sandbox.replaying = ""

    def _owed_told(self, sandbox: _Sandbox, entry: e.OwedTold) -> None:
        named = {one.step for one in entry.steps}
        self._need(
            sandbox.recovering
            and named <= set(sandbox.owed)
            and not named & (sandbox.done | sandbox.told),
            "I2",
            f"{entry.sandbox}: told of {len(named)} steps, not all of them are owed still",
        )
        sandbox.told |= named

    def _stopped(self, sandbox: _Sandbox, entry: e.RecoveryStopped) -> None:
        self._need(sandbox.recovering, "I2", f"{entry.sandbox}: stopped, it does not recover")
        sandbox.stopped = True

    def _decided(self, sandbox: _Sandbox, entry: e.RecoveryDecided) -> None:
        self._need(sandbox.stopped, "I2", f"{entry.sandbox}: decided, nothing had stopped")
        sandbox.stopped = False
        if entry.decision == "accept":
            sandbox.restored = True
        else:
            sandbox.replaying = ""

    def _recovered(self, sandbox: _Sandbox, entry: e.Recovered) -> None:
        self._need(sandbox.recovering, "I2", f"{entry.sandbox}: recovered, it did not recover")
        silent = sorted(set(sandbox.owed) - sandbox.done - sandbox.told)
        self._need(
            entry.mode == "accepted" or not silent,
            "I2",
            f"{entry.sandbox}: epoch {sandbox.epoch} silently lacks {silent[:3]}",
        )
        self._need(
            sandbox.checkpoint is None or sandbox.restored or entry.lost == sandbox.checkpoint[0],
            "I2",
            f"{entry.sandbox}: recovered without its checkpoint",
        )
        sandbox.recovering = False
        if entry.mode == "told":
            sandbox.owed = {n: key for n, key in sandbox.owed.items() if n in sandbox.done}
        if entry.lost:
            sandbox.checkpoint = None


_JUDGES: dict[type, Callable[[RecoveryJudge, _Sandbox, Any], None]] = {
    e.Created: RecoveryJudge._created,
    e.EpochOpened: RecoveryJudge._epoch_opened,
    e.Attached: RecoveryJudge._attached,
    e.EpochClosed: RecoveryJudge._epoch_closed,
    e.Releasing: RecoveryJudge._releasing,
    e.Parked: RecoveryJudge._parked,
    e.Fenced: RecoveryJudge._fenced,
    e.Compensated: RecoveryJudge._ended,
    e.Indeterminate: RecoveryJudge._ended,
    e.Resolved: RecoveryJudge._ended,
    e.Joined: RecoveryJudge._joined,
    e.Committed: RecoveryJudge._committed,
    e.CheckpointingEntry: RecoveryJudge._checkpointing,
    e.CheckpointFailedEntry: RecoveryJudge._checkpoint_failed,
    e.CheckpointedEntry: RecoveryJudge._checkpointed,
    e.RestoredEntry: RecoveryJudge._restored,
    e.Replaying: RecoveryJudge._replaying,
    e.Replayed: RecoveryJudge._replayed,
    e.OwedTold: RecoveryJudge._owed_told,
    e.RecoveryStopped: RecoveryJudge._stopped,
    e.RecoveryDecided: RecoveryJudge._decided,
    e.Recovered: RecoveryJudge._recovered,
}
