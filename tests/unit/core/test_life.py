"""Creates, generations, sessions, leases and the way to gone; facts come twice and out of order."""

from typing import Any

import msgspec
import pytest
from fencepost.core import facts, limits
from fencepost.core.machine import Place
from fencepost.core.receipts import Marker
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import orders
from fencepost.core.sandbox.state import Create

from tests.factories import Bench, kinds, only, ref


def orders_of(bench: Bench, kind: type) -> list[Any]:
    return [f for f in bench.effects() if isinstance(f.order, kind)]


def requested() -> Bench:
    bench = Bench()
    bench.see_gateway()
    bench.create()
    bench.tick()
    return bench


# --- create ---------------------------------------------------------------------------------------


def test_a_create_names_one_living_gateway_and_orders_it() -> None:
    bench = requested()
    assert kinds(bench.entries) == ["term_opened", "created", "claimed", "requested"]
    effect = only(orders_of(bench, orders.CreateOrder))
    assert (effect.target, effect.order.create_id) == ("gw1", "sbx")
    assert effect.order.labels["sandbox"] == "sbx"


def test_the_same_create_again_is_no_error_and_another_one_is() -> None:
    bench = requested()
    assert bench.create() == []
    assert only(bench.create(memory_mb=64)).reason == "sandbox_exists"


@pytest.mark.parametrize(
    ("field", "value", "good"),
    [
        ("memory_mb", 15, 16),
        ("memory_mb", (1 << 20) + 1, 1 << 20),
        ("processes", 0, 1),
        ("processes", (1 << 16) + 1, 1 << 16),
    ],
)
def test_a_spec_outside_the_bounds_is_refused(field: str, value: int, good: int) -> None:
    bench = Bench()
    refused = only(bench.create(**{field: value}))
    assert (refused.reason, refused.field) == ("out_of_range", f"spec.{field}")
    assert "created" in kinds(bench.create(**{field: good}))


def test_without_a_gateway_a_create_waits_for_one() -> None:
    bench = Bench()
    bench.create()
    bench.tick(10_000)
    assert bench.of_kind(e.Requested) == []
    bench.see_gateway(providers=["docker"])
    bench.tick(600)
    assert bench.of_kind(e.Requested) == []
    bench.see_gateway("gw2")
    bench.tick(600)
    assert only(bench.of_kind(e.Requested)).gateway == "gw2"


@pytest.mark.parametrize(
    ("place", "asked"), [("host-a", ["gw1", "gw2"]), ("host-b", ["gw1"]), ("", ["gw1"])]
)
def test_a_create_is_asked_for_again_only_where_it_can_be_found(
    place: str, asked: list[str]
) -> None:
    # At another authority it would be another create, and what the first one made ran on unnamed.
    bench = Bench()
    bench.see_gateway(places={"process": "host-a"})
    bench.create()
    bench.tick(limits.LEASE_MS + 1)
    bench.see_gateway("gw2", places={"process": place} if place else {})
    bench.tick(600)
    assert [r.gateway for r in bench.of_kind(e.Requested)] == asked
    assert next(iter(bench.sandbox().creates.values())).place == "host-a"


def test_s224_a_create_goes_to_another_gateway_only_after_a_lease() -> None:
    bench = requested()
    bench.tick(4_000)
    bench.see_gateway("gw2")
    bench.tick(600)
    assert len(bench.of_kind(e.Requested)) == 1
    bench.tick(1_500)
    assert [r.gateway for r in bench.of_kind(e.Requested)] == ["gw1", "gw2"]
    late = facts.CreateFailed(
        sandbox="sbx", create_id="sbx", gateway="gw1", reason="x", ambiguous=False
    )
    assert bench.take(late) == []


def test_a_create_that_a_living_gateway_has_stays_with_it() -> None:
    bench = requested()
    for _ in range(20):
        bench.tick(1_000)
        bench.see_gateway("gw1")
        bench.see_gateway("gw2")
    assert len(bench.of_kind(e.Requested)) == 1


