"""
Checkpoints and restores through every provider's channel: hundreds of files, bytes of every kind,
contents of many frames, and the channel cut in the middle.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import kubernetes_asyncio as kube
import pytest
from fencepost.core import facts as f
from fencepost.core.sandbox.orders import CheckpointOrder, RestoreOrder
from fencepost.core.steps import SandboxSpec
from fencepost.providers.docker import DockerProvider
from fencepost.providers.kubernetes.provider import KubernetesProvider
from fencepost.providers.process import ProcessProvider
from fencepost.providers.protocol import Provider
from fencepost.providers.swerex.provider import SwerexProvider
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import GatewayMetrics
from fencepost.sandbox_gateway.blobs import NatsBlobs
from fencepost.sandbox_gateway.session import GatewaySession, Options

from scripts.swerex_demo.servers import SwerexServer
from tests.chunks import MemoryChunks
from tests.integration.providers.kubernetes_api import NAMESPACE, KubernetesApi
from tests.integration.providers.test_docker import providing
from tests.integration.providers.test_swerex import empty, write_pool
from tests.integration.sandbox_gateway.conftest import PausableClock, Running
from tests.integration.sandbox_gateway.control import MASTER, SHARDS, Control, Live, wait_for
from tests.unit.providers import fake_engine

pytestmark = pytest.mark.budget(120)

FILL = """
import os, random, sys
chance = random.Random(sys.argv[1])
os.makedirs("many/deep", exist_ok=True)
for number in range(300):
    with open("many/deep/%d.bin" % number, "wb") as file:
        file.write(chance.randbytes(chance.randrange(6_000)))
with open("large", "wb") as file:
    file.write(chance.randbytes(2_300_000))
with open(b"\\xff\\xfe name", "wb") as file:
    file.write(b"\\0\\r\\n\\x1b{}\\n" * 9)
os.path.lexists("link") or os.symlink("many/deep/1.bin", "link")
os.makedirs("empty", exist_ok=True)
open("run", "w").close()
os.chmod("run", 0o755)
"""
TELL = """
import hashlib, os
told = hashlib.sha256()
for folder, below, names in os.walk(b"."):
    below.sort()
    for name in sorted(names + below):
        path = os.path.join(folder, name)
        there = os.lstat(path)
        told.update(b"%s %o\\n" % (path, there.st_mode))
        if os.path.islink(path):
            told.update(os.readlink(path))
        elif os.path.isfile(path):
            told.update(b"%d " % there.st_mtime_ns + hashlib.sha256(open(path, "rb").read()).digest())
print(told.hexdigest())
"""


async def process(folder: Path) -> AsyncIterator[Provider]:
    yield ProcessProvider(folder, isolate=False, heartbeat_ms=200)


async def kubernetes(folder: Path) -> AsyncIterator[Provider]:
    api = KubernetesApi(folder / "nodes")
    await api.start()
    provider = KubernetesProvider(
        kube.client.Configuration(host=api.url),
        cluster="c1",
        namespace=NAMESPACE,
        image="python:3.11",
        heartbeat_ms=200,
    )
    yield provider
    await provider.close()
    await api.stop()


async def fake_docker(folder: Path) -> AsyncIterator[Provider]:
    async with fake_engine.running(folder) as engine:
        provider = await DockerProvider.open(engine.url, image="with-python", heartbeat_ms=200)
        yield provider
        await provider.close()


async def swerex(folder: Path) -> AsyncIterator[Provider]:
    servers = [SwerexServer(folder, name) for name in ("left", "right")]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        provider = SwerexProvider(write_pool(folder / "pool", servers), heartbeat_ms=500)
        yield provider
        await empty(provider)
        await provider.close()
    finally:
        for server in servers:
            server.kill()


PROVIDERS: dict[str, Callable[[Path], AsyncIterator[Provider]]] = {
    "process": process,
    "kubernetes": kubernetes,
    "fake_docker": fake_docker,
    "swerex": swerex,
}


@pytest.fixture(
    params=[
        "process",
        "kubernetes",
        "fake_docker",
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("swerex", marks=[pytest.mark.slow, pytest.mark.xdist_group("swerex")]),
    ]
)
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Provider]:
    if request.param == "docker":
        async with providing(request.getfixturevalue("engine")) as real:
            yield real
        return
    folder = tmp_path / "p"
    folder.mkdir()
    async for made in PROVIDERS[request.param](folder):
        yield made


class Store(MemoryChunks):
    """`cut` is called once so many chunks were stored, or fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        self.cut: Callable[[], Awaitable[None]] | None = None

    async def _count(self) -> None:
        self.left -= 1
        if self.left == 0 and self.cut is not None:
            await self.cut()

    async def put(self, namespace: str, digest: str, data: bytes) -> None:
        await super().put(namespace, digest, data)
        await self._count()

    async def get(self, namespace: str, digest: str) -> bytes | None:
        found = await super().get(namespace, digest)
        await self._count()
        return found


@pytest.fixture
def chunks() -> Store:
    return Store()


