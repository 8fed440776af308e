"""What sandboxes' shards tell in every phase, the verdict, and what is remembered of the ended."""

from __future__ import annotations

from typing import Any

import pytest
from fencepost.core import facts, limits
from fencepost.core.dag import entries as d
from fencepost.core.dag import verdict
from fencepost.core.dag.state import Acquisition, Dag
from fencepost.core.shard_messages import Told

from tests.factories import kinds, only
from tests.properties.dag_world import World

REF = facts.Ref(authority="host", provider="process", native_id="a", instance="i1")
ON_THE_WAY = ("intent", "requested", "assigned", "ready")


def told(world: World, phase: str, acquisition: str = "a", **more: Any) -> list[Any]:
    fields = {"dag": "d", "acquisition": acquisition, "sandbox": acquisition, **more}
    return world.dags.take(Told(phase=phase, **fields))  # type: ignore[arg-type]


def reached(phase: str) -> World:
    world = World()
    world.ask("d", "o", do="open", nodes=["n"])
    world.ask("d", "a", do="acquire", slot="s")
    for step in ("requested", "assigned", "ready"):
        if phase in ("intent", "releasing"):
            break
        told(world, step, **({"ref": REF} if step == "assigned" else {}))
        if step == phase:
            break
    if phase == "releasing":
        world.ask("d", "r", do="release", slot="s")
    return world


def acquisition(world: World) -> Acquisition:
    return world.dags.state.dags["d"].acquisitions["a"]


@pytest.mark.parametrize("phase", [*ON_THE_WAY, "releasing"])
def test_a_gone_sandbox_settles_in_every_phase_once(phase: str) -> None:
    world = reached(phase)
    assert acquisition(world).phase == phase
    assert kinds(told(world, "gone", evidence="observed_gone")) == ["release_settled"]
    dag = world.dags.state.dags["d"]
    assert (dag.acquisitions, dag.slots, dag.held, dag.gone) == ({}, {}, {}, 1)
    assert dag.held_ever == 1
    for late in ("gone", "ready", "releasing", "assigned", "refused", "requested"):
        assert told(world, late, evidence="observed_gone") == []


@pytest.mark.parametrize("phase", [*ON_THE_WAY, "releasing"])
def test_a_refusal_abandons_in_every_phase(phase: str) -> None:
    world = reached(phase)
    assert kinds(told(world, "refused", reason="sandbox_released")) == ["abandoned"]
    assert world.dags.state.dags["d"].slots == {}


@pytest.mark.parametrize("phase", ["requested", "assigned", "ready"])
def test_what_comes_late_never_takes_a_release_back(phase: str) -> None:
    world = reached("releasing")
    told(world, phase, ref=REF)
    assert acquisition(world).phase == "releasing"
    assert world.dags.state.dags["d"].held == {}


def test_a_repeated_reason_is_no_news() -> None:
    world = reached("releasing")
    assert kinds(told(world, "releasing", reason="pending_stop")) == ["release_heard"]
    assert told(world, "releasing", reason="pending_stop") == []
    assert kinds(told(world, "releasing", reason="pending_stop", evidence="e")) == ["release_heard"]


def test_a_sandbox_that_never_was_is_abandoned_and_one_that_was_is_not() -> None:
    for evidence in ("never_created", "never_requested"):
        assert kinds(told(reached("intent"), "gone", evidence=evidence)) == ["abandoned"]
        assert kinds(told(reached("assigned"), "gone", evidence=evidence)) == ["release_settled"]


def test_nothing_is_made_of_an_unknown_dag_or_acquisition() -> None:
    world = reached("ready")
    assert told(world, "gone", "other") == []
    assert world.dags.take(Told(dag="e", acquisition="a", sandbox="a", phase="gone")) == []


def test_s031_the_gravest_reason_is_the_verdicts() -> None:
    for worst, reason in enumerate(verdict.REASONS):
        dag = Dag(id="d")
        for number, other in enumerate(verdict.REASONS[worst:]):
            dag.acquisitions[str(number)] = Acquisition(
                id=str(number),
                slot="",
                sandbox=str(number),
                adopted=False,
                phase="releasing",
                reason=other,
                evidence=other,
            )
        found = verdict.judge(dag)
        assert found == ("unconfirmed", reason, reason, len(verdict.REASONS) - worst)


