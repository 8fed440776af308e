"""
The world: virtual time, one source of lots, one heap of what will happen, and who may be killed.

Rule 1: everything that happens is an item of the heap, ordered by (due, sequence): never by
object, so equal seeds give equal runs under any `PYTHONHASHSEED`.
Rule 2: the world makes no decisions about steps or sandboxes; it only moves time and breaks things.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec
from fencepost.simulator import trace
from fencepost.simulator.options import Options

START_MS: Final = 1_700_000_000_000

Call: TypeAlias = Callable[..., object]


class Process:
    """
    Something that can be killed, started again, paused and continued.

    What was scheduled for a former life never happens; what comes due during a pause happens
    when it continues.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 1
        self.alive = True
        self.paused = False
        self.cuts: dict[str, int] = {}
        self._backlog: list[tuple[Call, tuple[Any, ...]]] = []

    def cut(self, peer: str, ms: int) -> None:
        """Parts this process from a peer (its name, or its kind) for a time."""
        self.cuts[peer] = max(self.cuts.get(peer, 0), self.world.now_ms + ms)
        self.world.tell("parted", self.name, "from", peer, f"for {ms} ms")

    def is_cut(self, peer: str) -> bool:
        return bool(self.cuts) and self.cuts.get(peer, 0) > self.world.now_ms

    def after(self, ms: int, call: Call, *args: Any) -> None:
        self.world.schedule(ms, self, call, args)

    def kill(self) -> None:
        self.life += 1
        self.alive = False
        self.paused = False
        self._backlog.clear()
        self.world.tell("killed", self.name)

    def pause(self) -> None:
        self.paused = True
        self.world.tell("paused", self.name)

    def keep(self, call: Call, args: tuple[Any, ...]) -> None:
        self._backlog.append((call, args))

    def resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        self.world.tell("continued", self.name)
        backlog, self._backlog = self._backlog, []
        for call, args in backlog:
            self.world.schedule(0, self, call, args)


class Violation(msgspec.Struct, frozen=True):
    """One broken guarantee: `invariant` names it (I1 to I10), `at_event` counts heap items."""

    invariant: str
    detail: str
    at_event: int
    at_ms: int


class World:
    def __init__(self, seed: int, options: Options, *, tracing: bool) -> None:
        self.seed = seed
        self.options = options
        self.rng = random.Random(seed)
        self.now_ms = START_MS
        self.events = 0
        self.faults_on = True
        self.met: dict[str, int] = {}
        self.violations: list[Violation] = []
        self.trace: list[str] | None = [] if tracing else None
        self._heap: list[tuple[int, int, Process | None, int, Call, tuple[Any, ...]]] = []
        self._sequence = 0
        self._rates = options.rates
        self._spared = frozenset(options.spared)
        self._hits = 0

    @property
    def elapsed_ms(self) -> int:
        return self.now_ms - START_MS

    # --- time -----------------------------------------------------------------------------

    def schedule(self, ms: int, process: Process | None, call: Call, args: tuple[Any, ...]) -> None:
        self._sequence += 1
        life = process.life if process is not None else 0
        heapq.heappush(self._heap, (self.now_ms + ms, self._sequence, process, life, call, args))

    def after(self, ms: int, call: Call, *args: Any) -> None:
        self.schedule(ms, None, call, args)

    def answer(
        self, ms: int, process: Process, life: int, call: Call, args: tuple[Any, ...]
    ) -> None:
        """Schedules an answer to what `process` asked in its life `life`."""
        if process.life == life:
            self.schedule(ms, process, call, args)

    def step(self) -> bool:
        """Lets the next thing happen; False when nothing is left."""
        while self._heap:
            due_ms, _, process, life, call, args = heapq.heappop(self._heap)
            if process is not None:
                if process.life != life:
                    continue
                if process.paused:
                    process.keep(call, args)
                    continue
            self.now_ms = max(self.now_ms, due_ms)
            self.events += 1
            call(*args)
            return True
        return False

    # --- lots -----------------------------------------------------------------------------

    def hit(self, fault: str) -> bool:
        """Draws whether a fault happens here and now; counts those that do."""
        rate = self._rates.get(fault)
        if rate is None or not self.faults_on or self.rng.random() >= rate:
            return False
        self._hits += 1
        if self._hits in self._spared:
            return False
        self.met[fault] = self.met.get(fault, 0) + 1
        if self.trace is not None:
            self.tell("fault", fault)
        return True

    def between(self, low: int, high: int) -> int:
        return low + int(self.rng.random() * (high - low + 1))

    # --- what is told ---------------------------------------------------------------------

    def tell(self, kind: str, *words: object) -> None:
        """One line of the trace; nothing when nobody asked for one."""
        if self.trace is not None:
            self.trace.append(trace.line(self.now_ms - START_MS, self.events, kind, *words))

    def violate(self, invariant: str, detail: str) -> None:
        self.tell("VIOLATED", invariant, detail)
        self.violations.append(Violation(invariant, detail, self.events, self.now_ms - START_MS))
