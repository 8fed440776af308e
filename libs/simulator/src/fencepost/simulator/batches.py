"""Many runs: over several processes, summed up, and the table of docs/guarantees.md."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
from fencepost.simulator import checkers, runs
from fencepost.simulator.options import FAULTS, draw

NEVER_SHOWN: Final = 60


class Summary(msgspec.Struct, kw_only=True):
    """
    What many runs met. `coverage[fault][invariant]` counts the runs in which the fault struck and
    the invariant's premise was met. `together` counts, for each planned set of faults ("a", "a+b"),
    the runs in which all of it struck. `failures` are the reports of runs with a violation, in
    order of seeds.
    """

    seeds: int = 0
    events: int = 0
    batches: int = 0
    seconds: float = 0.0
    virtual_ms: int = 0
    faults: dict[str, int] = {}
    checks: dict[str, int] = {}
    outcomes: dict[str, int] = {}
    violations: dict[str, int] = {}
    coverage: dict[str, dict[str, int]] = {}
    runs_with: dict[str, int] = {}
    together: dict[str, int] = {}
    failures: list[runs.Report] = []

    @property
    def events_per_s(self) -> int:
        return round(self.events / self.seconds) if self.seconds else 0

    def add(self, report: runs.Report) -> None:
        self.seeds += 1
        self.events += report.events
        self.batches += report.batches
        self.virtual_ms += report.virtual_ms
        for target, counts in (
            (self.faults, report.faults),
            (self.checks, report.checks),
            (self.outcomes, report.outcomes),
        ):
            for name, count in counts.items():
                target[name] = target.get(name, 0) + count
        for fault in report.faults:
            self.runs_with[fault] = self.runs_with.get(fault, 0) + 1
            row = self.coverage.setdefault(fault, {})
            for invariant, count in report.checks.items():
                row[invariant] = row.get(invariant, 0) + (count > 0)
        if report.violations:
            self.failures.append(report)
            invariant = report.violations[0].invariant
            self.violations[invariant] = self.violations.get(invariant, 0) + 1

    def add_planned(self, strikes: tuple[str, ...], report: runs.Report) -> None:
        """Counts whether all that was planned to strike together did."""
        name = "+".join(strikes)
        struck = all(fault in report.faults for fault in strikes)
        self.together[name] = self.together.get(name, 0) + struck

    def never_together(self) -> list[str]:
        return [name for name, count in self.together.items() if not count]


class Job(msgspec.Struct, frozen=True):
    """
    One seed with what the command line says of its options.

    `strikes`: the faults that a plan wants to meet in this run, beside those that enable them.
    """

    seed: int
    faults: tuple[str, ...] | None = None
    steps: int | None = None
    strikes: tuple[str, ...] = ()


def run_job(job: Job) -> runs.Report:
    return runs.run(job.seed, draw(job.seed, faults=job.faults, steps=job.steps))


def reports(jobs: Sequence[Job], processes: int) -> Iterator[runs.Report]:
    """The reports of all jobs in the order of the jobs, whatever the number of processes."""
    if processes <= 1:
        yield from map(run_job, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        yield from pool.imap(run_job, jobs, chunksize=4)


def run_many(
    jobs: Sequence[Job],
    *,
    processes: int = 1,
    progress: Callable[[Summary], None] | None = None,
    stop_at_first: bool = False,
) -> Summary:
    """Runs all jobs, in order of their seeds whatever the number of processes."""
    summary = Summary()
    began = time.perf_counter()
    for job, report in zip(jobs, reports(jobs, processes), strict=True):
        summary.add(report)
        if job.strikes:
            summary.add_planned(job.strikes, report)
        if progress is not None:
            progress(summary)
        if stop_at_first and report.violations:
            break
    summary.seconds = time.perf_counter() - began
    return summary


def _promises() -> dict[str, str]:
    return {kind.invariant: kind.promises for kind in checkers.ALL}


_NOT_COVERED = """\
## What a run does not show yet

- **The cluster.** The log is one sequence that accepts or refuses; elections, lost quorums and
  stale leaders appear only as stale reads, lost answers and an unreachable log. A log that loses
  what it acknowledged is not simulated: nothing above it could survive that.
