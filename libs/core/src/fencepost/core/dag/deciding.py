"""
Decisions of the dag family: commands, what sandboxes' shards tell, and time.

Rule 1: an intent is an entry before anybody is asked, and is refused once the DAG is closed.
Rule 2: `confirmed` and `nothing_held` are only ever said by an `answered` entry.
Rule 3: a slot is a value. It is compared as it is, byte for byte, and never normalised.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

import msgspec
from fencepost.core import ids, limits
from fencepost.core.dag import commands as c
from fencepost.core.dag import entries as e
from fencepost.core.dag import verdict
from fencepost.core.dag.state import Acquisition, Dag, DagShard, Past
from fencepost.core.shard_messages import Told
from fencepost.core.steps import SandboxSpec, spec_problem

_NOT_FINAL: Final = ("waiting", "running")
_STATUS_MAX: Final = 64


class CommandReceived(msgspec.Struct, frozen=True, kw_only=True):
    dag: str
    id: str
    command: Any


class CommandMalformed(msgspec.Struct, frozen=True, kw_only=True):
    dag: str
    id: str
    reason: str
    field: str = ""
    detail: str = ""


def command(state: DagShard, value: CommandReceived, now_ms: int) -> list[e.DagEntry]:
    asked = value.command
    if isinstance(asked, c.Open):
        return _open(state, value, asked)
    dag = state.dags.get(value.dag)
    if dag is None:
        past = state.past.get(value.dag)
        return _unknown(state, value) if past is None else _of_the_past(value, past)
    match asked:
        case c.Start():
            return _start(dag, value, asked)
        case c.FinishNode():
            return _finish_node(dag, value, asked)
        case c.Acquire():
            return _acquire(dag, value, asked.slot, value.id, asked.spec, replace=asked.replace)
        case c.Adopt():
            if not ids.is_id(asked.sandbox):
                return _refuse(value, "bad_id", "sandbox", f"expected {ids.ID_PATTERN}")
            return _acquire(dag, value, asked.slot, asked.sandbox, None, replace=asked.replace)
        case c.ReleaseSlot():
            return _release_slot(dag, value, asked.slot)
        case c.Cancel():
            return _cancel(dag, value, asked, now_ms)
        case _:
            return _finish(dag, asked)


def _unknown(state: DagShard, value: CommandReceived) -> list[e.DagEntry]:
    if ids.shard_of(value.dag, state.shards) != state.shard:
        return _refuse(value, "misrouted", "dag", "this DAG belongs to another shard")
    if _is_forgotten(state, value.dag):
        return _refuse(value, "too_old", "dag", "it ended long ago; the projection knows it")
    return _refuse(value, "unknown_dag", "dag", f"there is no DAG {value.dag!r}; open it first")


def _is_forgotten(state: DagShard, dag: str) -> bool:
    minted_ms = ids.ulid_ms(dag)
    return minted_ms is not None and minted_ms <= state.past_floor_ms


def _of_the_past(value: CommandReceived, past: Past) -> list[e.DagEntry]:
    match value.command:
        case c.Cancel():
            return [
                e.Answered(
                    dag=value.dag,
                    verdict=past.verdict,
                    evidence=past.evidence,
                    cancel=value.id,
                    cancelled=past.cancelled_nodes,
                )
            ]
        case c.Finish() | c.FinishNode():
            return []
        case _:
            return _refuse(value, "dag_closed", "dag", "it ended, and everything of it is settled")


def malformed(value: CommandMalformed) -> list[e.DagEntry]:
    return [
        e.Refused(
            dag=value.dag,
            command="dag",
            id=value.id,
            reason=value.reason,
            field=value.field,
            detail=value.detail[:500],
        )
    ]


def _refuse(value: CommandReceived, reason: str, field: str, detail: str) -> list[e.DagEntry]:
    name = type(value.command).__struct_config__.tag
    return [
        e.Refused(
            dag=value.dag, command=str(name), id=value.id, reason=reason, field=field, detail=detail
        )
    ]


def _open(state: DagShard, value: CommandReceived, asked: c.Open) -> list[e.DagEntry]:
    known = state.dags.get(value.dag)
    if known is not None:
        if list(known.nodes) == asked.nodes:
            return []
        return _refuse(value, "dag_exists", "nodes", "it is open with other nodes")
    if value.dag in state.past:
        return _refuse(value, "dag_exists", "dag", "this id was used before")
    if _unknown(state, value)[0].reason != "unknown_dag":  # type: ignore[union-attr]
        return _unknown(state, value)
    if len(state.dags) >= limits.DAGS_PER_SHARD_MAX:
        return _refuse(value, "overloaded", "", "too many DAGs in this shard; send it again later")
    if len(asked.nodes) > limits.NODES_PER_DAG_MAX or len(set(asked.nodes)) != len(asked.nodes):
        return _refuse(
            value,
            "out_of_range",
            "nodes",
            f"expected up to {limits.NODES_PER_DAG_MAX} names, each once",
        )
    for node in asked.nodes:
        problem = _name_problem(node)
        if problem:
            return _refuse(value, "out_of_range", "nodes", problem)
    return [e.Opened(dag=value.dag, nodes=asked.nodes, retry_of=asked.retry_of[:64])]


def _name_problem(name: str) -> str:
    """Names of slots and nodes may be any text that UTF-8 can carry, within the bound."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "expected text without lone surrogates"
    if size > limits.NAME_BYTES_MAX:
        return f"expected at most {limits.NAME_BYTES_MAX} bytes, got {size}"
    return ""


