"""Orders in, facts and receipts out."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
from pathlib import Path

import msgspec
import pytest
from fencepost.contracts import streams as table
from fencepost.contracts import subjects
from fencepost.core import facts as f
from fencepost.core.errors import UnknownError
from fencepost.core.sandbox.orders import AttachOrder, CreateOrder, MarkOrder
from fencepost.providers import processes
from fencepost.providers.protocol import Unknown
from fencepost.runtime.link import stream_info

from tests.integration.sandbox_gateway.conftest import Running, StartGateway
from tests.integration.sandbox_gateway.control import SPEC, Control, Live, wait_for


def workspace(root: Path, ref: f.Ref) -> Path:
    return root / ref.native_id / "workspace"


async def test_from_create_to_receipt(gateway: Running, control: Control, root: Path) -> None:
    ref = await control.create(gateway.id)
    found = await control.attach(gateway.id, ref)
    assert (found.marker, found.journal_seq, found.gateway) == (None, 0, gateway.id)
    marked = await control.mark(gateway.id, found, epoch=7)
    assert (marked.epoch, marked.nonce, marked.instance) == (7, found.nonce_fresh, ref.instance)

    live = Live(control, gateway.id, ref, found, marked)
    receipt = await live.run("s1")
    assert (receipt.verdict, receipt.outcome, receipt.epoch) == ("applied", "ok", 7)
    assert (receipt.session, receipt.instance) == (found.session, ref.instance)
    assert (workspace(root, ref) / "s1.txt").read_text() == "s1"
    stamped = control.stamped[-1]
    assert (stamped.gateway, stamped.sandbox) == (gateway.id, "sbx")


async def test_the_facts_are_in_their_stream(gateway: Running, control: Control) -> None:
    await control.live(gateway.id)
    info = await stream_info(control.link, table.FACTS)
    assert info.state.messages == len(control.facts) == 3


async def test_a_repeated_create_names_the_same_sandbox(gateway: Running, control: Control) -> None:
    first = await control.create(gateway.id)
    before = len(control.facts)
    second = await control.create(gateway.id)
    await wait_for(lambda: len(control.facts) > before)
    assert first == second
    assert control.facts[-1].ref == first


async def test_an_unknown_provider_is_a_definite_failure(
    gateway: Running, control: Control
) -> None:
    spec = msgspec.structs.replace(SPEC, provider="nowhere")
    control.order(gateway.id, CreateOrder(sandbox="sbx", create_id="c", spec=spec, labels={}))
    failed = await control.fact(f.CreateFailed)
    assert (failed.ambiguous, failed.create_id) == (False, "c")
    assert "nowhere" in failed.reason


async def test_a_repeated_mark_is_answered_from_what_is(gateway: Running, control: Control) -> None:
    live = await control.live(gateway.id)
    again = await control.mark(gateway.id, live.found)
    await wait_for(lambda: len(control.of(f.Marked)) == 2)
    assert again == live.marked


async def test_a_mark_for_another_session_writes_nothing(
    gateway: Running, control: Control, root: Path
) -> None:
    ref = await control.create(gateway.id)
    found = await control.attach(gateway.id, ref)
    control.order(gateway.id, MarkOrder(sandbox="sbx", session="ss-other", epoch=9, nonce="n"))
    marked = await control.mark(gateway.id, found, epoch=1)
    assert marked.epoch == 1
    assert control.of(f.Marked, epoch=9) == []
    assert gateway.metric("orders_refused_total", reason="not_attached") == 1


async def test_a_lower_epoch_is_never_marked(gateway: Running, control: Control) -> None:
    live = await control.live(gateway.id, epoch=5)
    control.order(
        gateway.id,
        MarkOrder(sandbox="sbx", session=live.session, epoch=4, nonce=live.marked.nonce),
    )
    failed = await control.fact(f.AttachFailed, session=live.session)
    assert failed.reason.startswith("stale_epoch")
    assert (failed.observed, failed.condemned) == ("present", False)
    again = await control.attach(gateway.id, live.ref)
    assert again.marker is not None
    assert again.marker.epoch == 5


async def test_an_attach_that_is_repeated_before_the_mark_keeps_its_session(
    gateway: Running, control: Control
) -> None:
    ref = await control.create(gateway.id)
    first = await control.attach(gateway.id, ref)
    second = await control.attach(gateway.id, ref)
    assert second == first
    assert (await control.mark(gateway.id, first)).session == first.session


async def test_a_later_attach_opens_another_session_on_the_same_disk(
    gateway: Running, control: Control
) -> None:
    live = await control.live(gateway.id)
    await live.run("s1")
    gateway.clock.ahead_ms += 2_500  # past what counts as the same order again
    again = await control.attach(gateway.id, live.ref)
    assert again.session != live.session
    assert again.marker is not None
    assert (again.marker.session, again.journal_seq) == (live.session, 1)
    # The former session's fence reaches nobody any more; the new one's does.
    control.order(gateway.id, live.call("s2"))
    await control.mark(gateway.id, again, epoch=1, nonce=live.marked.nonce)
    live.session = again.session
    assert (await live.run("s3")).verdict == "applied"
    assert control.receipts(step="s2") == []
    assert gateway.metric("orders_refused_total", reason="not_attached") == 1


async def test_an_attach_to_what_is_gone_says_so(
    gateway: Running, control: Control, root: Path
) -> None:
    ref = await control.create(gateway.id)
    shutil.rmtree(root / ref.native_id)
    control.order(gateway.id, AttachOrder(sandbox="sbx", ref=ref, spec=SPEC))
    failed = await control.fact(f.AttachFailed)
    assert (failed.observed, failed.ref) == ("gone", ref)


async def test_another_authority_cannot_be_opened_or_stopped_here(
    gateway: Running, control: Control
) -> None:
    ref = await control.create(gateway.id)
    elsewhere = msgspec.structs.replace(ref, authority="elsewhere")
    control.order(gateway.id, AttachOrder(sandbox="sbx", ref=elsewhere, spec=SPEC))
    failed = await control.fact(f.AttachFailed)
    assert (failed.observed, failed.reason) == ("unknown", "unreachable_authority")
    control.stop(gateway.id, elsewhere)
    assert (await control.fact(f.StopAnswered)).answer == "unreachable"
    assert control.of(f.Gone) == []


async def test_s168_stop_and_observed_gone_are_two_facts(
    gateway: Running, control: Control, root: Path
) -> None:
    live = await control.live(gateway.id)
    control.stop(gateway.id, live.ref)
    assert (await control.fact(f.StopAnswered)).answer == "accepted"
    assert (await control.fact(f.Gone)).ref == live.ref
    kinds = [type(fact) for fact in control.facts]
    assert kinds.index(f.StopAnswered) < kinds.index(f.Gone)
    assert not (root / live.ref.native_id).exists()
    assert processes.find(processes.INSTANCE, live.ref.instance) == {}
    # A stop that was ordered is no loss.
    assert control.of(f.Lost) == []


async def test_s168_accepted_and_still_there_is_not_gone(
    start_gateway: StartGateway, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(gone_within_ms=300)
    live = await control.live(gateway.id)
    with monkeypatch.context() as patched:
        patched.setattr(processes, "kill_all", lambda *_: False)
        control.stop(gateway.id, live.ref)
        assert (await control.fact(f.StopAnswered)).answer == "accepted"
        await wait_for(lambda: ("stop", live.ref.instance) not in gateway.session._busy)
    assert control.of(f.Gone) == []
    control.stop(gateway.id, live.ref)
    await control.fact(f.Gone)


async def test_s185_a_stop_of_what_is_already_gone_ends_all_the_same(
    gateway: Running, control: Control, root: Path
) -> None:
    ref = await control.create(gateway.id)
    shutil.rmtree(root / ref.native_id)
    control.stop(gateway.id, ref)
    assert (await control.fact(f.StopAnswered)).answer == "not_found"
    assert (await control.fact(f.Gone)).ref == ref


async def test_s167_a_stop_for_another_instance_leaves_the_living_one(
    gateway: Running, control: Control, root: Path
) -> None:
    ref = await control.create(gateway.id)
    former = msgspec.structs.replace(ref, instance="i" + "0" * 16 + ref.instance[17:])
    control.stop(gateway.id, former)
    assert (await control.fact(f.StopAnswered)).answer == "refused_other_instance"
    # That instance is gone, which says nothing of this one.
    assert (await control.fact(f.Gone)).ref == former
    assert (root / ref.native_id / "instance").exists()


async def test_a_create_without_a_ref_is_settled_for_good(
    gateway: Running, control: Control
) -> None:
    control.stop(gateway.id, None, create_id="c1")
    failed = await control.fact(f.CreateFailed)
    assert (failed.create_id, failed.ambiguous, failed.gateway) == ("c1", False, gateway.id)
    control.order(gateway.id, CreateOrder(sandbox="sbx", create_id="c1", spec=SPEC, labels={}))
    await wait_for(lambda: len(control.of(f.CreateFailed)) == 2)
    assert control.of(f.Assigned) == []
    # Another create id of the same sandbox is not.
    await control.create(gateway.id, "sbx", "c2")


@pytest.mark.parametrize("unsure", ["settle", "find"])
async def test_a_create_without_a_ref_that_nobody_can_promise_away_stays_ambiguous(
    gateway: Running, control: Control, monkeypatch: pytest.MonkeyPatch, unsure: str
) -> None:
    (provider,) = gateway.session._providers.values()

    async def no_promise(_create_id: str) -> bool:
        return False

    async def no_answer(_create_id: str) -> Unknown:
        return Unknown(reason="no answer")

    monkeypatch.setattr(provider, unsure, no_promise if unsure == "settle" else no_answer)
    control.stop(gateway.id, None, create_id="c1")
    failed = await control.fact(f.CreateFailed)
    assert (failed.ambiguous, failed.settled, failed.reason) == (True, False, "create_ambiguous")
    assert control.of(f.Gone) == []


async def test_a_create_without_a_ref_that_happened_is_named_and_stopped(
    gateway: Running, control: Control
) -> None:
    ref = await control.create(gateway.id, "sbx", "c1")
    control.facts.clear()
    control.stop(gateway.id, None, create_id="c1")
    assert (await control.fact(f.Gone)).ref == ref
    assert [type(fact) for fact in control.facts] == [f.Assigned, f.StopAnswered, f.Gone]


async def test_orders_that_cannot_be_read_are_counted_and_harm_nothing(
    gateway: Running, control: Control
) -> None:
    control.link.publish(subjects.orders(gateway.id), b'[{"kind": "destroy"}]')
    control.link.publish(subjects.orders(gateway.id), b"not json")
    await wait_for(lambda: gateway.metric("orders_refused_total", reason="malformed") == 2)
    await control.create(gateway.id)


# -- calls and receipts ---------------------------------------------------------------------------


async def test_the_same_fence_again_gets_the_first_receipt(
    gateway: Running, control: Control, root: Path
) -> None:
    live = await control.live(gateway.id)
    call = live.call("s1")
    control.order(gateway.id, call)
    await control.receipt(step="s1")
    control.order(gateway.id, call, call)
    await wait_for(lambda: len(control.receipts(step="s1")) == 3)
    assert len({bytes(stamped.receipt) for stamped in control.stamped}) == 1


async def test_receipts_of_one_turn_travel_together(gateway: Running, control: Control) -> None:
    live = await control.live(gateway.id)
    calls = [live.call(f"s{n}") for n in range(40)]
    control.order(gateway.id, *calls)
    await wait_for(lambda: len(control.stamped) == 40)
    assert control.receipt_messages < 40
    assert {receipt.verdict for receipt in control.receipts()} == {"applied"}


async def test_s13_an_older_epoch_is_refused_by_the_sandbox_and_the_session_lives(
    gateway: Running, control: Control, root: Path
) -> None:
    live = await control.live(gateway.id, epoch=7)
    refused = await live.run("old", epoch=6)
    assert (refused.verdict, refused.reason, refused.epoch) == ("refused", "stale_epoch", 7)
    assert not (workspace(root, live.ref) / "old.txt").exists()
    assert (await live.run("new", epoch=7)).verdict == "applied"
    # The marker is as it was written: an old fence is no sign of a moved disk.
    assert control.of(f.Lost) == []


async def test_a_call_for_another_session_reaches_nobody(
    gateway: Running, control: Control
) -> None:
    live = await control.live(gateway.id)
    control.order(gateway.id, live.call("s1", session="ss-other"), live.call("s2"))
    await control.receipt(step="s2")
    assert control.receipts(step="s1") == []


async def test_a_revoke_is_answered_and_its_attempt_refused(
    gateway: Running, control: Control
) -> None:
    live = await control.live(gateway.id)
    call = live.call("s1")
    revoke = msgspec.structs.replace(
        call, fence=msgspec.structs.replace(call.fence, direction="revoke")
    )
    control.order(gateway.id, revoke)
    assert (await control.receipt(direction="revoke")).reason == "never_began"
    control.order(gateway.id, call)
    assert (await control.receipt(direction="apply")).reason == "revoked"


async def test_an_undo_restores_what_was(gateway: Running, control: Control, root: Path) -> None:
    live = await control.live(gateway.id)
    await live.run("s1")
    target = workspace(root, live.ref) / "s1.txt"
    assert target.exists()
    undo = live.call("s1", "", ordinal=2, direction="undo", of="s1.1")
    control.order(gateway.id, msgspec.structs.replace(undo, args=msgspec.Raw(b"null")))
    assert (await control.receipt(direction="undo")).verdict == "applied"
    assert not target.exists()


async def test_s22_a_failed_tool_and_a_fault_are_told_apart(
    gateway: Running, control: Control
) -> None:
    live = await control.live(gateway.id)
    failed = await live.run("s1", "delete_path", {"path": "missing"})
    assert (failed.verdict, failed.outcome) == ("applied", "failed")
    assert control.of(f.Lost) == []
    assert (await control.fault(do="reclaim"))["ok"]
    lost = await control.fact(f.Lost)
    assert lost.observed == "gone"
    # The call after the loss gets no receipt at all: no outcome of a tool was invented.
    before = len(control.stamped)
    control.order(gateway.id, live.call("s2"))
    await wait_for(lambda: gateway.metric("orders_refused_total", reason="not_attached") == 1)
    assert len(control.stamped) == before


async def test_a_content_by_reference_arrives(
    gateway: Running, control: Control, root: Path
) -> None:
    live = await control.live(gateway.id)
    content = os.urandom(700_000)
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    store = await control.link.nc.jetstream().object_store(table.OBJECTS_BLOBS)
    await store.put(digest, content)
    args = {"path": "big", "content_ref": {"$blob": digest, "size": len(content)}}
    assert (await live.run("s1", "write_file", args)).verdict == "applied"
    assert (workspace(root, live.ref) / "big").read_bytes() == content


async def test_a_content_that_the_store_has_not_is_the_toolhosts_to_refuse(
    gateway: Running, control: Control
) -> None:
    live = await control.live(gateway.id)
    args = {"path": "big", "content_ref": {"$blob": "sha256:" + "0" * 64, "size": 5}}
    refused = await live.run("s1", "write_file", args)
    assert (refused.verdict, refused.reason) == ("refused", "blob_missing")


async def test_a_large_result_goes_to_the_store(gateway: Running, control: Control) -> None:
    live = await control.live(gateway.id)
    args = {"shell": "head -c 30000 /dev/zero | tr '\\0' '\\001'", "output_max_bytes": 40_000}
    receipt = await live.run("s1", "run_command", args)
    assert receipt.verdict == "applied"
    reference = msgspec.json.decode(receipt.result)
    assert set(reference) == {"$blob", "size"}
    store = await control.link.nc.jetstream().object_store(table.OBJECTS_BLOBS)
    stored = (await store.get(reference["$blob"])).data
    assert msgspec.json.decode(stored)["stdout"] == "\x01" * 30_000
    assert control.holds(control.stamped[-1], gateway.id, "sbx")


# -- stamps ---------------------------------------------------------------------------------------


async def test_s215_a_stamp_is_bound_to_gateway_and_sandbox(
    start_gateway: StartGateway, control: Control
) -> None:
    one, two = await start_gateway(), await start_gateway()
    assert one.id != two.id
    live = await control.live(one.id)
    await live.run("s1")
    stamped = control.stamped[-1]
    assert control.holds(stamped, one.id, "sbx")
    assert not control.holds(stamped, two.id, "sbx")
    assert not control.holds(stamped, one.id, "sbx2")
    forged = msgspec.structs.replace(
        stamped, receipt=msgspec.Raw(bytes(stamped.receipt).replace(b'"s1"', b'"s2"'))
    )
    assert not control.holds(forged, one.id, "sbx")


# -- losses ---------------------------------------------------------------------------------------


async def test_s182_a_reclaimed_sandbox_is_reported_at_once(
    gateway: Running, control: Control
) -> None:
    live = await control.live(gateway.id)
    assert await control.fault(do="reclaim") == {"ok": True}
    lost = await control.fact(f.Lost)
    assert (lost.session, lost.epoch, lost.ref) == (live.session, 1, live.ref)
    assert lost.observed == "gone"


async def test_s182_a_disk_removed_behind_our_back_is_noticed(
    gateway: Running, control: Control, root: Path
) -> None:
    live = await control.live(gateway.id)
    shutil.rmtree(root / live.ref.native_id)
    lost = await control.fact(f.Lost)
    assert (lost.session, lost.observed) == (live.session, "gone")
    assert lost.reason == "not_there"  # by a missed heartbeat, not by a lease that ran out


async def test_s181_a_killed_toolhost_is_a_loss_and_no_result(
    gateway: Running, control: Control
) -> None:
    live = await control.live(gateway.id)
    call = live.call("s1", "run_command", {"shell": "echo began > began; sleep 60"})
    control.order(gateway.id, call)

    async def toolhost() -> int:
        return gateway.session._attached["sbx"]._channel.pid  # type: ignore[attr-defined]

    pid = await toolhost()
    await wait_for(lambda: len(processes.find(processes.CHANNEL, _channel_of(pid))) > 1)
    os.kill(pid, signal.SIGKILL)
    lost = await control.fact(f.Lost)
    assert (lost.observed, lost.session) == ("present", live.session)
    assert control.receipts(step="s1") == []
    # The same disk, attached again, knows that it began and left no record.
    again = await control.attach(gateway.id, live.ref)
    await control.mark(gateway.id, again, epoch=1, nonce=live.marked.nonce)
    live.session = again.session
    receipt = await live.run(
        "s1", "run_command", {"shell": "echo began > began; sleep 60"}, ordinal=2
    )
    assert receipt.verdict == "indeterminate"


def _channel_of(pid: int) -> str:
    for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = item.partition(b"=")
        if name == processes.CHANNEL.encode():
            return value.decode()
    raise AssertionError("a toolhost without its channel's name")


async def test_s200_a_moved_marker_is_noticed_without_any_call(
    start_gateway: StartGateway, control: Control
) -> None:
    one, two = await start_gateway(), await start_gateway()
    live = await control.live(one.id)
    found = await control.attach(two.id, live.ref)
    await control.mark(two.id, found, epoch=2)
    lost = await control.fact(f.Lost, gateway=one.id)
    assert (lost.reason, lost.session, lost.epoch) == ("marker_moved", live.session, 1)
    assert control.of(f.Lost, gateway=two.id) == []


async def test_s200_a_second_gateway_takes_over_and_the_first_ones_writes_are_refused(
    start_gateway: StartGateway, control: Control, root: Path
) -> None:
    # The first one has no heartbeat in time: it hears of it by the refusal alone.
    one = await start_gateway(heartbeat_ms=60_000, lease_ms=600_000)
    two = await start_gateway()
    live = await control.live(one.id)
    control.order(one.id, live.call("long", "run_command", {"shell": "sleep 60; echo late > late"}))
    pid = one.session._attached["sbx"]._channel.pid  # type: ignore[attr-defined]
    await wait_for(lambda: len(processes.find(processes.CHANNEL, _channel_of(pid))) > 1)
    found = await control.attach(two.id, live.ref)
    assert found.marker is not None
    assert (found.marker.epoch, found.marker.session) == (1, live.session)
    await control.mark(two.id, found, epoch=2)
    # The former session's command was ended before the marker moved.
    assert len(processes.find(processes.CHANNEL, _channel_of(pid))) <= 1
    control.order(one.id, live.call("s2"))
    lost = await control.fact(f.Lost, gateway=one.id)
    assert (lost.reason, lost.observed) == ("marker_moved", "present")
    assert not (workspace(root, live.ref) / "s2.txt").exists()
    assert not (workspace(root, live.ref) / "late").exists()
    newer = Live(control, two.id, live.ref, found, control.of(f.Marked)[-1])
    assert (await newer.run("s3")).verdict == "applied"


async def test_a_stopped_toolhost_is_lost_when_it_is_silent_for_a_lease(
    start_gateway: StartGateway, control: Control
) -> None:
    gateway = await start_gateway(lease_ms=1_000)
    live = await control.live(gateway.id)
    pid = gateway.session._attached["sbx"]._channel.pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGSTOP)
    lost = await control.fact(f.Lost)
    assert (lost.reason, lost.session) == ("toolhost_silent", live.session)


async def test_heartbeats_are_passed_on_and_never_said_twice(
    gateway: Running, control: Control
) -> None:
    live = await control.live(gateway.id)
    await live.run("s1")
    beats = lambda: [beat for said in control.beats for beat in said.beats]  # noqa: E731
    await wait_for(lambda: any(beat.journal_seq == 1 for beat in beats()))
    assert {(b.sandbox, b.gateway, b.epoch, b.session) for b in beats()} == {
        ("sbx", gateway.id, 1, live.session)
    }
    pid = gateway.session._attached["sbx"]._channel.pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(0.5)
        stopped = len(beats())
        seen = len(control.seen)
        await wait_for(lambda: len(control.seen) > seen + 3)
        assert len(beats()) == stopped
    finally:
        os.kill(pid, signal.SIGCONT)
    await wait_for(lambda: len(beats()) > stopped)


async def test_a_gateway_that_closes_says_so(start_gateway: StartGateway, control: Control) -> None:
    gateway = await start_gateway()
    live = await control.live(gateway.id)
    assert await gateway.stop() == "stopped"
    lost = await control.fact(f.Lost)
    assert (lost.reason, lost.observed) == ("gateway_closing", "present")
    await wait_for(lambda: control.seen[-1].closing)
    assert processes.find(processes.INSTANCE, live.ref.instance) == {}
    # The sandbox itself stays.
    other = await start_gateway()
    found = await control.attach(other.id, live.ref)
    assert found.marker is not None


async def test_what_a_gateway_can_reach_is_announced(gateway: Running, control: Control) -> None:
    ref = await control.create(gateway.id)
    seen = control.seen[-1]
    assert (seen.gateway, seen.authorities, seen.providers) == (
        gateway.id,
        [ref.authority],
        ["process"],
    )


async def test_a_held_receipt_comes_late_and_is_the_same(
    gateway: Running, control: Control
) -> None:
    live = await control.live(gateway.id)
    assert (await control.fault(do="hold_receipts", ms=60_000))["ok"]
    control.order(gateway.id, live.call("s1"))
    await wait_for(lambda: gateway.metric("receipts_total", verdict="applied") == 1)
    assert control.stamped == []
    assert (await control.fault(do="reclaim"))["ok"]
    await control.fact(f.Lost)
    assert control.stamped == []
    assert (await control.fault(do="release_receipts"))["released"] == 1
    receipt = await control.receipt(step="s1")
    assert (receipt.verdict, receipt.session) == ("applied", live.session)
    assert control.holds(control.stamped[-1], gateway.id, "sbx")


async def test_without_permission_there_are_no_faults(
    start_gateway: StartGateway, control: Control, root: Path
) -> None:
    gateway = await start_gateway(allow_faults=False)
    live = await control.live(gateway.id)
    with pytest.raises(UnknownError):
        await control.link.call(subjects.fault("sbx"), b'{"do":"reclaim"}', timeout_s=2)
    assert (root / live.ref.native_id).exists()
