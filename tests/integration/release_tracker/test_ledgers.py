"""The projection of shards that are spread over several ledger streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from fencepost.release_tracker import projector as projecting
from fencepost.release_tracker.families import DAG, SANDBOX
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import TrackerMetrics
from fencepost.runtime.streams import declare

from tests.integration.release_tracker import test_dags as dags
from tests.integration.release_tracker import test_projection as sandboxes
from tests.integration.release_tracker.conftest import SHARDS, Stack, eventually
from tests.integration.release_tracker.planner import Shard, Workload

LEDGERS = 2


@pytest.fixture
async def apart(nats_server: Any, postgres_server: Any) -> AsyncIterator[Stack]:
    link = await Link.connect(nats_server.url, name="test")
    try:
        await declare(link, SHARDS, create=True, ledgers=LEDGERS)
        yield Stack(link, postgres_server.dsn, ledgers=LEDGERS)
    finally:
        await link.close()


def spread(stack: Stack, shards: list[Shard]) -> None:
    for shard in shards:
        shard.log = stack.logs[shard.shard % LEDGERS]


async def test_a_rebuild_equals_the_incremental_projection_whatever_the_order_of_streams(
    apart: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(apart.log, 7, shards=SHARDS, sandboxes=9)
    roots = dags.DagWorkload(apart.log, 3, dags=9)
    spread(apart, [*workload.shards, *roots.shards])
    metrics = TrackerMetrics()
    projector = apart.projector(metrics)
    async with apart.projecting(projector), apart.projecting(apart.projector(family=DAG)):
        await workload.open()
        await roots.open()
        await workload.run(150)
        await roots.run(150)
        await workload.run(50)
        await sandboxes.caught_up(apart, workload)
        await dags.caught_up(apart, roots)
        assert await projector.heads() == {shard.shard: shard.head for shard in workload.shards}
    # The streams count for themselves: no two shards of different ones have a common order.
    assert len({shard.head for shard in workload.shards}) > 1
    before = await apart.dump()
    for group in (1, 128):
        await sandboxes.wipe(apart)
        assert await apart.dump() != before
        monkeypatch.setattr(projecting, "GROUP_BATCHES_MAX", group)
        async with apart.projecting(), apart.projecting(apart.projector(family=DAG)):
            await sandboxes.caught_up(apart, workload)
            await dags.caught_up(apart, roots)
        assert await apart.dump() == before


async def test_the_lag_is_that_of_all_streams(apart: Stack) -> None:
    workload = Workload(apart.log, 5, shards=SHARDS, sandboxes=4)
    spread(apart, workload.shards)
    await workload.open()
    await workload.run(40)
    metrics = TrackerMetrics()
    projector = apart.projector(metrics)
    lag = metrics.projection_lag.labels(SANDBOX.name)._value
    ends = {n: max(s.head for s in workload.shards if s.shard % LEDGERS == n) for n in range(2)}

    async def is_behind_by(count: int) -> None:
        async def reached() -> bool:
            return bool(lag.get() == count)

        await eventually(reached)

    async with apart.measuring(projector):
        await is_behind_by(sum(ends.values()))
        async with apart.projecting(projector):
            await sandboxes.caught_up(apart, workload)
            await is_behind_by(0)


async def test_tables_of_another_number_of_ledgers_are_refused(apart: Stack) -> None:
    """They would name sequences of other streams."""
    workload = Workload(apart.log, 5, shards=SHARDS, sandboxes=1)
    spread(apart, workload.shards)
    await workload.open()
    async with apart.projecting():
        await sandboxes.caught_up(apart, workload)
    row = (await apart.fetch("SELECT incarnation FROM projection_ledger"))[0]
    assert len(row["incarnation"].split()) == LEDGERS
    connection = await apart.connect()
    await connection.execute(
        "UPDATE projection_ledger SET incarnation = split_part(incarnation, ' ', 1)"
    )
    await connection.close()
    async with apart.projecting() as running:

        async def refused() -> bool:
            return "another ledger" in running.why_not_ready

        await eventually(refused)


async def test_a_gap_in_one_stream_stops_its_shard_alone(apart: Stack) -> None:
    workload = Workload(apart.log, 9, shards=SHARDS, sandboxes=6)
    spread(apart, workload.shards)
    await workload.open()
    broken = workload.shards[1]
    await broken.append([], prev=broken.head + 5)
    heads = {shard.shard: shard.head for shard in workload.shards}
    async with apart.projecting() as running:

        async def reached() -> bool:
            found = await apart.positions()
            return all(found.get(shard) == heads[shard] for shard in (0, 2))

        await eventually(reached)

        async def stopped() -> bool:
            return set(running.stopped) == {1}

        await eventually(stopped)
        assert (await apart.positions())[1] < heads[1]
        assert "a gap" in running.stopped[1]
