"""
Real faults on real processes, for a while; then everything must settle, and what was told hold.

    python -m scripts.chaos [--seconds 60] [--seed N] [--cluster] [--only WORD ...] [--json]

The last line is a JSON object. The seed draws the faults and the workload; what the machine makes
of them differs from run to run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import shutil
import sys
import tempfile
from pathlib import Path

import structlog

from scripts.chaos import disks
from scripts.chaos.run import Options, Report, chaos
from scripts.chaos.world import Shape


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chaos", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of faults; settling comes on top"
    )
    parser.add_argument("--seed", type=int, default=0, help="0: a fresh one, which is printed")
    parser.add_argument("--cluster", action="store_true", help="three nats-servers, streams at R3")
    parser.add_argument("--planners", type=int, default=3)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--ledgers", type=int, default=1, help="streams that the shards are over")
    parser.add_argument("--boxes", type=int, default=6, help="standing sandboxes")
    parser.add_argument("--dags", type=int, default=2, help="agents that open and cancel DAGs")
    parser.add_argument("--at-once", type=int, default=2, help="faults at the same time")
    parser.add_argument(
        "--only", nargs="*", default=[], help="only faults whose name has one of these in it"
    )
    parser.add_argument("--keep", action="store_true", help="keep logs and data, and say where")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    return parser.parse_args()


def main() -> int:
    given = _options()

    def say(text: str) -> None:
        if not given.json:
            print(text, flush=True)

    # The client's own words about the connections that we cut are no news.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    seed = given.seed or random.SystemRandom().randrange(1, 1 << 31)
    no_disks, no_power = disks.why_not(), disks.why_no_power_cut()
    if not no_disks:
        try:
            disks.unshare_mounts()
        except disks.DiskError as error:
            no_disks = no_power = str(error)
    folder = Path(tempfile.mkdtemp(prefix="fencepost-chaos-"))
    folder.chmod(0o755)
    options = Options(
        seconds=given.seconds,
        seed=seed,
        shape=Shape(
            planners=given.planners,
            gateways=given.gateways,
            ledgers=given.ledgers,
            is_cluster=given.cluster,
            has_disks=not no_disks,
            has_power=not no_power,
        ),
        boxes=given.boxes,
        dags=given.dags,
        at_once=given.at_once,
        only=tuple(given.only),
        skipped={
            name: why for name, why in (("full disk", no_disks), ("power cut", no_power)) if why
        },
    )
    report = Report(seed=seed)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(chaos(folder, options, report, say))
    finally:
        if given.keep or (report.problems and not given.json):
            say(f"logs and data: {folder}")
        if not given.keep:
            _drop(folder, keep_logs=bool(report.problems))
    say(report.text())
    print(json.dumps(report.as_json()))
    return 1 if report.problems else 0


def _drop(folder: Path, *, keep_logs: bool) -> None:
    for entry in folder.iterdir():
        if not (keep_logs and entry.name == "log"):
            shutil.rmtree(entry, ignore_errors=True)
    if not keep_logs:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
