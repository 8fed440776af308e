"""
`fencepost demo`: the counterexamples, on real processes, with a real clock and real kill -9.

Act 2 is in `demo_release`, act 3 in `demo_recovery`. Act 1: a patch is sent, the sandbox answers
200, the sandbox is reclaimed with its disk, and only then does the 200 arrive. First a planner as
most are, then Fencepost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from fencepost.client import cli, demo_recovery, demo_release, plain_sandbox, timeline, ulid
from fencepost.client.client import Client, StepHandle
from fencepost.client.errors import ToolFailedError
from fencepost.client.outcome import StepOutcome
from fencepost.client.processes import Child, StartError, free_port
from fencepost.client.stack import Stack
from fencepost.client.verify import verify
from fencepost.contracts import subjects
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.core.sandbox import entries as e
from rich.console import Console

FILE: Final = "fix.py"
PATCH: Final = f"""\
--- /dev/null
+++ b/{FILE}
@@ -0,0 +1,2 @@
+def answer() -> int:
+    return 42
"""
SANDBOX: Final = "demo"
EPOCH: Final = 7
_PATIENCE_S: Final = 20.0
_HOLD_MS: Final = 15_000

LATE: Final = (
    "\nThe same 200, twice. One planner believed it. The other asked which disk it spoke of,"
    "\nand committed only what the live one holds."
)
RELEASED: Final = (
    "\nNot known to be gone is not gone: the first answer said so, the release went on by itself,"
    "\nand every change of the verdict was told."
)
RECOVERED: Final = (
    "\nA committed step stays committed, and a new disk lacks it: so it gets the checkpoint back,"
    "\nand what came after it, step by step, before anything new is written."
)

Say = Callable[[str], None]


async def play(*, as_json: bool, keep: bool, out: Console, err: Console) -> bool:
    """Plays every act; True when each went as it must."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-demo-"))
    folder.chmod(0o755)

    def say(text: str) -> None:
        if not as_json:
            out.print(text)

    def tell(report: dict[str, Any], moral: str) -> None:
        if as_json:
            cli.emit(report)
        else:
            say(moral)

    succeeded = False
    try:
        say("[bold]Act 1: a 200 that outlives the disk it describes[/]")
        naive = await _common_planner(folder / "common", say)
        starting = time.monotonic()
        if err.is_terminal:
            err.print("  starting nats-server, a planner, a tracker and a gateway", style="dim")
        # No PostgreSQL: nothing that decides a step or a release reads it.
        stack = await Stack.start(folder / "stack", others=False, postgres=False, trackers=1)
        set_up_s = time.monotonic() - starting
        try:
            report, succeeded = await _fencepost(stack, say, out if not as_json else None)
            report = {"act": 1, "naive": naive, **report, "set_up_s": round(set_up_s, 2)}
            succeeded = succeeded and naive == {"stored": "success", "file_present": False}
            tell(report, _moral(succeeded, LATE))
            async with await Client.connect(stack.nats.url, name="fencepost-demo") as client:
                for act, moral in ((demo_release, RELEASED), (demo_recovery, RECOVERED)):
                    report, went_well = await act.play(client, say)
                    tell(report, _moral(went_well, moral))
                    succeeded = succeeded and went_well
        finally:
            await stack.stop()
    finally:
        if keep:
            err.print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return succeeded


def _moral(succeeded: bool, moral: str) -> str:
    if succeeded:
        return moral
    return "\n[bold red]This did not go as it must; please report it with the output above.[/]"


# The common planner


async def _common_planner(folder: Path, say: Say) -> dict[str, Any]:
    say("\nA common planner: it calls the tool, takes the 200, stores success.")
    folder.mkdir(parents=True)
    store = folder / "steps.json"
    disk = folder / "disk-1"
    sandbox, port = await _plain_sandbox(folder, disk)
    answered, reclaimed = asyncio.Event(), asyncio.Event()
    call = asyncio.create_task(_held(port, answered, reclaimed))
    try:
        await _until(answered.is_set, "the patch was not applied")
        say(f"  apply_patch sent; the sandbox wrote {FILE} and answers 200 (held on its way)")
        sandbox.kill()
        shutil.rmtree(disk)
        say("  the sandbox is reclaimed: kill -9, and its disk is gone")
        reclaimed.set()
        status = await call
        if status == 200:  # this is all that a common planner looks at
            store.write_text(json.dumps({"step-1": "success"}))
    finally:
        sandbox.kill()
        call.cancel()
    stored = json.loads(store.read_text())["step-1"]
    say(f"  the late {status} arrives; stored: step-1 = {stored}")
    disk = folder / "disk-2"
    sandbox, port = await _plain_sandbox(folder, disk)
    try:
        status, _ = await _http(port, "GET", f"/{FILE}")
    finally:
        sandbox.kill()
    say(f"  in the replacement: GET /{FILE} -> {status}")
    say("  [red]Success is stored, and the file is lost.[/]")
    return {"stored": stored, "file_present": status == 200}


async def _plain_sandbox(folder: Path, disk: Path) -> tuple[Child, int]:
    port = free_port()
    argv: list[str | Path] = [
        sys.executable,
        "-m",
        plain_sandbox.__name__,
        disk,
        str(port),
    ]
    child = Child.start("plain-sandbox", argv, log=folder / "sandbox.log")
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and child.is_running:
        with contextlib.suppress(OSError):
            await _http(port, "GET", "/")
            return child, port
        await asyncio.sleep(0.02)
    child.kill()
    raise StartError(f"the plain sandbox did not start:\n{child.tail()}")


