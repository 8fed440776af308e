"""
Holding: who keeps a sandbox, who let go of it, and what their DAGs are told.

Rule 1: the last holder's removal and `releasing` are one batch, so two last holders cannot both
        decline, and nobody can adopt what is being released.
Rule 2: a claim keeps a sandbox as a holder does, but owes no DAG an answer.
Rule 3: whoever let go is told until the sandbox is gone: the reason while it is not, then the
        evidence. What is told is an entry, so that it can be told again after a takeover.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from fencepost.core import facts, limits
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.hints import Hints
from fencepost.core.sandbox.state import Sandbox, SandboxShard
from fencepost.core.shard_messages import Hold, Unhold

OPERATOR: Final = "operator"

_STOP_REASONS: Final = {
    "accepted": "stop_accepted",
    "not_found": "stop_accepted",
    "refused": "stop_refused",
    "refused_other_instance": "stop_refused",
    "timeout": "stop_unreachable",
    "unreachable": "stop_unreachable",
    "unconfigured": "stop_unsupported",
    "unsupported": "stop_unsupported",
}


def hold(state: SandboxShard, hints: Hints, value: Hold, now_ms: int) -> list[e.SandboxEntry]:
    """Takes a DAG's intent: a fresh sandbox is created, an existing one adopted, or refused."""
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        if value.spec is None:
            return [_refused(value, "unknown_sandbox")]
        if value.sandbox in state.strays:
            return [_refused(value, "sandbox_exists")]  # made before this ledger knew it
        if len(state.sandboxes) >= limits.SANDBOXES_PER_SHARD_MAX:
            return [_refused(value, "overloaded")]
        made: list[e.SandboxEntry] = [
            e.Created(sandbox=value.sandbox, spec=value.spec, create_id=value.sandbox),
            e.HolderAdded(sandbox=value.sandbox, dag=value.dag, acquisition=value.acquisition),
        ]
        gateway = hints.choose_for_create(value.sandbox, value.spec.provider, now_ms)
        if gateway:
            made.append(
                e.Requested(sandbox=value.sandbox, create_id=value.sandbox, gateway=gateway)
            )
            made.append(_told(value.sandbox, value.dag, value.acquisition, "requested"))
        return made
    if value.dag in sandbox.holders:
        if sandbox.holders[value.dag] == value.acquisition:
            return []
        return [_refused(value, "already_held")]
    if value.spec is not None:
        return [_refused(value, "sandbox_exists")]
    if sandbox.releasing or sandbox.gone:
        return [_refused(value, "sandbox_released")]
    if len(sandbox.holders) >= limits.HOLDERS_PER_SANDBOX_MAX:
        return [_refused(value, "overloaded")]
    entries: list[e.SandboxEntry] = [
        e.HolderAdded(sandbox=sandbox.id, dag=value.dag, acquisition=value.acquisition)
    ]
    if sandbox.ref is not None:
        entries.append(_told(sandbox.id, value.dag, value.acquisition, "assigned", ref=sandbox.ref))
    if sandbox.live:
        entries.append(
            _told(sandbox.id, value.dag, value.acquisition, "ready", epoch=sandbox.epoch)
        )
    return entries


def unhold(state: SandboxShard, value: Unhold) -> list[e.SandboxEntry]:
    """Takes a DAG's release; whoever is last, with no claim left, makes it `releasing`."""
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return [
            _told(value.sandbox, value.dag, value.acquisition, "refused", reason="unknown_sandbox")
        ]
    if sandbox.holders.get(value.dag) != value.acquisition:
        if sandbox.debtors.get(value.dag) == value.acquisition:
            return []  # it was let go before; it is told of as things come
        return [_told(sandbox.id, value.dag, value.acquisition, "refused", reason="not_a_holder")]
    entries: list[e.SandboxEntry] = [
        e.HolderRemoved(sandbox=sandbox.id, dag=value.dag, acquisition=value.acquisition)
    ]
    if len(sandbox.holders) > 1:
        entries.append(
            _told(sandbox.id, value.dag, value.acquisition, "releasing", reason="shared")
        )
    elif sandbox.claims:
        entries.append(
            _told(sandbox.id, value.dag, value.acquisition, "releasing", reason="retained")
        )
    else:
        owed = {**sandbox.debtors, value.dag: value.acquisition}
        entries += begin_release(sandbox, "no_holder", owed.items())
    return entries


