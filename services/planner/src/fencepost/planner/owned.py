"""
One shard that this planner owns: the runner, and the volatile subjects that feed it.

Everything here ends with the ownership; what was not accepted by then is repeated by its sender.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog
from fencepost.contracts import subjects
from fencepost.contracts.messages import Ask, Now
from fencepost.core import ids
from fencepost.core.errors import FencepostError
from fencepost.core.sandbox.inputs import Heartbeats
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.planner.recalling import Recaller
from fencepost.planner.receipts import Receipts
from fencepost.runtime.metrics import PlannerMetrics
from fencepost.runtime.ports import Bus, Subscription
from fencepost.runtime.questions import Questions
from fencepost.runtime.shard_runner import ShardRunner

ASK_AGE_MS: Final = 1_000

logger = structlog.get_logger(__name__)
_ENCODE = msgspec.json.Encoder().encode
_NOW = msgspec.json.Decoder(list[Now])
_ASK = msgspec.json.Decoder(Ask)
_HEARTBEATS = msgspec.json.Decoder(Heartbeats)


class OwnedShard:
    """Wires one runner to its volatile subjects."""

    def __init__(
        self,
        shard: int,
        shards: int,
        runner: ShardRunner,
        machine: SandboxMachine,
        *,
        recaller: Recaller,
        bus: Bus,
        receipts: Receipts,
        metrics: PlannerMetrics,
    ) -> None:
        self.shard = shard
        self.runner = runner
        self._shards = shards
        self._machine = machine
        self._recaller = recaller
        self._bus = bus
        self._receipts = receipts
        self._metrics = metrics
        self._subscriptions: list[Subscription] = []
        self._questions = Questions(bus, self._view)

    async def start(self) -> None:
        """Takes the shard over; raises what `ShardRunner.start` raises."""
        try:
            await self.runner.start()
            for subject, handle in (
                (subjects.receipts(self.shard), self._on_receipts),
                (subjects.heartbeats(self.shard), self._on_heartbeats),
                (subjects.now(self.shard), self._on_now),
                (subjects.ask(self.shard), self._questions.take),
            ):
                self._subscriptions.append(await self._bus.subscribe(subject, handle))
            self._recaller.start(self.runner)
        except BaseException:
            await self.stop(hand_over=False)
            raise

    async def stop(self, *, hand_over: bool = True) -> None:
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()
        await self._recaller.stop()
        await self.runner.stop(hand_over=hand_over)
        await self._questions.close()

    # Volatile inputs.

    def _on_receipts(self, subject: str, data: bytes, reply: str) -> None:
        del subject, reply
        for received in self._receipts.decode(data):
            if ids.shard_of(received.sandbox, self._shards) != self.shard:
                self._misrouted("receipt", received.sandbox)
                continue
            self.runner.submit(received)

    def _on_heartbeats(self, subject: str, data: bytes, reply: str) -> None:
        del reply
        try:
            self.runner.submit(_HEARTBEATS.decode(data))
        except msgspec.DecodeError as error:
            self._undecodable(subject, error)

    def _on_now(self, subject: str, data: bytes, reply: str) -> None:
        try:
            commands = _NOW.decode(data)
        except msgspec.DecodeError as error:
            self._undecodable(subject, error)
            return
        values: list[Any] = []
        for command in commands:
            if ids.shard_of(command.aggregate, self._shards) != self.shard:
                self._misrouted(command.kind, command.aggregate)
                continue
            name = f"{subjects.PREFIX}.in.{self.shard}.{command.kind}.{command.aggregate}"
            try:
                values += self._machine.decode("now", f"{name}.{command.id}", bytes(command.body))
            except FencepostError as error:
                values.append(self._machine.poison("now", name, 0, str(error)))
        accepted = self._acknowledge(reply, len(values)) if reply else None
        for value in values:
            self.runner.submit(value, accepted)

    def _acknowledge(self, reply: str, count: int) -> Callable[[int], None]:
        """Answers once all of a message's commands are in the ledger."""
        left = count

        def accepted(seq: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._bus.publish(reply, _ENCODE({"shard": self.shard, "seq": seq}))

        return accepted

    def _misrouted(self, what: str, sandbox: str) -> None:
        self._metrics.receipts_refused.labels("misrouted").inc()
        logger.error("misrouted", what=what, sandbox=sandbox[:80], shard=self.shard)

    def _undecodable(self, subject: str, error: Exception) -> None:
        self._metrics.inputs_poisoned.labels("volatile").inc()
        logger.error("undecodable", subject=subject, detail=str(error))

    # Questions.

    async def _view(self, data: bytes) -> Any:
        """Reads the state after a proof of ownership: also "no such step" is then the truth."""
        machine, question = self._machine, _ASK.decode(data)
        if question.what == "sandboxes":
            return await self.runner.ask(machine.view_sandboxes, max_age_ms=ASK_AGE_MS)
        if question.what == "sweep":
            after = max(0, question.after)
            return await self.runner.ask(
                lambda state: machine.view_sweep(state, after), max_age_ms=ASK_AGE_MS
            )
        if question.what == "sandbox":
            return await self.runner.ask(
                lambda state: machine.view_sandbox(state, question.sandbox), max_age_ms=ASK_AGE_MS
            )
        view, place = await self.runner.ask(
            lambda state: (
                machine.view_step(state, question.sandbox, question.step),
                machine.place_of_final(state, question.sandbox, question.step),
            ),
            max_age_ms=ASK_AGE_MS,
        )
        if view is not None and place is not None:
            entries = await self.runner.entries_at(place.after)
            view["entry"] = entries[place.index]
        return view
