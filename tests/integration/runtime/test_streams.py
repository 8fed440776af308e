"""Streams are made by a designated creator alone, and never changed by anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fencepost.contracts import streams as table
from fencepost.runtime import streams
from fencepost.runtime.link import Link, stream_info


@pytest.fixture
async def link(nats_server: Any) -> AsyncIterator[Link]:
    link = await Link.connect(nats_server.url, name="test")
    yield link
    await link.close()


async def test_s163_a_process_that_may_not_create_fails_clearly(link: Link) -> None:
    with pytest.raises(streams.StreamMissingError, match="FP_LEDGER does not exist"):
        await streams.declare(link, 8, create=False)
    assert (await stream_info(link, "FP_LEDGER")).error is not None
    await streams.declare(link, 8, create=True)
    await streams.declare(link, 8, create=False)


async def test_declaring_again_changes_nothing(link: Link) -> None:
    await streams.declare(link, 8, create=True)
    before = await stream_info(link, "FP_LEDGER")
    deployment = await streams.read_meta(link, "deployment")
    await streams.declare(link, 8, create=True)
    assert (await stream_info(link, "FP_LEDGER")).created == before.created
    assert await streams.read_meta(link, "deployment") == deployment


async def test_s95_a_narrowed_stream_is_refused_and_not_repaired(link: Link) -> None:
    name, config = streams.wanted(table.table(8)[0])
    assert name == "FP_LEDGER"
    narrowed = {**config, "max_msgs": 1000}
    assert b'"error"' not in await link.api(f"STREAM.CREATE.{name}", narrowed)
    for create in (True, False):
        with pytest.raises(streams.StreamMismatchError, match="max_msgs: wanted -1, found 1000"):
            await streams.declare(link, 8, create=create)
    assert (await stream_info(link, name)).config["max_msgs"] == 1000


async def test_another_number_of_shards_is_refused(link: Link) -> None:
    await streams.declare(link, 8, create=True)
    with pytest.raises(streams.StreamMismatchError):
        await streams.declare(link, 16, create=True)


async def test_what_a_later_version_says_of_the_cut_is_not_passed_over(link: Link) -> None:
    await streams.declare(link, 8, create=True)
    recorded = await streams.read_meta(link, "shards")
    assert recorded is not None
    key = f"$KV.{table.BUCKET_META}.shards"
    await link.call(key, recorded.replace(b"{", b"{ ", 1), timeout_s=5)
    await streams.declare(link, 8, create=True)
    await link.call(key, recorded.replace(b"{", b'{"by":"time",', 1), timeout_s=5)
    with pytest.raises(streams.StreamMismatchError, match="by"):
        await streams.declare(link, 8, create=True)


@pytest.mark.parametrize(("made", "asked"), [(1, 3), (3, 1), (3, 2), (2, 3)])
async def test_another_number_of_ledgers_is_refused_by_its_name_and_nothing_is_made(
    link: Link, made: int, asked: int
) -> None:
    await streams.declare(link, 8, create=True, ledgers=made)
    await streams.declare(link, 8, create=False, ledgers=made)
    for create in (True, False):
        with pytest.raises(
            streams.StreamMismatchError, match=f"FENCEPOST_LEDGERS: .* made with {made} ledgers"
        ):
            await streams.declare(link, 8, create=create, ledgers=asked)
    for name in set(table.ledger_names(asked)) - set(table.ledger_names(made)):
        assert (await stream_info(link, name)).error is not None
    cut = await streams.read_cut(link)
    assert cut is not None
    assert (cut.shards, cut.ledgers) == (8, made)


@pytest.mark.parametrize(("made", "asked"), [(1, 3), (3, 1), (3, 2), (2, 3)])
async def test_a_deployment_half_made_is_not_gone_on_with_by_another_number(
    link: Link, made: int, asked: int
) -> None:
    """Its record is not written yet: the streams themselves are in the way."""
    name, config = streams.wanted(table.table(8, ledgers=made)[0])
    assert b'"error"' not in await link.api(f"STREAM.CREATE.{name}", config)
    with pytest.raises(streams.StreamMismatchError, match=r"FENCEPOST_LEDGERS|subjects: wanted"):
        await streams.declare(link, 8, create=True, ledgers=asked)
    await streams.declare(link, 8, create=True, ledgers=made)


async def test_who_may_look_at_the_streams_alone_sees_another_number(link: Link) -> None:
    with pytest.raises(streams.StreamMissingError, match="FENCEPOST_LEDGERS=3"):
        await streams.check_ledgers(link, 8, ledgers=3)
    await streams.declare(link, 8, create=True, ledgers=3)
    await streams.check_ledgers(link, 8, ledgers=3)
    with pytest.raises(streams.StreamMissingError, match="FENCEPOST_LEDGERS=1, does not exist"):
        await streams.check_ledgers(link, 8, ledgers=1)
    with pytest.raises(streams.StreamMismatchError, match="FENCEPOST_LEDGERS=2, has the subjects"):
        await streams.check_ledgers(link, 8, ledgers=2)
    with pytest.raises(streams.StreamMismatchError, match="FENCEPOST_LEDGERS=3, has the subjects"):
        await streams.check_ledgers(link, 9, ledgers=3)


async def test_one_lost_ledger_of_several_is_not_replaced(link: Link) -> None:
    await streams.declare(link, 8, create=True, ledgers=3)
    config = (await stream_info(link, "FP_LEDGER_1")).config
    await link.api("STREAM.DELETE.FP_LEDGER_1")
    with pytest.raises(streams.StreamMissingError, match="FP_LEDGER_1 is lost"):
        await streams.declare(link, 8, create=True, ledgers=3)
    assert (await stream_info(link, "FP_LEDGER_1")).error is not None
    await link.api("STREAM.CREATE.FP_LEDGER_1", config)
    await streams.declare(link, 8, create=True, ledgers=3)


async def test_the_ledger_cannot_be_cut(link: Link) -> None:
    await streams.declare(link, 8, create=True)
    await link.call("fp.v1.ledger.toy.0", b"x", timeout_s=5)
    assert b'"error"' in await link.api("STREAM.PURGE.FP_LEDGER")
    assert b'"error"' in await link.api("STREAM.MSG.DELETE.FP_LEDGER", {"seq": 1})
    assert (await stream_info(link, "FP_LEDGER")).state.messages == 1


async def test_the_clients_own_stores_bind_to_the_buckets(link: Link) -> None:
    await streams.declare(link, 8, create=True)
    js = link.nc.jetstream()
    for bucket in ("FP_OWNERS", "FP_LEASES", "FP_META"):
        kv = await js.key_value(bucket)
        await kv.put("a", b"1")
        await kv.put("a", b"2")
        entry = await kv.get("a")
        assert entry.value == b"2"
        await kv.delete("a")
    for bucket in ("FP_BLOBS", "FP_SNAPSHOTS"):
        store = await js.object_store(bucket)
        await store.put("a", b"x" * 300_000)
        assert (await store.get("a")).data == b"x" * 300_000
        await store.delete("a")


async def test_a_lost_ledger_is_not_replaced_by_an_empty_one(link: Link) -> None:
    await streams.declare(link, 8, create=True)
    for name in ("FP_LEDGER", "FP_COMMANDS"):
        config = (await stream_info(link, name)).config
        await link.api(f"STREAM.DELETE.{name}")
        with pytest.raises(streams.StreamMissingError, match=f"{name} is lost"):
            await streams.declare(link, 8, create=True)
        assert (await stream_info(link, name)).error is not None
        await link.api(f"STREAM.CREATE.{name}", config)
        await streams.declare(link, 8, create=True)


async def test_what_was_in_memory_is_made_again(link: Link) -> None:
    await streams.declare(link, 8, create=True)
    for name in ("FP_EVENTS", "KV_FP_OWNERS", "KV_FP_LEASES"):
        await link.api(f"STREAM.DELETE.{name}")
        with pytest.raises(streams.StreamAwaitedError, match="does not exist"):
            await streams.declare(link, 8, create=False)
        await streams.declare(link, 8, create=True)
        assert (await stream_info(link, name)).error is None


async def test_who_may_not_create_waits_for_what_is_made_again_and_for_nothing_else(
    link: Link,
) -> None:
    await streams.declare(link, 8, create=True)
    await link.api("STREAM.DELETE.FP_EVENTS")
    waiting = asyncio.create_task(streams.declare_at_start(link, 8, create=False))
    assert not (await asyncio.wait({waiting}, timeout=0.5))[0]
    await streams.declare(link, 8, create=True)
    async with asyncio.timeout(20):
        await waiting
    await link.api("STREAM.DELETE.FP_LEDGER")
    with pytest.raises(streams.StreamMissingError, match="FP_LEDGER is lost"):
        await streams.declare_at_start(link, 8, create=False)