def orphaned(state: SandboxShard, value: facts.Orphaned) -> list[e.SandboxEntry]:
    """Lets go for a DAG that does not have this acquisition; nothing where it holds it not."""
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None or sandbox.holders.get(value.dag) != value.acquisition:
        return []
    unheld = Unhold(dag=value.dag, acquisition=value.acquisition, sandbox=value.sandbox)
    removed, *rest = unhold(state, unheld)
    reason = f"orphaned: {value.evidence}"[:200]
    return [msgspec.structs.replace(removed, reason=reason), *rest]


def unclaim(sandbox: Sandbox, claim: str) -> list[e.SandboxEntry]:
    """Ends a claim; where it was the last reason to keep the sandbox, releases it."""
    entries: list[e.SandboxEntry] = [e.Unclaimed(sandbox=sandbox.id, claim=claim)]
    if not sandbox.holders and set(sandbox.claims) == {claim}:
        entries += begin_release(sandbox, "no_claim", sandbox.debtors.items())
    return entries


def begin_release(
    sandbox: Sandbox, reason: str, debtors: Iterable[tuple[str, str]]
) -> list[e.SandboxEntry]:
    """`releasing`, durable before any provider is asked; what was never ordered is settled."""
    owed = list(debtors)
    entries: list[e.SandboxEntry] = [e.Releasing(sandbox=sandbox.id, reason=reason)]
    ordered = False
    for create_id, made in sandbox.creates.items():
        if made.gateway or made.failures or made.ambiguous:
            ordered = True
            continue
        entries.append(
            e.CreateFailedEntry(
                sandbox=sandbox.id, create_id=create_id, reason="never_requested", ambiguous=False
            )
        )
    if sandbox.ref is None and not ordered:
        evidence = "never_requested" if sandbox.epoch == 0 else "observed_gone"
        entries.append(e.GoneEntry(sandbox=sandbox.id, instance="", evidence=evidence))
        return entries + tell(sandbox, owed, "gone", evidence=evidence)
    return entries + tell(sandbox, owed, "releasing", reason="pending_stop")


def told_all(
    sandbox: Sandbox,
    phase: str,
    *,
    epoch: int = 0,
    ref: facts.Ref | None = None,
) -> list[e.SandboxEntry]:
    """Tells every holder how its acquisition stands, where it has not been told."""
    return [
        _told(sandbox.id, dag, acquisition, phase, epoch=epoch, ref=ref)
        for dag, acquisition in sandbox.holders.items()
        if phase == "assigned" or sandbox.told.get(dag) != phase
    ]


def told_gone(sandbox: Sandbox, evidence: str) -> list[e.SandboxEntry]:
    return tell(sandbox, sandbox.debtors.items(), "gone", evidence=evidence)


def told_stop(sandbox: Sandbox, value: facts.StopAnswered) -> list[e.SandboxEntry]:
    """Tells the debtors what the provider answered to a stop, where it is news."""
    reason = _STOP_REASONS[value.answer]
    evidence = f"{value.answer}: {value.detail}"[:300] if value.detail else value.answer
    return tell(sandbox, sandbox.debtors.items(), "releasing", reason=reason, evidence=evidence)


def tell(
    sandbox: Sandbox,
    debtors: Iterable[tuple[str, str]],
    phase: str,
    *,
    reason: str = "",
    evidence: str = "",
) -> list[e.SandboxEntry]:
    return [
        _told(sandbox.id, dag, acquisition, phase, reason=reason, evidence=evidence)
        for dag, acquisition in debtors
        if sandbox.told.get(dag) != f"{phase}/{reason}/{evidence}"
    ]


def _refused(value: Hold, reason: str) -> e.SandboxEntry:
    return _told(value.sandbox, value.dag, value.acquisition, "refused", reason=reason)


def _told(
    sandbox: str,
    dag: str,
    acquisition: str,
    phase: str,
    *,
    reason: str = "",
    evidence: str = "",
    epoch: int = 0,
    ref: facts.Ref | None = None,
) -> e.ToldEntry:
    return e.ToldEntry(
        sandbox=sandbox,
        dag=dag,
        acquisition=acquisition,
        phase=phase,  # type: ignore[arg-type]
        reason=reason,
        evidence=evidence,
        epoch=epoch,
        ref=ref,
    )