@pytest.mark.parametrize("ambiguous", [True, False])
def test_a_failed_create_is_asked_again_under_the_same_id_after_a_delay(ambiguous: bool) -> None:
    bench = requested()
    failed = facts.CreateFailed(
        sandbox="sbx", create_id="sbx", gateway="gw1", reason="no room", ambiguous=ambiguous
    )
    assert only(bench.take(failed)).ambiguous is ambiguous
    assert bench.take(failed) == []
    bench.see_gateway()
    bench.tick(600)
    assert len(bench.of_kind(e.Requested)) == 1
    bench.tick(600)
    assert [r.create_id for r in bench.of_kind(e.Requested)] == ["sbx", "sbx"]
    assert bench.sandbox().creates["sbx"].ambiguous is ambiguous


def test_an_assignment_counts_once() -> None:
    bench = requested()
    said = facts.Assigned(
        sandbox="sbx",
        create_id="sbx",
        gateway="gw1",
        ref=ref(),
        capabilities=facts.Capabilities(),
    )
    assert kinds(bench.take(said)) == ["assigned"]
    assert bench.take(said) == []
    assert bench.take(msgspec.structs.replace(said, ref=ref("i9"))) == []
    assert bench.sandbox().ref == ref()
    assert only(orders_of(bench, orders.AttachOrder)).order.ref == ref()


def test_facts_about_unknown_sandboxes_are_passed_over() -> None:
    gone = facts.Gone(sandbox="nope", gateway="gw1", ref=ref())
    assert Bench().take(gone) == []


# --- found and marked -------------------------------------------------------------------------------


def test_s006_the_first_generation_is_one_and_each_disk_moves_it_up() -> None:
    bench = Bench().live()
    assert (bench.sandbox().epoch, bench.sandbox().live) == (1, True)
    for epoch in (2, 3, 4):
        bench.cold()
        assert bench.sandbox().epoch == epoch
    assert [o.epoch for o in bench.of_kind(e.EpochOpened)] == [1, 2, 3, 4]
    assert len({o.nonce for o in bench.of_kind(e.EpochOpened)}) == 4


def opened(bench: Bench, **found: Any) -> tuple[str, str]:
    """What an attach makes of the disk: its kind and the evidence, or none where it is the same."""
    before = len(bench.of_kind(e.EpochOpened))
    bench.lost()
    bench.attach(**found)
    now = bench.of_kind(e.EpochOpened)[before:]
    return ("", "") if not now else (only(now).disk, only(now).evidence)


def committed_three() -> Bench:
    bench = Bench().live()
    for n in range(3):
        bench.step(f"s{n}")
        bench.answer(f"s{n}")
    assert bench.sandbox().journal_seq == 3
    return bench


def test_s180_what_was_found_decides_the_generation() -> None:
    marker = Marker(epoch=1, session="S1", nonce="N1", instance="i1")
    other = Marker(epoch=1, session="S1", nonce="N7", instance="i1")
    moved = ref("i2", native_id="sbx")
    same = committed_three()
    assert opened(same, marker=marker, journal_seq=3) == ("", "")
    assert opened(committed_three(), marker=marker, journal_seq=4) == ("", "")
    behind = opened(committed_three(), marker=marker, journal_seq=2)
    assert behind == ("restored", "journal 2 behind ledger 3")
    assert opened(committed_three(), marker=None, ref=moved) == ("cold", "no_marker")
    assert opened(committed_three(), marker=other, journal_seq=3) == ("restored", "other_nonce")
    found = {"marker": marker, "journal_seq": 3, "ref": moved}
    assert opened(committed_three(), **found) == ("warm", "other_instance")
    closed = committed_three()
    closed.lose_lease()
    assert opened(closed, marker=marker, journal_seq=3) == ("warm", "epoch_was_closed")


