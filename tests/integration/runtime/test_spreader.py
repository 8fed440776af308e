"""Shards are spread evenly over the replicas that are alive, and never left alone for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fencepost.core.errors import LedgerBrokenError
from fencepost.runtime import streams
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.link import Link
from fencepost.runtime.spreader import Owners, Spreader

from tests.contracts import until


class Replica:
    """A replica whose ownerships are only written down."""

    def __init__(self, link: Link, name: str, running: dict[int, set[str]]) -> None:
        self.name = name
        self.link = link
        self.running = running
        self.refuses: set[int] = set()
        self.cannot_read: set[int] = set()
        self.tries: list[int] = []
        self.spreader = Spreader(
            Owners(link, "toy"),
            SystemClock(),
            replica=name,
            shards=8,
            own=self.own,
            give_up=self.give_up,
        )
        self.spreader.start()

    async def own(self, shard: int) -> None:
        self.tries.append(shard)
        if shard in self.refuses:
            raise RuntimeError("not this one")
        if shard in self.cannot_read:
            raise LedgerBrokenError("of a newer version")
        self.running.setdefault(shard, set()).add(self.name)

    async def give_up(self, shard: int) -> None:
        self.running.setdefault(shard, set()).discard(self.name)

    async def die(self) -> None:
        """As `kill -9`: nothing is cleared."""
        for task in (self.spreader._task, self.spreader._renewer):
            assert task is not None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for owners in self.running.values():
            owners.discard(self.name)
        await self.link.nc.close()


@pytest.fixture
async def start(nats_server: Any) -> AsyncIterator[Any]:
    running: dict[int, set[str]] = {}
    replicas: list[Replica] = []

    async def start(name: str) -> Replica:
        link = await Link.connect(nats_server.url, name=name)
        await streams.declare(link, 8, create=True)
        replica = Replica(link, name, running)
        replicas.append(replica)
        return replica

    yield start
    for replica in replicas:
        if not replica.link.nc.is_closed:
            await replica.spreader.stop()
            await replica.link.close()


def counts(replica: Replica) -> dict[str, int]:
    found: dict[str, int] = {}
    for owners in replica.running.values():
        for owner in owners:
            found[owner] = found.get(owner, 0) + 1
    return found


async def test_a_lone_replica_owns_everything(start: Any) -> None:
    one = await start("one")
    await until(lambda: counts(one) == {"one": 8})
    assert one.spreader.is_settled


async def test_replicas_share_and_hand_over(start: Any) -> None:
    one = await start("one")
    await until(lambda: counts(one) == {"one": 8})
    two = await start("two")
    await until(lambda: counts(one) == {"one": 4, "two": 4})
    await start("three")
    await until(lambda: sorted(counts(one).values()) in ([2, 3, 3], [2, 2, 4]))
    assert all(len(owners) == 1 for owners in one.running.values())
    await two.spreader.stop()
    await two.link.close()
    await until(lambda: counts(one) == {"one": 4, "three": 4})


async def test_a_killed_replicas_shards_are_owned_by_the_others(start: Any) -> None:
    one = await start("one")
    two = await start("two")
    await until(lambda: counts(one) == {"one": 4, "two": 4})
    await two.die()
    assert counts(one) == {"one": 4}
    await until(lambda: counts(one) == {"one": 8})


async def test_a_live_replicas_shards_are_never_taken(start: Any) -> None:
    one = await start("one")
    two = await start("two")
    await until(lambda: counts(one) == {"one": 4, "two": 4})
    before = {shard: set(owners) for shard, owners in one.running.items()}
    await asyncio.sleep(2.0)
    assert one.running == before
    assert sorted(two.tries) == sorted(
        shard for shard, owners in before.items() if owners == {"two"}
    )


async def test_a_shard_that_cannot_be_owned_does_not_hold_up_the_others(start: Any) -> None:
    one = await start("one")
    one.refuses.add(3)
    await until(lambda: len(counts(one)) == 1 and counts(one)["one"] >= 7)
    one.refuses.clear()
    await until(lambda: counts(one) == {"one": 8})


async def test_s220_what_an_older_version_cannot_read_is_left_to_the_newer_ones(start: Any) -> None:
    newer = await start("newer")
    await until(lambda: counts(newer) == {"newer": 8})
    older = await start("older")
    older.cannot_read = set(range(8))
    await until(lambda: len(set(older.tries)) >= 4 and counts(newer) == {"newer": 8})
    # It goes on trying, and takes nothing from who can.
    before = len(older.tries)
    await until(lambda: newer.spreader.is_settled and older.spreader.is_settled)
    newest = await start("newest")
    await until(lambda: counts(newer).get("newest", 0) >= 2 and sum(counts(newer).values()) == 8)
    assert "older" not in counts(newer)
    await newest.spreader.stop()
    await newest.link.close()
    await until(lambda: counts(newer) == {"newer": 8})
    # Once it can read them (it was replaced by a newer one), it has its share.
    older.cannot_read = set()
    await newer.die()
    await until(lambda: counts(older) == {"older": 8})
    assert len(older.tries) > before


async def test_an_ended_ownership_is_tried_again(start: Any) -> None:
    one = await start("one")
    await until(lambda: counts(one) == {"one": 8})
    one.running[5].clear()
    one.spreader.ended(5, one.give_up(5))
    await until(lambda: counts(one) == {"one": 8})
    assert one.tries.count(5) == 2
