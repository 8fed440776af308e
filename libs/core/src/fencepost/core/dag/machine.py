"""The dag machine: the whole family behind the one protocol of `core.machine`."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec
from fencepost.core import ids
from fencepost.core.dag import commands as c
from fencepost.core.dag import deciding, evolve, verdict
from fencepost.core.dag import entries as e
from fencepost.core.dag.state import Dag, DagShard, Past
from fencepost.core.decoding import field_in
from fencepost.core.errors import LedgerBrokenError, PoisonedError
from fencepost.core.machine import Effect, Event, Message, Place, TermOpened
from fencepost.core.sandbox.inputs import Poison, Tick
from fencepost.core.shard_messages import Hold, Told, Unhold

_COMMANDS = msgspec.json.Decoder(c.DagCommand)
_TOLD = msgspec.json.Decoder(Told)
_ENTRIES = msgspec.json.Decoder(list[e.DagEntry])
_ENCODER = msgspec.json.Encoder()


class Hints(msgspec.Struct, kw_only=True):
    """DAGs to look at in the next tick, and a heap of when a cancel's bound ends, and whose."""

    touched: dict[str, None] = {}
    bounds: list[tuple[int, str]] = []
    synced: bool = False


class DagMachine:
    family: ClassVar[str] = "dag"
    version: ClassVar[int] = 1

    def initial(self, shard: int, shards: int) -> DagShard:
        return DagShard(shard=shard, shards=shards)

    def new_hints(self) -> Hints:
        return Hints()

    def decode(self, source: str, subject: str, data: bytes) -> Sequence[Any]:
        """Decodes commands ("commands", "now") and messages of sandbox shards ("messages")."""
        if source == "messages":
            try:
                return [_TOLD.decode(data)]
            except msgspec.MsgspecError as error:
                raise PoisonedError(f"not a message to a dag shard: {error}") from error
        tokens = subject.split(".")
        if len(tokens) < 3 or tokens[-3] != "dag":
            raise PoisonedError(f"not the subject of a DAG's command: {subject!r}")
        dag, id_ = tokens[-2:]
        for field, value in (("dag", dag), ("id", id_)):
            if not ids.is_id(value):
                return [_malformed(dag, id_, "bad_id", field, f"expected {ids.ID_PATTERN}")]
        try:
            return [deciding.CommandReceived(dag=dag, id=id_, command=_COMMANDS.decode(data))]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return [_malformed(dag, id_, "malformed", field_in(str(error)), str(error))]

    def poison(self, source: str, subject: str, seq: int, detail: str) -> Poison:
        return Poison(source=source, subject=subject, seq=seq, detail=detail[:500])

    def tick(self) -> Tick:
        return Tick()

    def term_opened(self, term: int, owner: str, shards: int, hash_: str) -> TermOpened:
        return TermOpened(term=term, owner=owner, shards=shards, hash=hash_, machine=self.version)

    def take_hint(self, state: DagShard, hints: Hints, value: Any, now_ms: int) -> bool:
        del state, hints, value, now_ms
        return False

    def decide(
        self, state: DagShard, hints: Hints, value: Any, now_ms: int
    ) -> Sequence[e.DagEntry]:
        match value:
            case deciding.CommandReceived():
                return deciding.command(state, value, now_ms)
            case Told():
                return deciding.told(state, value)
            case Tick():
                return _tick(state, hints, now_ms)
            case deciding.CommandMalformed():
                return deciding.malformed(value)
            case Poison():
                return [
                    e.Refused(
                        dag="",
                        command=value.source,
                        id=str(value.seq),
                        reason="poison",
                        field=value.subject[:200],
                        detail=value.detail,
                    )
                ]
            case _:
                raise PoisonedError(f"not an input of this family: {type(value).__name__}")

    def evolve(self, state: DagShard, entry: e.DagEntry, place: Place, now_ms: int) -> None:
        evolve.evolve(state, entry, place, now_ms)

    def next_due_ms(self, state: DagShard, hints: Hints) -> int | None:
        del state
        if not hints.synced or hints.touched:
            return 0
        return hints.bounds[0][0] if hints.bounds else None

    def effects_of(self, state: DagShard, hints: Hints, entry: e.DagEntry) -> Iterable[Effect]:
        """No order goes out from here; what an entry changed is looked at in the next tick."""
        dag = state.dags.get(getattr(entry, "dag", ""))
        if dag is not None and dag.closed and type(entry) is not e.Answered:
            hints.touched[dag.id] = None
            if isinstance(entry, e.Closed | e.CancelAsked) and entry.cancel:
                heapq.heappush(hints.bounds, (entry.answer_by_ms, dag.id))
        return ()

    def effects(self, state: DagShard, hints: Hints, now_ms: int) -> Iterable[Effect]:
        del state, hints, now_ms
        return ()

    def events_of(self, entry: e.DagEntry) -> Iterator[Event]:
        if isinstance(entry, e.Answered):
            yield Event(
                f"fp.v1.release.{entry.dag}",
                {
                    "dag": entry.dag,
                    "released": entry.verdict,
                    "reason": entry.reason,
                    "evidence": entry.evidence,
                    "outstanding": entry.outstanding,
                    "cancelled": entry.cancelled,
                    "cancel": entry.cancel,
                },
            )
            return
        if isinstance(entry, TermOpened) or not ids.is_id(entry.dag):
            return  # no subject can be made of it, so nobody can be listening there
        body = msgspec.to_builtins(entry)
        kind = body.pop("kind")
        yield Event(f"fp.v1.event.dag.{entry.dag}.{kind}", {**body, "kind": kind})

    def messages_of(self, entry: e.DagEntry) -> Iterator[Message]:
        message: Hold | Unhold
        match entry:
            case e.Intended():
                message = Hold(
                    dag=entry.dag,
                    acquisition=entry.acquisition,
                    sandbox=entry.sandbox,
                    spec=entry.spec,
                )
            case e.ReleaseBegun():
                message = Unhold(
                    dag=entry.dag,
                    acquisition=entry.acquisition,
                    sandbox=entry.sandbox,
                    reason=entry.reason,
                )
            case _:
                return
        yield Message("sandbox", entry.sandbox, msgspec.to_builtins(message))

    def encode_entries(self, entries: Sequence[e.DagEntry]) -> bytes:
        return _ENCODER.encode(entries)

    def decode_entries(self, data: bytes) -> Sequence[e.DagEntry]:
        try:
            return _ENTRIES.decode(data)
        except msgspec.MsgspecError as error:
            raise LedgerBrokenError(f"an entry that this version cannot read: {error}") from error

    def encode_state(self, state: DagShard) -> bytes:
        return _ENCODER.encode(state)

    def decode_state(self, data: bytes) -> DagShard:
        return msgspec.json.decode(data, type=DagShard)

    def view_dag(self, state: DagShard, dag_id: str) -> dict[str, Any] | None:
        """A DAG as this shard knows it. None is a negative: after an accepted batch only."""
        dag = state.dags.get(dag_id)
        if dag is not None:
            return view_dag(dag)
        past = state.past.get(dag_id)
        return None if past is None else view_past(dag_id, past)

    def view_dags(self, state: DagShard) -> list[dict[str, Any]]:
        return [view_dag(dag) for dag in state.dags.values()]


