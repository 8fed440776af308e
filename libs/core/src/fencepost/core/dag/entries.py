"""The entries of the dag family. A tag is a name in the ledger for ever."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from fencepost.core.facts import Ref
from fencepost.core.machine import TermOpened as TermOpened  # noqa: PLC0414 - every family has it
from fencepost.core.steps import SandboxSpec

Verdict: TypeAlias = Literal["confirmed", "unconfirmed", "nothing_held"]
Phase: TypeAlias = Literal[
    "intent", "requested", "assigned", "ready", "releasing", "gone", "abandoned"
]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    dag: str


class Refused(_Entry, frozen=True, kw_only=True, tag="refused"):
    command: str
    id: str
    reason: str
    field: str = ""
    detail: str = ""


class Opened(_Entry, frozen=True, kw_only=True, tag="opened"):
    """`nodes` are the author's own names, values only. `retry_of`: the DAG that this retries."""

    nodes: list[str] = []
    retry_of: str = ""


class NodeStarted(_Entry, frozen=True, kw_only=True, tag="node_started"):
    node: str


class NodeFinished(_Entry, frozen=True, kw_only=True, tag="node_finished"):
    node: str
    status: str


class Intended(_Entry, frozen=True, kw_only=True, tag="intended"):
    """
    Before anybody is asked. `sandbox` is the acquisition's own id for a fresh one.

    `spec` None: an adoption of a sandbox that exists.
    """

    acquisition: str
    slot: str
    sandbox: str
    spec: SandboxSpec | None = None


class Progressed(_Entry, frozen=True, kw_only=True, tag="progressed"):
    """What the sandbox's shard said of an acquisition on its way: requested or assigned."""

    acquisition: str
    phase: Phase
    ref: Ref | None = None
    detail: str = ""


class Ready(_Entry, frozen=True, kw_only=True, tag="ready"):
    acquisition: str
    epoch: int


class Moved(_Entry, frozen=True, kw_only=True, tag="moved"):
    """A slot names another acquisition from here on, in one append; the old one is released."""

    slot: str
    old: str
    new: str


class Closed(_Entry, frozen=True, kw_only=True, tag="closed"):
    """The barrier. `cancel` is the cancel command's id, "" for a DAG that finished."""

    reason: str
    cancel: str = ""
    answer_by_ms: int = 0


class CancelAsked(_Entry, frozen=True, kw_only=True, tag="cancel_asked"):
    """A cancel of a DAG that is closed already: answered from the same state."""

    cancel: str
    answer_by_ms: int


class ReleaseBegun(_Entry, frozen=True, kw_only=True, tag="release_begun"):
    acquisition: str
    sandbox: str
    reason: str


class ReleaseHeard(_Entry, frozen=True, kw_only=True, tag="release_heard"):
    """What the sandbox's shard said of a release that is not settled: evidence, with its reason."""

    acquisition: str
    reason: str
    evidence: str = ""


class ReleaseSettled(_Entry, frozen=True, kw_only=True, tag="release_settled"):
    """Gone, by evidence. The acquisition leaves the state; counters stay."""

    acquisition: str
    sandbox: str
    slot: str
    evidence: str


class Abandoned(_Entry, frozen=True, kw_only=True, tag="abandoned"):
    """It never came to hold anything, by evidence."""

    acquisition: str
    reason: str


class Finished(_Entry, frozen=True, kw_only=True, tag="finished"):
    status: str


class Answered(_Entry, frozen=True, kw_only=True, tag="answered"):
    """
    A verdict that was given: to a cancel (`cancel`), or to subscribers when it changed ("").

    Only an accepted batch that carries this entry may say `confirmed` or `nothing_held`.
    """

    verdict: Verdict
    reason: str = ""
    evidence: str = ""
    cancel: str = ""
    outstanding: int = 0
    cancelled: int = 0


DagEntry: TypeAlias = (
    TermOpened
    | Refused
    | Opened
    | NodeStarted
    | NodeFinished
    | Intended
    | Progressed
    | Ready
    | Moved
    | Closed
    | CancelAsked
    | ReleaseBegun
    | ReleaseHeard
    | ReleaseSettled
    | Abandoned
    | Finished
    | Answered
)
