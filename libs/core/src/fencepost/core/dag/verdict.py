"""
The verdict on a DAG: a pure function of its state.

Rule 1: never held anything, and nothing on its way: `nothing_held`.
Rule 2: everything that it held is gone, by evidence: `confirmed`.
Rule 3: anything outstanding, unknown or on its way: `unconfirmed`, with the gravest reason.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fencepost.core.dag.entries import Verdict
from fencepost.core.dag.state import Acquisition, Dag

# Gravest first: what a person should look at before the rest.
REASONS: Final = (
    "create_ambiguous",
    "stop_refused",
    "stop_unreachable",
    "stop_unsupported",
    "observe_unknown",
    "pending_shard",
    "acquiring",
    "pending_stop",
    "stop_accepted",
    "shared",
    "retained",
    "held",
)


_RANK: Final = {reason: rank for rank, reason in enumerate(REASONS)}

SETTLED_BY_OTHERS: Final = frozenset({"shared", "retained", "held"})
"""Where no reason is graver than these, waiting changes nothing: others decide when it ends."""

WEAK_EVIDENCE: Final = frozenset({"stop_accepted"})
"""All that a provider can show which observes nothing; other evidence does not outshine it."""


class Judgement(NamedTuple):
    verdict: Verdict
    reason: str
    evidence: str
    outstanding: int


def reason_of(acquisition: Acquisition) -> str:
    """Why one acquisition is outstanding."""
    if acquisition.phase == "releasing":
        return acquisition.reason or "pending_shard"
    if acquisition.phase == "ready":
        return "held"
    return "acquiring"


def judge(dag: Dag) -> Judgement:
    """Judges; only what an accepted batch carries may be told outside."""
    if dag.acquisitions:
        worst = min(dag.acquisitions.values(), key=lambda a: _rank(reason_of(a)))
        return Judgement("unconfirmed", reason_of(worst), worst.evidence, len(dag.acquisitions))
    if dag.held_ever == 0:
        return Judgement("nothing_held", "", "", 0)
    return Judgement("confirmed", "", dag.evidence, 0)


def _rank(reason: str) -> int:
    return _RANK.get(reason, 0)
