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
from itertools import islice
from typing import Final

import msgspec
from fencepost.core import facts, limits
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import news
from fencepost.core.sandbox.admission import refuse, unknown_sandbox, used_before
from fencepost.core.sandbox.hints import Hints
from fencepost.core.sandbox.inputs import CommandReceived
from fencepost.core.sandbox.news import key_of
from fencepost.core.sandbox.state import News, Sandbox, SandboxShard
from fencepost.core.shard_messages import Hold, Unhold
from fencepost.core.steps import ClaimCommand, SandboxSpec

OPERATOR: Final = "operator"


def hold(state: SandboxShard, hints: Hints, value: Hold, now_ms: int) -> list[e.SandboxEntry]:
    """Takes a DAG's intent: a fresh sandbox is created, an existing one adopted, or refused."""
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        if value.spec is None:
            gone = value.sandbox in state.forgotten
            return [_refused(value, "sandbox_released" if gone else "unknown_sandbox")]
        if used_before(state, value.sandbox):
            return [_refused(value, "sandbox_exists")]
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
            made.append(requested(hints, value.sandbox, value.sandbox, gateway, value.spec))
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
    if (
        len(sandbox.holders) >= limits.HOLDERS_PER_SANDBOX_MAX
        or len(sandbox.debtors) >= limits.DEBTORS_PER_SANDBOX_MAX
    ):
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


def requested(
    hints: Hints, sandbox: str, create_id: str, gateway: str, spec: SandboxSpec
) -> e.Requested:
    """Names the session that is to create, and the authority at which it does."""
    return e.Requested(
        sandbox=sandbox,
        create_id=create_id,
        gateway=gateway,
        place=hints.place_of(gateway, spec.provider),
    )


def unhold(state: SandboxShard, value: Unhold) -> list[e.SandboxEntry]:
    """Takes a DAG's release; whoever is last, with no claim left, makes it `releasing`."""
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return [
            _told(value.sandbox, value.dag, value.acquisition, "refused", reason="unknown_sandbox")
        ]
    if sandbox.holders.get(value.dag) != value.acquisition:
        if key_of(value.dag, value.acquisition) in sandbox.debtors:
            return []  # it was let go before; it is told of as things come
        return [_told(sandbox.id, value.dag, value.acquisition, "refused", reason="not_a_holder")]
    entries: list[e.SandboxEntry] = [
        e.HolderRemoved(sandbox=sandbox.id, dag=value.dag, acquisition=value.acquisition)
    ]
    if len(sandbox.holders) > 1 or sandbox.claims:
        reason = "shared" if len(sandbox.holders) > 1 else "retained"
        return [*entries, _told(sandbox.id, value.dag, value.acquisition, "releasing", reason)]
    owed = [(value.dag, value.acquisition), *sandbox.debtors.values()]
    return entries + begin_release(sandbox, "no_holder", owed)


def claim(
    state: SandboxShard, value: CommandReceived, command: ClaimCommand
) -> list[e.SandboxEntry]:
    """Adds a reason to keep a sandbox; the command's id is the claim's, and is used once."""
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return unknown_sandbox(state, value, "claim")
    if value.id in sandbox.claims and value.id != OPERATOR:
        return []
    problem = ""
    if value.id == OPERATOR:
        problem, field, detail = "reserved", "id", "this claim is made by `create` alone"
    elif sandbox.releasing or sandbox.gone:
        problem, field, detail = "sandbox_released", "sandbox", "it is being released, or gone"
    elif len(sandbox.claims) >= limits.CLAIMS_PER_SANDBOX_MAX:
        problem, field, detail = "overloaded", "", "too many claims keep this sandbox"
    if problem:
        return refuse(value, "claim", problem, field=field, detail=detail)
    return [e.Claimed(sandbox=sandbox.id, claim=value.id, reason=command.reason[:200])]


