"""The gate of appends: few at once, first come first served, and no holder stops the others."""

from __future__ import annotations

import asyncio

import pytest
from fencepost.runtime import gate
from fencepost.runtime.gate import Gate, Pass


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_whoever_comes_above_the_places_waits_in_order() -> None:
    door = Gate(2)
    entered: list[str] = []

    async def enter(name: str) -> Pass:
        place = await door.enter()
        entered.append(name)
        return place

    tasks = [asyncio.create_task(enter(name)) for name in "abcd"]
    await turns()
    assert entered == ["a", "b"]
    (await tasks[0]).give_back()
    await turns()
    assert entered == ["a", "b", "c"]
    for task in (tasks[1], tasks[2]):
        (await task).give_back()
    (await tasks[3]).give_back()
    assert entered == ["a", "b", "c", "d"]


async def test_a_place_given_back_twice_is_one_place() -> None:
    door = Gate(1)
    first = await door.enter()
    first.give_back()
    first.give_back()
    second = await door.enter()
    third = asyncio.create_task(door.enter())
    await turns()
    assert not third.done()
    second.give_back()
    (await third).give_back()


async def test_a_holder_that_gets_no_answer_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "PATIENCE_S", 0.01)
    door = Gate(1)
    stuck = await door.enter()
    async with asyncio.timeout(5):
        following = await door.enter()
    following.give_back()
    stuck.give_back()
    assert door.free == 1


async def test_a_cancelled_waiter_takes_no_place_with_it() -> None:
    door = Gate(1)
    holder = await door.enter()
    waiters = [asyncio.create_task(door.enter()) for _ in range(2)]
    await turns()
    # The first is cancelled in the very turn in which it was given the place.
    holder.give_back()
    waiters[0].cancel()
    async with asyncio.timeout(5):
        (await waiters[1]).give_back()
    assert door.free == 1
