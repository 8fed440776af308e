"""A planner that is killed, or paused past its lock: who has its shards, from when on."""

from __future__ import annotations

import asyncio
import time

import msgspec
from fencepost.client import Client, ledger
from fencepost.contracts import subjects
from fencepost.contracts.messages import Batch
from fencepost.core.machine import TermOpened
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.ports import Valid

from tests.acceptance.conftest import StartStack
from tests.acceptance.walking import PATIENCE_S, History, Work

TAKEOVER_S_MAX = 5.0


async def owners(client: Client) -> dict[int, Batch]:
    """By shard, the last batch: who appended it, and under which term."""
    log = JetStreamLog(client.link)
    found = {}
    for shard in range(client.shards):
        last = await log.last(subjects.ledger("sandbox", shard))
        assert isinstance(last, Valid)
        found[shard] = msgspec.json.decode(last.payload, type=Batch)
    return found


async def spread(client: Client, planners: int) -> dict[int, Batch]:
    """Waits until every planner has a share of the shards, and nobody takes more."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        now = await owners(client)
        counts = [[b.owner for b in now.values()].count(o) for o in {b.owner for b in now.values()}]
        if len(counts) == planners and max(counts) <= -(-client.shards // planners):
            return now
        assert time.monotonic() < deadline, counts
        await asyncio.sleep(0.05)


async def terms_opened(client: Client, after: dict[int, int]) -> list[tuple[int, TermOpened]]:
    found = []
    for shard, seq in after.items():
        async for recorded in ledger.batches(client.link, shard, after=seq):
            found += [(shard, x) for x in recorded.entries if isinstance(x, TermOpened)]
    return found


async def _heads(client: Client) -> dict[int, int]:
    heads = dict.fromkeys(range(client.shards), 0)
    for shard in heads:
        async for recorded in ledger.batches(client.link, shard):
            heads[shard] = recorded.seq
    return heads


async def test_a_killed_planners_shards_are_taken_over_within_seconds_and_no_step_is_lost(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(planners=3)
    async with await stack.client() as client:
        boxes = [Work(stack, client, History(client), f"box-{number}") for number in range(8)]
        await asyncio.gather(*(client.create_sandbox(box.box) for box in boxes))
        before = await spread(client, 3)
        heads = await _heads(client)
        working = asyncio.gather(*(box.round(f"{box.box}-a") for box in boxes))
        await asyncio.sleep(0.05)
        killed_at = time.monotonic()
        stack.services["planner-2"].kill()
        opened_at: dict[int, float] = {}
        now = before
        while len({batch.owner for batch in now.values()}) != 2:
            assert time.monotonic() - killed_at < PATIENCE_S
            await asyncio.sleep(0.01)
            for shard, _ in await terms_opened(client, heads):
                opened_at.setdefault(shard, time.monotonic() - killed_at)
            now = await owners(client)
        for shard, _ in await terms_opened(client, heads):
            opened_at.setdefault(shard, time.monotonic() - killed_at)
        dead = {b.owner for b in before.values()} - {b.owner for b in now.values()}
        assert len(dead) == 1
        its_shards = {shard for shard, b in before.items() if b.owner in dead}
        assert set(opened_at) == its_shards
        print(f"takeover_s {max(opened_at.values()):.3f}")  # shown with -rP
        assert max(opened_at.values()) < TAKEOVER_S_MAX
        await working
        for box in boxes:
            await box.check()
            # Losing a planner costs no session, so nothing is unknown.
            assert {outcome.state for outcome in box.outcomes.values()} == {"committed"}
    report = await stack.verify()
    assert report.violations == []
    assert report.committed == 6 * len(boxes)


async def test_s216_a_planner_paused_past_its_lock_is_deposed_and_does_no_harm(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(planners=2)
    async with await stack.client() as client:
        boxes = [Work(stack, client, History(client), f"box-{number}") for number in range(4)]
        await asyncio.gather(*(client.create_sandbox(box.box) for box in boxes))
        before = await spread(client, 2)
        working = asyncio.gather(*(box.round(f"{box.box}-a") for box in boxes))
        paused = stack.services["planner-1"]
        paused.pause()
        deadline = time.monotonic() + PATIENCE_S
        while len({b.owner for b in (await owners(client)).values()}) != 1:
            assert time.monotonic() < deadline, "the other takes all shards"
            await asyncio.sleep(0.05)
        during = await owners(client)
        paused.resume()
        await working
        # It goes on living, takes shards again in its turn, and the former terms stay closed.
        after = await spread(client, 2)
        assert paused.is_running
        for shard, batch in after.items():
            assert batch.term >= during[shard].term >= before[shard].term
        await asyncio.gather(*(box.round(f"{box.box}-b") for box in boxes))
        for box in boxes:
            await box.check()
    report = await stack.verify()
    assert report.violations == []
    assert report.committed == 12 * len(boxes)


async def test_the_last_planner_alone_still_ends_every_step(start_stack: StartStack) -> None:
    stack = await start_stack(planners=3)
    async with await stack.client() as client:
        box = Work(stack, client, History(client), "box")
        await client.create_sandbox("box")
        await spread(client, 3)
        for name in ("planner-1", "planner-2"):
            working = asyncio.create_task(box.round(name))
            stack.services[name].kill()
            await working
        await box.check()
    assert (await stack.verify()).violations == []
