"""Every command of a DAG with its refusals; each refusal beside a control that differs in one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fencepost.core import limits
from fencepost.core.dag import deciding, evolve
from fencepost.core.dag import entries as d
from fencepost.core.dag.machine import DagMachine
from fencepost.core.errors import PoisonedError
from fencepost.core.machine import Place
from fencepost.core.shard_messages import Told

from tests.factories import kinds, only
from tests.properties.dag_world import Shard, World

SLOTS = (
    "",
    "0",
    "token",
    "items",
    "get",
    "self",
    "__class__",
    "__dict__",
    "__proto__",
    "model_config",
    "🦀",
    "café",
    "cafe\u0301",
    "a.b.*.>",
    "two words\nand a line",
    "\x00",
    "x" * limits.NAME_BYTES_MAX,
)


def opened(*nodes: str) -> World:
    world = World()
    assert kinds(world.ask("d", "o", do="open", nodes=list(nodes))) == ["opened"]
    return world


def refusal(entries: list[Any]) -> tuple[str, str]:
    entry = only(entries)
    assert isinstance(entry, d.Refused), entry
    return entry.reason, entry.field


def told(world: World, acquisition: str, phase: str, **more: Any) -> list[Any]:
    fields = {"dag": "d", "acquisition": acquisition, "sandbox": acquisition, **more}
    return world.dags.take(Told(phase=phase, **fields))  # type: ignore[arg-type]


def test_s076_slots_of_any_text_are_values_and_stay_apart() -> None:
    world = opened()
    for number, slot in enumerate(SLOTS):
        made = world.ask("d", f"a{number}", do="acquire", slot=slot)
        assert kinds(made) == ["intended"], (slot, made)
    dag = world.dags.state.dags["d"]
    assert {slot: dag.slots[slot] for slot in SLOTS} == {s: f"a{n}" for n, s in enumerate(SLOTS)}
    world.dags.restart()
    assert list(world.dags.state.dags["d"].slots) == list(SLOTS)
    for number, slot in enumerate(SLOTS):
        made = world.ask("d", f"r{number}", do="release", slot=slot)
        assert [x.acquisition for x in made] == [f"a{number}"]


def test_s058_a_slot_named_token_is_shown() -> None:
    world = opened()
    world.ask("d", "a", do="acquire", slot="token")
    view = world.dags.machine.view_dag(world.dags.state, "d")
    assert [x["slot"] for x in view["outstanding"]] == ["token"]


def test_a_slot_that_is_too_long_is_refused_by_name() -> None:
    world = opened()
    long = "é" * (limits.NAME_BYTES_MAX // 2 + 1)
    assert refusal(world.ask("d", "a", do="acquire", slot=long)) == ("out_of_range", "slot")
    assert refusal(world.ask("d", "b", do="acquire", slot="x" * 10_240))[1] == "slot"
    assert kinds(world.ask("d", "c", do="acquire", slot=long[:-1])) == ["intended"]


def test_open_again_is_the_same_dag_with_the_same_nodes_only() -> None:
    world = opened("a", "b")
    assert world.ask("d", "o2", do="open", nodes=["a", "b"]) == []
    assert refusal(world.ask("d", "o3", do="open", nodes=["a"])) == ("dag_exists", "nodes")


@pytest.mark.parametrize(
    ("nodes", "ok"),
    [
        (["a", "a"], False),
        (["a", "b"], True),
        ([str(n) for n in range(limits.NODES_PER_DAG_MAX + 1)], False),
        ([str(n) for n in range(limits.NODES_PER_DAG_MAX)], True),
        (["x" * (limits.NAME_BYTES_MAX + 1)], False),
    ],
)
def test_nodes_are_named_once_and_within_bounds(nodes: list[str], ok: bool) -> None:
    made = World().ask("d", "o", do="open", nodes=nodes)
    assert (kinds(made) == ["opened"]) is ok
    if not ok:
        assert refusal(made) == ("out_of_range", "nodes")


@pytest.mark.parametrize(
    "content",
    [
        {"do": "start", "node": "a"},
        {"do": "finish_node", "node": "a"},
        {"do": "acquire", "slot": "s"},
        {"do": "adopt", "slot": "s", "sandbox": "x"},
        {"do": "release", "slot": "s"},
        {"do": "cancel"},
        {"do": "finish"},
    ],
)
def test_s164_an_unknown_dag_is_refused_and_nothing_is_torn_down(content: Any) -> None:
    world = World()
    assert refusal(world.ask("d", "c1", **content)) == ("unknown_dag", "dag")
    assert not world.dags.messages
    world.ask("d", "o", do="open", nodes=["a"])
    made = world.ask("d", "c2", **content)
    assert content["do"] == "release" or not isinstance(made[0], d.Refused)


def test_another_shards_dag_is_refused() -> None:
    machine = DagMachine()
    state = machine.initial(1, 4)
    for do in ({"do": "open"}, {"do": "cancel"}):
        value = machine.decode("commands", "x.dag.d.c", msgspec.json.encode(do))[0]
        assert machine.decide(state, machine.new_hints(), value, 0)[0].reason == "misrouted"


@pytest.mark.parametrize(
    ("subject", "data", "reason", "field"),
    [
        ("x.dag.a b.c", b'{"do":"open"}', "bad_id", "dag"),
        ("x.dag.d.c\n", b'{"do":"open"}', "bad_id", "id"),
        ("x.dag.d.c", b"null", "malformed", ""),
        ("x.dag.d.c", b'{"do":"nothing"}', "malformed", "do"),
        ("x.dag.d.c", b'{"do":"acquire"}', "malformed", "slot"),
        ("x.dag.d.c", b'{"do":"open","more":1}', "malformed", "more"),
        ("x.dag.d.c", b'{"do":"acquire","slot":7}', "malformed", "slot"),
        ("x.dag.d.c", b'{"do":"acquire","slot":"\\ud800"}', "malformed", ""),
        ("x.dag.d.c", b"\xff", "malformed", ""),
        ("x.dag.d.c", b"[" * 100_000, "malformed", ""),
    ],
)
def test_s071_s072_what_cannot_be_read_is_refused_with_its_field(
    subject: str, data: bytes, reason: str, field: str
) -> None:
    shard = Shard(DagMachine())
    entry = only(shard.feed("commands", subject, data))
    assert (entry.reason, entry.field) == (reason, field)
    events = list(shard.machine.events_of(entry))
    assert bool(events) is (" " not in subject)
    assert kinds(shard.feed("commands", "x.dag.d.c", b'{"do":"open"}')) == ["opened"]


def test_a_subject_or_message_of_something_else_is_poison() -> None:
    machine = DagMachine()
    for source, subject, data in (
        ("commands", "x.step.d.c", b"{}"),
        ("commands", "c", b"{}"),
        ("messages", "", b"{}"),
    ):
        with pytest.raises(PoisonedError):
            machine.decode(source, subject, data)
    with pytest.raises(PoisonedError):
        machine.decide(machine.initial(0, 1), machine.new_hints(), object(), 0)
    shard = Shard(machine)
    shard.take(machine.poison("commands", "s", 7, "why"))
    assert shard.state.poisoned == 1


def test_nodes_start_once_and_end_once() -> None:
    world = opened("a", "b")
    assert kinds(world.ask("d", "1", do="start", node="a")) == ["node_started"]
    assert world.ask("d", "2", do="start", node="a") == []
    assert refusal(world.ask("d", "3", do="start", node="z")) == ("unknown_node", "node")
    assert refusal(world.ask("d", "4", do="finish_node", node="z")) == ("unknown_node", "node")
    assert kinds(world.ask("d", "5", do="finish_node", node="a")) == ["node_finished"]
    assert world.ask("d", "6", do="finish_node", node="a") == []
    for status in ("running", "waiting", "", "x" * 65):
        made = world.ask("d", f"7{len(status)}", do="finish_node", node="b", status=status)
        assert refusal(made) == ("out_of_range", "status")
    assert kinds(world.ask("d", "8", do="finish_node", node="b", status="failed")) == [
        "node_finished"
    ]


def test_s115_s162_a_node_releases_the_slots_that_it_names_and_no_others() -> None:
    world = opened("a")
    for slot in ("s", "t"):
        world.ask("d", slot, do="acquire", slot=slot)
    made = world.ask("d", "f", do="finish_node", node="a", release=["s", "s", "none"])
    assert kinds(made) == ["node_finished", "release_begun"]
    assert [x.phase for x in world.dags.state.dags["d"].acquisitions.values()] == [
        "releasing",
        "intent",
    ]


def test_a_node_releases_a_bounded_number_of_slots() -> None:
    world = opened("a")
    many = [str(n) for n in range(limits.RELEASES_PER_TURN + 1)]
    made = world.ask("d", "f", do="finish_node", node="a", release=many)
    assert refusal(made) == ("out_of_range", "release")
    made = world.ask("d", "g", do="finish_node", node="a", release=many[1:])
    assert kinds(made) == ["node_finished"]


@pytest.mark.parametrize("spec", [{"memory_mb": 1}, {"processes": 0}])
def test_a_spec_out_of_bounds_is_refused_before_the_intent(spec: Any) -> None:
    world = opened()
    reason, field = refusal(world.ask("d", "a", do="acquire", slot="s", spec=spec))
    assert (reason, field) == ("out_of_range", f"spec.{next(iter(spec))}")
    assert kinds(world.ask("d", "b", do="acquire", slot="s", spec={"memory_mb": 16})) == [
        "intended"
    ]


def test_s110_s111_a_taken_slot_moves_only_by_replace() -> None:
    world = opened()
    world.ask("d", "a", do="acquire", slot="s")
    assert world.ask("d", "a", do="acquire", slot="s") == []
    assert refusal(world.ask("d", "b", do="acquire", slot="s")) == ("slot_taken", "slot")
    made = world.ask("d", "c", do="acquire", slot="s", replace=True)
    assert kinds(made) == ["intended", "moved", "release_begun"]
    assert [x.acquisition for x in made if isinstance(x, d.ReleaseBegun)] == ["a"]


def test_s088_s109_a_slot_is_absent_at_no_entry_of_a_move() -> None:
    machine = DagMachine()
    state = machine.initial(0, 1)
    hints = machine.new_hints()

    def feed(id_: str, **content: Any) -> list[Any]:
        value = machine.decode("commands", f"x.dag.d.{id_}", msgspec.json.encode(content))[0]
        return list(machine.decide(state, hints, value, 0))

    for number, entry in enumerate(
        [*feed("o", do="open")],
    ):
        evolve.evolve(state, entry, Place(0, number), 0)
    for entry in feed("a", do="acquire", slot="s"):
        evolve.evolve(state, entry, Place(1, 0), 0)
    seen = []
    for number, entry in enumerate(feed("b", do="acquire", slot="s", replace=True)):
        evolve.evolve(state, entry, Place(2, number), 0)
        seen.append(state.dags["d"].slots["s"])
    assert seen == ["a", "b", "b"]
    told_gone = deciding.told(
        state, Told(dag="d", acquisition="a", sandbox="a", phase="gone", evidence="observed_gone")
    )
    evolve.evolve(state, only(told_gone), Place(3, 0), 0)
    assert state.dags["d"].slots == {"s": "b"}


def test_one_dag_holds_a_sandbox_once() -> None:
    world = opened()
    world.ask("d", "a", do="adopt", slot="s", sandbox="x")
    for slot, replace in (("s", True), ("t", False)):
        made = world.ask("d", f"b{slot}", do="adopt", slot=slot, sandbox="x", replace=replace)
        assert refusal(made) == ("already_held", "sandbox")
    assert kinds(world.ask("d", "c", do="adopt", slot="t", sandbox="y")) == ["intended"]
    world.ask("d", "r", do="release", slot="s")
    made = world.ask("d", "e", do="adopt", slot="s", sandbox="x", replace=True)
    assert kinds(made) == ["intended", "moved"]


def test_s152_an_adoption_names_a_sandbox_by_its_id() -> None:
    world = opened()
    for name in ("", "a.b", "x\n", "y" * 65):
        made = world.ask("d", "a", do="adopt", slot="s", sandbox=name)
        assert refusal(made) == ("bad_id", "sandbox")
    assert kinds(world.ask("d", "a", do="adopt", slot="s", sandbox="x")) == ["intended"]


def test_acquisitions_of_one_dag_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ACQUISITIONS_PER_DAG_MAX", 2)
    world = opened()
    for name in ("a", "b"):
        world.ask("d", name, do="acquire", slot=name)
    assert refusal(world.ask("d", "c", do="acquire", slot="c")) == ("overloaded", "")
    told(world, "a", "gone", evidence="never_created")
    assert kinds(world.ask("d", "c", do="acquire", slot="c")) == ["intended"]


def test_dags_of_one_shard_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = opened()
    monkeypatch.setattr(limits, "DAGS_PER_SHARD_MAX", 1)
    assert refusal(world.ask("e", "o", do="open")) == ("overloaded", "")
    monkeypatch.setattr(limits, "DAGS_PER_SHARD_MAX", 2)
    assert kinds(world.ask("e", "o", do="open")) == ["opened"]


def test_behind_the_barrier_nothing_starts_and_nothing_is_acquired() -> None:
    for closing in ({"do": "cancel"}, {"do": "finish"}):
        world = opened("a")
        assert world.ask("d", "x", **closing)
        for content in (
            {"do": "start", "node": "a"},
            {"do": "acquire", "slot": "s"},
            {"do": "adopt", "slot": "s", "sandbox": "x"},
        ):
            assert refusal(world.ask("d", "c", **content)) == ("dag_closed", "dag")


def test_a_release_of_nothing_is_refused_and_a_second_one_is_the_first() -> None:
    world = opened()
    assert refusal(world.ask("d", "r", do="release", slot="s")) == ("unknown_slot", "slot")
    world.ask("d", "a", do="acquire", slot="s")
    assert kinds(world.ask("d", "r1", do="release", slot="s")) == ["release_begun"]
    assert world.ask("d", "r2", do="release", slot="s") == []


def test_a_cancel_ends_nodes_and_a_finish_does_not() -> None:
    world = opened("a", "b", "c")
    world.ask("d", "1", do="finish_node", node="a")
    world.ask("d", "2", do="start", node="b")
    world.ask("d", "x", do="cancel", bound_ms=0)
    world.dags.tick()
    assert world.dags.state.dags["d"].nodes == {
        "a": "succeeded",
        "b": "cancelled",
        "c": "cancelled",
    }
    assert world.answers("d")[0].cancelled == 2
    other = opened("a")
    assert kinds(other.ask("d", "f", do="finish")) == ["finished", "closed"]
    assert other.ask("d", "f2", do="finish") == []
    other.ask("d", "x", do="cancel")
    other.dags.tick()
    assert other.answers("d")[-1].cancelled == 0


def test_a_cancel_is_answered_once_and_waits_in_bounded_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CANCELS_WAITING_PER_DAG_MAX", 2)
    world = opened()
    world.ask("d", "a", do="acquire", slot="s")
    assert kinds(world.ask("d", "x", do="cancel")) == ["closed"]
    assert world.ask("d", "x", do="cancel") == []
    assert kinds(world.ask("d", "y", do="cancel")) == ["cancel_asked"]
    assert refusal(world.ask("d", "z", do="cancel")) == ("overloaded", "")
    world.advance(5_000)
    world.dags.tick()
    assert [x.cancel for x in world.answers("d")] == ["x", "y"]
    assert world.ask("d", "x", do="cancel") == []
    assert kinds(world.ask("d", "z", do="cancel")) == ["cancel_asked"]


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize(("bound_ms", "until_ms"), [(-5, 0), (300, 300), (10**9, 60_000)])
def test_a_cancel_is_answered_at_its_bound_and_not_before(
    bound_ms: int, until_ms: int, restart: bool
) -> None:
    world = opened()
    world.dags.tick()
    world.ask("d", "a", do="acquire", slot="s")
    world.ask("d", "x", do="cancel", bound_ms=bound_ms)
    if until_ms:
        world.advance(until_ms - 1)
        world.dags.tick()
        assert not world.answers("d")
        if restart:
            world.dags.restart()
            world.dags.tick()
        assert not world.answers("d")
        world.advance(1)
    world.dags.tick()
    answer = only(world.answers("d"))
    assert (answer.verdict, answer.reason, answer.cancel) == ("unconfirmed", "pending_shard", "x")


def test_many_cancels_and_a_long_reason_fit_their_batches() -> None:
    world = opened()
    for number in range(300):
        world.ask("d", f"a{number}", do="acquire", slot=str(number))
    for number in range(900):
        world.ask("d", f"{'x' * 50}{number}", do="cancel", reason="\x01" * 5_000, bound_ms=10)
    world.advance(10)
    world.dags.tick()
    assert len(world.answers("d")) == 900
    assert max(world.dags.sizes) < limits.INPUT_ENTRIES_BYTES_MAX
