"""
The embedded stack: nats-server, PostgreSQL and the services as child processes, in one folder.

`fencepost up`, `fencepost demo` and the acceptance tests run the same stack. Nothing here knows
what the services do; they are configured by environment alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

import structlog
from fencepost import planner, release_tracker, sandbox_gateway, sweeper
from fencepost.client import users
from fencepost.client.embedded import NatsServer, PostgresServer
from fencepost.client.processes import Child, Started, StartError, free_port
from fencepost.contracts import authorization
from fencepost.contracts.grants import Role
from fencepost.contracts.streams import SHARDS_EMBEDDED, require_ledgers
from fencepost.core.errors import FencepostError, RefusedError
from fencepost.runtime import access, streams
from fencepost.runtime.link import Link

logger = structlog.get_logger(__name__)

READY_S_MAX: Final = 30.0
STOP_S_MAX: Final = 5.0
SHARDS: Final = "shards"
"""The file that tells a stack's number of shards, where it is not the usual one."""
LEDGERS: Final = "ledgers"
MOVING: Final = "moving"
"""The file that tells a stack's number of ledger streams, where there is more than one."""
_LOOK_S: Final = 0.1
_BACKOFF_S: Final = 0.2
_BACKOFF_S_MAX: Final = 5.0
_PASSED_ON: Final = frozenset({"FENCEPOST_CHECKPOINT_STORE"})
"""Settings that are about the world outside; the others would be another stack's."""
_STEADY_S: Final = 10.0

MODULES: Final = {
    "gateway": sandbox_gateway.__name__,
    "planner": planner.__name__,
    "tracker": release_tracker.__name__,
    "sweeper": sweeper.__name__,
}
"""In the order in which they are stopped: who talks to sandboxes first, who records it after."""


_ROLES: Final[dict[str, Role]] = {
    "gateway": "gateway",
    "planner": "planner",
    "tracker": "tracker",
    "sweeper": "sweeper",
}


def can_run(role: str) -> bool:
    """Tells whether this installation has the service as a program."""
    try:
        return importlib.util.find_spec(f"{MODULES[role]}.__main__") is not None
    except ModuleNotFoundError:
        return False


