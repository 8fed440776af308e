"""Many runs: over several processes, summed up, and the table of docs/guarantees.md."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from fencepost.simulator import checkers, runs
from fencepost.simulator.options import FAULTS, draw


class Summary(msgspec.Struct, kw_only=True):
    """
    What many runs met. `coverage[fault][invariant]` is how often the invariant was judged in runs
    that met the fault; `failures` are the reports of runs with a violation, in order of seeds.
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
                row[invariant] = row.get(invariant, 0) + count
        if report.violations:
            self.failures.append(report)
            invariant = report.violations[0].invariant
            self.violations[invariant] = self.violations.get(invariant, 0) + 1


class Job(msgspec.Struct, frozen=True):
    """One seed with what the command line says of its options."""

    seed: int
    faults: tuple[str, ...] | None = None
    steps: int | None = None


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
    for report in reports(jobs, processes):
        summary.add(report)
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

- **I4, the verdict of a cancelled DAG.** Only the sandbox machine runs in the simulator; the dag
  machine, its messages to sandbox shards and the sweeper do not. The release of a sandbox that is
  held by hand, down to its last instance, is covered.
- **The cluster.** The log is one sequence that accepts or refuses; elections, lost quorums and
  stale leaders appear only as stale reads, lost answers and an unreachable log. A log that loses
  what it acknowledged is not simulated: nothing above it could survive that.
- **Publications.** Events and messages with their recorded positions (`sent`, `last_seen`) belong
  to the live runtime and have their own tests.
- **The toolhost and the gateway are models** of their protocol, not the programs. Their tests run
  the programs.
- **Recovery by replay and checkpoints** do not exist yet; what a new generation owes is checked as
  a number, not as bytes.
- **A disk rolled back beneath a running toolhost, within one epoch.** Nothing on such a disk tells
  it from the one that it replaced. Providers that restore a snapshot show another instance, which
  is covered, as is a roll-back to another epoch.
- **What an older snapshot brings back.** Bytes restored from before a compensation hold the
  compensated effect again. The ledger owes what such a disk lacks, not what it has too much.
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
        f"`python -m fencepost.simulator --runs {summary.seeds} --report docs/guarantees.md`; not",
        "edited by hand.",
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
        "How often each fault happened, in how many runs, and how often each promise was judged in",
        "those runs.",
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
    lines += ["", _NOT_COVERED]
    return "\n".join(lines)
