"""What is lost of a sandbox, as its ledger tells it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fencepost.client.losses import NOT_CHANGED, NOTHING, Differs, Losses, Story
from fencepost.core.errors import RefusedError
from fencepost.core.machine import Place
from fencepost.core.receipts import Change
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import owed
from fencepost.core.steps import Origin

from tests.unit.client import test_forks as forks

MANIFEST = "sha256:" + "0" * 64


class Ledger(forks.Story):
    """The same story, told of what is lost."""

    def __init__(self, **created: Any) -> None:
        self.losses = Story("box")
        super().__init__(**created)

    def tell(self, *entries: e.SandboxEntry) -> None:
        for entry in entries:
            self.losses.take(entry, Place(self.seq, 0))
            super().tell(entry)

    def told(self) -> Losses:
        return self.losses.told()

    def given_up(self) -> list[str]:
        return [one.step for one in self.told().given_up]

    def stops(self, step: str, changes: list[Change], shown: int = 100, **more: Any) -> None:
        first = self.losses._first[f"{step}.1"]
        again = msgspec.structs.replace(first, changes=changes)
        fields: dict[str, Any] = {
            "expected": owed.effect_of(first),
            "found": owed.effect_of(again),
            "changes": tuple(changes[:shown]),
            **more,
        }
        self.tell(
            e.RecoveryStopped(
                sandbox="box", epoch=2, reason="differs", step=step, attempt=f"{step}.1", **fields
            )
        )


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_with_a_lost_checkpoint_all_that_it_held_is_told(ledger: Ledger) -> None:
    ledger.step("one", 1)
    ledger.step("outside", 2, effect="external")
    ledger.checkpoint("c1", 2)
    ledger.step("two", 3)
    ledger.gives_up(lost="c1")
    assert ledger.given_up() == ["one", "two"]
    assert ledger.told().lost == ["c1"]
    ledger.step("three", 1, epoch=2)
    assert ledger.given_up() == ["one", "two"], "what came later is there"


def test_with_a_checkpoint_that_stands_only_the_rest_is_told(ledger: Ledger) -> None:
    ledger.step("one", 1)
    ledger.checkpoint("c1", 1)
    ledger.step("two", 2)
    ledger.gives_up()
    assert (ledger.given_up(), ledger.told().lost) == (["two"], [])


def test_a_lost_checkpoint_of_an_origin_is_told_as_such() -> None:
    ledger = Ledger(origin=Origin(sandbox="first", checkpoint="c0", manifest=MANIFEST))
    ledger.step("one", 1)
    assert ledger.told().origin == ""
    ledger.gives_up(lost="c0")
    assert (ledger.told().origin, ledger.told().lost) == ("first", ["c0"])


def test_a_difference_is_told_path_by_path(ledger: Ledger) -> None:
    ledger.step("one", 1)
    assert ledger.told().stopped == ""
    ledger.stops("one", [Change("a", None, None), Change("b", None, "sha256:b", "755")])
    told = ledger.told()
    assert (told.stopped, told.step, told.is_cut) == ("differs", "one", False)
    assert told.differs == [
        Differs(path="a", expected="sha256:one", found=NOTHING),
        Differs(path="b", expected=NOT_CHANGED, found="sha256:b 755"),
    ]
    ledger.tell(e.RecoveryDecided(sandbox="box", epoch=2, decision="accept", who="me"))
    assert ledger.told().differs == []


def test_of_a_list_that_is_cut_only_what_both_name_is_compared(ledger: Ledger) -> None:
    ledger.step("one", 1)
    many = [Change("a", None, "sha256:x"), *(Change(f"b{n}", None, "sha256:b") for n in range(9))]
    ledger.stops("one", many, shown=3)
    told = ledger.told()
    assert told.is_cut
    assert told.differs == [Differs(path="a", expected="sha256:one", found="sha256:x")]


def test_where_no_receipt_lists_what_was_expected_what_was_found_is_told(ledger: Ledger) -> None:
    """An operator accepted another effect before; the first receipt is not what is expected."""
    ledger.step("one", 1)
    ledger.stops("one", [Change("a", None, "sha256:x")], expected="ok:accepted")
    assert ledger.told().differs == [Differs(path="a", expected="", found="sha256:x")]
    assert ledger.told().is_cut


def test_a_sandbox_that_is_none_is_refused() -> None:
    with pytest.raises(RefusedError):
        Story("box").told()
