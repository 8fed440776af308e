"""The sweeper as a process beside real planners, gateways, provider and trackers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fencepost.client import ledger
from fencepost.client.client import Client
from fencepost.client.stack import Stack
from fencepost.client.verify import verify
from fencepost.contracts import subjects
from fencepost.contracts.messages import SweepReply
from fencepost.core import ids
from fencepost.core.errors import UnknownError
from fencepost.core.shard_messages import Hold
from fencepost.core.steps import SandboxSpec
from fencepost.core.sweeping import Report
from fencepost.providers.process import ProcessProvider
from fencepost.runtime import access
from fencepost.runtime.link import Link
from fencepost.runtime.outbox import Envelope

pytestmark = pytest.mark.budget(80)

WAIT_S = 60.0
SHARDS = 4
QUICK = {
    "FENCEPOST_HEARTBEAT_MS": "150",
    "FENCEPOST_LEASE_MS": "1000",
    "FENCEPOST_LOG_FORMAT": "json",
    "FENCEPOST_SWEEP_EVERY_MS": "200",
    "FENCEPOST_SWEEP_GRACE_MS": "400",
}


class World:
    def __init__(self, stack: Stack, client: Client) -> None:
        self.stack = stack
        self.client = client
        self.reports: list[Report] = []

    async def listen(self) -> None:
        await self.client.link.subscribe_raw(f"{subjects.PREFIX}.event.sweep.*", self._take)
        await self.client.link.flush()

    def _take(self, msg: Any) -> None:
        self.reports.append(msgspec.json.decode(msg.data, type=Report))

    def provider(self, deployment: str = "local") -> ProcessProvider:
        """The same provider as the gateway's, in this process."""
        return ProcessProvider(self.stack.sandbox_root, deployment=deployment)

    async def left_over(self, sandbox: str, deployment: str = "local") -> Path:
        """Makes a sandbox of which no ledger knows; returns its folder."""
        provider = self.provider(deployment)
        made: Any = await provider.create(sandbox, SandboxSpec(), {"sandbox": sandbox, "dag": "d"})
        return self.stack.sandbox_root / made.ref.native_id

    def of(self, authority: str) -> list[Report]:
        return [report for report in self.reports if report.authority == authority]

    async def ticks(self, count: int = 3) -> None:
        """Waits until so many more whole ticks were reported."""
        seen = len(self.of("ledger"))
        await wait_for(lambda: len(self.of("ledger")) >= seen + count, f"{count} ticks")

    async def entries(self, sandbox: str) -> list[str]:
        """What the ledger says of a sandbox's name, by kind."""
        found = []
        shard = ids.shard_of(sandbox, SHARDS)
        async for recorded in ledger.batches(self.client.link, shard):
            found += [
                str(entry.__struct_config__.tag)
                for entry in recorded.entries
                if getattr(entry, "sandbox", "") == sandbox
            ]
        return found

    async def until_in_ledger(self, sandbox: str, kind: str) -> list[str]:
        until = asyncio.get_running_loop().time() + WAIT_S
        while kind not in (found := await self.entries(sandbox)):
            assert asyncio.get_running_loop().time() < until, f"no {kind} of {sandbox}: {found}"
            await asyncio.sleep(0.1)
        return found

    async def command(self, *words: str) -> str:
        """Runs `fencepost` as a person does; what it says."""
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("fencepost")),
            *words,
            "--url",
            self.stack.nats.url,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said
        return said.decode()

    async def census(self) -> list[Report]:
        msg = await self.client.link.call(subjects.SWEEP, b"", timeout_s=30)
        return msgspec.json.decode(msg.data, type=SweepReply).reports


async def wait_for(condition: Callable[[], Any], what: str, seconds: float = WAIT_S) -> None:
    until = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < until, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def world(*, sweepers: int = 1, postgres: bool = False, **environment: str) -> Any:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-test-"))
    folder.chmod(0o755)
    stack = None
    try:
        stack = await Stack.start(
            folder, postgres=postgres, shards=SHARDS, environment={**QUICK, **environment}
        )
        for _ in range(sweepers - 1):
            replica = stack.add("sweeper")
            replica.start()
            await replica.ready()
        async with await Client.connect(stack.nats.url, wait_s=10) as client:
            found = World(stack, client)
            await found.listen()
            yield found
    finally:
        if stack is not None:
            await stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def swept() -> AsyncIterator[World]:
    async with world() as found:
        yield found


