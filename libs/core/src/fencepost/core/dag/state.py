"""The state of one dag shard: a fold of its entries. What is settled leaves counters only."""

from __future__ import annotations

import msgspec
from fencepost.core.dag.entries import Phase, Verdict
from fencepost.core.facts import Ref


class Acquisition(msgspec.Struct, kw_only=True):
    """One attempt to get a sandbox into a slot, from intent to gone."""

    id: str
    slot: str
    sandbox: str
    adopted: bool
    phase: Phase = "intent"
    ref: Ref | None = None
    epoch: int = 0
    reason: str = ""
    evidence: str = ""
    since_ms: int = 0


class Dag(msgspec.Struct, kw_only=True):
    """
    `slots` maps a slot's name to the acquisition that it names now (a value, never an attribute).

    `held`: what is not being released, acquisition by sandbox; a close takes from it until it is
    empty. `cancels`: asked and not yet answered, with the ledger time by which they are. `told` is
    the last verdict made public, `evidence` the weakest that anything of it is gone.
    """

    id: str
    nodes: dict[str, str] = {}
    acquisitions: dict[str, Acquisition] = {}
    slots: dict[str, str] = {}
    held: dict[str, str] = {}
    closed: bool = False
    close_reason: str = ""
    finished: str = ""
    cancels: dict[str, int] = {}
    answered: dict[str, None] = {}
    cancelled_nodes: int = 0
    held_ever: int = 0
    gone: int = 0
    abandoned: int = 0
    evidence: str = ""
    told: str = ""
    opened_at_ms: int = 0
    retry_of: str = ""


class Past(msgspec.Struct, array_like=True):
    """What stays of a DAG that ended long ago: enough to answer another cancel by evidence."""

    verdict: Verdict
    evidence: str
    held_ever: int
    gone: int
    abandoned: int
    cancelled_nodes: int
    opened_at_ms: int


class DagShard(msgspec.Struct, kw_only=True):
    """
    `busy` names the closed DAGs with something outstanding or to answer, `ended` those with a last
    verdict, in order. What is older than both windows is in the ledger and its projection only;
    `past_floor_ms` is the youngest ULID among the forgotten.
    """

    shard: int
    shards: int
    term: int = 0
    owner: str = ""
    dags: dict[str, Dag] = {}
    busy: dict[str, None] = {}
    ended: dict[str, None] = {}
    past: dict[str, Past] = {}
    past_floor_ms: int = 0
    poisoned: int = 0
