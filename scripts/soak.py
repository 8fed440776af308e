"""
The soak: thousands of steps over many sandboxes and replicas, while sandboxes are taken away.

    python scripts/soak.py [--steps 10000] [--sandboxes 64] [--reclaim-every 200] [--seed N]

Afterwards the ledger is verified, no effect may be there twice on one disk, and each service's
memory after the last thousand steps may be at most a tenth above what it was after the third.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from fencepost.client import Client, StepOutcome, ledger, verify
from fencepost.client.stack import Stack
from fencepost.core.errors import FencepostError
from fencepost.core.sandbox.entries import EpochOpened

PLANNERS = 3
GATEWAYS = 2
LOG = "log"
BASE = 3_000
GROWTH_MAX = 0.10
_OUTCOME_S = 120.0
_CREATES_AT_ONCE = 8

Say = Callable[[str], None]


@dataclass(kw_only=True)
class Report:
    """What was seen. `rss_kib` has, by thousand, the resident memory of each process."""

    seed: int
    steps: int = 0
    seconds: float = 0.0
    steps_s: float = 0.0
    reclaims: int = 0
    states: dict[str, int] = field(default_factory=dict)
    retried: int = 0
    rss_kib: dict[int, dict[str, int]] = field(default_factory=dict)
    ended_otherwise: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    entries: int = 0
    verify_s: float = 0.0

    def growth(self, base: int = BASE) -> dict[str, float]:
        """By how much each process grew from `base` steps to the end; 0.1 is a tenth."""
        last = self.rss_kib[max(self.rss_kib)]
        return {name: round(last[name] / kib - 1, 4) for name, kib in self.rss_kib[base].items()}

    def problems(self, base: int = BASE, growth_max: float = GROWTH_MAX) -> list[str]:
        found = [*self.violations]
        found += [f"an effect twice on one disk: {what}" for what in self.doubled]
        found += [f"committed on the live disk, and not there: {what}" for what in self.missing]
        found += [f"neither committed nor rightly unknown: {what}" for what in self.ended_otherwise]
        found += [
            f"{name} grew by {share:.1%} from step {base} on"
            for name, share in self.growth(base).items()
            if share > growth_max
        ]
        return found


class Soak:
    """One run over one stack."""

    def __init__(self, stack: Stack, client: Client, report: Report, say: Say) -> None:
        self._stack = stack
        self._client = client
        self._report = report
        self._say = say
        self._random = random.Random(report.seed)
        self._done = 0
        self._states: Counter[str] = Counter()
        self._ended: dict[str, list[StepOutcome]] = {}

    async def run(self, *, steps: int, sandboxes: int, reclaim_every: int) -> None:
        boxes = [f"soak-{number}" for number in range(sandboxes)]
        gate = asyncio.Semaphore(_CREATES_AT_ONCE)

        async def create(box: str) -> None:
            async with gate:
                await self._client.create_sandbox(box)

        await asyncio.gather(*map(create, boxes))
        self._say(f"{sandboxes} sandboxes, {PLANNERS} planners, {GATEWAYS} gateways")
        self._sample()
        began = time.monotonic()
        reclaiming = asyncio.create_task(self._reclaim(boxes, reclaim_every))
        try:
            shares = [steps // sandboxes + (n < steps % sandboxes) for n in range(sandboxes)]
            async with asyncio.TaskGroup() as group:
                for box, share in zip(boxes, shares, strict=True):
                    group.create_task(self._work(box, share))
        finally:
            reclaiming.cancel()
            await asyncio.gather(reclaiming, return_exceptions=True)
        report = self._report
        report.steps = self._done
        report.seconds = round(time.monotonic() - began, 2)
        report.steps_s = round(self._done / report.seconds, 1)
        report.states = dict(self._states)
        await self._look_at_disks(boxes)

    async def _work(self, box: str, count: int) -> None:
        ended = self._ended.setdefault(box, [])
        for number in range(count):
            step = f"{box}-{number}"
            outcome = await (await self._submit(box, step, number)).outcome(timeout_s=_OUTCOME_S)
            ended.append(outcome)
            self._done += 1
            self._states[outcome.state] += 1
            self._report.retried += outcome.attempts > 1
            if self._done % 1_000 == 0:
                self._sample()

    async def _submit(self, box: str, step: str, number: int) -> Any:
        if number % 10 == 9:
            return await self._client.submit(
                box,
                "run_command",
                {"shell": f"echo {step} >> {LOG}"},
                step=step,
                compensation={
                    "kind": "command",
                    "args": {"shell": f"touch {LOG}; sed -i '/^{step}$/d' {LOG}"},
                },
            )
        if number % 10 == 4:
            patch = f"--- /dev/null\n+++ b/p/{step}\n@@ -0,0 +1 @@\n+{step}\n"
            return await self._client.submit(box, "apply_patch", patch=patch, step=step)
        # Files are few and written again and again: what grows is not to be the workspace.
        return await self._client.submit(
            box, "write_file", path=f"f/{number % 16}", content=step * 10, step=step
        )

    async def _reclaim(self, boxes: list[str], every: int) -> None:
        next_at = every
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(0.02)
                if self._done >= next_at:
                    next_at += every
                    group.create_task(self._reclaim_one(self._random.choice(boxes)))

    async def _reclaim_one(self, box: str) -> None:
        try:
            await self._client.fault(box, {"do": "reclaim"}, timeout_s=2.0)
        except FencepostError as error:
            # It has just been taken and is not back yet: nobody serves it.
            self._say(f"{box} not reclaimed: {error}")
        else:
            self._report.reclaims += 1

    def _sample(self) -> None:
        self._report.rss_kib[self._done] = found = {
            service.name: psutil.Process(service.pid).memory_info().rss // 1024
            for service in self._stack.services.values()
        }
        mib = ", ".join(f"{name} {kib / 1024:.1f}" for name, kib in found.items())
        self._say(f"after {self._done:>6} steps, MiB: {mib}")

    async def _look_at_disks(self, boxes: list[str]) -> None:
        opened = await self._opened_cold()
        for box in boxes:
            shown = await self._client.show(box)
            workspace = self._stack.sandbox_root / shown["native_id"] / "workspace"
            log = workspace / LOG
            lines = Counter(log.read_text().split() if log.exists() else ())
            self._report.doubled += [line for line, count in lines.items() if count > 1]
            for number, outcome in enumerate(self._ended[box]):
                if not outcome.is_ok or outcome.epoch < opened[box]:
                    continue
                if number % 10 == 9 and not lines[outcome.step]:
                    self._report.missing.append(outcome.step)
                if number % 10 == 4 and not (workspace / "p" / outcome.step).exists():
                    self._report.missing.append(outcome.step)

    async def _opened_cold(self) -> dict[str, int]:
        """By sandbox, the epoch that opened the disk which it has now."""
        found: dict[str, int] = {}
        for shard in range(self._client.shards):
            async for recorded in ledger.batches(
                self._client.link, shard, ledgers=self._client.ledgers
            ):
                for entry in recorded.entries:
                    if isinstance(entry, EpochOpened) and entry.disk != "warm":
                        found[entry.sandbox] = entry.epoch
        return found


async def soak(
    *, steps: int, sandboxes: int = 64, reclaim_every: int = 200, seed: int = 0, say: Say
) -> Report:
    """Runs one soak on a stack of its own, and stops that; nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-soak-"))
    folder.chmod(0o755)
    report = Report(seed=seed or random.SystemRandom().randrange(1, 1 << 31))
    say(f"seed {report.seed}")
    try:
        stack = await Stack.start(
            folder, planners=PLANNERS, gateways=GATEWAYS, postgres=False, others=False
        )
        try:
            async with await Client.connect(stack.nats.url, name="soak", wait_s=10) as client:
                run = Soak(stack, client, report, say)
                await run.run(steps=steps, sandboxes=sandboxes, reclaim_every=reclaim_every)
                began = time.monotonic()
                found = await verify.verify(client)
                report.verify_s = round(time.monotonic() - began, 2)
            report.entries = found.entries
            report.violations = [str(violation) for violation in found.violations]
        finally:
            await stack.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=10_000, help="a multiple of 1000, above 3000")
    parser.add_argument("--sandboxes", type=int, default=64)
    parser.add_argument("--reclaim-every", type=int, default=200, help="steps")
    parser.add_argument("--seed", type=int, default=0, help="of the choice what is reclaimed")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    report = asyncio.run(
        soak(
            steps=options.steps,
            sandboxes=options.sandboxes,
            reclaim_every=options.reclaim_every,
            seed=options.seed,
            say=say,
        )
    )
    problems = report.problems()
    if options.json:
        print(json.dumps({**asdict(report), "growth": report.growth(), "problems": problems}))
    else:
        print(
            f"{report.steps} steps in {report.seconds:.1f} s ({report.steps_s:.0f}/s),"
            f" {report.reclaims} reclaims, {report.retried} steps tried again,"
            f" {report.entries} entries verified in {report.verify_s:.1f} s"
        )
        print("growth since step 3000:", report.growth())
        print("\n".join(problems) or "clean")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
