"""A shard runner on in-memory ports, with a clock that only the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fencepost.contracts import subjects
from fencepost.contracts.messages import Batch
from fencepost.core.machine import Effect
from fencepost.runtime.metrics import RunnerMetrics
from fencepost.runtime.shard_runner import Durable, ShardRunner

from tests.contracts import until
from tests.memory import (
    ManualClock,
    MemoryBus,
    MemoryInputs,
    MemoryLog,
    MemorySnapshots,
    MemoryStream,
)
from tests.toy import Input, State, ToyMachine

SHARDS = 4


class Rig:
    """What survives every crash, and runners on it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog(self.clock)
        self.bus = MemoryBus()
        self.bus.add(MemoryStream("IN", ["in.*"]))
        self.bus.add(MemoryStream("FP_MESSAGES", [subjects.MESSAGES]))
        self.bus.add(MemoryStream("FP_EVENTS", ["fp.v1.event.>"]))
        self.inputs = MemoryInputs(self.bus)
        self.snapshots = MemorySnapshots()
        self.performed: list[tuple[str, str]] = []
        self.runners: list[ShardRunner] = []
        self.metrics = RunnerMetrics("test")

    def runner(
        self, owner: str, shard: int = 0, *, machine: ToyMachine | None = None, **options: Any
    ) -> ShardRunner:
        def perform(effects: list[Effect]) -> None:
            self.performed.extend((owner, effect.key) for effect in effects)

        runner = ShardRunner(
            machine or ToyMachine(),
            shard,
            options.pop("shards", SHARDS),
            owner=owner,
            log=options.pop("log", self.log),
            bus=self.bus,
            clock=options.pop("clock", self.clock),
            inputs=self.inputs,
            durables=[
                Durable("messages", "FP_MESSAGES", [subjects.message("toy", shard)], 64, True),
                Durable("in", "IN", [f"in.{shard}"]),
            ],
            perform=options.pop("perform", perform),
            metrics=self.metrics,
            snapshot_store=self.snapshots,
            **options,
        )
        self.runners.append(runner)
        return runner

    async def own(self, owner: str, shard: int = 0, **options: Any) -> ShardRunner:
        runner = self.runner(owner, shard, **options)
        await runner.start()
        return runner

    async def close(self) -> None:
        for runner in self.runners:
            await runner.stop(hand_over=False)

    def put(self, value: Any, shard: int = 0) -> None:
        """Publishes a durable input."""
        self.bus.publish(f"in.{shard}", msgspec.json.encode(value))

    def batches(self, shard: int = 0) -> list[Batch]:
        subject = subjects.ledger("toy", shard)
        return [
            msgspec.json.decode(payload, type=Batch)
            for known, payload, _ in self.log.messages
            if known == subject
        ]

    def entries(self, shard: int = 0) -> list[dict[str, Any]]:
        return [
            entry for batch in self.batches(shard) for entry in msgspec.json.decode(batch.entries)
        ]

    def kinds(self, shard: int = 0) -> list[str]:
        return [entry["kind"] for entry in self.entries(shard)]

    def events(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(data) for _, data in self.bus.streams["FP_EVENTS"].messages]

    async def settle(self, *runners: ShardRunner) -> None:
        """Waits until these runners have nothing to do."""
        for runner in runners:
            await until(
                lambda runner=runner: (
                    runner.ended.done()
                    or (  # type: ignore[misc]
                        not runner._has_work() and runner._waiter is not None
                    )
                )
            )

    async def pass_time(self, ms: int, *runners: ShardRunner) -> None:
        self.clock.advance(ms)
        for runner in runners:
            runner.wake()
        await asyncio.sleep(0.01)
        await self.settle(*runners)


async def state_of(runner: ShardRunner) -> State:
    state: State = await runner.ask(
        lambda state: msgspec.json.decode(msgspec.json.encode(state), type=State)
    )
    return state


def add(key: str, amount: int = 1, id_: str = "") -> Input:
    return Input(do="add", key=key, amount=amount, id=id_)


class Crash(BaseException):
    """Stands for `kill -9`: nothing after it runs."""


def crash_at(monkeypatch: Any, name: str, *, times: int = 1) -> Callable[[], int]:
    """Makes a crash point raise, once; returns how often it was reached."""
    reached = 0

    def point(here: str) -> None:
        nonlocal reached
        if here == name and reached < times:
            reached += 1
            raise Crash(here)

    monkeypatch.setattr("fencepost.runtime.crash.point", point)
    return lambda: reached