def test_a_marker_that_was_there_before_the_first_epoch_is_not_ours() -> None:
    bench = requested()
    bench.assigned()
    bench.attach(marker=Marker(epoch=9, session="S", nonce="Nx", instance="i1"))
    opening = only(bench.of_kind(e.EpochOpened))
    assert (opening.epoch, opening.disk, opening.evidence) == (1, "cold", "foreign_marker")


def test_s205_an_older_disk_is_seen_even_where_nothing_was_committed_since() -> None:
    bench = Bench().live()
    marker = bench.marker()
    bench.lost()
    bench.attach(marker=marker, journal_seq=5)  # what was applied, and its receipts lost
    assert bench.sandbox().journal_seq == 5
    assert opened(bench, marker=bench.marker(), journal_seq=4)[0] == "restored"


def test_an_epoch_whose_marker_was_never_written_is_not_moved_again() -> None:
    bench = requested()
    bench.assigned()
    bench.found()
    assert bench.sandbox().epoch == 1
    bench.lost(session=bench.sandbox().marking.session)  # type: ignore[union-attr]
    bench.attach()
    assert (bench.sandbox().epoch, bench.sandbox().nonce) == (1, "N1")


def test_a_warm_epoch_whose_disk_then_shows_no_marker_is_condemned() -> None:
    bench = committed_three()
    marker = bench.marker()
    bench.lose_lease()
    bench.found(marker=marker, journal_seq=3)
    assert bench.of_kind(e.EpochOpened)[-1].disk == "warm"
    bench.lost(session=bench.sandbox().marking.session)  # type: ignore[union-attr]
    bench.found(marker=None)
    assert bench.sandbox().epoch == 2
    assert bench.sandbox().condemned


def test_an_instance_whose_marker_vanished_is_condemned_before_anything_is_called_lost() -> None:
    bench = committed_three()
    bench.step("s9")
    bench.lost()
    assert kinds(bench.found(marker=None)) == ["epoch_closed", "condemned"]
    assert bench.open("s9").phase == "apply"  # its effect may stand on that disk
    stop = only(orders_of(bench, orders.StopOrder))
    assert stop.order.ref == bench.sandbox().ref
    bench.gone()
    ended = bench.of_kind(e.Compensated)[-1]
    assert (ended.step, ended.evidence) == ("s9", "lost_with_epoch")


@pytest.mark.parametrize(
    ("nonce", "takes_back", "condemned"),
    [("N7", True, True), ("N7", False, False), ("", True, False)],
)
def test_an_older_generations_point_is_given_up_where_something_was_taken_back_since(
    nonce: str, takes_back: bool, condemned: bool
) -> None:
    bench = committed_three()
    if takes_back:
        bench.step("s9")
        bench.cancel("s9")
        bench.answer("s9", reason="never_began")
        assert bench.final("s9") == "compensated"
    marker = (
        bench.marker() if not nonce else Marker(epoch=1, session="S", nonce=nonce, instance="i1")
    )
    entries = bench.found(marker=marker, journal_seq=bench.sandbox().journal_seq)
    assert ("condemned" in kinds(entries)) == condemned


def test_the_disk_whose_new_marker_was_not_reported_is_of_this_generation() -> None:
    bench = committed_three()
    bench.step("s9")
    bench.cancel("s9")
    bench.answer("s9", reason="never_began")
    marker = bench.marker()
    bench.lose_lease()
    bench.found(marker=marker, journal_seq=bench.sandbox().journal_seq)
    assert bench.sandbox().nonce != marker.nonce, "the next generation is being marked"
    entries = bench.found(marker=marker, journal_seq=bench.sandbox().journal_seq)
    assert kinds(entries) == ["marking"]


def test_a_marking_whose_report_was_lost_is_the_same_generation() -> None:
    bench = committed_three()
    marker = bench.marker()
    bench.lose_lease()
    bench.found(marker=marker, journal_seq=3)
    written = Marker(epoch=2, session="S", nonce=bench.sandbox().nonce, instance="i1")
    bench.found(marker=written, journal_seq=3)
    bench.marked()
    assert bench.sandbox().epoch == 2
    # And where it was never written, the disk still has the former one's.
    other = committed_three()
    marker = other.marker()
    other.lose_lease()
    other.found(marker=marker, journal_seq=3)
    # The gateway that is writing it may begin again, in another session.
    assert kinds(other.found(marker=marker, journal_seq=3)) == ["marking"]
    other.marked()
    assert other.sandbox().epoch == 2


