"""
Strays: what providers run under a sandbox's label, and nothing in its shard vouches for.

The latecomer of an ambiguous create is one, and what is left over after a restored ledger.

Rule 1: the current instance is vouched for, and so is anything else under its native id: its own
        next attachment tells what became of it.
Rule 2: what an open create id made is on its way to being assigned, or to being stopped by it.
Rule 3: a stop is owed for exactly the instance that was found, until it is gone. Nothing is created
        under a sandbox's id while a stray of it is owed.
"""

from __future__ import annotations

from fencepost.core import facts, ids, limits
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.state import Sandbox, SandboxShard, StrayState


def found(state: SandboxShard, value: facts.Stray) -> list[e.SandboxEntry]:
    """Decides a sweeper's proposal; a repeat, and what is vouched for, changes nothing."""
    if not ids.is_id(value.sandbox) or ids.shard_of(value.sandbox, state.shards) != state.shard:
        return []
    if _of(state, value.sandbox, value.ref) is not None:
        return []
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is not None and _is_vouched(sandbox, value):
        return []
    if sum(map(len, state.strays.values())) >= limits.STRAYS_PER_SHARD_MAX:
        return []  # proposed again in a later sweep
    return [
        e.StrayFound(
            sandbox=value.sandbox,
            ref=value.ref,
            create_id=value.create_id[:200],
            dag=value.dag[:64],
            acquisition=value.acquisition[:64],
            observes_gone=value.observes_gone,
        )
    ]


def latecomer(state: SandboxShard, value: facts.Assigned) -> list[e.SandboxEntry]:
    """Decides what came of a create that is settled: it runs, and nobody waits for it any more."""
    observes_gone = value.capabilities.observes_gone
    return found(
        state,
        facts.Stray(
            sandbox=value.sandbox,
            ref=value.ref,
            create_id=value.create_id,
            observes_gone=observes_gone,
        ),
    )


def is_about(state: SandboxShard, value: facts.Assigned | facts.StopAnswered | facts.Gone) -> bool:
    """Tells whether a fact is about a stray, and so not about the sandbox of that name."""
    return _of(state, value.sandbox, value.ref) is not None


def heard(state: SandboxShard, value: facts.StopAnswered | facts.Gone) -> list[e.SandboxEntry]:
    """Decides what a stop of a stray came to."""
    stray = _of(state, value.sandbox, value.ref)
    assert stray is not None, "asked about a stray that there is not"
    if isinstance(value, facts.Gone):
        evidence = "observed_gone"
    elif value.answer in ("accepted", "not_found") and not stray.observes_gone:
        evidence = "stop_accepted"
    else:
        return []  # the stop is owed still
    return [e.StrayGone(sandbox=value.sandbox, ref=value.ref, evidence=evidence)]


def _of(state: SandboxShard, sandbox: str, ref: facts.Ref) -> StrayState | None:
    return next((one for one in state.strays.get(sandbox, ()) if one.ref == ref), None)


def _is_vouched(sandbox: Sandbox, value: facts.Stray) -> bool:
    if sandbox.creates and (not value.create_id or value.create_id in sandbox.creates):
        return True
    return sandbox.ref is not None and _named(sandbox.ref) == _named(value.ref)


def _named(ref: facts.Ref) -> tuple[str, str, str]:
    return ref.authority, ref.provider, ref.native_id
