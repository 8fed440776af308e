"""Sends a history's steps to a sandbox, puts it to what trouble was asked for, compares the end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
from fencepost.client import ulid
from fencepost.client.client import Client
from fencepost.client.gitimport import convert, trees
from fencepost.client.gitimport.commits import converted, files_of
from fencepost.client.gitimport.repository import Order, Repository
from fencepost.client.gitimport.trouble import Reclaims, echoes
from fencepost.client.verify import verify
from fencepost.core import limits
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.core.steps import SandboxSpec

STEP_S_MAX: Final = 300.0
WHOLE_S_MAX: Final = 300.0
_LOOK_S: Final = 0.05

Say = Callable[[str], None]


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What is imported: the newest `limit` commits up to a revision, on what stood before them."""

    repository: Path
    limit: int
    revision: str = "HEAD"
    order: Order = "first-parent"


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """
    What is done to the import on its way; the same seed draws the same numbers.

    `reclaim_mean`: a reclaim in so many steps, on average, and one at the end; 0 is never.
    `duplicates`: the share of orders and receipts that are delivered twice.
    `crash_planner`: kills it and starts it again; called once.
    """

    reclaim_mean: float = 0.0
    duplicates: float = 0.0
    crash_planner: Callable[[], Coroutine[Any, Any, None]] | None = None
    checkpoint_every: int = 10
    seed: int = 1


class Report(msgspec.Struct, kw_only=True):
    """
    What came of it. `tree_expected` is the commit's tree, without the submodules, which
    `submodules` names; `tree_found` is made of what stands in the workspace.
    """

    tree_expected: str = ""
    tree_found: str = ""
    commits: int = 0
    steps: int = 0
    reclaims: int = 0
    replayed: int = 0
    restored: int = 0
    checkpoints: int = 0
    duplicates: int = 0
    planner_crashes: int = 0
    epoch: int = 0
    submodules: list[str] = []
    verify: str = ""
    seed: int = 0
    seconds: float = 0.0
    steps_per_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.tree_found == self.tree_expected and self.verify == "clean"


def check(history: History) -> None:
    """Raises `RefusedError` where there is no such repository, or no such revision in it."""
    with Repository(history.repository) as repository:
        repository.commits(history.revision, limit=1, order=history.order)


async def run(
    client: Client,
    history: History,
    trouble: Trouble,
    *,
    workspaces: Path,
    scratch: Path,
    say: Say = lambda _text: None,
) -> Report:
    """
    Imports a history into a sandbox of its own and tells what became of it.

    `workspaces` is where the process provider keeps its sandboxes; `scratch` a folder to work in.
    Raises what a step raises that does not commit, or whose tool fails.
    """
    sandbox = f"import-{ulid.mint()}"
    report = Report(seed=trouble.seed)
    with Repository(history.repository) as repository:
        line = await asyncio.to_thread(
            repository.commits, history.revision, limit=history.limit, order=history.order
        )
        report.commits = sum(1 for commit, _ in line if commit)
        say(f"{report.commits} commits of {history.repository} into sandbox {sandbox}")
        spec = SandboxSpec(checkpoint_every_steps=trouble.checkpoint_every)
        await client.create_sandbox(sandbox, spec)
        began = time.monotonic()
        shown = await _Sender(client, sandbox, trouble).send(repository, line, report, say)
        report.seconds = round(time.monotonic() - began, 3)
        report.steps_per_s = round(report.steps / max(report.seconds, 0.001), 1)
        report.epoch = int(shown["epoch"])
        workspace = workspaces / str(shown["native_id"]) / "workspace"
        await asyncio.to_thread(_compare, repository, line[-1][1], workspace, scratch, report)
    await _count(client, sandbox, report)
    found = await verify(client)
    report.verify = "clean" if found.is_clean else f"{found.violation_count} violations"
    return report


