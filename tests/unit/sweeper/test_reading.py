"""What a sweep reads: an answer that did not come is a problem with a name, never an absence."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fencepost.contracts import subjects
from fencepost.contracts.messages import Listed, ListReply
from fencepost.core.errors import UnknownError
from fencepost.core.sandbox.inputs import GatewaySeen
from fencepost.core.sweeping import LedgerPage, LedgerRow
from fencepost.sweeper import reading

from tests.factories import ref

SHARDS = 2


class FakeLink:
    """Answers calls by subject, the first answer of each first; an error is raised."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.asked: list[tuple[str, Any]] = []

    async def call(self, subject: str, payload: bytes, *, timeout_s: float) -> Any:
        assert timeout_s > 0
        self.asked.append((subject, msgspec.json.decode(payload)))
        answer = self.answers[subject].pop(0)
        if isinstance(answer, Exception):
            raise answer
        data = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
        return SimpleNamespace(data=data)


class Clock:
    def __init__(self) -> None:
        self.ms = 0

    def monotonic_ms(self) -> int:
        return self.ms


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def sources(link: FakeLink) -> reading.NatsSources:
    sources = reading.NatsSources(link, Clock(), SHARDS)  # type: ignore[arg-type]
    seen = GatewaySeen(gateway="gw", authorities=["host"], providers=["process"], sandboxes=0)
    sources._take_seen(SimpleNamespace(data=msgspec.json.encode(seen), subject="seen"))
    return sources


def _page(*names: str, **over: Any) -> ListReply:
    items = [Listed(ref(native_id=name), {}) for name in names]
    return ListReply(**{"deployment": "d1", "items": items, "complete": True, **over})


LAST = _page("c")
NOT_WHOLE: list[tuple[Callable[[], Any], str]] = [
    (lambda: UnknownError("no answer"), "no_answer"),
    (lambda: b"no json", "no_answer"),
    (lambda: _page("c", complete=False), "incomplete_listing"),
    (lambda: ListReply(problem="walk_over"), "walk_over"),
]


async def test_all_pages_make_one_listing(sources: reading.NatsSources, link: FakeLink) -> None:
    link.answers[subjects.gateway_list("gw")] = [_page("a", "b", token="t1", complete=False), LAST]
    listing = await sources.listing("host")
    assert [item.ref.native_id for item in listing.items] == ["a", "b", "c"]
    assert listing.problem == ""
    assert [asked["token"] for _, asked in link.asked[1:]] == ["t1"]


@pytest.mark.parametrize(("last", "problem"), NOT_WHOLE)
async def test_s189_a_listing_without_a_whole_last_page_has_a_problem(
    sources: reading.NatsSources, link: FakeLink, last: Callable[[], Any], problem: str
) -> None:
    pages = [_page("a", "b", token="t1", complete=False), last()]
    link.answers[subjects.gateway_list("gw")] = pages
    assert (await sources.listing("host")).problem == problem


async def test_an_authority_that_no_living_gateway_reaches_has_a_problem(
    sources: reading.NatsSources, link: FakeLink
) -> None:
    assert (await sources.listing("elsewhere")).problem == "no_gateway"
    sources._clock.ms = reading.GATEWAY_SILENT_MS + 1  # type: ignore[attr-defined]
    assert (await sources.listing("host")).problem == "no_gateway"
    assert link.asked == []


def _rows(*names: str) -> list[LedgerRow]:
    return [LedgerRow(name, None, [], {}) for name in names]


async def test_every_page_of_every_shard_is_read(
    sources: reading.NatsSources, link: FakeLink
) -> None:
    link.answers[subjects.ask(0)] = [
        LedgerPage(rows=_rows("a"), next=7),
        LedgerPage(rows=_rows("b")),
    ]
    link.answers[subjects.ask(1)] = [LedgerPage(rows=_rows("c"))]
    ledger = await sources.ledger()
    assert sorted(ledger.rows) == ["a", "b", "c"]
    assert ledger.silent == set()


@pytest.mark.parametrize(
    "second",
    [UnknownError("no answer"), b"no json", {"status": "not_owned"}, {"rows": "none"}],
    ids=["no answer", "no json", "not owned", "another shape"],
)
async def test_s071_a_shard_of_which_a_page_is_missing_said_nothing(
    sources: reading.NatsSources, link: FakeLink, second: Any
) -> None:
    link.answers[subjects.ask(0)] = [LedgerPage(rows=_rows("a"), next=7), second]
    link.answers[subjects.ask(1)] = [LedgerPage(rows=_rows("c"))]
    ledger = await sources.ledger()
    assert ledger.silent == {0}
    assert "c" in ledger.rows
