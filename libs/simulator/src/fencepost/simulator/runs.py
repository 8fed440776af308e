"""
Runs by seed: one, or many; what they found, and the smallest run that still shows it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fencepost.simulator.options import FAULTS, Options, draw
from fencepost.simulator.simulation import Simulation
from fencepost.simulator.world import Violation

SHRINK_RUNS_MAX: Final = 120


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


def shrink(seed: int, options: Options, invariant: str) -> Options:
    """
    Drops fault classes and shortens the run while `invariant` is still violated.

    Greedy and bounded: the result is small, not the smallest. Other lots may hit other places,
    so what is compared is the invariant alone.
    """
    tried = 0

    def fails(candidate: Options) -> bool:
        nonlocal tried
        tried += 1
        found = run(seed, candidate).violations
        return bool(found) and found[0].invariant == invariant

    def changed(**fields: Any) -> Options:
        return msgspec.structs.replace(options, **fields)

    for fields in (
        {"shards": 1},
        {"planners": 1},
        {"gateways": 1},
        {"sandboxes": 1},
        {"steps": 5},
        {"steps": 10},
        {"steps": 20},
        {"external_share": 0.0},
        {"command_share": 0.0},
    ):
        smaller = all(value < getattr(options, name) for name, value in fields.items())
        if smaller and tried < SHRINK_RUNS_MAX and fails(changed(**fields)):
            options = changed(**fields)
    again = True
    while again and tried < SHRINK_RUNS_MAX:
        again = False
        for name in FAULTS:
            if name not in options.rates or tried >= SHRINK_RUNS_MAX:
                continue
            fewer = {key: rate for key, rate in options.rates.items() if key != name}
            if fails(changed(rates=fewer)):
                options = changed(rates=fewer)
                again = True
    return options
