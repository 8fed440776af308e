"""
A JetStream cluster of three nodes on loopback, from the wheel's nats-server.

The nodes run the configuration of `deploy/nats/cluster.conf`, each on a data folder of its own. A
cluster looks to a `Stack` like one server, whose URL names all three.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import time
from pathlib import Path
from typing import Any, Final, Self

import msgspec
from fencepost.client.embedded import nats_binary
from fencepost.client.processes import Child, StartError, free_port
from fencepost.core.errors import UnknownError
from fencepost.runtime.link import Link

NODES: Final = 3
START_S_MAX: Final = 90.0
TEMPLATE: Final = Path(__file__).parents[2] / "deploy" / "nats" / "cluster.conf"
AUTHORIZATION: Final = "authorization.conf"
_LOOK_S: Final = 0.05


class Node:
    """One nats-server of a cluster: killed, paused, wiped and started again by its own pid."""

    def __init__(self, name: str, data: Path, *, beside: Path | None) -> None:
        self.name = name
        self.data = data
        self.port = free_port()
        self.monitor_port = free_port()
        self.route_port = free_port()
        self._beside = beside
        self._environment: dict[str, str] = {}
        self._child: Child | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def child(self) -> Child:
        assert self._child is not None, f"{self.name} was never started"
        return self._child

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.is_running

    @property
    def store(self) -> Path:
        return self.data / "store"

    def configure(self, environment: dict[str, str]) -> None:
        self._environment = {
            **environment,
            "NATS_NAME": json.dumps(self.name),
            "NATS_LISTEN": json.dumps(f"127.0.0.1:{self.port}"),
            "NATS_MONITOR": json.dumps(f"127.0.0.1:{self.monitor_port}"),
            "NATS_ROUTE_LISTEN": json.dumps(f"127.0.0.1:{self.route_port}"),
            "NATS_STORE": json.dumps(str(self.store)),
        }

    def start(self) -> None:
        """Starts it; it has not joined yet."""
        assert not self.is_running, f"{self.name} runs already"
        self.store.mkdir(parents=True, exist_ok=True)
        config = self.data / TEMPLATE.name
        shutil.copyfile(TEMPLATE, config)
        (self.data / AUTHORIZATION).touch()
        for other in self._beside.glob("*.conf") if self._beside is not None else ():
            shutil.copyfile(other, self.data / other.name)
        inherited = {key: value for key, value in os.environ.items() if key[:5] != "NATS_"}
        self._child = Child.start(
            self.name,
            [nats_binary(), "-c", config],
            log=self.data / "nats.log",
            env={**inherited, **self._environment},
        )

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.child.kill()

    def pause(self) -> None:
        """SIGSTOP: alive, its sockets open, and silent."""
        self.child.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.child.send(signal.SIGCONT)

    async def stop(self) -> None:
        await self.child.stop(grace_s=2.0)

    def wipe(self) -> None:
        """Takes its disk away; it must not run."""
        assert not self.is_running, f"{self.name} still runs"
        for entry in self.store.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    async def is_healthy(self) -> bool:
        """Whether it has joined and every stream and consumer of it is current."""
        answer = await http_json(self.monitor_port, "/healthz")
        return answer.get("status") == "ok"

    async def has_leader(self) -> bool:
        answer = await http_json(self.monitor_port, "/jsz")
        return bool(answer.get("meta_cluster", {}).get("leader"))


class NatsCluster:
    """
    Three nodes. `url` is what services get: all of them, with a comma between.

    `beside`: the folder of what the configuration includes (users, permissions, TLS), copied to
    each node. `folders` may put each node's data somewhere else (on a disk of its own).
    """

    def __init__(
        self, data: Path, *, beside: Path | None = None, folders: list[Path] | None = None
    ) -> None:
        places = folders or [data / f"nats-{number}" for number in range(1, NODES + 1)]
        self.nodes = [
            Node(f"nats-{number}", place, beside=beside) for number, place in enumerate(places, 1)
        ]
        password = secrets.token_hex(16)
        routes = [f"nats://route:{password}@127.0.0.1:{node.route_port}" for node in self.nodes]
        for node in self.nodes:
            node.configure(
                {
                    "NATS_CLUSTER": "fencepost",
                    "NATS_ROUTE_USER": "route",
                    "NATS_ROUTE_PASSWORD": json.dumps(password),
                    "NATS_ROUTES": json.dumps(routes),
                }
            )

    @classmethod
    async def start(
        cls, data: Path, *, beside: Path | None = None, folders: list[Path] | None = None
    ) -> Self:
        """Starts all nodes and waits until they agree; raises `StartError`."""
        cluster = cls(data, beside=beside, folders=folders)
        try:
            await cluster.restart()
        except BaseException:
            await cluster.stop()
            raise
        return cluster

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    @property
    def is_running(self) -> bool:
        return any(node.is_running for node in self.nodes)

    @property
    def child(self) -> Child:
        """A node that has ended, or else the first: what a supervisor looks at."""
        ended = [node for node in self.nodes if not node.is_running]
        return (ended or self.nodes)[0].child

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    async def restart(self) -> None:
        """Starts what does not run, and waits until all have joined."""
        for node in self.nodes:
            if not node.is_running:
                node.start()
        await self.settle()

    async def settle(self, *, seconds: float = START_S_MAX) -> None:
        """Waits until every running node has a leader and is current; raises `StartError`."""
        deadline = time.monotonic() + seconds
        for node in self.nodes:
            while not (await node.has_leader() and await node.is_healthy()):
                if not node.is_running:
                    raise StartError(
                        f"{node.name} ended with {node.child.exit_code}:\n{node.child.tail()}"
                    )
                if time.monotonic() > deadline:
                    raise StartError(
                        f"{node.name} has not joined within {seconds:g} s:\n{node.child.tail()}"
                    )
                await asyncio.sleep(_LOOK_S)

    async def leader(self, link: Link, stream: str, *, seconds: float = 20.0) -> Node:
        """The node that leads a stream now, as the cluster says; waits while there is none."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(UnknownError, msgspec.DecodeError):
                found = msgspec.json.decode(
                    await link.api(f"STREAM.INFO.{stream}", timeout_s=2.0), type=_Clustered
                )
                if found.cluster.leader:
                    return self.node(found.cluster.leader)
            await asyncio.sleep(_LOOK_S)
        raise StartError(f"{stream} has no leader within {seconds:g} s")

    async def stop(self) -> None:
        """Stops every node; their data stay."""
        running = [node for node in self.nodes if node.is_running]
        await asyncio.gather(*(node.stop() for node in running))

    def kill(self) -> None:
        """All of them at once, as a power cut would."""
        for node in self.nodes:
            if node.is_running:
                node.kill()


class _Replicas(msgspec.Struct):
    leader: str = ""


class _Clustered(msgspec.Struct):
    cluster: _Replicas = msgspec.field(default_factory=_Replicas)


async def http_json(port: int, path: str) -> dict[str, Any]:
    """A monitoring endpoint's answer, or {} where none comes."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                data = await reader.read()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        answer = json.loads(data.partition(b"\r\n\r\n")[2])
    except (OSError, ValueError, TimeoutError):
        return {}
    return answer if isinstance(answer, dict) else {}
