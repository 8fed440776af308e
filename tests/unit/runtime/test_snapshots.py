"""A snapshot is a cache: whatever is wrong with one, the state equals the fold of the whole log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from fencepost.core.errors import LedgerBrokenError
from fencepost.runtime import snapshots

from tests.contracts import until
from tests.memory import MemoryLog
from tests.toy import Input, State, ToyMachine
from tests.unit.runtime.rig import Rig, add, crash_at, state_of


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.close()


class CountingMachine(ToyMachine):
    """Counts what is folded, so that a test can see where the fold began."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.evolved = 0

    def evolve(self, *args: Any) -> None:
        self.evolved += 1
        super().evolve(*args)


async def history(rig: Rig, count: int = 30, every: int = 10) -> State:
    """Two snapshots, and a tail that records them."""
    runner = await rig.own("a", snapshot_every=every)
    for number in range(count):
        runner.submit(add(f"k{number % 7}", number))
        await rig.settle(runner)
    await until(lambda: not runner._snapshot_busy)
    runner.submit(Input(do="open", key="t1"))
    await rig.settle(runner)
    state = await state_of(runner)
    await runner.stop(hand_over=False)
    assert len(rig.snapshots.stored) == 2
    return state


def spoil(rig: Rig, how: Callable[[bytes], bytes], which: int = -1) -> None:
    name = sorted(rig.snapshots.stored)[which]
    rig.snapshots.stored[name] = how(rig.snapshots.stored[name])


async def test_an_owner_starts_from_the_newest_snapshot(rig: Rig) -> None:
    before = await history(rig)
    machine = CountingMachine()
    runner = await rig.own("b", machine=machine)
    after = await state_of(runner)
    assert machine.evolved <= 6
    assert after.terms == [*before.terms, 2]
    assert (after.sums, after.tasks) == (before.sums, before.tasks)
    assert ("b", "t1") in rig.performed


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (lambda data: data[: len(data) // 2], "torn"),
        (lambda data: data[:-3] + b"xxx", "corrupt"),
        (lambda data: b"", "empty"),
    ],
)
async def test_s218_a_spoilt_snapshot_is_ignored_and_the_former_is_used(
    rig: Rig, how: Callable[[bytes], bytes], why: str
) -> None:
    before = await history(rig)
    spoil(rig, how)
    machine = CountingMachine()
    after = await state_of(await rig.own("b", machine=machine))
    assert 10 < machine.evolved < 18, why
    assert (after.sums, after.tasks, after.times[:-1]) == (before.sums, before.tasks, before.times)


async def test_s218_without_any_good_snapshot_the_fold_starts_at_the_first_entry(rig: Rig) -> None:
    before = await history(rig)
    spoil(rig, lambda data: data[:10], 0)
    spoil(rig, lambda data: data[:10], 1)
    machine = CountingMachine()
    after = await state_of(await rig.own("b", machine=machine))
    assert machine.evolved > 30
    assert (after.sums, after.places[:-1]) == (before.sums, before.places)


async def test_s218_a_former_snapshot_that_was_changed_is_not_used_either(rig: Rig) -> None:
    """It can be read, and says something else: only its digest tells."""
    before = await history(rig)
    spoil(rig, lambda data: data[:10])
    spoil(rig, lambda data: data.replace(b'"k0":', b'"k9":', 1), 0)
    machine = CountingMachine()
    after = await state_of(await rig.own("b", machine=machine))
    assert machine.evolved > 30
    assert after.sums == before.sums


async def test_s218_a_snapshot_of_another_version_is_ignored(rig: Rig) -> None:
    before = await history(rig)
    machine = CountingMachine(version=2)
    after = await state_of(await rig.own("b", machine=machine))
    assert machine.evolved > 30
    assert after.sums == before.sums


async def test_s218_a_snapshot_newer_than_the_log_is_ignored(rig: Rig) -> None:
    """The log's end was lost with a disk; the snapshot of what was in it was not."""
    await history(rig)
    cut = rig.batches()[:-15]
    subject = rig.log.messages[0][0]
    shorter = MemoryLog(rig.clock)
    shorter.messages = [(subject, msgspec.json.encode(batch), 0) for batch in cut]
    newest = max(rig.snapshots.stored)
    last = cut[-1]
    # Even when a batch recorded it.
    parsed = snapshots.parse_name(newest)
    assert parsed is not None and parsed[0] > len(cut)
    shorter.messages[-1] = (
        subject,
        msgspec.json.encode(msgspec.structs.replace(last, snapshot=snapshots.pointer(*parsed))),
        0,
    )
    whole = CountingMachine()
    runner = await rig.own("b", machine=whole, log=shorter)
    state = await state_of(runner)
    assert len(state.places) == len(cut) + 1
    assert state.places[-1] == [len(cut), 0]