@pytest.mark.parametrize(
    ("phase", "reason", "want"),
    [
        ("intent", "", "acquiring"),
        ("requested", "", "acquiring"),
        ("assigned", "", "acquiring"),
        ("ready", "", "held"),
        ("releasing", "", "pending_shard"),
        ("releasing", "shared", "shared"),
        ("releasing", "a word of a later version", "a word of a later version"),
    ],
)
def test_s119_every_phase_has_its_reason(phase: Any, reason: str, want: str) -> None:
    one = Acquisition(id="a", slot="", sandbox="a", adopted=False, phase=phase, reason=reason)
    assert verdict.reason_of(one) == want
    other = Acquisition(id="b", slot="", sandbox="b", adopted=False, phase="ready")
    dag = Dag(id="d", acquisitions={"b": other, "a": one})
    assert verdict.judge(dag).reason == want


def test_s032_nothing_held_is_not_confirmed() -> None:
    assert verdict.judge(Dag(id="d")).verdict == "nothing_held"
    assert verdict.judge(Dag(id="d", abandoned=3)).verdict == "nothing_held"
    assert verdict.judge(Dag(id="d", held_ever=1)).verdict == "confirmed"


def test_the_weakest_evidence_stands_for_all() -> None:
    for order in (("stop_accepted", "observed_gone"), ("observed_gone", "stop_accepted")):
        world = reached("ready")
        world.ask("d", "b", do="acquire", slot="t")
        told(world, "gone", evidence=order[0])
        told(world, "gone", "b", evidence=order[1])
        assert verdict.judge(world.dags.state.dags["d"]).evidence == "stop_accepted"


def test_s034_s036_a_repeated_cancel_answers_from_the_same_state() -> None:
    world = reached("ready")
    world.ask("d", "x", do="cancel", bound_ms=0)
    world.dags.tick()
    world.ask("d", "y", do="cancel", bound_ms=0)
    world.dags.tick()
    assert [x.verdict for x in world.answers("d")] == ["unconfirmed"] * 2
    told(world, "gone", evidence="observed_gone")
    world.dags.tick()
    world.ask("d", "z", do="cancel")
    world.dags.tick()
    late, last = world.answers("d")[2:]
    assert (late.verdict, late.cancel) == ("confirmed", "")
    assert (last.verdict, last.cancel, last.evidence) == ("confirmed", "z", "observed_gone")


def test_a_changed_verdict_is_made_public_once() -> None:
    world = reached("ready")
    world.ask("d", "x", do="cancel", bound_ms=0)
    world.dags.tick()
    for reason in ("pending_stop", "pending_stop", "stop_accepted"):
        told(world, "releasing", reason=reason, evidence="e")
        world.dags.tick()
    told(world, "releasing", reason="stop_accepted", evidence="other")
    world.dags.restart()
    world.dags.tick()
    assert [(x.reason, x.cancel) for x in world.answers("d")] == [
        ("pending_shard", "x"),
        ("pending_stop", ""),
        ("stop_accepted", ""),
    ]
    told(world, "gone", evidence="observed_gone")
    world.dags.tick()
    world.dags.restart()
    world.dags.tick()
    assert [x.verdict for x in world.answers("d")].count("confirmed") == 1


@pytest.mark.parametrize(
    ("reason", "at_once"),
    [("shared", True), ("retained", True), ("pending_stop", False), ("stop_accepted", False)],
)
def test_what_others_decide_is_not_waited_for(reason: str, at_once: bool) -> None:
    world = reached("ready")
    world.ask("d", "x", do="cancel")
    world.dags.tick()
    told(world, "releasing", reason=reason)
    world.dags.tick()
    assert bool(world.answers("d")) is at_once
    world.advance(5_000)
    world.dags.tick()
    assert only(world.answers("d")).reason == reason


