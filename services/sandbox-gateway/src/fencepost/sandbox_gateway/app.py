"""
The sandbox-gateway: providers, one NATS connection, and one gateway session after the other.

Composition only. What a session does is in `session`, when it must stop writing in `lease`.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final

import structlog
from faststream.nats import NatsBroker
from fencepost.contracts import subjects
from fencepost.core.errors import FencepostError
from fencepost.core.sandbox.inputs import GatewaySeen
from fencepost.providers.protocol import Provider
from fencepost.runtime import chunks, service, settings, streams
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import GatewayMetrics
from fencepost.sandbox_gateway import runtimes
from fencepost.sandbox_gateway.blobs import NatsBlobs
from fencepost.sandbox_gateway.session import GatewaySession, Options
from pydantic import Field

GONE_WITHIN_MS: Final = 5_000

logger = structlog.get_logger(__name__)


class GatewaySettings(settings.Settings):
    """
    What a gateway can be told besides.

    `sandbox_root`: the folder of the `process` provider's sandboxes; gateways of one host that
    share it can all reach them. `deployment` keeps two deployments on one root apart.
    `swerex_pool`: the folder that names SWE-ReX servers; without it that provider is not offered.
    `process`: whether sandboxes on this host, of the provider `process`, are offered.
    `docker`: a Docker engine's address (`unix:///…`, `tcp://…`), or `default` for the one that the
    docker command uses; empty: not offered. `docker_image` is taken where a spec names none,
    `docker_network` is the network of sandboxes that ask for one.
    `kubernetes_cluster`: the cluster's name for ever, alike for all gateways of the same pods;
    empty: not offered. `kubernetes_config`: a kubeconfig file; without one, the pod's own account.
    `kubernetes_grace_s`: what a pod is given to be saved in when others than ourselves end it.
    `allow_faults` lets anybody who may publish reclaim sandboxes: for demonstrations and tests.
    `checkpoint_store` keeps the chunks of checkpoints, the same for all gateways: `jetstream:`,
    `file:///<folder>` or `s3://<bucket>/<prefix>?endpoint=<url>` with S3's usual environment.
    """

    checkpoint_store: str = "jetstream:"
    sandbox_root: Path | None = None
    deployment: str = Field(default="local", pattern=r"^[A-Za-z0-9_-]{1,64}\z")
    isolate: bool = True
    swerex_pool: Path | None = None
    process: bool = True
    docker: str = ""
    docker_image: str = "python:3.11-slim"
    docker_network: str = "bridge"
    kubernetes_cluster: str = ""
    kubernetes_config: Path | None = None
    kubernetes_namespace: str = Field(default="fencepost-sandboxes", pattern=r"^[a-z0-9-]{1,63}\z")
    kubernetes_image: str = "python:3.13-slim"
    kubernetes_runtime_class: str = ""
    kubernetes_grace_s: int = Field(default=30, ge=1, le=3600)
    allow_faults: bool = False


class Gateway:
    """One gateway process."""

    def __init__(self, config: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._options = Options(
            shards=config.shards,
            master=config.key(),
            lease_ms=config.lease_ms,
            heartbeat_ms=config.heartbeat_ms,
            gone_within_ms=GONE_WITHIN_MS,
            allow_faults=config.allow_faults,
            deployment=config.deployment,
        )
        self._clock = SystemClock()
        self._stopping = asyncio.Event()
        self._link: Link | None = None
        self._chunks: chunks.ChunkStore | None = None
        self._providers: dict[str, Provider] = {}
        self._running: asyncio.Task[None] | None = None
        self._session: GatewaySession | None = None
        self._declaring: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Looks at the providers, connects, and begins with a session."""
        try:
            await self._start()
        except BaseException:
            await self.stop()  # nobody else stops what did not start
            raise

    async def _start(self) -> None:
        config = self._config
        providers = self._providers = await runtimes.open_providers(config)
        for provider in providers.values():
            logger.info(
                "provider_ready",
                provider=provider.traits.name,
                authority=provider.traits.authority,
                isolation=provider.traits.capabilities.isolation,
            )
        link = self._link = await Link.connect(
            config.nats_url,
            name="sandbox-gateway",
            access=config.access(),
            on_denied=lambda _detail: self._metrics.publish_denied.inc(),
        )
        link.on_lost(self._metrics.reconnects.inc)
        self._chunks = chunks.open_store(config.checkpoint_store, link)
        await streams.declare_at_start(
            link,
            config.shards,
            create=config.declare,
            replicas=config.replicas,
            ledgers=config.ledgers,
        )
        link.on_back(self._server_is_back)
        self._running = asyncio.create_task(self._sessions(link, providers))

    def _server_is_back(self) -> None:
        """A server that was started again has lost what it kept in memory, the leases included."""
        if self._declaring is None or self._declaring.done():
            self._declaring = asyncio.create_task(self._declare_again())

    async def _declare_again(self) -> None:
        assert self._link is not None
        while not self._stopping.is_set():
            try:
                await streams.declare(
                    self._link,
                    self._config.shards,
                    create=self._config.declare,
                    replicas=self._config.replicas,
                    ledgers=self._config.ledgers,
                )
            except FencepostError as error:
                logger.warning("streams_not_ready", detail=str(error))
                await asyncio.sleep(0.5)
            else:
                return

    async def _sessions(self, link: Link, providers: dict[str, Provider]) -> None:
        """A session that is over is followed by another one, under another id."""
        while not self._stopping.is_set():
            self._session = GatewaySession(
                link,
                providers=providers,
                options=self._options,
                clock=self._clock,
                metrics=self._metrics,
                blob_store=NatsBlobs(link),
                chunk_store=self._chunks,
            )
            await self._session.run(self._stopping)

    async def stop(self) -> None:
        """Says goodbye, ends the toolhosts in peace, and closes."""
        self._stopping.set()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
        if self._declaring is not None:
            self._declaring.cancel()
            await asyncio.gather(self._declaring, return_exceptions=True)
        if self._chunks is not None:
            await self._chunks.close()
        if self._link is not None:
            await self._link.close()
        await runtimes.close_providers(self._providers)

    def ready(self) -> str:
        """Says why this gateway does not do its work, or nothing."""
        if self._link is None or not self._link.is_connected:
            return "not connected to NATS"
        self._metrics.publish_dropped.set(self._link.dropped)
        if deaf := self._link.why_deaf():
            return deaf
        if self._running is not None and self._running.done():
            with contextlib.suppress(asyncio.CancelledError):
                return f"sessions ended: {self._running.exception()}"
        if self._session is None or not self._session.is_open:
            return "no lease"
        return ""


