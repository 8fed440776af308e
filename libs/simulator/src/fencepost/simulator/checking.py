"""
What every checker is: it judges when something happens, counts that, and reports what is wrong.

`checks` counts how often its premise was met, for the coverage table. Whatever it finds goes to the
world as a violation, and the run ends there.
"""

from __future__ import annotations

from typing import ClassVar

from fencepost.simulator.auditor import Auditor


class Checker:
    invariant: ClassVar[str] = ""
    promises: ClassVar[str] = ""

    def __init__(self, auditor: Auditor) -> None:
        self.auditor = auditor
        self.world = auditor.world
        self.checks = 0

    def need(self, holds: bool, detail: str) -> None:
        self.checks += 1
        if not holds:
            self.world.violate(self.invariant, detail)
