"""How entries change a dag shard's state. Never refuses, never looks outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fencepost.core import ids, limits
from fencepost.core.dag import entries as e
from fencepost.core.dag import verdict
from fencepost.core.dag.state import Acquisition, Dag, DagShard, Past
from fencepost.core.machine import Place, TermOpened


def evolve(state: DagShard, entry: e.DagEntry, place: Place, now_ms: int) -> None:
    del place
    _BY_KIND[type(entry)](state, entry, now_ms)


def _term_opened(state: DagShard, entry: TermOpened, _now_ms: int) -> None:
    assert entry.term == state.term + 1, "a term does not follow its predecessor"
    assert entry.shards == state.shards, "the number of shards changed under the ledger"
    state.term = entry.term
    state.owner = entry.owner


def _refused(state: DagShard, entry: e.Refused, _now_ms: int) -> None:
    if entry.reason == "poison":
        state.poisoned += 1


def _opened(state: DagShard, entry: e.Opened, now_ms: int) -> None:
    assert entry.dag not in state.dags, "a DAG is opened once"
    assert entry.dag not in state.past, "a DAG is opened once"
    state.dags[entry.dag] = Dag(
        id=entry.dag,
        nodes=dict.fromkeys(entry.nodes, "waiting"),
        opened_at_ms=now_ms,
        retry_of=entry.retry_of,
    )


def _node_started(state: DagShard, entry: e.NodeStarted, _now_ms: int) -> None:
    state.dags[entry.dag].nodes[entry.node] = "running"


def _node_finished(state: DagShard, entry: e.NodeFinished, _now_ms: int) -> None:
    state.dags[entry.dag].nodes[entry.node] = entry.status


def _intended(state: DagShard, entry: e.Intended, now_ms: int) -> None:
    dag = state.dags[entry.dag]
    assert not dag.closed, "nothing is intended behind the barrier"
    dag.acquisitions[entry.acquisition] = Acquisition(
        id=entry.acquisition,
        slot=entry.slot,
        sandbox=entry.sandbox,
        adopted=entry.spec is None,
        since_ms=now_ms,
    )
    dag.slots.setdefault(entry.slot, entry.acquisition)
    dag.held[entry.sandbox] = entry.acquisition


def _progressed(state: DagShard, entry: e.Progressed, now_ms: int) -> None:
    dag = state.dags[entry.dag]
    acquisition = dag.acquisitions[entry.acquisition]
    if entry.ref is not None:
        if acquisition.ref is None:
            dag.held_ever += 1
        acquisition.ref = entry.ref
    if acquisition.phase != "releasing":
        acquisition.phase = entry.phase
        acquisition.since_ms = now_ms


def _ready(state: DagShard, entry: e.Ready, now_ms: int) -> None:
    acquisition = state.dags[entry.dag].acquisitions[entry.acquisition]
    acquisition.epoch = entry.epoch
    if acquisition.phase != "releasing":
        acquisition.phase = "ready"
        acquisition.since_ms = now_ms


def _moved(state: DagShard, entry: e.Moved, _now_ms: int) -> None:
    state.dags[entry.dag].slots[entry.slot] = entry.new


def _closed(state: DagShard, entry: e.Closed, _now_ms: int) -> None:
    dag = state.dags[entry.dag]
    assert not dag.closed, "the barrier is closed once"
    dag.closed = True
    dag.close_reason = entry.reason
    if entry.cancel:
        dag.cancels[entry.cancel] = entry.answer_by_ms
        for node, status in dag.nodes.items():
            if status in ("waiting", "running"):
                dag.nodes[node] = "cancelled"
                dag.cancelled_nodes += 1
    state.busy[dag.id] = None


def _cancel_asked(state: DagShard, entry: e.CancelAsked, _now_ms: int) -> None:
    state.dags[entry.dag].cancels[entry.cancel] = entry.answer_by_ms
    state.busy[entry.dag] = None
    state.ended.pop(entry.dag, None)


def _release_begun(state: DagShard, entry: e.ReleaseBegun, now_ms: int) -> None:
    dag = state.dags[entry.dag]
    acquisition = dag.acquisitions[entry.acquisition]
    _let_go(dag, acquisition)
    acquisition.phase = "releasing"
    acquisition.reason = ""
    acquisition.since_ms = now_ms


def _release_heard(state: DagShard, entry: e.ReleaseHeard, _now_ms: int) -> None:
    acquisition = state.dags[entry.dag].acquisitions[entry.acquisition]
    acquisition.reason = entry.reason
    acquisition.evidence = entry.evidence


def _release_settled(state: DagShard, entry: e.ReleaseSettled, _now_ms: int) -> None:
    dag = state.dags[entry.dag]
    settled = _drop(dag, entry.acquisition)
    dag.gone += 1
    if settled.ref is None:
        dag.held_ever += 1  # it was let go before it was heard of, and was there all the same
    if dag.evidence not in verdict.WEAK_EVIDENCE:
        dag.evidence = entry.evidence


def _abandoned(state: DagShard, entry: e.Abandoned, _now_ms: int) -> None:
    dag = state.dags[entry.dag]
    _drop(dag, entry.acquisition)
    dag.abandoned += 1


def _drop(dag: Dag, acquisition_id: str) -> Acquisition:
    acquisition = dag.acquisitions.pop(acquisition_id)
    _let_go(dag, acquisition)
    if dag.slots.get(acquisition.slot) == acquisition_id:
        del dag.slots[acquisition.slot]
    return acquisition


def _let_go(dag: Dag, acquisition: Acquisition) -> None:
    if dag.held.get(acquisition.sandbox) == acquisition.id:
        del dag.held[acquisition.sandbox]


def _finished(state: DagShard, entry: e.Finished, _now_ms: int) -> None:
    state.dags[entry.dag].finished = entry.status


def _answered(state: DagShard, entry: e.Answered, _now_ms: int) -> None:
    dag = state.dags.get(entry.dag)
    if dag is None:
        return  # one that ended long ago, answered once more from what is remembered of it
    if entry.cancel:
        dag.cancels.pop(entry.cancel, None)
        dag.answered[entry.cancel] = None
        if len(dag.answered) > limits.ANSWERS_REMEMBERED_PER_DAG:
            del dag.answered[next(iter(dag.answered))]
    dag.told = f"{entry.verdict}/{entry.reason}"
    if not dag.cancels and not dag.acquisitions:
        state.busy.pop(dag.id, None)
        state.ended[dag.id] = None
        if len(state.ended) > limits.DAGS_ENDED_WHOLE:
            _retire(state, next(iter(state.ended)))


def _retire(state: DagShard, name: str) -> None:
    """Keeps of a DAG what another cancel is answered from; of the oldest, nothing."""
    del state.ended[name]
    dag = state.dags.pop(name)
    state.past[name] = Past(
        verdict.judge(dag).verdict,
        dag.evidence,
        dag.held_ever,
        dag.gone,
        dag.abandoned,
        dag.cancelled_nodes,
        dag.opened_at_ms,
    )
    if len(state.past) > limits.DAGS_ENDED_REMEMBERED:
        oldest = next(iter(state.past))
        del state.past[oldest]
        state.past_floor_ms = max(state.past_floor_ms, ids.ulid_ms(oldest) or 0)


_BY_KIND: dict[type, Callable[[DagShard, Any, int], None]] = {
    TermOpened: _term_opened,
    e.Refused: _refused,
    e.Opened: _opened,
    e.NodeStarted: _node_started,
    e.NodeFinished: _node_finished,
    e.Intended: _intended,
    e.Progressed: _progressed,
    e.Ready: _ready,
    e.Moved: _moved,
    e.Closed: _closed,
    e.CancelAsked: _cancel_asked,
    e.ReleaseBegun: _release_begun,
    e.ReleaseHeard: _release_heard,
    e.ReleaseSettled: _release_settled,
    e.Abandoned: _abandoned,
    e.Finished: _finished,
    e.Answered: _answered,
}