def _describe(broker: NatsBroker) -> None:
    """What the AsyncAPI document says that a gateway publishes; the hot path does it itself."""
    prefix = subjects.PREFIX
    for subject, title, text in (
        (f"{prefix}.fact.*.*", "facts", "What was seen of sandboxes, durably."),
        (f"{prefix}.receipt.*", "receipts", "Stamped receipts: a JSON array for one shard."),
        (f"{prefix}.heartbeat.*", "heartbeats", "Toolhosts that re-read their markers."),
    ):
        broker.publisher(subject, title=title, description=text)
    broker.publisher(
        subjects.GATEWAY_SEEN,
        title="seen",
        description="A gateway session is alive, and what it can reach.",
        schema=GatewaySeen,
    )


def build() -> service.Service:
    """Builds the service from the environment. Raises `RefusedError` on a wrong setting."""
    config = settings.load(GatewaySettings)
    service.configure_logging(config, "sandbox-gateway")
    metrics = GatewayMetrics()
    gateway = Gateway(config, metrics)
    return service.Service(
        "sandbox-gateway",
        config,
        metrics,
        start=gateway.start,
        stop=gateway.stop,
        ready=gateway.ready,
        describe=_describe,
        description="Hands and eyes: carries out orders, stamps receipts, reports what it sees.",
    )
