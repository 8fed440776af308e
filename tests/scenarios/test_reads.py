"""A read that failed is no absence."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from fencepost.core.errors import UnknownError
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.fold import Folder, Shard
from fencepost.runtime.ports import Absent, Unknown


class Log:
    """A log whose last batch cannot be learned, or is proven not to be there."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def last(self, subject: str) -> Any:
        return self.answer

    async def read(self, subject: str, start: int) -> AsyncIterator[Any]:
        return
        yield


def shard() -> Shard:
    bus: Any = None
    return Shard(SandboxMachine(), 0, 1, bus=bus, clock=SystemClock())


async def test_s073_a_read_that_failed_raises_and_a_proven_absence_does_not() -> None:
    log: Any = Log(Unknown("timeout"))
    with pytest.raises(UnknownError):
        await Folder(shard(), log, None).fold()
    log = Log(Absent())
    empty = shard()
    await Folder(empty, log, None).fold()
    assert empty.head == 0