def test_a_finding_about_another_sandbox_moves_nothing() -> None:
    bench = Bench().live()
    for other in ({"native_id": "n9"}, {"authority": "far"}, {"provider": "docker"}):
        wrong = msgspec.structs.replace(bench.sandbox().ref, **other)
        assert bench.found(ref=wrong) == []
    assert bench.sandbox().session == "S1"


def test_a_reading_from_before_something_else_was_learned_proves_nothing() -> None:
    bench = Bench().live()
    asked = bench.sandbox().asked
    bench.lost()
    assert bench.found(asked=asked) == []
    now = only(orders_of(bench, orders.AttachOrder)).order.asked
    assert now > asked
    moved = ref("i2", native_id="sbx")
    opened_again = ["epoch_closed", "epoch_opened", "marking"]
    assert kinds(bench.found(asked=now, marker=None, ref=moved)) == opened_again


def test_the_same_finding_counts_once() -> None:
    bench = requested()
    bench.assigned()
    bench.found(session="S1")
    assert bench.found(session="S1") == []
    bench.marked()
    assert bench.found(session="S1") == []


def test_one_living_gateway_writes_the_marker_at_a_time() -> None:
    bench = requested()
    bench.assigned()
    bench.see_gateway("gw2")
    bench.found()
    assert bench.found(gateway="gw2") == []
    bench.tick(3_100)  # now it is silent
    assert kinds(bench.found(gateway="gw2")) == ["marking"]
    assert only(bench.of_kind(e.Marking)[1:]).gateway == "gw2"


def test_a_gateway_that_never_answers_a_marking_is_given_up() -> None:
    bench = requested()
    bench.assigned()
    bench.found(session="S1")
    for _ in range(25):
        bench.tick(1_000)
        bench.see_gateway()
    detached = only(bench.of_kind(e.Detached))
    assert (detached.session, detached.reason) == ("S1", "marking_timed_out")
    assert len(orders_of(bench, orders.AttachOrder)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"session": "S9"},
        {"gateway": "gw9"},
        {"epoch": 2},
        {"nonce": "N9"},
        {"instance": "i9"},
    ],
)
def test_a_marking_that_was_not_ordered_attaches_nothing(wrong: dict[str, Any]) -> None:
    bench = requested()
    bench.assigned()
    bench.found()
    assert bench.marked(**wrong) == []
    assert kinds(bench.marked()) == ["attached"]


def test_a_marking_counts_once() -> None:
    bench = requested()
    bench.assigned()
    bench.found()
    marking = bench.sandbox().marking
    assert marking is not None
    bench.marked()
    again = facts.Marked(
        sandbox="sbx",
        gateway="gw1",
        session=marking.session,
        epoch=1,
        nonce=marking.nonce,
        instance="i1",
        journal_seq=0,
    )
    assert bench.take(again) == []


def test_a_journal_that_went_back_between_finding_and_marking_attaches_nothing() -> None:
    bench = committed_three()
    marker = bench.marker()
    bench.lost()
    bench.found(marker=marker, journal_seq=5)
    assert only(bench.marked(journal_seq=4)).reason == "journal_went_back"
    bench.found(marker=marker, journal_seq=5)
    assert kinds(bench.marked(journal_seq=5)) == ["attached"]


def test_the_journal_at_the_attachment_is_what_the_disk_must_have_from_then_on() -> None:
    bench = committed_three()
    marker = bench.marker()
    bench.lost()
    bench.found(marker=marker, journal_seq=3)
    bench.marked(journal_seq=5)
    assert bench.sandbox().journal_seq == 5


