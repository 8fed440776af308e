"""
What leaves a gateway session: receipts packed, facts durably.

Receipts need not survive: the shard asks again and the journal gives the first one back. Facts are
obligations while the session lives: each is repeated until the stream has it, in order for one
sandbox, since a `lost` that overtakes its `found` would be about nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
from fencepost.contracts import subjects
from fencepost.core.errors import UnknownError
from fencepost.core.facts import Fact
from fencepost.core.limits import KIB
from fencepost.core.receipts import StampedReceipt
from fencepost.runtime import crash
from fencepost.runtime.link import Link

PACK_BYTES_MAX: Final = 512 * KIB
_ACK_TIMEOUT_S: Final = 2.0
_REPEAT_S: Final = 0.2
_REPEAT_S_MAX: Final = 2.0

_encode: Final = msgspec.json.Encoder().encode
logger = structlog.get_logger(__name__)


class ReceiptOutbox:
    """Publishes what one turn of the loop collected, one message per shard."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._packs: dict[int, list[StampedReceipt]] = {}
        self._sizes: dict[int, int] = {}
        self._is_due = False

    def put(self, shard: int, stamped: StampedReceipt, size: int) -> None:
        pack = self._packs.get(shard)
        if pack is None:
            pack = self._packs[shard] = []
            self._sizes[shard] = 0
        elif self._sizes[shard] + size > PACK_BYTES_MAX:
            self.flush()
            self.put(shard, stamped, size)
            return
        pack.append(stamped)
        self._sizes[shard] += size
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._is_due = False
        if not self._packs:
            return
        packs, self._packs, self._sizes = self._packs, {}, {}
        crash.point("gateway_before_receipts")
        for shard, pack in packs.items():
            self._link.publish(subjects.receipts(shard), _encode(pack))
        if crash.is_armed("gateway_after_receipts"):
            # What was handed over is on the wire some turns later.
            self._loop.call_later(0.05, crash.point, "gateway_after_receipts")


class PubAck(msgspec.Struct, frozen=True):
    """JetStream's answer to a publication."""

    stream: str = ""
    seq: int = 0
    error: msgspec.Raw | None = None


_PUB_ACK: Final = msgspec.json.Decoder(PubAck)


async def publish_acked(
    link: Link, subject: str, data: bytes, *, timeout_s: float, msg_id: str = ""
) -> None:
    """Publishes into a stream. Raises `UnknownError` unless the stream said that it has it."""
    headers = f"NATS/1.0\r\nNats-Msg-Id: {msg_id}\r\n\r\n".encode() if msg_id else b""
    msg = await link.call(subject, data, timeout_s=timeout_s, headers=headers)
    try:
        ack = _PUB_ACK.decode(msg.data)
    except msgspec.DecodeError as error:
        raise UnknownError(f"{subject}: undecodable acknowledgement") from error
    if ack.error is not None or not ack.stream or not ack.seq:
        raise UnknownError(f"{subject}: not stored: {bytes(ack.error or b'no stream').decode()}")


class FactOutbox:
    """
    Publishes facts until they are acknowledged, or the session ends.

    `on_answer` hears of each try: the fact's kind, and whether it was acknowledged (S-94).
    """

    def __init__(self, link: Link, on_answer: Callable[[str, bool], None]) -> None:
        self._link = link
        self._waiting: dict[str, deque[Fact]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_answer = on_answer
        self._closed = False

    def put(self, fact: Fact) -> None:
        if self._closed:
            return
        waiting = self._waiting.get(fact.sandbox)
        if waiting is not None:
            waiting.append(fact)
            return
        self._waiting[fact.sandbox] = deque((fact,))
        task = asyncio.get_running_loop().create_task(self._send_all(fact.sandbox))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_all(self, sandbox: str) -> None:
        waiting = self._waiting[sandbox]
        while waiting:
            await self._send(waiting[0])
            waiting.popleft()
        del self._waiting[sandbox]

    async def _send(self, fact: Fact) -> None:
        kind = str(fact.__struct_config__.tag)
        subject, data, msg_id = (
            subjects.fact(fact.sandbox, kind),
            _encode(fact),
            secrets.token_hex(12),
        )
        delay_s = _REPEAT_S
        crash.point(f"gateway_before_{kind}")
        while True:
            try:
                await publish_acked(
                    self._link, subject, data, timeout_s=_ACK_TIMEOUT_S, msg_id=msg_id
                )
            except UnknownError as error:
                self._on_answer(kind, False)
                logger.warning(
                    "fact_not_acknowledged", sandbox=fact.sandbox, kind=kind, detail=str(error)
                )
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, _REPEAT_S_MAX)
            else:
                break
        self._on_answer(kind, True)
        crash.point(f"gateway_after_{kind}")

    async def drain(self, timeout_s: float) -> None:
        """Gives what is waiting some time to get out."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def close(self) -> None:
        """Drops what was not acknowledged: it was the ended session's to say."""
        self._closed = True
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._waiting.clear()
