"""Two inputs to one shard about who holds a sandbox: section 5, where a row was written to."""

from typing import Any

from fencepost.core.sandbox import entries as e
from fencepost.core.shard_messages import Hold, Unhold

from tests.factories import Bench, kinds, only


def held_by(*dags: str) -> Bench:
    bench = Bench().live()
    for dag in dags:
        hold(bench, dag)
    bench.command("release", "r", {})
    return bench


def hold(bench: Bench, dag: str) -> list[Any]:
    return bench.take(Hold(dag=dag, acquisition=f"acq-{dag}", sandbox="sbx", spec=None))


def unhold(bench: Bench, dag: str) -> list[Any]:
    return bench.take(Unhold(dag=dag, acquisition=f"acq-{dag}", sandbox="sbx"))


def test_s082_s089_a_neighbour_that_came_meanwhile_survives_a_removal() -> None:
    bench = held_by("a")
    assert "holder_added" in kinds(hold(bench, "b"))
    assert "releasing" not in kinds(unhold(bench, "a"))
    assert set(bench.sandbox().holders) == {"b"}
    assert not bench.sandbox().releasing


def test_s083_the_last_removal_and_the_release_are_one_decision() -> None:
    bench = held_by("a", "b")
    first, second = unhold(bench, "a"), unhold(bench, "b")
    assert "releasing" not in kinds(first)
    assert kinds(second)[:2] == ["holder_removed", "releasing"]
    told = only(hold(bench, "c"))
    assert (type(told), told.phase, told.reason) == (e.ToldEntry, "refused", "sandbox_released")


def test_s086_s087_a_removal_under_another_identity_removes_nothing() -> None:
    bench = held_by("a")
    for acquisition in ("acq-b", ""):
        wrong = Unhold(dag="a", acquisition=acquisition, sandbox="sbx")
        told = only(bench.take(wrong))
        assert (told.phase, told.reason) == ("refused", "not_a_holder")
    assert set(bench.sandbox().holders) == {"a"}
    assert "releasing" in kinds(unhold(bench, "a"))


def test_s090_a_release_of_an_older_claim_leaves_a_newer_holder_alone() -> None:
    bench = Bench().live()
    hold(bench, "a")
    assert kinds(bench.command("release", "r", {})) == ["unclaimed"]
    assert not bench.sandbox().releasing
