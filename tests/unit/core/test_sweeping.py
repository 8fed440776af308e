"""What a sweep concludes from what was read, and what it must not."""

from typing import Any

import msgspec
import pytest
from fencepost.core import ids, limits, sweeping
from fencepost.core.facts import Orphaned, Ref, Stray
from fencepost.core.sweeping import (
    Dag,
    Ledger,
    LedgerPage,
    LedgerRow,
    Listed,
    Listing,
    Policy,
    Result,
    Sightings,
)

from tests.factories import ref

GRACE = 1_000
SHARDS = 4


def policy(**over: Any) -> Policy:
    fields = {"deployment": "d1", "grace_ms": GRACE, "budget": 10, "census": False, **over}
    return Policy(**fields)


def listed(sandbox: str = "sbx", *, of: Ref | None = None, **labels: str) -> Listed:
    found = of or ref(native_id=f"n-{sandbox}")
    named = {"deployment": "d1", "sandbox": sandbox, "create_id": sandbox, **labels}
    return Listed(found, {key: value for key, value in named.items() if value})


def row(sandbox: str = "sbx", **over: Any) -> LedgerRow:
    fields = {"ref": ref(native_id=f"n-{sandbox}"), "creates": [], "holders": {}, **over}
    return LedgerRow(sandbox, **fields)


def ledger(*rows: LedgerRow, strays: Any = (), silent: tuple[str, ...] = ()) -> Ledger:
    found = Ledger(SHARDS)
    found.take(LedgerPage(rows=list(rows), strays=list(strays)))
    found.silent.update(ids.shard_of(name, SHARDS) for name in silent)
    return found


def listing(*items: Listed, **over: Any) -> Listing:
    return Listing(**{"authority": "host", "deployment": "d1", "items": list(items), **over})


class Sweep:
    """Ticks over one authority, `GRACE` apart."""

    def __init__(self, **over: Any) -> None:
        self.policy = policy(**over)
        self.sightings = Sightings()
        self.now_ms = 1_000_000

    def tick(self, found: Listing, known: Ledger, ms: int = GRACE) -> Result:
        self.now_ms += ms
        return sweeping.sweep_listing(self.policy, found, known, self.sightings, now_ms=self.now_ms)

    def twice(self, found: Listing, known: Ledger) -> Result:
        first = self.tick(found, known)
        assert first.proposals == []
        return self.tick(found, known)


def why(result: Result) -> str:
    """The one reason of a report about one thing."""
    assert sum(result.report.counts.values()) == result.report.reached == 1
    return next(iter(result.report.counts))


# --- what is listed -------------------------------------------------------------------------------


def test_s210_what_no_ledger_names_is_proposed_when_seen_twice() -> None:
    sweep, item = Sweep(), listed(dag="dag", acquisition="acq")
    first = sweep.tick(listing(item), ledger())
    assert (why(first), first.proposals) == ("first_sight", [])
    early = sweep.tick(listing(item), ledger(), GRACE - 1)
    assert (why(early), early.proposals) == ("too_young", [])
    due = sweep.tick(listing(item), ledger(), 1)
    proposal = Stray(sandbox="sbx", ref=item.ref, create_id="sbx", dag="dag", acquisition="acq")
    assert due.proposals == [proposal]
    assert due.report.findings[0].age_ms == GRACE
    again = sweep.tick(listing(item), ledger(), 1)
    assert again.proposals == [proposal]  # until the shard has taken it


@pytest.mark.parametrize(
    ("item", "known", "expected"),
    [
        (listed(), ledger(row()), "vouched"),
        (listed(of=ref("i2", native_id="n-sbx")), ledger(row()), "vouched"),
        (listed(), ledger(row(releasing=True)), "being_released"),
        (listed(), ledger(row(ref=None, creates=["sbx"])), "being_created"),
        (listed(create_id=""), ledger(row(ref=None, creates=["sbx"])), "being_created"),
        (listed(), ledger(strays=[("sbx", listed().ref)]), "being_stopped"),
        (listed(deployment="d2"), ledger(), "other_deployment"),
        (listed(deployment=""), ledger(), "other_deployment"),
        (listed(sandbox=""), ledger(), "unlabelled"),
        (listed(sandbox="not an id"), ledger(), "unlabelled"),
        (listed(), ledger(silent=("sbx",)), "ledger_unknown"),
        # The controls, each with one thing another way.
        (listed(of=ref(native_id="n-2")), ledger(row()), "proposed"),
        (listed(create_id="x"), ledger(row(ref=None, creates=["sbx"])), "proposed"),
        (listed(), ledger(row("other")), "proposed"),
    ],
)
def test_a_listed_thing_is_proposed_only_when_nothing_speaks_for_it(
    item: Listed, known: Ledger, expected: str
) -> None:
    result = Sweep().twice(listing(item), known)
    assert why(result) == expected
    assert bool(result.proposals) is (expected == "proposed")