async def test_a_snapshot_that_does_not_decode_is_ignored(rig: Rig) -> None:
    before = await history(rig)

    class Strange(CountingMachine):
        def decode_state(self, data: bytes) -> State:
            raise KeyError("a state that this machine does not know")

    machine = Strange()
    after = await state_of(await rig.own("b", machine=machine))
    assert machine.evolved > 30
    assert after.sums == before.sums


async def test_a_gap_after_a_snapshot_is_noticed(rig: Rig) -> None:
    await history(rig)
    subject = rig.log.messages[0][0]
    at = len(rig.log.messages) - 2
    rig.log.messages[at] = ("elsewhere", *rig.log.messages[at][1:])
    with pytest.raises(LedgerBrokenError, match="follows"):
        await rig.own("b")
    assert subject != "elsewhere"


async def test_a_later_batch_records_the_snapshots_digest(rig: Rig) -> None:
    await history(rig)
    recorded = rig.batches()[-1].snapshot
    seq, _, sha256 = recorded.partition(".")
    data = rig.snapshots.stored[snapshots.name("toy", 0, int(seq), sha256)]
    assert snapshots.digest(data) == sha256
    # The state in it is the fold up to its sequence.
    folded = ToyMachine().initial(0, 4)
    machine = ToyMachine()
    for batch in rig.batches()[: int(seq)]:
        for index, entry in enumerate(machine.decode_entries(bytes(batch.entries))):
            from fencepost.core.machine import Place

            machine.evolve(folded, entry, Place(batch.prev, index), batch.now_ms)
    assert snapshots.decode(data).state == machine.encode_state(folded)


async def test_a_failing_store_is_no_end(rig: Rig) -> None:
    runner = await rig.own("a", snapshot_every=2)

    async def put(name: str, data: bytes) -> None:
        raise OSError("no space")

    rig.snapshots.put = put  # type: ignore[method-assign]
    for number in range(6):
        runner.submit(add("x", number))
        await rig.settle(runner)
    assert runner.is_owner
    assert rig.snapshots.stored == {}


@pytest.mark.parametrize("point", ["before_snapshot", "after_snapshot"])
async def test_a_crash_around_a_snapshot_changes_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    runner = await rig.own("a", snapshot_every=3)
    reached = crash_at(monkeypatch, point)
    for number in range(8):
        runner.submit(add("x", number))
        await rig.settle(runner)
    await until(lambda: reached() == 1)
    await runner.stop(hand_over=False)
    assert (await state_of(await rig.own("b"))).sums == {"x": 28}


async def test_a_hand_over_leaves_a_short_tail(rig: Rig) -> None:
    runner = await rig.own("a")
    for number in range(150):
        runner.submit(add("x", number))
        await rig.settle(runner)
    await runner.stop(hand_over=True)
    machine = CountingMachine()
    after = await state_of(await rig.own("b", machine=machine))
    assert machine.evolved == 1
    assert after.sums == {"x": sum(range(150))}


async def test_events_not_yet_acknowledged_survive_a_snapshot(rig: Rig) -> None:
    runner = await rig.own("a", snapshot_every=5)
    rig.bus.streams["FP_EVENTS"].refuses = True
    for number in range(12):
        runner.submit(add("x", number))
        await rig.settle(runner)
    await until(lambda: not runner._snapshot_busy)
    runner.submit(add("x", 12))
    await rig.settle(runner)
    await runner.stop(hand_over=False)
    rig.bus.streams["FP_EVENTS"].refuses = False
    assert rig.batches()[-1].snapshot
    second = await rig.own("b")
    assert [event["amount"] for event in rig.events()] == list(range(13))
    assert second.shard.events.sent == second.shard.head


async def test_a_gap_below_a_snapshot_is_noticed_where_it_is_read_again(rig: Rig) -> None:
    """Publications that were not acknowledged are made of batches older than the snapshot."""
    runner = await rig.own("a", snapshot_every=8)
    for number in range(4):
        runner.submit(add("x", number))
        await rig.settle(runner)
    rig.bus.streams["FP_EVENTS"].refuses = True
    for number in range(4, 12):
        runner.submit(add("x", number))
        await rig.settle(runner)
    await until(lambda: not runner._snapshot_busy)
    await runner.stop(hand_over=False)
    last = rig.batches()[-1]
    assert 0 < last.sent.events < 7 < int(last.snapshot.partition(".")[0])
    kept = rig.log.messages[6]
    rig.log.messages[6] = ("elsewhere", *kept[1:])
    with pytest.raises(LedgerBrokenError, match="follows"):
        await rig.own("b")
    rig.log.messages[6] = kept
    assert (await state_of(await rig.own("c"))).sums == {"x": 66}
