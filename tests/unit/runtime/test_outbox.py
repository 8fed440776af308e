"""What is recorded as sent was taken, and so was everything before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fencepost.contracts.messages import Seen
from fencepost.runtime.outbox import RESEND_MS, Item, Outbox

from tests.memory import ManualClock


class Maker:
    """Makes of each entry one publication on the subject that it names."""

    def make(self, seq: int, entries: Sequence[Any], now_ms: int) -> list[Item]:
        del now_ms
        return [(entry, f"{seq}".encode()) for entry in entries]


class Bus:
    """Keeps who waits for an answer, by what was published."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, bytes, Callable[[bool], None]]] = []

    def publish_acked(self, subject: str, data: bytes, answered: Callable[[bool], None]) -> None:
        self.waiting.append((subject, data, answered))

    def answer(self, place: int, *, ok: bool = True) -> None:
        self.waiting[place][2](ok)


class Rig:
    def __init__(self, **options: Any) -> None:
        self.bus = Bus()
        self.clock = ManualClock()
        self.outbox = Outbox(Maker(), self.bus, self.clock, **options)  # type: ignore[arg-type]
        self.outbox.release()


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    for seq in (1, 2, 3):
        rig.outbox.add(seq - 1, seq, ["s"], 0)
    return rig


def test_only_what_was_taken_is_sent_whatever_follows(rig: Rig) -> None:
    rig.bus.answer(0)
    assert (rig.outbox.sent, rig.outbox.kept, rig.outbox.waiting) == (1, 3, 2)


def test_what_was_taken_out_of_order_is_sent_once_the_former_is(rig: Rig) -> None:
    rig.bus.answer(2)
    rig.bus.answer(1)
    assert rig.outbox.sent == 0
    rig.bus.answer(0)
    assert (rig.outbox.sent, rig.outbox.waiting) == (3, 0)


def test_a_refusal_is_no_answer_and_it_is_published_again(rig: Rig) -> None:
    rig.bus.answer(0, ok=False)
    assert rig.outbox.sent == 0
    rig.clock.advance(RESEND_MS)
    assert rig.outbox.repeat() == 3
    assert [data for _, data, _ in rig.bus.waiting[3:]] == [b"1", b"2", b"3"]


def test_an_answer_that_comes_twice_counts_once(rig: Rig) -> None:
    rig.bus.answer(0)
    rig.bus.answer(0)
    assert (rig.outbox.sent, rig.outbox.waiting) == (1, 2)


def test_a_batch_that_publishes_nothing_is_sent_only_behind_the_former(rig: Rig) -> None:
    rig.outbox.add(3, 4, [], 0)
    assert (rig.outbox.sent, rig.outbox.kept) == (0, 4)
    for place in range(3):
        rig.bus.answer(place)
    assert rig.outbox.sent == 4


def test_a_batch_after_a_gap_or_beyond_the_window_is_read_from_the_ledger_later() -> None:
    rig = Rig(window=2)
    rig.outbox.add(5, 6, ["s"], 0)  # 1 to 5 were not seen
    assert (rig.outbox.kept, rig.outbox.is_behind(6)) == (0, True)
    for seq in (1, 2, 3):
        rig.outbox.add(seq - 1, seq, ["s"], 0)
    assert (rig.outbox.kept, rig.outbox.is_behind(3)) == (2, True)


def test_links_are_those_of_what_was_taken() -> None:
    rig = Rig(keeps_links=True)
    rig.outbox.add(0, 1, ["a", "b", "a"], 0)
    rig.outbox.add(1, 2, ["b"], 0)
    for place in range(3):
        rig.bus.answer(place)
    assert rig.outbox.sent_links == {"a": Seen(1, 2), "b": Seen(1, 1)}
    rig.bus.answer(3)
    assert rig.outbox.sent_links == {"a": Seen(1, 2), "b": Seen(2, 0)}
