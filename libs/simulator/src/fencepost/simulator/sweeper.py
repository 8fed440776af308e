"""
A simulated sweeper: it reads in the live order, and lets `core.sweeping` judge.

Listings first, then the shards, then the DAGs, each question with a time limit; what did not come
is a problem with a name, never an absence. Proposals go into the stream of facts, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fencepost.contracts.messages import ListReply
from fencepost.core import ids, sweeping
from fencepost.core.dag.state import DagShard
from fencepost.core.facts import Fact
from fencepost.core.sandbox.state import SandboxShard
from fencepost.core.sandbox.views import view_sweep
from fencepost.core.sweeping import Dag, Ledger, Listed, Listing, Policy, Result, Sightings
from fencepost.simulator.gateway import Gateway
from fencepost.simulator.provider import AUTHORITIES, DEPLOYMENT
from fencepost.simulator.replicas import Planner
from fencepost.simulator.world import Process, World

EVERY_MS: Final = 1_200
GRACE_MS: Final = 1_000
BUDGET: Final = 2
ASK_MS: Final = 700
PAGES_MAX: Final = 40
ROWS: Final = 2
ASKS_MAX: Final = 3


class Tick:
    """What one tick has read so far. It counts what it waits for; at nothing it goes on."""

    def __init__(self, shards: int) -> None:
        self.waits = 0
        self.listings: dict[str, Listing] = {}
        self.ledger = Ledger(shards)
        self.dags: dict[str, Dag | None] = {}


class Sweeper(Process):
    """`propose(fact)` puts a fact into its stream."""

    def __init__(
        self,
        world: World,
        name: str,
        *,
        gateways: list[Gateway],
        planners: list[Planner],
        trackers: list[Planner],
        shards: int,
        propose: Callable[[Fact], None],
        observer: Any,
    ) -> None:
        super().__init__(world, name)
        self.skew_ms = 0
        self._gateways = gateways
        self._planners = planners
        self._trackers = trackers
        self._shards = shards
        self._propose = propose
        self._observer = observer
        self._sightings = Sightings()
        self._after = ""

    def start(self) -> None:
        self.alive = True
        self._sightings = Sightings()
        self._after = ""
        self.after(self.world.between(0, EVERY_MS), self._tick)

    def crash(self) -> None:
        self.kill()
        self.world.after(self.world.between(50, 3_000), self._start_again)

    def _start_again(self) -> None:
        if not self.alive:
            self.start()

    # --- reading --------------------------------------------------------------------------

    def _tick(self) -> None:
        self.after(EVERY_MS, self._tick)
        tick = Tick(self._shards)
        tick.waits = len(AUTHORITIES)
        for authority in AUTHORITIES:
            self._list(tick, authority)

    def _done(self, tick: Tick, then: Callable[[Tick], None]) -> None:
        tick.waits -= 1
        if tick.waits == 0:
            then(tick)

    def _asked(
        self, process: Process, peer: str, ask: Callable[[Callable[[Any], None]], None]
    ) -> Callable[[Callable[[Any], None]], None]:
        """A question to another process: it, its answer, or both may never come (None)."""
        world = self.world

        def start(answer: Callable[[Any], None]) -> None:
            answered = False
            life = self.life

            def back(said: Any) -> None:
                world.answer(world.between(0, 3), self, life, once, (said,))

            def once(said: Any) -> None:
                nonlocal answered
                if not answered:
                    answered = True
                    answer(said)

            if not self.is_cut(peer) and not world.hit("question_lost"):
                process.after(world.between(0, 3), ask, back)
            self.after(ASK_MS, once, None)

        return start

    def _list(self, tick: Tick, authority: str) -> None:
        reaching = [g for g in self._gateways if g.alive and authority in g.reaches]
        items: list[Listed] = []

        def ended(problem: str, reply: ListReply | None) -> None:
            tick.listings[authority] = Listing(
                authority=authority,
                deployment="" if reply is None else reply.deployment,
                items=items,
                observes_gone=reply is None or reply.observes_gone,
                problem=problem,
            )
            self._done(tick, self._read_ledger)

        if not reaching:
            ended("no_gateway", None)
            return
        gateway = reaching[self.world.between(0, len(reaching) - 1)]
        pages = 0

        def take(reply: ListReply | None) -> None:
            nonlocal pages
            pages += 1
            if reply is None or reply.problem:
                ended("no_answer" if reply is None else reply.problem, None)
                return
            items.extend(reply.items)
            if not reply.token:
                ended("" if reply.complete else "incomplete_listing", reply)
            elif pages >= PAGES_MAX:
                ended("endless_listing", reply)
            else:
                ask(reply.token)

        def ask(token: str) -> None:
            def page(back: Callable[[Any], None]) -> None:
                gateway.list_page(authority, token, back)

            self._asked(gateway, "gateway", page)(take)

        ask("")

    def _ask_owner(
        self,
        replicas: list[Planner],
        peer: str,
        shard: int,
        read: Callable[[Any], Any],
        answer: Callable[[Any], None],
    ) -> None:
        """Asks whoever holds a shard; the first proven answer counts, None where none comes."""

        def ask(back: Callable[[Any], None]) -> None:
            for replica in replicas:
                hold = replica.holds.get(shard)
                if hold is not None and replica.alive and not replica.paused:
                    hold.ask(lambda state: back(read(state)))

        asked = replicas[self.world.between(0, len(replicas) - 1)]
        holder = next((r for r in replicas if r.alive and shard in r.holds), asked)
        self._asked(holder, peer, ask)(answer)

    def _read_ledger(self, tick: Tick) -> None:
        tick.waits = self._shards
        for shard in range(self._shards):
            self._read_shard(tick, shard, 0)

    def _read_shard(self, tick: Tick, shard: int, after: int) -> None:
        def read(state: SandboxShard) -> Any:
            return view_sweep(state, after, ROWS)

        def answered(page: Any) -> None:
            if page is None:
                tick.ledger.silent.add(shard)
                self._done(tick, self._judge_listings)
                return
            tick.ledger.take(page)
            if page.next is None:
                self._done(tick, self._judge_listings)
            else:
                self._read_shard(tick, shard, page.next)

        self._ask_owner(self._planners, "owner", shard, read, answered)

    # --- judging --------------------------------------------------------------------------

    def _policy(self, budget: int, *, census: bool) -> Policy:
        return Policy(deployment=DEPLOYMENT, grace_ms=GRACE_MS, budget=budget, census=census)

    def _now_ms(self) -> int:
        return self.world.now_ms + self.skew_ms

    def _judge_listings(self, tick: Tick) -> None:
        census = self.world.hit("sweep_census_only")
        left = BUDGET
        facts: list[Fact] = []
        for listing in tick.listings.values():
            result = sweeping.sweep_listing(
                self._policy(left, census=census),
                listing,
                tick.ledger,
                self._sightings,
                now_ms=self._now_ms(),
            )
            left -= len(result.proposals)
            self._tell(result)
            facts += result.proposals
        wanted = sweeping.dags_to_ask(tick.ledger, self._sightings, self._after, ASKS_MAX)
        if wanted:
            self._after = wanted[-1]
        tick.waits = len(wanted) + 1

        def then(tick: Tick) -> None:
            self._judge_holders(tick, facts, left, census=census)

        for dag in wanted:
            self._ask_dag(tick, dag, then)
        self._done(tick, then)

    def _ask_dag(self, tick: Tick, dag: str, then: Callable[[Tick], None]) -> None:
        def read(state: DagShard) -> Dag:
            known = state.dags.get(dag)
            if known is None:
                return Dag(exists=dag in state.past)
            return Dag(exists=True, acquisitions=frozenset(known.acquisitions))

        def answered(said: Dag | None) -> None:
            tick.dags[dag] = said
            self._done(tick, then)

        shard = ids.shard_of(dag, self._shards)
        self._ask_owner(self._trackers, "tracker", shard, read, answered)

    def _judge_holders(self, tick: Tick, facts: list[Fact], left: int, *, census: bool) -> None:
        result = sweeping.sweep_holders(
            self._policy(left, census=census),
            tick.ledger,
            tick.dags,
            self._sightings,
            now_ms=self._now_ms(),
        )
        self._tell(result)
        self._propose_next([*facts, *result.proposals])

    def _tell(self, result: Result) -> None:
        self._observer.swept(result)
        if self.world.trace is not None and result.report.reached:
            counts = ", ".join(f"{why}={n}" for why, n in sorted(result.report.counts.items()))
            self.world.tell("swept", self.name, result.report.authority, counts)

    # --- proposing ------------------------------------------------------------------------

    def _propose_next(self, facts: list[Fact]) -> None:
        """One at a time, so that a crash, or the loss of the lead, can come between any two."""
        world = self.world
        if not facts:
            return
        if world.hit("sweeper_crash_between_effects"):
            self.crash()
            return
        if world.hit("sweep_lead_lost"):
            return
        fact, *rest = facts
        if not self.is_cut("log") and not world.hit("proposal_lost"):
            world.after(world.between(0, 5), self._propose, fact)
            if world.hit("proposal_repeated"):
                world.after(world.between(0, 6_000), self._propose, fact)
        self.after(world.between(0, 3), self._propose_next, rest)
