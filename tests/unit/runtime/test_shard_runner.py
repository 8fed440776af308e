"""The runner: one batch in flight, nothing leaves before it is accepted, nothing counts twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from fencepost.core import limits
from fencepost.core.errors import LedgerBrokenError, OwnershipLostError, UnknownError
from fencepost.runtime import crash, shard_runner
from fencepost.runtime.ports import ClockSkewedError, InputLostError, ReadResult, Unknown

from tests.contracts import until
from tests.memory import ManualClock
from tests.toy import Input, ToyMachine
from tests.unit.runtime.rig import Crash, Rig, add, crash_at, state_of


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.close()


# The plain way.


async def test_an_input_becomes_an_entry_an_effect_and_an_event(rig: Rig) -> None:
    runner = await rig.own("a")
    runner.submit(add("x", 5))
    runner.submit(Input(do="open", key="t1"))
    await rig.settle(runner)
    assert rig.kinds() == ["term_opened", "added", "opened"]
    assert ("a", "t1") in rig.performed
    (event,) = rig.events()
    batch = rig.batches()[1]
    assert event["amount"] == 5
    assert event["position"] == {"shard": 0, "seq": 2, "index": 0}
    assert event["at_ms"] == batch.now_ms
    assert (await state_of(runner)).sums == {"x": 5}


async def test_what_waits_during_an_append_becomes_one_batch(rig: Rig) -> None:
    runner = await rig.own("a")
    for number in range(100):
        runner.submit(add(f"k{number}"))
    await rig.settle(runner)
    assert len(rig.batches()) == 2
    assert len(msgspec.json.decode(rig.batches()[1].entries)) == 100


async def test_a_batch_is_bounded_in_inputs_and_bytes(rig: Rig) -> None:
    runner = await rig.own("a")
    for _ in range(60):
        runner.submit(Input(do="big", size=10_000))
    for number in range(limits.BATCH_INPUTS_MAX * 2):
        rig.put(add(f"k{number}"))
    await rig.settle(runner)
    sizes = [len(payload) for _, payload, _ in rig.log.messages]
    assert max(sizes) <= limits.BATCH_BYTES_MAX
    counts = [len(msgspec.json.decode(batch.entries)) for batch in rig.batches()]
    assert max(counts) <= limits.BATCH_INPUTS_MAX
    assert sum(counts) == 1 + 60 + limits.BATCH_INPUTS_MAX * 2


async def test_places_name_the_batch_before_and_the_index(rig: Rig) -> None:
    runner = await rig.own("a")
    runner.submit(add("x"))
    runner.submit(add("y"))
    await rig.settle(runner)
    assert (await state_of(runner)).places == [[0, 0], [1, 0], [1, 1]]


async def test_one_messages_inputs_may_take_several_batches(rig: Rig) -> None:
    await rig.own("a")
    many = [msgspec.to_builtins(add(f"k{number}")) for number in range(1_300)]
    rig.put(many)
    runner = rig.runners[0]
    await rig.settle(runner)
    assert len((await state_of(runner)).sums) == 1_300
    positions = [batch.positions["IN"].seq for batch in rig.batches()]
    assert positions[-1] == 1
    assert positions[:3] == [0, 0, 0]


async def test_accepted_callbacks_come_after_the_append_with_its_sequence(rig: Rig) -> None:
    runner = await rig.own("a")
    heard: list[int] = []
    seen: list[int] = []
    rig.log.before_append = lambda _s, _p: seen.append(len(heard))
    runner.submit(add("x"), heard.append)
    await rig.settle(runner)
    assert (heard, seen) == ([2], [0])


async def test_hints_make_no_batch(rig: Rig) -> None:
    runner = await rig.own("a")
    assert runner.submit(Input(do="hint", key="h"))
    await rig.settle(runner)
    assert runner.shard.hints == ["h"]
    assert rig.kinds() == ["term_opened"]


# Positions.


async def test_positions_alone_are_recorded_within_a_second(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.put(Input(do="drop"))
    await rig.settle(runner)
    assert len(rig.batches()) == 1
    await rig.pass_time(shard_runner.POSITIONS_LAZY_MS - 1, runner)
    assert len(rig.batches()) == 1
    await rig.pass_time(1, runner)
    assert rig.batches()[-1].positions["IN"].seq == 1
    await rig.pass_time(5_000, runner)
    assert len(rig.batches()) == 2


@pytest.mark.parametrize("point", [
    "before_append", "after_append", "after_effects", "after_events", "after_messages",
    "after_answers",
])  # fmt: skip
async def test_s207_a_crash_anywhere_loses_no_input_and_decides_none_twice(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    assert point in crash.POINTS
    first = await rig.own("a")
    rig.put(add("x"))
    await rig.settle(first)
    reached = crash_at(monkeypatch, point)
    rig.put(add("x"))
    rig.put(Input(do="open", key="t1"))
    assert first._task is not None
    with pytest.raises(Crash):
        await first._task
    assert reached() == 1
    rig.put(add("x"))
    second = await rig.own("b")
    await rig.settle(second)
    state = await state_of(second)
    assert state.sums == {"x": 3}
    assert list(state.tasks) == ["t1"]
    assert ("b", "t1") in rig.performed


async def test_another_incarnation_of_an_input_is_not_owned(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.put(add("x"))
    await rig.settle(runner)
    await runner.stop(hand_over=False)
    rig.bus.streams["IN"].incarnation = "2"
    with pytest.raises(InputLostError):
        await rig.own("b")
    rig.bus.streams["IN"].incarnation = "1"
    assert (await state_of(await rig.own("c"))).sums == {"x": 1}


async def test_an_input_that_is_made_anew_ends_the_ownership(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.put(add("x"))
    await rig.settle(runner)
    rig.bus.streams["IN"].incarnation = "2"
    rig.put(add("x"))
    assert isinstance(await asyncio.wait_for(runner.ended, 10), InputLostError)
    assert rig.kinds() == ["term_opened", "added"]


async def test_a_stream_shorter_than_the_position_is_not_owned(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.put(add("x"))
    rig.put(add("x"))
    await rig.settle(runner)
    await runner.stop(hand_over=False)
    rig.bus.streams["IN"].messages.pop()
    with pytest.raises(InputLostError):
        await rig.own("b")


# Terms.


async def test_s16_two_owners_append_and_one_wins(rig: Rig) -> None:
    first, second = rig.runner("a"), rig.runner("b")
    await first.start()
    await second.start()
    first.submit(add("x", 1))
    second.submit(add("x", 10))
    assert isinstance(await asyncio.wait_for(first.ended, 10), OwnershipLostError)
    await rig.settle(second)
    assert (await state_of(second)).sums == {"x": 10}
    assert [batch.term for batch in rig.batches()] == [1, 2, 2]


async def test_s216_a_deposed_owner_appends_nothing_and_answers_nothing(rig: Rig) -> None:
    first = await rig.own("a")
    first.submit(Input(do="open", key="before"))
    await rig.settle(first)
    second = await rig.own("b")
    answers: list[int] = []
    first.submit(Input(do="open", key="after"), answers.append)
    asked = asyncio.create_task(first.ask(lambda state: state.tasks, max_age_ms=0))
    with pytest.raises(OwnershipLostError):
        await asked
    assert isinstance(await asyncio.wait_for(first.ended, 10), OwnershipLostError)
    assert answers == []
    assert ("a", "after") not in rig.performed
    assert ("a", "before") in rig.performed
    assert not first.submit(add("x"))
    await rig.settle(second)
    assert [batch.term for batch in rig.batches()] == [1, 1, 2]


async def test_s211_an_accepted_batch_with_a_lost_answer_is_recognized(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.log.faults.append("lose")
    runner.submit(add("x"))
    await rig.settle(runner)
    runner.submit(add("x"))
    await rig.settle(runner)
    assert runner.is_owner
    assert (await state_of(runner)).sums == {"x": 2}
    assert rig.kinds() == ["term_opened", "added", "added"]


async def test_s211_a_refusal_of_ones_own_batch_is_read_forward(rig: Rig) -> None:
    """The answer is lost, the read is stale, the repeat is refused: by the own batch."""
    runner = await rig.own("a")
    rig.log.faults.append("lose")
    rig.log.blind_above = 1
    runner.submit(add("x"))
    await until(lambda: rig.log.appends >= 4)
    assert runner.is_owner
    assert len(rig.events()) == 0
    rig.log.blind_above = None
    await rig.settle(runner)
    assert runner.is_owner
    assert rig.kinds() == ["term_opened", "added"]
    assert len(rig.events()) == 1


async def test_an_append_that_never_arrived_is_sent_again(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.log.faults.extend(["drop", "drop"])
    runner.submit(add("x"))
    await rig.settle(runner)
    assert rig.kinds() == ["term_opened", "added"]


async def test_s217_without_the_log_there_is_no_answer(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.log.unreachable = True
    rig.clock.advance(5_000)
    asked = asyncio.create_task(runner.ask(lambda state: "x" in state.sums))
    await until(lambda: rig.log.appends >= 3)
    assert not asked.done()
    rig.log.unreachable = False
    assert await asyncio.wait_for(asked, 10) is False


async def test_s217_an_answer_reads_no_entry_that_is_not_accepted(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.log.unreachable = True
    runner.submit(add("x"))
    await until(lambda: rig.log.appends >= 2)
    asked = asyncio.create_task(runner.ask(lambda state: dict(state.sums)))
    await asyncio.sleep(0.05)
    assert not asked.done()
    second = rig.runner("b")
    rig.log.unreachable = False
    rig.log.faults.extend(["ok"])
    assert await asyncio.wait_for(asked, 10) == {"x": 1}
    await second.stop()


async def test_s227_an_idle_owner_deposed_without_noticing_answers_nothing(rig: Rig) -> None:
    first = await rig.own("a")
    assert await first.ask(lambda state: len(state.sums)) == 0
    await rig.own("b")
    rig.clock.advance(shard_runner.PROOF_MS + 1)
    with pytest.raises(OwnershipLostError):
        await first.ask(lambda state: len(state.sums))


async def test_s227_a_fresh_proof_needs_no_batch_and_an_old_one_makes_one(rig: Rig) -> None:
    runner = await rig.own("a")
    await runner.prove()
    assert len(rig.batches()) == 1
    rig.clock.advance(shard_runner.PROOF_MS + 1)
    await runner.prove()
    assert len(rig.batches()) == 2
    await runner.prove(max_age_ms=-1)
    assert len(rig.batches()) == 3


# Time.


async def test_s228_time_in_the_ledger_never_goes_back(rig: Rig) -> None:
    first = await rig.own("a")
    first.submit(Input(do="timer", key="lease", delay_ms=60_000))
    await rig.settle(first)
    await first.stop()
    behind = ManualClock(rig.clock.wall_ms - 3_000)
    second = await rig.own("b", clock=behind)
    second.submit(add("x"))
    await rig.settle(second)
    times = [batch.now_ms for batch in rig.batches()]
    assert times == sorted(times)
    assert (await state_of(second)).fired == []


@pytest.mark.parametrize("skew_ms", [600_000, -600_000])
async def test_s228_a_clock_far_from_the_servers_may_not_own(rig: Rig, skew_ms: int) -> None:
    first = await rig.own("a")
    first.submit(Input(do="timer", key="lease", delay_ms=60_000))
    await rig.settle(first)
    await first.stop()
    with pytest.raises(ClockSkewedError):
        await rig.own("b", clock=ManualClock(rig.clock.wall_ms + skew_ms))
    assert "fired" not in rig.kinds()
    near = ManualClock(rig.clock.wall_ms + 1_000)
    assert (await state_of(await rig.own("c", clock=near))).fired == []


async def test_a_tick_comes_when_something_is_due_and_not_before(rig: Rig) -> None:
    runner = await rig.own("a")
    runner.submit(Input(do="timer", key="t", delay_ms=1_000))
    await rig.settle(runner)
    await rig.pass_time(999, runner)
    assert "fired" not in rig.kinds()
    await rig.pass_time(1, runner)
    assert rig.kinds().count("fired") == 1


async def test_time_comes_before_the_other_inputs_of_a_batch(rig: Rig) -> None:
    runner = await rig.own("a")
    for name in ("t1", "t2"):
        runner.submit(Input(do="timer", key=name, delay_ms=1_000))
    await rig.settle(runner)
    rig.clock.advance(1_000)
    runner.submit(add("x"))
    await rig.settle(runner)
    assert [e["kind"] for e in msgspec.json.decode(rig.batches()[-1].entries)] == [
        "fired", "fired", "added",
    ]  # fmt: skip


# Effects.


async def test_effects_are_made_again_until_they_are_no_longer_owed(rig: Rig) -> None:
    runner = await rig.own("a")
    runner.submit(Input(do="open", key="t1"))
    await rig.settle(runner)
    assert rig.performed == [("a", "t1")]
    await rig.pass_time(limits.EFFECT_REPEAT_MS - 1, runner)
    assert len(rig.performed) == 1
    await rig.pass_time(1_000, runner)
    assert len(rig.performed) == 2
    await rig.pass_time(limits.EFFECT_REPEAT_MS, runner)
    assert len(rig.performed) == 2
    await rig.pass_time(limits.EFFECT_REPEAT_MS + 1_000, runner)
    assert len(rig.performed) == 3
    runner.submit(Input(do="close", key="t1"))
    await rig.settle(runner)
    await rig.pass_time(60_000, runner)
    assert len(rig.performed) == 3
    assert runner._owed == {}


async def test_a_failing_perform_is_no_end(rig: Rig) -> None:
    calls: list[int] = []

    def perform(effects: list[Any]) -> None:
        calls.append(len(effects))
        raise OSError("no way out")

    runner = await rig.own("a", perform=perform)
    runner.submit(Input(do="open", key="t1"))
    await rig.settle(runner)
    assert runner.is_owner
    await rig.pass_time(limits.EFFECT_REPEAT_MS + 1_000, runner)
    assert calls == [1, 1]


# Poison and bugs.


async def test_s221_a_poison_input_is_recorded_and_passed_over(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.put(add("x"))
    rig.bus.publish("in.0", b"\xff not json")
    rig.put(add("x"))
    await rig.settle(runner)
    refused = [entry for entry in rig.entries() if entry["kind"] == "refused"]
    assert [(entry["reason"], entry["seq"]) for entry in refused] == [("poison", 2)]
    assert (await state_of(runner)).sums == {"x": 2}
    assert rig.batches()[-1].positions["IN"].seq == 3
    assert (
        rig.metrics.registry.get_sample_value("fencepost_inputs_poisoned_total", {"source": "in"})
        == 1
    )


async def test_s221_an_input_on_which_decide_raises_is_poison(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.put(Input(do="raise"))
    runner.submit(Input(do="raise"))
    rig.put(add("x"))
    await rig.settle(runner)
    details = [entry["detail"] for entry in rig.entries() if entry["kind"] == "refused"]
    assert len(details) == 2
    assert all("decide does not like this" in detail for detail in details)
    assert (await state_of(runner)).sums == {"x": 1}


async def test_an_input_with_too_large_entries_is_poison(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.put(Input(do="big", size=limits.INPUT_ENTRIES_BYTES_MAX))
    rig.put(Input(do="big", size=limits.INPUT_ENTRIES_BYTES_MAX - 100))
    await rig.settle(runner)
    assert rig.kinds() == ["term_opened", "refused", "added"]


async def test_an_error_in_evolve_ends_the_ownership_and_appends_nothing(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.put(add("x"))
    await rig.settle(runner)
    runner.submit(add("y"))
    runner.submit(Input(do="explode"))
    error = await asyncio.wait_for(runner.ended, 10)
    assert isinstance(error, shard_runner.EvolveFailedError)
    assert rig.kinds() == ["term_opened", "added"]


async def test_s230_an_overloaded_shard_takes_the_same_input_later(rig: Rig) -> None:
    machine = ToyMachine(capacity=1)
    runner = await rig.own("a", machine=machine)
    rig.put(add("x", id_="s1"))
    rig.put(add("y", id_="s2"))
    await rig.settle(runner)
    assert rig.kinds() == ["term_opened", "added", "refused"]
    machine.capacity = 2
    rig.put(add("y", id_="s2"))
    await rig.settle(runner)
    assert (await state_of(runner)).sums == {"x": 1, "y": 1}


# Old and foreign batches.


async def test_s220_an_unknown_entry_kind_is_not_owned(rig: Rig) -> None:
    runner = await rig.own("a")
    runner.submit(add("x"))
    await rig.settle(runner)
    await runner.stop(hand_over=False)
    subject, payload, at_ms = rig.log.messages[-1]
    rig.log.messages[-1] = (subject, payload.replace(b'"added"', b'"admired"'), at_ms)
    with pytest.raises(LedgerBrokenError, match="admired"):
        await rig.own("b")
    rig.log.messages[-1] = (subject, payload, at_ms)
    assert (await state_of(await rig.own("c"))).sums == {"x": 1}


@pytest.mark.parametrize("change", [
    (b'"v":1', b'"v":2'),
    (b'"prev":1', b'"prev":0'),
    (b'"shard":0', b'"shard":1'),
    (b'"term":1', b'"term":0'),
])  # fmt: skip
async def test_s220_a_batch_that_does_not_fit_is_not_owned(
    rig: Rig, change: tuple[bytes, bytes]
) -> None:
    runner = await rig.own("a")
    runner.submit(add("x"))
    await rig.settle(runner)
    await runner.stop(hand_over=False)
    subject, payload, at_ms = rig.log.messages[-1]
    assert payload.count(change[0]) >= 1
    rig.log.messages[-1] = (subject, payload.replace(*change, 1), at_ms)
    with pytest.raises(LedgerBrokenError):
        await rig.own("b")


async def test_s220_a_newer_machines_shard_is_not_owned_by_an_older_one(rig: Rig) -> None:
    newer = await rig.own("a", machine=ToyMachine(version=2))
    await newer.stop()
    with pytest.raises(LedgerBrokenError, match="machine version 2"):
        await rig.own("b", machine=ToyMachine(version=1))
    await rig.own("c", machine=ToyMachine(version=3))


@pytest.mark.parametrize("missing", [1, 2])
async def test_a_log_that_is_read_short_of_its_end_is_not_owned(rig: Rig, missing: int) -> None:
    """A replica that lags may answer the fold: what it does not have is not folded away."""
    runner = await rig.own("a")
    for name in ("x", "y"):
        runner.submit(add(name))
        await rig.settle(runner)
    await runner.stop(hand_over=False)
    whole = rig.log.read

    async def read(subject: str, from_seq: int) -> AsyncIterator[tuple[int, bytes]]:
        async for seq, payload in whole(subject, from_seq):
            if seq <= len(rig.log.messages) - missing:
                yield seq, payload

    rig.log.read = read  # type: ignore[method-assign]
    before = rig.log.appends
    with pytest.raises(UnknownError, match="the read ended at"):
        await rig.own("b")
    assert rig.log.appends == before
    rig.log.read = whole  # type: ignore[method-assign]
    assert (await state_of(await rig.own("c"))).sums == {"x": 1, "y": 1}


async def test_a_log_whose_end_cannot_be_read_is_not_owned(rig: Rig) -> None:
    runner = await rig.own("a")
    runner.submit(add("x"))
    await rig.settle(runner)
    await runner.stop(hand_over=False)
    end = rig.log.last

    async def unknown(_subject: str) -> ReadResult:
        return Unknown("no answer")

    rig.log.last = unknown  # type: ignore[method-assign]
    before = rig.log.appends
    with pytest.raises(UnknownError, match="no answer"):
        await rig.own("b")
    assert rig.log.appends == before
    rig.log.last = end  # type: ignore[method-assign]
    assert (await state_of(await rig.own("c"))).sums == {"x": 1}


async def test_another_number_of_shards_is_not_owned(rig: Rig) -> None:
    runner = await rig.own("a")
    await runner.stop()
    with pytest.raises(LedgerBrokenError, match="4 shards"):
        await rig.own("b", shards=8)


# Events.


async def test_s222_the_next_owner_publishes_what_the_killed_one_did_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await rig.own("a")
    first.submit(add("x", 1))
    await rig.settle(first)
    reached = crash_at(monkeypatch, "after_append")
    first.submit(add("x", 2))
    assert first._task is not None
    with pytest.raises(Crash):
        await first._task
    assert reached() == 1
    assert [event["amount"] for event in rig.events()] == [1]
    await rig.own("b")
    assert 2 in [event["amount"] for event in rig.events()]
    positions = {tuple(sorted(event["position"].items())) for event in rig.events()}
    assert len(positions) == 2


async def test_events_that_no_stream_took_are_published_again(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.bus.streams["FP_EVENTS"].refuses = True
    runner.submit(add("x", 1))
    await rig.settle(runner)
    rig.bus.streams["FP_EVENTS"].refuses = False
    runner.submit(add("x", 2))
    await rig.settle(runner)
    assert rig.batches()[-1].sent.events < 2
    await rig.pass_time(3_000, runner)
    amounts = [event["amount"] for event in rig.events()]
    assert 1 in amounts
    runner.submit(add("x", 3))
    await rig.settle(runner)
    assert rig.batches()[-1].sent.events >= 3


async def test_events_beyond_the_window_are_read_from_the_ledger_again(rig: Rig) -> None:
    runner = await rig.own("a")
    runner.shard.events._window = 10
    rig.bus.streams["FP_EVENTS"].refuses = True
    for number in range(50):
        runner.submit(add("x", number))
        await rig.settle(runner)
    assert runner.shard.events.waiting == 10
    rig.bus.streams["FP_EVENTS"].refuses = False
    for _ in range(12):
        await rig.pass_time(11_000, runner)
    amounts = [event["amount"] for event in rig.events()]
    assert list(dict.fromkeys(amounts)) == list(range(50))
    assert runner.shard.events.sent == runner.shard.head


async def test_a_stop_hands_over_what_was_read(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.put(Input(do="drop"))
    await rig.settle(runner)
    await runner.stop()
    assert rig.batches()[-1].positions["IN"].seq == 1
    assert await runner.ended is None


async def test_a_stop_while_the_log_is_silent_ends_and_is_no_bug(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = await rig.own("a")
    rig.log.unreachable = True
    runner.submit(add("x"))
    await until(lambda: rig.log.appends >= 2)
    await runner.stop()
    assert isinstance(await runner.ended, UnknownError)
    said = capsys.readouterr()
    assert "ownership_ended_unproven" in said.out + said.err
    assert "Traceback" not in said.out + said.err
    assert not runner.submit(add("y"))


async def test_s201_of_two_inputs_in_one_batch_the_second_sees_the_first(rig: Rig) -> None:
    runner = await rig.own("a")
    runner.submit(add("x", 1, id_="same"))
    runner.submit(add("x", 1, id_="same"))
    runner.submit(add("x", 1, id_="other"))
    await rig.settle(runner)
    entries = msgspec.json.decode(rig.batches()[1].entries)
    assert [entry["id"] for entry in entries] == ["same", "other"]
    assert len(rig.batches()) == 2


async def test_a_flood_of_volatile_inputs_starves_no_durable_one(rig: Rig) -> None:
    runner = await rig.own("a")
    rig.log.unreachable = True
    runner.submit(add("first"))
    await until(lambda: rig.log.appends >= 2)
    for _ in range(400):
        runner.submit(Input(do="big", size=20_000))
    for number in range(40):
        rig.put(add(f"k{number}"))
    rig.log.unreachable = False
    await rig.settle(runner)
    assert rig.kinds().count("added") == 441
    # Long before the flood was through.
    positions = [batch.positions["IN"].seq for batch in rig.batches()]
    assert positions.index(40) < len(positions) // 4


async def test_entries_are_counted_by_kind(rig: Rig) -> None:
    runner = await rig.own("a")
    runner.submit(add("x"))
    runner.submit(Input(do="open", key="t"))
    await rig.settle(runner)
    await rig.pass_time(1_000, runner)
    value = rig.metrics.registry.get_sample_value
    assert value("fencepost_entries_total", {"kind": "added"}) == 1
    assert value("fencepost_entries_total", {"kind": "opened"}) == 1
    assert value("fencepost_batches_total") == 2


async def test_no_two_ownerships_of_one_owner_make_a_batch_of_one_id(rig: Rig) -> None:
    # One that folded a stale read opens its former term once more, and counts its batches anew.
    first = await rig.own("a", 0)
    opened = rig.batches(0)[-1]
    await first.stop(hand_over=False)
    second = await rig.own("a", 0)
    second.shard.term, second._batches = opened.term, 0
    again = second._batch(shard_runner._Turn(opened.now_ms))
    assert (again.owner, again.term) == (opened.owner, opened.term)
    assert again.id != opened.id
