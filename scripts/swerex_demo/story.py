"""
A SWE-ReX server is replaced at its own address, first under a plain client, then under Fencepost.

SWE-ReX answers a write with `200 {}` and publishes no generation, so its client cannot tell the
replacement from the first.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from fencepost.client.client import Client
from fencepost.client.errors import ToolFailedError
from fencepost.client.stack import Stack
from fencepost.client.verify import verify
from fencepost.contracts import subjects
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.core.steps import SandboxSpec

from scripts.swerex_demo.servers import TOKEN, SwerexServer

Say = Callable[[str], None]

SANDBOX = "behind-swerex"
FILE = "fix.py"
TEXT = "def answer() -> int:\n    return 42\n"
_PATIENCE_S = 90.0


async def play(folder: Path, say: Say) -> dict[str, Any]:
    """Plays both halves; the report says what each one ended with."""
    server = SwerexServer(folder, "only")
    await server.start()
    try:
        plain = await _plain_client(server, say)
        await server.replace()
        fenced = await _fencepost(folder, server, say)
    finally:
        server.kill()
    return {"plain": plain, "fencepost": fenced}


def is_as_it_must_be(report: dict[str, Any]) -> bool:
    plain, fenced = report["plain"], report["fencepost"]
    return bool(
        plain["answers_differ"] is False
        and plain["file_present"] is False
        and fenced["state"] == "committed"
        and fenced["epoch"] == fenced["epoch_before"] + 1
        and fenced["late_receipts_refused"] > 0
        and fenced["file_present"]
        and fenced["verify"] == "clean"
    )


async def _plain_client(server: SwerexServer, say: Say) -> dict[str, Any]:
    say("\nA plain client of SWE-ReX: it writes, takes the 200, goes on.")
    headers = {"X-API-Key": TOKEN}
    async with aiohttp.ClientSession(server.url, headers=headers) as http:
        path = f"{server.base}-plain/{FILE}"
        first = await _post(http, "/write_file", path=path, content=TEXT)
        say(f"  write_file {FILE} -> {first[0]} {json.dumps(first[1])}")
        await server.replace()
        say("  the server is killed with its disk; another one takes its address")
        other = f"{server.base}-plain/other.py"
        second = await _post(http, "/write_file", path=other, content=TEXT)
        say(f"  write_file other.py -> {second[0]} {json.dumps(second[1])}: the same again")
        status, _ = await _post(http, "/read_file", path=path)
    say(f"  read_file {FILE} -> {status}. The write that was answered 200 is gone, unnoticed.")
    return {"answers_differ": first != second, "file_present": status == 200}


async def _post(http: aiohttp.ClientSession, verb: str, **body: str) -> tuple[int, Any]:
    async with http.post(verb, json=body) as answer:
        return answer.status, await answer.json()


async def _fencepost(folder: Path, server: SwerexServer, say: Say) -> dict[str, Any]:
    say("\nFencepost on the same server.")
    pool = folder / "pool"
    pool.mkdir()
    (pool / "only.json").write_text(json.dumps(server.entry()))
    stack = await Stack.start(
        folder / "stack",
        others=False,
        postgres=False,
        environment={"FENCEPOST_SWEREX_POOL": str(pool)},
    )
    try:
        async with await Client.connect(stack.nats.url, name="swerex-demo", wait_s=5) as client:
            return await _late_write(client, server, say)
    finally:
        await stack.stop()


async def _late_write(client: Client, server: SwerexServer, say: Say) -> dict[str, Any]:
    began = time.monotonic()
    await client.create_sandbox(SANDBOX, SandboxSpec(provider="swerex"), timeout_s=_PATIENCE_S)
    before = await client.step(SANDBOX, "write_file", path="before.txt", content="before")
    say(f"  write_file before.txt: {before.state} at epoch {before.epoch}, by its receipt")
    refusals: list[dict[str, Any]] = []
    closed = asyncio.Event()

    def hear(data: bytes) -> None:
        refusals.append(json.loads(data))

    heard = await client.link.subscribe_raw(
        subjects.event_step(SANDBOX, "*", "receipt_refused"), lambda message: hear(message.data)
    )
    ending = await client.link.subscribe_raw(
        subjects.event_sandbox(SANDBOX, "epoch_closed"), lambda _message: closed.set()
    )
    await client.fault(SANDBOX, {"do": "hold_receipts", "ms": 60_000})
    handle = await client.submit(SANDBOX, "write_file", path=FILE, content=TEXT)
    await _until_present(client)
    say(f"  write_file {FILE}: it is on the disk; its receipt is held on the way")
    await server.replace()
    say("  the server is killed with its disk; another one takes its address")
    async with asyncio.timeout(_PATIENCE_S):
        await closed.wait()
    await client.fault(SANDBOX, {"do": "release_receipts"})
    outcome = await handle.outcome(timeout_s=_PATIENCE_S)
    deadline = time.monotonic() + 5
    while not refusals and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    for refused in refusals[:1]:
        say(f"  the late receipt arrives: {refused['reason']}. The commit is withheld.")
    say(f"  the retry under a new fence: {outcome.state} at epoch {outcome.epoch}")
    present = await client.read_file(SANDBOX, FILE) == TEXT
    say(f"  read_file {FILE} in the live sandbox: {'there' if present else 'missing'}")
    for subscription in (heard, ending):
        await subscription.unsubscribe()
    report = await verify(client)
    say(f"  verify: {'clean' if report.is_clean else 'violations'} ({report.entries} entries)")
    return {
        "epoch_before": before.epoch,
        "state": outcome.state,
        "epoch": outcome.epoch,
        "late_receipts_refused": len(refusals),
        "file_present": present,
        "verify": "clean" if report.is_clean else [str(found) for found in report.violations],
        "seconds": round(time.monotonic() - began, 2),
    }


async def _until_present(client: Client) -> None:
    """Waits until the live disk has the file, by a read of it."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if await client.read_file(SANDBOX, FILE) == TEXT:
                return
        except (UnknownError, RefusedError, ToolFailedError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.05)
