"""
Every fault class alone, and every pair of classes, over seeds: a plan, not a draw.

A class that shows only where something else happens too brings its enablers (`options.ENABLERS`)
with it; nothing else strikes in such a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from fencepost.simulator.batches import Job
from fencepost.simulator.options import ENABLERS, FAULTS


def sets() -> Iterator[tuple[str, ...]]:
    """All that the plan has strike alone: first single classes, then pairs, in the list's order."""
    yield from ((fault,) for fault in FAULTS)
    yield from combinations(FAULTS, 2)


def plan(rounds: int, *, first: int = 0, part: int = 1, parts: int = 1) -> list[Job]:
    """
    Runs of every class and every pair, `rounds` times over, each under a seed of its own.

    `part` of `parts` takes every so manieth of them, so that several machines, or several nights,
    go through all without doing anything twice.
    """
    chosen = list(sets())
    jobs = []
    for number in range(rounds * len(chosen)):
        if number % parts != part - 1:
            continue
        strikes = chosen[number % len(chosen)]
        enablers = [name for fault in strikes for name in ENABLERS.get(fault, ())]
        faults = tuple(dict.fromkeys((*strikes, *enablers)))
        jobs.append(Job(first + number, faults, strikes=strikes))
    return jobs
