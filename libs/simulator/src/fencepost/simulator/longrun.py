"""
One long run, made in parts: what was met is kept in a file after each chunk of seeds.

A part may be stopped at any moment; what its last chunk was doing is done again. A part says on
which commit and which Python it ran: a long run over changing code is honest about it.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import time
from typing import Final

import msgspec
from fencepost.core.errors import RefusedError
from fencepost.simulator import batches, progress
from fencepost.simulator.options import FAULTS

CHUNK_SEEDS: Final = 200
STATE_VERSION: Final = 1


class Part(msgspec.Struct, kw_only=True):
    """What one process added. `seeds` is the first and the last; `date` is when it began (UTC)."""

    commit: str
    python: str
    date: str
    seeds: tuple[int, int]
    events: int = 0
    seconds: float = 0.0


class Failed(msgspec.Struct, frozen=True):
    seed: int
    invariant: str
    detail: str


class State(msgspec.Struct, kw_only=True):
    """The whole run so far. `summary` has no reports of failures: they are in `failed`, short."""

    v: int = STATE_VERSION
    next_seed: int = 0
    first_seed: int = 0
    faults: tuple[str, ...] | None = None
    steps: int | None = None
    summary: batches.Summary
    failed: list[Failed] = []
    parts: list[Part] = []


def begin(*, first: int, faults: tuple[str, ...] | None, steps: int | None) -> State:
    return State(
        first_seed=first, next_seed=first, faults=faults, steps=steps, summary=batches.Summary()
    )


def load(
    path: pathlib.Path, *, first: int, faults: tuple[str, ...] | None, steps: int | None
) -> State:
    """
    Reads what stands in the file, or begins anew where there is none.

    Raises `RefusedError` when the file is not such a state, or one of other options: two runs are
    never added up under one name.
    """
    try:
        written = path.read_bytes()
    except FileNotFoundError:
        return begin(first=first, faults=faults, steps=steps)
    try:
        state = msgspec.json.decode(written, type=State)
    except msgspec.MsgspecError as error:
        raise RefusedError("bad_state", f"{path}: {error}", field="resume") from error
    if (state.v, state.first_seed, state.faults, state.steps) != (
        STATE_VERSION,
        first,
        faults,
        steps,
    ):
        raise RefusedError(
            "other_run",
            f"{path} is of version {state.v}, --from {state.first_seed}, --faults {state.faults}, "
            f"--steps {state.steps}: go on with those, or name another file",
            field="resume",
        )
    return state


def save(path: pathlib.Path, state: State) -> None:
    """Replaces the file at once: a reader finds the former state or this one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def go_on(
    state: State,
    path: pathlib.Path | None = None,
    *,
    events: int,
    jobs: int,
    tell: progress.Tell | None = None,
    chunk: int = 0,
) -> State:
    """Runs chunk after chunk until so many events were met in all, and keeps each."""
    part = Part(
        commit=commit(),
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        seeds=(state.next_seed, state.next_seed),
    )
    while state.summary.events < events:
        began = time.perf_counter()
        before = state.summary.events
        seeds = range(state.next_seed, state.next_seed + (chunk or CHUNK_SEEDS))
        for report in batches.reports(
            [batches.Job(seed, state.faults, state.steps) for seed in seeds], jobs
        ):
            state.summary.add(report)
            if report.violations:
                found = report.violations[0]
                state.failed.append(Failed(report.seed, found.invariant, found.detail))
                state.summary.failures.clear()
            if tell is not None:
                tell(state.summary)
        state.next_seed = seeds.stop
        seconds = time.perf_counter() - began
        state.summary.seconds += seconds
        part.seconds += seconds
        part.events += state.summary.events - before
        part.seeds = (part.seeds[0], seeds.stop - 1)
        if not state.parts or state.parts[-1] is not part:
            state.parts.append(part)
        if path is not None:
            save(path, state)
    return state


def commit() -> str:
    """The commit that this code is checked out at, `+` when it was changed; or `unknown`."""
    here = pathlib.Path(__file__).parent
    try:
        named = _git(here, "rev-parse", "--short=12", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", ":/libs")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return named + ("+" if changed else "")


def _git(folder: pathlib.Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], check=True, capture_output=True, text=True, timeout=20
    )
    return done.stdout.strip()


def page(state: State) -> str:
    """The page docs/long-run.md."""
    summary = state.summary
    version = importlib.metadata.version("fencepost-simulator")
    cores_s = f"{summary.events_per_s:,}"
    lines = [
        "# The long run",
        "",
        "Written by `fencepost sim --events … --resume STATE --report FILE`, from one run of the",
        "[simulator](simulator.md) made in parts.",
        "",
        "| | |",
        "|---|---|",
        f"| events | {summary.events:,} |",
        f"| runs | {summary.seeds:,}, seeds {state.first_seed} to {state.next_seed - 1} |",
        f"| violations | {len(state.failed)} |",
        f"| batches accepted | {summary.batches:,} |",
        f"| virtual time | {summary.virtual_ms / 3_600_000:,.0f} hours |",
        f"| real time | {summary.seconds / 60:,.0f} minutes, {cores_s} events a second |",
        f"| fault classes | {_classes(state)} |",
        f"| faults struck | {sum(summary.faults.values()):,} of {len(summary.faults)} classes |",
        f"| judgements | {sum(summary.checks.values()):,} |",
        f"| version | {version} |",
        "",
    ]
    if state.failed:
        lines += ["## Violations", "", "| seed | invariant | what |", "|---|---|---|"]
        lines += [f"| {one.seed} | {one.invariant} | {one.detail} |" for one in state.failed]
        lines.append("")
    lines += [
        "## Parts",
        "",
        "| began (UTC) | commit | Python | seeds | events | events a second |",
        "|---|---|---|---|---|---|",
    ]
    for part in state.parts:
        rate = round(part.events / part.seconds) if part.seconds else 0
        lines.append(
            f"| {part.date} | {part.commit} | {part.python} | {part.seeds[0]} to {part.seeds[1]} "
            f"| {part.events:,} | {rate:,} |"
        )
    lines += ["", "## Judged", "", "| invariant | judgements | violations |", "|---|---|---|"]
    for name, count in sorted(summary.checks.items(), key=lambda one: (len(one[0]), one[0])):
        lines.append(f"| {name} | {count:,} | {summary.violations.get(name, 0)} |")
    lines += ["", "## Faults struck", "", "| class | times | in runs |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {summary.faults.get(name, 0):,} | {summary.runs_with.get(name, 0):,} |"
        for name in FAULTS
    ]
    return "\n".join(lines) + "\n"


def _classes(state: State) -> str:
    if state.faults is None:
        return f"drawn from all {len(FAULTS)} by each seed"
    return ", ".join(f"`{name}`" for name in state.faults) or "none"
