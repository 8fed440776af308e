"""The in-memory log, bus and inputs hold the contracts; and one thing that only they can show."""

from typing import Any

import pytest
from fencepost.runtime.ports import AppendRefused, AppendUnknown, Valid

from tests.contracts import S0, BusContract, InputsContract, LogContract
from tests.memory import MemoryBus, MemoryInputs, MemoryLog, MemoryStream, partitioned


class TestMemoryLog(LogContract):
    @pytest.fixture
    def log(self) -> MemoryLog:
        return MemoryLog()

    @pytest.fixture
    def missing_log(self) -> MemoryLog:
        log = MemoryLog()
        log.missing = True
        return log

    async def test_a_paused_old_leader_reads_stale_and_its_append_is_refused(
        self, log: MemoryLog
    ) -> None:
        head = await log.append(S0, b"old", 0)
        await log.append(S0, b"new", head)
        log.blind_above = head
        last = await log.last(S0)
        assert isinstance(last, Valid)
        assert last.payload == b"old"
        with pytest.raises(AppendRefused):
            await log.append(S0, b"third", head)

    async def test_a_lost_answer_is_unknown_and_may_have_been_accepted(
        self, log: MemoryLog
    ) -> None:
        log.faults.extend(["lose", "drop"])
        with pytest.raises(AppendUnknown):
            await log.append(S0, b"there", 0)
        with pytest.raises(AppendUnknown):
            await log.append(S0, b"not there", 1)
        assert [payload async for _, payload in log.read(S0, 1)] == [b"there"]


class TestMemoryBus(BusContract):
    @pytest.fixture
    def bus(self) -> MemoryBus:
        bus = MemoryBus()
        bus.add(MemoryStream("FP_EVENTS", ["fp.v1.event.>"]))
        return bus


def commands(incarnation: str = "1") -> MemoryStream:
    stream = MemoryStream("FP_COMMANDS", ["fp.v1.cmd.*.*.*"], incarnation)
    stream.one_per_subject = True
    mapped = partitioned(8, 4, 3)
    stream.transform = lambda subject: mapped(subject).replace(".cmd.", ".in.")
    return stream


class TestMemoryInputs(InputsContract):
    @pytest.fixture
    def bus(self) -> MemoryBus:
        bus = MemoryBus()
        bus.add(commands())
        return bus

    @pytest.fixture
    def inputs(self, bus: MemoryBus) -> MemoryInputs:
        return MemoryInputs(bus)

    @pytest.fixture
    def publish(self, bus: MemoryBus) -> Any:
        async def publish(subject: str, data: bytes) -> bool:
            answers: list[bool] = []
            bus.publish_acked(subject, data, answers.append)
            return answers == [True]

        return publish

    @pytest.fixture
    def remake(self, bus: MemoryBus) -> Any:
        async def remake(name: str) -> None:
            assert name in bus.streams
            bus.add(commands("2"))

        return remake
