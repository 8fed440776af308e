"""
Checkpoints: when one is taken, what it may hold, and what waits for one.

Rule 1: a checkpoint holds what is committed, and joined steps that it commits; never an effect
        that may yet be taken back or lost. So while one is taken no fence is handed out, and the
        order is given once everything that was fenced has ended or joined.
Rule 2: it counts only as the answer to the order that is being waited for, in the current session
        of the open epoch; what comes late, or from another session, is nobody's checkpoint.
Rule 3: the hold always ends: by an answer, with the sandbox, or by time.
"""

from __future__ import annotations

from typing import Final

import msgspec
from fencepost.core import facts, limits
from fencepost.core.receipts import Receipt
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import owed
from fencepost.core.sandbox.admission import refuse, unknown_sandbox
from fencepost.core.sandbox.hints import Hints
from fencepost.core.sandbox.inputs import CommandReceived
from fencepost.core.sandbox.state import Sandbox, SandboxShard, Step
from fencepost.core.steps import CheckpointCommand, is_digest

# What an entry takes beside the result and the list of changes in its receipt.
_COMMITTED_BYTES: Final = 2_048
_ENCODE = msgspec.json.Encoder().encode


def ask(
    state: SandboxShard, value: CommandReceived, command: CheckpointCommand
) -> list[e.SandboxEntry]:
    """Decides a client's wish for a checkpoint under the command's id."""
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return unknown_sandbox(state, value, "checkpoint")
    if sandbox.releasing or sandbox.gone:
        return refuse(value, "checkpoint", "sandbox_released", field="sandbox")
    newest = sandbox.checkpoint
    if value.id in sandbox.checkpoints_asked or (newest is not None and newest.id == value.id):
        return []
    if len(sandbox.checkpoints_asked) >= limits.CHECKPOINTS_ASKED_MAX:
        return refuse(value, "checkpoint", "overloaded", detail="too many were asked for already")
    return [
        e.CheckpointAsked(
            sandbox=sandbox.id, checkpoint=value.id, reason=command.reason[:200] or "asked"
        )
    ]


def due(sandbox: Sandbox, now_ms: int) -> list[e.SandboxEntry]:
    """Begins a checkpoint where one is asked for, waited for, or due by policy."""
    if sandbox.checkpointing is not None or not sandbox.whole:
        return []
    for checkpoint, reason in sandbox.checkpoints_asked.items():
        return [_begin(sandbox, checkpoint, reason)]
    if now_ms < sandbox.checkpoint_retry_ms:
        return []
    reason = _why(sandbox, now_ms)
    return [_begin(sandbox, f"auto-{sandbox.checkpoints + 1}", reason)] if reason else []


def _why(sandbox: Sandbox, now_ms: int) -> str:
    spec = sandbox.spec
    if any(sandbox.steps[name].spec.commit_after == "checkpoint" for name in sandbox.joined):
        return "commit_after"
    newest = sandbox.checkpoint
    if newest is not None and newest.namespace != sandbox.id and not newest.is_broken:
        return "origin"  # its chunks go when the origin goes, or takes a few more of its own
    if spec.checkpoint_every_steps and sandbox.owed >= spec.checkpoint_every_steps:
        return "every_steps"
    waited_ms = now_ms - sandbox.checkpoint_at_ms
    if spec.checkpoint_every_s and sandbox.owed and waited_ms >= spec.checkpoint_every_s * 1000:
        return "every_s"
    return ""


def _begin(sandbox: Sandbox, checkpoint: str, reason: str) -> e.SandboxEntry:
    return e.CheckpointingEntry(sandbox=sandbox.id, checkpoint=checkpoint, reason=reason)


def is_due_by_steps(sandbox: Sandbox) -> bool:
    """Whether the number of steps alone may call for a checkpoint now; cheap, asked often."""
    every = sandbox.spec.checkpoint_every_steps
    return every > 0 and sandbox.owed >= every and sandbox.checkpointing is None


def preempting(sandbox: Sandbox, value: facts.Preempting) -> list[e.SandboxEntry]:
    """A last chance: what was committed since the last checkpoint is saved before the disk goes."""
    if value.ref != sandbox.ref or sandbox.preempted == value.ref.instance or sandbox.releasing:
        return []
    entries: list[e.SandboxEntry] = [
        e.Preempted(
            sandbox=sandbox.id, instance=value.ref.instance, grace_ms=max(0, value.grace_ms)
        )
    ]
    unsaved = sandbox.owed > 0 or len(sandbox.fenced) > 0
    if unsaved and sandbox.whole and sandbox.checkpointing is None:
        checkpoint = f"auto-{sandbox.checkpoints + 1}"
        entries.append(_begin(sandbox, checkpoint, "preempting"))
    return entries


def is_quiet(sandbox: Sandbox) -> bool:
    """Whether all that was fenced has ended or joined, in the present session."""
    here = (sandbox.epoch, sandbox.session)
    return all(
        (step := sandbox.steps[name]).phase == "joined" and (step.epoch, step.session) == here
        for name in sandbox.fenced
    )


