"""
`make bench`: steps per second and latencies, beside a floor and beside a plain task queue.

Three programs on the same machine in the same run, each on a synced nats-server of its own that is
started for it and stopped after it, in turns: floor, taskiq, Fencepost at one number in flight,
then at the next, and all of that `--rounds` times. Every number is the median of the rounds;
ratios are medians of the ratios of neighbours in time, which a busy machine disturbs least.
At the end: the time of a cancel with few and with many DAGs in the ledger (`bench/cancel.py`), of
checkpoints and restores of a large workspace (`bench/checkpoints.py`), and the rate of a git
history in peace and under reclaims (`bench/imports.py`).
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop
from fencepost.simulator.numbers import more_than_none, whole

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import (
    cancel,
    checkpoints,
    fencepost_bench,
    floor,
    history,
    imports,
    rig,
    taskiq_nats_bench,
)

IN_FLIGHT = [1, 16, 64, 256]
IN_FLIGHT_MAX = 100_000
SECONDS, ROUNDS = 5.0, 3
SECONDS_QUICK, ROUNDS_QUICK = 2.0, 1

Rows = list[rig.Measurement]
Side = Callable[[int, float], Awaitable[rig.Measurement]]

WHAT = """\
floor        three acknowledged, synced messages of 200 bytes in sequence per step; no work at all
taskiq_nats  one synced message, then an acknowledgement; journal record, 200 bytes to a temporary
             file, rename, journal record. Delivered twice, it writes twice
fencepost    a durable command, a fenced and a committed entry in synced batches; in one of 64
             sandboxes, under its lock: marker, pre-image, journal record, 200 bytes to a temporary
             file, rename, marker, journal record with the receipt; a public event for each entry"""


async def _floor(in_flight: int, seconds: float) -> rig.Measurement:
    async with rig.nats_server() as server:
        return await floor.run(server, in_flight, seconds)


async def _taskiq(in_flight: int, seconds: float) -> rig.Measurement:
    async with rig.nats_server() as server:
        return await taskiq_nats_bench.run(server, in_flight, seconds)


async def _fencepost(in_flight: int, seconds: float) -> rig.Measurement:
    async with fencepost_bench.running() as stack:
        return await stack.measure(in_flight, seconds)


SIDES: dict[str, Side] = {"floor": _floor, "taskiq_nats": _taskiq, "fencepost": _fencepost}


async def compare(in_flight: list[int], seconds: float, rounds: int) -> dict[str, list[Rows]]:
    """Runs every side at every number in flight, `rounds` times: rows by side and number."""
    found: dict[str, list[Rows]] = {name: [[] for _ in in_flight] for name in SIDES}
    for round_ in range(rounds):
        for place, count in enumerate(in_flight):
            for name, side in SIDES.items():
                row = await side(count, seconds)
                found[name][place].append(row)
                _say(
                    f"round {round_ + 1}/{rounds}, {count} in flight: {name}"
                    f" {row['steps_s']:.0f}/s (load {os.getloadavg()[0]:.1f})"
                )
    return found


def ratio(fencepost: Rows, other: Rows) -> float:
    """The median of the rates' ratios, round by round."""
    pairs = zip(fencepost, other, strict=True)
    return round(statistics.median(one["steps_s"] / two["steps_s"] for one, two in pairs), 2)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": sys.version.split()[0],
    }


def _table(result: dict[str, Any]) -> str:
    lines = [WHAT]
    for name in SIDES:
        lines += ["", name, rig.table(result[name])]
    lines += ["", "Fencepost's rate to taskiq's, and synced messages per step:"]
    lines += [
        f"{row['in_flight']:>9} {ratio_:>8.2f} {row['synced_per_step']:>8.2f}"
        for row, ratio_ in zip(result["fencepost"], result["to_taskiq_nats"], strict=True)
    ]
    lines += ["", cancel.table(result["cancel"])]
    lines += ["", checkpoints.table(result["checkpoints"])]
    lines += ["", imports.table(result["imports"])]
    machine = result["machine"]
    lines += ["", f"{machine['cores']} cores, load {machine['load']}, Python {machine['python']}"]
    return "\n".join(lines)


async def main() -> None:
    options = argparse.ArgumentParser(prog="bench", description=__doc__)
    options.add_argument("--in-flight", type=whole(1, IN_FLIGHT_MAX), nargs="+", default=IN_FLIGHT)
    options.add_argument(
        "--seconds", type=more_than_none(), help=f"each measurement takes ({SECONDS:g})"
    )
    options.add_argument("--rounds", type=whole(1, 1000), help=f"medians are taken over ({ROUNDS})")
    options.add_argument("--quick", action="store_true", help="one short round")
    options.add_argument(
        "--history",
        type=whole(1),
        metavar="N",
        help="instead: with N entries in the ledger, and none",
    )
    options.add_argument(
        "--dags",
        type=whole(1),
        nargs="?",
        const=cancel.MANY,
        metavar="N",
        help=f"instead: cancels alone, with {cancel.FEW} and with N DAGs ({cancel.MANY})",
    )
    options.add_argument(
        "--checkpoints", action="store_true", help="instead: checkpoints and restores alone"
    )
    options.add_argument("--imports", action="store_true", help="instead: imports alone")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    seconds = chosen.seconds or (SECONDS_QUICK if chosen.quick else SECONDS)
    rounds = chosen.rounds or (ROUNDS_QUICK if chosen.quick else ROUNDS)
    if chosen.history:
        result = await history.compare(chosen.history, chosen.in_flight, seconds, rounds, _say)
        result["machine"] = _machine()
        print(json.dumps(result) if chosen.json else history.table(result))
        return
    if chosen.checkpoints:
        result = {"checkpoints": await checkpoints.compare(chosen.quick, _say)}
        result["machine"] = _machine()
        print(json.dumps(result) if chosen.json else checkpoints.table(result["checkpoints"]))
        return
    if chosen.imports:
        result = {"imports": await imports.compare(chosen.quick, _say)}
        result["machine"] = _machine()
        print(json.dumps(result) if chosen.json else imports.table(result["imports"]))
        return
    cancels = cancel.CANCELS_QUICK if chosen.quick else cancel.CANCELS
    if chosen.dags:
        result = {"cancel": await cancel.compare(chosen.dags, cancels, _say)}
        result["machine"] = _machine()
        print(json.dumps(result) if chosen.json else cancel.table(result["cancel"]))
        return
    found = await compare(chosen.in_flight, seconds, rounds)
    result = {name: [rig.medians(rows) for rows in places] for name, places in found.items()}
    result["to_taskiq_nats"] = [
        ratio(*rows) for rows in zip(found["fencepost"], found["taskiq_nats"], strict=True)
    ]
    many = cancel.MANY_QUICK if chosen.quick else cancel.MANY
    result["cancel"] = await cancel.compare(many, cancels, _say)
    result["checkpoints"] = await checkpoints.compare(chosen.quick, _say)
    result["imports"] = await imports.compare(chosen.quick, _say)
    result["machine"] = _machine()
    print(json.dumps(result) if chosen.json else _table(result))


if __name__ == "__main__":
    uvloop.run(main())
