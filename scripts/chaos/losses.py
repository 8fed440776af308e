"""
What sandboxes lose: their processes, their disk, the latest part of what was on it.

Each is done behind the control plane's back, by the process ids and folders of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fencepost.client import Client
from fencepost.core.errors import FencepostError

from scripts.chaos.fault import Fault
from scripts.chaos.world import LEASE_MS, World

_ELSEWHERE: Final = ".rolled"


def of_sandboxes(
    world: World, client: Client, boxes: list[str], taken: Counter[str]
) -> list[Fault]:
    """Every fault of a sandbox. `taken` counts how often each lost its disk, or may have."""

    async def reclaim(rng: random.Random) -> None:
        box = rng.choice(boxes)
        taken[box] += 1
        # One that has just been taken and is not back yet is served by nobody.
        with contextlib.suppress(FencepostError):
            await client.fault(box, {"do": "reclaim"}, timeout_s=2.0)

    async def kill(rng: random.Random) -> None:
        _signal(world, rng.choice(boxes), signal.SIGKILL)
        await asyncio.sleep(0)

    async def pause(rng: random.Random) -> None:
        box = rng.choice(boxes)
        paused = world.processes_of(box)
        for pid in paused:
            _send(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.random() * 2 * LEASE_MS / 1000)
        finally:
            for pid in paused:
                if pid in world.processes_of(box):
                    _send(pid, signal.SIGCONT)

    async def roll_back(rng: random.Random) -> None:
        await _roll_back(world, rng.choice(boxes), taken, rng)

    return [
        Fault("reclaim", "box", 3, reclaim, "sandbox"),
        Fault("kill -9: toolhost", "box", 2, kill, "sandbox"),
        Fault("stop and continue: toolhost", "box", 2, pause, "sandbox"),
        Fault("rolled back: disk", "box", 2, roll_back, "sandbox"),
    ]


async def _roll_back(world: World, box: str, taken: Counter[str], rng: random.Random) -> None:
    """
    Takes a snapshot of a sandbox's disk, and puts it back a while later.

    Nobody attaches in between: two disks under one instance are more than any provider does.
    """
    home = _home(world, box)
    if home is None:
        return
    copy = world.sandbox_root / _ELSEWHERE / home.name
    with _frozen(world, box):
        shutil.rmtree(copy, ignore_errors=True)
        if not _copied(home, copy):
            return
    await asyncio.sleep(0.2 + rng.random() * 3)
    gateways = [service for service in world.of("gateway") if service.is_running]
    for gateway in gateways:
        gateway.pause()
    try:
        _signal(world, box, signal.SIGKILL)
        async with asyncio.timeout(10):
            while world.processes_of(box):
                await asyncio.sleep(0.01)
        # Only where it is the same one still: a later instance's disk is another disk.
        with contextlib.suppress(OSError):
            if (copy / "instance").read_text() == (home / "instance").read_text():
                taken[box] += 1
                home.rename(copy.with_suffix(".former"))
                copy.rename(home)
    finally:
        for gateway in gateways:
            gateway.resume()
        shutil.rmtree(world.sandbox_root / _ELSEWHERE, ignore_errors=True)


def _home(world: World, box: str) -> Path | None:
    found = [Path(trace) for trace in world.traces(box) if trace.startswith("/")]
    return next((path for path in found if path.parent == world.sandbox_root), None)


def _copied(home: Path, copy: Path) -> bool:
    """Whether all of it could be copied: the disk may be full, or the folder just gone."""
    try:
        shutil.copytree(home, copy, symlinks=True)
    except (OSError, shutil.Error):
        return False
    return True


@contextlib.contextmanager
def _frozen(world: World, box: str) -> Iterator[None]:
    pids = world.processes_of(box)
    for pid in pids:
        _send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            _send(pid, signal.SIGCONT)


def _signal(world: World, box: str, number: int) -> None:
    for pid in world.processes_of(box):
        _send(pid, number)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
