"""Acquire, adopt, replace and release against a cancel at every step between them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from fencepost.core import facts
from fencepost.core.sandbox import entries as e

from tests.properties.dag_world import FAULTS, World


def acquire(world: World) -> None:
    world.later("d1", "a1", do="acquire", slot="items")


def adopt(world: World) -> None:
    """Another DAG's warm sandbox; that DAG ends meanwhile, so the adoption races its release."""
    world.ask("other", "o1", do="open")
    world.ask("other", "warm", do="acquire", slot="w")
    world.settle(rounds=6)
    world.later("d1", "a1", do="adopt", slot="items", sandbox="warm")
    world.later("other", "f1", do="finish")


def replace(world: World) -> None:
    world.ask("d1", "a0", do="acquire", slot="items")
    world.settle(rounds=6)
    world.later("d1", "a1", do="acquire", slot="items", replace=True)


def release(world: World) -> None:
    world.ask("d1", "a0", do="acquire", slot="items")
    world.ask("d1", "a2", do="acquire", slot="other")
    world.settle(rounds=6)
    world.later("d1", "r1", do="release", slot="items")
    world.later("d1", "a3", do="acquire", slot="items", replace=True)


def rebuild(world: World) -> None:
    """The sandbox vanishes behind everybody's back, and its next generation is on its way."""
    world.ask("d1", "a0", do="acquire", slot="items")
    world.settle(rounds=6)
    thing = world.running.pop("a0")
    world.boxes.take(facts.Gone(sandbox="a0", gateway="gw1", ref=thing.ref))


SCRIPTS = (acquire, adopt, replace, release, rebuild)


def run(
    script: Callable[[World], None], fault: str, seed: int, cancel_at: int
) -> tuple[World, int]:
    """Runs a script with everything in a random order; cancels after so many steps."""
    world = World(fault=fault, luck=Random(seed + 1))
    world.ask("d1", "o1", do="open", nodes=["n"])
    world.fault = "none"
    script(world)
    world.fault = fault
    pick = Random(seed)
    steps = 0
    while steps != cancel_at and steps < 120 and world.step(pick):
        steps += 1
        if steps % 25 == 0:
            world.advance(2_000)
    world.ask("d1", "x1", do="cancel", bound_ms=200)
    for number in range(60):
        if number % 10 == 0:
            world.advance(300)
        if number == 30:
            world.dags.restart()
            world.boxes.restart()
            world.see()
        world.step(pick)
    for name in list(world.dags.state.dags):
        world.ask(name, "last", do="cancel")
    world.settle()
    world.check_end()
    return world, steps


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_s190_s038_a_cancel_at_every_step_never_lies_and_leaves_nothing(
    script: Callable[[World], None], fault: str
) -> None:
    _, steps = run(script, fault, 1, -1)
    assert steps > 3, "the script was not entered"
    for at in range(min(steps, 40) + 1):
        world, _ = run(script, fault, 1 + at % 2, at)
        assert world.answers("d1")[-1].verdict in ("confirmed", "nothing_held")


def two_holders(seed: int) -> World:
    world = World()
    for name in ("a", "b"):
        world.ask(name, "o", do="open")
    world.ask("a", "x", do="acquire", slot="s")
    world.settle(rounds=6)
    world.ask("b", "y", do="adopt", slot="s", sandbox="x")
    world.settle(rounds=2)
    world.later("a", "ca", do="cancel", bound_ms=5_000)
    world.later("b", "cb", do="cancel", bound_ms=5_000)
    if seed % 2:
        world.commands.reverse()
    pick = Random(seed)
    while world.step(pick):
        pass
    world.settle(rounds=3)
    return world


def test_s099_two_last_holders_in_a_thousand_interleavings_stop_it_once() -> None:
    for seed in range(1_000):
        world = two_holders(seed)
        assert len(world.boxes.of_kind(e.Releasing)) == 1
        assert set(world.stops) == {"x"}
        world.check_end()
        assert {x.verdict for x in (world.answers("a")[-1], world.answers("b")[-1])} == {
            "confirmed"
        }


@pytest.mark.parametrize("seed", range(64))
def test_s097_s126_many_dags_share_and_claim_in_any_order(seed: int) -> None:
    """Three DAGs, adoptions, replacements and a claim, in any order and with every fault."""
    pick = Random(seed)
    world = World(fault=FAULTS[seed % len(FAULTS)], luck=Random(seed), fault_rate=0.3)
    names = ("d1", "d2", "d3")
    for name in names:
        world.ask(name, "o", do="open", nodes=["n"])
    boxes = ["d1-0"]
    claimed: set[tuple[str, str]] = set()
    for number in range(60):
        name = pick.choice(names)
        kind = pick.randrange(12)
        slot = pick.choice(("", "items", "token"))
        if kind == 0:
            boxes.append(f"{name}-{number}")
            world.later(name, boxes[-1], do="acquire", slot=slot, replace=pick.random() < 0.7)
        elif kind == 1:
            box = pick.choice(boxes)
            world.later(
                name, f"ad{number}", do="adopt", slot=slot, sandbox=box, replace=pick.random() < 0.7
            )
        elif kind == 2:
            world.later(name, f"r{number}", do="release", slot=slot)
        elif kind == 3 and number > 30:
            world.later(name, f"x{number}", do="cancel", bound_ms=pick.choice((0, 500)))
        elif kind == 4:
            box = pick.choice(boxes)
            made = world.tell_box("claim", box, f"c{number}", reason="work")
            if any(isinstance(x, e.Claimed) for x in made):
                claimed.add((box, f"c{number}"))
        elif kind == 5 and claimed:
            box, claim = pick.choice(sorted(claimed))
            claimed.discard((box, claim))
            world.tell_box("unclaim", box, claim)
        elif kind == 6:
            world.advance(pick.choice((100, 1_000, 7_000)))
        elif kind == 7:
            pick.choice((world.dags, world.boxes)).restart()
            world.see()
        for _ in range(4):
            world.step(pick)
    world.settle()
    for name in names:
        world.ask(name, "last", do="cancel", bound_ms=1_000)
    for box, claim in sorted(claimed):
        world.tell_box("unclaim", box, claim)
    world.settle()
    world.check_end()
