"""
What the acceptance tests of crashes share: a workload that shows doubled effects, and who revives.

A command's effect is a line in a log, so that one that ran twice left two; a file names the step
that wrote it. What ended how is read from the ledger, what is there from the sandboxes' disks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fencepost.client import Client, RefusedError, ledger
from fencepost.client.outcome import StepOutcome
from fencepost.client.stack import Service, StartError
from fencepost.core import ids
from fencepost.core.errors import UnknownError
from fencepost.core.sandbox import entries as e
from fencepost.providers import processes

from tests.acceptance.conftest import RunningStack

PATIENCE_S = 60.0
LOG = "log"


async def until(holds: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.01)


class Script:
    """The file by which running processes are armed: the first line is the next point."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()

    @property
    def environment(self) -> dict[str, str]:
        armed = f"@{self.path}"
        return {"FENCEPOST_CRASH": armed, "FENCEPOST_TOOLHOST_CRASH": armed}

    def arm(self, *points: str) -> None:
        fresh = self.path.with_suffix(".next")
        fresh.write_text("".join(f"{point}\n" for point in points))
        fresh.rename(self.path)

    @property
    def is_done(self) -> bool:
        return not self.path.read_text().strip()


class Reviver:
    """Starts again what has ended, at once; `deaths` names who ended, in order."""

    def __init__(self, stack: RunningStack) -> None:
        self._stack = stack
        self._task: asyncio.Task[None] | None = None
        self.deaths: list[str] = []
        self.is_paused = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            if not self.is_paused:
                await self._look()
            await asyncio.sleep(0.02)

    async def _look(self) -> None:
        if not self._stack.nats.is_running:
            self.deaths.append("nats-server")
            with contextlib.suppress(StartError):
                await self._stack.nats.restart()
        for service in self._stack.services.values():
            if not service.is_running:
                self.deaths.append(service.name)
                service.start()


class History:
    """The ledger's entries by sandbox, read on from where the last look ended."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._after: dict[int, int] = {}
        self._entries: defaultdict[str, list[Any]] = defaultdict(list)

    async def of(self, sandbox: str) -> list[Any]:
        shard = ids.shard_of(sandbox, self._client.shards)
        async for found in ledger.batches(
            self._client.link,
            shard,
            ledgers=self._client.ledgers,
            after=self._after.get(shard, 0),
        ):
            self._after[shard] = found.seq
            for entry in found.entries:
                if hasattr(entry, "sandbox"):
                    self._entries[entry.sandbox].append(entry)
        return self._entries[sandbox]


def disk_since(entries: list[Any]) -> int:
    """The epoch that opened the disk which the sandbox has now."""
    opened = [x.epoch for x in entries if isinstance(x, e.EpochOpened) and x.disk != "warm"]
    return max(opened, default=0)


def patch_for(path: str, line: str) -> str:
    return f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{line}\n"


def appending(step: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A command that appends a line to the log, and the command that takes the line out."""
    undo = {"shell": f"touch {LOG}; sed -i '/^{step}$/d' {LOG}"}
    return {"shell": f"echo {step} >> {LOG}"}, {"kind": "command", "args": undo}


