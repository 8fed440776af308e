"""
Sweeping: what of that which providers list, and shards say is held, is nobody's any more.

Rule 1: nothing is concluded from an incomplete listing, from one of another deployment, or from an
        absence: an expired registry looks like a quiet fleet.
Rule 2: only what was seen twice, `grace_ms` apart, is proposed: what is read at two places at two
        times may only look as if it did not fit.
Rule 3: a proposal is an input to the shard that knows, and the shard decides. So a sweeper that is
        wrong, late, paused or there twice costs a message.
Rule 4: a budget per tick, the longest seen first; a census proposes nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, TypeAlias

import msgspec
from fencepost.core import ids, limits
from fencepost.core.facts import Fact, Orphaned, Ref, Stray

LABEL_SANDBOX: Final = "sandbox"
LABEL_DEPLOYMENT: Final = "deployment"
LABEL_CREATE: Final = "create_id"
FINDINGS_MAX: Final = 500
"""Findings that a report lists one by one; all are counted."""

Why: TypeAlias = Literal[
    "vouched",  # a ledger names this very instance
    "being_released",  # a ledger names it, and its release is under way: its shard stops it
    "being_created",  # its create id is open: it is assigned, or stopped, by that
    "being_stopped",  # the shard found it to be a stray already, and stops it
    "other_deployment",  # labelled by another deployment: none of ours
    "unlabelled",  # no label that names a sandbox: never touched
    "held",  # the DAG has this acquisition
    "first_sight",  # does not fit, for the first time: looked at again
    "too_young",  # does not fit still, and the grace is not over
    "ledger_unknown",  # the shard did not answer with proof
    "holder_unknown",  # the DAG's shard did not answer with proof
    "not_asked",  # this tick has asked about enough DAGs
    "census",  # would be proposed; this tick only counts
    "budget",  # would be proposed; this tick has proposed enough
    "proposed",
]

SETTLED: Final[frozenset[Why]] = frozenset({"vouched", "being_released", "held"})
"""What is as it should be: counted, never listed."""


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """One thing that a provider lists, with the labels that it was made with."""

    ref: Ref
    labels: dict[str, str]


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """
    What one authority lists. `problem` says why it is not whole, "" where it is.

    `deployment` is the gateway's own: its provider labels with it and lists by it.
    """

    authority: str
    deployment: str
    items: list[Listed]
    observes_gone: bool = True
    problem: str = ""


class LedgerRow(msgspec.Struct, frozen=True, array_like=True):
    """What a shard says of one sandbox that is not gone. `holders`: DAG to acquisition."""

    sandbox: str
    ref: Ref | None
    creates: list[str]
    holders: dict[str, str]
    releasing: bool = False


class LedgerPage(msgspec.Struct, frozen=True, kw_only=True):
    """
    A page of a shard's sandboxes, in the order in which they came to be.

    `next` is where the following page begins, None after the last. `strays` are (sandbox, ref).
    """

    rows: list[LedgerRow]
    next: int | None = None
    strays: list[tuple[str, Ref]] = []


class Ledger:
    """All that the shards said, with proof, in one tick. `silent` names those that said nothing."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.rows: dict[str, LedgerRow] = {}
        self.strays: set[tuple[str, Ref]] = set()
        self.silent: set[int] = set()

    def take(self, page: LedgerPage) -> None:
        self.rows.update((row.sandbox, row) for row in page.rows)
        self.strays.update(page.strays)

    def knows_of(self, sandbox: str) -> bool:
        """Whether the shard of this sandbox said anything, be it that there is none."""
        return ids.shard_of(sandbox, self.shards) not in self.silent

    def live_at(self, authority: str) -> int:
        return sum(
            row.ref is not None and row.ref.authority == authority for row in self.rows.values()
        )


class Dag(msgspec.Struct, frozen=True, kw_only=True):
    """What a DAG's shard says of it, with proof. `whole`: `acquisitions` are all of them."""

    exists: bool
    acquisitions: frozenset[str] = frozenset()
    whole: bool = True


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How this tick sweeps. `budget` bounds its proposals, over everything that it looks at."""

    deployment: str
    grace_ms: int
    budget: int
    census: bool


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was looked at, and what follows from it. `age_ms` is since it first misfit."""

    what: Literal["stray", "holder"]
    sandbox: str
    why: Why
    age_ms: int = 0
    ref: Ref | None = None
    dag: str = ""
    acquisition: str = ""
    evidence: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """
    One tick over one authority, or over the holders ("ledger").

    `reached` counts what was looked at, `counts` the same by reason; `findings` lists what is not
    as it should be, as far as `FINDINGS_MAX`. `refused`: why nothing was concluded. `remaining`:
    proposals that were decided on and not sent, because the lead was lost.
    """

    authority: str
    at_ms: int
    mode: str
    reached: int
    counts: dict[str, int]
    findings: list[Finding]
    refused: str = ""
    remaining: int = 0


