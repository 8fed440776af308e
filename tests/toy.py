"""
A small machine that has one of everything: entries, events, messages, effects, timers, bounds.

It keeps a number per key and a list of open tasks. An input is a JSON object with `do`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec
from fencepost.core.errors import LedgerBrokenError, PoisonedError
from fencepost.core.machine import Effect, Event, Message, Place
from fencepost.core.sandbox.entries import TermOpened


class Added(msgspec.Struct, frozen=True, tag_field="kind", tag="added"):
    key: str
    amount: int
    id: str = ""


class Opened(msgspec.Struct, frozen=True, tag_field="kind", tag="opened"):
    task: str
    since_ms: int


class Closed(msgspec.Struct, frozen=True, tag_field="kind", tag="closed"):
    task: str


class Told(msgspec.Struct, frozen=True, tag_field="kind", tag="told"):
    """Sends `text` to another aggregate; `again` more of them in the same batch."""

    to: str
    text: str
    family: str = "toy"


class Heard(msgspec.Struct, frozen=True, tag_field="kind", tag="heard"):
    text: str


class Refused(msgspec.Struct, frozen=True, tag_field="kind", tag="refused"):
    reason: str
    detail: str = ""
    seq: int = 0


class Timed(msgspec.Struct, frozen=True, tag_field="kind", tag="timed"):
    name: str
    at_ms: int


class Fired(msgspec.Struct, frozen=True, tag_field="kind", tag="fired"):
    name: str
    at_ms: int


class Exploding(msgspec.Struct, frozen=True, tag_field="kind", tag="exploding"):
    why: str


Entry = TermOpened | Added | Opened | Closed | Told | Heard | Refused | Timed | Fired | Exploding


class State(msgspec.Struct):
    shard: int
    shards: int
    sums: dict[str, int] = {}
    seen: dict[str, int] = {}
    tasks: dict[str, int] = {}
    heard: list[str] = []
    timers: dict[str, int] = {}
    fired: list[str] = []
    terms: list[int] = []
    times: list[int] = []
    places: list[list[int]] = []


class Input(msgspec.Struct, frozen=True):
    do: str
    key: str = ""
    amount: int = 1
    id: str = ""
    text: str = ""
    to: str = ""
    family: str = "toy"
    size: int = 0
    delay_ms: int = 0


class Poison(msgspec.Struct, frozen=True):
    source: str
    seq: int
    detail: str


class Tick(msgspec.Struct, frozen=True):
    pass


class ToyMachine:
    family: ClassVar[str] = "toy"
    version: ClassVar[int] = 1

    def __init__(self, *, capacity: int = 1_000_000, version: int = 1) -> None:
        self.capacity = capacity
        self.version = version  # type: ignore[misc]
        self.hint_times: list[int] = []

    def initial(self, shard: int, shards: int) -> State:
        return State(shard=shard, shards=shards)

    def new_hints(self) -> list[Any]:
        return []

    def decode(self, source: str, subject: str, data: bytes) -> Sequence[Any]:
        try:
            value = msgspec.json.decode(data, type=Input | list[Input] | str)
        except msgspec.DecodeError as error:
            raise PoisonedError(str(error)) from error
        if isinstance(value, str):
            return [Input(do="hear", text=value)]
        return value if isinstance(value, list) else [value]

    def poison(self, source: str, subject: str, seq: int, detail: str) -> Any:
        return Poison(source, seq, detail)

    def take_hint(self, state: State, hints: list[Any], value: Any, now_ms: int) -> bool:
        if isinstance(value, Input) and value.do == "hint":
            hints.append(value.key)
            return True
        return False

    def decide(self, state: State, hints: list[Any], value: Any, now_ms: int) -> Sequence[Any]:
        if isinstance(value, Poison):
            return [Refused("poison", value.detail, value.seq)]
        if isinstance(value, Tick):
            due = [name for name, at in state.timers.items() if at <= now_ms]
            return [Fired(name, now_ms) for name in due[:1]]
        match value.do:
            case "add":
                if value.id and value.id in state.seen:
                    return []
                if len(state.sums) >= self.capacity and value.key not in state.sums:
                    return [Refused("overloaded", value.key)]
                return [Added(value.key, value.amount, value.id)]
            case "drop":
                return []
            case "raise":
                raise ValueError("decide does not like this")
            case "explode":
                return [Exploding("evolve does not like this")]
            case "open":
                return [Opened(value.key, now_ms)]
            case "close":
                return [Closed(value.key)]
            case "tell":
                return [Told(value.to, value.text, value.family)]
            case "hear":
                return [Heard(value.text)]
            case "big":
                return [Added("x" * value.size, 1)]
            case "timer":
                return [Timed(value.key, now_ms + value.delay_ms)]
        raise AssertionError(value)

    def evolve(self, state: State, entry: Any, place: Place, now_ms: int) -> None:
        state.places.append([place.after, place.index])
        state.times.append(now_ms)
        match entry:
            case TermOpened():
                state.terms.append(entry.term)
            case Added():
                state.sums[entry.key] = state.sums.get(entry.key, 0) + entry.amount
                if entry.id:
                    state.seen[entry.id] = 1
            case Opened():
                state.tasks[entry.task] = entry.since_ms
            case Closed():
                state.tasks.pop(entry.task, None)
            case Heard():
                state.heard.append(entry.text)
            case Timed():
                state.timers[entry.name] = entry.at_ms
            case Fired():
                state.timers.pop(entry.name)
                state.fired.append(entry.name)
            case Exploding():
                raise ValueError(entry.why)

    def _effect(self, state: State, task: str) -> Effect:
        return Effect(key=task, since_ms=state.tasks[task], target="gateway", order={"task": task})

    def effects_of(self, state: State, hints: list[Any], entry: Any) -> Iterable[Effect]:
        if isinstance(entry, Opened) and entry.task in state.tasks:
            yield self._effect(state, entry.task)

    def effects(self, state: State, hints: list[Any], now_ms: int) -> Iterable[Effect]:
        for task in state.tasks:
            yield self._effect(state, task)

    def events_of(self, entry: Any) -> Iterable[Event]:
        if isinstance(entry, Added):
            yield Event(f"fp.v1.event.toy.{len(entry.key)}.added", {"amount": entry.amount})

    def messages_of(self, entry: Any) -> Iterable[Message]:
        if isinstance(entry, Told):
            yield Message(entry.family, entry.to, entry.text)  # type: ignore[arg-type]

    def next_due_ms(self, state: State, hints: list[Any]) -> int | None:
        return min(state.timers.values(), default=None)

    def tick(self) -> Any:
        return Tick()

    def term_opened(self, term: int, owner: str, shards: int, hash_: str) -> TermOpened:
        return TermOpened(term=term, owner=owner, shards=shards, hash=hash_, machine=self.version)

    def encode_entries(self, entries: Sequence[Any]) -> bytes:
        return msgspec.json.encode(entries)

    def decode_entries(self, data: bytes) -> Sequence[Any]:
        try:
            return msgspec.json.decode(data, type=list[Entry])
        except msgspec.DecodeError as error:
            raise LedgerBrokenError(str(error)) from error

    def encode_state(self, state: State) -> bytes:
        return msgspec.json.encode(state)

    def decode_state(self, data: bytes) -> State:
        return msgspec.json.decode(data, type=State)
