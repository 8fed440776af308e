"""
Messages that need not survive, publications into streams, and ordered reads of durable inputs.

A durable input is read by an ephemeral pull consumer without acknowledgements: the position is in
the ledger, so the consumer may vanish at any time and is made again from where the reader is. A
hole in the consumer's own numbering, a lost connection, a missing heartbeat: all lead to another
consumer, never to a message passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import structlog
from fencepost.contracts.messages import Position
from fencepost.core.errors import UnknownError
from fencepost.runtime.link import ApiError, Link, stream_info
from fencepost.runtime.ports import Handler, InputLostError, InputMessage, InputReader, Subscription
from nats.errors import Error as NatsError

PULL_MESSAGES_MAX: Final = 1024
PULL_EXPIRES_MS: Final = 20_000
PULL_HEARTBEAT_MS: Final = 2_000
PULLS_MAX: Final = 1_000
"""
After so many a reader goes on through another inbox.

Between accounts the server remembers each pull for as long as its inbox is listened to.
"""

INACTIVE_MS: Final = 30_000
NO_ROOM_MS: Final = 10

_MS: Final = 1_000_000

logger = structlog.get_logger(__name__)


class NatsBus:
    """See `ports.Bus`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def publish(self, subject: str, data: bytes, reply: str = "") -> bool:
        return self._link.publish(subject, data, reply)

    def publish_acked(self, subject: str, data: bytes, answered: Callable[[bool], None]) -> None:
        def judge(msg: Any) -> None:
            answered(msg is not None and b'"seq":' in msg.data and b'"error"' not in msg.data)

        self._link.publish(subject, data, self._link.expect(judge))

    async def subscribe(self, subject: str, handle: Handler, queue: str = "") -> Subscription:
        def take(msg: Any) -> None:
            handle(msg.subject, msg.data, msg.reply)

        return _Subscribed(await self._link.subscribe_raw(subject, take, queue))

    async def request(self, subject: str, data: bytes, timeout_ms: int) -> bytes:
        return (await self._link.call(subject, data, timeout_s=timeout_ms / 1000)).data


class _Subscribed:
    """A subscription that can be ended at any time, also after the connection."""

    def __init__(self, subscription: Any) -> None:
        self._subscription = subscription

    async def unsubscribe(self) -> None:
        with contextlib.suppress(NatsError):
            await self._subscription.unsubscribe()


class _Created(msgspec.Struct, frozen=True):
    name: str = ""
    error: ApiError | None = None


