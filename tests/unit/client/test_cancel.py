"""Cancelling a step that this client has just sent, or never."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fencepost.client import Client, RefusedError

from tests.contracts import until
from tests.unit.client.fakes import FakeLink


class _Link(FakeLink):
    """Its owner knows a step only from the third question on."""

    def __init__(self) -> None:
        super().__init__()
        self.nc = SimpleNamespace(jetstream=lambda: None)
        self.asked = 0
        self.respond = self._respond

    def _respond(self, subject: str, _data: bytes) -> Any:
        if not subject.startswith("fp.v1.ask."):
            return {"stream": "FP_COMMANDS", "seq": 1}
        self.asked += 1
        return b"null" if self.asked < 3 else {"state": "pending", "attempt": "s1.1"}

    def has_cancelled(self) -> bool:
        return any(subject == "fp.v1.cmd.cancel.box.s1" for subject, _ in self.published)


async def test_a_cancel_right_behind_its_step_waits_until_the_step_is_known() -> None:
    link = _Link()
    client = Client(link, 8)  # type: ignore[arg-type]
    await client.submit("box", "write_file", path="a", content="x", step="s1")
    task = asyncio.create_task(client.cancel("box", "s1"))
    await until(link.has_cancelled)
    position = {"shard": 2, "seq": 31, "index": 4}
    link.event(
        "box", "s1", "compensated", attempt="s1.1", final=True, evidence="x", position=position
    )
    assert (await task).state == "compensated"


async def test_a_cancel_of_a_step_that_this_client_never_sent_is_refused() -> None:
    link = _Link()
    client = Client(link, 8)  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="there is no step"):
        await client.cancel("box", "s1")
    assert not link.has_cancelled()