@pytest.fixture
async def gateway(
    nats: Any, control: Control, provider: Provider, chunks: Store
) -> AsyncIterator[Running]:
    link = await Link.connect(nats.url, name="gateway")
    control.spec = SandboxSpec(provider=provider.traits.name, memory_mb=256)
    session = GatewaySession(
        link,
        providers={provider.traits.name: provider},
        options=Options(shards=SHARDS, master=MASTER, heartbeat_ms=200, lease_ms=20_000),
        clock=PausableClock(),
        metrics=(metrics := GatewayMetrics()),
        blob_store=NatsBlobs(link),
        chunk_store=chunks,
    )
    running = Running(session, link, metrics)
    await wait_for(lambda: any(seen.gateway == session.id for seen in control.seen), "a session")
    yield running
    for ref in {fact.ref for fact in control.of(f.Assigned)}:
        await provider.stop(ref, ref.instance)
    await running.stop()
    await link.close()


class Box:
    def __init__(self, live: Live, gateway: Running) -> None:
        self.live = live
        self.gateway = gateway
        self.steps = 0

    @classmethod
    async def made(cls, gateway: Running, control: Control, name: str) -> Box:
        return cls(await control.live(gateway.id, name), gateway)

    async def again(self, epoch: int) -> Box:
        """Another session with the same disk, as a shard orders one after a loss."""
        control, live = self.live.control, self.live
        found = await control.attach(self.gateway.id, live.ref, live.sandbox)
        marked = await control.mark(self.gateway.id, found, epoch)
        return Box(Live(control, self.gateway.id, live.ref, found, marked), self.gateway)

    async def python(self, text: str, *words: str) -> str:
        self.steps += 1
        step = f"{self.live.session[-6:]}-{self.steps}"
        said = await self.live.run(step, "run_command", {"argv": ["python3", "-c", text, *words]})
        assert said.outcome == "ok", (said, bytes(said.result))
        return str(json.loads(bytes(said.result))["stdout"])

    async def tree(self) -> str:
        return await self.python(TELL)

    def about(self, checkpoint: str) -> dict[str, Any]:
        return {
            "sandbox": self.live.sandbox,
            "epoch": self.live.marked.epoch,
            "session": self.live.session,
            "checkpoint": checkpoint,
        }

    async def checkpoint(self, checkpoint: str, base: str = "") -> f.Checkpointed:
        control = self.live.control
        control.order(self.gateway.id, CheckpointOrder(base=base, **self.about(checkpoint)))
        return await control.fact(f.Checkpointed, **self.about(checkpoint))

    async def restore(self, checkpoint: str, manifest: str, namespace: str) -> f.Restored:
        self.order_restore(checkpoint, manifest, namespace)
        return await self.live.control.fact(f.Restored, **self.about(checkpoint))

    def order_restore(self, checkpoint: str, manifest: str, namespace: str) -> None:
        order = RestoreOrder(manifest=manifest, namespace=namespace, **self.about(checkpoint))
        self.live.control.order(self.gateway.id, order)

    async def cut(self) -> None:
        """The connection breaks, as a network does it: nobody is asked, and nobody is told."""
        attachment = self.gateway.session._attached[self.live.sandbox]
        channel: Any = attachment._channel
        match self.live.ref.provider:
            case "process":
                channel._sock.shutdown(socket.SHUT_RDWR)
            case "docker":
                channel._transport.abort()
            case "kubernetes":
                channel._websocket._response.connection.transport.abort()
            case "swerex":
                channel._pumping.cancel()


async def test_a_checkpoint_goes_out_and_comes_back_as_it_was(
    gateway: Running, control: Control, chunks: Store
) -> None:
    box = await Box.made(gateway, control, "one")
    await box.python(FILL, "first")
    first = await box.checkpoint("c1")
    assert first.files == 303
    assert max(map(len, chunks.held.values())) >= 500_000, "no chunk larger than a frame of these"
    await box.python("open('more', 'w').write('m')")
    tree = await box.tree()
    second = await box.checkpoint("c2", first.manifest)
    assert second.sent_bytes < first.sent_bytes / 10, "not an increment"
    fork = await Box.made(gateway, control, "two")
    done = await fork.restore("c2", second.manifest, "one")
    assert (done.files, done.size_bytes) == (second.files, second.size_bytes)
    assert await fork.tree() == tree


async def test_a_channel_that_breaks_in_the_middle_of_either_loses_nothing(
    gateway: Running, control: Control, chunks: Store
) -> None:
    box = await Box.made(gateway, control, "one")
    await box.python(FILL, "first")
    chunks.left, chunks.cut = 5, box.cut
    control.order(gateway.id, CheckpointOrder(base="", **box.about("c1")))
    assert (await control.fact(f.CheckpointFailed, checkpoint="c1")).reason == "unreachable"
    lost = await control.fact(f.Lost, session=box.live.session)
    assert lost.observed == "present"
    box = await box.again(2)
    tree = await box.tree()
    said = await box.checkpoint("c2")
    fork = await Box.made(gateway, control, "two")
    chunks.left, chunks.cut = 5, fork.cut
    fork.order_restore("c2", said.manifest, "one")
    assert (await control.fact(f.RestoreFailed, checkpoint="c2")).reason == "unreachable"
    fork = await fork.again(2)
    await fork.restore("c2", said.manifest, "one")
    assert await fork.tree() == tree
