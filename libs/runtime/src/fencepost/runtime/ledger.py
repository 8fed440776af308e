"""
The log on JetStream: appends conditional on the subject's head, reads with three results.

Appends go through the link's counted reply tokens; nothing here retries. Single reads go to the
stream's leader (`STREAM.MSG.GET`); the fold of a whole subject goes through batched direct reads,
of which the next is asked for while the last one is folded.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import datetime
from typing import Any, Final

import msgspec
from fencepost.contracts import streams
from fencepost.core.errors import UnknownError
from fencepost.runtime.link import ApiError, Link, pub, stream_info
from fencepost.runtime.ports import (
    Absent,
    AppendRefused,
    AppendUnknown,
    ReadResult,
    Unknown,
    Valid,
)

NO_MESSAGE: Final = 10037
WRONG_LAST_SEQUENCE: Final = frozenset({10071, 10164})
"""Both are refusals of a condition; a replicated stream mostly answers the second (S-211)."""

READ_BATCH: Final = 1024
READ_BYTES: Final = 8 * 1024 * 1024
APPEND_TIMEOUT_S: Final = 2.0

_LAST = re.compile(r"wrong last sequence: (\d+)")


class _PubAck(msgspec.Struct, frozen=True):
    seq: int = 0
    stream: str = ""
    error: ApiError | None = None


class _Stored(msgspec.Struct, frozen=True):
    seq: int
    time: str = ""
    data: str = ""


class _MsgGet(msgspec.Struct, frozen=True):
    message: _Stored | None = None
    error: ApiError | None = None


_PUB_ACK = msgspec.json.Decoder(_PubAck)
_MSG_GET = msgspec.json.Decoder(_MsgGet)


def stamp_ms(text: str) -> int:
    """Reads a server's time stamp (RFC 3339, nanoseconds) as milliseconds since 1970."""
    base, _, fraction = text.rstrip("Z").partition(".")
    seconds = datetime.fromisoformat(base + "+00:00").timestamp()
    return int(seconds) * 1000 + int((fraction + "000")[:3])


