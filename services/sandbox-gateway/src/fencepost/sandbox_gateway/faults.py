"""
Faults on demand, for demonstrations and tests: a reclaimed sandbox, a receipt that comes late, a
message that is delivered twice, a provider that refuses to stop one or takes its time over one.

Only where the settings allow it. No sandbox is faked: a reclaim kills real processes and removes a
real disk behind the control plane's back, and a held or repeated receipt is the toolhost's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

import msgspec
import structlog
from fencepost.contracts import subjects
from fencepost.core import ids
from fencepost.core.receipts import StampedReceipt
from fencepost.runtime.link import Link
from fencepost.sandbox_gateway.attachment import Attachment

HOLD_MS_MAX: Final = 60_000
TIMES_MAX: Final = 100
PERCENT_MAX: Final = 90  # an echo may echo, and must come to an end
AHEAD_MAX: Final = 1_000

logger = structlog.get_logger(__name__)
_encode: Final = msgspec.json.Encoder().encode


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """
    `do`: reclaim, hold_receipts (for at most `ms`), release_receipts, refuse_stops (the next
    `times`), preempt (a notice now and a reclaim `grace_ms` later), or echo (`percent` of orders
    and receipts come a second time, up to `ms` late; 0 ends it). Ahead of a sandbox, which is then
    named: slow_create, by `ms`.
    """

    do: str
    ms: int = 10_000
    times: int = 1
    percent: int = 0
    grace_ms: int = 5_000
    sandbox: str = ""


_FAULT: Final = msgspec.json.Decoder(Fault)


class _Echo:
    """`random` is seeded by the sandbox's id, so that a run is as repeatable as its timing is."""

    def __init__(self, sandbox: str) -> None:
        self.random = Random(sandbox)
        self.percent = 0
        self.ms = 0
        self.count = 0


class _Hold:
    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.receipts: list[tuple[StampedReceipt, int]] = []
        self.timer: asyncio.TimerHandle | None = None


