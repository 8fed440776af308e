"""
One dag shard that this tracker owns: the runner, and the questions to it.

Everything else of a dag shard is durable: commands and messages are read by position.
"""

from __future__ import annotations

import heapq
from typing import Any, Final

import msgspec
from fencepost.contracts import subjects
from fencepost.contracts.messages import AskDag
from fencepost.core.dag import verdict
from fencepost.core.dag.machine import DagMachine
from fencepost.core.dag.state import Dag, DagShard
from fencepost.runtime.ports import Bus, Subscription
from fencepost.runtime.questions import Questions
from fencepost.runtime.shard_runner import ShardRunner

ASK_AGE_MS: Final = 1_000
PAGE_MAX: Final = 500
SHOWN_MAX: Final = 500
"""Nodes and outstanding acquisitions shown of one DAG; how many there are is always said."""

_ASK = msgspec.json.Decoder(AskDag)


class OwnedDags:
    """Wires one runner to the subject of questions."""

    def __init__(self, shard: int, runner: ShardRunner, machine: DagMachine, *, bus: Bus) -> None:
        self.shard = shard
        self.runner = runner
        self._machine = machine
        self._bus = bus
        self._questions = Questions(bus, self._view)
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Takes the shard over; raises what `ShardRunner.start` raises."""
        try:
            await self.runner.start()
            self._subscription = await self._bus.subscribe(
                subjects.ask_dag(self.shard), self._questions.take
            )
        except BaseException:
            await self.stop(hand_over=False)
            raise

    async def stop(self, *, hand_over: bool = True) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()
        await self.runner.stop(hand_over=hand_over)
        await self._questions.close()

    async def _view(self, data: bytes) -> Any:
        """Reads the state after a proof of ownership: also "no such DAG" is then the truth."""
        question = _ASK.decode(data)
        if question.what == "dags":
            return await self.runner.ask(lambda state: page(state, question), max_age_ms=ASK_AGE_MS)
        return await self.runner.ask(
            lambda state: self._one(state, question.dag), max_age_ms=ASK_AGE_MS
        )

    def _one(self, state: DagShard, dag_id: str) -> dict[str, Any] | None:
        view = self._machine.view_dag(state, dag_id)
        if view is None:
            return None
        # Of one that ended long ago a few words are left, and no names.
        dag = state.dags.get(dag_id) or Dag(id=dag_id)
        outstanding, nodes = view["outstanding"], view["nodes"]
        return view | {
            "outstanding": outstanding[:SHOWN_MAX],
            "outstanding_count": len(outstanding),
            "nodes": nodes[:SHOWN_MAX],
            "nodes_count": len(nodes),
            "slots": [
                {"slot": slot, "acquisition": acquisition}
                for slot, acquisition in list(dag.slots.items())[:SHOWN_MAX]
            ],
            "cancelled": _cancelled(state, dag_id),
            "retry_of": dag.retry_of,
            "waiting": list(dag.cancels),
            "answered": list(dag.answered),
        }


def _cancelled(state: DagShard, dag_id: str) -> int:
    dag, past = state.dags.get(dag_id), state.past.get(dag_id)
    return dag.cancelled_nodes if dag is not None else past.cancelled_nodes if past else 0


def page(state: DagShard, question: AskDag) -> dict[str, Any]:
    """One page of summaries, ordered by id; `next` is the last id where there are more."""
    limit = max(1, min(question.limit, PAGE_MAX))
    wanted = (
        dag
        for dag in state.dags.values()
        if dag.id > question.after and _is_wanted(dag, question.released)
    )
    found = heapq.nsmallest(limit + 1, wanted, key=lambda dag: dag.id)
    items = [_summary(dag) for dag in found[:limit]]
    return {"items": items, "next": items[-1]["dag"] if len(found) > limit else None}


def _is_wanted(dag: Dag, released: str) -> bool:
    return not released or (dag.closed and verdict.judge(dag).verdict == released)


def _summary(dag: Dag) -> dict[str, Any]:
    found = verdict.judge(dag)
    return {
        "dag": dag.id,
        "closed": dag.closed,
        "finished": dag.finished,
        "released": found.verdict if dag.closed else None,
        "reason": found.reason if dag.closed else "",
        "outstanding_count": found.outstanding,
        "held_ever": dag.held_ever,
        "nodes_count": len(dag.nodes),
        "opened_at_ms": dag.opened_at_ms,
    }