async def _held(port: int, answered: asyncio.Event, reclaimed: asyncio.Event) -> int:
    """The network between planner and sandbox: slow to bring an answer back, as networks are."""
    status, _ = await _http(port, "POST", "/", PATCH.encode())
    answered.set()
    await reclaimed.wait()
    return status


async def _http(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"{method} {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    status_line, _, rest = answer.partition(b"\r\n\r\n")
    return int(status_line.split()[1]), rest


# Fencepost


async def _fencepost(
    stack: Stack, say: Say, console: Console | None
) -> tuple[dict[str, Any], bool]:
    began = time.monotonic()
    async with await Client.connect(stack.nats.url, name="fencepost-demo", wait_s=5) as client:
        say("\nFencepost: the same calls, the same reclaim, the same late 200.")
        await client.create_sandbox(SANDBOX)
        for _ in range(EPOCH - 1):
            await client.reclaim(SANDBOX)
        say(f"  six reclaims later the sandbox lives at epoch {EPOCH}")
        outcome = await _late_receipt(client, say)
        present = await _is_present(client)
        lines = [line async for line in timeline.lines(client, SANDBOX)]
        attempts, late = _attempts(lines, outcome.step)
        for refused in late:
            say(f"  the late 200 arrives: {refused}. [green]The commit is withheld.[/]")
        say(f"  the retry under the new fence: {outcome.state} at epoch {outcome.epoch}")
        found = "there" if present else "[red]missing[/]"
        say(f"  read_file {FILE} in the live sandbox: [green]{found}[/]")
        seconds = time.monotonic() - began
        report = await verify(client)
        if console is not None:
            say(f"\nThe ledger, from epoch {EPOCH} on (all of it: fencepost replay):")
            for line in lines:
                if line.epoch >= EPOCH:
                    cli.print_line(console, line)
            verdict = "clean" if report.is_clean else f"{report.violation_count} violations"
            say(f"\nverify: {verdict} ({report.entries} entries); {seconds:.1f} s")
    result = {
        "fencepost": {
            "state": outcome.state,
            "epoch": outcome.epoch,
            "attempts": attempts,
            "late_receipts_refused": len(late),
            "file_present": present,
        },
        "verify": "clean" if report.is_clean else [str(found) for found in report.violations],
        "seconds": round(seconds, 2),
    }
    succeeded = (
        outcome.is_ok
        and outcome.epoch == EPOCH + 1
        and attempts[0]["epoch"] == EPOCH
        and attempts[0]["state"] == "compensated"
        and bool(late)
        and present
        and report.is_clean
    )
    return result, succeeded


async def _late_receipt(client: Client, say: Say) -> StepOutcome:
    await client.fault(SANDBOX, {"do": "hold_receipts", "ms": _HOLD_MS})
    handle: StepHandle = await client.submit(SANDBOX, "apply_patch", patch=PATCH, step=ulid.mint())
    async with asyncio.timeout(_PATIENCE_S):
        while not await _is_present(client):
            await asyncio.sleep(0.02)
    say(f"  apply_patch sent; the sandbox wrote {FILE} and answers 200 (held on its way)")
    async with _hears(client, "epoch_closed") as closed, _hears(client, "receipt_refused") as late:
        await client.reclaim(SANDBOX, wait=False)
        say("  the sandbox is reclaimed: kill -9, and its disk is gone")
        async with asyncio.timeout(_PATIENCE_S):
            await closed.wait()
        await client.fault(SANDBOX, {"do": "release_receipts"})
        outcome = await handle.outcome(timeout_s=_PATIENCE_S)
        # The answer was on its way; whether before or after the retry's, it is refused.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                await late.wait()
    return outcome


@contextlib.asynccontextmanager
async def _hears(client: Client, kind: str) -> AsyncIterator[asyncio.Event]:
    """An event of the sandbox, or of any step of it."""
    heard = asyncio.Event()
    subscriptions = [
        await client.link.subscribe_raw(subject, lambda _message: heard.set())
        for subject in (
            subjects.event_sandbox(SANDBOX, kind),
            subjects.event_step(SANDBOX, "*", kind),
        )
    ]
    try:
        yield heard
    finally:
        for subscription in subscriptions:
            await subscription.unsubscribe()


async def _is_present(client: Client) -> bool:
    """Whether the live sandbox has the file, by a read of its disk."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return "return 42" in await client.read_file(SANDBOX, FILE)
        except ToolFailedError:
            return False
        except (UnknownError, RefusedError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def _until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise StartError(otherwise)
        await asyncio.sleep(0.01)


def _attempts(lines: list[timeline.Line], step: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Each attempt as it ended, by the ledger; and the late receipts, in words."""
    attempts: dict[str, dict[str, Any]] = {}
    late = []
    for line in lines:
        entry = line.entry
        if getattr(entry, "step", "") != step:
            continue
        found = attempts.setdefault(
            getattr(entry, "attempt", ""), {"state": "pending", "epoch": 0, "reason": ""}
        )
        match entry:
            case e.Fenced(direction="apply"):
                found |= {"state": "fenced", "epoch": entry.epoch}
            case e.Compensated():
                found |= {
                    "state": "compensated",
                    "reason": entry.reason,
                    "evidence": entry.evidence,
                }
            case e.Committed():
                found |= {"state": "committed", "epoch": entry.receipt.epoch}
            case e.ReceiptRefused():
                found.setdefault("receipts_refused", []).append(entry.reason)
                late.append(line.text)
            case _:
                pass
    listed = [{"attempt": name, **found} for name, found in attempts.items()]
    return msgspec.to_builtins(listed), late
