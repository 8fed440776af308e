"""
What runs in a client's container: sandboxes on the engine, steps on them, and a JSON line for each.

    python workload.py STEPS SANDBOXES        steps until all are told of, then what the disks hold

Commands append, so a step that was lost or done twice shows on the disk.
"""

import asyncio
import json
import os
import sys
import time

from fencepost.client import Client
from fencepost.core.steps import SandboxSpec

OUTCOME_S = 120.0


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


async def work(client: Client, box: str, steps: int) -> None:
    for number in range(steps):
        step = f"{box}-{number}"
        began = time.monotonic()
        handle = await client.submit(
            box,
            "run_command",
            {"shell": f"echo {step} >> log"},
            step=step,
            compensation={"kind": "command", "args": {"shell": f"sed -i '/^{step}$/d' log"}},
        )
        outcome = await handle.outcome(timeout_s=OUTCOME_S)
        waited = round(time.monotonic() - began, 3)
        say(step=step, state=outcome.state, attempts=outcome.attempts, waited_s=waited)


async def main(steps: int, sandboxes: int) -> None:
    spec = SandboxSpec(provider="docker", memory_mb=128)
    url = os.environ["FENCEPOST_NATS_URL"]
    async with await Client.connect(url, name="workload", wait_s=30) as client:
        boxes = [f"box-{number}" for number in range(sandboxes)]
        await asyncio.gather(*(client.create_sandbox(box, spec=spec, timeout_s=90) for box in boxes))
        say(ready=boxes)
        await asyncio.gather(*(work(client, box, steps) for box in boxes))
        for box in boxes:
            say(box=box, log=(await client.read_file(box, "log")).split())
            await client.release(box)


asyncio.run(main(*map(int, sys.argv[1:])))
