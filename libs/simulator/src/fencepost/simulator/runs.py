"""
Runs by seed: one, or many; what they found, and the smallest run that still shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from fencepost.simulator.options import FAULTS, Options, draw
from fencepost.simulator.simulation import Simulation
from fencepost.simulator.world import Violation

SHRINK_RUNS_MAX: Final = 400


class Report(msgspec.Struct, kw_only=True):
    """
    What one run was and found. `checks` counts judgements by invariant, `faults` what was met.

    `outcomes` counts steps by their last state. `trace` is filled only where it was asked for.
    """

    seed: int
    options: Options
    events: int
    batches: int
    faults: dict[str, int]
    checks: dict[str, int]
    outcomes: dict[str, int]
    violations: list[Violation]
    settled_ms: int
    virtual_ms: int
    trace: list[str] = []


def run(seed: int, options: Options | None = None, *, tracing: bool = False) -> Report:
    """Runs one seed, under its own options or the given ones. The same arguments, the same run."""
    simulation = Simulation(seed, options or draw(seed), tracing=tracing)
    world = simulation.world
    simulation.run()
    checks: dict[str, int] = {}
    for checker in simulation.checkers:
        checks[checker.invariant] = checks.get(checker.invariant, 0) + checker.checks
    outcomes: dict[str, int] = {}
    for sent in simulation.workload.sent:
        state = simulation.state_of(sent.sandbox, sent.step)
        outcomes[state] = outcomes.get(state, 0) + 1
    return Report(
        seed=seed,
        options=simulation.options,
        events=world.events,
        batches=simulation.auditor.batches,
        faults=dict(world.met),
        checks=checks,
        outcomes=outcomes,
        violations=list(world.violations),
        settled_ms=simulation.settled_ms,
        virtual_ms=world.elapsed_ms,
        trace=world.trace or [],
    )


class _Shrinking:
    """What is left of a failing run, and how many runs were spent on it."""

    def __init__(self, seed: int, options: Options, invariant: str) -> None:
        self.seed = seed
        self.options = options
        self.invariant = invariant
        self.tried = 0

    def take(self, **fields: Any) -> bool:
        """Keeps these options when `invariant` is still the first thing to be violated."""
        if self.tried >= SHRINK_RUNS_MAX:
            return False
        self.tried += 1
        candidate = msgspec.structs.replace(self.options, **fields)
        found = run(self.seed, candidate).violations
        fails = bool(found) and found[0].invariant == self.invariant
        if fails:
            self.options = candidate
        return fails

    def fewer_of_everything(self) -> None:
        for fields in _SMALLER:
            if all(value < getattr(self.options, name) for name, value in fields.items()):
                self.take(**fields)

    def fewer_classes(self) -> None:
        again = True
        while again and self.tried < SHRINK_RUNS_MAX:
            again = False
            for name in FAULTS:
                if name in self.options.rates:
                    rates = {key: rate for key, rate in self.options.rates.items() if key != name}
                    again |= self.take(rates=rates)

    def fewer_faults(self) -> None:
        """Spares the faults that the violation does not need."""
        self._without("spared", lambda met: sum(met.faults.values()) + len(self.options.spared))

    def fewer_steps(self) -> None:
        """Withholds the steps that the violation does not need."""
        self._without("withheld", lambda _met: self.options.steps)

    def _without(self, field: str, count: Callable[[Report], int]) -> None:
        """Leaves out what is numbered: all, halves, quarters …, until nothing more can go."""
        again = True
        while again and self.tried < SHRINK_RUNS_MAX:
            again = False
            # Other lots after what was left out may make more of them than there were before.
            size = last = count(run(self.seed, self.options))
            while size and self.tried < SHRINK_RUNS_MAX:
                for first in range(1, last + 1, size):
                    out: tuple[int, ...] = getattr(self.options, field)
                    more = {*out, *range(first, min(first + size, last + 1))}
                    if len(more) > len(out):
                        again |= self.take(**{field: tuple(sorted(more))})
                size //= 2


_SMALLER: Final[tuple[dict[str, Any], ...]] = (
    {"dags": 0},
    {"dags": 1},
    {"dags": 2},
    {"trackers": 1},
    {"sweepers": 1},
    {"shards": 1},
    {"planners": 1},
    {"gateways": 1},
    {"sandboxes": 1},
    {"sandboxes": 2},
    {"steps": 1},
    {"steps": 2},
    {"steps": 5},
    {"steps": 10},
    {"steps": 20},
    {"external_share": 0.0},
    {"command_share": 0.0},
)


def shrink(seed: int, options: Options, invariant: str) -> Options:
    """
    Drops fault classes and single faults, processes and single steps, while `invariant` is still
    violated.

    Greedy and bounded: the result is small, not the smallest. Other lots may hit other places,
    so what is compared is the invariant alone.
    """
    shrinking = _Shrinking(seed, options, invariant)
    shrinking.fewer_of_everything()
    shrinking.fewer_classes()
    shrinking.fewer_steps()
    shrinking.fewer_faults()
    shrinking.fewer_classes()
    shrinking.fewer_of_everything()
    return shrinking.options