def view_dag(dag: Dag) -> dict[str, Any]:
    found = verdict.judge(dag)
    return {
        "dag": dag.id,
        "nodes": [{"node": node, "status": status} for node, status in dag.nodes.items()],
        "closed": dag.closed,
        "close_reason": dag.close_reason,
        "finished": dag.finished,
        "released": found.verdict if dag.closed else None,
        "reason": found.reason if dag.closed else "",
        "evidence": found.evidence,
        "held_ever": dag.held_ever,
        "gone": dag.gone,
        "abandoned": dag.abandoned,
        "opened_at_ms": dag.opened_at_ms,
        "outstanding": [
            {
                "acquisition": a.id,
                "slot": a.slot,
                "sandbox": a.sandbox,
                "instance": a.ref.instance if a.ref else "",
                "phase": a.phase,
                "reason": verdict.reason_of(a),
                "evidence": a.evidence,
                "since_ms": a.since_ms,
            }
            for a in dag.acquisitions.values()
        ],
    }


def view_past(dag_id: str, past: Past) -> dict[str, Any]:
    """What is remembered of a DAG that ended long ago: its verdict, and no names."""
    return {
        "dag": dag_id,
        "nodes": [],
        "closed": True,
        "close_reason": "",
        "finished": "",
        "released": past.verdict,
        "reason": "",
        "evidence": past.evidence,
        "held_ever": past.held_ever,
        "gone": past.gone,
        "abandoned": past.abandoned,
        "opened_at_ms": past.opened_at_ms,
        "outstanding": [],
    }


def _tick(state: DagShard, hints: Hints, now_ms: int) -> Sequence[e.DagEntry]:
    if not hints.synced:
        hints.synced = True
        hints.touched.update(state.busy)
        for name in state.busy:
            for by_ms in state.dags[name].cancels.values():
                heapq.heappush(hints.bounds, (by_ms, name))
    while hints.bounds and hints.bounds[0][0] <= now_ms:
        hints.touched[heapq.heappop(hints.bounds)[1]] = None
    while hints.touched:
        dag_id = next(iter(hints.touched))
        dag = state.dags.get(dag_id)
        owed = deciding.owed(dag, now_ms) if dag is not None else []
        if owed:
            return owed  # looked at once more: it may owe another
        del hints.touched[dag_id]
    return ()


def _malformed(
    dag: str, id_: str, reason: str, field: str, detail: str
) -> deciding.CommandMalformed:
    return deciding.CommandMalformed(dag=dag, id=id_, reason=reason, field=field, detail=detail)
