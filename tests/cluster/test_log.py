"""The log on a cluster of three, without services: conditions, refusals, and who may be believed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from fencepost.client.outbox import publish_durably
from fencepost.contracts import streams as table
from fencepost.contracts import subjects
from fencepost.runtime import streams
from fencepost.runtime.ledger import WRONG_LAST_SEQUENCE, JetStreamLog
from fencepost.runtime.link import Link, stream_info
from fencepost.runtime.ports import AppendRefused, Valid

from scripts.chaos.cluster import NatsCluster
from tests.cluster.racing import Race

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.budget(120),
    # The client library drops a connection to a silent node without closing it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SHARDS = 8
SUBJECT = "fp.v1.ledger.toy.0"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[NatsCluster]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-cluster-"))
    cluster = await NatsCluster.start(folder)
    try:
        yield cluster
    finally:
        cluster.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def link(cluster: NatsCluster) -> AsyncIterator[Link]:
    link = await Link.connect(cluster.url, name="test")
    await streams.declare_at_start(link, SHARDS, create=True, replicas=3)
    yield link
    await link.close()


async def api(link: Link, what: str, body: Any = None) -> dict[str, Any]:
    return dict(msgspec.json.decode(await link.api(what, body, timeout_s=10)))


async def test_every_stream_has_three_replicas_and_what_need_not_survive_is_in_memory(
    link: Link,
) -> None:
    kept = {table.LEDGER, table.COMMANDS, table.FACTS, table.MESSAGES}
    for name, config in map(streams.wanted, table.table(SHARDS, replicas=3)):
        info = await stream_info(link, name)
        assert info.error is None, name
        assert info.config["num_replicas"] == 3, name
        # At R3 a server refuses to write a file later than it acknowledges.
        assert info.config.get("persist_mode", "default") in ("", "default"), name
        assert info.config["storage"] == "file" or name not in kept, name
        assert not streams.differences(config, info.config)
    wanted = {"name": "LATE", "subjects": ["late"], "storage": "file", "persist_mode": "async"}
    refused = await api(link, "STREAM.CREATE.LATE", {**wanted, "num_replicas": 3})
    assert "async persist mode" in refused["error"]["description"]
    taken = await api(link, "STREAM.CREATE.LATE", {**wanted, "num_replicas": 1})
    assert "error" not in taken
    await api(link, "STREAM.DELETE.LATE")


async def test_s211_a_condition_that_fails_is_a_refusal_under_either_code(link: Link) -> None:
    log = JetStreamLog(link)
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


async def test_s211_a_second_command_of_one_step_is_refused_by_three_as_by_one(link: Link) -> None:
    subject = subjects.command("step", "twice", "step-1")
    stored = await asyncio.gather(
        *(publish_durably(link, subject, b'{"number":%d}' % number) for number in range(20))
    )
    assert stored.count(True) == 1
    assert not await publish_durably(link, subject, b'{"number":20}')


async def test_one_message_at_most_is_accepted_on_a_head_whoever_leads(
    cluster: NatsCluster, link: Link, rounds: int
) -> None:
    race = Race()
    race.start([f"{node.url},{cluster.url}" for node in cluster.nodes])
    for number in range(rounds):
        before = len(race.acknowledged)
        leader = await cluster.leader(link, table.LEDGER)
        if number % 2:
            # Continued, it still believes that it leads.
            leader.pause()
        else:
            leader.kill()
        async with asyncio.timeout(60):
            while len(race.acknowledged) < before + 50:
                await asyncio.sleep(0.05)
        if number % 2:
            leader.resume()
        else:
            leader.start()
        await cluster.settle()
    await race.stop()
    assert race.refused > 0, "nobody ever met another one"
    assert await race.problems(link) == []
