"""Which ledger a projection says that it is of."""

from __future__ import annotations

from fencepost.release_tracker.store import Ledger


def test_of_one_ledger_the_tables_say_what_they_always_said() -> None:
    """Else an upgrade would refuse every projection that exists."""
    assert Ledger(("2026-01-02T03:04:05.6Z",), 8).incarnation == "2026-01-02T03:04:05.6Z"


def test_other_streams_or_another_number_of_them_are_another_ledger() -> None:
    said = {
        Ledger(each, 8).incarnation for each in (("a",), ("a", "b"), ("b", "a"), ("a", "b", "c"))
    }
    assert len(said) == 4