class Sightings:
    """Since when each misfit has been seen. Forgotten once it fits, or is there no more."""

    def __init__(self) -> None:
        self._since: dict[str, dict[tuple[str, ...], int]] = {}

    def of(self, authority: str) -> Mapping[tuple[str, ...], int]:
        return self._since.get(authority, {})

    def replace(self, authority: str, seen: dict[tuple[str, ...], int]) -> None:
        self._since[authority] = seen


class Result(msgspec.Struct, frozen=True):
    report: Report
    proposals: list[Fact]


class _Looked(msgspec.Struct, frozen=True):
    """A misfit, with what would be proposed about it."""

    key: tuple[str, ...]
    finding: Finding
    fact: Fact


def sweep_listing(
    policy: Policy, listing: Listing, ledger: Ledger, sightings: Sightings, *, now_ms: int
) -> Result:
    """
    Judges one authority's listing, which must have been read before the ledger.

    In that order whatever runs with a shard's knowledge was in its state before it was listed.
    A listing that names another authority's things is refused whole.
    """
    authority = listing.authority
    refused = listing.problem
    if not refused and listing.deployment != policy.deployment:
        refused = "other_deployment"
    if not refused and any(item.ref.authority != authority for item in listing.items):
        # Neither what this authority can show nor its sightings are those of what is listed.
        refused = "other_authority"
    if not refused and not listing.items and ledger.live_at(authority):
        refused = "empty_listing"
    if refused:
        return Result(_report(policy, authority, {}, [], now_ms=now_ms, refused=refused), [])
    settled: dict[str, int] = {}
    passed: list[Finding] = []
    looked: list[_Looked] = []
    for item in listing.items:
        why = _why_of_listed(policy, item, ledger)
        sandbox = item.labels.get(LABEL_SANDBOX, "")
        if why in SETTLED:
            settled[why] = settled.get(why, 0) + 1
        elif why != "proposed":
            passed.append(Finding(what="stray", sandbox=sandbox[:64], why=why, ref=item.ref))
        else:
            looked.append(_stray(item, sandbox, observes_gone=listing.observes_gone))
    chosen, facts = _choose(policy, authority, looked, sightings, now_ms)
    return Result(_report(policy, authority, settled, passed + chosen, now_ms=now_ms), facts)


def _why_of_listed(policy: Policy, item: Listed, ledger: Ledger) -> Why:
    if item.labels.get(LABEL_DEPLOYMENT, "") != policy.deployment:
        return "other_deployment"
    sandbox = item.labels.get(LABEL_SANDBOX, "")
    if not ids.is_id(sandbox):
        return "unlabelled"
    if not ledger.knows_of(sandbox):
        return "ledger_unknown"
    if (sandbox, item.ref) in ledger.strays:
        return "being_stopped"
    row = ledger.rows.get(sandbox)
    if row is None:
        return "proposed"
    if row.ref is not None and _named(row.ref) == _named(item.ref):
        return "being_released" if row.releasing else "vouched"
    create_id = item.labels.get(LABEL_CREATE, "")
    if row.creates and (not create_id or create_id in row.creates):
        return "being_created"
    return "proposed"


def _named(ref: Ref) -> tuple[str, str, str]:
    return ref.authority, ref.provider, ref.native_id


def _stray(item: Listed, sandbox: str, *, observes_gone: bool) -> _Looked:
    labels, ref = item.labels, item.ref
    return _Looked(
        ("stray", sandbox, ref.provider, ref.native_id, ref.instance),
        Finding(what="stray", sandbox=sandbox, why="proposed", ref=ref),
        Stray(
            sandbox=sandbox,
            ref=ref,
            create_id=labels.get(LABEL_CREATE, ""),
            dag=labels.get("dag", ""),
            acquisition=labels.get("acquisition", ""),
            observes_gone=observes_gone,
        ),
    )


LEDGER: Final = "ledger"
"""What stands for an authority in reports about holders."""


