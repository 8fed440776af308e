"""
What becomes of a sandbox whose container ends, through the whole pipeline, on the fake engine.

An instance that is over and not gone is condemned: removed first, and only then replaced.
"""

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fencepost.client.client import Client
from fencepost.client.stack import Stack
from fencepost.client.verify import verify
from fencepost.core.steps import SandboxSpec

from tests.unit.providers import fake_engine
from tests.unit.providers.fake_engine import FakeEngine
from tests.unit.providers.provider_contract import wait_for

pytestmark = pytest.mark.budget(60)

SPEC = SandboxSpec(provider="docker", memory_mb=256)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-engine-"))
    async with fake_engine.running(folder) as started:
        yield started
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[Client]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-test-"))
    folder.chmod(0o755)
    stack = await Stack.start(
        folder,
        postgres=False,
        others=False,
        environment={
            "FENCEPOST_PROCESS": "false",
            "FENCEPOST_DOCKER": engine.url,
            "FENCEPOST_DOCKER_IMAGE": "with-python",
        },
    )
    try:
        async with await Client.connect(stack.nats.url, wait_s=10) as client:
            yield client
    finally:
        await stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("ending", ["kill", "restart", "remove"])
async def test_a_sandbox_whose_container_ended_is_replaced(
    engine: FakeEngine, client: Client, ending: str
) -> None:
    await client.create_sandbox("box", SPEC)
    done = await client.write_file("box", path="a.txt", content="one")
    assert (done.state, done.epoch) == ("committed", 1)
    former = engine.only()
    await getattr(engine, ending)(former)

    async def is_replaced() -> bool:
        shown = await client.show("box")
        return shown["state"] == "live" and shown["epoch"] >= 2

    assert await wait_for(is_replaced, seconds=60)
    assert engine.only().id != former.id
    # What the former disk held is owed, and was done again on this one.
    later = await client.write_file("box", path="b.txt", content="two")
    assert (later.state, later.epoch >= 2) == ("committed", True)
    assert await client.read_file("box", "a.txt") == "one"
    await client.release("box")
    assert engine.containers == {}
    assert (await verify(client)).violations == []
