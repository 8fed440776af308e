"""
`fencepost up` and `down`: the embedded stack in the foreground, one per data folder.

A lock on `up.lock` says whether a stack runs; `up.json` only says where. The kernel drops the lock
with the process, so a killed `up` never blocks the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from fencepost.client import users
from fencepost.client.processes import StartError
from fencepost.client.stack import Stack, choose_ledgers, refuse_half_moved, shards_of
from fencepost.core.errors import FencepostError

_DETACHED_S_MAX: Final = 60.0
_DOWN_S_MAX: Final = 30.0

Told = Callable[[str], None]


class AlreadyUpError(FencepostError):
    """Another `up` runs on this folder; `state` is what it wrote of itself."""

    def __init__(self, data: Path, state: dict[str, Any]) -> None:
        where = f"pid {state.get('pid', 'unknown')}, {state.get('nats_url', 'still starting')}"
        super().__init__(f"a stack is already running on {data}: {where}")
        self.state = state


def read_state(data: Path) -> dict[str, Any]:
    """What the last `up` wrote, or {}; it says nothing about whether that one still runs."""
    try:
        found = json.loads((data / "up.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_up(data: Path) -> bool:
    """Tells whether a stack holds this folder now."""
    try:
        with (data / "up.lock").open("a") as lock:
            return not _take(lock)
    except OSError:
        return False


def _take(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def held(data: Path) -> Iterator[None]:
    """Keeps every other `up` off this folder; raises `AlreadyUpError` where one runs."""
    data.mkdir(parents=True, exist_ok=True)
    with (data / "up.lock").open("a") as lock:
        # Children do not inherit it: Python opens files close-on-exec.
        if not _take(lock):
            raise AlreadyUpError(data, read_state(data))
        try:
            yield
        finally:
            (data / "up.json").unlink(missing_ok=True)


async def run(
    data: Path,
    *,
    planners: int,
    gateways: int,
    ledgers: int | None = None,
    nats_port: int,
    postgres: bool,
    demand_credentials: bool = False,
    told: Told,
    ready: Callable[[dict[str, Any]], None],
) -> None:
    """
    Runs the stack until SIGINT, SIGTERM or SIGHUP, then stops it in order, nats-server last.

    Raises `AlreadyUpError`, `RefusedError` on another number of ledgers than the folder has, or
    `StartError` when something does not start, or must not: see `stack.refuse_half_moved`.
    """
    data = data.resolve()
    with held(data):
        refuse_half_moved(data)
        over = choose_ledgers(data, ledgers)
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, asked.set)
        told("starting")
        starting = asyncio.create_task(
            Stack.start(
                data,
                planners=planners,
                gateways=gateways,
                shards=shards_of(data),
                ledgers=over,
                nats_port=nats_port,
                postgres=postgres,
                demand_credentials=demand_credentials,
            )
        )
        stopping = asyncio.create_task(asked.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        stack = starting.result()
        try:
            state = describe(stack)

            def write() -> None:
                now = {**describe(stack), "started_at": state["started_at"]}
                _write_whole(data / "up.json", json.dumps(now, indent=2) + "\n")

            write()
            stack.supervise(told, write)
            ready(state)
            await stopping
            told("stopping")
        finally:
            await stack.stop()


def describe(stack: Stack) -> dict[str, Any]:
    """Where everything of a running stack is. No secrets."""
    return {
        "pid": os.getpid(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": str(stack.data),
        "nats_url": stack.nats.url,
        "nats_monitor_url": stack.nats.monitor_url,
        "nats_credentials": (
            str(stack.credentials[users.ANYBODY]) if stack.demands_credentials else None
        ),
        "postgres_port": stack.postgres.port if stack.postgres is not None else None,
        "shards": stack.shards,
        "ledgers": stack.ledgers,
        "services": {
            service.name: {"pid": service.pid, "http_url": service.http_url}
            for service in stack.services.values()
        },
    }


def _write_whole(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def detach(data: Path, arguments: list[str]) -> dict[str, Any]:
    """Starts `up` in the background and waits until it is ready; gives what it wrote."""
    data = data.resolve()
    if is_up(data):
        raise AlreadyUpError(data, read_state(data))
    data.mkdir(parents=True, exist_ok=True)
    with (data / "up.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fencepost.client", "up", "--data", str(data), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + _DETACHED_S_MAX
    while time.monotonic() < deadline:
        state = read_state(data)
        if state.get("pid") == process.pid:
            process.returncode = 0  # it goes on without us: nothing is left to wait for
            return state
        if process.poll() is not None:
            tail = (data / "up.log").read_text(errors="replace")[-2000:]
            raise StartError(f"`fencepost up` ended with {process.returncode}:\n{tail}")
        time.sleep(0.05)
    process.terminate()
    raise StartError(f"`fencepost up` was not ready within {_DETACHED_S_MAX:g} s")


def down(data: Path) -> bool:
    """
    Asks the stack on this folder to stop and waits; False when none was running.

    Raises `StartError` when it has not stopped in time.
    """
    data = data.resolve()
    if not is_up(data):
        return False
    pid = read_state(data).get("pid")
    if not isinstance(pid, int):
        raise StartError(f"the stack on {data} is still starting; try again")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_S_MAX
    while is_up(data):
        if time.monotonic() > deadline:
            raise StartError(f"pid {pid} has not stopped within {_DOWN_S_MAX:g} s")
        time.sleep(0.05)
    return True
