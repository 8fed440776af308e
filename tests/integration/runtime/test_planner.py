"""The planner as a process: it takes shards, answers, hands over, and can be killed at any point."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fencepost.contracts import subjects
from fencepost.contracts.messages import Batch
from fencepost.core import ids
from fencepost.runtime.bus import NatsBus
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link

SHARDS = 8


class Process:
    """One planner process of a test."""

    def __init__(self, url: str, log: Path, **environment: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "fencepost.planner"],
                env={
                    **os.environ,
                    "FENCEPOST_NATS_URL": url,
                    "FENCEPOST_DECLARE": "1",
                    "FENCEPOST_SHARDS": str(SHARDS),
                    "FENCEPOST_RECEIPT_KEY": "a key of at least 16 characters",
                    **environment,
                },
                stdout=output,
                stderr=output,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class World:
    def __init__(self, url: str, link: Link, folder: Path) -> None:
        self.url = url
        self.link = link
        self.folder = folder
        self.log = JetStreamLog(link)
        self.processes: list[Process] = []

    def planner(self, **environment: str) -> Process:
        log = self.folder / f"planner-{len(self.processes)}.log"
        process = Process(self.url, log, **environment)
        self.processes.append(process)
        return process

    async def batches(self, shard: int) -> list[Batch]:
        return [
            msgspec.json.decode(payload, type=Batch)
            async for _, payload in self.log.read(subjects.ledger("sandbox", shard), 1)
        ]

    async def owners(self) -> dict[int, str]:
        """Who opened the last term of each shard, where anybody did."""
        found: dict[int, str] = {}
        for shard in range(SHARDS):
            got = await self.log.last(subjects.ledger("sandbox", shard))
            if hasattr(got, "payload"):
                found[shard] = msgspec.json.decode(got.payload, type=Batch).owner
        return found

    async def wait(self, condition: Callable[[dict[int, str]], bool], seconds: float = 40) -> None:
        deadline = time.monotonic() + seconds
        while not condition(await self.owners()):
            logs = "\n".join(process.text()[-3000:] for process in self.processes)
            assert time.monotonic() < deadline, f"{await self.owners()}\n{logs}"
            await asyncio.sleep(0.03)

    async def ask(self, **question: str) -> Any:
        """Asks a shard, again while nobody owns it."""
        shard = ids.shard_of(question.get("sandbox", "sb-1"), SHARDS)
        for _ in range(100):
            try:
                answer = await self.link.call(
                    subjects.ask(shard), msgspec.json.encode(question), timeout_s=1.0
                )
            except Exception:
                await asyncio.sleep(0.1)
                continue
            return msgspec.json.decode(answer.data)
        raise AssertionError("never answered")


@pytest.fixture
async def world(nats_server: Any, tmp_path: Path) -> AsyncIterator[World]:
    link = await Link.connect(nats_server.url, name="test")
    world = World(nats_server.url, link, tmp_path)
    yield world
    for process in world.processes:
        if process.child.poll() is None:
            process.child.kill()
        process.child.wait(10)
    await link.close()


async def test_a_planner_owns_all_shards_answers_and_ends_cleanly(world: World) -> None:
    planner = world.planner()
    await world.wait(lambda owners: len(owners) == SHARDS)
    assert await world.ask(what="sandbox", sandbox="sb-1") is None
    body = b'{"spec":{"provider":"process"}}'
    await world.link.call(subjects.command("create", "sb-1", "c1"), body, timeout_s=5)
    for _ in range(200):
        view = await world.ask(what="sandbox", sandbox="sb-1")
        if view is not None:
            break
        await asyncio.sleep(0.05)
    assert view["state"] == "creating"
    planner.child.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(planner.child.wait, 20) == 0, planner.text()


async def test_volatile_commands_are_acknowledged_once_they_are_in_the_ledger(
    world: World,
) -> None:
    world.planner()
    await world.wait(lambda owners: len(owners) == SHARDS)
    assert await world.ask(what="sandbox", sandbox="sb-1") is None
    shard = ids.shard_of("sb-1", SHARDS)
    now = [{"kind": "create", "aggregate": "sb-1", "id": "c1", "body": {"spec": {}}}]
    answer = await NatsBus(world.link).request(
        subjects.now(shard), msgspec.json.encode(now), 10_000
    )
    seq = msgspec.json.decode(answer)["seq"]
    got = await world.log.next_after(subjects.ledger("sandbox", shard), seq - 1)
    batch = msgspec.json.decode(got.payload, type=Batch)  # type: ignore[union-attr]
    assert "created" in [entry["kind"] for entry in msgspec.json.decode(batch.entries)]


async def test_a_killed_planners_shards_are_owned_by_the_other(world: World) -> None:
    first = world.planner()
    await world.wait(lambda owners: len(owners) == SHARDS)
    world.planner()
    await world.wait(lambda owners: len(set(owners.values())) == 2)
    await world.wait(
        lambda owners: (
            sorted(list(owners.values()).count(name) for name in set(owners.values())) == [4, 4]
        )
    )
    owners = await world.owners()
    names = set(owners.values())
    first.child.send_signal(signal.SIGKILL)
    await world.wait(lambda owners: len(set(owners.values())) == 1)
    (survivor,) = set((await world.owners()).values())
    assert survivor in names
    assert len(await world.batches(0)) >= 2


@pytest.mark.parametrize("point", ["before_append", "after_append", "after_effects"])
async def test_a_command_survives_a_crash_and_counts_once(
    world: World, tmp_path: Path, point: str
) -> None:
    calm = world.planner()
    await world.wait(lambda owners: len(owners) == SHARDS)
    calm.child.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(calm.child.wait, 20) == 0
    sandbox = "sb-1"
    shard = ids.shard_of(sandbox, SHARDS)
    await world.link.call(subjects.command("create", sandbox, "c1"), b'{"spec":{}}', timeout_s=5)
    flag = tmp_path / "crashed"
    armed = {"FENCEPOST_CRASH": point, "FENCEPOST_CRASH_ONCE": str(flag)}
    doomed = world.planner(**armed)
    assert await asyncio.to_thread(doomed.child.wait, 30) == 137, doomed.text()
    assert flag.exists()
    world.planner(**armed)
    view = None
    for _ in range(200):
        view = await world.ask(what="sandbox", sandbox=sandbox)
        if view is not None:
            break
        await asyncio.sleep(0.05)
    assert view is not None
    kinds = [
        entry["kind"]
        for batch in await world.batches(shard)
        for entry in msgspec.json.decode(batch.entries)
    ]
    assert kinds.count("created") == 1


async def test_a_wrong_setting_is_one_clear_line(world: World) -> None:
    wrong = world.planner(FENCEPOST_SHARDS="none", FENCEPOST_LEASE_MS="1")
    assert await asyncio.to_thread(wrong.child.wait, 20) == 2
    assert "FENCEPOST_SHARDS: " in wrong.text()
    assert "FENCEPOST_LEASE_MS: " in wrong.text()
    assert "Traceback" not in wrong.text()


async def test_a_planner_that_may_not_create_streams_says_so(world: World) -> None:
    planner = world.planner(FENCEPOST_DECLARE="0")
    assert await asyncio.to_thread(planner.child.wait, 30) != 0
    assert "FP_LEDGER does not exist" in planner.text()


async def test_a_restart_of_the_server_costs_no_shard_and_no_step(
    embedded_nats: Any, tmp_path: Path
) -> None:
    link = await Link.connect(embedded_nats.url, name="test")
    world = World(embedded_nats.url, link, tmp_path)
    try:
        world.planner()
        await world.wait(lambda owners: len(owners) == SHARDS)
        world.planner()
        await world.wait(
            lambda owners: sorted(map(list(owners.values()).count, set(owners.values()))) == [4, 4]
        )
        embedded_nats.kill()
        await embedded_nats.restart()
        body = b'{"spec":{}}'
        for number in range(12):
            subject = subjects.command("create", f"sb-{number}", "c1")
            for _ in range(100):
                try:
                    await link.call(subject, body, timeout_s=2)
                except Exception:
                    await asyncio.sleep(0.1)
                else:
                    break
        for number in range(12):
            view = None
            for _ in range(200):
                view = await world.ask(what="sandbox", sandbox=f"sb-{number}")
                if view is not None:
                    break
                await asyncio.sleep(0.05)
            assert view is not None
        await asyncio.sleep(3)
        terms = {shard: (await world.batches(shard))[-1].term for shard in range(SHARDS)}
        await asyncio.sleep(3)
        # Nobody fights: the terms stand still.
        assert terms == {shard: (await world.batches(shard))[-1].term for shard in range(SHARDS)}
        owners = await world.owners()
        assert sorted(map(list(owners.values()).count, set(owners.values()))) == [4, 4]
    finally:
        for process in world.processes:
            process.child.kill()
            process.child.wait(10)
        await link.close()
