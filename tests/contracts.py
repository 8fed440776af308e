"""
What every log, bus and durable input must do, written once and inherited by memory and server.

A form that is stricter or kinder than the real server would test itself. One thing cannot be asked
of a single real server and is asked of the memory alone: a paused old leader's stale read, which
answers with the old head after the new leader has acknowledged a write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fencepost.contracts.messages import Position
from fencepost.core import ids
from fencepost.core.errors import UnknownError
from fencepost.runtime.ports import (
    Absent,
    AppendRefused,
    AppendUnknown,
    Bus,
    InputLostError,
    InputMessage,
    Inputs,
    Log,
    Unknown,
    Valid,
)

S0 = "fp.v1.ledger.toy.0"
S1 = "fp.v1.ledger.toy.1"


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for a condition; generous, because it only bounds a failure."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition was never met"
        await asyncio.sleep(0.005)


class LogContract:
    """Offer fixtures `log` and `missing_log` (of a stream that does not exist)."""

    async def test_an_append_on_the_expected_head_is_accepted(self, log: Log) -> None:
        first = await log.append(S0, b"a", 0)
        second = await log.append(S0, b"b", first)
        assert 0 < first < second

    async def test_s16_of_two_appends_on_one_head_one_wins(self, log: Log) -> None:
        head = await log.append(S0, b"a", 0)
        won = await log.append(S0, b"mine", head)
        with pytest.raises(AppendRefused) as refused:
            await log.append(S0, b"theirs", head)
        assert refused.value.last in (won, None)
        there = await log.next_after(S0, head)
        assert isinstance(there, Valid)
        assert (there.seq, there.payload) == (won, b"mine")

    async def test_another_subject_has_a_head_of_its_own(self, log: Log) -> None:
        first = await log.append(S0, b"a", 0)
        other = await log.append(S1, b"b", 0)
        assert await log.append(S0, b"c", first) > other

    async def test_an_append_above_the_head_is_refused(self, log: Log) -> None:
        first = await log.append(S0, b"a", 0)
        with pytest.raises(AppendRefused):
            await log.append(S0, b"b", first + 5)
        assert isinstance(await log.next_after(S0, first), Absent)

    async def test_s68_last_of_an_empty_subject_is_absent(self, log: Log) -> None:
        await log.append(S1, b"other", 0)
        assert isinstance(await log.last(S0), Absent)
        assert isinstance(await log.next_after(S0, 0), Absent)

    async def test_last_is_the_newest_with_a_stamp(self, log: Log) -> None:
        await log.append(S0, b"a", 0)
        seq = await log.append(S0, b"\x00b\xff", 1)
        last = await log.last(S0)
        assert isinstance(last, Valid)
        assert (last.seq, last.payload) == (seq, b"\x00b\xff")
        assert abs(last.at_ms - await log.server_now_ms()) < 60_000

    async def test_s74_a_missing_stream_is_unknown_never_absent(self, missing_log: Log) -> None:
        assert isinstance(await missing_log.last(S0), Unknown)
        assert isinstance(await missing_log.next_after(S0, 0), Unknown)
        with pytest.raises(UnknownError):
            [item async for item in missing_log.read(S0, 1)]
        with pytest.raises(AppendUnknown):
            await missing_log.append("fp.v1.nowhere.toy.0", b"a", 0)

    async def test_reads_are_in_order_from_a_sequence(self, log: Log) -> None:
        heads = {S0: 0, S1: 0}
        want: dict[str, list[tuple[int, bytes]]] = {S0: [], S1: []}
        for number in range(40):
            subject = S0 if number % 3 else S1
            payload = f"m{number}".encode()
            heads[subject] = await log.append(subject, payload, heads[subject])
            want[subject].append((heads[subject], payload))
        for subject, items in want.items():
            assert [item async for item in log.read(subject, 0)] == items
            assert [item async for item in log.read(subject, items[5][0])] == items[5:]
            assert [item async for item in log.read(subject, items[-1][0] + 1)] == []


class BusContract:
    """Offer the fixture `bus`, with a stream on `fp.v1.event.>`."""

    async def test_a_subscriber_hears_what_is_published(self, bus: Bus) -> None:
        heard: list[tuple[str, bytes]] = []
        await bus.subscribe("fp.v1.now.*", lambda s, d, _r: heard.append((s, d)))
        await self.settle(bus)
        assert bus.publish("fp.v1.now.3", b"x")
        assert bus.publish("fp.v1.now", b"too short")
        assert bus.publish("fp.v1.now.3.4", b"too long")
        assert bus.publish("fp.v1.now.4", b"y")
        await until(lambda: len(heard) == 2)
        assert heard == [("fp.v1.now.3", b"x"), ("fp.v1.now.4", b"y")]

    async def test_nothing_is_heard_after_an_unsubscription(self, bus: Bus) -> None:
        heard: list[bytes] = []
        gone: list[bytes] = []
        subscription = await bus.subscribe("fp.v1.now.1", lambda _s, d, _r: gone.append(d))
        await bus.subscribe("fp.v1.now.1", lambda _s, d, _r: heard.append(d))
        await subscription.unsubscribe()
        await self.settle(bus)
        bus.publish("fp.v1.now.1", b"x")
        await until(lambda: heard == [b"x"])
        assert gone == []

    async def test_many_messages_are_heard_in_order_and_none_is_dropped(self, bus: Bus) -> None:
        heard: list[int] = []
        await bus.subscribe("fp.v1.now.1", lambda _s, d, _r: heard.append(int(d)))
        await self.settle(bus)
        for number in range(20_000):
            bus.publish("fp.v1.now.1", b"%d" % number)
        await until(lambda: len(heard) == 20_000)
        assert heard == list(range(20_000))

    async def test_a_request_is_answered(self, bus: Bus) -> None:
        await bus.subscribe("fp.v1.ask.1", lambda _s, d, r: bus.publish(r, b"re " + d) and None)
        await self.settle(bus)
        assert await bus.request("fp.v1.ask.1", b"q", 5_000) == b"re q"

    async def test_a_request_without_a_responder_is_unknown(self, bus: Bus) -> None:
        with pytest.raises(UnknownError):
            await bus.request("fp.v1.ask.9", b"q", 500)

    async def test_a_stream_acknowledges_what_it_stored(self, bus: Bus) -> None:
        answers: list[bool] = []
        for number in range(3):
            bus.publish_acked("fp.v1.event.toy.a.b", b"%d" % number, answers.append)
        await until(lambda: len(answers) == 3)
        assert answers == [True, True, True]

    async def settle(self, bus: Bus) -> None:
        """Subscriptions are in force when this returns."""


class InputsContract:
    """
    Offer fixtures `inputs`, `publish` (async: subject, data -> stored?) and `remake` (async: makes
    a stream anew), over the table's streams for 8 shards.
    """

    SHARDS = 8

    @staticmethod
    def sandbox_of(shard: int, start: int = 0) -> str:
        return next(
            name
            for number in range(start, start + 10_000)
            if ids.shard_of(name := f"sb-{number}", 8) == shard
        )

    async def _open(
        self, inputs: Inputs, shard: int, after: int = 0, room: int = 1_000_000
    ) -> tuple[list[InputMessage], list[Exception], Any]:
        got: list[InputMessage] = []
        failed: list[Exception] = []
        incarnation = await inputs.incarnation("FP_COMMANDS", None)
        reader = await inputs.open(
            "FP_COMMANDS",
            [f"fp.v1.in.{shard}.step.*.*", f"fp.v1.in.{shard}.create.*.*"],
            after=Position(incarnation=incarnation, seq=after),
            take=got.append,
            room=lambda: room - len(got),
            fail=failed.append,
        )
        return got, failed, reader

    async def test_the_server_maps_aggregates_to_the_same_shards(
        self, inputs: Inputs, publish: Any
    ) -> None:
        names = [f"sandbox-{number}_x" for number in range(150)] + ["A", "z" * 64, "01J0", "-", "_"]
        for name in names:
            assert await publish(f"fp.v1.cmd.step.{name}.s1", b"{}")
        incarnation = await inputs.incarnation("FP_COMMANDS", None)
        got: list[InputMessage] = []
        reader = await inputs.open(
            "FP_COMMANDS",
            ["fp.v1.in.>"],
            after=Position(incarnation=incarnation, seq=0),
            take=got.append,
            room=lambda: 10_000,
            fail=lambda error: None,
        )
        await until(lambda: len(got) == len(names))
        await reader.close()
        for message, name in zip(got, names, strict=True):
            shard = ids.shard_of(name, self.SHARDS)
            assert message.subject == f"fp.v1.in.{shard}.step.{name}.s1"

    async def test_a_second_command_of_one_subject_is_refused(self, publish: Any) -> None:
        assert await publish("fp.v1.cmd.step.sb-1.one", b"{}")
        assert not await publish("fp.v1.cmd.step.sb-1.one", b"{}")
        assert await publish("fp.v1.cmd.step.sb-1.two", b"{}")

    async def test_reading_goes_on_from_a_position_in_order(
        self, inputs: Inputs, publish: Any
    ) -> None:
        mine, other = self.sandbox_of(2), self.sandbox_of(3)
        for number in range(300):
            await publish(f"fp.v1.cmd.step.{mine}.s{number}", b"%d" % number)
            await publish(f"fp.v1.cmd.step.{other}.s{number}", b"no")
        got, failed, reader = await self._open(inputs, 2)
        await until(lambda: len(got) == 300)
        await publish(f"fp.v1.cmd.create.{mine}.s", b"late")
        await until(lambda: len(got) == 301)
        await reader.close()
        assert [message.data for message in got[:300]] == [b"%d" % n for n in range(300)]
        assert [message.seq for message in got] == sorted({message.seq for message in got})
        rest, _, reader = await self._open(inputs, 2, after=got[199].seq)
        await until(lambda: len(rest) == 101)
        await reader.close()
        assert rest == got[200:]
        assert failed == []

    async def test_no_more_is_read_than_there_is_room_for(
        self, inputs: Inputs, publish: Any
    ) -> None:
        mine = self.sandbox_of(2)
        for number in range(50):
            await publish(f"fp.v1.cmd.step.{mine}.s{number}", b"x")
        got, _, reader = await self._open(inputs, 2, room=20)
        await until(lambda: len(got) == 20)
        await asyncio.sleep(0.05)
        assert len(got) == 20
        await reader.close()

    async def test_another_incarnation_is_not_read(
        self, inputs: Inputs, publish: Any, remake: Any
    ) -> None:
        mine = self.sandbox_of(2)
        await publish(f"fp.v1.cmd.step.{mine}.s1", b"x")
        before = await inputs.incarnation("FP_COMMANDS", None)
        got, failed, reader = await self._open(inputs, 2)
        await until(lambda: len(got) == 1)
        await remake("FP_COMMANDS")
        with pytest.raises(InputLostError):
            await inputs.incarnation("FP_COMMANDS", Position(incarnation=before, seq=0))
        await publish(f"fp.v1.cmd.step.{mine}.s2", b"y")
        await until(lambda: len(failed) == 1)
        assert isinstance(failed[0], InputLostError)
        assert [message.data for message in got] == [b"x"]
        await reader.close()

    async def test_a_stream_shorter_than_the_position_is_not_read(
        self, inputs: Inputs, publish: Any
    ) -> None:
        await publish(f"fp.v1.cmd.step.{self.sandbox_of(2)}.s1", b"x")
        incarnation = await inputs.incarnation("FP_COMMANDS", None)
        await inputs.incarnation("FP_COMMANDS", Position(incarnation=incarnation, seq=1))
        with pytest.raises(InputLostError):
            await inputs.incarnation("FP_COMMANDS", Position(incarnation=incarnation, seq=2))

    async def test_a_missing_stream_is_unknown(self, inputs: Inputs) -> None:
        with pytest.raises(UnknownError):
            await inputs.incarnation("FP_NOT_THERE", None)
