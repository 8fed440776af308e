"""
What the benchmarks share: a nats-server that syncs every message, and a closed loop that measures.

A closed loop keeps `in_flight` steps running: each starts when the one before it has ended. So a
rate and its latencies belong together, and no step waits where the measurement does not see it.
"""

import asyncio
import contextlib
import math
import os
import socket
import statistics
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

START_SECONDS_MAX = 15.0
WARM_UP_SECONDS = 1.0

CONFIGURATION = """
listen: "127.0.0.1:{port}"
max_payload: 1MB
jetstream {{ store_dir: "{store}", sync_interval: always }}
"""

Measurement = dict[str, float | int]
Processes = Iterable[tuple[str, int]]
CLIENT = "client"
PROCESSOR = "us_"


class Server(NamedTuple):
    url: str
    pid: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def nats_server() -> AsyncIterator[Server]:
    """Runs a nats-server with a store of its own, which syncs a stored message before its ack."""
    binary = Path(sysconfig.get_path("scripts")) / "nats-server"
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="fencepost-bench-") as folder:
        configuration = Path(folder, "nats.conf")
        configuration.write_text(CONFIGURATION.format(port=port, store=Path(folder, "store")))
        server = await asyncio.create_subprocess_exec(
            str(binary), "-c", str(configuration), "-l", str(Path(folder, "nats.log"))
        )
        try:
            await _wait_until_open(port, server)
            yield Server(f"nats://127.0.0.1:{port}", server.pid)
        finally:
            if server.returncode is None:
                server.terminate()
            await server.wait()


async def _wait_until_open(port: int, server: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_SECONDS_MAX):
        while True:
            if server.returncode is not None:
                raise RuntimeError(f"nats-server ended with {server.returncode}")
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                return
            await asyncio.sleep(0.05)


def percentile(ordered: list[float], share: float) -> float:
    """Tells the smallest value that at least `share` of the values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def processor_seconds(processes: Processes) -> Counter[str]:
    """Tells the processor time used so far, system and user, of this process and of others."""
    own = os.times()
    used: Counter[str] = Counter()
    used[CLIENT] = own.user + own.system  # type: ignore[assignment]
    for role, pid in processes:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            used[role] += times.user + times.system
    return used


def _busy_seconds() -> float:
    """Tells how long the machine's cores have been busy, all of them, for whomever."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


async def measure(
    step: Callable[[int, int], Awaitable[None]],
    *,
    in_flight: int,
    seconds: float,
    warm_up_seconds: float = WARM_UP_SECONDS,
    processes: Callable[[], Processes] = tuple,
) -> Measurement:
    """
    Keeps `in_flight` calls of `step(lane, number)` running and tells rate and latencies.

    Only steps that end inside the window count. Times are wall time of the caller, in milliseconds.
    `us_<role>` is the processor time per step of each process, in microseconds, start to end.
    `others` is the share of all cores that was spent on anything else, kernel threads included.
    """
    opened = time.perf_counter() + warm_up_seconds
    closed = opened + seconds
    latencies_ms: list[float] = []
    count = 0
    began, busy, used = time.perf_counter(), _busy_seconds(), processor_seconds(processes())

    async def lane(index: int) -> None:
        nonlocal count
        number = 0
        while (started := time.perf_counter()) < closed:
            await step(index, number)
            ended = time.perf_counter()
            if opened <= ended < closed:
                latencies_ms.append((ended - started) * 1000)
            number += 1
        count += number

    async with asyncio.TaskGroup() as lanes:
        for index in range(in_flight):
            lanes.create_task(lane(index))
    spent = {role: value - used[role] for role, value in processor_seconds(processes()).items()}
    busy = _busy_seconds() - busy
    cores_seconds = (time.perf_counter() - began) * (os.cpu_count() or 1)
    if not latencies_ms:
        raise RuntimeError(f"no step ended within {seconds} s at {in_flight} in flight")
    latencies_ms.sort()
    measured: Measurement = {
        "in_flight": in_flight,
        "steps_s": round(len(latencies_ms) / seconds, 1),
        "p50_ms": round(percentile(latencies_ms, 0.50), 3),
        "p99_ms": round(percentile(latencies_ms, 0.99), 3),
        "steps": count,
        "others": round(max(0.0, busy - sum(spent.values())) / cores_seconds, 2),
    }
    for role, value in sorted(spent.items()):
        measured[PROCESSOR + role] = round(value / count * 1e6)
    return measured


def medians(rows: list[Measurement]) -> Measurement:
    """Tells the median of each value over several measurements of one kind."""
    found = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    return {**found, "in_flight": rows[0]["in_flight"]}


def table(rows: list[Measurement]) -> str:
    """Lays measurements out for a person."""
    head = (
        f"{'in flight':>9} {'steps/s':>9} {'p50 ms':>8} {'p99 ms':>8} {'others':>7}  "
        "processor time per step in microseconds: all, by process"
    )
    body = [
        f"{row['in_flight']:>9} {row['steps_s']:>9.0f} {row['p50_ms']:>8.2f} {row['p99_ms']:>8.2f}"
        f" {row['others']:>7.0%}  {processor(row)}"
        for row in rows
    ]
    return "\n".join([head, *body])


def processor(row: Measurement) -> str:
    """Says what one row used of the processor: in all, and by process."""
    parts = {
        name.removeprefix(PROCESSOR): value
        for name, value in row.items()
        if name.startswith(PROCESSOR)
    }
    text = f"{sum(parts.values()):.0f}: " + ", ".join(f"{role} {parts[role]:.0f}" for role in parts)
    synced = {name: value for name, value in row.items() if name.startswith("synced_")}
    return text + "".join(f"; {name} {synced[name]}" for name in synced if synced[name])
