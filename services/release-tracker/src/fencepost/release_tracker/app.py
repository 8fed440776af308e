"""
The tracker's composition root: two halves that do not wait for each other, and the HTTP API.

The dag half needs NATS only. The projecting half needs PostgreSQL too, and may lack it.
"""

from __future__ import annotations

import asyncio
import secrets

import structlog
from faststream.nats import NatsBroker
from fencepost.contracts import streams, subjects
from fencepost.core.errors import FencepostError, LedgerBrokenError, RetryLaterError
from fencepost.release_tracker import migrations, store
from fencepost.release_tracker.api import Api
from fencepost.release_tracker.dags import Dags
from fencepost.release_tracker.families import FAMILIES
from fencepost.release_tracker.projector import Projector
from fencepost.release_tracker.reading import Reader
from fencepost.release_tracker.settings import TrackerSettings, load
from fencepost.release_tracker.store import Store
from fencepost.release_tracker.tasks import Tasks
from fencepost.runtime import streams as declared
from fencepost.runtime.bus import JetStreamInputs
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import TrackerMetrics
from fencepost.runtime.service import Service, configure_logging

POLL_S = 0.05
LEDGER_AGAIN_S = 0.5

logger = structlog.get_logger(__name__)


class Projection:
    """The projecting half: one projector for each family."""

    def __init__(self, link: Link, settings: TrackerSettings, metrics: TrackerMetrics) -> None:
        scripts = settings.scripts()
        self.projectors = {
            family.name: Projector(
                settings.postgres_dsn,
                family,
                inputs=JetStreamInputs(link),
                logs=[
                    JetStreamLog(link, stream=name)
                    for name in streams.ledger_names(settings.ledgers)
                ],
                shards=settings.shards,
                metrics=metrics,
                scripts=scripts,
            )
            for family in FAMILIES
        }
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for name, projector in self.projectors.items():
            self._tasks += [
                asyncio.create_task(projector.run(), name=f"project-{name}"),
                asyncio.create_task(projector.measure(), name=f"measure-{name}"),
            ]
        for task in self._tasks:
            task.add_done_callback(_told)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def why_not_ready(self) -> str:
        """Says what is in the way of keeping the projection up; "" when nothing is."""
        if any(task.done() for task in self._tasks):
            return "ended by an error of its own; see the log"
        reasons = [projector.why_not_ready for projector in self.projectors.values()]
        return "; ".join(dict.fromkeys(filter(None, reasons)))

    async def wait_for_heads(self, connection: store.Connection) -> dict[str, int]:
        """
        Waits until the tables have what the ledger has now; returns the positions.

        Raises `LedgerBrokenError` when a shard stopped, `UnknownError` when NATS does not say.
        """
        reached: dict[str, int] = {}
        for family in FAMILIES:
            projector = self.projectors[family.name]
            tables = Store(connection, family)
            heads = await projector.heads()
            while True:
                positions = await tables.positions()
                if all(positions.get(shard, 0) >= head for shard, head in heads.items()):
                    break
                if projector.stopped:
                    raise LedgerBrokenError(projector.why_not_ready)
                await asyncio.sleep(POLL_S)
            reached |= {f"{family.name}.{shard}": seq for shard, seq in positions.items()}
        return reached