class JetStreamLog:
    """See `ports.Log`."""

    def __init__(
        self,
        link: Link,
        *,
        stream: str = streams.LEDGER,
        append_timeout_s: float = APPEND_TIMEOUT_S,
    ) -> None:
        self._link = link
        self._stream = stream
        self._append_timeout_s = append_timeout_s

    async def append(
        self, subject: str, payload: bytes, expected_last_subject_seq: int, msg_id: str = ""
    ) -> int:
        headers = b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: %d\r\n" % (
            expected_last_subject_seq
        )
        if msg_id:
            headers += b"Nats-Msg-Id: %b\r\n" % msg_id.encode()
        try:
            msg = await self._link.call(
                subject, payload, headers=headers + b"\r\n", timeout_s=self._append_timeout_s
            )
            ack = _PUB_ACK.decode(msg.data)
        except UnknownError as error:
            raise AppendUnknown(str(error)) from error
        except msgspec.DecodeError as error:
            raise AppendUnknown(f"{subject}: undecodable acknowledgement") from error
        if ack.error is None and ack.seq > 0 and ack.stream == self._stream:
            return ack.seq
        if ack.error is not None and ack.error.err_code in WRONG_LAST_SEQUENCE:
            last = _LAST.search(ack.error.description)
            raise AppendRefused(int(last.group(1)) if last else None)
        raise AppendUnknown(f"{subject}: {ack}")

    async def last(self, subject: str) -> ReadResult:
        return await self._get({"last_by_subj": subject})

    async def next_after(self, subject: str, after_seq: int) -> ReadResult:
        return await self._get({"seq": after_seq + 1, "next_by_subj": subject})

    async def _get(self, body: dict[str, Any]) -> ReadResult:
        try:
            data = await self._link.api(f"STREAM.MSG.GET.{self._stream}", body, timeout_s=3.0)
        except UnknownError as error:
            return Unknown(str(error))
        return read_result(data)

    async def read(self, subject: str, from_seq: int) -> AsyncIterator[tuple[int, bytes]]:
        """See `ports.Log.read`."""
        after = max(from_seq, 1) - 1
        while True:
            async with contextlib.aclosing(self._read_direct(subject, after + 1)) as direct:
                async for seq, payload in direct:
                    after = seq
                    yield seq, payload
            # Any replica of the stream may have answered, also one that lags behind or has just
            # come back with an empty disk: where the end is, the leader says.
            got = await self.next_after(subject, after)
            if isinstance(got, Absent):
                return
            if isinstance(got, Unknown):
                raise UnknownError(f"{subject} after {after}: {got.reason}")
            after = got.seq
            yield got.seq, got.payload

    async def _read_direct(self, subject: str, from_seq: int) -> AsyncGenerator[tuple[int, bytes]]:
        """Reads in batches from whichever replica answers, up to what it has."""
        chunk = await self._chunk(subject, from_seq)
        while chunk:
            following = (
                asyncio.ensure_future(self._chunk(subject, chunk[-1][0] + 1))
                if len(chunk) > 1
                else None
            )
            try:
                for item in chunk:
                    yield item
            except BaseException:
                if following is not None:
                    following.cancel()
                raise
            if following is None:
                chunk = await self._chunk(subject, chunk[-1][0] + 1)
            else:
                chunk = await following

    async def _chunk(self, subject: str, from_seq: int) -> list[tuple[int, bytes]]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        items: list[tuple[int, bytes]] = []

        def fail(reason: str) -> None:
            if not done.done():
                done.set_exception(UnknownError(f"{subject}: {reason}"))

        def lost() -> None:
            fail("the connection was lost while reading")

        def take(msg: Any) -> None:
            headers = msg.headers or {}
            status = headers.get("Status")
            if status is None:
                seq = headers.get("Nats-Sequence", "")
                if not seq.isdigit() or headers.get("Nats-Subject") != subject:
                    fail("a direct read without sequence or of another subject")
                else:
                    items.append((int(seq), msg.data))
            elif status in ("204", "404"):
                if not done.done():
                    done.set_result(None)
            else:
                fail(f"status {status} {headers.get('Description', '')}".strip())

        inbox = self._link.nc.new_inbox()
        sub = await self._link.subscribe_raw(inbox, take)
        self._link.on_lost(lost)
        body = {
            "seq": from_seq,
            "next_by_subj": subject,
            "batch": READ_BATCH,
            "max_bytes": READ_BYTES,
        }
        api = f"$JS.API.DIRECT.GET.{self._stream}"
        try:
            with self._link.asking(api, lambda error: fail(str(error))):
                self._link.send(pub(api, msgspec.json.encode(body), inbox), droppable=False)
                async with asyncio.timeout(30.0):
                    await done
        except TimeoutError as error:
            raise UnknownError(f"{subject}: a read did not end") from error
        finally:
            self._link.off_lost(lost)
            if done.done() and not done.cancelled():
                done.exception()
            if not self._link.nc.is_closed:
                await sub.unsubscribe()
        return items

    async def server_now_ms(self) -> int:
        info = await stream_info(self._link, self._stream, timeout_s=3.0)
        if info.error is not None or not info.ts:
            raise UnknownError(f"{self._stream}: the server does not tell its time")
        return stamp_ms(info.ts)


def read_result(data: bytes) -> ReadResult:
    """Judges an answer by its error code, never by its text or status (S-74)."""
    try:
        got = _MSG_GET.decode(data)
        if got.error is not None:
            if got.error.err_code == NO_MESSAGE:
                return Absent()
            return Unknown(f"error {got.error.err_code}: {got.error.description}")
        if got.message is None:
            return Unknown("an answer with neither message nor error")
        return Valid(
            seq=got.message.seq,
            payload=base64.b64decode(got.message.data, validate=True),
            at_ms=stamp_ms(got.message.time),
        )
    except (msgspec.DecodeError, binascii.Error, ValueError) as error:
        return Unknown(f"undecodable answer: {error}")