def test_s189_an_incomplete_listing_allows_no_conclusion() -> None:
    items = [listed(f"s{n}") for n in range(250)]
    part = listing(*items[:100], problem="incomplete_listing")
    sweep = Sweep()
    for _ in range(3):
        result = sweep.tick(part, ledger())
        assert (result.report.refused, result.proposals) == ("incomplete_listing", [])
        assert result.report.reached == 0
    assert len(Sweep(budget=500).twice(listing(*items), ledger()).proposals) == 250


def test_an_incomplete_listing_does_not_make_the_grace_begin_anew() -> None:
    sweep, item = Sweep(), listed()
    sweep.tick(listing(item), ledger())
    sweep.tick(listing(problem="incomplete_listing"), ledger())
    assert len(sweep.tick(listing(item), ledger()).proposals) == 1


def test_s135_an_empty_listing_is_refused_where_the_ledger_knows_of_live_ones() -> None:
    known = ledger(row(), row("b"))
    assert Sweep().tick(listing(), known).report.refused == "empty_listing"
    assert Sweep().tick(listing(), ledger()).report.refused == ""
    assert Sweep().tick(listing(authority="other"), known).report.refused == ""


def test_another_deployments_listing_is_none_of_ours() -> None:
    result = Sweep().twice(listing(listed(), deployment="d2"), ledger())
    assert (result.report.refused, result.proposals) == ("other_deployment", [])


@pytest.mark.parametrize("observes_gone", [True, False])
def test_another_authoritys_things_are_not_judged_by_what_this_one_can_show(
    observes_gone: bool,
) -> None:
    foreign = listed("b", of=ref(native_id="n-b", authority="other"))
    mixed = listing(listed(), foreign, observes_gone=observes_gone)
    result = Sweep().twice(mixed, ledger())
    assert (result.report.refused, result.proposals) == ("other_authority", [])
    # The control: the second thing is of this authority too.
    own = listing(listed(), listed("b"), observes_gone=observes_gone)
    proposals = Sweep().twice(own, ledger()).proposals
    assert [getattr(fact, "observes_gone", None) for fact in proposals] == [observes_gone] * 2


def test_another_authoritys_listing_does_not_make_the_grace_begin_anew() -> None:
    sweep, item = Sweep(), listed()
    sweep.tick(listing(item), ledger())
    sweep.tick(listing(listed(of=ref(native_id="n-b", authority="other"))), ledger())
    assert len(sweep.tick(listing(item), ledger()).proposals) == 1


def test_what_fits_in_between_is_a_first_sight_again() -> None:
    sweep, item = Sweep(), listed()
    sweep.tick(listing(item), ledger())
    assert why(sweep.tick(listing(item), ledger(row()))) == "vouched"
    assert why(sweep.tick(listing(item), ledger())) == "first_sight"


def test_another_instance_under_the_name_is_a_first_sight_of_its_own() -> None:
    sweep = Sweep()
    sweep.tick(listing(listed()), ledger())
    other = listed(of=ref("i2", native_id="n-sbx"))
    assert why(sweep.tick(listing(other), ledger())) == "first_sight"


def test_s096_a_census_proposes_nothing_and_counts_all() -> None:
    items = [listed(f"s{n}") for n in range(30)]
    census = Sweep(census=True, budget=500).twice(listing(*items), ledger())
    assert (census.proposals, census.report.counts) == ([], {"census": 30})
    assert census.report.mode == "census"
    assert len(Sweep(budget=500).twice(listing(*items), ledger()).proposals) == 30


def test_s128_s155_a_budget_is_spent_on_the_longest_seen_and_the_rest_is_left_for_later() -> None:
    sweep = Sweep(budget=2)
    old = [listed(f"z{n}") for n in range(3)]
    young = [listed(f"a{n}") for n in range(3)]
    sweep.tick(listing(*old), ledger())
    sweep.tick(listing(*young, *old), ledger(), 1)
    result = sweep.tick(listing(*young, *old), ledger())
    assert [fact.sandbox for fact in result.proposals] == ["z0", "z1"]
    assert result.report.counts == {"proposed": 2, "budget": 4}
    stopped = [(f"z{n}", old[n].ref) for n in range(2)]
    result = sweep.tick(listing(*young, *old), ledger(strays=stopped))
    assert [fact.sandbox for fact in result.proposals] == ["z2", "a0"]


