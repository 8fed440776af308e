"""
Reads in the ledger what recovering sandboxes owe, and feeds it to their machine, step by step.

Decides nothing: the machine checks order, count and sum of what it is fed. Whatever is lost here
(the process, a read, an input) is read and fed again: what was applied is attested by its disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import structlog
from fencepost.core import limits
from fencepost.core.errors import FencepostError, OwnershipLostError
from fencepost.core.machine import Place
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import inputs, owed
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.runtime.shard_runner import ShardRunner

LOOK_S: Final = 1.0
ANY_AGE_MS: Final = 24 * 3600 * 1000
_BREATHE_EVERY: Final = 32

# After these a sandbox may wait for something of the ledger.
_TELLING: Final = frozenset(
    {e.EpochOpened, e.Attached, e.RestoredEntry, e.Replayed, e.OwedTold, e.RecoveryDecided}
)

logger = structlog.get_logger(__name__)


class Recaller:
    """One shard's. What it has read is kept while its sandbox recovers in the same epoch."""

    def __init__(self, machine: SandboxMachine) -> None:
        self._machine = machine
        self._runner: ShardRunner | None = None
        self._lists: dict[str, tuple[int, owed.OwedList]] = {}
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, runner: ShardRunner) -> None:
        self._runner = runner
        self._woken.set()
        self._task = asyncio.create_task(self._run(runner), name="recaller")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def heard(self, entries: Sequence[Any]) -> None:
        """Hears of every accepted batch."""
        if not _TELLING.isdisjoint(map(type, entries)):
            self._woken.set()

    async def _run(self, runner: ShardRunner) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                waiting = await self._feed(runner)
            except OwnershipLostError:
                return
            except FencepostError as error:
                logger.warning("owed_steps_not_read", detail=str(error))
                waiting = True
            if waiting:
                asyncio.get_running_loop().call_later(LOOK_S, self._woken.set)

    async def _feed(self, runner: ShardRunner) -> bool:
        """Feeds every sandbox that waits what comes next; tells whether one does."""
        wanted = await runner.ask(self._machine.wanted, max_age_ms=ANY_AGE_MS)
        recovering = {want.sandbox: want.epoch for want in wanted}
        self._lists = {
            name: known for name, known in self._lists.items() if recovering.get(name) == known[0]
        }
        await self._read(runner, [want for want in wanted if want.sandbox not in self._lists])
        for want in wanted:
            runner.submit(await self._next(runner, want))
        return bool(wanted)

    async def _read(self, runner: ShardRunner, wanted: list[owed.Wanted]) -> None:
        """Reads the ledger once for all of them; a batch that names none of them is not decoded."""
        if not wanted:
            return
        lists = {want.sandbox: owed.OwedList(want.sandbox, want.checkpoint) for want in wanted}
        names = [f'"{name}"'.encode() for name in lists]
        count = 0
        async for prev, data in runner.batches_after(min(want.after for want in wanted)):
            count += 1
            if count % _BREATHE_EVERY == 0:
                await asyncio.sleep(0)
            if not any(name in data for name in names):
                continue
            for index, entry in enumerate(self._machine.decode_entries(data)):
                found = lists.get(getattr(entry, "sandbox", ""))
                if found is not None:
                    found.take(entry, Place(prev, index))
        for want in wanted:
            self._lists[want.sandbox] = want.epoch, lists[want.sandbox]

    async def _next(self, runner: ShardRunner, want: owed.Wanted) -> Any:
        _, listed = self._lists[want.sandbox]
        following = listed.after(want.key)
        if not following:
            return inputs.OwedEnd(sandbox=want.sandbox, epoch=want.epoch)
        if want.tell:
            return owed.page_of(want, following[: limits.OWED_PAGE])
        one = following[0]
        entries = await runner.entries_at(one.spec_at.after)
        return owed.step_of(want, one, entries[one.spec_at.index], listed.accepted)