def test_gone_needs_every_create_settled() -> None:
    bench = Bench().live()
    release(bench)
    sandbox = bench.sandbox()
    sandbox.creates["late"] = Create(create_id="late", gateway="gw1")
    gone = e.GoneEntry(sandbox="sbx", instance="i1", evidence="observed_gone")
    bench.machine.evolve(bench.state, gone, Place(99, 0), bench.now_ms)
    assert (sandbox.ref, sandbox.gone) == (None, False)
    del sandbox.creates["late"]
    bench.machine.evolve(bench.state, gone, Place(99, 1), bench.now_ms)
    assert sandbox.gone


def test_nothing_is_fenced_between_the_opening_and_the_attachment() -> None:
    bench = Bench().live()
    bench.lost()
    bench.found(marker=None, ref=ref("i2", native_id="sbx"))
    assert bench.sandbox().open
    assert only(bench.step("s1")).reason == "no_live_epoch"
    bench.marked()
    assert kinds(bench.tick()) == ["fenced"]


# --- lost, leases ---------------------------------------------------------------------------------


def test_s007_a_silent_lease_closes_the_epoch_before_the_receipt_is_looked_at() -> None:
    bench = Bench().live()
    bench.step("s1")
    late = bench.receipt("s1")
    bench.beat()
    bench.now_ms += 5_600
    assert only(bench.receive(late, gateway="gw1")).reason == "epoch_closed"
    assert bench.of_kind(e.EpochClosed)[-1].reason == "lease_expired"
    control = Bench().live()
    control.step("s1")
    control.beat()
    control.now_ms += 4_900
    assert kinds(control.answer("s1")) == ["committed"]


def test_heartbeats_keep_an_epoch_open() -> None:
    bench = Bench().live()
    for _ in range(20):
        bench.tick(1_000)
        bench.beat()
    assert bench.sandbox().open


@pytest.mark.parametrize(
    "wrong",
    [{"session": "S0"}, {"gateway": "gw9"}, {"epoch": 7}],
    ids=["session", "gateway", "epoch"],
)
def test_s192_a_former_sessions_heartbeats_keep_nothing_open(wrong: dict[str, Any]) -> None:
    bench = Bench().live()
    for _ in range(20):
        bench.tick(1_000)
        bench.beat(**wrong)
    assert not bench.sandbox().open


def test_s228_a_new_owner_grants_a_full_term_before_it_calls_a_lease_dead() -> None:
    bench = Bench().live()
    bench.beat()
    bench.tick(4_900)
    bench.restart()
    bench.tick(4_000)
    assert bench.sandbox().open
    bench.tick(2_000)
    assert not bench.sandbox().open


@pytest.mark.parametrize("observed", ["present", "terminating", "unknown"])
def test_s182_a_lost_channel_ends_the_session_not_the_epoch(observed: str) -> None:
    bench = Bench().live()
    assert kinds(bench.lost(observed=observed)) == ["detached"]
    assert bench.sandbox().open
    assert bench.sandbox().session == ""
    assert bench.lost(session="S1", observed=observed) == []
    assert len(orders_of(bench, orders.AttachOrder)) == 1


def test_a_loss_that_was_observed_closes_the_epoch_and_builds_another() -> None:
    bench = Bench().live()
    entries = bench.lost(observed="gone")
    assert kinds(entries) == ["epoch_closed", "gone", "rebuild_intended", "requested"]
    assert entries[2].create_id == "sbx.2"
    assert bench.gone(ref=ref(native_id="sbx")) == []
    bench.assigned(ref=ref("i2", native_id="n2"))
    bench.attach()
    assert (bench.sandbox().epoch, bench.sandbox().instance) == (2, "i2")


def test_a_loss_of_another_instance_says_nothing_of_this_one() -> None:
    bench = Bench().live()
    assert bench.gone(ref=ref("i9", native_id="sbx")) == []
    assert bench.sandbox().open
    assert kinds(bench.lost(observed="gone", ref=ref("i9"))) == ["detached"]
    assert bench.sandbox().open


