"""`verify` is clean on what planners wrote, and says so when the ledger was tampered with."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fencepost.client import Client, ledger, users
from fencepost.contracts import authorization, grants, streams, subjects
from fencepost.contracts.messages import Batch
from fencepost.core import ids
from fencepost.runtime.access import Access
from fencepost.runtime.link import DeniedError, Link, stream_info

from tests.acceptance.conftest import RunningStack, StartStack


async def _two_steps(stack: RunningStack, client: Client) -> None:
    await client.create_sandbox("box")
    for name in ("a", "b"):
        assert (await client.write_file("box", name, "x")).is_ok
    for planner in stack.of("planner"):
        await planner.stop()


class RootedStack(RunningStack):
    """Its server has a user that may do anything, as whoever configures one can make."""

    def _make_users(self, *, demand_credentials: bool) -> str:
        found = super()._make_users(demand_credentials=demand_credentials)
        path = self.data / "nats" / users.AUTHORIZATION
        everything = 'permissions: { publish: ">", subscribe: ">" }'
        root = f'{{ user: root, password: "root", {everything} }}'
        operator = f"{{ user: operator, password: ${authorization.variable('operator')} }}"
        text = path.read_text()
        assert operator in text
        path.write_text(text.replace(operator, f"{operator}\n      {root}"))
        return found


async def _forge(stack: RunningStack, client: Client, change: dict[str, Any]) -> None:
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
    planner = await stack.link_as("planner")
    answer = await planner.call(
        subjects.ledger("sandbox", shard), msgspec.json.encode(batch), timeout_s=5
    )
    assert b'"seq"' in answer.data
    await planner.close()


async def test_a_batch_that_no_planner_decided_is_found(stack: RunningStack) -> None:
    async with await stack.client() as client:
        await _two_steps(stack, client)
        assert (await stack.verify()).violations == [], "the control"
        await _forge(stack, client, {})
    report = await stack.verify()
    assert not report.is_clean
    assert {found.seq for found in report.violations} == {(await _last(stack))}


@pytest.mark.parametrize(
    "change", [{"prev": 1}, {"term": 99}, {"now_ms": 1}, {"owner": "somebody"}, {"shard": 77}]
)
async def test_a_wrong_frame_is_named(stack: RunningStack, change: dict[str, Any]) -> None:
    async with await stack.client() as client:
        await _two_steps(stack, client)
        await _forge(stack, client, {"entries": msgspec.Raw(b"[]")})
        assert (await stack.verify()).violations == [], "the control: an empty batch is allowed"
        await _forge(stack, client, {"entries": msgspec.Raw(b"[]"), **change})
    report = await stack.verify()
    assert {found.invariant for found in report.violations} == {"I8"}


async def test_s214_a_ledger_that_was_cut_by_its_configuration_is_not_clean(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(kind=RootedStack)
    async with await stack.client() as client:
        await _two_steps(stack, client)
        assert (await stack.verify()).is_clean
        before = await ledger.history(client.link)
        root = await Link.connect(
            stack.nats.url, name="root", access=Access(user="root", password="root")
        )
        info = await stream_info(root, streams.LEDGER)
        config = {**info.config, "max_msgs": info.state.messages - 1, "discard": "old"}
        for role in grants.ROLES:
            link = await stack.link_as(role)
            with pytest.raises(DeniedError):
                await link.api(f"STREAM.UPDATE.{streams.LEDGER}", config)
            await link.close()
        answer = await root.api(f"STREAM.UPDATE.{streams.LEDGER}", config)
        assert b'"error"' not in answer
        await root.close()
        assert (await ledger.history(client.link)).messages < before.messages
    report = await stack.verify()
    assert not report.is_clean
    assert report.violations[0].family == "ledger"


async def _last(stack: RunningStack) -> int:
    async with await stack.client() as client:
        return (await ledger.history(client.link)).last
