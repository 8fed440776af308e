"""
The life of a service: start, ready, drain, stop; the same for all of them.

A service is a FastStream application under an ASGI server: `/healthz` (the process turns),
`/readyz` (it does its work), `/metrics`, and the AsyncAPI document at `/asyncapi`. SIGTERM drains:
what is in flight is finished and what is held is handed over, then the process ends with 0.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NoReturn

import structlog
import uvicorn
from faststream.asgi import AsgiFastStream, AsgiResponse, AsyncAPIRoute, get
from faststream.nats import NatsBroker
from faststream.nats.security import (
    NatsCredentials,
    NatsNKey,
    NatsSecurity,
    NatsToken,
    NatsUserPassword,
)
from faststream.security import BaseSecurity
from faststream.specification import AsyncAPI
from fencepost.core.errors import FencepostError, RefusedError, RetryLaterError
from fencepost.runtime.access import Access
from fencepost.runtime.metrics import ServiceMetrics
from fencepost.runtime.settings import Settings
from nats.errors import Error as NatsError

GC_THRESHOLD: Final = 10_000

logger = structlog.get_logger(__name__)


def configure_logging(settings: Settings, service: str) -> None:
    """Structured lines on standard error: JSON, or for people on a terminal."""
    level = getattr(logging, settings.log_level.upper())
    console = settings.log_format == "console" or (
        settings.log_format == "auto" and sys.stderr.isatty()
    )
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)


class _App(AsgiFastStream):
    """Hands every path that is not one of the service's own to its HTTP API, where it has one."""

    http: Any = None

    async def not_found(self, scope: Any, receive: Any, send: Any) -> None:
        if self.http is not None and scope["type"] == "http":
            await self.http(scope, receive, send)
        else:
            await super().not_found(scope, receive, send)


class _Broker(NatsBroker):
    """A broker whose end is no failure: without a connection there is nothing left to drain."""

    async def stop(self, *args: Any, **options: Any) -> None:
        try:
            await super().stop(*args, **options)
        except NatsError as error:
            logger.info("broker_not_drained", detail=str(error))