def test_without_rebuild_a_lost_sandbox_stays_lost() -> None:
    bench = Bench().live(rebuild=False)
    assert kinds(bench.gone()) == ["epoch_closed", "gone"]
    assert bench.effects() == []


def attach_failed(bench: Bench, **over: Any) -> list[Any]:
    fields = {
        "gateway": "gw1",
        "session": "S9",
        "ref": bench.sandbox().ref,
        "reason": "no channel",
        "observed": "unknown",
        **over,
    }
    return bench.take(facts.AttachFailed(sandbox="sbx", **fields))


def test_a_failed_attach_is_tried_again() -> None:
    bench = requested()
    bench.assigned()
    assert attach_failed(bench) == []
    bench.found(session="S1")
    assert kinds(attach_failed(bench, session="S1")) == ["detached"]
    assert len(orders_of(bench, orders.AttachOrder)) == 1
    assert "gone" in kinds(attach_failed(bench, observed="gone"))


def test_s200_a_condemned_sandbox_is_stopped_and_replaced() -> None:
    bench = Bench().live()
    bench.step("s1")
    entries = attach_failed(bench, condemned=True)
    assert kinds(entries) == ["epoch_closed", "condemned"]
    assert attach_failed(bench, condemned=True) == []
    assert bench.found() == []
    assert len(orders_of(bench, orders.StopOrder)) == 1
    gone = bench.gone()
    assert kinds(gone) == ["gone", "compensated", "parked", "rebuild_intended", "requested"]
    bench.assigned(ref=ref("i2", native_id="n2"))
    bench.attach()
    assert bench.sandbox().live
    assert bench.open("s1").attempt == "s1.2"
    control = Bench().live()
    assert attach_failed(control, condemned=True, ref=ref("i9")) == []


def test_s180_a_marker_ahead_of_the_ledger_condemns_its_disk() -> None:
    bench = committed_three()
    bench.step("s4")
    ahead = Marker(epoch=2, session="x", nonce="y", instance="i1")
    assert kinds(bench.found(session="S2", marker=ahead)) == ["epoch_closed", "condemned"]
    assert bench.found(session="S3", marker=ahead) == []
    assert len(orders_of(bench, orders.StopOrder)) == 1
    assert "rebuild_intended" in kinds(bench.gone())
    control = committed_three()
    control.step("s4")
    level = Marker(epoch=1, session="x", nonce="y", instance="i1")
    assert "epoch_opened" in kinds(control.found(session="S2", marker=level))


# --- release ----------------------------------------------------------------------------------------


def release(bench: Bench) -> list[Any]:
    return bench.command("release", "r", {})


def test_a_release_is_durable_before_the_stop_and_ends_in_gone() -> None:
    bench = Bench().live()
    assert kinds(release(bench)) == ["unclaimed", "releasing"]
    stop = only(orders_of(bench, orders.StopOrder))
    assert stop.order.ref == bench.sandbox().ref
    assert release(bench) == []
    answered = facts.StopAnswered(
        sandbox="sbx", gateway="gw1", ref=bench.sandbox().ref, answer="accepted"
    )
    assert kinds(bench.take(answered)) == ["stop_answered"]
    assert bench.take(answered) == []  # asked again, answered the same: no news
    refused = msgspec.structs.replace(answered, answer="refused", detail="busy")
    assert kinds(bench.take(refused)) == ["stop_answered"]
    assert kinds(bench.take(answered)) == ["stop_answered"]
    assert not bench.sandbox().gone
    assert bench.take(msgspec.structs.replace(answered, ref=ref("i9"))) == []
    assert kinds(bench.gone()) == ["epoch_closed", "gone"]
    assert bench.sandbox().gone
    assert bench.effects() == []
    assert bench.take(answered) == []


