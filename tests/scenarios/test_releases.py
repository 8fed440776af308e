"""Sections 2, 3 and 7 to 10 of the scenarios, over both machines and a provider that sees all."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from fencepost.core import facts, limits
from fencepost.core.dag import entries as d
from fencepost.core.sandbox import entries as e
from fencepost.core.shard_messages import Hold, Unhold

from tests.factories import only
from tests.properties.dag_world import GATEWAY, World

REASONS = {
    "accepted": "stop_accepted",
    "not_found": "stop_accepted",
    "refused": "stop_refused",
    "refused_other_instance": "stop_refused",
    "timeout": "stop_unreachable",
    "unreachable": "stop_unreachable",
    "unconfigured": "stop_unsupported",
    "unsupported": "stop_unsupported",
}


def holding(*names: str, observes_gone: bool = True) -> World:
    """DAG `d` holds these sandboxes, each ready in a slot of its own name."""
    world = World(observes_gone=observes_gone)
    world.ask("d", "o", do="open", nodes=["n"])
    for name in names:
        world.ask("d", name, do="acquire", slot=name)
    world.settle(rounds=6)
    dag = world.dags.state.dags["d"]
    assert {a.phase for a in dag.acquisitions.values()} <= {"ready"}
    return world


def sharing(*others: str) -> World:
    world = holding("x")
    for name in others:
        world.ask(name, "o", do="open")
        world.ask(name, f"{name}-x", do="adopt", slot="s", sandbox="x")
    world.settle(rounds=2)
    assert set(world.boxes.state.sandboxes["x"].holders) == {"d", *others}
    return world


def move(world: World) -> None:
    """Lets both families talk, and nobody else."""
    for _ in range(5_000):
        world.dags.tick()
        world.boxes.tick()
        if world.dags.messages:
            world._to_boxes()
        elif world.boxes.messages:
            world._to_dags()
        else:
            return
    raise AssertionError("they talk for ever")


def answered(world: World, name: str, answer: Any, detail: str = "") -> None:
    ref = world.made[name].ref
    world.boxes.take(
        facts.StopAnswered(sandbox=name, gateway=GATEWAY, ref=ref, answer=answer, detail=detail)
    )
    move(world)


def gone(world: World, name: str) -> None:
    world.running.pop(name, None)
    ref = world.made[name].ref
    world.boxes.take(facts.Gone(sandbox=name, gateway=GATEWAY, ref=ref))
    move(world)


def cancel(world: World, dag: str = "d", id_: str = "x", bound_ms: int = 0) -> None:
    world.ask(dag, id_, do="cancel", bound_ms=bound_ms)
    move(world)


@pytest.mark.parametrize("observes_gone", [True, False])
@pytest.mark.parametrize("answer", sorted(REASONS))
def test_s026_s027_s028_s029_s030_s040_s049_s121_s168_s186_what_a_stops_answer_means(
    answer: str, observes_gone: bool
) -> None:
    world = holding("x", observes_gone=observes_gone)
    cancel(world)
    answered(world, "x", answer, "said so")
    last = world.answers("d")[-1]
    if answer in ("accepted", "not_found") and not observes_gone:
        assert (last.verdict, last.evidence) == ("confirmed", "stop_accepted")
        return
    assert (last.verdict, last.reason) == ("unconfirmed", REASONS[answer])
    assert last.evidence == f"{answer}: said so"
    gone(world, "x")
    last = world.answers("d")[-1]
    assert (last.verdict, last.evidence) == ("confirmed", "observed_gone")


@pytest.mark.parametrize("observes_gone", [True, False])
def test_s167_an_answer_about_another_instance_means_nothing(observes_gone: bool) -> None:
    world = holding("x", observes_gone=observes_gone)
    cancel(world)
    before = len(world.boxes.entries)
    for change in ({"instance": "i9"}, {"authority": "other"}, {"native_id": "y"}):
        other = facts.Ref(
            **{
                "authority": "host",
                "provider": "process",
                "native_id": "x",
                "instance": world.made["x"].ref.instance,
                **change,
            }
        )
        for fact in (
            facts.StopAnswered(sandbox="x", gateway=GATEWAY, ref=other, answer="accepted"),
            facts.Gone(sandbox="x", gateway=GATEWAY, ref=other),
        ):
            world.boxes.take(fact)
    assert len(world.boxes.entries) == before
    answered(world, "x", "accepted")
    last = world.answers("d")[-1]
    assert last.verdict == ("unconfirmed" if observes_gone else "confirmed")


def test_s031_s037_s156_every_holding_is_stopped_whatever_one_of_them_answers() -> None:
    world = holding("x", "y", "z")
    cancel(world)
    stops = {f.order.ref.native_id for f in world.owed()}
    assert stops == {"x", "y", "z"}
    answered(world, "x", "refused")
    for name in ("y", "z"):
        gone(world, name)
    last = world.answers("d")[-1]
    assert (last.verdict, last.reason) == ("unconfirmed", "stop_refused")
    assert list(world.dags.state.dags["d"].acquisitions) == ["x"]
    gone(world, "x")
    assert world.answers("d")[-1].verdict == "confirmed"


def test_s033_s035_a_second_cancel_does_not_take_emptiness_for_evidence() -> None:
    world = holding("x")
    cancel(world)
    answered(world, "x", "timeout")
    cancel(world, id_="y")
    last = world.answers("d")[-1]
    assert (last.cancel, last.verdict, last.reason) == ("y", "unconfirmed", "stop_unreachable")


def test_s032_a_dag_that_never_held_anything_is_told_so_without_a_stop() -> None:
    world = holding()
    cancel(world, bound_ms=5_000)
    last = only(world.answers("d"))
    assert (last.verdict, last.cancel) == ("nothing_held", "x")
    assert not world.owed()
    other = holding("x")
    cancel(other, bound_ms=5_000)
    assert not other.answers("d")


def test_s047_a_cancel_after_the_end_cancels_nothing_and_answers_from_the_state() -> None:
    world = holding("x")
    world.ask("d", "f", do="finish")
    move(world)
    gone(world, "x")
    cancel(world)
    last = world.answers("d")[-1]
    assert (last.verdict, last.cancelled) == ("confirmed", 0)


def test_s050_the_release_is_in_the_ledger_before_a_stop_is_ordered() -> None:
    world = holding("x")
    assert not world.owed()
    world.ask("d", "x", do="cancel")
    world.dags.tick()
    assert world.dags.of_kind(d.ReleaseBegun)
    assert not world.owed()
    move(world)
    assert world.boxes.of_kind(e.Releasing)
    assert [f.order.ref.native_id for f in world.owed()] == ["x"]


def test_s055_s143_a_lost_reply_leaves_the_release_owed_and_asked_again() -> None:
    world = holding("x")
    cancel(world)
    for _ in range(3):
        order = only(world.owed()).order
        world.calls.append(order)
        world._call(0)
        world.reports.clear()
    assert world.answers("d")[-1].verdict == "unconfirmed"
    world.boxes.restart()
    world.settle()
    assert world.answers("d")[-1].verdict == "confirmed"


def test_s056_s060_s061_a_late_or_second_release_takes_nothing_back() -> None:
    world = sharing("b")
    cancel(world)
    again = Unhold(dag="d", acquisition="x", sandbox="x")
    assert world.boxes.take(again) == []
    wrong = Unhold(dag="b", acquisition="other", sandbox="x")
    assert only(world.boxes.take(wrong)).reason == "not_a_holder"
    assert set(world.boxes.state.sandboxes["x"].holders) == {"b"}
    assert world.answers("d")[-1].reason == "shared"


def test_s057_two_sandboxes_through_one_slot_are_settled_apart() -> None:
    world = holding("x")
    world.ask("d", "y", do="acquire", slot="x", replace=True)
    move(world)
    cancel(world)
    gone(world, "x")
    assert world.answers("d")[-1].verdict == "unconfirmed"
    assert list(world.dags.state.dags["d"].acquisitions) == ["y"]
    world.settle()
    assert world.answers("d")[-1].verdict == "confirmed"


def test_s062_s063_s066_evidence_is_the_dags_own() -> None:
    world = holding("x")
    cancel(world)
    gone(world, "x")
    world.ask("e", "o", do="open", retry_of="d")
    world.ask("e", "c", do="cancel", bound_ms=0)
    move(world)
    assert world.answers("e")[-1].verdict == "nothing_held"
    assert world.answers("d")[-1].verdict == "confirmed"


def test_s097_s098_s064_whoever_is_not_the_last_is_shared_and_stops_nothing() -> None:
    world = sharing("b")
    cancel(world, bound_ms=5_000)
    last = only(world.answers("d"))
    assert (last.verdict, last.reason) == ("unconfirmed", "shared")
    assert not world.owed()
    cancel(world, "b")
    assert len(world.owed()) == 1
    gone(world, "x")
    assert {world.answers(n)[-1].verdict for n in ("d", "b")} == {"confirmed"}


def test_s108_a_cancelled_adopter_never_hears_that_nothing_was_held() -> None:
    world = sharing("b")
    cancel(world, "b")
    assert world.answers("b")[-1].verdict == "unconfirmed"
    cancel(world)
    gone(world, "x")
    assert world.answers("b")[-1].verdict == "confirmed"


def test_a_dag_that_lets_go_and_comes_back_is_told_of_both() -> None:
    world = sharing("b")
    world.ask("b", "r", do="release", slot="s")
    move(world)
    world.ask("b", "again", do="adopt", slot="t", sandbox="x")
    move(world)
    for name in ("b", "d"):
        cancel(world, name)
    gone(world, "x")
    world.check_end()
    assert world.answers("b")[-1].verdict == "confirmed"


@pytest.mark.parametrize("state", ["releasing", "gone", "unknown", "live"])
def test_s107_s110_what_is_released_or_unknown_is_not_adopted(state: str) -> None:
    world = holding("x")
    if state in ("releasing", "gone"):
        cancel(world)
    if state == "gone":
        gone(world, "x")
    world.ask("b", "o", do="open")
    world.ask("b", "a", do="adopt", slot="s", sandbox="y" if state == "unknown" else "x")
    move(world)
    dag = world.dags.state.dags["b"]
    if state == "live":
        assert dag.acquisitions["a"].phase == "ready"
        return
    reason = "unknown_sandbox" if state == "unknown" else "sandbox_released"
    assert only(world.dags.of_kind(d.Abandoned)).reason == reason
    assert dag.slots == {}
    cancel(world, "b")
    assert world.answers("b")[-1].verdict == "nothing_held"


@pytest.mark.parametrize("release_first", [True, False])
def test_an_adoption_and_the_last_release_meet_and_one_of_them_wins(release_first: bool) -> None:
    world = holding("x")
    hold = Hold(dag="b", acquisition="a", sandbox="x")
    unhold = Unhold(dag="d", acquisition="x", sandbox="x")
    for value in (unhold, hold) if release_first else (hold, unhold):
        world.boxes.take(value)
    sandbox = world.boxes.state.sandboxes["x"]
    assert sandbox.releasing is release_first
    assert set(sandbox.holders) == (set() if release_first else {"b"})


def test_the_same_id_is_not_made_twice_and_a_repeat_is_the_first() -> None:
    world = holding("x")
    spec = world.boxes.state.sandboxes["x"].spec
    assert world.boxes.take(Hold(dag="d", acquisition="x", sandbox="x", spec=spec)) == []
    for hold, reason in (
        (Hold(dag="b", acquisition="x", sandbox="x", spec=spec), "sandbox_exists"),
        (Hold(dag="d", acquisition="z", sandbox="x"), "already_held"),
    ):
        told = only(world.boxes.take(hold))
        assert (told.phase, told.reason) == ("refused", reason)


def test_holders_and_those_who_let_go_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("HOLDERS_PER_SANDBOX_MAX", "DEBTORS_PER_SANDBOX_MAX"):
        world = sharing("b")
        if limit.startswith("DEBTORS"):
            cancel(world, "b")
        monkeypatch.setattr(limits, limit, 2 if limit.startswith("HOLDERS") else 1)
        hold = Hold(dag="e", acquisition="e", sandbox="x")
        assert only(world.boxes.take(hold)).reason == "overloaded"
        monkeypatch.undo()
        assert isinstance(world.boxes.take(hold)[0], e.HolderAdded)


def test_hundreds_who_let_go_all_hear_the_last_word_in_bounded_batches() -> None:
    world = holding("x")
    names = [f"b{n}" for n in range(300)]
    for name in names:
        world.ask(name, "o", do="open")
        world.ask(name, f"{name}-x", do="adopt", slot="s", sandbox="x")
        cancel(world, name)
    world.boxes.sizes.clear()
    cancel(world)
    answered(world, "x", "refused", "why")
    world.boxes.restart()
    gone(world, "x")
    for _ in range(30):
        world.advance(600)
        move(world)
    assert {world.answers(name)[-1].verdict for name in names} == {"confirmed"}
    assert max(world.boxes.sizes) < limits.INPUT_ENTRIES_BYTES_MAX // 4
    world.check_end()


def test_s122_s126_s127_a_claimed_sandbox_outlives_its_dag_and_is_released_after() -> None:
    world = holding("x")
    assert isinstance(only(world.tell_box("claim", "x", "work", reason="3 shells")), e.Claimed)
    assert world.tell_box("claim", "x", "work", reason="again") == []
    cancel(world, bound_ms=5_000)
    last = only(world.answers("d"))
    assert (last.verdict, last.reason) == ("unconfirmed", "retained")
    assert not world.owed()
    world.tell_box("unclaim", "x", "work")
    move(world)
    assert world.answers("d")[-1].reason == "pending_stop"
    gone(world, "x")
    assert world.answers("d")[-1].verdict == "confirmed"


def test_s100_s125_a_claim_that_ends_while_somebody_holds_releases_nothing() -> None:
    world = sharing("b")
    world.tell_box("claim", "x", "work")
    cancel(world)
    cancel(world, "b")
    world.advance(600)
    move(world)
    assert world.answers("d")[-1].reason == "retained"
    world.ask("c", "o", do="open")
    world.ask("c", "c-x", do="adopt", slot="s", sandbox="x")
    move(world)
    world.advance(600)
    move(world)
    assert world.answers("d")[-1].reason == "shared"
    world.tell_box("unclaim", "x", "work")
    assert not world.boxes.state.sandboxes["x"].releasing
    cancel(world, "c")
    assert world.boxes.state.sandboxes["x"].releasing


def test_a_sandbox_is_released_by_the_end_of_its_last_claim() -> None:
    world = holding("x")
    for claim in ("a", "b"):
        world.tell_box("claim", "x", claim)
    cancel(world)
    world.tell_box("unclaim", "x", "a")
    assert not world.boxes.state.sandboxes["x"].releasing
    world.tell_box("unclaim", "x", "b")
    assert world.boxes.state.sandboxes["x"].releasing


@pytest.mark.parametrize(
    ("kind", "id_", "when", "reason"),
    [
        ("claim", "operator", "held", "reserved"),
        ("unclaim", "operator", "held", "reserved"),
        ("claim", "c", "released", "sandbox_released"),
        ("unclaim", "c", "held", "not_claimed"),
        ("unclaim", "c", "released", ""),
        ("claim", "c", "held", ""),
        ("claim", "c", "unknown", "unknown_sandbox"),
        ("unclaim", "c", "unknown", "unknown_sandbox"),
    ],
)
def test_claims_are_refused_by_name(kind: str, id_: str, when: str, reason: str) -> None:
    world = holding("x")
    if when == "released":
        cancel(world)
    made = world.tell_box(kind, "y" if when == "unknown" else "x", id_)
    if reason:
        assert (only(made).command, only(made).reason) == (kind, reason)
    else:
        assert not any(isinstance(x, e.Refused) for x in made)


def test_claims_of_one_sandbox_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CLAIMS_PER_SANDBOX_MAX", 1)
    world = holding("x")
    world.tell_box("claim", "x", "a")
    assert only(world.tell_box("claim", "x", "b")).reason == "overloaded"
    world.tell_box("unclaim", "x", "a")


def test_s116_s117_a_cancel_while_the_id_was_only_assigned_stops_it() -> None:
    world = World()
    world.ask("d", "o", do="open")
    world.ask("d", "x", do="acquire", slot="s")
    move(world)
    world.boxes.hints.check_at_ms = 0
    move(world)
    world.calls.append(only(world.owed()).order)
    world._call(0)
    assert set(world.running) == {"x"}
    cancel(world, id_="c")
    assert world.answers("d")[-1].verdict == "unconfirmed"
    world._report(0)
    move(world)
    named = only(list(world.dags.state.dags["d"].acquisitions.values()))
    assert named.ref == world.made["x"].ref
    world.settle()
    assert world.stops == ["x"]
    assert world.answers("d")[-1].verdict == "confirmed"


def test_s190_s210_an_ambiguous_create_is_unconfirmed_until_it_is_settled() -> None:
    world = World(fault="ambiguous_create", fault_rate=1.0, luck=Random(1))
    world.ask("d", "o", do="open")
    world.ask("d", "x", do="acquire", slot="s")
    world.settle(faults=True, rounds=3)
    cancel(world)
    world.settle(faults=True, rounds=8)
    assert world.running, "it was created, and nobody could say so"
    last = world.answers("d")[-1]
    assert (last.verdict, last.reason) == ("unconfirmed", "create_ambiguous")
    world.settle()
    assert world.answers("d")[-1].verdict == "confirmed"
    world.check_end()


def test_s210_the_latecomer_of_a_settled_create_is_stopped() -> None:
    world = holding("x")
    cancel(world)
    gone(world, "x")
    late = facts.Ref(authority="host", provider="process", native_id="x2", instance="late")
    fact = facts.Assigned(
        sandbox="x", create_id="x", gateway=GATEWAY, ref=late, capabilities=facts.Capabilities()
    )
    found = only(world.boxes.take(fact))
    assert isinstance(found, e.StrayFound)
    assert only(world.owed()).order.ref == late
    assert world.boxes.take(fact) == []
    world.boxes.take(facts.Gone(sandbox="x", gateway=GATEWAY, ref=late))
    assert not world.owed()


def test_s223_a_generation_on_its_way_is_stopped_too() -> None:
    world = holding("x")
    gone(world, "x")
    assert list(world.boxes.state.sandboxes["x"].creates) == ["x.2"]
    world.calls.append(only(world.owed()).order)
    world._call(0)
    cancel(world)
    assert world.answers("d")[-1].verdict == "unconfirmed"
    assert "x.2" in world.running
    world.settle()
    assert world.stops == ["x.2"]
    last = world.answers("d")[-1]
    assert (last.verdict, last.evidence) == ("confirmed", "observed_gone")


def test_s185_a_sandbox_that_was_lost_before_is_confirmed_at_once() -> None:
    world = World()
    world.ask("d", "o", do="open")
    world.ask("d", "x", do="acquire", slot="s", spec={"rebuild": False})
    world.settle(rounds=6)
    gone(world, "x")
    cancel(world, bound_ms=5_000)
    last = only(world.answers("d"))
    assert (last.verdict, last.evidence) == ("confirmed", "observed_gone")


def test_s187_a_dag_without_a_worker_is_released_by_its_ledger() -> None:
    world = holding("x")
    world.dags.restart()
    world.boxes.restart()
    world.see()
    cancel(world)
    world.dags.restart()
    world.boxes.restart()
    world.see()
    world.settle()
    assert world.answers("d")[-1].verdict == "confirmed"
    assert world.stops == ["x"]


def test_s224_s118_an_intent_without_a_gateway_ends_as_never_requested() -> None:
    world = World()
    world.boxes.hints.gateways.clear()
    world.ask("d", "o", do="open")
    world.ask("d", "x", do="acquire", slot="s")
    move(world)
    cancel(world, bound_ms=5_000)
    last = only(world.answers("d"))
    assert last.verdict == "nothing_held"
    assert only(world.dags.of_kind(d.Abandoned)).reason == "never_requested"
