"""The auditor finds each kind of broken DAG history, and nothing wrong with a good one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fencepost.core import facts
from fencepost.core.dag import entries as d
from fencepost.core.invariants import ShardAuditor
from fencepost.core.machine import TermOpened

REF = facts.Ref(authority="host", provider="process", native_id="a", instance="i1")
OPENED = TermOpened(term=1, owner="o", shards=1, hash="h", machine=1)
GOOD = (
    d.Opened(dag="d", nodes=["n"]),
    d.NodeStarted(dag="d", node="n"),
    d.Intended(dag="d", acquisition="a", slot="s", sandbox="a"),
    d.Progressed(dag="d", acquisition="a", phase="requested"),
    d.Progressed(dag="d", acquisition="a", phase="assigned", ref=REF),
    d.Ready(dag="d", acquisition="a", epoch=1),
    d.Intended(dag="d", acquisition="b", slot="s", sandbox="b"),
    d.Moved(dag="d", slot="s", old="a", new="b"),
    d.ReleaseBegun(dag="d", acquisition="a", sandbox="a", reason="replaced"),
    d.NodeFinished(dag="d", node="n", status="ok"),
    d.Closed(dag="d", reason="x", cancel="x"),
    d.ReleaseBegun(dag="d", acquisition="b", sandbox="b", reason="x"),
    d.ReleaseHeard(dag="d", acquisition="a", reason="pending_stop"),
    d.Answered(dag="d", verdict="unconfirmed", reason="pending_stop", cancel="x"),
    d.Abandoned(dag="d", acquisition="b", reason="never_requested"),
    d.CancelAsked(dag="d", cancel="y", answer_by_ms=1),
    d.ReleaseSettled(dag="d", acquisition="a", sandbox="a", slot="s", evidence="observed_gone"),
    d.Answered(dag="d", verdict="confirmed", evidence="observed_gone", cancel="y"),
    d.Finished(dag="d", status="ok"),
    d.Answered(dag="d", verdict="confirmed", evidence="observed_gone", cancel="much later"),
)


def audit(entries: list[Any]) -> list[str]:
    auditor = ShardAuditor("dag", 0)
    found = (
        auditor.take(seq=1, prev=0, term=1, owner="o", now_ms=1, entries=[OPENED, *entries])
        + auditor.finish()
    )
    assert auditor.summary()["violations"] == len(found)
    return [x.invariant for x in found]


def change(index: int, **over: Any) -> Callable[[list[Any]], None]:
    def apply(entries: list[Any]) -> None:
        entries[index] = msgspec.structs.replace(entries[index], **over)

    return apply


def drop(index: int) -> Callable[[list[Any]], None]:
    return lambda entries: entries.pop(index)


def twice(index: int) -> Callable[[list[Any]], None]:
    return lambda entries: entries.insert(index, entries[index])


def move(index: int, to: int) -> Callable[[list[Any]], None]:
    return lambda entries: entries.insert(to, entries.pop(index))


def test_a_good_history_has_no_faults() -> None:
    assert audit(list(GOOD)) == []


@pytest.mark.parametrize(
    ("broken", "invariant"),
    [
        (drop(0), "S-15"),
        (twice(0), "S-15"),
        (twice(2), "S-15"),
        (change(6, sandbox="a"), "S-15"),
        (move(6, 10), "I4"),
        (change(5, acquisition="z"), "S-15"),
        (drop(4), "S-15"),
        (move(3, 5), "S-15"),
        (change(7, old="b"), "S-15"),
        (change(7, new="z"), "S-15"),
        (twice(8), "S-15"),
        (change(8, sandbox="q"), "I5"),
        (twice(10), "S-15"),
        (drop(10), "I4"),
        (move(12, 6), "S-15"),
        (change(13, verdict="confirmed"), "I4"),
        (change(13, verdict="nothing_held"), "I4"),
        (change(13, cancel="z"), "S-15"),
        (change(14, acquisition="a"), "I4"),
        (twice(14), "S-15"),
        (move(15, 2), "S-15"),
        (twice(16), "S-15"),
        (change(16, evidence=""), "I7"),
        (drop(16), "I4"),
        (change(17, verdict="nothing_held"), "I4"),
        (change(17, verdict="unconfirmed"), "I4"),
        (twice(18), "S-15"),
        (lambda entries: entries.append(object()), "I8"),
    ],
)
def test_a_broken_history_is_found(broken: Callable[[list[Any]], None], invariant: str) -> None:
    entries = list(GOOD)
    broken(entries)
    assert invariant in audit(entries)