class Service(Started):
    """One process of a service: started, killed, stopped or paused by its own pid."""

    def __init__(self, name: str, role: str, log: Path, environment: Mapping[str, str]) -> None:
        super().__init__(name)
        self.role = role
        self.log = log
        self.environment = dict(environment)
        self.started_at = 0.0
        self.wanted = False

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, **environment: str) -> None:
        """Starts it; extra environment stays for later starts. It is not ready yet."""
        assert not self.is_running, f"{self.name} runs already"
        self.environment.update(environment)
        self.port = free_port()
        self.wanted = True
        self.started_at = time.monotonic()
        self._child = Child.start(
            self.name,
            [sys.executable, "-m", MODULES[self.role]],
            log=self.log,
            env={**self.environment, "FENCEPOST_HTTP_PORT": str(self.port)},
        )

    def kill(self) -> None:
        """SIGKILL, as a crash would; it stays down until it is started again."""
        self.wanted = False
        super().kill()

    def pause(self) -> None:
        """SIGSTOP: alive, holding all it holds, and silent."""
        self.child.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.child.send(signal.SIGCONT)

    async def stop(self) -> int:
        """SIGTERM, and SIGKILL when it has not ended in time; its exit code."""
        self.wanted = False
        return await self.child.stop(grace_s=STOP_S_MAX)

    async def ready(self, *, seconds: float = READY_S_MAX) -> None:
        """Waits until `/readyz` says so; raises `StartError` when it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.is_running:
                raise StartError(
                    f"{self.name} ended with {self.child.exit_code}:\n{self.child.tail()}"
                )
            if await _http_status(self.port, "/readyz") == 200:
                return
            await asyncio.sleep(0.02)
        raise StartError(f"{self.name} was not ready within {seconds:g} s:\n{self.child.tail()}")


class Stack:
    """All processes of one deployment. Make it with `start`, end it with `stop`."""

    def __init__(self, data: Path, *, shards: int, ledgers: int = 1) -> None:
        self.data = data
        self.shards = shards
        self.ledgers = ledgers
        self.replicas = 1
        self.services: dict[str, Service] = {}
        self._nats: NatsServer | None = None
        self.postgres: PostgresServer | None = None
        self._environment: dict[str, str] = {}
        self._supervisor: asyncio.Task[None] | None = None
        self._operator: Link | None = None
        self._declaring: asyncio.Task[None] | None = None
        self.credentials: dict[Role, Path] = {}
        self.demands_credentials = False

    @classmethod
    async def start(
        cls,
        data: Path,
        *,
        planners: int = 1,
        gateways: int = 1,
        trackers: int = 0,
        others: bool = True,
        postgres: bool = True,
        shards: int = SHARDS_EMBEDDED,
        ledgers: int = 1,
        nats_port: int = 0,
        sync_always: bool = True,
        demand_credentials: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """
        Starts everything and waits until every service is ready.

        Each service is a NATS user of its own. Whoever shows no credentials is a person
        (`users.ANYBODY`), unless `demand_credentials`.

        `others` starts one tracker and one sweeper, where they are installed. `environment` is
        added to every service's. A failed start leaves nothing running.
        """
        stack = cls(data.resolve(), shards=shards, ledgers=ledgers)
        try:
            await stack._start_servers(
                nats_port,
                sync_always=sync_always,
                postgres=postgres,
                demand_credentials=demand_credentials,
            )
            await stack._declare_streams()
            stack._environment = stack._services_environment(environment or {})
            wanted = {"planner": planners, "gateway": gateways, "tracker": trackers}
            if others:
                wanted["tracker"] = max(1, trackers)
                wanted["sweeper"] = int(can_run("sweeper"))
            for role, count in wanted.items():
                for _ in range(count):
                    stack.add(role).start()
            await asyncio.gather(*(service.ready() for service in stack.services.values()))
        except BaseException:
            await stack.stop()
            raise
        return stack

    @property
    def nats(self) -> NatsServer:
        assert self._nats is not None, "the stack was not started"
        return self._nats

    @property
    def operator(self) -> Link:
        """The connection of the user who made the streams."""
        assert self._operator is not None, "the stack was not started"
        return self._operator

    @property
    def sandbox_root(self) -> Path:
        return self.data / "sandboxes"

    def add(self, role: str, **environment: str) -> Service:
        """Adds a replica of a service, not started yet."""
        number = 1 + sum(service.role == role for service in self.services.values())
        name = f"{role}-{number}"
        service = Service(
            name,
            role,
            self.data / "log" / f"{name}.log",
            {
                **self._environment,
                "FENCEPOST_NATS_CREDENTIALS": str(self.credentials[_ROLES[role]]),
                **environment,
            },
        )
        self.services[name] = service
        return service

    def of(self, role: str) -> list[Service]:
        return [service for service in self.services.values() if service.role == role]

    def supervise(
        self, told: Callable[[str], None], changed: Callable[[], None] = lambda: None
    ) -> None:
        """
        Starts again, with a growing pause, whatever ends without being asked to.

        `changed`: something has another process id now.
        """
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise(told, changed))

    async def stop(self) -> None:
        """Stops everything in order, nats-server last. May be called again."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        for role in MODULES:
            running = [service for service in self.of(role) if service.is_running]
            await asyncio.gather(*(service.stop() for service in running))
        if self._declaring is not None:
            self._declaring.cancel()
            await asyncio.gather(self._declaring, return_exceptions=True)
        if self._operator is not None:
            operator, self._operator = self._operator, None
            await operator.close()
        if self.postgres is not None and self.postgres.is_running:
            await self.postgres.stop()
        if self._nats is not None and self._nats.is_running:
            await self._nats.stop()

    async def _start_servers(
        self,
        nats_port: int,
        *,
        sync_always: bool,
        postgres: bool,
        demand_credentials: bool = False,
    ) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        starting = asyncio.create_task(
            NatsServer.start(
                self.data / "nats",
                port=nats_port,
                sync_always=sync_always,
                extra_config=self._make_users(demand_credentials=demand_credentials),
            )
        )
        try:
            if postgres:
                self.postgres = await PostgresServer.start(self.data / "postgres")
        finally:
            self._nats = await starting

    def _make_users(self, *, demand_credentials: bool) -> str:
        """Makes the users, and gives what the server's configuration says of them."""
        folder = self.data / "nats"
        self.demands_credentials = demand_credentials
        self.credentials = users.make(folder, secrets_folder=self.data / "credentials")
        text = authorization.render(
            users=users.USERS,
            anybody=None if demand_credentials else users.ANYBODY,
            ledgers=self.ledgers,
        )
        (folder / users.AUTHORIZATION).write_text(text)
        return f"include ./{users.AUTHORIZATION}"

    async def _declare_streams(self) -> None:
        """
        Creates what is missing, as the operator, and again whenever the server comes back.

        A server that was started again has lost what it kept in memory.
        """
        operator = self._operator = await Link.connect(
            self.nats.url,
            name="fencepost-operator",
            access=access.read(str(self.credentials["operator"])),
        )
        await streams.declare_at_start(
            operator, self.shards, create=True, replicas=self.replicas, ledgers=self.ledgers
        )
        operator.on_back(self._declare_soon)

    def _declare_soon(self) -> None:
        if self._declaring is None or self._declaring.done():
            self._declaring = asyncio.get_running_loop().create_task(self._declare_again())

    async def _declare_again(self) -> None:
        while self._operator is not None:
            try:
                await streams.declare(
                    self._operator,
                    self.shards,
                    create=True,
                    replicas=self.replicas,
                    ledgers=self.ledgers,
                )
            except FencepostError as error:
                logger.warning("streams_not_declared", detail=str(error))
                await asyncio.sleep(_LOOK_S)
            else:
                return

    def _services_environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith("FENCEPOST_") or k in _PASSED_ON
        }
        found = {
            **inherited,
            "PYTHONUNBUFFERED": "1",
            "FENCEPOST_NATS_URL": self.nats.url,
            "FENCEPOST_SHARDS": str(self.shards),
            "FENCEPOST_LEDGERS": str(self.ledgers),
            "FENCEPOST_RECEIPT_KEY": _secret(self.data / "receipt.key"),
            "FENCEPOST_HTTP_HOST": "127.0.0.1",
            "FENCEPOST_ALLOW_FAULTS": "true",
            "FENCEPOST_DATA": str(self.data),
            "FENCEPOST_SANDBOX_ROOT": str(self.sandbox_root),
            **extra,
        }
        if self.postgres is not None:
            found["FENCEPOST_POSTGRES_DSN"] = self.postgres.dsn
        return found

    async def _supervise(self, told: Callable[[str], None], changed: Callable[[], None]) -> None:
        pauses: dict[str, float] = {}
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self.nats.is_running:
                told(f"nats-server ended with {self.nats.child.exit_code}; starting it again")
                try:
                    await self.nats.restart()
                except StartError as error:
                    told(str(error))
                    await asyncio.sleep(_BACKOFF_S_MAX)
            postgres = self.postgres
            if postgres is not None and not postgres.is_running:
                told(f"PostgreSQL ended with {postgres.child.exit_code}; starting it again")
                try:
                    self.postgres = await PostgresServer.start(
                        self.data / "postgres", postgres.port
                    )
                except StartError as error:
                    told(str(error))
                    await asyncio.sleep(_BACKOFF_S_MAX)
            for service in self.services.values():
                if service.is_running or not service.wanted:
                    continue
                if time.monotonic() - service.started_at > _STEADY_S:
                    pauses.pop(service.name, None)
                pause = pauses.get(service.name, _BACKOFF_S)
                pauses[service.name] = min(2 * pause, _BACKOFF_S_MAX)
                told(
                    f"{service.name} ended with {service.child.exit_code};"
                    f" starting it again in {pause:g} s (log: {service.log})"
                )
                await asyncio.sleep(pause)
                with contextlib.suppress(StartError):
                    service.start()
                    changed()