class _Sender:
    """Sends commits to a sandbox, one after the other, under trouble."""

    def __init__(self, client: Client, sandbox: str, trouble: Trouble) -> None:
        self._client = client
        self._sandbox = sandbox
        self._trouble = trouble
        self._random = Random(trouble.seed)
        self._reclaims = Reclaims(client, sandbox)

    async def send(
        self, repository: Repository, line: list[tuple[str, str]], report: Report, say: Say
    ) -> dict[str, Any]:
        """Sends everything and waits until the sandbox is whole; gives what `show` says then."""
        trouble = self._trouble
        crash_at = self._random.randint(len(line) // 3, 2 * len(line) // 3)
        commits = converted(repository, line)
        async with echoes(self._client, self._sandbox, trouble.duplicates) as echoed:
            for number in range(len(line)):
                phases = (await asyncio.to_thread(next, commits)).phases
                work = [self._send_commit(f"g{number:06d}", phases)]
                if number == crash_at and trouble.crash_planner is not None:
                    report.planner_crashes += 1
                    work.append(trouble.crash_planner())
                await _all(work)
                report.steps += sum(map(len, phases))
                if number and number % 100 == 0:
                    say(f"  {number} commits, {report.steps} steps")
            await self._reclaims.ended()
            if trouble.reclaim_mean:
                # The last word has a disk that holds nothing but what recovery brought back.
                self._reclaims.begin()
                await self._reclaims.ended()
            shown = await _whole(self._client, self._sandbox, after=self._reclaims.taken_epoch)
        report.reclaims, report.duplicates = self._reclaims.count, echoed()
        return shown

    async def _send_commit(self, name: str, phases: tuple[convert.Phase, ...]) -> None:
        """Steps of a phase touch different paths and are sent at once; the next phase follows."""
        room = asyncio.Semaphore(limits.OPEN_STEPS_PER_SANDBOX_MAX)
        for order, phase in enumerate(phases):
            await _all(
                [
                    self._send_step(step, f"{name}-{order}-{number}", room)
                    for number, step in enumerate(phase)
                ]
            )

    async def _send_step(self, step: convert.Step, name: str, room: asyncio.Semaphore) -> None:
        mean = self._trouble.reclaim_mean
        async with room:
            if mean and self._random.random() < 1 / mean:
                self._reclaims.begin()
            outcome = await self._client.step(
                self._sandbox,
                step.tool,
                step.args,
                step=name,
                attempts_max=limits.ATTEMPTS_MAX,
                timeout_s=STEP_S_MAX,
            )
        outcome.require()


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Waits for all; the first error ends the others and is raised as it is."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _whole(client: Client, sandbox: str, *, after: int) -> dict[str, Any]:
    """Waits until a live generation later than epoch `after` holds all that was committed."""
    try:
        async with asyncio.timeout(WHOLE_S_MAX):
            while True:
                shown = await client.show(sandbox)
                is_live = shown["state"] == "live" and shown["epoch"] > after
                if is_live and not shown["open_steps"]:
                    return shown
                await asyncio.sleep(_LOOK_S)
    except TimeoutError as error:
        raise UnknownError(f"sandbox {sandbox} is not whole within {WHOLE_S_MAX:g} s") from error


def _compare(
    repository: Repository, tree: str, workspace: Path, scratch: Path, report: Report
) -> None:
    if not workspace.is_dir():
        raise RefusedError(
            "not_here",
            f"--data: the sandbox's folder is not on this machine: {workspace}",
            field="--data",
        )
    files, submodules = files_of(repository, tree)
    report.submodules = [path.decode("utf-8", "backslashreplace") for path in submodules]
    object_format = repository.object_format
    report.tree_expected = trees.write_tree(files, scratch, object_format)
    report.tree_found = trees.write_tree(
        trees.listed(workspace, object_format), scratch, object_format
    )


async def _count(client: Client, sandbox: str, report: Report) -> None:
    """Counts by the ledger what recovery did."""
    kinds: Counter[str] = Counter()
    async for recorded in client.history(sandbox):
        for entry in recorded.entries:
            if getattr(entry, "sandbox", "") == sandbox:
                kinds[str(type(entry).__struct_config__.tag)] += 1
    report.replayed = kinds["replayed"]
    report.restored = kinds["restored"]
    report.checkpoints = kinds["checkpointed"]
