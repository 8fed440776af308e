"""
One process's share of a family's shards: taken, run, given up; the same for every family.

What a shard does is its machine's affair, and what feeds it the service's: here it is only decided
that a shard which ends by itself is tried again, and that one which may not be owned is said so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import structlog
from fencepost.core.errors import LedgerBrokenError, OwnershipLostError
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import RunnerMetrics
from fencepost.runtime.ports import ClockSkewedError, InputLostError
from fencepost.runtime.shard_runner import ShardRunner
from fencepost.runtime.spreader import Owners, Spreader

UNOWNABLE: Final = (LedgerBrokenError, InputLostError, ClockSkewedError)

logger = structlog.get_logger(__name__)


class Owned(Protocol):
    """A shard with what feeds it, for one ownership. `start` raises what `ShardRunner` does."""

    @property
    def runner(self) -> ShardRunner: ...

    async def start(self) -> None: ...

    async def stop(self, *, hand_over: bool = True) -> None: ...


class Replica:
    """`make` makes a shard, not started yet; it is called anew for each ownership."""

    def __init__(
        self,
        family: str,
        link: Link,
        clock: SystemClock,
        *,
        name: str,
        shards: int,
        make: Callable[[int], Owned],
        metrics: RunnerMetrics,
    ) -> None:
        self.owned: dict[int, Owned] = {}
        self._family = family
        self._clock = clock
        self._make = make
        self._metrics = metrics
        self._unownable: dict[int, str] = {}
        self._spreader = Spreader(
            Owners(link, family),
            clock,
            replica=name,
            shards=shards,
            own=self._own,
            give_up=self._give_up,
        )

    def start(self) -> None:
        """Begins to take shards."""
        self._spreader.start()

    async def stop(self) -> None:
        """Hands every shard over."""
        await self._spreader.stop()

    def why_not_ready(self) -> str:
        """Says why this replica does not own what it should, or nothing."""
        if self._unownable:
            shard, why = next(iter(self._unownable.items()))
            return f"shard {shard} cannot be owned: {why}"
        if not self._spreader.is_settled:
            return "shards are being taken over"
        return ""

    async def _own(self, shard: int) -> None:
        owned = self._make(shard)
        try:
            await owned.start()
        except UNOWNABLE as error:
            self._unownable[shard] = str(error)
            self._metrics.shards_unowned.set(len(self._unownable))
            self._metrics.takeovers.labels("refused").inc()
            logger.critical("shard_unownable", family=self._family, shard=shard, detail=str(error))
            if isinstance(error, ClockSkewedError):
                self._clock.anchor()
            raise
        self._unownable.pop(shard, None)
        self.owned[shard] = owned
        self._metrics.takeovers.labels("owned").inc()
        self._metrics.shards_owned.set(len(self.owned))
        self._metrics.shards_unowned.set(len(self._unownable))
        owned.runner.ended.add_done_callback(
            lambda ended: self._ended(shard, owned, ended.result())
        )

    async def _give_up(self, shard: int) -> None:
        owned = self.owned.pop(shard, None)
        if owned is not None:
            await owned.stop()
        self._unownable.pop(shard, None)
        self._metrics.shards_owned.set(len(self.owned))

    def _ended(self, shard: int, owned: Owned, error: Exception | None) -> None:
        """An ownership ended: by itself when there is an error, else because it was given up."""
        if error is None or self.owned.get(shard) is not owned:
            return
        del self.owned[shard]
        self._metrics.shards_owned.set(len(self.owned))
        if not isinstance(error, OwnershipLostError):
            self._unownable[shard] = str(error)
            self._metrics.shards_unowned.set(len(self._unownable))
        self._spreader.ended(shard, owned.stop(hand_over=False))