def sweep_holders(
    policy: Policy,
    ledger: Ledger,
    dags: Mapping[str, Dag | None],
    sightings: Sightings,
    *,
    now_ms: int,
) -> Result:
    """
    Judges every holder whose DAG was asked; None in `dags`: its shard did not say.

    A DAG that lives but does not have the acquisition does not hold the sandbox by it: what counts
    is this holding, not whether the DAG runs elsewhere (S-132).
    """
    settled: dict[str, int] = {}
    passed: list[Finding] = []
    looked: list[_Looked] = []
    unasked: dict[tuple[str, ...], int] = {}
    for row in ledger.rows.values():
        for dag, acquisition in row.holders.items():
            why, evidence = _why_of_holder(dag, acquisition, dags)
            key = ("holder", row.sandbox, dag, acquisition)
            finding = Finding(
                what="holder",
                sandbox=row.sandbox,
                why=why,
                dag=dag,
                acquisition=acquisition,
                evidence=evidence,
            )
            if why in SETTLED or why == "not_asked":
                settled[why] = settled.get(why, 0) + 1
                if why == "not_asked" and key in sightings.of(LEDGER):
                    unasked[key] = sightings.of(LEDGER)[key]
            elif why != "proposed":
                passed.append(finding)
            else:
                fact = Orphaned(
                    sandbox=row.sandbox, dag=dag, acquisition=acquisition, evidence=evidence
                )
                looked.append(_Looked(key, finding, fact))
    chosen, facts = _choose(policy, LEDGER, looked, sightings, now_ms)
    sightings.replace(LEDGER, {**unasked, **sightings.of(LEDGER)})
    return Result(_report(policy, LEDGER, settled, passed + chosen, now_ms=now_ms), facts)


def _why_of_holder(dag: str, acquisition: str, dags: Mapping[str, Dag | None]) -> tuple[Why, str]:
    if dag not in dags:
        return "not_asked", ""
    known = dags[dag]
    if known is None:
        return "holder_unknown", ""
    if not known.exists:
        return "proposed", "unknown_dag"
    if acquisition in known.acquisitions:
        return "held", ""
    return ("proposed", "not_acquired") if known.whole else ("holder_unknown", "")


def dags_to_ask(ledger: Ledger, sightings: Sightings, after: str, budget: int) -> list[str]:
    """
    Names the DAGs to ask about in this tick: those that did not fit before, then the next in order.

    `after` is the last one of the former tick, so that every DAG has its turn.
    """
    named = sorted({dag for row in ledger.rows.values() for dag in row.holders})
    doubted = {key[2] for key in sightings.of(LEDGER)}
    rotated = [dag for dag in named if dag > after] + [dag for dag in named if dag <= after]
    first = [dag for dag in rotated if dag in doubted]
    return (first + [dag for dag in rotated if dag not in doubted])[:budget]


def _choose(
    policy: Policy,
    authority: str,
    looked: Iterable[_Looked],
    sightings: Sightings,
    now_ms: int,
) -> tuple[list[Finding], list[Fact]]:
    """Ages the misfits, and proposes the oldest that are due, within the budget."""
    before, seen = sightings.of(authority), {}
    ordered = sorted(looked, key=lambda one: (before.get(one.key, now_ms), one.key))
    findings: list[Finding] = []
    proposals: list[Fact] = []
    for one in ordered:
        since_ms = seen[one.key] = before.get(one.key, now_ms)
        age_ms = max(0, now_ms - since_ms)
        why: Why = "proposed"
        if one.key not in before:
            why = "first_sight"
        elif age_ms < policy.grace_ms:
            why = "too_young"
        elif policy.census:
            why = "census"
        elif len(proposals) >= policy.budget:
            why = "budget"
        else:
            proposals.append(one.fact)
        findings.append(msgspec.structs.replace(one.finding, why=why, age_ms=age_ms))
    sightings.replace(authority, seen)
    return findings, proposals


def _report(
    policy: Policy,
    authority: str,
    settled: Mapping[str, int],
    findings: list[Finding],
    *,
    now_ms: int,
    refused: str = "",
) -> Report:
    counts = dict(settled)
    for finding in findings:
        counts[finding.why] = counts.get(finding.why, 0) + 1
    return Report(
        authority=authority,
        at_ms=now_ms,
        mode="census" if policy.census else "on",
        reached=sum(counts.values()),
        counts=counts,
        findings=findings[:FINDINGS_MAX],
        refused=refused,
    )


def is_due_before_forgotten(grace_ms: int, every_ms: int) -> bool:
    """
    Tells whether what is deferred is decided while it is still on record.

    A proposal lives in the stream of facts, and must be read there; a deferral that outlasts that
    would be forgotten before it is acted upon (S-160).
    """
    return grace_ms + 2 * every_ms < limits.COMMANDS_AGE_MS
