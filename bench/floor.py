"""
The floor: what one step costs when nothing is decided and only its synced messages are sent.

A step alone costs three messages that are synced before they are acknowledged: the command, the
batch that fences it, the batch that commits it. This program sends the same three with a bare
client, each awaited before the next, to two file-backed streams of the same server. It does not put
several steps into one batch, so with many in flight a system that does so can be faster than this.
"""

import argparse
import json
import sys
from pathlib import Path

import nats
import uvloop
from nats.js.api import StorageType, StreamConfig

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import rig

PAYLOAD_BYTES = 200
SYNCED_MESSAGES = 3
COMMANDS, BATCHES = "FLOOR_CMD", "FLOOR_LEDGER"
SHARDS = 8


async def run(
    server: rig.Server,
    in_flight: int,
    seconds: float,
    *,
    synced_messages: int = SYNCED_MESSAGES,
    payload_bytes: int = PAYLOAD_BYTES,
) -> rig.Measurement:
    """Measures `synced_messages` acknowledged publishes in sequence per step, on new streams."""
    client = await nats.connect(server.url)
    manager = client.jetstream()
    names = {COMMANDS: "floor.cmd.>", BATCHES: "floor.ledger.>"}
    for name, subject in names.items():
        await manager.add_stream(
            StreamConfig(name=name, subjects=[subject], storage=StorageType.FILE)
        )
    payload = b"x" * payload_bytes

    async def publish(subject: str) -> None:
        answer = await client.request(subject, payload, timeout=30)
        if b'"seq"' not in answer.data:
            raise RuntimeError(f"not stored: {answer.data!r}")

    async def step(lane: int, number: int) -> None:
        await publish(f"floor.cmd.{lane}.{number}")
        for _ in range(synced_messages - 1):
            await publish(f"floor.ledger.{lane % SHARDS}")

    try:
        return await rig.measure(
            step,
            in_flight=in_flight,
            seconds=seconds,
            processes=lambda: [("nats", server.pid)],
        )
    finally:
        for name in names:
            await manager.delete_stream(name)
        await client.close()


async def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64, 256])
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--synced-messages", type=int, default=SYNCED_MESSAGES)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    async with rig.nats_server() as server:
        rows = [
            await run(server, count, chosen.seconds, synced_messages=chosen.synced_messages)
            for count in chosen.in_flight
        ]
    print(json.dumps({"floor": rows}) if chosen.json else rig.table(rows))


if __name__ == "__main__":
    uvloop.run(main())
