"""A cluster of three: what a client was told is committed outlives any one node."""

from __future__ import annotations

import asyncio

import pytest
from fencepost.client import Client
from fencepost.contracts import streams as table

from scripts.chaos.cluster import NatsCluster, Node
from scripts.chaos.world import World
from tests.cluster.conftest import judged

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.budget(120),
    # The client library drops a connection to a paused node without closing it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def nodes(world: World) -> NatsCluster:
    assert world.cluster is not None
    return world.cluster


async def test_nothing_is_lost_when_the_leader_of_the_ledger_dies_again_and_again(
    world: World, client: Client, rounds: int
) -> None:
    cluster = nodes(world)
    died: list[Node] = []
    async with judged(world, client, "kill-") as load:
        for _ in range(rounds):
            leader = await cluster.leader(client.link, table.LEDGER)
            leader.kill()
            died.append(leader)
            # Two of three go on; the third is lost until then, and rejoins.
            await load.goes_on()
            leader.start()
            await cluster.settle()
    assert len(died) == rounds


async def test_a_node_whose_disk_was_wiped_is_filled_again_and_carries_the_rest(
    world: World, client: Client, rounds: int
) -> None:
    cluster = nodes(world)
    async with judged(world, client, "wipe-") as load:
        for number in range(rounds):
            await cluster.settle()
            wiped = cluster.nodes[number % len(cluster.nodes)]
            wiped.kill()
            wiped.wipe()
            assert not list(wiped.store.iterdir())
            await load.goes_on()
            wiped.start()
            await cluster.settle()
            # What it has now is needed: without one of the others the two left must agree.
            other = cluster.nodes[(number + 1) % len(cluster.nodes)]
            other.kill()
            await load.goes_on()
            other.start()
            await cluster.settle()


async def test_a_leader_that_was_paused_past_an_election_comes_back_and_is_not_believed(
    world: World, client: Client, rounds: int
) -> None:
    cluster = nodes(world)
    async with judged(world, client, "pause-") as load:
        for _ in range(rounds):
            former = await cluster.leader(client.link, table.LEDGER)
            former.pause()
            async with asyncio.timeout(60):
                while await cluster.leader(client.link, table.LEDGER, seconds=60) is former:
                    await asyncio.sleep(0.1)
            await load.goes_on()
            before = load.committed
            # Here it still believes that it leads, and answers from what it knew.
            former.resume()
            await cluster.settle()
            await load.goes_on()
            assert load.committed > before
