"""
The dag half of a tracker: the dag machine on every shard that the spreader gives to this process.

It needs NATS only. What a DAG may become is decided in `fencepost.core.dag`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import structlog
from fencepost.contracts import streams, subjects
from fencepost.core.dag import entries as e
from fencepost.core.dag.machine import DagMachine
from fencepost.core.machine import Effect
from fencepost.release_tracker.owned import OwnedDags
from fencepost.runtime.bus import JetStreamInputs, NatsBus
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.gate import Gate
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import TrackerMetrics
from fencepost.runtime.replica import Replica
from fencepost.runtime.shard_runner import Durable, ShardRunner
from fencepost.runtime.snapshots import JetStreamSnapshots

FAMILY: Final = DagMachine.family

logger = structlog.get_logger(__name__)


class Dags:
    """See the module."""

    def __init__(
        self, link: Link, *, name: str, shards: int, ledgers: int, metrics: TrackerMetrics
    ) -> None:
        self._link = link
        self._name = name
        self._shards = shards
        self._ledgers = ledgers
        self._metrics = metrics
        self._clock = SystemClock()
        self._gate = Gate()
        self._bus = NatsBus(link)
        self._inputs = JetStreamInputs(link)
        self._snapshots = JetStreamSnapshots(link)
        self._replica = Replica(
            FAMILY, link, self._clock, name=name, shards=shards, make=self._make, metrics=metrics
        )

    def start(self) -> None:
        self._replica.start()

    async def stop(self) -> None:
        """Hands every shard over."""
        await self._replica.stop()

    def why_not_ready(self) -> str:
        return self._replica.why_not_ready()

    def _make(self, shard: int) -> OwnedDags:
        machine = DagMachine()
        runner = ShardRunner(
            machine,
            shard,
            self._shards,
            owner=self._name,
            log=JetStreamLog(self._link, stream=streams.ledger_of(shard, self._ledgers)),
            bus=self._bus,
            clock=self._clock,
            inputs=self._inputs,
            durables=[
                Durable("messages", streams.MESSAGES, [subjects.message(FAMILY, shard)], 96, True),
                Durable("commands", streams.COMMANDS, subjects.commands_of_dag_shard(shard)),
            ],
            perform=_perform,
            metrics=self._metrics,
            snapshot_store=self._snapshots,
            accepted=self._count,
            gate=self._gate,
        )
        return OwnedDags(shard, runner, machine, bus=self._bus)

    def _count(self, entries: Sequence[Any]) -> None:
        """Counts accepted verdicts, and logs what a person may look for."""
        for entry in entries:
            match entry:
                case e.Answered():
                    self._metrics.verdicts.labels(entry.verdict, entry.reason).inc()
                    logger.info(
                        "verdict",
                        dag=entry.dag,
                        released=entry.verdict,
                        reason=entry.reason,
                        outstanding=entry.outstanding,
                    )
                case e.Refused():
                    logger.info("command_refused", dag=entry.dag, id=entry.id, reason=entry.reason)
                case _:
                    pass


def _perform(effects: list[Effect]) -> None:
    """A dag shard owes nothing but messages, which the runtime sends."""
    assert not effects, "the dag machine gives no orders"
