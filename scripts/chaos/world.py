"""
The stack under chaos: every service behind proxies of its own, its servers on disks of ours.

Services reach NATS and PostgreSQL only through the proxies; the workload's client reaches NATS
directly. Nothing here decides when something fails: `faults` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from fencepost.client.embedded import NatsServer, PostgresServer
from fencepost.client.processes import StartError
from fencepost.client.stack import Service, Stack
from fencepost.contracts.streams import SHARDS_EMBEDDED

from scripts.chaos import disks
from scripts.chaos.cluster import NatsCluster, http_json
from scripts.chaos.disks import Disk, PowerDisk
from scripts.chaos.proxy import Proxy

LEASE_MS: Final = 2_000
QUICK: Final = {
    "FENCEPOST_HEARTBEAT_MS": "250",
    "FENCEPOST_LEASE_MS": str(LEASE_MS),
    "FENCEPOST_LOG_FORMAT": "json",
}
_STORE_MB: Final = 512
_SANDBOXES_MB: Final = 256
_READY_S: Final = 90.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is started."""

    planners: int = 3
    gateways: int = 2
    trackers: int = 1
    sweepers: int = 1
    ledgers: int = 1
    is_cluster: bool = False
    has_postgres: bool = True
    has_disks: bool = True
    has_power: bool = True
    has_proxies: bool = True


