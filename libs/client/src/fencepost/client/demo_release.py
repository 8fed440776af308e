"""
The demo's second act: a DAG of five tasks over three sandboxes is cancelled.

One sandbox is shared with another DAG, the stop of one is refused twice, one is still being
created. The first answer must say what is not known to be gone; the last one must be true.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from fencepost.client import ulid
from fencepost.client.client import Client
from fencepost.client.verify import verify
from fencepost.core.errors import FencepostError
from fencepost.runtime.dags import Verdict

RUN: Final = "nightly-run"
OTHER: Final = "other-run"
TASKS: Final = ("plan", "build", "test", "train", "report")
SHARED, STUBBORN, SLOW = "workspace", "builder", "gpu"
BOUND_S: Final = 1.0
_SLOW_MS: Final = 3_000
_REFUSALS: Final = 2
_PATIENCE_S: Final = 60.0

Say = Callable[[str], None]


async def play(client: Client, say: Say) -> tuple[dict[str, Any], bool]:
    """Plays the act on a running stack; what it found, and whether it went as it must."""
    began = time.monotonic()
    say("\n[bold]Act 2: a cancel that says only what is known[/]")
    held = await _set_up(client, say)
    async with _verdicts(client) as heard:
        first = await client.cancel_dag(RUN, bound_s=BOUND_S)
        view = await client.show_dag(RUN)
        reasons = {item["slot"]: item["reason"] for item in view["outstanding"]}
        _say_first(say, first, view)
        await _until(lambda: _is_settled(heard), "what nobody shares was not released")
        left_running = _processes(held[STUBBORN]) + _processes(held[SLOW])
        settled = heard[-1]
        alive = await _lives(client, held[SHARED]) and _processes(held[SHARED]) > 0
        say(
            f"  {len(heard)} events later: {_words(settled)};"
            f" {left_running} processes of ours are left,"
            f" and {OTHER}'s sandbox {'lives' if alive else '[red]is gone[/]'}"
        )
        await client.finish_dag(OTHER)
        await _until(lambda: heard[-1].released == "confirmed", "the verdict was not promoted")
    last = heard[-1]
    left_at_the_end = _processes(held[SHARED])
    say(f"  {OTHER} finishes and lets go: {_words(last)}")
    report = await verify(client)
    verdict = "clean" if report.is_clean else f"{report.violation_count} violations"
    seconds = time.monotonic() - began
    say(f"verify: {verdict} ({report.entries} entries); {seconds:.1f} s")
    result = {
        "act": 2,
        "cancelled": first.cancelled,
        "verdict_first": first.released,
        "reason_first": first.reason,
        "reasons": reasons,
        "verdict_settled": settled.released,
        "reason_settled": settled.reason,
        "left_running": left_running,
        "other_dag_alive": alive,
        "verdict_last": last.released,
        "evidence_last": last.evidence,
        "events": len(heard),
        "verify": "clean" if report.is_clean else [str(found) for found in report.violations],
        "seconds": round(seconds, 2),
    }
    succeeded = (
        first.released == "unconfirmed"
        and reasons.get(SHARED) == "shared"
        and reasons.get(STUBBORN) == "stop_refused"
        and SLOW in reasons
        and (settled.released, settled.reason) == ("unconfirmed", "shared")
        and not left_running
        and alive
        and last.released == "confirmed"
        and not left_at_the_end
        and report.is_clean
    )
    return result, succeeded


async def _set_up(client: Client, say: Say) -> dict[str, str]:
    """Acquires what the run holds; gives the sandboxes by slot."""
    await client.open_dag(OTHER)
    shared = await client.acquire(OTHER, "theirs")
    await client.open_dag(RUN, TASKS)
    await client.adopt(RUN, SHARED, shared.sandbox)
    stubborn = await client.acquire(RUN, STUBBORN)
    await client.start_node(RUN, "plan")
    await client.finish_node(RUN, "plan")
    await client.start_node(RUN, "build")
    say(
        f"  {RUN}: {len(TASKS)} tasks; {SHARED!r} is {OTHER}'s sandbox too, {STUBBORN!r} is its own"
    )
    await client.fault(stubborn.sandbox, {"do": "refuse_stops", "times": _REFUSALS})
    slow = f"sbx-{ulid.mint()}"
    await client.fault_ahead(slow, {"do": "slow_create", "ms": _SLOW_MS})
    await client.acquire(RUN, SLOW, wait=False, acquisition=slow)
    say(
        f"  the provider will refuse to stop {STUBBORN!r} twice, and is still creating {SLOW!r};"
        " now the run is cancelled"
    )
    return {SHARED: shared.sandbox, STUBBORN: stubborn.sandbox, SLOW: slow}


def _say_first(say: Say, first: Verdict, view: dict[str, Any]) -> None:
    say(f"  the answer, within {BOUND_S:g} s: {_words(first)}; {first.cancelled} tasks cancelled")
    for item in view["outstanding"]:
        evidence = f" ({item['evidence']})" if item["evidence"] else ""
        say(f"    {item['slot']!r}: {item['reason']}{evidence}")


def _words(verdict: Verdict) -> str:
    colour = "green" if verdict.released == "confirmed" else "yellow"
    why = verdict.reason or f"evidence {verdict.evidence}"
    return f"[{colour}]{verdict.released}[/], {why}"


def _is_settled(heard: list[Verdict]) -> bool:
    """Nothing is outstanding but what the other DAG shares."""
    return bool(heard) and (heard[-1].reason, heard[-1].outstanding) == ("shared", 1)


@contextlib.asynccontextmanager
async def _verdicts(client: Client) -> AsyncIterator[list[Verdict]]:
    """What subscribers are told of the run, from here on."""
    heard: list[Verdict] = []

    async def listen() -> None:
        async for verdict in client.releases(RUN, from_start=True):
            heard.append(verdict)  # noqa: PERF401 - it never ends

    task = asyncio.create_task(listen())
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _lives(client: Client, sandbox: str) -> bool:
    """Whether a sandbox answers from its disk."""
    try:
        await client.list_dir(sandbox)
    except FencepostError:
        return False
    return True


def _processes(sandbox: str) -> int:
    """How many processes of this host name a sandbox in their command or environment."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            told = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            found += sandbox.encode() in told
    return found


async def _until(holds: Callable[[], bool], otherwise: str) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise FencepostError(otherwise) from error
