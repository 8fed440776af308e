"""The adapters to the real server hold the same contracts as the memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from fencepost.contracts import streams as table
from fencepost.contracts.messages import Position
from fencepost.runtime import streams
from fencepost.runtime.bus import JetStreamInputs, NatsBus
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link
from fencepost.runtime.ports import (
    AppendRefused,
    AppendUnknown,
    Bus,
    InputMessage,
    Log,
    ReadResult,
    Valid,
)

from tests.contracts import S0, S1, BusContract, InputsContract, LogContract, until


@pytest.fixture
async def link(nats_server: Any) -> AsyncIterator[Link]:
    link = await Link.connect(nats_server.url, name="test")
    await streams.declare(link, 8, create=True)
    yield link
    await link.close()


class TestJetStreamLog(LogContract):
    @pytest.fixture
    def log(self, link: Link) -> JetStreamLog:
        return JetStreamLog(link)

    @pytest.fixture
    def missing_log(self, link: Link) -> JetStreamLog:
        return JetStreamLog(link, stream="FP_NOT_THERE", append_timeout_s=0.5)

    async def test_a_read_of_more_than_one_chunk_is_whole(
        self, log: JetStreamLog, link: Link
    ) -> None:
        head = 0
        for number in range(2_500):
            head = await log.append(S0, b"%d" % number, head)
        got = [payload async for _, payload in log.read(S0, 1)]
        assert got == [b"%d" % number for number in range(2_500)]

    async def test_a_replica_that_lags_does_not_shorten_a_read(
        self, log: JetStreamLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        head = 0
        for number in range(6):
            head = await log.append(S0, b"%d" % number, head)
        current = log._chunk

        async def lagging(subject: str, from_seq: int) -> list[tuple[int, bytes]]:
            return [item for item in await current(subject, from_seq) if item[0] <= 3]

        monkeypatch.setattr(log, "_chunk", lagging)
        assert [payload async for _, payload in log.read(S0, 1)] == [b"%d" % n for n in range(6)]

    async def test_an_abandoned_read_leaves_no_task_behind(self, log: JetStreamLog) -> None:
        head = 0
        for number in range(10):
            head = await log.append(S0, b"%d" % number, head)
        reading = log.read(S0, 1)
        assert await anext(reading) == (1, b"0")
        await reading.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) < 10


class OverThreeLedgers:
    """Each subject's own log, of three: to whoever has several shards they are as one."""

    def __init__(self, link: Link, name: str = "") -> None:
        self._logs = [
            JetStreamLog(link, stream=name or table.ledger_of(shard, 3), append_timeout_s=0.5)
            for shard in range(8)
        ]

    def _of(self, subject: str) -> JetStreamLog:
        return self._logs[int(subject.rpartition(".")[2])]

    async def append(
        self, subject: str, payload: bytes, expected_last_subject_seq: int, msg_id: str = ""
    ) -> int:
        return await self._of(subject).append(subject, payload, expected_last_subject_seq, msg_id)

    async def last(self, subject: str) -> ReadResult:
        return await self._of(subject).last(subject)

    async def next_after(self, subject: str, after_seq: int) -> ReadResult:
        return await self._of(subject).next_after(subject, after_seq)

    def read(self, subject: str, from_seq: int) -> AsyncIterator[tuple[int, bytes]]:
        return self._of(subject).read(subject, from_seq)

    async def server_now_ms(self) -> int:
        return await self._logs[0].server_now_ms()


class TestJetStreamLogOverThreeLedgers(LogContract):
    @pytest.fixture
    async def apart(self, nats_server: Any) -> AsyncIterator[Link]:
        link = await Link.connect(nats_server.url, name="test")
        await streams.declare(link, 8, create=True, ledgers=3)
        yield link
        await link.close()

    @pytest.fixture
    def log(self, apart: Link) -> Log:
        return OverThreeLedgers(apart)

    @pytest.fixture
    def missing_log(self, apart: Link) -> Log:
        return OverThreeLedgers(apart, "FP_NOT_THERE")

    async def test_sequences_are_each_streams_own(self, log: Log) -> None:
        heads = [await log.append(f"fp.v1.ledger.toy.{n}", b"x", 0) for n in range(8)]
        assert heads == [1, 1, 1, 2, 2, 2, 3, 3]
        # Both families of a shard are in one stream: a shard and a sequence name one batch.
        assert await log.append("fp.v1.ledger.other.0", b"x", 0) == 4

    async def test_an_append_by_who_looks_in_another_stream_is_never_taken_for_its_own(
        self, log: Log, apart: Link
    ) -> None:
        head = await log.append(S1, b"a", 0)
        stranger = JetStreamLog(apart, stream=table.ledger_of(0, 3))
        with pytest.raises(AppendRefused):
            await stranger.append(S1, b"b", 0)
        with pytest.raises(AppendUnknown, match="FP_LEDGER_1"):
            await stranger.append(S1, b"c", head)
        assert [payload async for _, payload in log.read(S1, 1)] == [b"a", b"c"]


