"""One tick against sources of a test's own: what is read, what is sent, and when it stops."""

from collections.abc import Callable
from typing import Any

import pytest
from fencepost.contracts import streams as table
from fencepost.core import sweeping
from fencepost.core.errors import UnknownError
from fencepost.core.facts import Fact, Orphaned, Stray
from fencepost.core.sweeping import (
    Dag,
    Ledger,
    LedgerPage,
    LedgerRow,
    Listed,
    Listing,
    Report,
)
from fencepost.runtime.metrics import SweeperMetrics
from fencepost.sweeper import reading
from fencepost.sweeper.reading import Mode
from fencepost.sweeper.ticking import Options, Sweeper

from tests.factories import ref

GRACE = 100


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic_ms(self) -> int:
        return self.ms


class World:
    """What a sweeper sees, and what it was given."""

    def __init__(self) -> None:
        self.listings: dict[str, list[Listed]] = {"host": []}
        self.problems: dict[str, str] = {}
        self.rows: list[LedgerRow] = []
        self.dags: dict[str, Dag | None] = {}
        self.switch: Mode | None = None
        self.asked: list[str] = []
        self.read: list[str] = []
        self.proposals: list[Fact] = []
        self.reports: list[Report] = []
        self.takes: Callable[[Fact], bool] = lambda _fact: True

    def authorities(self) -> list[str]:
        return sorted(self.listings)

    async def mode(self, setting: Mode) -> Mode:
        return self.switch or setting

    async def listing(self, authority: str) -> Listing:
        self.read.append(authority)
        return Listing(
            authority=authority,
            deployment="d1",
            items=self.listings[authority],
            problem=self.problems.get(authority, ""),
        )

    async def ledger(self) -> Ledger:
        self.read.append("ledger")
        ledger = Ledger(4)
        ledger.take(LedgerPage(rows=self.rows))
        return ledger

    async def dag(self, dag: str) -> Dag | None:
        self.asked.append(dag)
        return self.dags.get(dag)

    async def propose(self, fact: Fact) -> bool:
        if not self.takes(fact):
            return False
        self.proposals.append(fact)
        return True

    def report(self, report: Report) -> None:
        self.reports.append(report)


class Rig:
    def __init__(self, **options: Any) -> None:
        self.world = World()
        self.clock = Clock()
        self.metrics = SweeperMetrics()
        self.leading: list[bool] = []
        self.sweeper = Sweeper(
            self.world,
            Options(**{"deployment": "d1", "grace_ms": GRACE, **options}),
            clock=self.clock,
            metrics=self.metrics,
            leads=self._leads,
        )

    async def _leads(self) -> bool:
        return self.leading.pop(0) if self.leading else True

    def stray(self, name: str, authority: str = "host") -> None:
        labels = {"deployment": "d1", "sandbox": name}
        item = Listed(ref(native_id=name, authority=authority), labels)
        self.world.listings.setdefault(authority, []).append(item)

    def held(self, name: str, **holders: str) -> None:
        self.world.rows.append(LedgerRow(name, None, [], holders))

    async def tick(self, **how: Any) -> list[Report]:
        self.clock.ms += GRACE
        return await self.sweeper.tick(**how)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"fencepost_{name}", labels) or 0.0


async def test_listings_are_read_before_the_ledger() -> None:
    rig = Rig()
    rig.world.listings = {"b": [], "a": []}
    await rig.tick()
    assert rig.world.read == ["a", "b", "ledger"]


async def test_what_is_still_misfit_after_the_grace_is_proposed_and_reported() -> None:
    rig = Rig()
    rig.stray("ghost")
    rig.held("sbx", dead="a1", alive="a2")
    rig.world.dags = {
        "dead": Dag(exists=False),
        "alive": Dag(exists=True, acquisitions=frozenset({"a2"})),
    }
    await rig.tick()
    assert rig.world.proposals == []
    reports = await rig.tick()
    stray, orphan = rig.world.proposals
    assert isinstance(stray, Stray) and stray.sandbox == "ghost"
    assert isinstance(orphan, Orphaned) and orphan.dag == "dead"
    assert rig.world.reports[-2:] == reports
    assert {r.authority: r.counts for r in reports} == {
        "host": {"proposed": 1},
        "ledger": {"held": 1, "proposed": 1},
    }


async def test_s136_s161_a_lead_that_is_lost_ends_the_walk_before_the_next_item() -> None:
    rig = Rig()
    for n in range(5):
        rig.stray(f"s{n}")
    await rig.tick()
    rig.leading = [True, True, False]
    report = (await rig.tick())[0]
    assert [fact.sandbox for fact in rig.world.proposals] == ["s0", "s1"]
    assert (report.counts, report.remaining) == ({"proposed": 5}, 3)
    # The control: with the lead all of them are sent.
    assert (await rig.tick())[0].remaining == 0
    assert len(rig.world.proposals) == 7


async def test_s156_a_proposal_that_is_not_taken_costs_no_other_and_comes_again() -> None:
    rig = Rig()
    for n in range(3):
        rig.stray(f"s{n}")
    rig.world.takes = lambda fact: fact.sandbox != "s1"
    await rig.tick()
    report = (await rig.tick())[0]
    assert [fact.sandbox for fact in rig.world.proposals] == ["s0", "s2"]
    assert (report.refused, report.remaining) == ("", 1)
    rig.world.takes = lambda _fact: True
    await rig.tick()
    assert "s1" in [fact.sandbox for fact in rig.world.proposals]


