"""
What the entries of the dag family tell, kept in the dumbest way: nothing is ever forgotten.
"""

from __future__ import annotations

from typing import Any, Final

SETTLED: Final = ("confirmed", "nothing_held")


class AcquisitionView:
    """One acquisition. `fresh`: its sandbox was made for it, under the same id."""

    __slots__ = ("fresh", "id", "let_go", "sandbox", "slot", "state")

    def __init__(self, entry: dict[str, Any]) -> None:
        self.id: str = entry["acquisition"]
        self.sandbox: str = entry["sandbox"]
        self.slot: str = entry["slot"]
        self.fresh = entry.get("spec") is not None
        self.let_go = False
        self.state = "open"


class DagView:
    """One DAG as its entries tell it. `answers` and `asked`: cancels to verdicts and bounds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.verdict = ""
        self.acquisitions: dict[str, AcquisitionView] = {}
        self.answers: dict[str, str] = {}
        self.asked: dict[str, int] = {}

    @property
    def open_count(self) -> int:
        return sum(one.state == "open" for one in self.acquisitions.values())

    def take(self, kind: str, entry: dict[str, Any]) -> None:
        match kind:
            case "intended":
                one = AcquisitionView(entry)
                self.acquisitions[one.id] = one
            case "release_begun":
                self.acquisitions[entry["acquisition"]].let_go = True
            case "release_settled":
                self.acquisitions[entry["acquisition"]].state = "gone"
            case "abandoned":
                self.acquisitions[entry["acquisition"]].state = "abandoned"
            case "closed" | "cancel_asked":
                self.closed = True
                if entry.get("cancel"):
                    self.asked[entry["cancel"]] = entry["answer_by_ms"]
            case "answered":
                self.verdict = entry["verdict"]
                if entry.get("cancel"):
                    self.asked.pop(entry["cancel"], None)
                    self.answers[entry["cancel"]] = entry["verdict"]
            case "refused":
                self.answers[entry["id"]] = "refused"
            case _:
                pass