class Work:
    """Rounds of steps in one sandbox, and what must be true of them afterwards."""

    def __init__(self, stack: RunningStack, client: Client, history: History, box: str) -> None:
        self.stack = stack
        self.client = client
        self.history = history
        self.box = box
        self.outcomes: dict[str, StepOutcome] = {}
        self.content: dict[str, str] = {}

    async def round(self, tag: str, *, timeout_s: float = PATIENCE_S) -> None:
        """Six steps at a time: files, a patch, and commands whose doubling would show."""
        handles = []
        for number in range(3):
            step = f"{tag}-w{number}"
            self.content[step] = step
            handles.append(
                await self.client.submit(
                    self.box, "write_file", path=f"f/{step}", content=step, step=step
                )
            )
        step = f"{tag}-p"
        self.content[step] = f"{step}\n"
        handles.append(
            await self.client.submit(
                self.box, "apply_patch", patch=patch_for(f"f/{step}", step), step=step
            )
        )
        for number in range(2):
            step = f"{tag}-c{number}"
            args, undo = appending(step)
            handles.append(
                await self.client.submit(
                    self.box, "run_command", args, step=step, compensation=undo
                )
            )
        for outcome in await asyncio.gather(
            *(handle.outcome(timeout_s=timeout_s) for handle in handles)
        ):
            self.outcomes[outcome.step] = outcome

    async def native(self) -> str:
        return str((await self.shown())["native_id"])

    async def shown(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await self.client.show(self.box)
            except UnknownError:
                assert time.monotonic() < deadline, f"nobody says anything of {self.box}"
                await asyncio.sleep(0.1)

    async def live(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while (shown := await self.shown())["state"] != "live":
            assert time.monotonic() < deadline, shown
            await asyncio.sleep(0.05)
        return shown

    def workspace_of(self, shown: dict[str, Any]) -> Path:
        return self.stack.sandbox_root / str(shown["native_id"]) / "workspace"

    async def toolhost(self) -> int:
        """The pid of the sandbox's only toolhost, once its gateway has started it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            instance = (await self.live())["instance"]
            gateways = {x.pid for x in self.stack.of("gateway") if x.is_running}
            found = [
                pid
                for pid in processes.find(processes.INSTANCE, instance)
                if _parent(pid) in gateways
            ]
            if len(found) == 1:
                return found[0]
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.05)

    async def check(self) -> None:
        """Each step ended, has its effect at most once, and has it if it is committed here."""
        shown = await self.live()
        workspace = self.workspace_of(shown)
        entries = await self.history.of(self.box)
        since = disk_since(entries)
        lines = Counter((workspace / LOG).read_text().split()) if (workspace / LOG).exists() else {}
        assert all(count == 1 for count in lines.values()), f"an effect twice: {lines}"
        ends = Counter(x.step for x in entries if isinstance(x, e.Committed))
        assert all(count == 1 for count in ends.values()), "a step committed twice"
        for step, outcome in self.outcomes.items():
            is_command = step not in self.content
            if outcome.state == "indeterminate":
                assert is_command, outcome
                assert _was_interrupted(entries, step), outcome
                continue
            assert outcome.state == "committed", outcome
            assert outcome.outcome == "ok", outcome
            if outcome.epoch < since:
                continue
            if is_command:
                assert lines.get(step) == 1, f"{step} is committed, its line is not there"
            else:
                assert (workspace / "f" / step).read_text() == self.content[step]


def _was_interrupted(entries: list[Any], step: str) -> bool:
    """Whether the session ended under which the step was fenced: only then may it be unknown."""
    sessions: set[str] = set()
    current = ""
    for entry in entries:
        if isinstance(entry, e.Attached):
            current = entry.session
        if isinstance(entry, e.Fenced) and entry.step == step:
            sessions.add(entry.session)
    return bool(sessions - {current})


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text[text.rfind(")") + 2 :].split()[1])
    return 0


def end(service: Service) -> None:
    """SIGKILL, without telling the service object that it is not wanted any more."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(service.pid, signal.SIGKILL)


async def gone(client: Client, box: str) -> None:
    """Releases a sandbox, again and again, until its shard says that it is gone."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(UnknownError):
            try:
                if (await client.release(box, timeout_s=15))["state"] == "gone":
                    return
            except RefusedError as error:
                if (await client.show(box))["state"] == "gone":
                    return
                raise AssertionError(f"{box} is not released: {error}") from error
        assert time.monotonic() < deadline, f"{box} is not gone"


@contextlib.asynccontextmanager
async def reviving(stack: RunningStack) -> AsyncIterator[Reviver]:
    reviver = Reviver(stack)
    reviver.start()
    try:
        yield reviver
    finally:
        await reviver.stop()
