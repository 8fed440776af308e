"""
Fencepost itself: whole `write_file` steps, from the client's call to the committed outcome.

One stack of real processes (synced nats-server, planner, gateway, 64 toolhosts in their sandboxes)
without PostgreSQL, which is never on a step's way, and one client in this process. Beside rate and
latencies it tells what the other programs cannot have in common: how many messages the server
synced per step, and the processor time per step of every process.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import uvloop
from fencepost.client.client import Client
from fencepost.client.stack import Stack
from fencepost.contracts import streams
from fencepost.runtime.link import stream_info

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import rig

CONTENT_BYTES = 200
SANDBOXES = 64
CREATED_AT_ONCE = 8
PATH = "file.txt"
INPUTS = (streams.COMMANDS, streams.FACTS, streams.MESSAGES)
TOOLHOST = "toolhost"


class Running:
    """A stack with its sandboxes, a client, and the means to measure them."""

    def __init__(self, stack: Stack, client: Client, sandboxes: list[str]) -> None:
        self.stack = stack
        self.client = client
        self.sandboxes = sandboxes

    async def measure(
        self, in_flight: int, seconds: float, *, content_bytes: int = CONTENT_BYTES
    ) -> rig.Measurement:
        """Measures from the call of `write_file` until its committed outcome is there."""
        client, sandboxes = self.client, self.sandboxes
        content = "x" * content_bytes

        async def step(lane: int, number: int) -> None:
            outcome = await client.write_file(
                sandboxes[(lane + number) % len(sandboxes)], PATH, content
            )
            if outcome.state != "committed" or outcome.outcome != "ok":
                raise RuntimeError(f"not committed: {outcome}")

        before = await self.synced_messages()
        measured = await rig.measure(
            step, in_flight=in_flight, seconds=seconds, processes=self.processes
        )
        after = await self.synced_messages()
        for name, count in after.items():
            share = (count - before[name]) / measured["steps"]
            measured[f"synced_{name.removeprefix('FP_').lower()}"] = round(share, 3)
        measured["synced_per_step"] = round(
            sum(value for name, value in measured.items() if name.startswith("synced_")), 2
        )
        return measured

    async def synced_messages(self) -> dict[str, int]:
        """How many messages the server has stored in files, and so synced before their ack."""
        names = (*streams.ledger_names(self.client.ledgers), *INPUTS)
        # Of all who connect, the operator alone may look at every stream.
        infos = {name: await stream_info(self.stack.operator, name) for name in names}
        return {name: info.state.last_seq for name, info in infos.items()}

    def processes(self) -> list[tuple[str, int]]:
        """Every process of the stack, with its role."""
        found = [("nats", self.stack.nats.pid)]
        for service in self.stack.services.values():
            found.append((service.role, service.pid))
            if service.role == "gateway":
                children = psutil.Process(service.pid).children(recursive=True)
                found += [(TOOLHOST, child.pid) for child in children]
        return found


@contextlib.asynccontextmanager
async def running(
    *,
    planners: int = 1,
    gateways: int = 1,
    sandboxes: int = SANDBOXES,
    shards: int = streams.SHARDS_EMBEDDED,
    ledgers: int = 1,
    environment: dict[str, str] | None = None,
) -> AsyncIterator[Running]:
    """Starts a stack of its own in a new folder, with live sandboxes."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-bench-"))
    folder.chmod(0o755)
    try:
        stack = await Stack.start(
            folder,
            planners=planners,
            gateways=gateways,
            others=False,
            postgres=False,
            shards=shards,
            ledgers=ledgers,
            environment={"FENCEPOST_LOG_LEVEL": "warning", **(environment or {})},
        )
        try:
            async with await Client.connect(stack.nats.url, wait_s=10) as client:
                yield Running(stack, client, await _create(client, sandboxes))
        finally:
            await stack.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _create(client: Client, count: int) -> list[str]:
    at_once = asyncio.Semaphore(CREATED_AT_ONCE)

    async def create(number: int) -> str:
        async with at_once:
            return await client.create_sandbox(f"bench-{number}")

    return list(await asyncio.gather(*(create(number) for number in range(count))))


async def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64, 256])
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--planners", type=int, default=1)
    options.add_argument("--gateways", type=int, default=1)
    options.add_argument("--shards", type=int, default=streams.SHARDS_EMBEDDED)
    options.add_argument("--ledgers", type=int, default=1)
    options.add_argument("--json", action="store_true")
    options.add_argument("--wait", action="store_true", help="tell the processes, to profile them")
    chosen = options.parse_args()
    began = time.perf_counter()
    async with running(
        planners=chosen.planners,
        gateways=chosen.gateways,
        shards=chosen.shards,
        ledgers=chosen.ledgers,
    ) as stack:
        print(f"up after {time.perf_counter() - began:.1f} s", file=sys.stderr)
        if chosen.wait:
            print(json.dumps(stack.processes()), file=sys.stderr, flush=True)
        rows: list[dict[str, Any]] = [
            await stack.measure(count, chosen.seconds) for count in chosen.in_flight
        ]
    print(json.dumps({"fencepost": rows}) if chosen.json else rig.table(rows))


if __name__ == "__main__":
    uvloop.run(main())