@pytest.mark.parametrize(
    ("setting", "switch", "proposed", "read"),
    [
        ("on", None, True, True),
        ("on", "census", False, True),
        ("on", "off", False, False),
        ("census", None, False, True),
        ("census", "on", True, True),
        ("off", None, False, False),
    ],
)
async def test_the_switch_stops_a_sweep_without_a_restart(
    setting: Mode, switch: Mode | None, proposed: bool, read: bool
) -> None:
    rig = Rig(mode=setting)
    rig.stray("ghost")
    await rig.tick(census=True)  # by hand: looks, whatever the mode
    rig.world.read.clear()
    rig.world.switch = switch
    await rig.tick()
    assert bool(rig.world.proposals) is proposed
    assert bool(rig.world.read) is read


async def test_s096_a_census_by_hand_shows_what_would_be_done_and_does_nothing() -> None:
    rig = Rig()
    for n in range(60):
        rig.stray(f"s{n:02}")
    first = (await rig.tick())[0]
    assert first.counts == {"first_sight": 60}
    assert (await rig.tick(census=True))[0].counts == {"census": 60}
    assert rig.world.proposals == []
    assert (await rig.tick())[0].counts == {"proposed": 50, "budget": 10}


async def test_one_budget_is_shared_by_all_authorities_and_the_holders() -> None:
    rig = Rig(budget=3)
    for n in range(2):
        rig.stray(f"a{n}", "a")
        rig.stray(f"b{n}", "b")
    rig.held("sbx", dead="a1")
    rig.world.dags = {"dead": Dag(exists=False)}
    await rig.tick()
    await rig.tick()
    assert [fact.sandbox for fact in rig.world.proposals] == ["a0", "a1", "b0"]


async def test_s134_one_authoritys_trouble_is_its_own_and_has_its_reason() -> None:
    rig = Rig()
    rig.stray("x", "a")
    rig.stray("y", "b")
    rig.world.problems = {"a": "incomplete_listing"}
    rig.world.rows = [LedgerRow("far", ref(authority="away"), [], {"quiet": "a9"})]
    await rig.tick()
    reports = {report.authority: report for report in await rig.tick()}
    assert [fact.sandbox for fact in rig.world.proposals] == ["y"]
    assert reports["a"].refused == "incomplete_listing"
    assert reports["away"].refused == "no_gateway"
    assert reports["ledger"].counts == {"holder_unknown": 1}
    assert rig.metric("sweeps_total", outcome="incomplete_listing") == 2
    assert rig.metric("sweep_deferred_total", reason="holder_unknown") == 2


async def test_s137_a_tick_counts_reached_proposed_and_deferred_apart() -> None:
    rig = Rig(budget=1)
    rig.stray("x")
    rig.stray("y")
    rig.held("sbx", alive="a2")
    rig.world.dags = {"alive": Dag(exists=True, acquisitions=frozenset({"a2"}))}
    await rig.tick()
    await rig.tick()
    assert rig.metric("sweep_reached") == 3
    assert rig.metric("sweep_released_total", reason="stray") == 1
    assert rig.metric("sweep_deferred_total", reason="first_sight") == 2
    assert rig.metric("sweep_deferred_total", reason="budget") == 1
    assert rig.metric("sweep_deferred_total", reason="held") == 0
    assert rig.metric("sweep_orphans") == 2


async def test_dags_are_asked_about_in_turns() -> None:
    rig = Rig(asks=2)
    for n in range(4):
        rig.held(f"s{n}", **{f"d{n}": "a"})
        rig.world.dags[f"d{n}"] = Dag(exists=True, acquisitions=frozenset({"a"}))
    for _ in range(3):
        await rig.tick()
    assert rig.world.asked == ["d0", "d1", "d2", "d3", "d0", "d1"]


async def test_an_unreadable_switch_lets_nothing_be_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: dict[str, Any] = {}

    async def read_meta(_link: Any, key: str) -> bytes | None:
        assert key == table.SWEEP_MODE
        if isinstance(answers["now"], Exception):
            raise answers["now"]
        return answers["now"]

    monkeypatch.setattr(reading.streams, "read_meta", read_meta)
    sources = reading.NatsSources(None, Clock(), 4)  # type: ignore[arg-type]
    for said, expected in (
        (None, "on"),
        (b"off", "off"),
        (b"on", "on"),
        (b"census", "census"),
        (b"yes please", "census"),
        (UnknownError("no answer"), "census"),
    ):
        answers["now"] = said
        assert await sources.mode("on") == expected
    assert await sources.mode("off") == "off"


def test_an_authority_that_cannot_be_a_token_is_reported_under_a_digest() -> None:
    assert reading.token_of("process-1") == "process-1"
    odd = reading.token_of("https://host:1/a b")
    assert odd.startswith("x-") and odd != reading.token_of("https://host:2/a b")
    assert sweeping.LEDGER == reading.token_of(sweeping.LEDGER)
