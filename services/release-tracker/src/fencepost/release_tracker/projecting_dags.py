"""
What each entry of a dag shard does to the rows of the projection. Only computes; see `projecting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from fencepost.core.dag import entries as e
from fencepost.release_tracker.dag_rows import (
    AcquisitionRow,
    DagRefusalRow,
    DagRow,
    NodeRow,
    VerdictRow,
)
from fencepost.release_tracker.rows import name, number, text
from fencepost.release_tracker.working import Group


class DagNames:
    """The keys of all rows that some entries may read."""

    def __init__(self) -> None:
        self.dags: set[str] = set()
        self.whole: set[str] = set()
        self.nodes: set[tuple[str, bytes]] = set()
        self.acquisitions: set[tuple[str, str]] = set()

    def add(self, entries: Iterable[Any]) -> None:
        for entry in entries:
            dag = name(getattr(entry, "dag", ""))
            if not dag:
                continue
            self.dags.add(dag)
            match entry:
                case e.Closed():
                    self.whole.add(dag)
                case e.NodeStarted() | e.NodeFinished():
                    self.nodes.add((dag, key_of(entry.node)))
                case _:
                    acquisition = getattr(entry, "acquisition", "")
                    if acquisition:
                        self.acquisitions.add((dag, name(acquisition)))

    def wanted(self) -> Iterable[tuple[type, str, tuple[list[Any], ...]]]:
        """Rows to be read: their kind, the `by` of `store`'s table of queries, its arguments."""
        if self.dags:
            yield DagRow, "dag", (list(self.dags),)
        if self.whole:
            yield NodeRow, "dag", (list(self.whole),)
        if self.nodes:
            yield NodeRow, "key", _columns(self.nodes)
        if self.acquisitions:
            yield AcquisitionRow, "key", _columns(self.acquisitions)


def _columns(keys: Iterable[tuple[str, Any]]) -> tuple[list[Any], list[Any]]:
    pairs = list(keys)
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def key_of(node: str) -> bytes:
    return node.encode(errors="replace")


