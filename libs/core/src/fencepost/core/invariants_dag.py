"""
The dag half of the auditor: what the entries of a dag shard alone can show.

As in `invariants`, nothing is shared with the deciding code but the shapes of the entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
from fencepost.core.dag import entries as d

_BEFORE: Final = {
    "requested": ("intent",),
    "assigned": ("intent", "requested", "assigned", "ready"),
    "ready": ("assigned", "ready"),
}


class Need(Protocol):
    def __call__(self, holds: bool, invariant: str, detail: str, /) -> bool: ...


class _Acquisition(msgspec.Struct):
    slot: str
    sandbox: str
    phase: str = "intent"
    named: bool = False


class _Dag(msgspec.Struct):
    """`held` counts acquisitions that were named by a provider, or were there when settled."""

    closed: bool = False
    finished: bool = False
    held: int = 0
    ended: bool = False
    acquisitions: dict[str, _Acquisition] = {}
    slots: dict[str, str] = {}
    cancels: set[str] = set()


class DagJudge:
    """Takes the entries of one dag shard in order; `need` records what does not hold."""

    def __init__(self, need: Need) -> None:
        self._need = need
        self._dags: dict[str, _Dag] = {}

    @property
    def count(self) -> int:
        return len(self._dags)

    def take(self, entry: Any) -> None:
        if isinstance(entry, d.Refused):
            return
        judge = _JUDGES.get(type(entry))
        if not self._need(judge is not None, "I8", f"an entry of kind {type(entry).__name__}"):
            return
        assert judge is not None
        dag = self._dags.get(entry.dag)
        if dag is None:
            dag = self._dags[entry.dag] = _Dag()
            self._need(isinstance(entry, d.Opened), "S-15", f"{entry.dag} was never opened")
        else:
            self._need(not isinstance(entry, d.Opened), "S-15", f"{entry.dag} opened twice")
        judge(self, dag, entry)

    def _nothing(self, _dag: _Dag, _entry: Any) -> None:
        """Says nothing that could be judged."""

    def _intended(self, dag: _Dag, entry: d.Intended) -> None:
        name = entry.acquisition
        self._need(not dag.closed, "I4", f"{name} intended behind the barrier of {entry.dag}")
        self._need(name not in dag.acquisitions, "S-15", f"{name} intended twice")
        twice = any(
            one.sandbox == entry.sandbox and one.phase != "releasing"
            for one in dag.acquisitions.values()
        )
        self._need(not twice, "S-15", f"{entry.dag} holds {entry.sandbox} twice")
        dag.acquisitions[name] = _Acquisition(entry.slot, entry.sandbox)
        dag.slots.setdefault(entry.slot, name)

    def _known(self, dag: _Dag, entry: Any) -> _Acquisition:
        name = entry.acquisition
        known = dag.acquisitions.get(name)
        self._need(known is not None, "S-15", f"{name} is not open, then {type(entry).__name__}")
        return known or _Acquisition("", "")

    def _goes_on(self, one: _Acquisition, name: str, phase: str) -> None:
        if one.phase == "releasing":
            return
        legal = one.phase in _BEFORE[phase]
        self._need(legal, "S-15", f"{name}: {one.phase}, then {phase}")
        one.phase = phase

    def _progressed(self, dag: _Dag, entry: d.Progressed) -> None:
        one = self._known(dag, entry)
        self._goes_on(one, entry.acquisition, entry.phase)
        if entry.ref is not None and not one.named:
            one.named = True
            dag.held += 1

    def _ready(self, dag: _Dag, entry: d.Ready) -> None:
        self._goes_on(self._known(dag, entry), entry.acquisition, "ready")

    def _moved(self, dag: _Dag, entry: d.Moved) -> None:
        named = dag.slots.get(entry.slot)
        self._need(named == entry.old, "S-15", f"a slot of {entry.dag} named {named}, not the old")
        self._need(entry.new in dag.acquisitions, "S-15", f"moved to {entry.new}, not intended")
        dag.slots[entry.slot] = entry.new

    def _closed(self, dag: _Dag, entry: d.Closed) -> None:
        self._need(not dag.closed, "S-15", f"{entry.dag} closed twice")
        dag.closed = True
        if entry.cancel:
            dag.cancels.add(entry.cancel)

    def _cancel_asked(self, dag: _Dag, entry: d.CancelAsked) -> None:
        self._need(dag.closed, "S-15", f"{entry.dag}: another cancel before the first")
        dag.cancels.add(entry.cancel)

    def _release_begun(self, dag: _Dag, entry: d.ReleaseBegun) -> None:
        one = self._known(dag, entry)
        self._need(one.phase != "releasing", "S-15", f"{entry.acquisition} released twice")
        self._need(one.sandbox in ("", entry.sandbox), "I5", f"released as {entry.sandbox}")
        one.phase = "releasing"

    def _release_heard(self, dag: _Dag, entry: d.ReleaseHeard) -> None:
        one = self._known(dag, entry)
        self._need(one.phase == "releasing", "S-15", f"{entry.acquisition} is not being released")

    def _settled(self, dag: _Dag, entry: d.ReleaseSettled) -> None:
        self._need(entry.evidence != "", "I7", f"{entry.acquisition} settled without evidence")
        one = self._known(dag, entry)
        dag.held += not one.named
        self._leaves(dag, entry.acquisition)

    def _abandoned(self, dag: _Dag, entry: d.Abandoned) -> None:
        one = self._known(dag, entry)
        never = entry.reason.startswith("never_")
        self._need(
            not (never and one.named), "I4", f"{entry.acquisition} was there, {entry.reason}"
        )
        self._leaves(dag, entry.acquisition)

    def _leaves(self, dag: _Dag, name: str) -> None:
        one = dag.acquisitions.pop(name, None)
        if one is not None and dag.slots.get(one.slot) == name:
            del dag.slots[one.slot]

    def _finished(self, dag: _Dag, entry: d.Finished) -> None:
        self._need(not dag.finished, "S-15", f"{entry.dag} finished twice")
        dag.finished = True

    def _answered(self, dag: _Dag, entry: d.Answered) -> None:
        self._need(dag.closed, "I4", f"{entry.dag} answered before it was closed")
        settled = "confirmed" if dag.held else "nothing_held"
        allowed = "unconfirmed" if dag.acquisitions else settled
        self._need(
            entry.verdict == allowed,
            "I4",
            f"{entry.dag} answered {entry.verdict}, its entries show {allowed}",
        )
        if entry.cancel and not dag.ended:
            asked = entry.cancel in dag.cancels
            self._need(asked, "S-15", f"{entry.dag}: {entry.cancel} answered, not asked")
        dag.cancels.discard(entry.cancel)
        dag.ended = not dag.acquisitions


_JUDGES: dict[type, Callable[[DagJudge, _Dag, Any], None]] = {
    d.Opened: DagJudge._nothing,
    d.NodeStarted: DagJudge._nothing,
    d.NodeFinished: DagJudge._nothing,
    d.Intended: DagJudge._intended,
    d.Progressed: DagJudge._progressed,
    d.Ready: DagJudge._ready,
    d.Moved: DagJudge._moved,
    d.Closed: DagJudge._closed,
    d.CancelAsked: DagJudge._cancel_asked,
    d.ReleaseBegun: DagJudge._release_begun,
    d.ReleaseHeard: DagJudge._release_heard,
    d.ReleaseSettled: DagJudge._settled,
    d.Abandoned: DagJudge._abandoned,
    d.Finished: DagJudge._finished,
    d.Answered: DagJudge._answered,
}