def shards_of(data: Path) -> int:
    """The number of shards of the stack on a folder; raises `StartError` where it is none."""
    return _number_in(data / SHARDS, SHARDS_EMBEDDED)


def ledgers_of(data: Path) -> int:
    """The number of ledger streams of the stack on a folder; raises as `shards_of` does."""
    return _number_in(data / LEDGERS, 1)


def _number_in(path: Path, usual: int) -> int:
    if not path.exists():
        return usual
    text = path.read_text().strip()
    if not text.isdigit() or not int(text):
        raise StartError(f"{path}: expected a number of {path.name}, got {text[:40]!r}")
    return int(text)


def choose_ledgers(data: Path, asked: int | None) -> int:
    """
    How many ledger streams the stack on a folder has, or is to have where it is new.

    Raises `RefusedError` where another number is asked for than it has, or one that does not fit.
    """
    if (data / "nats" / "store").is_dir():
        have = ledgers_of(data)
        if asked not in (None, have):
            raise RefusedError(
                "bad_arguments",
                f"--ledgers, FENCEPOST_LEDGERS: the stack on {data} has {have}, not {asked}; "
                "`fencepost reshard --into` moves it to another number",
                field="ledgers",
            )
        return have
    # What a start before the first server left behind was decided, too.
    found = asked or ledgers_of(data)
    require_ledgers(found, shards=shards_of(data))
    data.mkdir(parents=True, exist_ok=True)
    write_ledgers(data, found)
    return found


def refuse_half_moved(data: Path) -> None:
    """Raises `StartError` where a history was being written into this folder and is not whole."""
    if (data / MOVING).exists():
        raise StartError(
            f"{data}: `fencepost reshard` into this folder has not ended: it lacks a part of the "
            "history, or all of it. Delete it, and go on with the former folder"
        )


def write_ledgers(data: Path, ledgers: int) -> None:
    """Says of a new stack's folder that it has more than one ledger stream."""
    if ledgers == 1:
        (data / LEDGERS).unlink(missing_ok=True)
    else:
        (data / LEDGERS).write_text(f"{ledgers}\n")


def write_shards(data: Path, shards: int) -> None:
    """Says of a new stack's folder that it has another number of shards than usual."""
    (data / SHARDS).write_text(f"{shards}\n")


def _secret(path: Path) -> str:
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
    return path.read_text().strip()


async def _http_status(port: int, path: str) -> int:
    """The status that a service answers, or 0 where nothing answers."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                line = await reader.readline()
                await reader.read()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        return int(line.split()[1])
    except (OSError, ValueError, IndexError, TimeoutError):
        return 0
