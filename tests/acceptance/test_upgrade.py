"""
Two versions side by side on one ledger: the next one comes, goes on, and is not undone.

The next version is the present one with a field more in all that it writes, and machines of a
higher version (`next_version/sitecustomize.py`).
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from fencepost.client import Client, ledger
from fencepost.core.machine import TermOpened
from fencepost.core.sandbox.machine import SandboxMachine

from tests.acceptance.conftest import RunningStack, StartStack
from tests.acceptance.test_takeover import owners
from tests.acceptance.walking import PATIENCE_S, History, Work, until

NEXT = {"PYTHONPATH": str(Path(__file__).parent / "next_version")}
BOXES = 4


async def machines(client: Client) -> dict[int, int]:
    """By shard, the version of the machine that opened the last term."""
    found = {}
    for shard in range(client.shards):
        async for recorded in ledger.batches(client.link, shard):
            for entry in recorded.entries:
                if isinstance(entry, TermOpened):
                    found[shard] = entry.machine
    return found


async def owned_by(client: Client, machine: int) -> None:
    """Waits until every shard's last term was opened by a machine of this version."""
    async with asyncio.timeout(PATIENCE_S):
        while set((await machines(client)).values()) != {machine}:
            await asyncio.sleep(0.1)


def said(stack: RunningStack, service: str, event: str) -> list[str]:
    text = (stack.data / "log" / f"{service}.log").read_text(errors="replace")
    return [line for line in text.splitlines() if f'"event": "{event}"' in line]


async def round_of_all(boxes: list[Work], tag: str) -> None:
    await asyncio.gather(*(box.round(f"{box.box}-{tag}") for box in boxes))
    for box in boxes:
        await box.check()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_s220_the_next_version_runs_beside_this_one_and_takes_over(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(trackers=1)
    present = SandboxMachine.version
    async with await stack.client() as client:
        history = History(client)
        boxes = [Work(stack, client, history, f"box-{number}") for number in range(BOXES)]
        await asyncio.gather(*(client.create_sandbox(box.box) for box in boxes))
        await round_of_all(boxes, "old")
        await owned_by(client, present)

        fresh = stack.add("planner", **NEXT)
        fresh.start()
        await fresh.ready(seconds=PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while set((await machines(client)).values()) != {present, present + 1}:
                await asyncio.sleep(0.1)
        await round_of_all(boxes, "both")

        former = stack.services["planner-1"]
        assert await former.stop() == 0
        await owned_by(client, present + 1)
        # Gateways come last; their facts and receipts have a field more from here on.
        gateway = stack.add("gateway", **NEXT)
        gateway.start()
        await gateway.ready(seconds=PATIENCE_S)
        await stack.services["gateway-1"].stop()
        await round_of_all(boxes, "new")
        await client.create_sandbox("made-by-the-next")
        await client.open_dag("run")
        await client.acquire("run", "slot")
        assert (await client.cancel_dag("run")).released == "confirmed"

        # Back to the former one: it owns nothing, says why, and takes nothing from who can.
        before = {shard: batch.owner for shard, batch in (await owners(client)).items()}
        former.start()
        await until(lambda: said(stack, "planner-1", "shard_unownable"), "it refuses")
        why = json.loads(said(stack, "planner-1", "shard_unownable")[0])["detail"]
        assert f"written by machine version {present + 1}" in why
        async with httpx.AsyncClient(timeout=10) as http:
            answer = await http.get(f"{former.http_url}/readyz")
        assert answer.status_code == 503
        assert "cannot be owned" in answer.text
        await round_of_all(boxes, "back")
        assert {shard: batch.owner for shard, batch in (await owners(client)).items()} == before
    report = await stack.verify()
    assert report.violations == []
    assert report.committed == 6 * BOXES * 4
