"""What a gateway remembers of the checkpoints that the ledger may not name yet."""

from fencepost.core.facts import Checkpointed
from fencepost.core.sandbox.orders import CheckpointOrder
from fencepost.core.sandbox.reported import REPORTED_MAX, Reported

from tests.factories import manifest


def fact(checkpoint: str, *, sandbox: str = "sb1", session: str = "g1.s1") -> Checkpointed:
    return Checkpointed(
        sandbox=sandbox,
        gateway="g1",
        session=session,
        epoch=1,
        checkpoint=checkpoint,
        nonce="n",
        manifest=manifest(checkpoint),
        journal_seq=1,
    )


def reported(*names: str) -> Reported:
    told = Reported()
    for name in names:
        told.add(fact(name))
    return told


def unknown(told: Reported, *keep: str) -> list[str]:
    return told.unknown("sb1", [manifest(name) for name in keep])


def order(checkpoint: str, *, session: str = "g1.s1") -> CheckpointOrder:
    return CheckpointOrder(
        sandbox="sb1", epoch=1, session=session, checkpoint=checkpoint, base="", reason="asked"
    )


def test_a_repeated_order_gets_the_same_report_and_another_none() -> None:
    told = reported("k1", "k2")
    assert told.answer(order("k2")) == fact("k2")
    assert told.answer(order("k3")) is None
    assert told.answer(order("k2", session="g1.s2")) is None


def test_a_late_order_to_drop_spares_what_was_reported_after_it_was_decided() -> None:
    told = reported("k1", "k2", "k3")
    assert unknown(told, "k1") == [manifest(name) for name in ("k1", "k2", "k3")]
    assert unknown(told, "k2") == [manifest(name) for name in ("k2", "k3")]


def test_an_order_that_knows_nothing_of_this_session_spares_all_of_it() -> None:
    assert unknown(reported("k1", "k2"), "old") == [manifest("k1"), manifest("k2")]


def test_an_order_that_keeps_none_ends_it_for_that_sandbox_alone() -> None:
    told = reported("k1")
    told.add(fact("k9", sandbox="sb2"))
    assert unknown(told) == []
    assert unknown(told, "old") == []
    assert told.unknown("sb2", ["old"]) == [manifest("k9")]


def test_only_the_newest_are_remembered() -> None:
    names = [f"k{no}" for no in range(REPORTED_MAX + 1)]
    assert unknown(reported(*names), "old") == [manifest(name) for name in names[1:]]
