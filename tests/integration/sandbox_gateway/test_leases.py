"""A gateway that cannot renew its lease stops writing in time, and never acts after it."""

from __future__ import annotations

import asyncio
import os

import pytest
from fencepost.client.embedded import NatsServer
from fencepost.contracts import subjects
from fencepost.core import facts as f
from fencepost.core.errors import UnknownError
from fencepost.core.sandbox.orders import AttachOrder, CreateOrder, StopOrder
from fencepost.providers import processes
from fencepost.runtime import streams
from fencepost.sandbox_gateway import outbox
from fencepost.sandbox_gateway import session as session_module

from tests.integration.sandbox_gateway.conftest import StartGateway
from tests.integration.sandbox_gateway.control import SHARDS, SPEC, Control, wait_for


def renewals_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no renewal is answered; everything else is."""

    async def publish(link, subject, data, **more):
        assert subject.startswith("$KV."), subject
        raise UnknownError("no answer")

    monkeypatch.setattr(session_module, "publish_acked", publish)


async def test_s192_past_its_lease_queued_calls_are_dropped_and_toolhosts_end(
    start_gateway: StartGateway, control: Control
) -> None:
    gateway = await start_gateway()
    live = await control.live(gateway.id)
    assert (await live.run("s1")).verdict == "applied"
    # What a SIGSTOP of longer than the lease looks like from inside.
    gateway.clock.ahead_ms += 6_000
    control.order(gateway.id, live.call("s2"))
    assert await asyncio.wait_for(gateway.task, 30) == "lease_over"
    assert control.receipts(step="s2") == []
    await wait_for(lambda: processes.find(processes.INSTANCE, live.ref.instance) == {})


async def test_s224_past_its_lease_nothing_queued_reaches_the_provider(
    start_gateway: StartGateway, control: Control, root
) -> None:
    gateway = await start_gateway()
    ref = await control.create(gateway.id, "before")
    gateway.clock.ahead_ms += 6_000
    control.order(
        gateway.id,
        CreateOrder(sandbox="after", create_id="after", spec=SPEC, labels={}),
        AttachOrder(sandbox="before", ref=ref, spec=SPEC),
        StopOrder(sandbox="before", create_id="before", ref=ref),
    )
    assert await asyncio.wait_for(gateway.task, 30) == "lease_over"
    assert [type(fact) for fact in control.facts] == [f.Assigned]
    assert os.listdir(root / ref.native_id / "state") == []
    assert [entry.name for entry in root.iterdir() if not entry.name.startswith(".")] == [
        ref.native_id
    ]
    assert gateway.metric("orders_refused_total", reason="lease_over") == 1


async def test_s224_the_lease_is_looked_at_again_when_the_create_runs(
    start_gateway: StartGateway, control: Control, root
) -> None:
    gateway = await start_gateway()
    order = CreateOrder(sandbox="after", create_id="after", spec=SPEC, labels={})
    # Taken in time; the process was stopped before its work came to run.
    work = gateway.session._create(order)
    gateway.clock.ahead_ms += 6_000
    await work
    assert control.of(f.Assigned) == []
    assert [entry for entry in root.iterdir() if not entry.name.startswith(".")] == []
    assert await asyncio.wait_for(gateway.task, 30) == "lease_over"


async def test_writes_stop_before_the_lease_is_over_and_reads_go_on(
    start_gateway: StartGateway, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway()
    live = await control.live(gateway.id)
    await live.run("s1")
    renewals_fail(monkeypatch)
    await wait_for(lambda: gateway.metric("lease_renewals_failed_total") >= 1)
    gateway.clock.ahead_ms += 3_200  # past 60% of the lease, not past all of it
    assert not gateway.session.is_open
    control.order(gateway.id, live.call("s2"))
    await wait_for(lambda: gateway.metric("orders_refused_total", reason="lease_not_renewed") == 1)
    reply = await control.read("read_file", {"path": "s1.txt"})
    assert reply.status == "ok"
    assert control.receipts(step="s2") == []


async def test_a_server_that_is_away_ends_the_session_and_another_one_begins(
    start_gateway: StartGateway, control: Control, nats: NatsServer
) -> None:
    gateway = await start_gateway(lease_ms=1_000)
    live = await control.live(gateway.id)
    nats.kill()
    assert await asyncio.wait_for(gateway.task, 30) == "lease_over"
    assert processes.find(processes.INSTANCE, live.ref.instance) == {}
    await nats.restart()
    await wait_for(lambda: control.link.is_connected)
    # A server keeps leases in memory; whoever may, declares them again.
    await streams.declare(control.link, SHARDS, create=True)
    other = await start_gateway(lease_ms=1_000)
    assert other.id != gateway.id
    found = await control.attach(other.id, live.ref)
    assert found.marker is not None
    assert found.marker.epoch == live.marked.epoch


async def test_the_toolhost_ends_its_tools_when_no_grant_comes(
    start_gateway: StartGateway, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(lease_ms=1_500)
    live = await control.live(gateway.id)
    await live.run("s1")
    attachment = gateway.session._attached["sbx"]
    # The gateway is stopped: its toolhost gets no grant, and its channel stays open.
    monkeypatch.setattr(gateway.session, "_grant", lambda _attachment: None)
    call = live.call("s2", "run_command", {"shell": "sleep 60"})
    control.order(gateway.id, call)
    receipt = await control.receipt(step="s2")
    assert receipt.verdict in ("indeterminate", "fault")
    refused = await live.run("s3")
    assert (refused.verdict, refused.reason) == ("refused", "grant_expired")
    assert not attachment.ended


async def test_s94_a_denied_fact_is_counted_and_tried_again(
    start_gateway: StartGateway, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway()
    denied = 0
    publish = outbox.publish_acked

    async def sometimes(link, subject, data, **more):
        nonlocal denied
        if subject.startswith(f"{subjects.PREFIX}.fact.") and denied < 2:
            denied += 1
            raise UnknownError("no answer: the publish was denied")
        await publish(link, subject, data, **more)

    monkeypatch.setattr(outbox, "publish_acked", sometimes)
    await control.create(gateway.id)
    assert denied == 2
    assert gateway.metric("facts_unacknowledged_total", kind="assigned") == 2
    await wait_for(lambda: gateway.metric("facts_total", kind="assigned") == 1)


async def test_s94_without_its_stream_a_fact_is_never_taken_for_stored(
    start_gateway: StartGateway, control: Control
) -> None:
    gateway = await start_gateway()
    await control.link.api("STREAM.DELETE.FP_FACTS")
    control.order(gateway.id, CreateOrder(sandbox="sbx", create_id="c", spec=SPEC, labels={}))
    await wait_for(lambda: gateway.metric("facts_unacknowledged_total", kind="assigned") >= 1)
    assert gateway.metric("facts_total", kind="assigned") == 0
