"""A recorded ledger is drawn as a run of the simulator is: epochs, fences, receipts, violations."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

from fencepost.client import drawn, timeline
from fencepost.client.timeline import Line
from fencepost.core.dag import entries as d
from fencepost.core.invariants import Violation
from fencepost.core.sandbox import entries as e
from fencepost.simulator import drawing
from fencepost.simulator.drawing import Picture

from tests.factories import ref


def _lines(entries: list[Any], *, term: int = 1, first: int = 1) -> list[Line]:
    made, epoch = [], 0
    for place, entry in enumerate(entries):
        epoch = getattr(entry, "epoch", epoch) if isinstance(entry, e.EpochOpened) else epoch
        made.append(
            Line(
                at=f"2026-01-02T03:04:{place:02}.000+00:00",
                shard=0,
                seq=first + place,
                index=0,
                term=term,
                owner="p-1" if term == 1 else "p-2",
                epoch=epoch,
                kind=str(type(entry).__struct_config__.tag),
                text=timeline.words(entry),
                entry=entry,
            )
        )
    return made


def _opened(epoch: int) -> e.EpochOpened:
    return e.EpochOpened(
        sandbox="box", epoch=epoch, nonce="n", instance="i", disk="cold", evidence="first"
    )


FENCED = e.Fenced(
    sandbox="box",
    step="s1",
    attempt="s1.1",
    ordinal=1,
    no=1,
    epoch=1,
    session="x",
)
REFUSED = e.ReceiptRefused(sandbox="box", step="s1", attempt="s1.1", reason="stale_epoch", epoch=1)
CLOSED = e.EpochClosed(sandbox="box", epoch=1, reason="disk_gone", evidence="lost")
LATE = [_opened(1), FENCED, CLOSED, _opened(2), REFUSED]


def _draw(lines: list[Line], **options: Any) -> Picture:
    picture = drawn.of_lines(lines, name=options.pop("name", "box"), **options)
    ET.fromstring(drawing.svg(picture))
    return picture


def test_a_late_receipt_crosses_from_its_fence_into_the_next_epoch() -> None:
    picture = _draw(_lines(LATE))
    epochs = {b.label: (b.first, b.last) for b in picture.bands if b.tone == "epoch"}
    assert epochs == {"epoch 1": (0, 2), "epoch 2": (3, 4)}
    (late,) = [arrow for arrow in picture.arrows if arrow.tone == "refused"]
    assert (late.start, late.end) == (("box", 1), ("owner p-1", 4))


def test_a_takeover_is_another_lane_and_another_term() -> None:
    lines = [*_lines(LATE[:3]), *_lines(LATE[3:], term=2, first=9)]
    picture = _draw(lines)
    terms = {(b.lane, b.label, b.first, b.last) for b in picture.bands if b.tone == "term"}
    assert terms == {("owner p-1", "term 1", 0, 2), ("owner p-2", "term 2", 3, 4)}


def test_a_violation_is_marked_after_its_batch_and_only_where_it_is() -> None:
    wrong = Violation(invariant="I1", shard=0, seq=2, index=0, detail="no such epoch")
    other = Violation(invariant="I3", shard=0, seq=77, index=0, detail="somebody else's")
    picture = _draw(_lines(LATE), violations=[wrong, other])
    marked = [(n, r.text) for n, r in enumerate(picture.rows) if r.tone == "violation"]
    assert marked == [(2, "I1 violated: no such epoch")]


def test_what_came_before_is_counted_and_its_epoch_goes_on() -> None:
    lines = _lines(LATE)[1:]
    picture = _draw(lines, before=1_234)
    assert picture.left_out == "(1,234 earlier entries are not drawn)"
    assert {b.label: b.first for b in picture.bands}["epoch 1"] == -1


def test_a_session_is_a_thin_band_until_it_ends() -> None:
    entries = [
        _opened(1),
        e.Marking(sandbox="box", epoch=1, session="x", gateway="gw", nonce="n", ref=ref()),
        e.Attached(sandbox="box", epoch=1, session="x", gateway="gw", journal_seq=0),
        e.Detached(sandbox="box", session="x", reason="channel_ended"),
        CLOSED,
    ]
    picture = _draw(_lines(entries))
    (session,) = [b for b in picture.bands if b.tone == "disk"]
    assert (session.label, session.first, session.last) == ("session x", 2, 3)
    assert "gateway gw" in {lane.key for lane in picture.lanes}


def test_a_dag_is_drawn_with_what_it_holds() -> None:
    entries = [
        d.Opened(dag="run", nodes=[]),
        d.Intended(dag="run", acquisition="a1", slot="main", sandbox="box"),
        d.Ready(dag="run", acquisition="a1", epoch=1),
        d.Closed(dag="run", reason="cancelled"),
        d.ReleaseBegun(dag="run", acquisition="a1", sandbox="box", reason="cancelled"),
        d.ReleaseSettled(
            dag="run", acquisition="a1", sandbox="box", slot="main", evidence="observed_gone"
        ),
        d.Answered(dag="run", verdict="confirmed"),
    ]
    picture = _draw(_lines(entries), name="run", is_dag=True)
    held = [b.label for b in picture.bands if b.lane == "box" and b.tone == "epoch"]
    assert held == ["wanted", "held", "let go"]
    assert [b.label for b in picture.bands if b.tone == "dag"] == ["open", "closed", "confirmed"]
    assert "an instance that really runs" not in drawing.page(picture)
