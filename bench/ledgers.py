"""
Whether several ledger streams take more appends a second than one, on a single synced server.

A planner has two appends in flight (`runtime/gate.py`), each on the condition of its shard's head;
`--at-once` is how many there are in all. In turns, each on a new server: one ledger and every other
number, `--rounds` times. Rates are medians, ratios medians of the ratios of neighbours in time. No
planner runs: this is the most that the server allows. One client sends all; its processor time
stands beside, since where that is a whole core it is the bound.
"""

import argparse
import json
import logging
import statistics
import sys
from pathlib import Path
from typing import Any

import structlog
import uvloop
from fencepost.contracts import streams as table
from fencepost.contracts import subjects
from fencepost.runtime import streams
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import rig

SHARDS, PAYLOAD_BYTES = 64, 2_000
LEDGERS, AT_ONCE = [3, 8], [4, 16, 64]
SECONDS, ROUNDS = 3.0, 3

Round = dict[int, rig.Measurement]
"""What was measured once with each number of ledgers."""


async def appends(
    ledgers: int, *, shards: int, at_once: int, seconds: float, size: int
) -> rig.Measurement:
    """Appends of this size to all shards, `at_once` (it divides them) in flight."""
    payload = b"x" * size
    async with rig.nats_server() as server:
        link = await Link.connect(server.url, name="bench")
        try:
            await streams.declare(link, shards, create=True, ledgers=ledgers)
            logs = [
                JetStreamLog(link, stream=table.ledger_of(shard, ledgers), append_timeout_s=30)
                for shard in range(shards)
            ]
            heads = [0] * shards

            async def step(lane: int, number: int) -> None:
                # No two lanes have a shard in common: each has one append in flight, at most.
                shard = (lane + number * at_once) % shards
                subject = subjects.ledger("sandbox", shard)
                heads[shard] = await logs[shard].append(subject, payload, heads[shard])

            return await rig.measure(
                step,
                in_flight=at_once,
                seconds=seconds,
                processes=lambda: [("nats", server.pid)],
            )
        finally:
            await link.close()


def summary(rounds: list[Round]) -> list[dict[str, Any]]:
    """One row for each number of ledgers: medians, and the ratio to one ledger's rate."""
    return [
        {
            "ledgers": ledgers,
            **rig.medians([each[ledgers] for each in rounds]),
            "ratio": round(
                statistics.median(each[ledgers]["steps_s"] / each[1]["steps_s"] for each in rounds),
                2,
            ),
        }
        for ledgers in rounds[0]
    ]


async def main() -> None:
    options = argparse.ArgumentParser(prog="bench.ledgers", description=__doc__)
    options.add_argument("--ledgers", type=int, nargs="+", default=LEDGERS)
    options.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE)
    options.add_argument("--shards", type=int, default=SHARDS)
    options.add_argument("--bytes", type=int, default=PAYLOAD_BYTES)
    options.add_argument("--seconds", type=float, default=SECONDS)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    if any(at_once < 1 or chosen.shards % at_once for at_once in chosen.at_once):
        options.error(f"--at-once: each must divide --shards, {chosen.shards}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))

    async def once(at_once: int) -> Round:
        return {
            ledgers: await appends(
                ledgers,
                shards=chosen.shards,
                at_once=at_once,
                seconds=chosen.seconds,
                size=chosen.bytes,
            )
            for ledgers in dict.fromkeys([1, *chosen.ledgers])
        }

    rows: list[dict[str, Any]] = []
    for at_once in chosen.at_once:
        rows += summary([await once(at_once) for _ in range(chosen.rounds)])
    if chosen.json:
        print(json.dumps({"ledgers": rows}))
        return
    print("at once  ledgers  appends/s  ratio  p50 ms  p99 ms  others  processor time of one, µs")
    for row in rows:
        print(
            f"{row['in_flight']:>7} {row['ledgers']:>8} {row['steps_s']:>10.0f}"
            f" {row['ratio']:>6.2f} {row['p50_ms']:>7.2f} {row['p99_ms']:>7.2f}"
            f" {row['others']:>7.0%}  {rig.processor(row)}"
        )


if __name__ == "__main__":
    uvloop.run(main())
