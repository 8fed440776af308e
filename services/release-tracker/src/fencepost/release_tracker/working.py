"""
What both families' rows have in common while a group of batches is taken: which were changed, and
at which place of the ledger. Only computes; see `projecting`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, TypeVar

from fencepost.core.errors import FencepostError


class Keyed(Protocol):
    """A row of some table: `KEY` names the fields of its primary key."""

    KEY: ClassVar[tuple[str, ...]]


_Row = TypeVar("_Row", bound=Keyed)


class ShardStopsError(FencepostError):
    """A batch of this shard cannot be projected, and no other try would go better."""

    def __init__(self, shard: int, message: str) -> None:
        super().__init__(message)
        self.shard = shard


class ProjectionHoleError(ShardStopsError):
    """The tables lack a row that the ledger says was made: they were changed by other hands."""


class Group(ABC):
    """The rows that a group of batches reads and changes, until they are written."""

    SHARD: ClassVar[str]
    """What a shard of this family is called."""

    def __init__(self) -> None:
        self.changed: dict[type, dict[Any, Any]] = {}
        self._shard = 0
        self._seq = 0
        self._index = 0
        self._now_ms = 0

    @abstractmethod
    def take(self, row: Any) -> None:
        """Takes a row as it stands in the table."""

    @abstractmethod
    def apply_one(self, entry: Any) -> None:
        """Does to the rows what this kind of entry does."""

    def apply(self, shard: int, seq: int, now_ms: int, entries: Iterable[Any]) -> None:
        """Takes one whole batch. Raises `ProjectionHoleError`."""
        self._shard, self._seq, self._now_ms = shard, seq, now_ms
        for index, entry in enumerate(entries):
            self._index = index
            self.apply_one(entry)

    def _change(self, row: _Row) -> _Row:
        key = tuple(getattr(row, field) for field in row.KEY)
        self.changed.setdefault(type(row), {})[key] = row
        return row

    def _hole(self, what: str) -> ProjectionHoleError:
        return ProjectionHoleError(
            self._shard,
            f"{self.SHARD} {self._shard}, sequence {self._seq}: the projection lacks {what};"
            " make it again: python -m fencepost.release_tracker rebuild",
        )
