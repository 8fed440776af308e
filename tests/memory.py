"""
In-memory forms of the runtime's ports, with faults that can be asked for.

They pass the same contracts as the adapters to the real server (`tests/contracts.py`). Nothing here
reads a clock or draws lots; what a test wants to go wrong it says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from fencepost.contracts.messages import Position
from fencepost.core import ids
from fencepost.core.errors import UnknownError
from fencepost.runtime.bus import check_position
from fencepost.runtime.ports import (
    Absent,
    AppendRefused,
    AppendUnknown,
    Handler,
    InputMessage,
    ReadResult,
    Unknown,
    Valid,
)


class ManualClock:
    """Two clocks that only a test moves."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.wall_ms = now_ms
        self.mono_ms = 1_000_000

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_ms(self) -> int:
        return self.mono_ms

    def advance(self, ms: int) -> None:
        self.wall_ms += ms
        self.mono_ms += ms


class MemoryLog:
    """
    One list of messages, conditional appends by subject.

    `faults` is a queue of words for the next appends: `drop` (nothing arrives), `lose` (accepted,
    answer lost), `ok`. `unreachable` fails everything; `blind_above` makes reads stale: they see
    nothing above that sequence, as a paused old leader's would.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.messages: list[tuple[str, bytes, int]] = []
        self.faults: deque[str] = deque()
        self.unreachable = False
        self.blind_above: int | None = None
        self.missing = False
        self.server_ahead_ms = 0
        self.before_append: Callable[[str, bytes], None] | None = None
        self.appends = 0

    def head(self, subject: str) -> int:
        for seq in range(len(self.messages), 0, -1):
            if self.messages[seq - 1][0] == subject:
                return seq
        return 0

    async def append(
        self, subject: str, payload: bytes, expected_last_subject_seq: int, msg_id: str = ""
    ) -> int:
        self.appends += 1
        if self.before_append is not None:
            self.before_append(subject, payload)
        fault = self.faults.popleft() if self.faults else "ok"
        if self.unreachable or self.missing or fault == "drop":
            raise AppendUnknown("no answer")
        head = self.head(subject)
        if head != expected_last_subject_seq:
            raise AppendRefused(head)
        self.messages.append((subject, payload, self.clock.now_ms()))
        if fault == "lose":
            raise AppendUnknown("the answer was lost")
        return len(self.messages)

    def _visible(self) -> int:
        if self.blind_above is None:
            return len(self.messages)
        return min(self.blind_above, len(self.messages))

    async def last(self, subject: str) -> ReadResult:
        if self.unreachable or self.missing:
            return Unknown("unreachable")
        for seq in range(self._visible(), 0, -1):
            if self.messages[seq - 1][0] == subject:
                return self._valid(seq)
        return Absent()

    async def next_after(self, subject: str, after_seq: int) -> ReadResult:
        if self.unreachable or self.missing:
            return Unknown("unreachable")
        for seq in range(after_seq + 1, self._visible() + 1):
            if self.messages[seq - 1][0] == subject:
                return self._valid(seq)
        return Absent()

    def _valid(self, seq: int) -> Valid:
        _, payload, at_ms = self.messages[seq - 1]
        return Valid(seq=seq, payload=payload, at_ms=at_ms)

    async def read(self, subject: str, from_seq: int) -> AsyncIterator[tuple[int, bytes]]:
        if self.unreachable or self.missing:
            raise UnknownError("unreachable")
        for seq in range(max(from_seq, 1), self._visible() + 1):
            if self.messages[seq - 1][0] == subject:
                yield seq, self.messages[seq - 1][1]

    async def server_now_ms(self) -> int:
        if self.unreachable or self.missing:
            raise UnknownError("unreachable")
        return self.clock.now_ms() + self.server_ahead_ms


class _Subscription:
    def __init__(self, bus: MemoryBus, pattern: str, handle: Handler) -> None:
        self.bus = bus
        self.pattern = pattern
        self.handle = handle

    async def unsubscribe(self) -> None:
        self.bus.subscriptions.remove(self)


def matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: whole tokens only."""
    want, have = pattern.split("."), subject.split(".")
    for index, token in enumerate(want):
        if token == ">":
            return len(have) > index
        if index >= len(have) or token not in ("*", have[index]):
            return False
    return len(want) == len(have)


class MemoryStream:
    """A stream: sequences start at 1; `incarnation` changes when it is made anew."""

    def __init__(self, name: str, subjects: list[str], incarnation: str = "1") -> None:
        self.name = name
        self.subjects = subjects
        self.incarnation = incarnation
        self.one_per_subject = False
        self.transform: Callable[[str], str] = lambda subject: subject
        self.messages: list[tuple[str, bytes]] = []
        self.refuses = False

    def store(self, subject: str, data: bytes) -> int | None:
        stored = self.transform(subject)
        if self.refuses:
            return None
        if self.one_per_subject and any(known == stored for known, _ in self.messages):
            return None
        self.messages.append((stored, data))
        return len(self.messages)


