"""
The simulated log, the durable input streams, and the store of snapshots.

What survives every crash is here, and nothing else. An append is accepted only on the expected
head; its request, its answer, or both may be lost, late or never; a read may be stale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fencepost.simulator.world import Process, World


class Stored(NamedTuple):
    """One batch as the log has it."""

    seq: int
    payload: bytes


class Snapshot(NamedTuple):
    """A stored snapshot: `digest` is that of the bytes that were meant to be stored."""

    seq: int
    digest: str
    data: bytes


class _Append(NamedTuple):
    """An append under way, and who waits for its answer in which life."""

    process: Process
    life: int
    shard: int
    payload: bytes
    expected: int
    answer: Callable[[Any], None]


class InputStream:
    """A durable stream of one shard's inputs. Sequences start at 1 and have no gaps."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []

    def append(self, subject: str, data: bytes) -> int:
        self.messages.append((subject, data))
        return len(self.messages)


class SimulatedLog:
    """
    One family's shards and their durable inputs.

    `appended(shard, expected, stored)` is told of every accepted batch, at once.
    """

    def __init__(
        self,
        world: World,
        shards: int,
        appended: Callable[[int, int, Stored], None],
        *,
        inputs: tuple[str, ...] = ("commands", "facts"),
    ) -> None:
        self.world = world
        self.batches: list[list[Stored]] = [[] for _ in range(shards)]
        self.inputs = {name: [InputStream() for _ in range(shards)] for name in inputs}
        self.snapshots: list[list[Snapshot]] = [[] for _ in range(shards)]
        self.unreachable_until_ms = 0
        self._seq = 0
        self._appended = appended

    @property
    def commands(self) -> list[InputStream]:
        return self.inputs["commands"]

    @property
    def facts(self) -> list[InputStream]:
        return self.inputs["facts"]

    def head(self, shard: int) -> int:
        batches = self.batches[shard]
        return batches[-1].seq if batches else 0

    @property
    def is_reachable(self) -> bool:
        return self.world.now_ms >= self.unreachable_until_ms

    def append(
        self,
        process: Process,
        shard: int,
        payload: bytes,
        expected: int,
        answer: Callable[[Any], None],
    ) -> None:
        """Answers the sequence, or None for a refusal; or never."""
        world = self.world
        if world.hit("append_lost"):
            return
        delay_ms = world.between(200, 2_500) if world.hit("append_slow") else world.between(0, 2)
        asked = _Append(process, process.life, shard, payload, expected, answer)
        world.after(delay_ms, self._arrived, asked)

    def _arrived(self, asked: _Append) -> None:
        process, life, shard, payload, expected, answer = asked
        world = self.world
        if not self.is_reachable or process.is_cut("log"):
            return
        seq: int | None = None
        # A refusal may also be that of a leader which changed meanwhile: it says nothing.
        if self.accepts(shard, expected) and not world.hit("append_refused"):
            self._seq += 1
            seq = self._seq
            stored = Stored(seq, payload)
            self.batches[shard].append(stored)
            self._appended(shard, expected, stored)
        if not world.hit("append_answer_lost"):
            world.answer(world.between(0, 2), process, life, answer, (seq,))

    def accepts(self, shard: int, expected: int) -> bool:
        """The only condition of an append: the shard's head is the expected one."""
        return self.head(shard) == expected

    def read(
        self, process: Process, shard: int, after: int, answer: Callable[[list[Stored]], None]
    ) -> None:
        """Answers the batches above a sequence, perhaps without the newest; or never."""
        world = self.world
        if not self.is_reachable or process.is_cut("log") or world.hit("read_lost"):
            return
        batches = self.batches[shard]
        end = len(batches)
        if end and world.hit("read_stale"):
            end = max(0, end - world.between(1, 4))
        start = end
        while start > 0 and batches[start - 1].seq > after:
            start -= 1
        world.answer(world.between(0, 3), process, process.life, answer, (batches[start:end],))

    def put_snapshot(self, shard: int, seq: int, digest: str, data: bytes) -> None:
        if self.world.hit("snapshot_lost"):
            return
        if self.world.hit("snapshot_torn"):
            data = data[: len(data) // 2]
        self.snapshots[shard] = [*self.snapshots[shard][-2:], Snapshot(seq, digest, data)]
