"""What ends a step for its waiters, and what does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fencepost.client import waiting as module
from fencepost.client.outcome import StepOutcome
from fencepost.client.waiting import Waiting, Waits
from fencepost.core.errors import RefusedError, RetryLaterError, UnknownError

from tests.unit.client.fakes import FakeLink

DIGEST = "sha256:mine"
COMMITTED = {"attempt": "s1.2", "epoch": 8, "outcome": "ok", "result": {"bytes": 3}}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.waits.watch("box")
    yield made
    await made.waits.close()


class Rig:
    def __init__(self) -> None:
        self.link = FakeLink()
        self.waits = Waits(self.link, 8)  # type: ignore[arg-type]
        self.again: list[str] = []
        self.waits.send_again = lambda item: self.again.append(item.step)
        self.waits.start()

    def add(self, command: bytes = b"{}") -> Waiting:
        return self.waits.add("box", "s1", command, DIGEST)


async def test_a_committed_event_ends_it_with_what_the_event_says(rig: Rig) -> None:
    waiting = rig.add()
    position = {"shard": 2, "seq": 31, "index": 4}
    rig.link.event("box", "s1", "committed", **COMMITTED, position=position)
    outcome = await waiting.end()
    assert (outcome.state, outcome.epoch, outcome.attempts) == ("committed", 8, 2)
    assert outcome.result == {"bytes": 3}
    assert outcome.position == (2, 31, 4)
    assert rig.waits.find("box", "s1") is None


async def test_an_event_of_another_step_ends_nothing(rig: Rig) -> None:
    waiting = rig.add()
    rig.link.event("box", "s2", "committed", **COMMITTED)
    assert waiting.ended is None


@pytest.mark.parametrize("final", [False, True])
async def test_a_compensated_attempt_ends_the_step_only_when_it_is_final(
    rig: Rig, final: bool
) -> None:
    waiting = rig.add()
    rig.link.event("box", "s1", "compensated", attempt="s1.1", reason="epoch_moved", final=final)
    assert (waiting.ended is not None) is final


@pytest.mark.parametrize(("digest", "ends"), [(DIGEST, True), ("", True), ("sha256:other", False)])
async def test_a_refusal_of_other_arguments_under_the_same_id_is_not_this_ones(
    rig: Rig, digest: str, ends: bool
) -> None:
    waiting = rig.add()
    rig.link.event("box", "s1", "refused", reason="bad_arguments", field="args.path", digest=digest)
    assert (waiting.ended is not None) is ends
    if ends:
        with pytest.raises(RefusedError, match=r"args\.path") as raised:
            await waiting.end()
        assert (raised.value.reason, raised.value.field) == ("bad_arguments", "args.path")


async def test_s230_overload_is_not_final(rig: Rig) -> None:
    waiting = rig.add()
    rig.link.event("box", "s1", "refused", reason="overloaded", digest=DIGEST)
    with pytest.raises(RetryLaterError):
        await waiting.end()
    assert rig.waits.find("box", "s1") is None


async def test_every_waiter_is_told_and_a_cancelled_one_is_only_itself(rig: Rig) -> None:
    waiting = rig.add()
    tasks = [asyncio.create_task(waiting.end()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    rig.link.event("box", "s1", "committed", **COMMITTED)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(ended[1], asyncio.CancelledError)
    assert isinstance(ended[0], StepOutcome)
    assert ended[0] == ended[2]


def _ask_answers(rig: Rig, answer: Any) -> list[str]:
    asked: list[str] = []

    def respond(subject: str, _data: bytes) -> Any:
        asked.append(subject)
        return answer

    rig.link.respond = respond
    return asked


async def _until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


async def test_what_stays_silent_is_asked_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SILENT_S", 0.0)
    asked = _ask_answers(
        rig, {"state": "indeterminate", "attempt": "s1.1", "digest": DIGEST, "reason": "no_record"}
    )
    outcome = await rig.add().end()
    assert (outcome.state, outcome.reason) == ("indeterminate", "no_record")
    assert asked


async def test_an_unknown_answer_is_asked_again_and_ends_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENT_S", 0.0)
    asked = _ask_answers(rig, {"status": "unknown", "reason": "no proof"})
    waiting = rig.add()
    await _until(lambda: len(asked) > module._ABSENT_BEFORE_RESEND + 1)
    assert waiting.ended is None
    assert not rig.again


async def test_a_step_that_its_shard_does_not_know_is_sent_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENT_S", 0.0)
    asked = _ask_answers(rig, b"null")
    waiting = rig.add()
    await _until(lambda: rig.again)
    assert rig.again == ["s1"]
    assert len(asked) >= module._ABSENT_BEFORE_RESEND
    assert waiting.ended is None


async def test_a_step_of_somebody_else_that_is_not_known_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENT_S", 0.0)
    _ask_answers(rig, b"null")
    with pytest.raises(RefusedError) as raised:
        await rig.add(command=b"").end()
    assert raised.value.reason == "unknown_step"


@pytest.mark.parametrize(("digest", "same"), [(DIGEST, True), ("sha256:other", False)])
async def test_a_taken_subject_attaches_only_to_the_same_arguments(
    rig: Rig, digest: str, same: bool
) -> None:
    _ask_answers(
        rig, {"state": "indeterminate", "attempt": "s1.1", "digest": digest, "reason": "x"}
    )
    waiting = rig.add()
    rig.waits.taken(waiting)
    if same:
        assert (await waiting.end()).state == "indeterminate"
    else:
        with pytest.raises(RefusedError) as raised:
            await waiting.end()
        assert (raised.value.reason, raised.value.field) == ("id_reused", "step")


async def test_a_reconnect_asks_for_everything_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENT_S", 1e9)
    asked = _ask_answers(rig, {"status": "unknown"})
    for number in range(5):
        rig.waits.add("box", f"s{number}", b"{}", DIGEST)
    for call in rig.link.back:
        call()
    await _until(lambda: len(asked) >= 5)


async def test_closing_tells_whoever_waits_that_nothing_is_known() -> None:
    rig = Rig()
    waiting = rig.add()
    await rig.waits.close()
    with pytest.raises(UnknownError):
        await waiting.end()
