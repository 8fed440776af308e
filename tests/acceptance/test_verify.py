"""`verify` is clean on what planners wrote, and says so when the ledger was tampered with."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fencepost.client import Client, ledger
from fencepost.contracts import streams, subjects
from fencepost.contracts.messages import Batch
from fencepost.core import ids

from tests.acceptance.conftest import RunningStack


async def _two_steps(stack: RunningStack, client: Client) -> None:
    await client.create_sandbox("box")
    for name in ("a", "b"):
        assert (await client.write_file("box", name, "x")).is_ok
    for planner in stack.of("planner"):
        await planner.stop()


async def _forge(client: Client, change: dict[str, Any]) -> None:
    """Appends the last batch that committed once more, changed, as nobody but a planner may."""
    shard = ids.shard_of("box", client.shards)
    recorded = [found async for found in ledger.batches(client.link, shard)]
    committing = [found for found in recorded if b'"committed"' in bytes(found.batch.entries)][-1]
    last = recorded[-1]
    batch = msgspec.structs.replace(
        committing.batch,
        **{
            "prev": last.seq,
            "term": last.batch.term,
            "owner": last.batch.owner,
            "now_ms": last.batch.now_ms,
            "positions": last.batch.positions,
            **change,
        },
    )
    assert isinstance(batch, Batch)
    await client.link.nc.jetstream().publish(
        subjects.ledger("sandbox", shard), msgspec.json.encode(batch)
    )


async def test_a_batch_that_no_planner_decided_is_found(stack: RunningStack) -> None:
    async with await stack.client() as client:
        await _two_steps(stack, client)
        assert (await stack.verify()).violations == [], "the control"
        await _forge(client, {})
    report = await stack.verify()
    assert not report.is_clean
    assert {found.seq for found in report.violations} == {(await _last(stack))}


@pytest.mark.parametrize(
    "change", [{"prev": 1}, {"term": 99}, {"now_ms": 1}, {"owner": "somebody"}, {"shard": 77}]
)
async def test_a_wrong_frame_is_named(stack: RunningStack, change: dict[str, Any]) -> None:
    async with await stack.client() as client:
        await _two_steps(stack, client)
        await _forge(client, {"entries": msgspec.Raw(b"[]")})
        assert (await stack.verify()).violations == [], "the control: an empty batch is allowed"
        await _forge(client, {"entries": msgspec.Raw(b"[]"), **change})
    report = await stack.verify()
    assert {found.invariant for found in report.violations} == {"I8"}


async def test_s214_a_ledger_that_was_cut_by_its_configuration_is_not_clean(
    stack: RunningStack,
) -> None:
    async with await stack.client() as client:
        await _two_steps(stack, client)
        assert (await stack.verify()).is_clean
        before = await ledger.history(client.link)
        jetstream = client.link.nc.jetstream()
        info = await jetstream.stream_info(streams.LEDGER)
        config = msgspec.json.decode(
            (await client.link.call(f"$JS.API.STREAM.INFO.{streams.LEDGER}", b"", timeout_s=5)).data
        )["config"]
        config |= {"max_msgs": info.state.messages - 1, "discard": "old"}
        answer = await client.link.call(
            f"$JS.API.STREAM.UPDATE.{streams.LEDGER}", msgspec.json.encode(config), timeout_s=5
        )
        assert b'"error"' not in answer.data
        assert (await ledger.history(client.link)).messages < before.messages
    report = await stack.verify()
    assert not report.is_clean
    assert report.violations[0].family == "ledger"


async def _last(stack: RunningStack) -> int:
    async with await stack.client() as client:
        return (await ledger.history(client.link)).last
