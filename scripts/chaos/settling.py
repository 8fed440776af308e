"""After the faults: everything that was begun must come to an end, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import nats.errors
from fencepost.client import Client
from fencepost.core.errors import RefusedError, RetryLaterError

from scripts.chaos.workload import Dag, Sent, Told, Workload
from scripts.chaos.world import World

T = TypeVar("T")

SETTLE_S: Final = 150.0
_AGAIN_S: Final = 0.25
_AT_ONCE: Final = 16
_NEVER_TAKEN_S: Final = 40.0
"""As long as a client goes on sending a command, and a little more."""


class Settling:
    """Asks for all that is open until it has ended; what has not is said in `stuck`."""

    def __init__(self, world: World, client: Client, workload: Workload) -> None:
        self.stuck: list[str] = []
        self._world = world
        self._client = client
        self._workload = workload
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._deadline = asyncio.get_running_loop().time() + SETTLE_S

    async def run(self) -> None:
        told: Told = self._workload.told
        open_steps = [one for one in told.steps if one.outcome is None and not one.refused]
        await asyncio.gather(
            *(self._until(f"step {one.sandbox} {one.step}", self._ends, one) for one in open_steps),
            *(self._until(f"sandbox {name}", self._is_live, name) for name in told.standing),
            *(self._until(f"DAG {dag.name}", self._is_released, dag) for dag in told.dags),
        )

    async def _until(self, what: str, done: Callable[[T], Awaitable[Any]], value: T) -> None:
        loop = asyncio.get_running_loop()
        last = "never answered"
        while True:
            async with self._gate:
                try:
                    last = await done(value)
                except (RetryLaterError, TimeoutError, nats.errors.Error, OSError) as error:
                    last = f"{type(error).__name__}: {error}"
            if not last:
                return
            if loop.time() > self._deadline:
                self.stuck.append(f"{what}: {last}")
                return
            self._world.revive_services()
            await asyncio.sleep(_AGAIN_S)

    async def _ends(self, sent: Sent) -> str:
        try:
            view = await self._client.show_step(sent.sandbox, sent.step)
        except RefusedError as error:
            # Never stored, or not read yet: a client goes on sending for a while.
            loop = asyncio.get_running_loop()
            is_late = loop.time() > self._deadline - SETTLE_S + _NEVER_TAKEN_S
            if error.reason == "unknown_step" and is_late:
                sent.refused = "never_taken"
            return "" if sent.refused else str(error)
        if view["state"] not in ("committed", "compensated", "indeterminate"):
            return f"{view['state']} ({view.get('phase')}, {view.get('reason')})"
        sent.outcome = await self._client.wait(sent.sandbox, sent.step, timeout_s=10)
        return ""

    async def _is_live(self, name: str) -> str:
        view = await self._client.show(name)
        # Indeterminate steps stand open, and rightly.
        if view["state"] == "live" and not view["fenced"] and not view["parked"]:
            return ""
        return f"{view['state']}, {view['fenced']} fenced, {view['parked']} parked"

    async def _is_released(self, dag: Dag) -> str:
        if not dag.is_known:
            try:
                await self._client.show_dag(dag.name)
            except RefusedError:
                return ""
            dag.is_known = True
        verdict = await self._workload.cancel(dag)
        if verdict.released in ("confirmed", "nothing_held"):
            return ""
        # What somebody else still holds is rightly not confirmed.
        if dag.adopted and verdict.reason in ("shared", "retained"):
            return ""
        return f"{verdict.released}, {verdict.reason}, {verdict.outstanding} outstanding"