def checkpointed(sandbox: Sandbox, value: facts.Checkpointed) -> list[e.SandboxEntry]:
    """Decides a checkpoint that a gateway verified and stored."""
    taking = sandbox.checkpointing
    if taking is None or value.checkpoint != taking.id or not _is_current(sandbox, value):
        return []
    if not is_quiet(sandbox) or not sandbox.whole or value.nonce != sandbox.nonce:
        return []  # not what was ordered: the order went out once all was quiet
    if not is_digest(value.manifest) or value.journal_seq < sandbox.journal_seq:
        return [_failed(sandbox, taking.id, "not_whole", f"journal {value.journal_seq}")]
    entry = e.CheckpointedEntry(
        sandbox=sandbox.id,
        checkpoint=taking.id,
        manifest=value.manifest,
        epoch=value.epoch,
        journal_seq=value.journal_seq,
        line=owed.line_of(sandbox, value.journal_seq),
        reason=taking.reason,
        files=max(0, value.files),
        size_bytes=max(0, value.size_bytes),
        sent_bytes=max(0, value.sent_bytes),
    )
    return [entry, *_commits(sandbox)]


def _is_current(sandbox: Sandbox, value: facts.Checkpointed | facts.CheckpointFailed) -> bool:
    return sandbox.live and (value.epoch, value.session, value.gateway) == (
        sandbox.epoch,
        sandbox.session,
        sandbox.gateway,
    )


def _commits(sandbox: Sandbox) -> list[e.SandboxEntry]:
    """
    Commits what the checkpoint holds of the joined steps, all of it, in this very input.

    In a later one its disk might be gone: it would be applied again on what already has it. So what
    does not fit an input's entries is left where it is, in the `joined` entry.
    """
    entries: list[e.SandboxEntry] = []
    left = limits.JOINED_BYTES_MAX
    for name in sandbox.joined:
        step = sandbox.steps[name]
        assert step.receipt is not None
        receipt = step.receipt
        size = len(bytes(receipt.result)) + len(_ENCODE(receipt.changes))
        if size > _COMMITTED_BYTES and size > left:
            receipt = _cut(receipt)
        else:
            left -= size
        entries.append(committed(sandbox, name, step, receipt))
    return entries


def _cut(receipt: Receipt) -> Receipt:
    return msgspec.structs.replace(
        receipt,
        changes=[],
        result=msgspec.Raw(b'{"cut":"see the joined entry"}'),
        detail="cut: see the joined entry",
    )


def committed(
    sandbox: Sandbox, name: str, step: Step, receipt: Receipt, *, beat: int = 0
) -> e.Committed:
    """The entry that ends a step, with the line of the disk that was written."""
    line = owed.line_of(sandbox, owed.written_seq(receipt))
    return e.Committed(
        sandbox=sandbox.id,
        step=name,
        attempt=step.attempt,
        receipt=receipt,
        gateway=step.gateway or sandbox.gateway,
        line=0 if line == receipt.epoch else line,
        beat=beat,
    )


def beaten(sandbox: Sandbox, hints: Hints) -> list[e.SandboxEntry]:
    """Commits one joined step for which a heartbeat of this session came, at or above it."""
    lease = hints.leases.get(sandbox.id)
    if not sandbox.joined or lease is None or lease.session != sandbox.session:
        return []
    for name in sandbox.joined:
        step = sandbox.steps[name]
        receipt = step.receipt
        if (
            receipt is not None
            and step.spec.commit_after == "heartbeat"
            and sandbox.live
            and (step.epoch, step.session) == (sandbox.epoch, sandbox.session)
            and lease.journal_seq >= receipt.journal_seq
        ):
            return [committed(sandbox, name, step, receipt, beat=lease.journal_seq)]
    return []


def failed(sandbox: Sandbox, value: facts.CheckpointFailed) -> list[e.SandboxEntry]:
    taking = sandbox.checkpointing
    if taking is None or value.checkpoint != taking.id or not _is_current(sandbox, value):
        return []
    if value.reason == "busy":
        return []  # the order stands, and is made again by timer
    return [_failed(sandbox, taking.id, value.reason, value.detail)]


def abandon(sandbox: Sandbox) -> list[e.SandboxEntry]:
    """Gives up the checkpoint that is being taken: something else is to be fenced now."""
    taking = sandbox.checkpointing
    return [] if taking is None else [_failed(sandbox, taking.id, "abandoned", "")]


def overdue(sandbox: Sandbox, now_ms: int) -> list[e.SandboxEntry]:
    """Ends a hold that lasts too long; begins what has become due by time."""
    taking = sandbox.checkpointing
    if taking is None:
        return due(sandbox, now_ms)
    if sandbox.whole and now_ms - taking.since_ms > limits.CHECKPOINT_MS:
        return [_failed(sandbox, taking.id, "timeout", "")]
    return []


def _failed(sandbox: Sandbox, checkpoint: str, reason: str, detail: str) -> e.SandboxEntry:
    return e.CheckpointFailedEntry(
        sandbox=sandbox.id, checkpoint=checkpoint, reason=reason[:80], detail=detail[:300]
    )
