"""
Waiting for the ends of steps: listening to final events, and asking for what stays silent.

Rule 1: an event is a hint that may be lost; whatever stays silent is asked for about once a second,
        and after every reconnect.
Rule 2: a `compensated` event that is not final ends an attempt, not the step.
Rule 3: a refusal of another call under the same id (its digest differs) is not this call's.
Rule 4: a step that its shard does not know, although its subject is used up, is sent again under a
        fresh message id; the shard knows steps by their own ids, so it cannot run twice.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Final

import msgspec
from fencepost.client import answers
from fencepost.client.outcome import StepOutcome
from fencepost.contracts import subjects
from fencepost.core import ids
from fencepost.core.errors import FencepostError, RefusedError, UnknownError
from fencepost.runtime.link import Link
from nats.aio.msg import Msg

_FINAL_STATES: Final = ("committed", "compensated", "indeterminate", "refused")
_SILENT_S: Final = 1.0
_TICK_S: Final = 0.25
_ASKS_PER_TICK_MAX: Final = 64
_ABSENT_BEFORE_RESEND: Final = 3
_WATCHED_MAX: Final = 4096
_PREFIX_LENGTH: Final = len(subjects.event_step("", "", "").rstrip(".")) + 1


class Waiting:
    """A step on its way. `command` is empty for one that this client did not send."""

    __slots__ = (
        "absences",
        "command",
        "digest",
        "ended",
        "heard_at",
        "sandbox",
        "shard",
        "step",
        "waiters",
    )

    def __init__(  # noqa: PLR0917
        self,
        sandbox: str,
        step: str,
        shard: int,
        command: bytes,
        digest: str,
        now: float,
    ) -> None:
        self.sandbox = sandbox
        self.step = step
        self.shard = shard
        self.command = command
        self.digest = digest
        self.ended: StepOutcome | FencepostError | None = None
        self.waiters: list[asyncio.Future[None]] = []
        self.heard_at = now
        self.absences = 0

    async def end(self) -> StepOutcome:
        """Waits for the end; each caller by a future of its own, so cancelling one is its own."""
        if self.ended is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters.append(waiter)
            try:
                await waiter
            finally:
                self.waiters.remove(waiter)
        ended = self.ended
        if isinstance(ended, StepOutcome):
            return ended
        assert ended is not None
        raise ended


class Waits:
    """All steps that this client waits for."""

    def __init__(self, link: Link, shards: int, ledgers: int = 1) -> None:
        self._link = link
        self._shards = shards
        self._ledgers = ledgers
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, Waiting] = {}
        self._watched: dict[str, list[Any]] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self.send_again: Callable[[Waiting], None] = lambda _waiting: None

    def start(self) -> None:
        """Starts asking for what stays silent."""
        self._ticker = self._loop.create_task(self._tick())
        self._link.on_back(self._resumed)

    async def close(self) -> None:
        """Stops; whoever still waits hears that nothing is known."""
        self._link.off_back(self._resumed)
        tasks = [*self._asking, *([self._ticker] if self._ticker else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiting in [*self._waiting.values()]:
            self._end(waiting, UnknownError("the client was closed; the step goes on"))

    def is_watching(self, sandbox: str) -> bool:
        return sandbox in self._watched

    async def watch(self, sandbox: str) -> None:
        """Listens to a sandbox's final events, from before any later publish of this client."""
        if sandbox in self._watched:
            return
        if len(self._watched) >= _WATCHED_MAX:
            await self._unwatch_idle()
        self._watched[sandbox] = [
            await self._link.subscribe_raw(subjects.event_step(sandbox, "*", state), self._heard)
            for state in _FINAL_STATES
        ]

    def find(self, sandbox: str, step: str) -> Waiting | None:
        return self._waiting.get(f"{sandbox}.{step}")

    def add(self, sandbox: str, step: str, command: bytes, digest: str) -> Waiting:
        waiting = Waiting(
            sandbox,
            step,
            ids.shard_of(sandbox, self._shards),
            command,
            digest,
            self._loop.time(),
        )
        self._waiting[f"{sandbox}.{step}"] = waiting
        return waiting

    def ask_soon(self, waiting: Waiting) -> None:
        """Asks at the next tick: this one may be final already."""
        waiting.heard_at = -math.inf

    def taken(self, waiting: Waiting) -> None:
        """The step's subject was used before: by our own lost send, or by another call."""
        if waiting.ended is None:
            self._start_asking(waiting)

    def failed(self, waiting: Waiting, error: FencepostError) -> None:
        """The step could not be sent."""
        self._end(waiting, error)

    def _heard(self, message: Msg) -> None:
        key, _, state = message.subject[_PREFIX_LENGTH:].rpartition(".")
        waiting = self._waiting.get(key)
        if waiting is None:
            return
        waiting.heard_at = self._loop.time()
        try:
            event = answers.decode_event(message.data)
        except msgspec.MsgspecError:
            self.ask_soon(waiting)  # it cannot be read, but something happened
            return
        if state == "refused":
            if event.digest in ("", waiting.digest):
                self._end(waiting, answers.refusal(event.reason, event.field, event.detail))
        elif state != "compensated" or event.final:
            outcome = answers.outcome_of_event(waiting.sandbox, waiting.step, state, event)
            self._end(waiting, outcome)

    def _end(self, waiting: Waiting, end: StepOutcome | FencepostError) -> None:
        self._waiting.pop(f"{waiting.sandbox}.{waiting.step}", None)
        if waiting.ended is None:
            waiting.ended = end
            for waiter in waiting.waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _resumed(self) -> None:
        # Events of the time without a connection are lost: everything is asked for.
        for waiting in self._waiting.values():
            self.ask_soon(waiting)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            since = self._loop.time() - _SILENT_S
            silent = [waiting for waiting in self._waiting.values() if waiting.heard_at <= since]
            for waiting in silent[: max(0, _ASKS_PER_TICK_MAX - len(self._asking))]:
                self._start_asking(waiting)

    def _start_asking(self, waiting: Waiting) -> None:
        waiting.heard_at = self._loop.time()
        task = self._loop.create_task(self._ask(waiting))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, waiting: Waiting) -> None:
        try:
            answer = await answers.ask_step(
                self._link,
                self._shards,
                waiting.sandbox,
                waiting.step,
                ledgers=self._ledgers,
                timeout_s=_SILENT_S,
            )
        except RefusedError as error:
            self._end(waiting, error)
            return
        except FencepostError:
            return  # unknown: asked again at a later tick
        if waiting.ended is not None:
            return
        if answer.digest and waiting.digest and answer.digest != waiting.digest:
            self._end(
                waiting,
                RefusedError(
                    "id_reused",
                    f"step: {waiting.step!r} was used with other arguments; a new call needs a"
                    " new id",
                    field="step",
                ),
            )
        elif answer.outcome is not None:
            self._end(waiting, answer.outcome)
        elif answer.status == "absent":
            self._absent(waiting)
        else:
            waiting.absences = 0

    def _absent(self, waiting: Waiting) -> None:
        # Absent is no proof yet: the shard may not have come to the command.
        waiting.absences += 1
        if waiting.absences < _ABSENT_BEFORE_RESEND:
            return
        waiting.absences = 0
        if waiting.command:
            self.send_again(waiting)
        else:
            self._end(
                waiting,
                RefusedError(
                    "unknown_step", f"step: there is no step {waiting.step!r}", field="step"
                ),
            )

    async def _unwatch_idle(self) -> None:
        busy = {waiting.sandbox for waiting in self._waiting.values()}
        for sandbox in [name for name in self._watched if name not in busy]:
            for subscription in self._watched.pop(sandbox):
                await subscription.unsubscribe()