class Faults:
    """
    Listens for every sandbox that the session ever attached: a receipt may be held while its
    sandbox is already gone. `reclaim` takes a sandbox away; `publish` lets a held receipt go;
    `announce` says that a sandbox will be taken away.
    """

    def __init__(
        self,
        link: Link,
        *,
        attached: Callable[[str], Attachment | None],
        reclaim: Callable[[Attachment], Awaitable[bool]],
        publish: Callable[[Attachment, StampedReceipt, int], None],
        announce: Callable[[Attachment, int], None],
    ) -> None:
        self._link = link
        self._attached = attached
        self._reclaim = reclaim
        self._publish = publish
        self._announce = announce
        self._subscriptions: dict[str, Any] = {}
        self._holds: dict[Attachment, _Hold] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._later: set[asyncio.Task[None]] = set()
        self._refused_stops: dict[str, int] = {}
        self._echoes: dict[str, _Echo] = {}
        self._slow: dict[str, int] = {}
        self._slow_until_s: dict[str, float] = {}

    async def listen_ahead(self) -> None:
        """Listens for faults of sandboxes that are yet to come."""
        if "" not in self._subscriptions:
            self._subscriptions[""] = None
            self._subscriptions[""] = await self._link.subscribe_raw(
                subjects.FAULT_AHEAD, self._take_ahead
            )

    def refuses_stop(self, sandbox: str) -> bool:
        """Tells whether this stop is to be answered as refused; counts it."""
        left = self._refused_stops.pop(sandbox, 0)
        if left > 1:
            self._refused_stops[sandbox] = left - 1
        return left > 0

    async def take_time(self, sandbox: str) -> None:
        """Waits as long as a slow provider would over this sandbox's create."""
        if sandbox not in self._slow:
            return
        now_s = asyncio.get_running_loop().time()
        until_s = self._slow_until_s.setdefault(sandbox, now_s + self._slow[sandbox] / 1000)
        await asyncio.sleep(max(0.0, until_s - now_s))

    async def listen(self, sandbox: str) -> None:
        if sandbox not in self._subscriptions:
            self._subscriptions[sandbox] = None
            self._subscriptions[sandbox] = await self._link.subscribe_raw(
                subjects.fault(sandbox), lambda msg: self._take(sandbox, msg)
            )

    async def close(self) -> None:
        for hold in self._holds.values():
            if hold.timer is not None:
                hold.timer.cancel()
        for subscription in self._subscriptions.values():
            if subscription is not None and not self._link.nc.is_closed:
                await subscription.unsubscribe()
        self._subscriptions.clear()
        for task in self._later:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._later, return_exceptions=True)

    def holds(self, attachment: Attachment, stamped: StampedReceipt, size: int) -> bool:
        """Takes a receipt that is to come late. False: nothing is held of this session."""
        hold = self._holds.get(attachment)
        if hold is None:
            return False
        hold.receipts.append((stamped, size))
        return True

    @property
    def is_echoing(self) -> bool:
        return bool(self._echoes)

    def echo(self, sandbox: str, again: Callable[[], None]) -> None:
        """Lets a share of a sandbox's messages come once more, as the network may."""
        found = self._echoes.get(sandbox)
        if found is None or found.random.randrange(100) >= found.percent:
            return
        found.count += 1
        late_s = found.random.random() * found.ms / 1000
        asyncio.get_running_loop().call_later(late_s, again)

    def _decode(self, msg: Any) -> Fault | None:
        try:
            return _FAULT.decode(msg.data)
        except msgspec.DecodeError as error:
            self._answer(msg.reply, {"ok": False, "reason": "bad_fault", "detail": str(error)})
            return None

    def _take_ahead(self, msg: Any) -> None:
        fault = self._decode(msg)
        if fault is None:
            return
        if fault.do != "slow_create" or not ids.is_id(fault.sandbox):
            detail = f"no fault {fault.do!r} ahead of sandbox {fault.sandbox[:64]!r}"
            self._answer(msg.reply, {"ok": False, "reason": "unknown_fault", "detail": detail})
        elif len(self._slow) >= AHEAD_MAX:
            self._answer(msg.reply, {"ok": False, "reason": "overloaded"})
        else:
            self._slow[fault.sandbox] = max(1, min(fault.ms, HOLD_MS_MAX))
            self._answer(msg.reply, {"ok": True})

    def _take(self, sandbox: str, msg: Any) -> None:
        fault = self._decode(msg)
        if fault is None:
            return
        attachment = self._attached(sandbox)
        match fault.do:
            case "reclaim" if attachment is not None:
                task = asyncio.get_running_loop().create_task(
                    self._reclaim_and_answer(attachment, msg.reply)
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "preempt" if attachment is not None:
                grace_ms = max(0, min(fault.grace_ms, HOLD_MS_MAX))
                self._announce(attachment, grace_ms)
                task = asyncio.get_running_loop().create_task(
                    self._reclaim_later(attachment, grace_ms)
                )
                self._later.add(task)
                task.add_done_callback(self._later.discard)
                self._answer(msg.reply, {"ok": True})
            case "hold_receipts" if attachment is not None:
                self._hold(attachment, max(1, min(fault.ms, HOLD_MS_MAX)))
                self._answer(msg.reply, {"ok": True})
            case "release_receipts":
                held = [hold for hold in self._holds.values() if hold.attachment.sandbox == sandbox]
                released = sum(self._release(hold.attachment) for hold in held)
                if held or attachment is not None:
                    self._answer(msg.reply, {"ok": True, "released": released})
            case "refuse_stops" if attachment is not None or sandbox in self._refused_stops:
                self._refused_stops[sandbox] = max(0, min(fault.times, TIMES_MAX))
                self._answer(msg.reply, {"ok": True})
            case "echo" if attachment is not None or sandbox in self._echoes:
                found = self._echoes.setdefault(sandbox, _Echo(sandbox))
                found.percent = max(0, min(fault.percent, PERCENT_MAX))
                found.ms = max(0, min(fault.ms, HOLD_MS_MAX))
                self._answer(msg.reply, {"ok": True, "echoed": found.count})
            case "reclaim" | "hold_receipts" | "refuse_stops" | "echo" | "preempt":
                # Another gateway has it, and answers.
                pass
            case _:
                self._answer(
                    msg.reply,
                    {"ok": False, "reason": "unknown_fault", "detail": f"no fault {fault.do!r}"},
                )

    def _hold(self, attachment: Attachment, ms: int) -> None:
        hold = self._holds.setdefault(attachment, _Hold(attachment))
        if hold.timer is not None:
            hold.timer.cancel()
        hold.timer = asyncio.get_running_loop().call_later(ms / 1000, self._release, attachment)

    def _release(self, attachment: Attachment) -> int:
        hold = self._holds.pop(attachment, None)
        if hold is None:
            return 0
        if hold.timer is not None:
            hold.timer.cancel()
        for stamped, size in hold.receipts:
            self._publish(attachment, stamped, size)
        return len(hold.receipts)

    async def _reclaim_later(self, attachment: Attachment, grace_ms: int) -> None:
        await asyncio.sleep(grace_ms / 1000)
        await self._reclaim_and_answer(attachment, "")

    async def _reclaim_and_answer(self, attachment: Attachment, reply: str) -> None:
        done = await self._reclaim(attachment)
        logger.warning("reclaimed_on_demand", sandbox=attachment.sandbox, done=done)
        self._answer(reply, {"ok": done, **({} if done else {"reason": "not_there"})})

    def _answer(self, reply: str, answer: dict[str, Any]) -> None:
        if reply:
            self._link.publish(reply, _encode(answer))
