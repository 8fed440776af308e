"""
Whether what clients were told is so: by the recorded ledger, the disks and the processes.

`fencepost verify` judges the ledger by itself; here it is compared with what was told.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from fencepost.client import Client, StepOutcome, ledger, verify
from fencepost.core.errors import UnknownError
from fencepost.core.sandbox import entries as e
from fencepost.providers import processes

from scripts.chaos.workload import LOG, Dag, Sent, Told, blob
from scripts.chaos.world import World

T = TypeVar("T")

_PATIENCE_S: Final = 90.0
_AGAIN_S: Final = 0.5
_FINAL: Final = {"committed": e.Committed, "compensated": e.Compensated}


@dataclass
class Found:
    """What was compared and what does not hold."""

    problems: list[str] = field(default_factory=list)
    entries: int = 0
    terms: int = 0
    committed: int = 0
    compared: int = 0
    on_disk: int = 0
    indeterminate: int = 0


@dataclass
class _Recorded:
    """What the ledger says of the sandboxes and steps."""

    finals: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    opened: dict[str, int] = field(default_factory=dict)
    disks: Counter[str] = field(default_factory=Counter)
    condemned: Counter[str] = field(default_factory=Counter)
    released: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)


async def check(world: World, client: Client, told: Told) -> Found:
    """Reads the whole ledger and looks at every disk; everything must have settled before."""
    found = Found(problems=[*told.untrue, *told.bugs])
    report = await _patiently(lambda: verify.verify(client))
    found.problems += [f"verify: {violation}" for violation in report.violations]
    found.entries, found.terms = report.entries, report.terms
    found.committed, found.indeterminate = report.committed, report.indeterminate
    recorded = await _patiently(lambda: _read(client))
    for sent in told.steps:
        if sent.outcome is not None:
            found.problems += _compare(sent, sent.outcome, recorded)
            found.compared += 1
    for name in told.standing:
        view = await _patiently(lambda name=name: client.show(name))  # type: ignore[misc]
        _look_at(world, view, told, recorded, found)
    for dag in told.dags:
        found.problems += _released(world, dag, recorded)
    found.problems += _strays(world)
    return found


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Asks again while nothing can be said: a busy machine is no finding."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _PATIENCE_S
    while True:
        try:
            return await ask()
        except UnknownError:
            if loop.time() > deadline:
                raise
            await asyncio.sleep(_AGAIN_S)


async def _entries(client: Client) -> AsyncIterator[Any]:
    for shard in range(client.shards):
        async for recorded in ledger.batches(client.link, shard, ledgers=client.ledgers):
            for entry in recorded.entries:
                yield entry


async def _read(client: Client) -> _Recorded:
    recorded = _Recorded()
    async for entry in _entries(client):
        match entry:
            case e.Committed() | e.Resolved():
                recorded.finals.setdefault((entry.sandbox, entry.step), []).append(entry)
            case e.Compensated(final=True):
                recorded.finals.setdefault((entry.sandbox, entry.step), []).append(entry)
            case e.EpochOpened() if entry.disk != "warm":
                recorded.opened[entry.sandbox] = entry.epoch
                recorded.disks[entry.sandbox] += 1
            case e.Condemned():
                recorded.condemned[entry.sandbox] += 1
            case e.AssignedEntry():
                recorded.assigned.add(entry.sandbox)
            case e.Releasing():
                recorded.released.add(entry.sandbox)
            case _:
                pass
    return recorded


def _compare(sent: Sent, outcome: StepOutcome, recorded: _Recorded) -> list[str]:
    """What the client was told stands in the ledger, once."""
    kind = _FINAL.get(outcome.state)
    if kind is None:
        return []
    finals = recorded.finals.get((sent.sandbox, sent.step), [])
    if len(finals) == 1 and isinstance(finals[0], kind):
        return []
    kinds = [type(final).__name__ for final in finals]
    return [f"{sent.sandbox} {sent.step}: told {outcome.state}, the ledger has {kinds}"]


def _released(world: World, dag: Dag, recorded: _Recorded) -> list[str]:
    """What a final verdict said is so: nothing is left, or there never was anything."""
    verdict = dag.verdict.released if dag.verdict is not None else ""
    if verdict not in ("confirmed", "nothing_held"):
        return []
    found = [
        f"{dag.name} {verdict}, and {left} is left"
        for name in dag.fresh
        if (left := world.traces(name))
    ]
    if verdict == "nothing_held":
        found += [
            f"{dag.name} nothing_held, and {name} was assigned"
            for name in dag.fresh
            if name in recorded.assigned
        ]
    return found


def _look_at(
    world: World, view: dict[str, Any], told: Told, recorded: _Recorded, found: Found
) -> None:
    """A standing sandbox: it lives, and its disk has what was committed on it, once."""
    name = view["sandbox"]
    if name in recorded.released:
        found.problems.append(f"{name} is held by its operator, and was released")
    # Its first disk, one for each that was taken, and one for each that it was rightly not trusted.
    may_have = 1 + told.taken[name] + recorded.condemned[name]
    if recorded.disks[name] > may_have:
        found.problems.append(f"{name} had {recorded.disks[name]} disks, and {may_have} reasons")
    if view["state"] != "live" or not world.processes_of(name):
        found.problems.append(f"{name} is held by its operator, and is {view['state']}")
        return
    workspace = world.sandbox_root / view["native_id"] / "workspace"
    log = workspace / LOG
    lines = Counter(log.read_text().split() if log.exists() else ())
    found.problems += [
        f"{name} {line}: its effect is there {count} times"
        for line, count in lines.items()
        if count > 1
    ]
    for sent in told.steps:
        outcome = sent.outcome
        if sent.sandbox != name or outcome is None or outcome.epoch < recorded.opened[name]:
            continue
        is_there = _has(workspace, lines, sent)
        if outcome.is_ok and not is_there:
            found.problems.append(f"{name} {sent.step}: committed, and not on its live disk")
        elif outcome.state == "compensated" and is_there:
            found.problems.append(f"{name} {sent.step}: compensated, and still on the disk")
        found.on_disk += outcome.is_ok


def _has(workspace: Path, lines: Counter[str], sent: Sent) -> bool:
    if sent.effect == "line":
        return lines[sent.step] > 0
    place = workspace / ("p" if sent.effect == "patch" else "f") / sent.step
    wanted = blob(sent.step) if sent.effect == "blob" else sent.step
    return place.exists() and place.read_text().strip() == wanted.strip()


def _strays(world: World) -> list[str]:
    """Processes of instances that have no disk any more."""
    instances = set()
    for folder in world.sandbox_root.iterdir():
        if (folder / "instance").is_file():
            instances.add((folder / "instance").read_text().strip())
    sign = processes.INSTANCE.encode() + b"="
    root = str(world.sandbox_root).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if root not in command:
            continue
        found += [
            f"process {entry.name} runs on for an instance without a disk"
            for part in environment
            if part.startswith(sign) and part[len(sign) :].decode() not in instances
        ]
    return found