def _start(dag: Dag, value: CommandReceived, asked: c.Start) -> list[e.DagEntry]:
    if dag.closed:
        return _refuse(value, "dag_closed", "dag", "it was cancelled or has finished")
    if asked.node not in dag.nodes:
        return _refuse(value, "unknown_node", "node", "the DAG has no such node")
    if dag.nodes[asked.node] != "waiting":
        return []
    return [e.NodeStarted(dag=dag.id, node=asked.node)]


def _finish_node(dag: Dag, value: CommandReceived, asked: c.FinishNode) -> list[e.DagEntry]:
    if asked.node not in dag.nodes:
        return _refuse(value, "unknown_node", "node", "the DAG has no such node")
    if asked.status in _NOT_FINAL or not 0 < len(asked.status) <= _STATUS_MAX:
        return _refuse(value, "out_of_range", "status", "expected a final status, one word")
    if len(asked.release) > limits.RELEASES_PER_TURN:
        return _refuse(
            value, "out_of_range", "release", f"expected up to {limits.RELEASES_PER_TURN} slots"
        )
    if dag.nodes[asked.node] not in _NOT_FINAL:
        return []
    entries: list[e.DagEntry] = [e.NodeFinished(dag=dag.id, node=asked.node, status=asked.status)]
    for slot in dict.fromkeys(asked.release):
        acquisition = dag.acquisitions.get(dag.slots.get(slot, ""))
        if acquisition is not None and acquisition.phase != "releasing":
            entries.append(_begin(dag, acquisition, "node_finished"))
    return entries


def _acquire(
    dag: Dag,
    value: CommandReceived,
    slot: str,
    sandbox: str,
    spec: SandboxSpec | None,
    *,
    replace: bool,
) -> list[e.DagEntry]:
    if value.id in dag.acquisitions:
        return []  # the same command, read again
    if dag.closed:
        return _refuse(value, "dag_closed", "dag", "nothing is acquired behind the barrier")
    problem = _name_problem(slot)
    if problem:
        return _refuse(value, "out_of_range", "slot", problem)
    if len(dag.acquisitions) >= limits.ACQUISITIONS_PER_DAG_MAX:
        return _refuse(value, "overloaded", "", "too many acquisitions are open in this DAG")
    if spec is not None and (wrong := spec_problem(spec)):
        return _refuse(value, "out_of_range", *wrong)
    if sandbox in dag.held:
        return _refuse(value, "already_held", "sandbox", "a slot of this DAG names it already")
    entries: list[e.DagEntry] = [
        e.Intended(dag=dag.id, acquisition=value.id, slot=slot, sandbox=sandbox, spec=spec)
    ]
    old = dag.acquisitions.get(dag.slots.get(slot, ""))
    if old is not None:
        if not replace:
            return _refuse(
                value, "slot_taken", "slot", "it names another sandbox; say `replace` to move it"
            )
        entries.append(e.Moved(dag=dag.id, slot=slot, old=old.id, new=value.id))
        if old.phase != "releasing":
            entries.append(_begin(dag, old, "replaced"))
    return entries


def _begin(dag: Dag, acquisition: Acquisition, reason: str) -> e.ReleaseBegun:
    return e.ReleaseBegun(
        dag=dag.id, acquisition=acquisition.id, sandbox=acquisition.sandbox, reason=reason
    )