class Tracker:
    """One replica. `start` needs NATS only; PostgreSQL may come when it comes, or never."""

    def __init__(self, settings: TrackerSettings, metrics: TrackerMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._reader = Reader(settings.postgres_dsn)
        self.api = Api(
            self._reader,
            shards=settings.shards,
            token=settings.http_token.get_secret_value(),
            read_token=settings.http_read_token.get_secret_value(),
            metrics=metrics,
        )
        self.replica = f"tracker-{secrets.token_hex(6)}"
        self._link: Link | None = None
        self._dags: Dags | None = None
        self._projection: Projection | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._waits_for = ""

    async def start(self) -> None:
        """Connects, and begins to take dag shards and to project once the ledger is found."""
        self._link = link = await _connect(self._settings, self._metrics, self.replica)
        self.api.tasks = Tasks(link, shards=self._settings.shards, metrics=self._metrics)
        self._waits_for = "the ledger was not looked at yet"
        self._beginning = asyncio.create_task(self._begin(link), name="begin")
        self._beginning.add_done_callback(_told)

    async def _begin(self, link: Link) -> None:
        """
        Takes and reads nothing before each shard's batches are shown to be where it would look.

        What cannot be shown is said and looked at again: reads over HTTP do not wait for it.
        """
        settings = self._settings
        while True:
            try:
                await declared.check_ledgers(link, settings.shards, ledgers=settings.ledgers)
            except FencepostError as error:
                if self._waits_for != str(error):
                    self._waits_for = str(error)
                    logger.critical("ledger_not_as_it_must_be", detail=str(error))
                await asyncio.sleep(LEDGER_AGAIN_S)
            else:
                break
        self._dags = Dags(
            link,
            name=self.replica,
            shards=settings.shards,
            ledgers=settings.ledgers,
            metrics=self._metrics,
        )
        self._dags.start()
        if settings.postgres_dsn:
            self._projection = Projection(link, settings, self._metrics)
            self._projection.start()
        self._waits_for = ""

    async def stop(self) -> None:
        """Hands every dag shard over and closes."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.gather(self._beginning, return_exceptions=True)
        if self._projection is not None:
            await self._projection.stop()
        if self._dags is not None:
            await self._dags.stop()
        await self._reader.close()
        if self._link is not None:
            await self._link.close()

    def why_not_ready(self) -> str:
        """Says why dag shards are not run here; "" when they are."""
        if self._link is None:
            return "not started"
        if not self._link.is_connected:
            return "NATS: not connected"
        self._metrics.publish_dropped.set(self._link.dropped)
        if deaf := self._link.why_deaf():
            return deaf
        if self._dags is None:
            return f"ledger: {self._waits_for}"
        why = self._dags.why_not_ready()
        return f"dag shards: {why}" if why else ""

    def lacks(self) -> str:
        """Says why the projection is not kept up: readers see old rows, and cancels go on."""
        why = self._projection.why_not_ready() if self._projection is not None else ""
        return f"projection: {why}" if why else ""


def _told(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("task_failed", task=task.get_name(), exc_info=error)


async def _connect(settings: TrackerSettings, metrics: TrackerMetrics, name: str) -> Link:
    try:
        link = await Link.connect(
            settings.nats_url,
            name=name,
            access=settings.access(),
            on_denied=lambda _text: metrics.publish_denied.inc(),
        )
    except OSError as error:
        raise RetryLaterError(f"NATS at {settings.address().shown}: {error}") from error
    link.on_lost(metrics.reconnects.inc)
    return link


def _describe(broker: NatsBroker) -> None:
    """What the AsyncAPI document says that a tracker publishes; the runtime does it itself."""
    for subject, title, text in (
        (subjects.ledger("dag", 0).rpartition(".")[0] + ".*", "ledger", "Batches of a dag shard."),
        (subjects.release("*"), "releases", "Each verdict on a DAG, and each change of it."),
        (subjects.event_dag("*", "*"), "events", "What happened to DAGs, with ledger positions."),
    ):
        broker.publisher(subject, title=title, description=text)


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
        lacks=tracker.lacks,
        describe=_describe,
        http=tracker.api,
        description="Runs the dag machine; projects the ledger and serves it over HTTP.",
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
        raise store.failed(error) from error


async def rebuild(settings: TrackerSettings) -> dict[str, int]:
    """
    Wipes the projection and makes it again, up to where the ledger is now; returns the positions.

    Trackers that run begin again by themselves: this only wipes, helps, and waits.
    """
    await migrate(settings, ("pre",))
    metrics = TrackerMetrics()
    link = await _connect(settings, metrics, "fencepost-rebuild")
    projection = Projection(link, settings, metrics)
    try:
        await declared.check_ledgers(link, settings.shards, ledgers=settings.ledgers)
        connection = await store.connect(settings.postgres_dsn)
        try:
            await store.wipe(connection)
            projection.start()
            return await projection.wait_for_heads(connection)
        finally:
            connection.terminate()
    except store.UNREACHABLE as error:
        raise store.failed(error) from error
    finally:
        await projection.stop()
        await link.close()
