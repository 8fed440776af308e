"""
An object store on JetStream that needs few rights, in the format of every NATS client.

The client library reads objects through consumers that the server pushes from; whoever may make
one may have a stream delivered to any subject. Here contents are read by direct gets, what is
there is asked of the stream's leader, and every denial is an error at once.

An object is a message about it (`$O.<bucket>.M.<name>`) and its chunks (`$O.<bucket>.C.<id>`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from fencepost.core.errors import UnknownError
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import ApiError, Link, pub
from fencepost.runtime.ports import Absent, Unknown

CHUNK_BYTES: Final = 128 * 1024
CALL_S: Final = 10.0
_PAGE: Final = 512
_ROLLUP: Final = b"NATS/1.0\r\nNats-Rollup: sub\r\n\r\n"


class About(msgspec.Struct, omit_defaults=True):
    """What the store says of an object. `mtime` is its writer's clock."""

    name: str
    bucket: str = ""
    nuid: str = ""
    size: int = 0
    chunks: int = 0
    mtime: str = ""
    digest: str = ""
    deleted: bool = False
    options: dict[str, Any] = {}


class _Ack(msgspec.Struct, frozen=True):
    seq: int = 0
    error: ApiError | None = None


class _Counted(msgspec.Struct, frozen=True):
    last_seq: int = 0
    subjects: dict[str, int] = {}


class _Information(msgspec.Struct, frozen=True):
    state: _Counted = _Counted()
    error: ApiError | None = None


_ABOUT: Final = msgspec.json.Decoder(About)
_ACK: Final = msgspec.json.Decoder(_Ack)
_COUNTED: Final = msgspec.json.Decoder(_Information)


class Objects:
    """One bucket. Every method raises `UnknownError` when the server does not say."""

    def __init__(self, link: Link, bucket: str) -> None:
        self._link = link
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"
        self._log = JetStreamLog(link, stream=self._stream)

    async def about(self, name: str) -> About | None:
        """What is known of an object, or None where the leader proves that there is none."""
        found = await self._log.last(self._named(name))
        if isinstance(found, Absent):
            return None
        if isinstance(found, Unknown):
            raise UnknownError(f"object {name} of {self._bucket}: {found.reason}")
        about = self._decode(name, found.payload)
        return None if about.deleted else about

    async def get(self, name: str) -> bytes | None:
        """
        An object's content, compared with its digest; None where the leader proves that there
        is none.
        """
        about = await self.about(name)
        if about is None:
            return None
        content = bytearray()
        if about.size:
            reading = self._log.read(self._chunk(about.nuid), 1)
            async for _, part in reading:
                content += part
                if len(content) >= about.size:
                    break
        if len(content) != about.size or (about.digest and about.digest != _digest(content)):
            # A replica that lags behind gives less; another look may see all of it.
            raise UnknownError(f"object {name} of {self._bucket}: its content is not whole")
        return bytes(content)

    async def prove_absent(self, name: str) -> None:
        """
        Returns when the store, as a majority of its servers has it, lacks this object.

        Raises `UnknownError` otherwise. A leader that was cut off and does not know it yet answers
        from what it had; but what is stored needs its peers' word, and whose one answer shows both
        what was just stored and no such object has missed nothing.
        """
        stored = await self._store(self._chunk("asked"), b"", _ROLLUP)
        subject = self._named(name)
        data = await self._link.api(
            f"STREAM.INFO.{self._stream}", {"subjects_filter": subject}, timeout_s=CALL_S
        )
        try:
            info = _COUNTED.decode(data)
        except msgspec.MsgspecError as error:
            raise UnknownError(f"{self._stream}: undecodable information") from error
        if info.error is not None or info.state.last_seq < stored or subject in info.state.subjects:
            raise UnknownError(f"object {name} of {self._bucket}: it is not known to be absent")

    async def put(self, name: str, data: bytes) -> None:
        """Stores an object. Only once all of it is stored does its name lead to it."""
        id_ = secrets.token_hex(11)
        parts = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        for part in parts:
            await self._store(self._chunk(id_), part)
        about = About(
            name=name,
            bucket=self._bucket,
            nuid=id_,
            size=len(data),
            chunks=len(parts),
            mtime=datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC).isoformat(),
            digest=await asyncio.to_thread(_digest, data),
            options={"max_chunk_size": CHUNK_BYTES},
        )
        await self._store(self._named(name), msgspec.json.encode(about), _ROLLUP)

    async def names(self) -> list[str]:
        """The names of all objects that the answering server knows; a hint."""
        found: list[str] = []
        seq = 1
        while page := await self._page(seq):
            seq = page[-1][0] + 1
            described = [self._decode("?", payload) for _, payload in page]
            found.extend(about.name for about in described if not about.deleted)
        return found

    async def delete(self, name: str) -> None:
        """Takes an object out, and its name with it."""
        about = await self.about(name)
        for subject in (self._named(name), *([self._chunk(about.nuid)] if about else [])):
            data = await self._link.api(
                f"STREAM.PURGE.{self._stream}", {"filter": subject}, timeout_s=CALL_S
            )
            error = _ACK.decode(data).error
            if error is not None:
                raise UnknownError(f"object {name} of {self._bucket}: {error.description}")

    def _named(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    def _chunk(self, id_: str) -> str:
        return f"$O.{self._bucket}.C.{id_}"

    def _decode(self, name: str, payload: bytes) -> About:
        try:
            return _ABOUT.decode(payload)
        except msgspec.MsgspecError as error:
            raise UnknownError(f"object {name} of {self._bucket}: undecodable: {error}") from error

    async def _store(self, subject: str, data: bytes, headers: bytes = b"") -> int:
        message = await self._link.call(subject, data, headers=headers, timeout_s=CALL_S)
        try:
            ack = _ACK.decode(message.data)
        except msgspec.MsgspecError as error:
            raise UnknownError(f"{subject}: undecodable acknowledgement") from error
        if ack.error is not None or not ack.seq:
            raise UnknownError(f"{subject}: not stored: {ack.error}")
        return ack.seq

    async def _page(self, from_seq: int) -> list[tuple[int, bytes]]:
        """The next messages about objects, by one direct read."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        found: list[tuple[int, bytes]] = []

        def take(msg: Any) -> None:
            headers = msg.headers or {}
            status = headers.get("Status")
            if done.done():
                return
            if status is None:
                found.append((int(headers["Nats-Sequence"]), msg.data))
            elif status in ("204", "404"):
                done.set_result(None)
            else:
                done.set_exception(UnknownError(f"{self._stream}: status {status}"))

        def denied(error: UnknownError) -> None:
            if not done.done():
                done.set_exception(error)

        inbox = self._link.nc.new_inbox()
        sub = await self._link.subscribe_raw(inbox, take)
        body = {"seq": from_seq, "next_by_subj": f"$O.{self._bucket}.M.>", "batch": _PAGE}
        try:
            subject = f"$JS.API.DIRECT.GET.{self._stream}"
            with self._link.asking(subject, denied):
                self._link.send(pub(subject, msgspec.json.encode(body), inbox), droppable=False)
                async with asyncio.timeout(CALL_S):
                    await done
        except TimeoutError as error:
            raise UnknownError(f"{self._stream}: no answer") from error
        finally:
            if not self._link.nc.is_closed:
                await sub.unsubscribe()
        return found


def _digest(data: bytes | bytearray) -> str:
    return "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
