"""
What a shard's state machine must offer. One runtime runs any of them.

The runtime (`ShardRunner`, or the simulator's) feeds inputs one after the other; all the entries
of one turn become one batch, one message on the shard's log. `decide` reads, `evolve` changes,
`effects` says what the outside still owes. None of them does I/O, reads a clock or draws lots.

`evolve` changes the state in place, by design: a refused batch drops the whole state (the term is
lost), so nothing is ever rolled back, and copying the state for each entry would cost more than
the decision. ADR 0006.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

State = TypeVar("State")
Hints = TypeVar("Hints")


class Place(msgspec.Struct, frozen=True, order=True):
    """
    Where an entry stands in its shard's log.

    `after` is the sequence of the batch before the entry's own batch (known when deciding, while
    the own sequence is not), `index` the entry's index. The batch is the first message of the
    shard's subject with a sequence above `after`.
    """

    after: int
    index: int


class Event(msgspec.Struct, frozen=True):
    """A public event: derived from one accepted entry, at least once, with its ledger position."""

    subject: str
    body: dict[str, Any]


class Message(msgspec.Struct, frozen=True):
    """Something one shard tells another, derived from one accepted entry."""

    family: str
    aggregate: str
    body: dict[str, Any]


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """
    Something the outside is asked to do; made after the batch was accepted, made again by timer.

    `key` makes it idempotent and is its name for repeats; `since_ms` is the ledger time from
    which it has been owed; `target` is where it goes (a gateway session's id, or "" for the
    runtime itself); `order` is the message.
    """

    key: str
    since_ms: int
    target: str
    order: Any


class TermOpened(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="term_opened"):
    """The first entry of an owner. Number of shards and hash are checked at takeover."""

    term: int
    owner: str
    shards: int
    hash: str
    machine: int


class Machine(Protocol[State, Hints]):
    family: ClassVar[str]
    version: ClassVar[int]

    def initial(self, shard: int, shards: int) -> State: ...

    def new_hints(self) -> Hints:
        """Volatile knowledge (leases, who is alive): may be empty, never decides safety."""
        ...

    def decode(self, source: str, subject: str, data: bytes) -> Sequence[Any]:
        """Turns one message into inputs. Raises `PoisonedError` when it cannot be understood."""
        ...

    def poison(self, source: str, subject: str, seq: int, detail: str) -> Any:
        """The input that stands for a message on which `decode` or `decide` raised."""
        ...

    def take_hint(self, state: State, hints: Hints, value: Any, now_ms: int) -> bool:
        """Takes a volatile input that never makes an entry; False when it is none of these."""
        ...

    def decide(self, state: State, hints: Hints, value: Any, now_ms: int) -> Sequence[Any]:
        """
        Computes the entries that an input leads to, on this state.

        The runtime evolves the state by all of them, in order, before the next input. Never
        changes the state, never refuses by raising.
        """
        ...

    def evolve(self, state: State, entry: Any, place: Place, now_ms: int) -> None:
        """Changes the state by an entry. Never refuses; an error here ends the ownership."""
        ...

    def effects_of(self, state: State, hints: Hints, entry: Any) -> Iterable[Effect]:
        """What an entry, just accepted, owes at once. A subset of what `effects` says next."""
        ...

    def effects(self, state: State, hints: Hints, now_ms: int) -> Iterable[Effect]:
        """All that is owed: made on takeover, and each again by timer while still owed."""
        ...

    def events_of(self, entry: Any) -> Iterable[Event]: ...

    def messages_of(self, entry: Any) -> Iterable[Message]: ...

    def next_due_ms(self, state: State, hints: Hints) -> int | None:
        """
        The earliest ledger time at which a tick may make an entry, or None.

        A tick makes at most one thing of what is due: the runtime ticks again, evolving in
        between, while this is not past `now`, and always before a batch's other inputs (S-07).
        """
        ...

    def term_opened(self, term: int, owner: str, shards: int, hash_: str) -> Any:
        """The entry that opens a term; `evolve` checks it against the state."""
        ...

    def tick(self) -> Any:
        """The input that says: time has passed."""
        ...

    def encode_entries(self, entries: Sequence[Any]) -> bytes:
        """A JSON array of tagged objects."""
        ...

    def decode_entries(self, data: bytes) -> Sequence[Any]:
        """Raises `LedgerBrokenError` on an unknown kind or shape: such a shard is never owned."""
        ...

    def encode_state(self, state: State) -> bytes: ...

    def decode_state(self, data: bytes) -> State:
        """Raises on any mismatch; a snapshot is only a cache."""
        ...
