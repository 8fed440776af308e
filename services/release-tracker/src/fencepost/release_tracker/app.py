"""The tracker's composition root: connections, the projector's task, the HTTP API."""

from __future__ import annotations

import asyncio

import structlog
from fencepost.contracts import streams
from fencepost.core.errors import LedgerBrokenError, RetryLaterError
from fencepost.release_tracker import migrations, store
from fencepost.release_tracker.api import Api
from fencepost.release_tracker.projector import Projector
from fencepost.release_tracker.reading import Reader
from fencepost.release_tracker.settings import TrackerSettings, load
from fencepost.release_tracker.store import Store
from fencepost.runtime.bus import JetStreamInputs
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import TrackerMetrics
from fencepost.runtime.service import Service, configure_logging

POLL_S = 0.05

logger = structlog.get_logger(__name__)


class Tracker:
    """One replica. `start` needs NATS only; PostgreSQL may come when it comes."""

    def __init__(self, settings: TrackerSettings, metrics: TrackerMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._scripts = settings.scripts()
        self._reader = Reader(settings.postgres_dsn)
        self.api = Api(
            self._reader,
            shards=settings.shards,
            token=settings.http_token.get_secret_value(),
            metrics=metrics,
        )
        self._link: Link | None = None
        self._projector: Projector | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._link = link = await _connect(self._settings, self._metrics)
        self._projector = Projector(
            self._settings.postgres_dsn,
            inputs=JetStreamInputs(link),
            log=JetStreamLog(link, stream=streams.LEDGER),
            shards=self._settings.shards,
            metrics=self._metrics,
            scripts=self._scripts,
        )
        self._tasks = [
            asyncio.create_task(self._projector.run(), name="project"),
            asyncio.create_task(self._projector.measure(), name="measure"),
        ]
        for task in self._tasks:
            task.add_done_callback(_told)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reader.close()
        if self._link is not None:
            await self._link.close()

    async def wait_for_heads(self, tables: Store) -> dict[int, int]:
        """
        Waits until the tables have what the ledger has now; returns the positions.

        Raises `LedgerBrokenError` when a shard stopped, `UnknownError` when NATS does not say.
        """
        assert self._projector is not None, "started first"
        heads = await self._projector.heads()
        while True:
            positions = await tables.positions()
            if all(positions.get(shard, 0) >= head for shard, head in heads.items()):
                return positions
            if self._projector.stopped:
                raise LedgerBrokenError(self._projector.why_not_ready)
            await asyncio.sleep(POLL_S)

    def why_not_ready(self) -> str:
        """Says what is in the way of keeping the projection up; "" when nothing is."""
        if self._projector is None or self._link is None:
            return "not started"
        if not self._link.is_connected:
            return "NATS: not connected"
        if any(task.done() for task in self._tasks):
            return "the projection ended by an error of its own; see the log"
        return self._projector.why_not_ready


def _told(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("task_failed", task=task.get_name(), exc_info=error)


async def _connect(settings: TrackerSettings, metrics: TrackerMetrics) -> Link:
    try:
        return await Link.connect(
            settings.nats_url,
            name="fencepost-release-tracker",
            creds=settings.nats_creds,
            on_denied=lambda _text: metrics.publish_denied.inc(),
        )
    except OSError as error:
        raise RetryLaterError(f"NATS at {settings.nats_url}: {error}") from error


def build() -> Service:
    """Raises `FencepostError` on wrong settings."""
    settings = load()
    configure_logging(settings, "release-tracker")
    metrics = TrackerMetrics()
    tracker = Tracker(settings, metrics)
    return Service(
        "release-tracker",
        settings,
        metrics,
        start=tracker.start,
        stop=tracker.stop,
        ready=tracker.why_not_ready,
        http=tracker.api,
        description="Projects the ledger into PostgreSQL and serves it over HTTP, read-only.",
    )


async def migrate(settings: TrackerSettings, phases: tuple[migrations.Phase, ...]) -> list[str]:
    """Brings the schema up to date; returns the migrations applied. Raises `RetryLaterError`."""
    try:
        connection = await store.connect(settings.postgres_dsn)
        try:
            return await migrations.migrate(connection, settings.scripts(), phases=phases)
        finally:
            connection.terminate()
    except store.UNREACHABLE as error:
        raise RetryLaterError(f"PostgreSQL: {error}") from error


async def rebuild(settings: TrackerSettings) -> dict[int, int]:
    """
    Wipes the projection and makes it again, up to where the ledger is now; returns the positions.

    Trackers that run begin again by themselves: this only wipes, helps, and waits.
    """
    await migrate(settings, ("pre",))
    tracker = Tracker(settings, TrackerMetrics())
    try:
        connection = await store.connect(settings.postgres_dsn)
        try:
            tables = Store(connection)
            await tables.wipe()
            await tracker.start()
            return await tracker.wait_for_heads(tables)
        finally:
            connection.terminate()
    except store.UNREACHABLE as error:
        raise RetryLaterError(f"PostgreSQL: {error}") from error
    finally:
        await tracker.stop()
