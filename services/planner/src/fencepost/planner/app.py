"""
The planner: the sandbox machine on every shard that the spreader gives to this process.

Composition only: adapters, runners, subjects, metrics. What a step may become is decided in
`fencepost.core.sandbox`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import structlog
from faststream.nats import NatsBroker
from fencepost.contracts import streams as table
from fencepost.contracts import subjects
from fencepost.core.errors import FencepostError, UnknownError
from fencepost.core.machine import Effect
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.inputs import GatewaySeen
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.planner import dispatching
from fencepost.planner.owned import OwnedShard
from fencepost.planner.recalling import Recaller
from fencepost.planner.receipts import Receipts
from fencepost.runtime import service, settings, streams
from fencepost.runtime.bus import JetStreamInputs, NatsBus
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.gate import Gate
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import PlannerMetrics
from fencepost.runtime.replica import Replica
from fencepost.runtime.shard_runner import Durable, ShardRunner
from fencepost.runtime.snapshots import JetStreamSnapshots

FAMILY: Final = "sandbox"

logger = structlog.get_logger(__name__)
_SEEN = msgspec.json.Decoder(GatewaySeen)


class Planner:
    """One planner process."""

    def __init__(self, config: settings.Settings, metrics: PlannerMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._receipts = Receipts(config.key(), self._receipt_undecodable)
        self._clock = SystemClock()
        self._gate = Gate()
        self.replica = f"planner-{secrets.token_hex(6)}"
        self._link: Link | None = None
        self._shards: Replica | None = None
        self._declaring: asyncio.Task[None] | None = None
        self._broken = ""

    # Life.

    async def start(self) -> None:
        """Connects, declares or checks the streams, and begins to take shards."""
        link = self._link = await Link.connect(
            self._config.nats_url,
            name=self.replica,
            access=self._config.access(),
            on_denied=lambda _detail: self._metrics.publish_denied.inc(),
        )
        link.on_lost(self._metrics.reconnects.inc)
        await streams.declare_at_start(
            link,
            self._config.shards,
            create=self._config.declare,
            replicas=self._config.replicas,
            ledgers=self._config.ledgers,
        )
        link.on_back(self._on_back)
        self._bus = NatsBus(link)
        self._inputs = JetStreamInputs(link)
        self._snapshots = JetStreamSnapshots(link)
        self._shards = Replica(
            FAMILY,
            link,
            self._clock,
            name=self.replica,
            shards=self._config.shards,
            make=self._make,
            metrics=self._metrics,
        )
        await self._bus.subscribe(subjects.GATEWAY_SEEN, self._on_gateway_seen)
        self._shards.start()

    async def _declare(self, link: Link) -> None:
        await streams.declare(
            link,
            self._config.shards,
            create=self._config.declare,
            replicas=self._config.replicas,
            ledgers=self._config.ledgers,
        )

    def _on_back(self) -> None:
        """A server that was started again has lost what was in memory: that is made again."""
        if self._declaring is None or self._declaring.done():
            self._declaring = asyncio.create_task(self._declare_again(), name="declare-again")

    async def _declare_again(self) -> None:
        assert self._link is not None
        while True:
            try:
                await self._declare(self._link)
            except (UnknownError, streams.StreamAwaitedError) as error:
                logger.warning("streams_not_checked", detail=str(error))
                await asyncio.sleep(0.2)
            except FencepostError as error:
                self._broken = str(error)
                logger.critical("streams_not_as_they_must_be", detail=str(error))
                await asyncio.sleep(5.0)
            else:
                self._broken = ""
                return

    async def stop(self) -> None:
        """Hands every shard over and closes."""
        if self._declaring is not None:
            self._declaring.cancel()
            await asyncio.gather(self._declaring, return_exceptions=True)
        if self._shards is not None:
            await self._shards.stop()
        if self._link is not None:
            await self._link.close()

    def ready(self) -> str:
        """Says why this planner does not do its work, or nothing."""
        if self._link is None or not self._link.is_connected:
            return "not connected to NATS"
        self._metrics.publish_dropped.set(self._link.dropped)
        if deaf := self._link.why_deaf():
            return deaf
        if self._broken:
            return self._broken
        return self._shards.why_not_ready() if self._shards is not None else ""

    # Shards.

    def _runner(self, shard: int, machine: SandboxMachine, recaller: Recaller) -> ShardRunner:
        def accepted(entries: Sequence[Any]) -> None:
            self._count(entries)
            recaller.heard(entries)

        assert self._link is not None
        return ShardRunner(
            machine,
            shard,
            self._config.shards,
            owner=self.replica,
            log=JetStreamLog(self._link, stream=table.ledger_of(shard, self._config.ledgers)),
            bus=self._bus,
            clock=self._clock,
            inputs=self._inputs,
            durables=[
                Durable("facts", table.FACTS, subjects.facts_of_shard(shard), 96),
                Durable("messages", table.MESSAGES, [subjects.message(FAMILY, shard)], 96, True),
                Durable("commands", table.COMMANDS, subjects.commands_of_shard(shard)),
            ],
            perform=self._perform,
            metrics=self._metrics,
            snapshot_store=self._snapshots,
            accepted=accepted,
            gate=self._gate,
        )

    def _make(self, shard: int) -> OwnedShard:
        machine = SandboxMachine(lease_ms=self._config.lease_ms)
        recaller = Recaller(machine)
        return OwnedShard(
            shard,
            self._config.shards,
            self._runner(shard, machine, recaller),
            machine,
            recaller=recaller,
            bus=self._bus,
            receipts=self._receipts,
            metrics=self._metrics,
        )

    # Inputs, effects, counting.

    def _on_gateway_seen(self, subject: str, data: bytes, reply: str) -> None:
        del reply
        try:
            seen = _SEEN.decode(data)
        except msgspec.DecodeError as error:
            self._metrics.inputs_poisoned.labels("volatile").inc()
            logger.warning("undecodable", subject=subject, detail=str(error))
            return
        owned = self._shards.owned if self._shards is not None else {}
        for shard in owned.values():
            shard.runner.submit(seen)

    def _perform(self, effects: list[Effect]) -> None:
        dispatching.perform(self._bus, effects)

    def _receipt_undecodable(self, detail: str) -> None:
        self._metrics.receipts_refused.labels("undecodable").inc()
        logger.error("receipt_undecodable", detail=detail)

    def _count(self, entries: Sequence[Any]) -> None:
        """Counts accepted entries, and logs what a person may look for."""
        metrics = self._metrics
        for entry in entries:
            match entry:
                case e.Committed():
                    metrics.steps_committed.inc()
                case e.Compensated() if entry.final:
                    metrics.steps_compensated.labels(entry.reason).inc()
                case e.Indeterminate():
                    metrics.steps_indeterminate.labels(entry.reason).inc()
                    logger.warning(
                        "step_indeterminate",
                        sandbox=entry.sandbox,
                        step=entry.step,
                        attempt=entry.attempt,
                        reason=entry.reason,
                    )
                case e.Refused():
                    metrics.commands_refused.labels(entry.reason).inc()
                case e.ReceiptRefused():
                    metrics.receipts_refused.labels(entry.reason).inc()
                    logger.warning(
                        "receipt_refused",
                        sandbox=entry.sandbox,
                        step=entry.step,
                        attempt=entry.attempt,
                        epoch=entry.epoch,
                        reason=entry.reason,
                    )
                case e.EpochOpened():
                    metrics.epochs_opened.labels(entry.disk).inc()
                    logger.info("epoch_opened", sandbox=entry.sandbox, epoch=entry.epoch)
                case e.EpochClosed():
                    metrics.epochs_closed.labels(entry.reason).inc()
                    logger.info(
                        "epoch_closed",
                        sandbox=entry.sandbox,
                        epoch=entry.epoch,
                        reason=entry.reason,
                    )
                case _:
                    self._count_recovery(entry)

    def _count_recovery(self, entry: Any) -> None:
        metrics = self._metrics
        match entry:
            case e.CheckpointedEntry():
                metrics.checkpoints.labels("stored").inc()
            case e.CheckpointFailedEntry():
                metrics.checkpoints.labels(entry.reason).inc()
                logger.warning(
                    "checkpoint_failed",
                    sandbox=entry.sandbox,
                    reason=entry.reason,
                    detail=entry.detail,
                )
            case e.Replayed():
                metrics.steps_replayed.labels(entry.verdict or "accepted").inc()
            case e.Recovered():
                metrics.recoveries.labels(entry.mode).inc()
                logger.info("recovered", sandbox=entry.sandbox, epoch=entry.epoch, mode=entry.mode)
            case e.RecoveryStopped():
                metrics.recoveries_stopped.labels(entry.reason).inc()
                logger.error(
                    "recovery_stopped",
                    sandbox=entry.sandbox,
                    epoch=entry.epoch,
                    step=entry.step,
                    reason=entry.reason,
                )
            case _:
                pass


def _describe(broker: NatsBroker) -> None:
    """What the AsyncAPI document says that a planner publishes; the hot path does it itself."""
    for subject, title, text in (
        (
            f"{subjects.PREFIX}.ledger.{FAMILY}.*",
            "ledger",
            "Batches of a shard: the only authority.",
        ),
        (
            f"{subjects.PREFIX}.dispatch.*",
            "orders",
            "Fenced calls and orders for one gateway session: a JSON array.",
        ),
        (f"{subjects.PREFIX}.event.>", "events", "Public events, each with its ledger position."),
    ):
        broker.publisher(subject, title=title, description=text)


def build() -> service.Service:
    """Builds the service from the environment. Raises `RefusedError` on a wrong setting."""
    config = settings.load(settings.Settings)
    service.configure_logging(config, "planner")
    metrics = PlannerMetrics()
    planner = Planner(config, metrics)
    return service.Service(
        "planner",
        config,
        metrics,
        start=planner.start,
        stop=planner.stop,
        ready=planner.ready,
        describe=_describe,
        description="Runs the sandbox machine; the only service that commits a step.",
    )