def end(world: World, dag: str) -> None:
    world.ask(dag, "o", do="open", nodes=["n"])
    world.ask(dag, f"{dag}-a", do="acquire", slot="s")
    fields = {"dag": dag, "acquisition": f"{dag}-a", "sandbox": f"{dag}-a"}
    world.dags.take(Told(phase="assigned", ref=REF, **fields))
    world.ask(dag, "x", do="cancel")
    world.dags.tick()
    world.dags.take(Told(phase="gone", evidence="observed_gone", **fields))
    world.dags.tick()


def test_s065_ended_dags_leave_memory_and_still_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DAGS_ENDED_WHOLE", 2)
    monkeypatch.setattr(limits, "DAGS_ENDED_REMEMBERED", 2)
    names = [f"01ARZ3NDEKTSV4RRFFQ69G5FA{n}" for n in range(5)]
    world = World()
    for name in names:
        end(world, name)
    state = world.dags.state
    assert (list(state.dags), list(state.past)) == (names[3:], names[1:3])
    world.dags.restart()
    state = world.dags.state
    answer = only(world.ask(names[1], "late", do="cancel"))
    assert (answer.verdict, answer.evidence, answer.cancelled) == ("confirmed", "observed_gone", 1)
    view = world.dags.machine.view_dag(state, names[1])
    assert (view["released"], view["held_ever"], view["closed"]) == ("confirmed", 1, True)
    assert set(view) == set(world.dags.machine.view_dag(state, names[4]))
    assert only(world.ask(names[1], "o9", do="open")).reason == "dag_exists"
    assert only(world.ask(names[1], "s", do="start", node="n")).reason == "dag_closed"
    for content in ({"do": "finish"}, {"do": "finish_node", "node": "n"}):
        assert world.ask(names[1], "f", **content) == []
    assert world.dags.machine.view_dag(state, names[0]) is None
    for content in ({"do": "cancel"}, {"do": "open"}):
        assert only(world.ask(names[0], "late", **content)).reason == "too_old"
    assert only(world.ask("never", "late", do="cancel")).reason == "unknown_dag"


def test_a_dag_with_a_cancel_to_answer_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DAGS_ENDED_WHOLE", 1)
    world = World()
    end(world, "one")
    world.ask("two", "o", do="open")
    world.ask("two", "x", do="cancel")
    world.ask("one", "y", do="cancel")
    world.dags.tick()
    assert world.answers("two")
    assert [x.cancel for x in world.answers("one")][-1] == "y"
    assert len(world.dags.state.dags) == 1


def test_a_verdict_that_a_former_owner_did_not_give_is_given_by_the_next() -> None:
    world = reached("ready")
    world.ask("d", "f", do="finish")
    world.dags.tick()
    told(world, "gone", evidence="observed_gone")
    world.dags.restart()
    world.dags.tick()
    assert world.answers("d")[-1].verdict == "confirmed"


def test_s212_ten_thousand_acquisitions_over_a_life_leave_counters_only() -> None:
    world = reached("ready")
    small = len(world.dags.machine.encode_state(world.dags.state))
    for number in range(10_000):
        name = f"a{number}"
        world.ask("d", name, do="acquire", slot="t")
        told(world, "gone", name, evidence="observed_gone")
    dag = world.dags.state.dags["d"]
    assert (dag.held_ever, dag.gone, len(dag.acquisitions)) == (10_001, 10_000, 1)
    assert len(world.dags.machine.encode_state(world.dags.state)) < small + 50
    world.dags.entries.clear()
    world.dags.messages.clear()


def test_a_cancel_of_ten_thousand_goes_on_in_bounded_turns() -> None:
    world = World()
    world.ask("d", "o", do="open")
    for number in range(10_000):
        world.ask("d", f"a{number}", do="acquire", slot=str(number))
    world.dags.sizes.clear()
    world.ask("d", "x", do="cancel", bound_ms=0)
    world.dags.take(world.dags.machine.tick())
    assert len(world.dags.of_kind(d.ReleaseBegun)) == limits.RELEASES_PER_TURN
    world.dags.restart()
    world.dags.tick()
    assert len(world.dags.of_kind(d.ReleaseBegun)) == 10_000
    assert max(world.dags.sizes) < limits.INPUT_ENTRIES_BYTES_MAX
    assert only(world.answers("d")).outstanding == 10_000
