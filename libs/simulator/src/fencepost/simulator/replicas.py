"""
Replicas that hold shards: planners of the sandbox family, trackers of the dag family.

A lock with a time limit spreads the shards over the replicas, and protects nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fencepost.core.machine import Effect
from fencepost.simulator.ledger import SimulatedLog
from fencepost.simulator.mail import Post, Publication
from fencepost.simulator.owner import Hold
from fencepost.simulator.world import Process, World

LOCK_MS: Final = 1_500


class Locks:
    """The spreading of shards over replicas: a hint with a time limit that protects nothing."""

    def __init__(self) -> None:
        self.until_ms: dict[int, int] = {}
        self.of: dict[int, str] = {}


class Planner(Process):
    """
    One replica: it takes free shards, and whatever it is told to.

    `perform` makes an effect; `post` takes messages, None where there is no other family.
    """

    def __init__(
        self,
        world: World,
        name: str,
        log: SimulatedLog,
        *,
        locks: Locks,
        machine: Any,
        perform: Callable[[Planner, Effect], None],
        observer: Any,
        post: Post | None = None,
        kind: str = "owner",
    ) -> None:
        super().__init__(world, name)
        self.post = post
        self.crashes_between_effects = f"{kind}_crash_between_effects"
        self.log = log
        self.locks = locks
        self.machine = machine
        self.shards = len(log.batches)
        self.snapshot_every = world.options.snapshot_every
        self.skew_ms = 0
        self.takeovers = 0
        self.holds: dict[int, Hold] = {}
        self._perform = perform
        self._observer = observer

    def clock_ms(self) -> int:
        return self.world.now_ms + self.skew_ms

    def start(self) -> None:
        self.alive = True
        self.holds = {}
        self.after(self.world.between(0, 50), self._beat)

    def crash(self) -> None:
        """Everything in memory is gone; it is started again after a while."""
        self.kill()
        self.holds = {}
        self.world.after(self.world.between(50, 3_000), self._start_again)

    def _start_again(self) -> None:
        if not self.alive:
            self.start()

    def _beat(self) -> None:
        now_ms = self.world.now_ms
        for shard in range(self.shards):
            if shard in self.holds:
                if self.holds[shard].owning:
                    self.locks.until_ms[shard] = now_ms + LOCK_MS
                    self.locks.of[shard] = self.name
            elif self.locks.until_ms.get(shard, 0) <= now_ms or self.locks.of[shard] == self.name:
                self.locks.until_ms[shard] = now_ms + LOCK_MS
                self.locks.of[shard] = self.name
                self.take(shard)
        self.after(250, self._beat)

    def take(self, shard: int) -> None:
        """Starts a takeover, whatever the lock says."""
        if shard not in self.holds:
            self.takeovers += 1
            hold = Hold(self, shard)
            self.holds[shard] = hold
            hold.start()

    def owned(self, hold: Hold) -> None:
        self.world.tell("owned", self.name, f"shard {hold.shard} term {hold.term}")
        self._observer.owned(hold)

    def accepted(self, hold: Hold) -> None:
        self._observer.accepted(hold)

    def released(self, hold: Hold) -> None:
        if self.holds.get(hold.shard) is hold:
            del self.holds[hold.shard]

    def perform(self, hold: Hold, effect: Effect) -> None:
        self._observer.performed(hold, effect)
        self._perform(self, effect)

    def publish(self, sent: Publication) -> None:
        if self.post is not None:
            self.post.put(self, sent)

    def deliver(self, shard: int, value: Any) -> None:
        hold = self.holds.get(shard)
        if hold is not None:
            hold.deliver(value)

    def poke(self, shard: int) -> None:
        hold = self.holds.get(shard)
        if hold is not None:
            hold.turn()
