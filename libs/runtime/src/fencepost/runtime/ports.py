"""
What the runtime needs of the outside, as protocols. The simulator and JetStream both offer them.

A read has three results and they are three types: `Absent`, `Valid`, `Unknown`. Only a proven
missing message is absent; a missing stream, a timeout, a denied or undecodable answer are unknown
and must never be taken for an absence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
from fencepost.contracts.messages import Position
from fencepost.core.errors import FencepostError


class Absent(msgspec.Struct, frozen=True):
    """Proven: there is no such message."""


class Valid(msgspec.Struct, frozen=True):
    """A message that is there. `at_ms` is the server's stamp (milliseconds since 1970)."""

    seq: int
    payload: bytes
    at_ms: int


class Unknown(msgspec.Struct, frozen=True):
    """Neither presence nor absence is proven."""

    reason: str


ReadResult: TypeAlias = Absent | Valid | Unknown


class AppendRefused(FencepostError):
    """
    The subject's head is not the expected one. `last` is the server's word on it, or None.

    After a lost answer the refused append may be one's own: read forward before giving up.
    """

    def __init__(self, last: int | None) -> None:
        super().__init__(f"expected another last sequence; the server's is {last}")
        self.last = last


class AppendUnknown(FencepostError):
    """No answer, or one that proves nothing: the append may have been accepted, or may yet be."""


class InputLostError(FencepostError):
    """
    A durable input stream is not the one that the recorded position belongs to.

    Another incarnation, or shorter than the position. The shard is not owned until a person has
    looked: reading on would skip inputs silently.
    """


class ClockSkewedError(FencepostError):
    """The own clock is too far from the server's to own a shard."""


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since 1970. May jump; the ledger's time is made monotonic by its owner."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds from an arbitrary start, never back. For ages and time limits."""
        ...


class Log(Protocol):
    """The append-only log: one subject per shard, appends conditional on the subject's head."""

    async def append(
        self, subject: str, payload: bytes, expected_last_subject_seq: int, msg_id: str = ""
    ) -> int:
        """Returns the sequence. Raises `AppendRefused` or `AppendUnknown`, nothing else."""
        ...

    async def last(self, subject: str) -> ReadResult:
        """The newest message as far as the server knows; may be stale even on a leader."""
        ...

    async def next_after(self, subject: str, after_seq: int) -> ReadResult:
        """The first message of the subject above a sequence."""
        ...

    def read(self, subject: str, from_seq: int) -> AsyncIterator[tuple[int, bytes]]:
        """
        Yields all messages from a sequence on, in order, up to what the server has.

        Raises `UnknownError` when the read is cut. A gap is not noticed here: each batch names
        the former one.
        """
        ...

    async def server_now_ms(self) -> int:
        """The server's own clock. Raises `UnknownError`."""
        ...


class InputMessage(NamedTuple):
    """One message of a durable input stream."""

    seq: int
    subject: str
    data: bytes


class InputReader(Protocol):
    """An open, ordered read of a durable stream."""

    def poke(self) -> None:
        """Says that there is room again."""
        ...

    async def close(self) -> None: ...


class Inputs(Protocol):
    """Durable input streams, read by position."""

    async def incarnation(self, stream: str, position: Position | None) -> str:
        """
        The stream's incarnation now, checked against a recorded position.

        Raises `InputLostError` when the position is of another incarnation, or above the stream's
        end; `UnknownError` when the server does not say.
        """
        ...

    async def open(
        self,
        stream: str,
        filters: Sequence[str],
        *,
        after: Position,
        take: Callable[[InputMessage], None],
        room: Callable[[], int],
        fail: Callable[[Exception], None],
    ) -> InputReader:
        """
        Hands every message above the position to `take`, in order, each once.

        Asks for no more than `room()` messages at a time. `fail` is called at most once, with
        `InputLostError`; anything else is retried for ever.
        """
        ...


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


Handler: TypeAlias = Callable[[str, bytes, str], None]
"""Takes subject, data and reply subject ("" when none); must not block and must not raise."""


class Bus(Protocol):
    """Messages that need not survive, and publications into streams."""

    def publish(self, subject: str, data: bytes, reply: str = "") -> bool:
        """Sends without waiting. False: dropped, because too much is waiting already."""
        ...

    def publish_acked(self, subject: str, data: bytes, answered: Callable[[bool], None]) -> None:
        """
        Publishes into a stream; `answered(True)` when the stream has it, `False` on a refusal.

        No answer at all is possible: whoever needs certainty repeats.
        """
        ...

    async def subscribe(self, subject: str, handle: Handler, queue: str = "") -> Subscription: ...

    async def request(self, subject: str, data: bytes, timeout_ms: int) -> bytes:
        """Raises `UnknownError` on no responder, a timeout or a lost connection."""
        ...


class Snapshots(Protocol):
    """A store of snapshots: a cache, every error means "none"."""

    async def put(self, name: str, data: bytes) -> None: ...

    async def get(self, name: str) -> bytes | None: ...

    async def names(self, prefix: str) -> list[str]: ...

    async def delete(self, name: str) -> None: ...


Perform: TypeAlias = Callable[[list[Any]], None]
"""Hands effects to the outside. Must not block."""

Sleep: TypeAlias = Callable[[float], Awaitable[None]]
