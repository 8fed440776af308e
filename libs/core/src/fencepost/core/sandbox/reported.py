"""
What one gateway session said of the checkpoints that it stored, until the ledger is known to name
them: an order to drop may have been decided before the shard heard of the newest ones.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from fencepost.core.facts import Checkpointed
from fencepost.core.sandbox.orders import CheckpointOrder

REPORTED_MAX: Final = 16
"""Of one sandbox; more are taken only while the shard hears of none."""


class Reported:
    """One session's. Lost with it: what was stored lately is kept by its age as well."""

    def __init__(self) -> None:
        self._facts: dict[str, list[Checkpointed]] = {}

    def add(self, fact: Checkpointed) -> None:
        said = self._facts.setdefault(fact.sandbox, [])
        said.append(fact)
        del said[:-REPORTED_MAX]

    def answer(self, order: CheckpointOrder) -> Checkpointed | None:
        """What was said to the same order: a repeated one gets the same report."""
        for fact in self._facts.get(order.sandbox, ()):
            if (fact.checkpoint, fact.session) == (order.checkpoint, order.session):
                return fact
        return None

    def unknown(self, sandbox: str, keep: Collection[str]) -> list[str]:
        """
        The manifests that were reported since the newest one that an order to drop keeps, and it.

        An order that keeps none comes after the sandbox's end: nothing that was reported of it can
        count any more.
        """
        if not keep:
            self._facts.pop(sandbox, None)
            return []
        said = self._facts.get(sandbox, [])
        known = [at for at, fact in enumerate(said) if fact.manifest in keep]
        if known:
            del said[: known[-1]]
        return [fact.manifest for fact in said]
