"""
The sweeper: one tick after the other on the replica that leads; the others wait.

Composition only. What a listed thing or a holder is found to be is decided in
`fencepost.core.sweeping`, and what comes of a proposal in the sandbox's shard.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final

import msgspec
import structlog
from faststream.nats import NatsBroker
from fencepost.contracts import subjects
from fencepost.contracts.messages import SweepReply
from fencepost.core import sweeping
from fencepost.core.errors import FencepostError, RefusedError, UnknownError
from fencepost.core.sweeping import Report
from fencepost.runtime import service, settings, streams
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import SweeperMetrics
from fencepost.runtime.spreader import Owners, Spreader
from fencepost.sweeper.reading import Mode, NatsSources
from fencepost.sweeper.ticking import Options, Sweeper
from pydantic import Field

FAMILY: Final = "sweep"
GATEWAYS_HEARD_MS: Final = 1_500
"""Before the first tick: long enough to hear from every gateway that lives."""
LEAD: Final = 0
"""The one "shard" of the family: whoever has it leads. It only makes sweeping cheap."""

logger = structlog.get_logger(__name__)
_encode: Final = msgspec.json.Encoder().encode


class SweeperSettings(settings.Settings):
    """
    What a sweeper can be told besides.

    `sweep`: "on", "census" (looks and counts, proposes nothing) or "off"; the deployment's switch
    overrides it at each tick. A misfit is proposed when it was still one `sweep_grace_ms` after it
    was first seen. `sweep_budget` bounds a tick's proposals, `sweep_asks` the DAGs asked about.
    `deployment` is that of the gateways whose listings are looked at.
    """

    deployment: str = Field(default="local", pattern=r"^[A-Za-z0-9_-]{1,64}\z")
    sweep: Mode = "on"
    sweep_every_ms: int = Field(default=15_000, ge=100, le=3_600_000)
    sweep_grace_ms: int = Field(default=30_000, ge=0, le=86_400_000)
    sweep_budget: int = Field(default=50, ge=0, le=10_000)
    sweep_asks: int = Field(default=500, ge=0, le=100_000)


class Service:
    """One sweeper process."""

    def __init__(self, config: SweeperSettings, metrics: SweeperMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._clock = SystemClock()
        self.replica = f"sweeper-{secrets.token_hex(6)}"
        self._link: Link | None = None
        self._spreader: Spreader | None = None
        self._owners: Owners | None = None
        self._ticks: asyncio.Task[None] | None = None
        self._asked: Any = None
        self._answers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Connects, checks the streams, and begins to try for the lead."""
        config = self._config
        link = self._link = await Link.connect(
            config.nats_url,
            name=self.replica,
            access=config.access(),
            on_denied=lambda _detail: self._metrics.publish_denied.inc(),
        )
        link.on_lost(self._metrics.reconnects.inc)
        await streams.declare_at_start(
            link,
            config.shards,
            create=config.declare,
            replicas=config.replicas,
            ledgers=config.ledgers,
        )
        self._sources = NatsSources(link, self._clock, config.shards)
        await self._sources.listen()
        self._owners = Owners(link, FAMILY)
        self._spreader = Spreader(
            self._owners,
            self._clock,
            replica=self.replica,
            shards=1,
            own=self._lead,
            give_up=self._step_down,
        )
        self._spreader.start()

    async def stop(self) -> None:
        if self._spreader is not None:
            await self._spreader.stop()
        await self._step_down(LEAD)
        if self._link is not None:
            await self._link.close()

    def ready(self) -> str:
        """Says why this sweeper does not do its work, or nothing. Waiting for the lead is work."""
        if self._link is None or not self._link.is_connected:
            return "not connected to NATS"
        self._metrics.publish_dropped.set(self._link.dropped)
        if deaf := self._link.why_deaf():
            return deaf
        if self._ticks is not None and self._ticks.done() and not self._ticks.cancelled():
            return f"sweeping ended: {self._ticks.exception()}"
        return ""

    # The lead.

    async def _lead(self, shard: int) -> None:
        assert shard == LEAD
        assert self._link is not None
        logger.info("lead_taken", replica=self.replica)
        config = self._config
        sweeper = Sweeper(
            self._sources,
            Options(
                deployment=config.deployment,
                mode=config.sweep,
                grace_ms=config.sweep_grace_ms,
                budget=config.sweep_budget,
                asks=config.sweep_asks,
            ),
            clock=self._clock,
            metrics=self._metrics,
            leads=self._leads,
        )
        self._asked = await self._link.subscribe_raw(
            subjects.SWEEP, lambda msg: self._take_question(sweeper, msg)
        )
        self._ticks = asyncio.create_task(self._tick_for_ever(sweeper), name="sweep")

    async def _step_down(self, shard: int) -> None:
        assert shard == LEAD
        asked, self._asked = self._asked, None
        if asked is not None and self._link is not None and not self._link.nc.is_closed:
            await asked.unsubscribe()
        ticks, self._ticks = self._ticks, None
        waiting = [*self._answers, *([ticks] if ticks is not None else [])]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _leads(self) -> bool:
        """Asks whose the lead is. Not knowing is not leading."""
        if self._spreader is None or self._owners is None or LEAD not in self._spreader.held:
            return False
        try:
            keys = await self._owners.read()
        except UnknownError:
            return False
        return keys.get(f"shard.{LEAD}", (0, ""))[1] == self.replica

    async def _tick_for_ever(self, sweeper: Sweeper) -> None:
        await asyncio.sleep(min(self._config.sweep_every_ms, GATEWAYS_HEARD_MS) / 1000)
        while True:
            try:
                await sweeper.tick()
            except FencepostError as error:
                self._metrics.sweeps.labels("failed").inc()
                logger.warning("sweep_failed", detail=str(error))
            await asyncio.sleep(self._config.sweep_every_ms / 1000)

    # Dry runs.

    def _take_question(self, sweeper: Sweeper, msg: Any) -> None:
        if msg.reply:
            task = asyncio.get_running_loop().create_task(self._answer(sweeper, msg.reply))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    async def _answer(self, sweeper: Sweeper, reply: str) -> None:
        try:
            said = SweepReply(reports=await sweeper.tick(census=True))
        except FencepostError as error:
            said = SweepReply(problem=str(error))
        assert self._link is not None
        self._link.publish(reply, _encode(said))


def _describe(broker: NatsBroker) -> None:
    """What the AsyncAPI document says that a sweeper publishes."""
    prefix = subjects.PREFIX
    broker.publisher(
        f"{prefix}.event.sweep.*",
        title="reports",
        description="What one tick saw of one authority, or of the holders, and proposed.",
        schema=Report,
    )
    broker.publisher(
        f"{prefix}.fact.*.*",
        title="proposals",
        description="`stray` and `orphaned`: inputs of the sandbox's shard, which decides.",
    )


def build() -> service.Service:
    """Builds the service from the environment. Raises `RefusedError` on a wrong setting."""
    config = settings.load(SweeperSettings)
    if not sweeping.is_due_before_forgotten(config.sweep_grace_ms, config.sweep_every_ms):
        raise RefusedError(
            "bad_setting",
            "FENCEPOST_SWEEP_GRACE_MS: what is deferred would be forgotten before it is decided",
            field="sweep_grace_ms",
        )
    service.configure_logging(config, "sweeper")
    metrics = SweeperMetrics()
    sweeper = Service(config, metrics)
    return service.Service(
        "sweeper",
        config,
        metrics,
        start=sweeper.start,
        stop=sweeper.stop,
        ready=sweeper.ready,
        describe=_describe,
        description="Proposes what is nobody's any more; decides nothing.",
    )
