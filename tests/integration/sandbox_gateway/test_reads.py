"""The cheap path: no lease, no fence, no journal; and never a result below the asked epoch."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from fencepost.contracts import subjects
from fencepost.contracts.messages import ReadReply
from fencepost.core import facts as f
from fencepost.core.errors import UnknownError
from fencepost.providers import bubblewrap

from tests.integration.sandbox_gateway.conftest import Running, StartGateway
from tests.integration.sandbox_gateway.control import Control

needs_bwrap = pytest.mark.skipif(
    bubblewrap.probe() is None, reason="bubblewrap is not there, or not allowed to work here"
)


async def test_s09_a_read_needs_no_lease_and_leaves_no_trace(
    gateway: Running, control: Control
) -> None:
    live = await control.live(gateway.id, epoch=3)
    await live.run("s1")
    facts, receipts = len(control.facts), len(control.stamped)
    gateway.session._lease._renewed_at_ms = None  # no lease at all
    reply = await control.read("read_file", {"path": "s1.txt"})
    assert reply.status == "ok"
    assert b"s1" in bytes(reply.result)
    assert reply.marker is not None
    assert (reply.marker.epoch, reply.marker.session) == (3, live.session)
    assert (len(control.facts), len(control.stamped)) == (facts, receipts)
    found = await control.attach(gateway.id, live.ref)
    assert found.journal_seq in (0, 1)  # the read is in no journal


async def test_below_the_asked_epoch_nothing_is_told(gateway: Running, control: Control) -> None:
    live = await control.live(gateway.id, epoch=3)
    await live.run("s1")
    reply = await control.read("read_file", {"path": "s1.txt"}, epoch_min=4)
    assert (reply.status, reply.reason) == ("unknown", "epoch_below_minimum")
    assert bytes(reply.result) == b"null"
    assert (await control.read("read_file", {"path": "s1.txt"}, epoch_min=3)).status == "ok"


async def test_a_disk_without_a_generation_is_unknown(gateway: Running, control: Control) -> None:
    ref = await control.create(gateway.id)
    found = await control.attach(gateway.id, ref)
    reply = await control.read("list_dir", {"path": "."})
    assert (reply.status, reply.reason) == ("unknown", "no_generation")
    await control.mark(gateway.id, found)
    assert (await control.read("list_dir", {"path": "."})).status == "ok"


async def test_a_read_that_fails_is_no_refusal(gateway: Running, control: Control) -> None:
    await control.live(gateway.id)
    reply = await control.read("read_file", {"path": "missing"})
    assert reply.status == "failed"


@pytest.mark.parametrize(
    ("tool", "args"),
    [("write_file", {"path": "a", "content": "x"}), ("read_file", {"path": 7}), ("nothing", {})],
)
async def test_what_is_no_read_is_refused(
    gateway: Running, control: Control, tool: str, args: dict
) -> None:
    await control.live(gateway.id)
    reply = await control.read(tool, args)
    assert reply.status == "refused", reply
    assert reply.reason


async def test_a_request_of_wrong_shape_is_refused(gateway: Running, control: Control) -> None:
    await control.live(gateway.id)
    deep = b'{"tool":"stat","args":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    for data, reason in ((b"{}", "bad_request"), (b"no json", "not_json"), (deep, "not_json")):
        msg = await control.link.call(subjects.read("sbx"), data, timeout_s=10)
        reply = msgspec.json.decode(msg.data, type=ReadReply)
        assert (reply.status, reply.reason) == ("refused", reason)


async def test_nobody_answers_for_a_sandbox_that_is_not_attached(
    gateway: Running, control: Control
) -> None:
    live = await control.live(gateway.id)
    assert (await control.read("list_dir", {"path": "."})).status == "ok"
    control.stop(gateway.id, live.ref)
    await control.fact(f.Gone)
    await asyncio.sleep(0)
    with pytest.raises(UnknownError):
        await control.read("list_dir", {"path": "."})


@needs_bwrap
async def test_s213_a_read_only_command_runs_on_a_view_that_cannot_be_written(
    gateway: Running, control: Control, root
) -> None:
    live = await control.live(gateway.id)
    await live.run("s1")
    reply = await control.read("run_command", {"shell": "cat s1.txt; echo x > new"})
    assert reply.status == "ok"
    result = msgspec.json.decode(reply.result)
    assert result["stdout"] == "s1"
    assert result["exit_code"] != 0
    assert not (root / live.ref.native_id / "workspace" / "new").exists()


async def test_s213_without_such_a_view_a_command_needs_a_fence(
    start_gateway: StartGateway, control: Control, root
) -> None:
    gateway = await start_gateway(isolate=False)
    live = await control.live(gateway.id)
    reply = await control.read("run_command", {"shell": "echo x > new"})
    assert (reply.status, reply.reason) == ("refused", "needs_fence")
    assert not (root / live.ref.native_id / "workspace" / "new").exists()
    receipt = await live.run("s1", "run_command", {"shell": "echo x > new"})
    assert receipt.verdict == "applied"
    assert (root / live.ref.native_id / "workspace" / "new").exists()
