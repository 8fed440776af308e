"""
A shard's side of a gateway, in a test's hands: it gives orders and sees what comes back.

No decisions: what a test wants, it orders. The server, the provider and the toolhost are real.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec
from fencepost.contracts import subjects
from fencepost.contracts.messages import ReadReply, ReadRequest, receipt_key, stamp_holds
from fencepost.core import facts as f
from fencepost.core.receipts import Receipt, StampedReceipt
from fencepost.core.sandbox.inputs import GatewaySeen, Heartbeats
from fencepost.core.sandbox.orders import (
    AttachOrder,
    CreateOrder,
    Dispatch,
    Fence,
    MarkOrder,
    StopOrder,
)
from fencepost.core.steps import SandboxSpec, digest_of
from fencepost.runtime.link import Link

SHARDS = 4
MASTER = b"0123456789abcdef-master"
SPEC = SandboxSpec(memory_mb=1024)
WAIT_S = 30.0

_FACT = msgspec.json.Decoder(f.Fact)
_RECEIPTS = msgspec.json.Decoder(list[StampedReceipt])


async def wait_for(condition: Callable[[], Any], what: str = "", seconds: float = WAIT_S) -> Any:
    """Waits until a condition is true, and gives what it gave."""
    until = asyncio.get_running_loop().time() + seconds
    while not (found := condition()):
        assert asyncio.get_running_loop().time() < until, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)
    return found


class Control:
    def __init__(self, link: Link) -> None:
        self.link = link
        self.facts: list[Any] = []
        self.stamped: list[StampedReceipt] = []
        self.receipt_messages = 0
        self.beats: list[Heartbeats] = []
        self.seen: list[GatewaySeen] = []
        self.numbers = itertools.count(1)
        self.spec = SPEC

    async def listen(self) -> Control:
        await self.link.subscribe_raw("fp.v1.fact.>", self._take_fact)
        await self.link.subscribe_raw("fp.v1.receipt.*", self._take_receipts)
        await self.link.subscribe_raw(
            "fp.v1.heartbeat.*",
            lambda m: self.beats.append(msgspec.json.decode(m.data, type=Heartbeats)),
        )
        await self.link.subscribe_raw(
            subjects.GATEWAY_SEEN,
            lambda m: self.seen.append(msgspec.json.decode(m.data, type=GatewaySeen)),
        )
        await self.link.flush()
        return self

    def _take_fact(self, msg: Any) -> None:
        fact = _FACT.decode(msg.data)
        assert msg.subject == subjects.fact(fact.sandbox, fact.__struct_config__.tag)
        self.facts.append(fact)

    def _take_receipts(self, msg: Any) -> None:
        self.receipt_messages += 1
        self.stamped.extend(_RECEIPTS.decode(msg.data))

    # -- what came -----------------------------------------------------------------------------

    def of(self, kind: type, **fields: Any) -> list[Any]:
        return [
            fact
            for fact in self.facts
            if isinstance(fact, kind)
            and all(getattr(fact, name) == value for name, value in fields.items())
        ]

    async def fact(self, kind: type, **fields: Any) -> Any:
        await wait_for(lambda: self.of(kind, **fields), f"{kind.__name__} {fields}: {self.facts}")
        return self.of(kind, **fields)[-1]

    def receipts(self, **fields: Any) -> list[Receipt]:
        found = []
        for stamped in self.stamped:
            try:
                receipt = msgspec.json.decode(stamped.receipt, type=Receipt)
            except msgspec.DecodeError:
                continue
            if all(getattr(receipt, name) == value for name, value in fields.items()):
                found.append(receipt)
        return found

    async def receipt(self, **fields: Any) -> Receipt:
        await wait_for(lambda: self.receipts(**fields), f"receipt {fields}: {self.stamped}")
        return self.receipts(**fields)[-1]

    def holds(self, stamped: StampedReceipt, gateway: str, sandbox: str) -> bool:
        return stamp_holds(receipt_key(MASTER, gateway, sandbox), stamped)

    # -- what is ordered -----------------------------------------------------------------------

    def order(self, gateway: str, *orders: Any) -> None:
        self.link.publish(subjects.orders(gateway), msgspec.json.encode(list(orders)))

    async def create(self, gateway: str, sandbox: str = "sbx", create_id: str = "") -> f.Ref:
        create_id = create_id or sandbox
        self.order(
            gateway,
            CreateOrder(sandbox=sandbox, create_id=create_id, spec=self.spec, labels={"dag": "d"}),
        )
        assigned = await self.fact(f.Assigned, sandbox=sandbox, create_id=create_id)
        assert assigned.gateway == gateway
        return assigned.ref

    async def attach(self, gateway: str, ref: f.Ref, sandbox: str = "sbx") -> f.Found:
        before = len(self.of(f.Found, sandbox=sandbox))
        self.order(gateway, AttachOrder(sandbox=sandbox, ref=ref, spec=self.spec))
        await wait_for(
            lambda: len(self.of(f.Found, sandbox=sandbox)) > before, f"found: {self.facts}"
        )
        return self.of(f.Found, sandbox=sandbox)[-1]

    async def mark(self, gateway: str, found: f.Found, epoch: int = 1, nonce: str = "") -> f.Marked:
        self.order(
            gateway,
            MarkOrder(
                sandbox=found.sandbox,
                session=found.session,
                epoch=epoch,
                nonce=nonce or found.nonce_fresh,
            ),
        )
        return await self.fact(f.Marked, session=found.session, epoch=epoch)

    async def live(self, gateway: str, sandbox: str = "sbx", epoch: int = 1) -> Live:
        ref = await self.create(gateway, sandbox)
        found = await self.attach(gateway, ref, sandbox)
        marked = await self.mark(gateway, found, epoch)
        return Live(self, gateway, ref, found, marked)

    def stop(
        self, gateway: str, ref: f.Ref | None, sandbox: str = "sbx", create_id: str = ""
    ) -> None:
        self.order(gateway, StopOrder(sandbox=sandbox, create_id=create_id, ref=ref))

    async def read(self, tool: str, args: Any, sandbox: str = "sbx", **more: Any) -> ReadReply:
        request = ReadRequest(tool=tool, args=msgspec.Raw(msgspec.json.encode(args)), **more)
        msg = await self.link.call(
            subjects.read(sandbox), msgspec.json.encode(request), timeout_s=WAIT_S
        )
        return msgspec.json.decode(msg.data, type=ReadReply)

    async def fault(self, sandbox: str = "sbx", **order: Any) -> dict[str, Any]:
        msg = await self.link.call(
            subjects.fault(sandbox), msgspec.json.encode(order), timeout_s=WAIT_S
        )
        return json.loads(msg.data)


class Live:
    """A sandbox that is attached and marked, and fences for it."""

    def __init__(
        self, control: Control, gateway: str, ref: f.Ref, found: f.Found, marked: f.Marked
    ) -> None:
        self.control = control
        self.gateway = gateway
        self.ref = ref
        self.found = found
        self.marked = marked
        self.sandbox = found.sandbox
        self.session = found.session

    def call(
        self,
        step: str,
        tool: str = "write_file",
        args: Any = None,
        *,
        ordinal: int = 1,
        direction: str = "apply",
        **changes: Any,
    ) -> Dispatch:
        if args is None:
            args = {"path": f"{step}.txt", "content": step}
        raw = msgspec.json.encode(args)
        fence = Fence(
            sandbox=changes.get("sandbox", self.sandbox),
            epoch=changes.get("epoch", self.marked.epoch),
            session=changes.get("session", self.session),
            attempt=f"{step}.{ordinal}",
            no=next(self.control.numbers),
            direction=direction,  # type: ignore[arg-type]
        )
        return Dispatch(
            fence=fence,
            step=step,
            tool=tool,
            digest=digest_of(raw),
            args=msgspec.Raw(raw),
            of=changes.get("of", ""),
        )

    async def run(self, step: str, *args: Any, **more: Any) -> Receipt:
        call = self.call(step, *args, **more)
        self.control.order(self.gateway, call)
        return await self.control.receipt(
            attempt=call.fence.attempt, direction=call.fence.direction
        )
