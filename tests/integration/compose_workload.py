"""
What runs in a client's container: steps on sandboxes of the engine until SIGTERM.

    python workload.py SANDBOXES        a JSON line for each step, and then what each disk holds

Every step appends its name to one file, so one that was lost or done twice shows on the disk.
"""

import asyncio
import json
import os
import signal
import sys
import time

from fencepost.client import Client
from fencepost.core.steps import SandboxSpec

OUTCOME_S = 120.0
PAUSE_S = 0.05


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


async def work(client: Client, box: str, ended: asyncio.Event) -> None:
    number = 0
    while not ended.is_set():
        step = f"{box}-{number}"
        number += 1
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
        epoch, session = outcome.epoch, outcome.attempts
        say(step=step, state=outcome.state, attempts=session, epoch=epoch, waited_s=waited)
        await asyncio.sleep(PAUSE_S)


async def main(sandboxes: int) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    spec = SandboxSpec(provider="docker", memory_mb=128)
    url = os.environ["FENCEPOST_NATS_URL"]
    name = os.environ["HOSTNAME"]
    async with await Client.connect(url, name="workload", wait_s=60) as client:
        boxes = [f"{name}-{number}" for number in range(sandboxes)]
        await asyncio.gather(*(client.create_sandbox(box, spec, timeout_s=120) for box in boxes))
        say(ready=boxes)
        await asyncio.gather(*(work(client, box, ended) for box in boxes))
        for box in boxes:
            say(box=box, log=(await client.read_file(box, "log")).split())
            await client.release(box, timeout_s=120)
    say(done=True)


asyncio.run(main(int(sys.argv[1])))