class DagWorking(Group):
    SHARD = "dag shard"

    def __init__(self) -> None:
        super().__init__()
        self.dags: dict[str, DagRow] = {}
        self.nodes: dict[str, dict[bytes, NodeRow]] = {}
        self.acquisitions: dict[tuple[str, str], AcquisitionRow] = {}

    def take(self, row: Any) -> None:
        """Takes a row as it stands in the table."""
        match row:
            case DagRow():
                self.dags[row.dag] = row
            case NodeRow():
                self.nodes.setdefault(row.dag, {})[row.key] = row
            case AcquisitionRow():
                self.acquisitions[row.dag, row.acquisition] = row
            case _:
                raise AssertionError("verdicts and refusals are never read back")

    def apply_one(self, entry: Any) -> None:
        _BY_KIND[type(entry)](self, entry)

    def _dag(self, entry: Any) -> DagRow:
        row = self.dags.get(name(entry.dag))
        if row is None:
            raise self._hole(f"DAG {entry.dag}")
        row.changed_at_ms, row.changed_seq = self._now_ms, self._seq
        return self._change(row)

    def _node(self, entry: Any) -> NodeRow:
        row = self.nodes.get(name(entry.dag), {}).get(key_of(entry.node))
        if row is None:
            raise self._hole(f"a node of DAG {entry.dag}")
        return self._change(row)

    def _acquisition(self, entry: Any) -> AcquisitionRow:
        row = self.acquisitions.get((name(entry.dag), name(entry.acquisition)))
        if row is None:
            raise self._hole(f"acquisition {entry.acquisition} of DAG {entry.dag}")
        self._dag(entry)
        return self._change(row)

    # --- DAGs and nodes -------------------------------------------------------------------

    def term_opened(self, entry: e.TermOpened) -> None:
        """Terms are the ledger's own affair; the position alone moves."""

    def opened(self, entry: e.Opened) -> None:
        row = DagRow(
            dag=name(entry.dag),
            shard=self._shard,
            retry_of=name(entry.retry_of),
            nodes=len(entry.nodes),
            opened_at_ms=self._now_ms,
            opened_seq=self._seq,
            changed_at_ms=self._now_ms,
            changed_seq=self._seq,
        )
        self.dags[row.dag] = self._change(row)
        for place, node in enumerate(entry.nodes):
            made = NodeRow(
                dag=row.dag, key=key_of(node), place=place, node=text(node), status="waiting"
            )
            self.nodes.setdefault(row.dag, {})[made.key] = self._change(made)

    def node_started(self, entry: e.NodeStarted) -> None:
        self._dag(entry)
        row = self._node(entry)
        row.status, row.started_at_ms = "running", self._now_ms

    def node_finished(self, entry: e.NodeFinished) -> None:
        self._dag(entry)
        row = self._node(entry)
        row.status, row.ended_at_ms = text(entry.status), self._now_ms

    def closed(self, entry: e.Closed) -> None:
        row = self._dag(entry)
        row.is_closed, row.close_reason = True, text(entry.reason)
        row.closed_at_ms = self._now_ms
        if not entry.cancel:
            return
        for node in self.nodes.get(row.dag, {}).values():
            if node.status in ("waiting", "running"):
                node.status, node.ended_at_ms = "cancelled", self._now_ms
                row.nodes_cancelled += 1
                self._change(node)

    def cancel_asked(self, entry: e.CancelAsked) -> None:
        self._dag(entry)

    def finished(self, entry: e.Finished) -> None:
        self._dag(entry).finished = text(entry.status)

    def answered(self, entry: e.Answered) -> None:
        row = self._dag(entry)
        row.released, row.reason = entry.verdict, text(entry.reason)
        row.evidence, row.outstanding = text(entry.evidence), number(entry.outstanding)
        row.answered_at_ms = self._now_ms
        row.verdicts += 1
        self._change(
            VerdictRow(
                dag=row.dag,
                seq=self._seq,
                index=self._index,
                released=row.released,
                reason=row.reason,
                evidence=row.evidence,
                cancel=name(entry.cancel),
                outstanding=row.outstanding,
                cancelled=number(entry.cancelled),
                at_ms=self._now_ms,
            )
        )

    # --- acquisitions ---------------------------------------------------------------------

    def intended(self, entry: e.Intended) -> None:
        row = AcquisitionRow(
            dag=self._dag(entry).dag,
            acquisition=name(entry.acquisition),
            slot=text(entry.slot),
            sandbox=name(entry.sandbox),
            is_adopted=entry.spec is None,
            intended_at_ms=self._now_ms,
            intended_seq=self._seq,
            since_ms=self._now_ms,
        )
        self.acquisitions[row.dag, row.acquisition] = self._change(row)

    def progressed(self, entry: e.Progressed) -> None:
        row = self._acquisition(entry)
        if entry.ref is not None:
            if not row.has_ref:
                self._dag(entry).held_ever += 1
            row.has_ref = True
            row.authority, row.native_id = text(entry.ref.authority), text(entry.ref.native_id)
            row.instance = text(entry.ref.instance)
        if row.phase != "releasing":
            row.phase, row.since_ms = entry.phase, self._now_ms

    def ready(self, entry: e.Ready) -> None:
        row = self._acquisition(entry)
        row.epoch = number(entry.epoch)
        if row.phase != "releasing":
            row.phase, row.since_ms = "ready", self._now_ms

    def moved(self, entry: e.Moved) -> None:
        self._dag(entry)

    def release_begun(self, entry: e.ReleaseBegun) -> None:
        row = self._acquisition(entry)
        row.phase, row.reason, row.since_ms = "releasing", "", self._now_ms

    def release_heard(self, entry: e.ReleaseHeard) -> None:
        row = self._acquisition(entry)
        row.reason, row.evidence = text(entry.reason), text(entry.evidence)

    def release_settled(self, entry: e.ReleaseSettled) -> None:
        settled, dag = self._settle(entry, "gone", entry.evidence), self._dag(entry)
        dag.gone += 1
        if not settled.has_ref:
            dag.held_ever += 1  # it was let go before it was heard of

    def abandoned(self, entry: e.Abandoned) -> None:
        self._settle(entry, "abandoned", entry.reason)
        self._dag(entry).abandoned += 1

    def _settle(self, entry: Any, phase: str, evidence: str) -> AcquisitionRow:
        row = self._acquisition(entry)
        row.phase, row.since_ms = phase, self._now_ms
        row.reason, row.evidence = "", text(evidence)
        row.settled_at_ms, row.settled_seq = self._now_ms, self._seq
        return row

    # --- refusals -------------------------------------------------------------------------

    def refused(self, entry: e.Refused) -> None:
        row = self.dags.get(name(entry.dag))
        if row is not None:
            row.commands_refused += 1
            self._change(row)
        self._change(
            DagRefusalRow(
                shard=self._shard,
                seq=self._seq,
                index=self._index,
                dag=name(entry.dag),
                id=name(entry.id),
                command=text(entry.command),
                reason=text(entry.reason),
                field=text(entry.field),
                detail=text(entry.detail),
                at_ms=self._now_ms,
            )
        )


_BY_KIND: Final[dict[type, Callable[[DagWorking, Any], None]]] = {
    e.TermOpened: DagWorking.term_opened,
    e.Refused: DagWorking.refused,
    e.Opened: DagWorking.opened,
    e.NodeStarted: DagWorking.node_started,
    e.NodeFinished: DagWorking.node_finished,
    e.Intended: DagWorking.intended,
    e.Progressed: DagWorking.progressed,
    e.Ready: DagWorking.ready,
    e.Moved: DagWorking.moved,
    e.Closed: DagWorking.closed,
    e.CancelAsked: DagWorking.cancel_asked,
    e.ReleaseBegun: DagWorking.release_begun,
    e.ReleaseHeard: DagWorking.release_heard,
    e.ReleaseSettled: DagWorking.release_settled,
    e.Abandoned: DagWorking.abandoned,
    e.Finished: DagWorking.finished,
    e.Answered: DagWorking.answered,
}
