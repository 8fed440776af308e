"""
One tick: read, judge, propose, report. What follows from what was read is `core.sweeping`'s.

Listings are read before the shards: what runs with a shard's knowledge was then in its state before
it was listed. The lead is asked for again before every proposal (S-161); without it a tick proposes
nothing more and says how much was left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
import structlog
from fencepost.core import sweeping
from fencepost.core.facts import Fact, Stray
from fencepost.core.sweeping import Dag, Ledger, Listing, Policy, Report, Sightings
from fencepost.runtime.metrics import SweeperMetrics
from fencepost.runtime.ports import Clock
from fencepost.sweeper.reading import Mode, Sources

DAGS_AT_ONCE: Final = 16

logger = structlog.get_logger(__name__)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`budget` bounds a tick's proposals, `asks` the DAGs that it asks about."""

    deployment: str
    mode: Mode = "on"
    grace_ms: int = 30_000
    budget: int = 50
    asks: int = 500


class Sweeper:
    """
    Ticks, one at a time. `leads` says whether this replica still has the lead, asking anew.

    The first tick of a lead has seen nothing before, so it is a census by construction.
    """

    def __init__(
        self,
        sources: Sources,
        options: Options,
        *,
        clock: Clock,
        metrics: SweeperMetrics,
        leads: Callable[[], Awaitable[bool]],
    ) -> None:
        self._sources = sources
        self._options = options
        self._clock = clock
        self._metrics = metrics
        self._leads = leads
        self._sightings = Sightings()
        self._after = ""
        self._ticking = asyncio.Lock()

    async def tick(self, *, census: bool = False) -> list[Report]:
        """Sweeps once and tells what it saw. `census`: proposes nothing, whatever the mode."""
        async with self._ticking:
            began_ms = self._clock.monotonic_ms()
            mode = await self._sources.mode(self._options.mode)
            if mode == "off" and not census:
                self._metrics.sweeps.labels("off").inc()
                return []
            reports = await self._sweep(is_census=census or mode != "on")
            self._metrics.sweep_seconds.observe((self._clock.monotonic_ms() - began_ms) / 1000)
            for report in reports:
                self._sources.report(report)
            self._count(reports)
            return reports

    async def _sweep(self, *, is_census: bool) -> list[Report]:
        sources = self._sources
        listings = [await sources.listing(name) for name in sources.authorities()]
        ledger = await sources.ledger()
        listings += self._unreached(ledger, {listing.authority for listing in listings})
        results = []
        left = self._options.budget
        for listing in listings:
            policy, now_ms = self._policy(left, is_census=is_census), self._clock.now_ms()
            result = sweeping.sweep_listing(policy, listing, ledger, self._sightings, now_ms=now_ms)
            left -= len(result.proposals)
            results.append(result)
        dags = await self._ask_dags(ledger)
        results.append(
            sweeping.sweep_holders(
                self._policy(left, is_census=is_census),
                ledger,
                dags,
                self._sightings,
                now_ms=self._clock.now_ms(),
            )
        )
        return [await self._propose(result) for result in results]

    def _policy(self, budget: int, *, is_census: bool) -> Policy:
        return Policy(
            deployment=self._options.deployment,
            grace_ms=self._options.grace_ms,
            budget=budget,
            census=is_census,
        )

    @staticmethod
    def _unreached(ledger: Ledger, reached: set[str]) -> list[Listing]:
        """The authorities that only the ledger knows: nobody can say what runs there."""
        known = {row.ref.authority for row in ledger.rows.values() if row.ref is not None}
        return [
            Listing(authority=name, deployment="", items=[], problem="no_gateway")
            for name in sorted(known - reached)
        ]

    async def _ask_dags(self, ledger: Ledger) -> dict[str, Dag | None]:
        wanted = sweeping.dags_to_ask(ledger, self._sightings, self._after, self._options.asks)
        found: dict[str, Dag | None] = {}
        at_once = asyncio.Semaphore(DAGS_AT_ONCE)

        async def ask(dag: str) -> None:
            async with at_once:
                found[dag] = await self._sources.dag(dag)

        await asyncio.gather(*(ask(dag) for dag in wanted))
        if wanted:
            self._after = wanted[-1]
        return found

    async def _propose(self, result: sweeping.Result) -> Report:
        unsent = 0
        for at, fact in enumerate(result.proposals):
            if not await self._leads():
                left = len(result.proposals) - at
                logger.warning("lead_lost", authority=result.report.authority, proposals_left=left)
                return msgspec.structs.replace(result.report, remaining=unsent + left)
            if await self._sources.propose(fact):
                self._note(fact)
            else:
                unsent += 1  # it still misfits in the next tick
        return msgspec.structs.replace(result.report, remaining=unsent)

    def _note(self, fact: Fact) -> None:
        kind = "stray" if isinstance(fact, Stray) else "orphaned"
        self._metrics.released.labels(kind).inc()
        logger.info(
            "proposed",
            kind=kind,
            sandbox=fact.sandbox,
            detail=fact.ref.instance if isinstance(fact, Stray) else getattr(fact, "evidence", ""),
        )

    def _count(self, reports: list[Report]) -> None:
        """S-137: reached, proposed and deferred are three numbers, deferrals one by reason."""
        self._metrics.reached.set(sum(report.reached for report in reports))
        for report in reports:
            self._metrics.sweeps.labels(report.refused or report.mode).inc()
            if report.refused:
                logger.warning("sweep_refused", authority=report.authority, why=report.refused)
            deferred = {
                why: count
                for why, count in report.counts.items()
                if why not in sweeping.SETTLED and why not in ("proposed", "not_asked")
            }
            for why, count in deferred.items():
                self._metrics.deferred.labels(why).inc(count)
            proposed = report.counts.get("proposed", 0)
            if deferred or proposed:
                logger.info(
                    "swept",
                    authority=report.authority,
                    mode=report.mode,
                    reached=report.reached,
                    proposed=proposed - report.remaining,
                    deferred=deferred,
                )
        misfits = (f for report in reports for f in report.findings if f.what == "stray")
        self._metrics.orphans.set(sum(1 for finding in misfits if finding.age_ms > 0))
