"""A ledger that was put back to what it was earlier is found by what other shards go on from."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from fencepost.client import ledger
from fencepost.client.client import Client
from fencepost.client.embedded import NatsServer
from fencepost.client.verify import verify
from fencepost.contracts import subjects
from fencepost.contracts.messages import HASH, Batch, Seen, Sent
from fencepost.core import ids
from fencepost.core.dag.machine import DagMachine
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.runtime import streams as deployed
from fencepost.runtime.link import Link, stream_info

SHARDS = LEDGERS = 2
DAG = next(name for n in range(99) if ids.shard_of(name := f"dag-{n}", SHARDS) == 0)
BOX = next(name for n in range(99) if ids.shard_of(name := f"box-{n}", SHARDS) == 1)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    server = await NatsServer.start(tmp_path / "nats")
    try:
        link = await Link.connect(server.url, name="operator")
        await deployed.declare(link, SHARDS, create=True, ledgers=LEDGERS)
        await link.close()
        async with await Client.connect(server.url, wait_s=5) as connected:
            yield connected
    finally:
        await server.stop()


def batch(family: str, shard: int, prev: int, entries: bytes, **fields: Seen) -> Batch:
    return Batch(
        v=1,
        id=f"{family}.{shard}.{prev}",
        family=family,
        shard=shard,
        term=1,
        owner="somebody",
        prev=prev,
        now_ms=1,
        positions={},
        last_seen={name.replace("_", "."): seen for name, seen in fields.items()},
        sent=Sent(),
        entries=msgspec.Raw(entries),
    )


async def append(client: Client, each: Batch) -> None:
    log = ledger.log_of(client.link, each.shard, client.ledgers)
    subject = subjects.ledger(each.family, each.shard)
    assert await log.append(subject, msgspec.json.encode(each), each.prev) == each.prev + 1


def opened() -> Batch:
    machine = SandboxMachine()
    entries = machine.encode_entries([machine.term_opened(1, "somebody", SHARDS, HASH)])
    return batch("sandbox", 1, 0, entries)


def told() -> Batch:
    """To the DAG, whose shard is in the other ledger."""
    entry = e.ToldEntry(sandbox=BOX, dag=DAG, acquisition="a1", phase="refused")
    return batch("sandbox", 1, 1, SandboxMachine().encode_entries([entry]))


def took(index: int) -> Batch:
    machine = DagMachine()
    entries = machine.encode_entries([machine.term_opened(1, "somebody", SHARDS, HASH)])
    return batch("dag", 0, 0, entries, sandbox_1=Seen(2, index))


async def test_what_was_taken_and_sent_is_clean(client: Client) -> None:
    for each in (opened(), told(), took(0)):
        await append(client, each)
    report = await verify(client)
    assert report.is_clean, report.violations


async def test_what_was_taken_and_is_not_sent_any_more_is_told(client: Client) -> None:
    for each in (opened(), told(), took(0)):
        await append(client, each)
    config = (await stream_info(client.link, "FP_LEDGER_1")).config
    for api, body in (("DELETE", None), ("CREATE", config)):
        done = await client.link.api(f"STREAM.{api}.FP_LEDGER_1", body)
        assert b'"error"' not in done
    await append(client, opened())  # the older back-up: whole, and it folds by itself
    report = await verify(client)
    assert [(v.invariant, v.family, v.shard, v.seq) for v in report.violations] == [
        ("I8", "sandbox", 1, 2)
    ]
    assert report.violations[0].detail.startswith("dag.0 has taken a message that sandbox.1")


async def test_another_message_than_the_one_that_was_taken_is_told(client: Client) -> None:
    for each in (opened(), told(), took(1)):
        await append(client, each)
    report = await verify(client)
    assert [(v.seq, v.index) for v in report.violations] == [(2, 1)]