def partitioned(shards: int, token: int, place: int) -> Callable[[str], str]:
    """A transform like the server's: token `token` decides the shard, put in at `place`."""

    def transform(subject: str) -> str:
        parts = subject.split(".")
        shard = str(ids.shard_of(parts[token], shards))
        return ".".join([*parts[:place], shard, *parts[place:]])

    return transform


class MemoryBus:
    """Publish and subscribe, and streams that store what is published on their subjects."""

    def __init__(self) -> None:
        self.subscriptions: list[_Subscription] = []
        self.streams: dict[str, MemoryStream] = {}
        self.published: list[tuple[str, bytes]] = []
        self.changed: list[Callable[[], None]] = []
        self.silent: Callable[[str, bytes], bool] = lambda _subject, _data: False
        self._requests = 0

    def add(self, stream: MemoryStream) -> MemoryStream:
        self.streams[stream.name] = stream
        return stream

    def publish(self, subject: str, data: bytes, reply: str = "") -> bool:
        self.published.append((subject, data))
        self._store(subject, data)
        for subscription in tuple(self.subscriptions):
            if matches(subscription.pattern, subject):
                subscription.handle(subject, data, reply)
        return True

    def _store(self, subject: str, data: bytes) -> bool:
        for stream in self.streams.values():
            if any(matches(pattern, subject) for pattern in stream.subjects):
                stored = stream.store(subject, data) is not None
                for call in tuple(self.changed):
                    call()
                return stored
        return False

    def publish_acked(self, subject: str, data: bytes, answered: Callable[[bool], None]) -> None:
        if self.silent(subject, data):
            return
        self.published.append((subject, data))
        answered(self._store(subject, data))

    async def subscribe(self, subject: str, handle: Handler, queue: str = "") -> _Subscription:
        subscription = _Subscription(self, subject, handle)
        self.subscriptions.append(subscription)
        return subscription

    async def request(self, subject: str, data: bytes, timeout_ms: int) -> bytes:
        self._requests += 1
        inbox = f"_INBOX.{self._requests}"
        answers: list[bytes] = []
        subscription = await self.subscribe(inbox, lambda _s, answer, _r: answers.append(answer))
        self.publish(subject, data, inbox)
        await subscription.unsubscribe()
        if not answers:
            raise UnknownError(f"{subject}: no responder")
        return answers[0]


class _Reader:
    def __init__(self, close: Callable[[], None], push: Callable[[], None]) -> None:
        self._close = close
        self._push = push

    def poke(self) -> None:
        self._push()

    async def close(self) -> None:
        self._close()


class MemoryInputs:
    """Ordered reads of a bus's streams."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus

    def _stream(self, name: str) -> MemoryStream:
        stream = self.bus.streams.get(name)
        if stream is None:
            raise UnknownError(f"{name}: stream not found (10059)")
        return stream

    async def incarnation(self, stream: str, position: Position | None) -> str:
        found = self._stream(stream)
        check_position(stream, position, found.incarnation, len(found.messages))
        return found.incarnation

    async def open(
        self,
        stream: str,
        filters: Sequence[str],
        *,
        after: Position,
        take: Callable[[InputMessage], None],
        room: Callable[[], int],
        fail: Callable[[Exception], None],
    ) -> _Reader:
        at = after.seq
        failed = False

        def push() -> None:
            nonlocal at, failed
            try:
                found = self._stream(stream)
                check_position(
                    stream, Position(after.incarnation, at), found.incarnation, len(found.messages)
                )
            except UnknownError:
                return
            except Exception as error:
                if not failed:
                    failed = True
                    fail(error)
                return
            while at < len(found.messages) and room() > 0:
                subject, data = found.messages[at]
                at += 1
                if any(matches(pattern, subject) for pattern in filters):
                    take(InputMessage(at, subject, data))

        self.bus.changed.append(push)
        push()
        return _Reader(lambda: self.bus.changed.remove(push), push)


class MemorySnapshots:
    """A store of snapshots, in a dict that tests may spoil."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}

    async def put(self, name: str, data: bytes) -> None:
        self.stored[name] = data

    async def get(self, name: str) -> bytes | None:
        return self.stored.get(name)

    async def names(self, prefix: str) -> list[str]:
        return sorted(name for name in self.stored if name.startswith(prefix))

    async def delete(self, name: str) -> None:
        self.stored.pop(name, None)