def end_claim(state: SandboxShard, value: CommandReceived) -> list[e.SandboxEntry]:
    """Takes back a claim by its id; the sandbox is released where nothing else keeps it."""
    sandbox = state.sandboxes.get(value.sandbox)
    if sandbox is None:
        return unknown_sandbox(state, value, "unclaim")
    if value.id == OPERATOR:
        detail = "an operator's claim is ended by `release`"
        return refuse(value, "unclaim", "reserved", field="id", detail=detail)
    if value.id in sandbox.claims:
        return unclaim(sandbox, value.id)
    if sandbox.gone or sandbox.releasing:
        return []
    detail = "no claim of this id keeps it"
    return refuse(value, "unclaim", "not_claimed", field="id", detail=detail)


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
        entries += begin_release(sandbox, "no_claim", sandbox.debtors.values())
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
        evidence = settled_evidence(sandbox, "never_requested")
        entries.append(e.GoneEntry(sandbox=sandbox.id, instance="", evidence=evidence))
        return entries + tell(sandbox, owed, news.gone(evidence))
    return entries + tell(sandbox, owed, news.PENDING)


def settled_evidence(sandbox: Sandbox, never: str) -> str:
    """
    What it means that nothing runs and nothing is on its way: there never was, or it is lost.

    How the lost one ended is not in the state any more; a provider that observes nothing can only
    have accepted its stop.
    """
    if sandbox.capabilities is None:
        return never
    return "observed_gone" if sandbox.capabilities.observes_gone else "stop_accepted"


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
        if phase == "assigned" or sandbox.told.get(key_of(dag, acquisition)) != phase
    ]


def told_gone(sandbox: Sandbox, evidence: str) -> list[e.SandboxEntry]:
    return tell(sandbox, sandbox.debtors.values(), news.gone(evidence))


def told_stop(sandbox: Sandbox, value: facts.StopAnswered) -> list[e.SandboxEntry]:
    """Tells the debtors what the provider answered to a stop, where it is news."""
    if not sandbox.releasing:
        return []
    said = news.answered(value.answer, value.detail[:300])
    return tell(sandbox, sandbox.debtors.values(), said)


def told_ambiguous(sandbox: Sandbox) -> list[e.SandboxEntry]:
    return tell(sandbox, sandbox.debtors.values(), news.AMBIGUOUS)


def told_late(sandbox: Sandbox, ref: facts.Ref) -> list[e.SandboxEntry]:
    """Tells the debtors that what they let go of was made after all, and is to be stopped."""
    owed = list(islice(sandbox.debtors.values(), limits.TOLD_PER_TURN))
    named = [_told(sandbox.id, dag, acq, "assigned", ref=ref) for dag, acq in owed]
    return named + [_say(sandbox, dag, acq, news.PENDING) for dag, acq in owed]


def late_news(sandbox: Sandbox) -> list[e.SandboxEntry]:
    """Tells some of those who have not heard the news yet; time asks again for the others."""
    if sandbox.news is None or not sandbox.untold:
        return []
    found = (sandbox.debtors[key] for key in sandbox.untold)
    return tell(sandbox, found, sandbox.news)


def tell(sandbox: Sandbox, debtors: Iterable[tuple[str, str]], what: News) -> list[e.SandboxEntry]:
    """Tells the first of those who have not heard it; the others are told by `late_news`."""
    said = news.heard(what.phase, what.reason, what.evidence)
    deaf = (d for d in debtors if sandbox.told.get(key_of(*d)) != said)
    return [_say(sandbox, *debtor, what) for debtor in islice(deaf, limits.TOLD_PER_TURN)]


def _say(sandbox: Sandbox, dag: str, acquisition: str, what: News) -> e.SandboxEntry:
    return _told(sandbox.id, dag, acquisition, what.phase, what.reason, evidence=what.evidence)


def _refused(value: Hold, reason: str) -> e.SandboxEntry:
    return _told(value.sandbox, value.dag, value.acquisition, "refused", reason=reason)


def _told(
    sandbox: str,
    dag: str,
    acquisition: str,
    phase: str,
    reason: str = "",
    *,
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
