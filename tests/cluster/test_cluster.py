"""A cluster of three: what a client was told is committed outlives any one node."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from fencepost.client import Client
from fencepost.client.outbox import publish_durably
from fencepost.contracts import streams as table
from fencepost.contracts import subjects
from fencepost.runtime import streams
from fencepost.runtime.ledger import WRONG_LAST_SEQUENCE, JetStreamLog
from fencepost.runtime.link import stream_info
from fencepost.runtime.ports import AppendRefused, Valid

from scripts.chaos.cluster import NatsCluster, Node
from scripts.chaos.faults import ELECTION_S
from scripts.chaos.world import World
from tests.cluster.conftest import judged
from tests.cluster.racing import Race

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    # The client library drops a connection to a paused node without closing it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SUBJECT = "fp.v1.ledger.toy.0"


def nodes(world: World) -> NatsCluster:
    assert world.cluster is not None
    return world.cluster


async def api(client: Client, what: str, body: Any = None) -> dict[str, Any]:
    return dict(msgspec.json.decode(await client.link.api(what, body, timeout_s=10)))


async def test_every_stream_has_three_replicas_and_what_need_not_survive_is_in_memory(
    world: World, client: Client
) -> None:
    kept = {table.LEDGER, table.COMMANDS, table.FACTS, table.MESSAGES}
    for name, config in map(streams.wanted, table.table(client.shards, replicas=3)):
        info = await stream_info(client.link, name)
        assert info.error is None, name
        assert info.config["num_replicas"] == 3, name
        # At R3 a server refuses to write a file later than it acknowledges.
        assert info.config.get("persist_mode", "default") in ("", "default"), name
        assert info.config["storage"] == "file" or name not in kept, name
        assert not streams.differences(config, info.config)
    wanted = {"name": "LATE", "subjects": ["late"], "storage": "file", "persist_mode": "async"}
    refused = await api(client, "STREAM.CREATE.LATE", {**wanted, "num_replicas": 3})
    assert "async persist mode" in refused["error"]["description"]
    taken = await api(client, "STREAM.CREATE.LATE", {**wanted, "num_replicas": 1})
    assert "error" not in taken
    await api(client, "STREAM.DELETE.LATE")


async def test_s211_a_condition_that_fails_is_a_refusal_under_either_code(
    world: World, client: Client
) -> None:
    log = JetStreamLog(client.link)
    last = await log.last(SUBJECT)
    head = last.seq if isinstance(last, Valid) else 0
    # Together, so that the second meets the first on its way: replicated, that is another error.
    found = await asyncio.gather(
        *(log.append(SUBJECT, b"%d" % number, head) for number in range(20)),
        return_exceptions=True,
    )
    taken = [one for one in found if isinstance(one, int)]
    refused = [one for one in found if isinstance(one, AppendRefused)]
    assert (len(taken), len(refused)) == (1, 19)
    assert WRONG_LAST_SEQUENCE == {10071, 10164}
    with pytest.raises(AppendRefused) as later:
        await log.append(SUBJECT, b"late", head)
    assert later.value.last in (taken[0], None)
    assert await log.append(SUBJECT, b"next", taken[0]) > taken[0]


async def test_nothing_is_lost_when_the_leader_of_the_ledger_dies_again_and_again(
    world: World, client: Client, rounds: int
) -> None:
    cluster = nodes(world)
    died: list[Node] = []
    race = Race()
    async with judged(world, client, "kill-") as load:
        race.start([f"{node.url},{world.nats_url}" for node in cluster.nodes])
        for _ in range(rounds):
            leader = await cluster.leader(client.link, table.LEDGER)
            leader.kill()
            died.append(leader)
            # Two of three go on; the third is lost until then, and rejoins.
            await load.goes_on()
            leader.start()
            await cluster.settle()
        await race.stop()
    assert len(died) == rounds
    assert race.refused > 0, "nobody ever met another one"
    assert len(race.acknowledged) > 20
    assert await race.problems(client.link) == []


async def test_s211_a_second_command_of_one_step_is_refused_by_three_as_by_one(
    world: World, client: Client
) -> None:
    subject = subjects.command("step", "twice", "step-1")
    stored = await asyncio.gather(
        *(publish_durably(client.link, subject, b'{"number":%d}' % n) for n in range(20))
    )
    assert stored.count(True) == 1
    assert not await publish_durably(client.link, subject, b'{"number":20}')


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
            await asyncio.sleep(ELECTION_S)
            await load.goes_on()
            before = load.committed
            # Here it still believes that it leads, and answers from what it knew.
            former.resume()
            await cluster.settle()
            await load.goes_on()
            assert load.committed > before