async def test_s210_what_no_ledger_names_is_stopped_and_nothing_else_is(swept: World) -> None:
    await swept.client.create_sandbox("alive")
    other = await swept.left_over("ghost2", "another-deployment")
    ghost = await swept.left_over("ghost")
    assert await swept.until_in_ledger("ghost", "stray_gone") == ["stray_found", "stray_gone"]
    await swept.ticks(4)
    assert await swept.entries("ghost") == ["stray_found", "stray_gone"]
    assert not ghost.exists()
    assert other.exists(), "another deployment's"
    (await swept.client.write_file("alive", "a", "b")).require()
    whys = {f.why for r in swept.reports for f in r.findings if f.sandbox == "ghost"}
    assert {"first_sight", "proposed"} <= whys
    assert (await verify(swept.client)).is_clean


async def test_s096_the_switch_and_a_census_by_hand() -> None:
    async with world(FENCEPOST_SWEEP="census") as found:
        ghost = await found.left_over("ghost")
        await found.ticks(8)
        assert ghost.exists()
        listed = next(r for r in await found.census() if r.authority != "ledger")
        assert [(f.sandbox, f.why) for f in listed.findings] == [("ghost", "census")]
        said = await found.command("sweep", "--dry-run")
        assert "ghost: process ghost-" in said and "would be proposed" in said
        assert ghost.exists()
        assert "off" in await found.command("sweep", "--mode", "off")
        await asyncio.sleep(0.5)
        count = len(found.reports)
        await asyncio.sleep(1.0)
        assert len(found.reports) == count, "the switch is off"
        await found.command("sweep", "--mode", "on", "--json")
        await wait_for(lambda: not ghost.exists(), "switched on, it is gone")


async def test_s136_s161_of_two_sweepers_one_works_and_the_other_takes_over() -> None:
    async with world(sweepers=2, FENCEPOST_SWEEP_GRACE_MS="2500") as found:
        await found.client.create_sandbox("alive")
        ghost = await found.left_over("ghost")
        await found.ticks(2)
        logs = {s.name: s for s in found.stack.of("sweeper")}
        leader = next(n for n, s in logs.items() if "lead_taken" in s.log.read_text())
        (waiting,) = set(logs) - {leader}
        assert "lead_taken" not in logs[waiting].log.read_text()
        logs[leader].kill()
        await wait_for(lambda: not ghost.exists(), "the other one's sweep")
        assert "lead_taken" in logs[waiting].log.read_text()
        assert await found.until_in_ledger("ghost", "stray_gone") == ["stray_found", "stray_gone"]


def unknown_dag(beside: str) -> str:
    """An id that is in another shard than `beside`."""
    taken = ids.shard_of(beside, SHARDS)
    return next(f"lost-{n}" for n in range(100) if ids.shard_of(f"lost-{n}", SHARDS) != taken)


async def test_s131_s183_a_holder_whose_dag_is_unknown_is_let_go_once() -> None:
    async with world(postgres=True) as found:
        client = found.client
        dag = await client.open_dag("kept")
        kept = await client.acquire("kept", "slot")
        lost = unknown_dag("kept")
        hold = Hold(dag=lost, acquisition="acq-lost", sandbox="orphan", spec=SandboxSpec())
        envelope = Envelope(
            family="dag",
            shard=ids.shard_of(lost, SHARDS),
            seq=1_000_000,
            index=0,
            aggregate="orphan",
            body=msgspec.Raw(msgspec.json.encode(hold)),
        )
        subject = subjects.message("sandbox", ids.shard_of("orphan", SHARDS))
        tracker = access.read(str(found.stack.credentials["tracker"]))
        forging = await Link.connect(found.stack.nats.url, name="as-tracker", access=tracker)
        await forging.call(subject, msgspec.json.encode(envelope), timeout_s=5)
        await forging.close()

        await found.until_in_ledger("orphan", "gone")
        await found.ticks(4)
        kinds = await found.entries("orphan")
        assert [
            kinds.count(k) for k in ("holder_added", "holder_removed", "releasing", "gone")
        ] == [
            1,
            1,
            1,
            1,
        ]
        assert "holder_removed" not in await found.entries(kept.sandbox), dag
        assert found.of("ledger")[-1].counts == {"held": 1}
        # That the hold was forged shows in one thing alone: no ledger has the message.
        (forged,) = (await verify(client)).violations
        assert (forged.invariant, forged.family, forged.seq) == ("I8", "dag", 1_000_000)


async def test_no_lead_no_answer() -> None:
    async with world(FENCEPOST_SWEEP="off") as found:
        assert await found.census() != [], "by hand it looks, whatever the setting"
        for service in found.stack.of("sweeper"):
            await service.stop()
        with pytest.raises(UnknownError):
            await found.client.link.call(subjects.SWEEP, b"", timeout_s=0.5)
