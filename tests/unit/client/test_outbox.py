"""Steps are gathered by loop turn and shard, cut within bounds, and sent until acknowledged."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from fencepost.client import outbox
from fencepost.client.outbox import Outbox, packs, publish_durably
from fencepost.client.waiting import Waiting
from fencepost.core import ids, limits
from fencepost.core.errors import FencepostError, RefusedError, RetryLaterError

from tests.unit.client.fakes import FakeLink

SHARDS = 8


def waiting(step: str, sandbox: str = "box", size: int = 40) -> Waiting:
    body = msgspec.json.encode({"sandbox": sandbox, "step": step, "x": "y" * size})
    return Waiting(sandbox, step, ids.shard_of(sandbox, SHARDS), body, "sha256:d", 0.0)


class Rig:
    def __init__(self) -> None:
        self.link = FakeLink()
        self.taken: list[str] = []
        self.failed: list[tuple[str, FencepostError]] = []
        self.outbox = Outbox(
            self.link,  # type: ignore[arg-type]
            taken=lambda item: self.taken.append(item.step),
            failed=lambda item, error: self.failed.append((item.step, error)),
        )


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def steps_of(body: bytes) -> list[str]:
    return [item["step"] for item in msgspec.json.decode(body)["steps"]]


async def test_a_lone_step_goes_to_its_own_subject() -> None:
    rig = Rig()
    rig.outbox.put(waiting("s1"))
    await turns()
    assert [subject for subject, _ in rig.link.published] == ["fp.v1.cmd.step.box.s1"]


async def test_the_steps_of_one_turn_and_shard_travel_in_one_message_in_order() -> None:
    rig = Rig()
    for number in range(20):
        rig.outbox.put(waiting(f"s{number}"))
    await turns()
    ((subject, body),) = rig.link.published
    assert subject.startswith("fp.v1.cmd.batch.box.")
    assert steps_of(body) == [f"s{number}" for number in range(20)]


async def test_steps_of_two_shards_travel_apart() -> None:
    rig = Rig()
    sandboxes = ["box", next(f"b{n}" for n in range(99) if ids.shard_of(f"b{n}", SHARDS) != 0)]
    assert len({ids.shard_of(name, SHARDS) for name in sandboxes}) == 2
    for name in sandboxes:
        rig.outbox.put(waiting("s1", name))
    await turns()
    assert sorted(subject for subject, _ in rig.link.published) == sorted(
        f"fp.v1.cmd.step.{name}.s1" for name in sandboxes
    )


async def test_the_steps_of_two_turns_travel_apart() -> None:
    rig = Rig()
    rig.outbox.put(waiting("s1"))
    await turns()
    rig.outbox.put(waiting("s2"))
    await turns()
    assert len(rig.link.published) == 2


@pytest.mark.parametrize(("count", "size"), [(500, 10), (40, 4_000), (3, 30_000)])
def test_a_pack_stays_within_its_bounds_and_keeps_the_order(count: int, size: int) -> None:
    items = [waiting(f"s{number}", size=size) for number in range(count)]
    cut = packs(items)
    assert [item for pack in cut for item in pack] == items
    assert len(cut) > 1
    for pack in cut:
        body = b'{"steps":[' + b",".join(item.command for item in pack) + b"]}"
        assert len(body) <= limits.COMMAND_BYTES_MAX
        assert len(pack) <= outbox.PACK_STEPS_MAX


async def test_an_unanswered_message_is_sent_again_on_the_same_subject(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "_ACK_S", 0.01)
    monkeypatch.setattr(outbox, "_PAUSE_S", 0.01)
    rig = Rig()
    answers: list[Any] = [None, None, {"seq": 7}]
    rig.link.respond = lambda _subject, _data: answers.pop(0)
    rig.outbox.put(waiting("s1"))
    rig.outbox.put(waiting("s2"))
    async with asyncio.timeout(5):
        while answers:
            await asyncio.sleep(0.005)
    await turns()
    assert len({subject for subject, _ in rig.link.published}) == 1
    assert len(rig.link.published) == 3
    assert not rig.outbox.flights
    assert not rig.failed


def _refused(code: int, err_code: int) -> dict[str, Any]:
    return {"error": {"code": code, "err_code": err_code, "description": "no"}}


async def test_a_lone_step_whose_subject_is_taken_is_reported_and_a_pack_is_not() -> None:
    rig = Rig()
    rig.link.respond = lambda _subject, _data: _refused(503, 10077)
    rig.outbox.put(waiting("s1"))
    await turns()
    assert rig.taken == ["s1"]
    rig.outbox.put(waiting("s2"))
    rig.outbox.put(waiting("s3"))
    await turns()
    assert rig.taken == ["s1"]
    assert not rig.outbox.flights
    assert not rig.failed


async def test_what_the_server_refuses_for_good_fails_each_step_of_the_pack() -> None:
    rig = Rig()
    rig.link.respond = lambda _subject, _data: _refused(400, 10054)
    rig.outbox.put(waiting("s1"))
    rig.outbox.put(waiting("s2"))
    await turns()
    assert [step for step, _ in rig.failed] == ["s1", "s2"]
    assert all(isinstance(error, RefusedError) for _, error in rig.failed)


async def test_what_is_never_acknowledged_may_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "_ACK_S", 0.01)
    monkeypatch.setattr(outbox, "_PAUSE_S", 0.01)
    monkeypatch.setattr(outbox, "_SEND_S_MAX", 0.05)
    rig = Rig()
    rig.link.respond = lambda _subject, _data: None
    rig.outbox.put(waiting("s1"))
    async with asyncio.timeout(5):
        while not rig.failed:
            await asyncio.sleep(0.005)
    assert isinstance(rig.failed[0][1], RetryLaterError)


async def test_a_command_is_published_until_answered_and_says_whether_it_was_there() -> None:
    link = FakeLink()
    answers: list[Any] = [None, b"", _refused(503, 10077)]
    link.respond = lambda _subject, _data: answers.pop(0)
    assert await publish_durably(link, "fp.v1.cmd.create.a.b", b"{}", seconds=5) is False  # type: ignore[arg-type]
    assert not answers
    assert await publish_durably(FakeLink(), "fp.v1.cmd.create.a.b", b"{}") is True  # type: ignore[arg-type]


async def _two_on_their_way(rig: Rig) -> None:
    rig.link.respond = lambda _subject, _data: None
    for number in range(2):
        rig.outbox.put(waiting(f"ahead{number}"))
        await turns()
    assert len(rig.link.published) == 2


async def test_while_some_are_on_their_way_the_others_gather_until_one_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "_PATIENCE_S", 60.0)
    rig = Rig()
    await _two_on_their_way(rig)
    for number in range(3):
        rig.outbox.put(waiting(f"s{number}"))
        await turns()
    assert len(rig.link.published) == 2
    rig.link.answer("1", {"seq": 1})
    await turns()
    (*_, (subject, body)) = rig.link.published
    assert len(rig.link.published) == 3
    assert subject.startswith("fp.v1.cmd.batch.box.")
    assert steps_of(body) == ["s0", "s1", "s2"]
    rig.outbox.close()


async def test_a_full_message_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_PATIENCE_S", 60.0)
    rig = Rig()
    await _two_on_their_way(rig)
    for number in range(outbox.PACK_STEPS_MAX + 1):
        rig.outbox.put(waiting(f"s{number}"))
    await turns()
    assert [len(steps_of(body)) for _, body in rig.link.published[2:]] == [outbox.PACK_STEPS_MAX]
    rig.outbox.close()


async def test_messages_without_an_answer_hold_the_others_up_for_a_moment_only() -> None:
    rig = Rig()
    await _two_on_their_way(rig)
    rig.outbox.put(waiting("s1"))
    async with asyncio.timeout(5):
        while len(rig.link.published) < 3:
            await asyncio.sleep(0.005)
    assert rig.link.published[2][0] == "fp.v1.cmd.step.box.s1"
    rig.outbox.close()