class TestNatsBus(BusContract):
    @pytest.fixture
    def bus(self, link: Link) -> NatsBus:
        self.link = link
        return NatsBus(link)

    async def settle(self, bus: Bus) -> None:
        await self.link.flush()


class TestJetStreamInputs(InputsContract):
    @pytest.fixture
    def inputs(self, link: Link) -> JetStreamInputs:
        return JetStreamInputs(link)

    @pytest.fixture
    def publish(self, link: Link) -> Any:
        async def publish(subject: str, data: bytes) -> bool:
            answer = msgspec.json.decode((await link.call(subject, data, timeout_s=5)).data)
            if "error" in answer:
                assert answer["error"]["err_code"] == 10077
            return "error" not in answer

        return publish

    @pytest.fixture
    def remake(self, link: Link) -> Any:
        async def remake(name: str) -> None:
            await link.api(f"STREAM.DELETE.{name}")
            for known, config in map(streams.wanted, table.table(8)):
                if known == name:
                    assert b'"error"' not in await link.api(f"STREAM.CREATE.{name}", config)

        return remake


class TestLostConnections:
    async def test_inputs_are_read_on_after_a_restart_of_the_server(
        self, embedded_nats: Any
    ) -> None:
        link = await Link.connect(embedded_nats.url, name="test")
        await streams.declare(link, 8, create=True)
        inputs = JetStreamInputs(link)
        incarnation = await inputs.incarnation("FP_FACTS", None)
        got: list[InputMessage] = []
        failed: list[Exception] = []
        reader = await inputs.open(
            "FP_FACTS",
            ["fp.v1.infact.>"],
            after=Position(incarnation=incarnation, seq=0),
            take=got.append,
            room=lambda: 1_000,
            fail=failed.append,
        )
        for number in range(5):
            await link.call("fp.v1.fact.sb-1.lost", b"%d" % number, timeout_s=5)
        await until(lambda: len(got) == 5)
        embedded_nats.kill()
        await embedded_nats.restart()
        await until(lambda: link.is_connected)
        for number in range(5, 9):
            await link.call("fp.v1.fact.sb-1.lost", b"%d" % number, timeout_s=10)
        await until(lambda: len(got) == 9, 30)
        assert [message.data for message in got] == [b"%d" % n for n in range(9)]
        assert failed == []
        await reader.close()
        await link.close()

    async def test_inputs_are_read_on_after_their_consumer_is_gone(self, link: Link) -> None:
        inputs = JetStreamInputs(link)
        incarnation = await inputs.incarnation("FP_FACTS", None)
        got: list[InputMessage] = []
        reader: Any = await inputs.open(
            "FP_FACTS",
            ["fp.v1.infact.>"],
            after=Position(incarnation=incarnation, seq=0),
            take=got.append,
            room=lambda: 1_000,
            fail=lambda error: None,
        )
        await link.call("fp.v1.fact.sb-1.lost", b"0", timeout_s=5)
        await until(lambda: len(got) == 1)
        await link.api(f"CONSUMER.DELETE.FP_FACTS.{reader._consumer}")
        await link.call("fp.v1.fact.sb-1.lost", b"1", timeout_s=5)
        await until(lambda: len(got) == 2, 30)
        assert [message.data for message in got] == [b"0", b"1"]
        await reader.close()

    async def test_s211_a_lost_answer_is_unknown_and_a_refusal_after_it_may_be_ones_own(
        self, embedded_nats: Any
    ) -> None:
        link = await Link.connect(embedded_nats.url, name="test")
        await streams.declare(link, 8, create=True)
        log = JetStreamLog(link, append_timeout_s=0.0)
        with pytest.raises(AppendUnknown):
            await log.append(S0, b"mine", 0)
        log = JetStreamLog(link)
        await link.flush()
        with pytest.raises(AppendRefused):
            await log.append(S0, b"mine", 0)
        there = await log.next_after(S0, 0)
        assert isinstance(there, Valid)
        assert there.payload == b"mine"
        await link.close()

    async def test_an_append_to_a_dead_server_is_unknown(self, embedded_nats: Any) -> None:
        link = await Link.connect(embedded_nats.url, name="test")
        await streams.declare(link, 8, create=True)
        log = JetStreamLog(link, append_timeout_s=0.3)
        assert await log.append(S0, b"a", 0) == 1
        embedded_nats.kill()
        with pytest.raises(AppendUnknown):
            await log.append(S0, b"b", 1)
        await link.close()