def _release_slot(dag: Dag, value: CommandReceived, slot: str) -> list[e.DagEntry]:
    acquisition = dag.acquisitions.get(dag.slots.get(slot, ""))
    if acquisition is None:
        return _refuse(value, "unknown_slot", "slot", "the DAG holds nothing under this name")
    if acquisition.phase == "releasing":
        return []
    return [_begin(dag, acquisition, "released")]


def _cancel(dag: Dag, value: CommandReceived, asked: c.Cancel, now_ms: int) -> list[e.DagEntry]:
    if value.id in dag.cancels or value.id in dag.answered:
        return []
    if len(dag.cancels) >= limits.CANCELS_WAITING_PER_DAG_MAX:
        return _refuse(value, "overloaded", "", "so many cancels wait for the answer already")
    answer_by_ms = now_ms + max(0, min(asked.bound_ms, limits.CANCEL_BOUND_MS_MAX))
    if dag.closed:
        return [e.CancelAsked(dag=dag.id, cancel=value.id, answer_by_ms=answer_by_ms)]
    return [
        e.Closed(dag=dag.id, reason=asked.reason[:200], cancel=value.id, answer_by_ms=answer_by_ms)
    ]


def _finish(dag: Dag, asked: c.Finish) -> list[e.DagEntry]:
    if dag.finished:
        return []
    entries: list[e.DagEntry] = [e.Finished(dag=dag.id, status=asked.status[:64] or "finished")]
    if not dag.closed:
        entries.append(e.Closed(dag=dag.id, reason="finished"))
    return entries


def told(state: DagShard, value: Told) -> list[e.DagEntry]:
    """Decides what a sandbox's shard told; about what is settled it changes nothing."""
    dag = state.dags.get(value.dag)
    acquisition = dag.acquisitions.get(value.acquisition) if dag is not None else None
    if dag is None or acquisition is None:
        return []
    match value.phase:
        case "refused":
            return [e.Abandoned(dag=dag.id, acquisition=acquisition.id, reason=value.reason)]
        case "requested" | "assigned":
            return [
                e.Progressed(
                    dag=dag.id,
                    acquisition=acquisition.id,
                    phase=value.phase,
                    ref=value.ref,
                    detail=value.reason,
                )
            ]
        case "ready":
            return [e.Ready(dag=dag.id, acquisition=acquisition.id, epoch=value.epoch)]
        case "releasing":
            if (acquisition.reason, acquisition.evidence) == (value.reason, value.evidence):
                return []
            return [
                e.ReleaseHeard(
                    dag=dag.id,
                    acquisition=acquisition.id,
                    reason=value.reason,
                    evidence=value.evidence,
                )
            ]
        case "gone":
            if value.evidence in ("never_created", "never_requested") and acquisition.ref is None:
                return [e.Abandoned(dag=dag.id, acquisition=acquisition.id, reason=value.evidence)]
            return [
                e.ReleaseSettled(
                    dag=dag.id,
                    acquisition=acquisition.id,
                    sandbox=acquisition.sandbox,
                    slot=acquisition.slot,
                    evidence=value.evidence,
                )
            ]


def owed(dag: Dag, now_ms: int) -> list[e.DagEntry]:
    """What a DAG owes by now: releases behind the barrier, answers, and a changed verdict."""
    if not dag.closed:
        return []
    if dag.held:
        reason = "finished" if dag.finished else "cancelled"
        return [
            _begin(dag, dag.acquisitions[name], reason)
            for name in islice(dag.held.values(), limits.RELEASES_PER_TURN)
        ]
    found = verdict.judge(dag)
    now = found.verdict != "unconfirmed" or found.reason in verdict.SETTLED_BY_OTHERS
    due = (cancel for cancel, by_ms in dag.cancels.items() if now or now_ms >= by_ms)
    answers: list[e.DagEntry] = [
        _answer(dag, found, cancel) for cancel in islice(due, limits.ANSWERS_PER_TURN)
    ]
    if not answers and not dag.cancels and dag.told != f"{found.verdict}/{found.reason}":
        answers.append(_answer(dag, found, ""))
    return answers


def _answer(dag: Dag, found: verdict.Judgement, cancel: str) -> e.Answered:
    return e.Answered(
        dag=dag.id,
        verdict=found.verdict,
        reason=found.reason,
        evidence=found.evidence,
        cancel=cancel,
        outstanding=found.outstanding,
        cancelled=dag.cancelled_nodes,
    )