class World(Stack):
    """A stack whose every part can be made to fail. Make it with `open`, end it with `stop`."""

    def __init__(self, data: Path, *, shards: int) -> None:
        super().__init__(data, shards=shards)
        self.shape = Shape()
        self.nats_proxies: dict[str, list[Proxy]] = {}
        self.postgres_proxies: dict[str, Proxy] = {}
        self.sandbox_disk: Disk | None = None
        self.store_disks: list[PowerDisk] = []

    @classmethod
    async def open(
        cls, data: Path, shape: Shape, *, environment: Mapping[str, str] | None = None
    ) -> Self:
        """Starts everything and waits until it is ready; a failed start leaves nothing running."""
        world = cls(data.resolve(), shards=SHARDS_EMBEDDED)
        world.ledgers = shape.ledgers
        world.shape = shape
        try:
            await world._begin(environment or {})
        except BaseException:
            await world.stop()
            raise
        return world

    @property
    def cluster(self) -> NatsCluster | None:
        """The three nodes, where there are three."""
        found: Any = self._nats
        return found if isinstance(found, NatsCluster) else None

    @property
    def nats_url(self) -> str:
        return self.nats.url

    async def _begin(self, environment: Mapping[str, str]) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        if self.shape.has_disks:
            self.sandbox_disk = Disk(self.sandbox_root, _SANDBOXES_MB)
            self.sandbox_disk.mount()
            self.sandbox_root.chmod(0o755)
        self.replicas = 3 if self.shape.is_cluster else 1
        await self._start_nats()
        if self.shape.has_postgres:
            self.postgres = await PostgresServer.start(self.data / "postgres")
        if has_users(self):
            stack: Any = self
            await stack._declare_streams()
        self._environment = self._services_environment(
            {**QUICK, "FENCEPOST_REPLICAS": str(self.replicas), **environment}
        )
        shape = self.shape
        for role, count in (
            ("planner", shape.planners),
            ("gateway", shape.gateways),
            ("tracker", shape.trackers),
            ("sweeper", shape.sweepers),
        ):
            for _ in range(count):
                await self.join(role)
        await self.ready()

    async def _start_nats(self) -> None:
        folders = (
            [self.data / f"nats-{number}" for number in (1, 2, 3)]
            if self.shape.is_cluster
            else [self.data / "nats"]
        )
        if self.shape.has_power:
            for folder in folders:
                image = Path(tempfile.mkdtemp(prefix="fencepost-disk-", dir=_memory())) / "image"
                disk = PowerDisk(folder / "store", _STORE_MB, image)
                self.store_disks.append(disk)
                disk.mount()
        servers: Any
        stack: Any = self
        extra = stack._make_users(demand_credentials=False) if has_users(self) else ""
        if self.shape.is_cluster:
            servers = await NatsCluster.start(self.data, beside=self.data / "nats", folders=folders)
        else:
            servers = await NatsServer.start(folders[0], extra_config=extra)
        self._nats = servers

    async def join(self, role: str) -> Service:
        """Starts one more replica, behind proxies of its own where there are any."""
        service = self.add(role)
        if self.shape.has_proxies:
            await self._between(service)
        service.start()
        return service

    async def _between(self, service: Service) -> None:
        """Puts a proxy between a service and each server that it talks to."""
        urls = []
        proxies = self.nats_proxies[service.name] = []
        for url in self.nats.url.split(","):
            proxy = Proxy(f"{service.name}-nats", int(url.rpartition(":")[2]))
            proxies.append(proxy)
            await proxy.start()
            urls.append(f"{url.rpartition(':')[0]}:{proxy.port}")
        service.environment["FENCEPOST_NATS_URL"] = ",".join(urls)
        if service.role == "tracker" and self.postgres is not None:
            there = urlsplit(self.postgres.dsn)
            proxy = Proxy(f"{service.name}-postgres", int(there.port or 5432))
            self.postgres_proxies[service.name] = proxy
            await proxy.start()
            userinfo = there.netloc.rpartition("@")[0]
            service.environment["FENCEPOST_POSTGRES_DSN"] = there._replace(
                netloc=f"{userinfo}@127.0.0.1:{proxy.port}"
            ).geturl()

    async def ready(self, *, seconds: float = _READY_S) -> None:
        """Waits until every service says that it is ready; raises `StartError`."""
        await asyncio.gather(
            *(service.ready(seconds=seconds) for service in self.services.values())
        )

    async def heal(self) -> None:
        """Ends every fault: what does not run is started, what was silent speaks again."""
        for proxy in self.proxies():
            proxy.heal()
        for disk in (self.sandbox_disk, *self.store_disks):
            if disk is not None and disk.is_mounted:
                disk.free()
        if self.cluster is not None:
            for node in self.cluster.nodes:
                if node.is_running:
                    node.resume()
        await self.revive_servers()
        for service in self.services.values():
            if service.is_running:
                service.resume()
            else:
                service.start()
        await self._ready_in_the_end()

    async def _ready_in_the_end(self) -> None:
        """A service may end once more over what it met before; a supervisor starts it again."""
        deadline = asyncio.get_running_loop().time() + 2 * _READY_S
        while True:
            try:
                await self.ready()
            except StartError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                self.revive_services()
            else:
                return

    def revive_services(self) -> list[str]:
        """Starts what ended without being asked to; tells whom."""
        ended = [one for one in self.services.values() if one.wanted and not one.is_running]
        for service in ended:
            service.start()
        return [service.name for service in ended]

    async def revive_servers(self) -> None:
        """Starts a server that has ended, or cannot store any more."""
        await self.revive_nats()
        await self.revive_postgres()

    async def revive_nats(self) -> None:
        if self.cluster is not None:
            await self.cluster.restart()
        else:
            if self.nats.is_running:
                self.nats.child.send(signal.SIGCONT)
            if not self.nats.is_running or not await _stores(self.nats):
                await self.nats.restart()

    async def revive_postgres(self) -> None:
        if self.postgres is None:
            return
        if self.postgres.is_running:
            self.postgres.child.send(signal.SIGCONT)
        else:
            port = self.postgres.port
            self.postgres = await PostgresServer.start(self.data / "postgres", port)

    def proxies(self) -> list[Proxy]:
        every = [proxy for proxies in self.nats_proxies.values() for proxy in proxies]
        return [*every, *self.postgres_proxies.values()]

    async def stop(self) -> None:
        for service in self.services.values():
            if service.is_running:
                service.resume()
        await super().stop()
        for proxy in self.proxies():
            await proxy.close()
        for disk in (self.sandbox_disk, *self.store_disks):
            if disk is not None:
                # Something of a sandbox may still be dying: its mounts end with this process.
                with contextlib.suppress(disks.DiskError):
                    disk.unmount()
        for disk in self.store_disks:
            disk.discard()
            shutil.rmtree(disk._image.parent, ignore_errors=True)

    # What is there.

    def traces(self, sandbox: str) -> list[str]:
        """Folders and processes of a sandbox, as the machine has them."""
        found = []
        for folder in (self.sandbox_root, self.sandbox_root / ".trash"):
            with contextlib.suppress(OSError):
                found += [
                    str(folder / name) for name in os.listdir(folder) if _is_of(name, sandbox)
                ]
        return found + [f"process {pid}" for pid in self.processes_of(sandbox)]

    def processes_of(self, sandbox: str) -> list[int]:
        """The processes whose command names the sandbox's folder."""
        sign = f"{self.sandbox_root}/".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                for part in command.split(sign)[1:]:
                    if _is_of(part.partition(b"/")[0].partition(b"\0")[0].decode(), sandbox):
                        found.append(int(entry.name))
                        break
        return found


def has_users(stack: Any) -> bool:
    return hasattr(stack, "_make_users")


def _is_of(name: str, sandbox: str) -> bool:
    """Whether a folder is a generation of this sandbox: `<create id>-<digest>[.<instance>]`."""
    return re.match(rf"{re.escape(sandbox)}(-\d+)?-[0-9a-f]{{16}}(\.|$)", name) is not None


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


async def _stores(server: NatsServer) -> bool:
    """Whether JetStream takes writes: a server that met a full disk switches it off."""
    answer = await http_json(server.monitor_port, "/healthz")
    return answer.get("status") == "ok"