class JetStreamInputs:
    """See `ports.Inputs`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def incarnation(self, stream: str, position: Position | None) -> str:
        info = await stream_info(self._link, stream)
        if info.error is not None:
            raise UnknownError(f"{stream}: {info.error.description} ({info.error.err_code})")
        check_position(stream, position, info.created, info.state.last_seq)
        return info.created

    async def open(
        self,
        stream: str,
        filters: Sequence[str],
        *,
        after: Position,
        take: Callable[[InputMessage], None],
        room: Callable[[], int],
        fail: Callable[[Exception], None],
    ) -> InputReader:
        reader = _Reader(
            self._link, self, stream, filters, after=after, take=take, room=room, fail=fail
        )
        reader.start()
        return reader


def check_position(stream: str, position: Position | None, created: str, last_seq: int) -> None:
    """Raises `InputLostError` unless the stream is the one that the position was taken in."""
    if position is None:
        return
    if position.incarnation != created:
        raise InputLostError(
            f"{stream}: made anew at {created}; the recorded position is of {position.incarnation}"
        )
    if last_seq < position.seq:
        raise InputLostError(f"{stream}: ends at {last_seq}, below the position {position.seq}")


class _Reader:
    """One ordered read; a task that keeps a consumer open and asks for more in time."""

    def __init__(
        self,
        link: Link,
        inputs: JetStreamInputs,
        stream: str,
        filters: Sequence[str],
        *,
        after: Position,
        take: Callable[[InputMessage], None],
        room: Callable[[], int],
        fail: Callable[[Exception], None],
    ) -> None:
        self._link = link
        self._inputs = inputs
        self._stream = stream
        self._filters = list(filters)
        self._at = after
        self._take = take
        self._room = room
        self._fail = fail
        self._task: asyncio.Task[None] | None = None
        self._signal: asyncio.Event = asyncio.Event()
        self._broken = False
        self._asked = 0
        self._pulls = 0
        self._consumer_seq = 0
        self._consumer = ""
        self._heard_s = 0.0

    def poke(self) -> None:
        self._signal.set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"read-{self._stream}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        delay_s = 0.05
        while True:
            try:
                await self._inputs.incarnation(self._stream, self._at)
                await self._session()
                delay_s = 0.05
            except InputLostError as error:
                self._fail(error)
                return
            except UnknownError as error:
                logger.warning("input_reader_waits", stream=self._stream, detail=str(error))
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 1.0)

    async def _session(self) -> None:
        """Reads through one consumer until it breaks."""
        loop = asyncio.get_running_loop()
        self._broken, self._asked, self._consumer_seq = False, 0, 0
        self._pulls = 0
        self._heard_s = loop.time()
        inbox = self._link.nc.new_inbox()
        self._link.on_lost(self._lost)
        sub = await self._link.subscribe_raw(inbox, self._on_message)
        try:
            self._consumer = await self._create()
            while not self._broken:
                self._ask(inbox)
                self._signal.clear()
                # Nothing asked for means that there was no room: look again soon, or whoever
                # empties a full buffer would wait for a whole heartbeat each time.
                wait_ms = PULL_HEARTBEAT_MS if self._asked else NO_ROOM_MS
                timer = loop.call_later(wait_ms / 1000, self._signal.set)
                try:
                    await self._signal.wait()
                finally:
                    timer.cancel()
                if loop.time() - self._heard_s > 3 * PULL_HEARTBEAT_MS / 1000 and self._asked:
                    self._broken = True
        finally:
            self._link.off_lost(self._lost)
            if not self._link.nc.is_closed:
                await sub.unsubscribe()
                if self._consumer and self._link.is_connected:
                    # Best effort: it would go away by itself.
                    self._link.publish(
                        f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}", b""
                    )

    async def _create(self) -> str:
        config: dict[str, Any] = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._at.seq + 1,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "max_waiting": 16,
            "inactive_threshold": INACTIVE_MS * _MS,
        }
        if len(self._filters) == 1:
            config["filter_subject"] = self._filters[0]
        else:
            config["filter_subjects"] = self._filters
        answer = await self._link.api(
            f"CONSUMER.CREATE.{self._stream}", {"stream_name": self._stream, "config": config}
        )
        try:
            created = msgspec.json.decode(answer, type=_Created)
        except msgspec.DecodeError as error:
            raise UnknownError(f"{self._stream}: undecodable answer to a consumer") from error
        if created.error is not None or not created.name:
            raise UnknownError(f"{self._stream}: no consumer: {created.error}")
        return created.name

    def _ask(self, inbox: str) -> None:
        """Asks for more before what was asked for is used up, as far as there is room."""
        if self._asked > PULL_MESSAGES_MAX // 2:
            return
        count = min(PULL_MESSAGES_MAX, self._room() - self._asked)
        if count <= 0:
            return
        self._pulls += 1
        if self._pulls > PULLS_MAX:
            self._lost()
            return
        body = {
            "batch": count,
            "expires": PULL_EXPIRES_MS * _MS,
            "idle_heartbeat": PULL_HEARTBEAT_MS * _MS,
        }
        if self._link.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
            msgspec.json.encode(body),
            inbox,
        ):
            self._asked += count

    def _lost(self) -> None:
        self._broken = True
        self._signal.set()

    def _on_message(self, msg: Any) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        headers = msg.headers
        status = headers.get("Status") if headers and not msg.data else None
        if status is not None:
            self._on_status(status, headers)
            return
        tokens = msg.reply.split(".")
        if self._broken or len(tokens) < 9:
            return
        # $JS.ACK.[domain.account.]stream.consumer.delivered.stream_seq.consumer_seq.time.pending
        base = 4 if len(tokens) == 9 else 6
        stream_seq, consumer_seq = int(tokens[base + 1]), int(tokens[base + 2])
        if consumer_seq != self._consumer_seq + 1 or stream_seq <= self._at.seq:
            self._lost()
            return
        self._consumer_seq = consumer_seq
        self._asked -= 1
        self._at = Position(incarnation=self._at.incarnation, seq=stream_seq)
        self._take(InputMessage(stream_seq, msg.subject, msg.data))
        if self._asked <= PULL_MESSAGES_MAX // 2:
            self._signal.set()

    def _on_status(self, status: str, headers: dict[str, str]) -> None:
        if status == "100":
            return
        left = headers.get("Nats-Pending-Messages", "")
        if status == "408" and left.isdigit():
            self._asked = max(0, self._asked - int(left))
            self._signal.set()
        else:
            logger.info(
                "input_consumer_ended",
                stream=self._stream,
                status=status,
                detail=headers.get("Description", ""),
            )
            self._lost()
