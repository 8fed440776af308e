"""One run: the world, the workload, the faults one after the other, the end, the judgement."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fencepost.client import Client
from fencepost.client.processes import StartError

from scripts.chaos import checks
from scripts.chaos.disks import DiskError
from scripts.chaos.fault import KINDS, Fault
from scripts.chaos.faults import faults
from scripts.chaos.settling import Settling
from scripts.chaos.workload import Told, Workload
from scripts.chaos.world import Shape, World

Say = Callable[[str], None]

_GAP_S: Final = 1.0
_LOOK_S: Final = 0.2
_PROBLEMS_SHOWN: Final = 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """`only`: faults whose name contains one of these. `skipped`: what cannot be had, and why."""

    seconds: float
    seed: int
    shape: Shape = field(default_factory=Shape)
    boxes: int = 6
    dags: int = 2
    at_once: int = 2
    only: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Report:
    """What was injected, what was told, what does not hold. Empty `problems`: everything held."""

    seed: int
    seconds: float = 0.0
    settled_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    retried: int = 0
    dags: dict[str, int] = field(default_factory=dict)
    cancel_s_max: float = 0.0
    held_up_s_max: float = 0.0
    silent: dict[str, int] = field(default_factory=dict)
    entries: int = 0
    terms: int = 0
    compared: int = 0
    on_disk: int = 0
    revived: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "is_clean": not self.problems}

    def text(self) -> str:
        lines = [
            f"seed {self.seed}: {self.seconds:.0f} s of faults, settled in {self.settled_s:.1f} s",
            f"  {sum(self.faults.values())} faults of {len(self.faults)} kinds",
            *(f"    {count:4} {name}" for name, count in sorted(self.faults.items())),
            *(f"    skipped: {name} ({why})" for name, why in self.skipped.items()),
            f"  steps told: {_counts(self.steps)}; {self.retried} took more than one attempt",
            f"  DAGs told: {_counts(self.dags)}; the slowest cancel took {self.cancel_s_max:.1f} s",
            f"  this process itself was held up for at most {self.held_up_s_max:.1f} s",
            f"  answers that said nothing: {_counts(self.silent)}",
            f"  ledger: {self.entries} entries, {self.terms} terms",
            f"  {self.compared} outcomes compared with it, {self.on_disk} looked up on live disks",
        ]
        if self.revived:
            lines.append(f"  ended by themselves and started again: {_counts(self.revived)}")
        lines += [f"  NOT SO: {problem}" for problem in self.problems[:_PROBLEMS_SHOWN]]
        if len(self.problems) > _PROBLEMS_SHOWN:
            lines.append(f"  and {len(self.problems) - _PROBLEMS_SHOWN} more")
        lines.append("everything held" if not self.problems else f"{len(self.problems)} problems")
        return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


async def chaos(folder: Path, options: Options, report: Report, say: Say) -> None:
    """Fills the report. What it started is stopped, however it ends."""
    report.skipped = dict(options.skipped)
    say(f"seed {options.seed}, {'three nats-servers' if options.shape.is_cluster else 'embedded'}")
    world = await World.open(folder, options.shape)
    try:
        async with await Client.connect(world.nats_url, name="chaos", wait_s=30) as client:
            await _run(world, client, options, report, say)
    finally:
        await world.stop()


async def _run(world: World, client: Client, options: Options, report: Report, say: Say) -> None:
    workload = Workload(world, client, options.seed)
    await workload.start(boxes=options.boxes, dags=options.dags)
    nemesis = Nemesis(world, client, options, workload.told, say)
    began = time.monotonic()
    await nemesis.run()
    report.seconds = round(time.monotonic() - began, 1)
    report.held_up_s_max = round(nemesis.held_up_s_max, 1)
    report.faults, report.revived = dict(nemesis.counts), dict(nemesis.revived)
    report.problems += nemesis.problems
    say("healing")
    began = time.monotonic()
    try:
        await world.heal()
        await workload.stop()
        settling = Settling(world, client, workload)
        await settling.run()
    except StartError as error:
        report.problems.append(f"did not come back: {error}")
        return
    report.settled_s = round(time.monotonic() - began, 1)
    report.problems += [f"does not end: {what}" for what in settling.stuck]
    say("judging")
    found = await checks.check(world, client, workload.told)
    told = workload.told
    report.problems += found.problems
    report.entries, report.terms = found.entries, found.terms
    report.compared, report.on_disk = found.compared, found.on_disk
    report.steps = dict(told.states())
    report.retried = sum(one.outcome is not None and one.outcome.attempts > 1 for one in told.steps)
    report.dags = dict(Counter(dag.verdict.released for dag in told.dags if dag.verdict))
    report.silent = dict(told.silent)
    report.cancel_s_max = round(told.cancel_s_max, 1)


class Nemesis:
    """Draws faults and lets them strike, a few at once, never two at the same thing."""

    def __init__(
        self, world: World, client: Client, options: Options, told: Told, say: Say
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.revived: Counter[str] = Counter()
        self.problems: list[str] = []
        self.held_up_s_max = 0.0
        self._world = world
        self._options = options
        self._say = say
        self._rng = random.Random(options.seed)
        self._busy: set[str] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._faults = [
            fault
            for fault in faults(world, client, told.standing, told.taken)
            if not options.only or any(word in fault.name for word in options.only)
        ]
        assert self._faults, f"no fault is called {options.only}"

    async def run(self) -> None:
        """Strikes until the time is over, and waits until the last fault has healed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.seconds
        supervising = asyncio.create_task(self._supervise())
        try:
            while loop.time() < deadline:
                self._draw()
                await asyncio.sleep(self._rng.random() * _GAP_S)
            await asyncio.gather(*self._running)
        finally:
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)

    def _draw(self) -> None:
        if len(self._running) >= self._options.at_once:
            return
        free = [fault for fault in self._faults if fault.touches not in self._busy]
        if not free:
            return
        kinds = sorted({one.kind for one in free})
        kind = self._rng.choices(kinds, [KINDS[one] for one in kinds])[0]
        free = [one for one in free if one.kind == kind]
        fault = self._rng.choices(free, [one.weight for one in free])[0]
        rng = random.Random(self._rng.random())
        task = asyncio.create_task(self._strike(fault, rng))
        self._busy.add(fault.touches)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _strike(self, fault: Fault, rng: random.Random) -> None:
        self.counts[fault.name] += 1
        began = time.monotonic()
        try:
            await fault.strike(rng)
        except (StartError, DiskError, TimeoutError) as error:
            self.problems.append(f"{fault.name} ({fault.touches}): {error}")
        finally:
            self._busy.discard(fault.touches)
        self._say(f"  {fault.name} ({fault.touches}), {time.monotonic() - began:.1f} s")

    async def _supervise(self) -> None:
        """What ends by itself is started again, as a supervisor would, and counted."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(_LOOK_S)
            self.held_up_s_max = max(self.held_up_s_max, loop.time() - began - _LOOK_S)
            idle = [
                service
                for service in self._world.services.values()
                if service.name not in self._busy and service.wanted and not service.is_running
            ]
            for service in idle:
                self.revived[f"{service.role}, {service.child.exit_code}"] += 1
                service.start()