def test_a_release_while_steps_are_open_ends_them_all() -> None:
    bench = Bench().live()
    for n in range(18):
        bench.step(f"s{n}")
    bench.answer("s0", verdict="indeterminate", outcome="")
    release(bench)
    bench.tick(600)
    waiting = [c.step for c in bench.of_kind(e.Compensated)]
    assert waiting == ["s17"]
    assert bench.of_kind(e.Compensated)[0].reason == "sandbox_released"
    bench.answer("s1")  # its epoch is still open: what is true is recorded
    assert bench.final("s1") == "committed"
    assert kinds(bench.cancel("s2")) == ["cancelled"]
    bench.gone()
    assert set(bench.sandbox().steps) == {"s0"}
    ended = {c.step: (c.reason, c.evidence) for c in bench.of_kind(e.Compensated)}
    assert ended["s3"] == ("sandbox_released", "lost_with_epoch")
    assert ended["s2"] == ("cancelled", "lost_with_epoch")
    assert bench.auditor.finish() == []


@pytest.mark.parametrize(
    ("observes", "evidence"), [(True, "observed_gone"), (False, "stop_accepted")]
)
def test_a_release_between_two_instances_says_how_the_last_one_ended(
    observes: bool, evidence: str
) -> None:
    bench = Bench()
    bench.create()
    bench.assigned(capabilities=facts.Capabilities(observes_gone=observes))
    bench.attach()
    known = bench.sandbox().ref
    assert known is not None
    attach_failed(bench, condemned=True)
    bench.tick(60_000)  # nobody is there who could make the next one
    stopped = facts.StopAnswered(sandbox="sbx", gateway="gw1", ref=known, answer="accepted")
    entries = bench.take(stopped)
    if observes:
        entries = bench.gone()
    assert kinds(entries) == ["gone", "rebuild_intended"]
    assert entries[0].evidence == evidence
    *_, gone = release(bench)
    assert (gone.instance, gone.evidence) == ("", evidence)


def test_steps_that_wait_when_a_sandbox_is_gone_end_with_it() -> None:
    bench = Bench()
    bench.create()
    bench.step("s1")
    assert "gone" in kinds(release(bench))
    bench.tick(600)
    assert bench.final("s1") == "compensated"


def test_retries_that_wait_when_a_sandbox_is_released_end_with_it() -> None:
    bench = Bench().live()
    bench.step("s1")
    bench.gone()
    assert list(bench.sandbox().requeued) == ["s1"]
    release(bench)
    bench.tick(600)
    assert bench.final("s1") == "compensated"


def test_nothing_is_built_or_attached_while_releasing() -> None:
    bench = Bench().live()
    release(bench)
    assert bench.found(marker=None) == []
    assert "rebuild_intended" not in kinds(bench.gone())


def test_a_create_under_way_is_stopped_and_settled_before_gone() -> None:
    bench = requested()
    release(bench)
    stop = only(orders_of(bench, orders.StopOrder))
    assert (stop.order.ref, stop.order.create_id) == (None, "sbx")
    failed = facts.CreateFailed(
        sandbox="sbx", create_id="sbx", gateway="gw1", reason="x", ambiguous=True
    )
    bench.take(failed)
    assert not bench.sandbox().gone
    bench.tick(1_300)
    bench.see_gateway()
    bench.tick(1_300)
    # The failure of one call says nothing of another under the same id.
    one_call = msgspec.structs.replace(failed, ambiguous=False)
    assert kinds(bench.take(one_call)) == ["create_failed"]
    assert not bench.sandbox().gone
    for _ in range(4):
        bench.tick(1_300)
        bench.see_gateway()
    settled = msgspec.structs.replace(one_call, settled=True)
    assert kinds(bench.take(settled)) == ["create_failed", "gone"]
    assert bench.sandbox().gone


def test_a_create_that_lands_while_releasing_is_stopped() -> None:
    bench = requested()
    release(bench)
    bench.assigned()
    assert only(orders_of(bench, orders.StopOrder)).order.ref is not None
    bench.gone()
    assert bench.sandbox().gone


def test_a_release_of_nothing_is_refused() -> None:
    bench = Bench()
    assert only(release(bench)).reason == "unknown_sandbox"
