"""What a shard says when it is asked: plain objects, made of the state alone."""

from __future__ import annotations

import itertools
from typing import Any, Final

from fencepost.core.errors import UnknownError
from fencepost.core.limits import NATS_PAYLOAD_BYTES_MAX
from fencepost.core.machine import Place
from fencepost.core.sandbox.state import Sandbox, SandboxShard
from fencepost.core.steps import SandboxSpec
from fencepost.core.sweeping import LedgerPage, LedgerRow

SWEEP_PAGE: Final = 1_000
_PAGE_BYTES: Final = NATS_PAYLOAD_BYTES_MAX // 2
_ROW_BYTES: Final = 400
_NAMED_BYTES: Final = 140


def view_step(state: SandboxShard, sandbox_id: str, name: str) -> dict[str, Any] | None:
    """
    The state of one step, or None where this shard knows none of that name.

    A final step's view carries `place`: where the entry that ended it stands, for whoever needs
    the stored receipt. None is a negative answer: to be given only after an accepted batch.
    Raises `UnknownError` about a sandbox that this shard has forgotten.
    """
    sandbox = state.sandboxes.get(sandbox_id)
    if sandbox is None:
        if sandbox_id in state.forgotten:
            raise UnknownError(f"{sandbox_id} was released long ago: its steps are in the ledger")
        return None
    step = sandbox.steps.get(name)
    if step is not None:
        public = {"parked": "pending", "indeterminate": "indeterminate"}.get(step.phase, "fenced")
        return {
            "sandbox": sandbox_id,
            "step": name,
            "state": public,
            "phase": step.phase,
            "attempt": step.attempt,
            "epoch": step.epoch,
            "tries": step.tries,
            "tool": step.spec.tool,
            "digest": step.spec.digest,
            "reason": step.reason,
            "waits_for": step.spec.commit_after if step.phase == "joined" else "",
            "deadline_at_ms": step.spec.deadline_at_ms,
        }
    finished = sandbox.finished.get(name)
    if finished is None:
        return None
    return {
        "sandbox": sandbox_id,
        "step": name,
        "state": finished.state,
        "attempt": finished.attempt,
        "digest": finished.digest,
        "place": {"after": finished.after, "index": finished.index},
    }


def place_of_final(state: SandboxShard, sandbox_id: str, name: str) -> Place | None:
    sandbox = state.sandboxes.get(sandbox_id)
    finished = sandbox.finished.get(name) if sandbox is not None else None
    return None if finished is None else Place(finished.after, finished.index)


def word_of(sandbox: Sandbox) -> str:
    """One word for where a sandbox is in its life."""
    if sandbox.gone:
        return "gone"
    if sandbox.releasing:
        return "releasing"
    if sandbox.condemned:
        return "condemned"
    if sandbox.ref is None:
        return "creating"
    if not sandbox.open:
        return "lost" if sandbox.epoch else "attaching"
    if not sandbox.session:
        return "attaching"
    return "live" if sandbox.recovering is None else "recovering"


def view_sandbox(state: SandboxShard, sandbox_id: str) -> dict[str, Any] | None:
    """One sandbox, or None. Of one released long ago only its last epoch and its end are known."""
    sandbox = state.sandboxes.get(sandbox_id)
    if sandbox is None and sandbox_id in state.forgotten:
        epoch = state.forgotten[sandbox_id]
        sandbox = Sandbox(id=sandbox_id, spec=SandboxSpec(), epoch=epoch, gone=True)
    if sandbox is None:
        return None
    ref = sandbox.ref
    return {
        "sandbox": sandbox.id,
        "state": word_of(sandbox),
        "epoch": sandbox.epoch,
        "open": sandbox.open,
        "session": sandbox.session,
        "gateway": sandbox.gateway,
        "provider": sandbox.spec.provider,
        "instance": sandbox.instance,
        "native_id": ref.native_id if ref else "",
        "authority": ref.authority if ref else "",
        "holders": dict(sandbox.holders),
        "claims": dict(sandbox.claims),
        "creates": list(sandbox.creates),
        "asked_of": next((c.gateway for c in reversed(sandbox.creates.values())), ""),
        "open_steps": len(sandbox.steps),
        "fenced": len(sandbox.fenced),
        "parked": len(sandbox.parked) + len(sandbox.requeued),
        "committed": sandbox.committed,
        "compensated": sandbox.compensated,
        "refused": sandbox.refused,
        "owed": sandbox.owed,
        "journal_seq": sandbox.journal_seq,
        "checkpoint": _view_checkpoint(sandbox),
        "checkpointing": sandbox.checkpointing.id if sandbox.checkpointing is not None else "",
        "recovering": _view_recovering(sandbox),
    }


def _view_checkpoint(sandbox: Sandbox) -> dict[str, Any] | None:
    """The newest stored checkpoint, which a later generation, or a fork, starts from."""
    checkpoint = sandbox.checkpoint
    if checkpoint is None:
        return None
    return {
        "checkpoint": checkpoint.id,
        "manifest": checkpoint.manifest,
        "namespace": checkpoint.namespace,
        "journal_seq": checkpoint.seq,
        "at_ms": sandbox.checkpoint_at_ms,
    }


def _view_recovering(sandbox: Sandbox) -> dict[str, Any] | None:
    recovering = sandbox.recovering
    if recovering is None:
        return None
    return {
        "phase": recovering.phase,
        "done": recovering.done,
        "of": sandbox.owed,
        "step": recovering.replay.step if recovering.replay is not None else "",
        "reason": recovering.reason,
        "detail": recovering.detail,
    }


def view_sandboxes(state: SandboxShard) -> list[dict[str, Any]]:
    return [view for name in state.sandboxes if (view := view_sandbox(state, name)) is not None]


def view_sweep(state: SandboxShard, after: int, limit: int = SWEEP_PAGE) -> LedgerPage:
    """
    What a sweeper compares with the outside: a page of the sandboxes that are not gone.

    A page looks at `limit` sandboxes, gone ones included, and no sandbox ever leaves the state: so
    a place in their order stays one, and a page costs the same however long the history is. It ends
    earlier where it would be too much for one message.
    """
    rows: list[LedgerRow] = []
    end, weight = after, 0
    for name in itertools.islice(state.sandboxes, after, after + limit):
        sandbox = state.sandboxes[name]
        if not sandbox.gone:
            weight += _ROW_BYTES + _NAMED_BYTES * (len(sandbox.holders) + len(sandbox.creates))
            if rows and weight > _PAGE_BYTES:
                break
            rows.append(
                LedgerRow(
                    sandbox.id,
                    sandbox.ref,
                    list(sandbox.creates),
                    dict(sandbox.holders),
                    sandbox.releasing,
                )
            )
        end += 1
    return LedgerPage(
        rows=rows,
        next=end if end < len(state.sandboxes) else None,
        strays=[(name, one.ref) for name, found in state.strays.items() for one in found]
        if after == 0
        else [],
    )