def test_s137_reached_deferred_and_proposed_are_told_apart() -> None:
    sweep = Sweep(budget=1)
    found = listing(
        listed("fine"), listed("going"), listed("x"), listed("y"), listed("z", deployment="d2")
    )
    known = ledger(row("fine"), row("going", releasing=True))
    report = sweep.twice(found, known).report
    assert report.reached == 5
    assert report.counts == {
        "vouched": 1,
        "being_released": 1,
        "other_deployment": 1,
        "proposed": 1,
        "budget": 1,
    }
    assert {(f.sandbox, f.why) for f in report.findings} == {
        ("x", "proposed"),
        ("y", "budget"),
        ("z", "other_deployment"),
    }


def test_a_report_lists_so_many_and_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "FINDINGS_MAX", 3)
    report = Sweep(budget=0).twice(listing(*(listed(f"s{n}") for n in range(9))), ledger()).report
    assert (len(report.findings), report.counts) == (3, {"budget": 9})


def test_s160_a_deferral_is_shorter_than_the_life_of_its_record() -> None:
    age_ms = limits.COMMANDS_AGE_MS
    assert sweeping.is_due_before_forgotten(30_000, 15_000)
    assert not sweeping.is_due_before_forgotten(age_ms, 15_000)
    assert not sweeping.is_due_before_forgotten(30_000, age_ms // 2)


# --- who holds ------------------------------------------------------------------------------------


class Holders(Sweep):
    def look(self, known: Ledger, dags: dict[str, Dag | None], ms: int = GRACE) -> Result:
        self.now_ms += ms
        return sweeping.sweep_holders(self.policy, known, dags, self.sightings, now_ms=self.now_ms)


def holds(**acquisitions: str) -> Ledger:
    return ledger(row(holders=dict(acquisitions)))


def dag(*acquisitions: str, **over: Any) -> Dag:
    return Dag(exists=True, acquisitions=frozenset(acquisitions), **over)


@pytest.mark.parametrize(
    ("found", "expected", "evidence"),
    [
        ({"dag": Dag(exists=False)}, "proposed", "unknown_dag"),
        ({"dag": dag()}, "proposed", "not_acquired"),
        ({"dag": dag("acq")}, "held", ""),
        ({"dag": dag("acq2")}, "proposed", "not_acquired"),
        ({"dag": dag("acq2", whole=False)}, "holder_unknown", ""),
        ({"dag": None}, "holder_unknown", ""),
        ({}, "not_asked", ""),
    ],
)
def test_s130_s131_s132_s133_s134_a_holder_is_orphaned_only_by_proof(
    found: dict[str, Dag | None], expected: str, evidence: str
) -> None:
    sweep, known = Holders(), holds(dag="acq")
    first = sweep.look(known, found)
    assert first.proposals == []
    result = sweep.look(known, found)
    assert why(result) == expected
    if expected == "proposed":
        orphan = Orphaned(sandbox="sbx", dag="dag", acquisition="acq", evidence=evidence)
        assert result.proposals == [orphan]
    else:
        assert result.proposals == []


def test_only_the_orphan_among_the_holders_is_proposed() -> None:
    sweep, known = Holders(), holds(dead="a1", alive="a2")
    found = {"dead": Dag(exists=False), "alive": dag("a2")}
    sweep.look(known, found)
    result = sweep.look(known, found)
    assert [fact.dag for fact in result.proposals if isinstance(fact, Orphaned)] == ["dead"]
    assert result.report.counts == {"held": 1, "proposed": 1}


def test_a_misfit_that_is_not_asked_about_keeps_its_age() -> None:
    sweep, known, missing = Holders(), holds(dag="acq"), {"dag": Dag(exists=False)}
    sweep.look(known, missing)
    sweep.look(known, {})
    assert len(sweep.look(known, missing).proposals) == 1


def test_every_dag_has_its_turn_and_misfits_come_first() -> None:
    known = ledger(*(row(f"s{n}", holders={f"d{n}": f"a{n}"}) for n in range(5)))
    sightings, asked, after = Sightings(), [], ""
    for _ in range(3):
        asked += sweeping.dags_to_ask(known, sightings, after, 2)
        after = asked[-1]
    assert asked == ["d0", "d1", "d2", "d3", "d4", "d0"]
    sightings.replace(sweeping.LEDGER, {("holder", "s4", "d4", "a4"): 1})
    assert sweeping.dags_to_ask(known, sightings, "d1", 2) == ["d4", "d2"]
    assert sweeping.dags_to_ask(known, sightings, "d1", 0) == []


def test_a_report_survives_the_wire() -> None:
    report = Sweep().twice(listing(listed()), ledger()).report
    data = msgspec.json.encode(report)
    assert msgspec.json.decode(data, type=sweeping.Report) == report