class Service:
    """
    One service process. `start` and `stop` are the service's own; `ready` says "" or why not.
    `lacks` says what it lacks although it does its work: it is ready all the same, and says so.
    `http` is an ASGI application that answers all other paths.

    `start` may raise `FencepostError`: the process then ends with one line, see `end`.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        metrics: ServiceMetrics,
        *,
        start: Callable[[], Awaitable[None]],
        stop: Callable[[], Awaitable[None]],
        ready: Callable[[], str],
        lacks: Callable[[], str] = str,
        describe: Callable[[NatsBroker], None] | None = None,
        http: Any = None,
        description: str = "",
    ) -> None:
        self.name = name
        self.settings = settings
        self.metrics = metrics
        self._start = start
        self._stop = stop
        self._ready = ready
        self._lacks = lacks
        self._failed: FencepostError | None = None
        where = settings.address()
        self.broker = _Broker(
            where.urls,
            name=f"fencepost-{name}-control",
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            logger=None,
            security=_security(where.whom(settings.access())),
        )
        if describe is not None:
            describe(self.broker)
        self.app = _App(
            self.broker,
            logger=None,
            specification=AsyncAPI(
                self.broker,
                title=f"fencepost {name}",
                version=_version(),
                description=description,
            ),
            asyncapi_path=AsyncAPIRoute(
                "/asyncapi", asyncapi_json_path="/asyncapi.json", try_it_out_path=None
            ),
            asgi_routes=[
                ("/healthz", self._healthz()),
                ("/readyz", self._readyz()),
                ("/metrics", self._metrics_route()),
            ],
            on_startup=[self._on_startup],
            on_shutdown=[self._on_shutdown],
        )
        self.app.http = http

    def _healthz(self) -> Any:
        @get(include_in_schema=False)
        async def healthz(scope: Any) -> AsgiResponse:
            del scope
            return AsgiResponse(b"ok\n", 200)

        return healthz

    def _readyz(self) -> Any:
        @get(include_in_schema=False)
        async def readyz(scope: Any) -> AsgiResponse:
            del scope
            why = self._ready()
            self.metrics.up.set(0 if why else 1)
            if why:
                return AsgiResponse(f"not ready: {why}\n".encode(), 503)
            lacks = self._lacks()
            return AsgiResponse(f"ready, but {lacks}\n".encode() if lacks else b"ready\n", 200)

        return readyz

    def _metrics_route(self) -> Any:
        @get(include_in_schema=False)
        async def metrics(scope: Any) -> AsgiResponse:
            del scope
            self.metrics.up.set(0 if self._ready() else 1)
            return AsgiResponse(
                self.metrics.text(), 200, {"Content-Type": "text/plain; version=0.0.4"}
            )

        return metrics

    async def _on_startup(self) -> None:
        try:
            await self._start()
        except FencepostError as error:
            self._failed = error
            raise
        _settle_memory()
        logger.info("service_started", service=self.name)

    async def _on_shutdown(self) -> None:
        logger.info("service_draining", service=self.name)
        self.metrics.up.set(0)
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await self._stop()
        except TimeoutError:
            logger.warning("service_drain_took_too_long", service=self.name)
        except (FencepostError, NatsError) as error:
            # The servers are away: what could not be handed over is taken over.
            logger.warning("service_not_drained", service=self.name, detail=str(error))
        logger.info("service_stopped", service=self.name)

    async def _serve(self) -> None:
        config = uvicorn.Config(
            self.app,
            host=self.settings.http_host,
            port=self.settings.http_port,
            log_config=None,
            access_log=False,
            lifespan="on",
        )
        await uvicorn.Server(config).serve()

    def run(self) -> NoReturn:
        """Runs until SIGTERM or SIGINT; then exits the process."""
        if not __debug__:
            raise SystemExit("fencepost does not run with -O: its assertions are part of it")
        # The ASGI server raises the signal again once it has shut down.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _exit)
        # What the server has to say of a start that failed is its trace; ours is one line.
        logging.getLogger("uvicorn.error").addFilter(lambda _record: self._failed is None)
        try:
            _run_loop(self._serve())
        finally:
            if self._failed is not None:
                end(f"fencepost {self.name}", self._failed)
        raise SystemExit(0)


def _security(access: Access) -> BaseSecurity:
    """The same for the control connection, whose document then names the scheme."""
    context = access.tls()
    if access.creds:
        return NatsCredentials.from_file(access.creds, ssl_context=context)
    if access.seed:
        return NatsNKey.from_file(access.seed, ssl_context=context)
    if access.user:
        return NatsUserPassword(access.user, access.password, ssl_context=context)
    if access.token:
        return NatsToken(access.token, ssl_context=context)
    return NatsSecurity(ssl_context=context)


def _settle_memory() -> None:
    """
    Leaves what the start made out of later collections, and collects less often.

    Messages leave few cycles behind, and each collection stops every shard of the process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)


def _exit(number: int, frame: Any) -> NoReturn:
    del number, frame
    raise SystemExit(0)


def _run_loop(coroutine: Any) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(coroutine)
    else:
        uvloop.run(coroutine)


def _version() -> str:
    try:
        return version("fencepost-runtime")
    except PackageNotFoundError:
        return "0"


def end(name: str, error: FencepostError) -> NoReturn:
    """
    Ends the process with what went wrong, as the command does.

    Exit code 2: it stays so until somebody mends it; 5: the same may go well later; else 1.
    """
    sys.stderr.write(f"{name}: {error}\n" if name else f"{error}\n")
    code = {RefusedError: 2, RetryLaterError: 5}
    raise SystemExit(next((code[kind] for kind in code if isinstance(error, kind)), 1)) from None


def main(build: Callable[[], Service]) -> NoReturn:
    """Builds and runs a service; a wrong setting ends the process with one clear text."""
    try:
        service = build()
    except FencepostError as error:
        end("", error)
    service.run()