- **Public events.** Messages between shards, with their recorded positions (`sent`, `last_seen`),
  are sent and taken by the live runtime's own outbox and receiver; events have their own tests.
- **One provider name at several places.** A create that is asked of another gateway goes to the
  same authority here. Two gateways that serve one provider's name at two authorities are not met.
- **A holder of a DAG that was lost.** No shard forgets a DAG here, so no sweep has one to let go.
- **The toolhost and the gateway are models** of their protocol, not the programs. Their tests run
  the programs.
- **Chunks.** A checkpoint is one value here, that the store has, lacks or has spoiled. Chunks,
  their digests and checkpoints sent in part have tests of their own, against real stores.
- **A disk rolled back beneath a running toolhost, within one epoch.** Nothing on such a disk tells
  it from the one that it replaced. Providers that restore a snapshot show another instance, which
  is covered, as is a roll-back to another epoch.
- **A stop meant for a former boot.** The simulated provider takes it; one that refuses it
  (`refused_other_instance`) would leave the release unconfirmed until somebody looks.
"""


def guarantees(summary: Summary) -> str:
    """The page docs/guarantees.md: what was promised, met, checked and found in these runs."""
    invariants = sorted(summary.checks, key=lambda name: int(name[1:]))
    lines = [
        "# Guarantees",
        "",
        "What Fencepost promises, and what runs of the [simulator](simulator.md) saw. Made by",
        f"`{_command(summary)} --report docs/guarantees.md`; not edited by hand.",
        "",
        f"{summary.seeds:,} runs, {summary.events:,} events, {summary.batches:,} batches,",
        f"{summary.virtual_ms // 3_600_000:,} hours of virtual time.",
        "Steps: "
        + ", ".join(f"{count:,} {state}" for state, count in sorted(summary.outcomes.items()))
        + ".",
        "",
        "| id | promise | judged | violations |",
        "|---|---|---:|---:|",
    ]
    promises = _promises()
    lines += [
        f"| {name} | {promises.get(name, '')} | {summary.checks[name]:,} "
        f"| {summary.violations.get(name, 0)} |"
        for name in invariants
    ]
    lines += [
        "",
        "## Faults met",
        "",
        "How often each fault struck, in how many runs, and in how many of those the premise of",
        "each promise was met too, so that it was judged.",
        "",
        "| fault | times | runs | " + " | ".join(invariants) + " |",
        "|---|---:|---:|" + "---:|" * len(invariants),
    ]
    for fault in FAULTS:
        row = summary.coverage.get(fault, {})
        cells = " | ".join(f"{row.get(name, 0):,}" for name in invariants)
        lines.append(
            f"| `{fault}` | {summary.faults.get(fault, 0):,} "
            f"| {summary.runs_with.get(fault, 0):,} | {cells} |"
        )
    lines += [*_pairs(summary), "", _NOT_COVERED]
    return "\n".join(lines)


def _command(summary: Summary) -> str:
    if not summary.together:
        return f"python -m fencepost.simulator --runs {summary.seeds}"
    rounds = max(1, summary.seeds // len(summary.together))
    return f"python -m fencepost.simulator --pairs --runs {rounds}"


def _pairs(summary: Summary) -> list[str]:
    """What a run of `--pairs` met; nothing of other runs."""
    if not summary.together:
        return []
    alone = [name for name in summary.together if "+" not in name]
    pairs = [name for name in summary.together if "+" in name]
    never = summary.never_together()
    lines = [
        "",
        "## Alone and in pairs",
        "",
        f"{len(alone):,} classes alone and {len(pairs):,} pairs were planned, each in a run where",
        "nothing else strikes but what a class needs to show. In",
        f"{len(summary.together) - len(never):,} of them all of it struck. What never did:",
        "",
    ]
    shown = ", ".join(f"`{name}`" for name in never[:NEVER_SHOWN])
    more = f", and {len(never) - NEVER_SHOWN:,} more" if len(never) > NEVER_SHOWN else ""
    return [*lines, f"{shown or 'nothing'}{more}."]
