"""
A provider announces that it takes a sandbox away: what is committed is saved first, and is there
again. With the policy `tell` nothing is replayed, so that only the checkpoint can bring it back.
"""

import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from fencepost.client.client import Client
from fencepost.client.stack import Stack
from fencepost.client.verify import verify

from tests.integration.providers.kubernetes_api import NAMESPACE, KubernetesApi
from tests.unit.providers.fake_engine import FakeEngine
from tests.unit.providers.provider_contract import wait_for

pytestmark = pytest.mark.budget(60)


class Host(Protocol):
    """Where a sandbox is, and what its keeper does to it."""

    environment: dict[str, str]

    async def announce(self) -> None: ...
    async def take(self, client: Client) -> None: ...


class Kubernetes:
    def __init__(self, folder: Path) -> None:
        self.api = KubernetesApi(folder / "nodes")
        self._config = folder / "kubeconfig"
        self.environment: dict[str, str] = {}

    async def start(self) -> None:
        await self.api.start()
        named = {"cluster": "c", "user": "u"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.api.url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": named}],
            "current-context": "x",
        }
        self._config.write_text(json.dumps(config))
        self.environment = {
            "FENCEPOST_PROCESS": "false",
            "FENCEPOST_KUBERNETES_CLUSTER": "c1",
            "FENCEPOST_KUBERNETES_CONFIG": str(self._config),
            "FENCEPOST_KUBERNETES_NAMESPACE": NAMESPACE,
        }

    async def stop(self) -> None:
        await self.api.stop()

    async def announce(self) -> None:
        (name,) = self.api.pods
        self.api.begin_eviction(name)

    async def take(self, client: Client) -> None:
        (name,) = self.api.pods
        await self.api.end(name)


class Docker:
    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine(folder)
        self.environment = {
            "FENCEPOST_PROCESS": "false",
            "FENCEPOST_DOCKER": self.engine.url,
            "FENCEPOST_DOCKER_IMAGE": "with-python",
        }

    async def start(self) -> None:
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()

    async def announce(self) -> None:
        async def is_heard() -> bool:
            return bool(self.engine.listeners)

        assert await wait_for(is_heard)
        self.engine.signal(self.engine.only())

    async def take(self, client: Client) -> None:
        await self.engine.remove(self.engine.only())


class Process:
    def __init__(self, folder: Path) -> None:
        self.root = folder / "sandboxes"
        self.environment = {"FENCEPOST_SANDBOX_ROOT": str(self.root)}

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def announce(self) -> None:
        (self.root / ".going").write_text("120")

    async def take(self, client: Client) -> None:
        (self.root / ".going").unlink()  # the host that comes next is not going
        await client.fault("box", {"do": "reclaim"})


@pytest.fixture(params=["kubernetes", "docker", "process"])
async def host(request: Any) -> AsyncIterator[Any]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-host-"))
    folder.chmod(0o755)
    made = {"kubernetes": Kubernetes, "docker": Docker, "process": Process}[request.param](folder)
    await made.start()
    made.name = request.param
    yield made
    await made.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def client(host: Any) -> AsyncIterator[Client]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-test-"))
    folder.chmod(0o755)
    stack = await Stack.start(folder, postgres=False, others=False, environment=host.environment)
    try:
        async with await Client.connect(stack.nats.url, wait_s=10) as client:
            yield client
    finally:
        await stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def test_what_is_announced_to_go_is_saved_before_it_goes(host: Any, client: Client) -> None:
    spec = {"provider": host.name, "recovery": "tell", "memory_mb": 256}
    await client.create_sandbox("box", spec=spec)
    await client.write_file("box", path="kept", content="k")
    before = await client.show("box")
    assert before["checkpoint"] is None
    await host.announce()

    async def is_saved() -> bool:
        return bool((await client.show("box"))["checkpoint"])

    assert await wait_for(is_saved, seconds=60)
    during = await client.show("box")
    # An announcement is no end: the sandbox goes on for as long as it was given.
    assert (during["state"], during["epoch"]) == ("live", 1)
    await client.write_file("box", path="lost", content="l")
    await host.take(client)

    async def is_replaced() -> bool:
        shown = await client.show("box")
        return shown["state"] == "live" and shown["epoch"] >= 2

    assert await wait_for(is_replaced, seconds=60)
    assert await client.read_file("box", "kept") == "k"
    found = await client.list_dir("box")
    assert "lost" not in str(found)
    await client.release("box")
    assert (await verify(client)).violations == []
