"""
The `stack` fixture: a whole deployment as real processes, on free ports, in a folder of its own.

    async def test_x(start_stack) -> None:
        stack = await start_stack(planners=2, gateways=2)
        async with await stack.client() as client: ...
        stack.services["planner-1"].kill()          # SIGKILL, by its own pid
        stack.services["planner-1"].start()         # the same replica's command again
        stack.services["gateway-1"].pause()         # SIGSTOP; resume() goes on
        stack.nats.kill(); await stack.nats.restart()

`stack` is one planner and one gateway without PostgreSQL. Everything is stopped at the end, and a
test fails when a process of it is left. Heartbeats and leases are short; logs are shown on failure.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from fencepost.client.client import Client
from fencepost.client.stack import Stack
from fencepost.client.verify import Report, verify
from fencepost.contracts.grants import Role
from fencepost.runtime import access
from fencepost.runtime.link import Link

HEARTBEAT_MS = 150
LEASE_MS = 1_000
QUICK = {
    "FENCEPOST_HEARTBEAT_MS": str(HEARTBEAT_MS),
    "FENCEPOST_LEASE_MS": str(LEASE_MS),
    "FENCEPOST_LOG_FORMAT": "json",
}


class RunningStack(Stack):
    """A stack with what tests want of it."""

    async def client(self, **options: Any) -> Client:
        return await Client.connect(self.nats.url, wait_s=10, **options)

    async def link_as(self, role: Role) -> Link:
        """A connection of one of the deployment's users."""
        who = access.read(str(self.credentials[role]))
        return await Link.connect(self.nats.url, name=f"as-{role}", access=who)

    def denials(self) -> list[str]:
        """What the server's permissions refused the services: nothing, if the table is right."""
        return [
            line
            for log in sorted((self.data / "log").glob("*.log"))
            for line in log.read_text(errors="replace").splitlines()
            if '"event": "denied"' in line
        ]

    async def verify(self) -> Report:
        """Folds and checks the ledger, by a client of its own."""
        async with await self.client(name="verify") as client:
            return await verify(client)

    def logs(self) -> str:
        """The tail of every process's log."""
        logs = [*sorted((self.data / "log").glob("*.log")), self.data / "nats" / "nats.log"]
        return "\n".join(
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            for log in logs
            if log.exists()
        )

    def processes(self) -> list[psutil.Process]:
        """Every living process that was started for this stack, found by its command or folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if str(self.data) in " ".join(process.cmdline()) or (
                    process.environ().get("FENCEPOST_DATA") == str(self.data)
                ):
                    found.append(process)
        return found


StartStack = Callable[..., Awaitable[RunningStack]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" and report.failed:
        for stack in getattr(item, "stacks", ()):
            report.sections.append(("processes' logs", stack.logs()))
    return report


@pytest.fixture
async def start_stack(request: pytest.FixtureRequest) -> AsyncIterator[StartStack]:
    """
    Starts stacks: `planners`, `gateways`, `postgres`, `others`, `shards`, `sync_always`,
    `environment` (added to `QUICK`), `kind` (a `RunningStack` of the test's own).

    A service that was denied anything by the server's permissions fails the test.
    """
    stacks: list[RunningStack] = []
    request.node.stacks = stacks
    folders: list[Path] = []

    async def start(
        *,
        environment: dict[str, str] | None = None,
        kind: type[RunningStack] = RunningStack,
        **options: Any,
    ) -> RunningStack:
        folder = Path(tempfile.mkdtemp(prefix="fencepost-test-"))
        folder.chmod(0o755)
        folders.append(folder)
        options = {"postgres": False, "others": False, **options}
        stack = await kind.start(folder, environment={**QUICK, **(environment or {})}, **options)
        stacks.append(stack)
        return stack

    yield start
    left = []
    denied = [line for stack in stacks for line in stack.denials()]
    for stack in stacks:
        for service in stack.services.values():
            if service.is_running:
                service.resume()
        await stack.stop()
        left += await _left(stack)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"still running: {left}"
    assert not denied, "\n".join(denied[:20])


@pytest.fixture
async def stack(start_stack: StartStack) -> RunningStack:
    """One planner, one gateway, no PostgreSQL."""
    return await start_stack()


async def _left(stack: RunningStack) -> list[str]:
    """What has not ended within a moment; it is killed, by pid, so that it burdens no other test."""
    _, alive = psutil.wait_procs(stack.processes(), timeout=5)
    names = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
            if process.pid != os.getpid():
                process.kill()
    return names
