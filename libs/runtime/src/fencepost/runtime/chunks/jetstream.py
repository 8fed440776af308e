"""
Chunks in a JetStream stream: one message each, under a subject of its own.

Not in the format of an object store: an object is two messages, each of them synced, and what a
bucket holds of one sandbox could only be told by reading all of it. Here a chunk is one message,
and the server lists the subjects of a sandbox in one answer.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fencepost.contracts import streams, subjects
from fencepost.core.errors import UnknownError
from fencepost.runtime.chunks import check
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import ApiError, Link
from fencepost.runtime.ports import Absent, Unknown

CALL_S: Final = 10.0
ONE_BY_ONE: Final = 8
"""Up to so many chunks are looked for by their own subjects, more by the sandbox's."""


class _Ack(msgspec.Struct, frozen=True):
    stream: str = ""
    seq: int = 0
    error: ApiError | None = None


class _State(msgspec.Struct, frozen=True):
    subjects: dict[str, int] | None = None


class _Info(msgspec.Struct, frozen=True):
    state: _State | None = None
    total: int = 0
    error: ApiError | None = None


class _Purged(msgspec.Struct, frozen=True):
    success: bool = False
    error: ApiError | None = None


_ACK: Final = msgspec.json.Decoder(_Ack)
_INFO: Final = msgspec.json.Decoder(_Info)
_PURGED: Final = msgspec.json.Decoder(_Purged)


class JetStreamChunks:
    """The stream holds one message for each subject, so a repeat replaces the former."""

    def __init__(self, link: Link, stream: str = streams.CHECKPOINTS) -> None:
        self._link = link
        self._stream = stream
        self._log = JetStreamLog(link, stream=stream)

    async def put(self, namespace: str, digest: str, data: bytes) -> None:
        check(namespace, digest)
        subject = subjects.chunk(namespace, digest)
        msg = await self._link.call(subject, data, timeout_s=CALL_S)
        ack = self._decoded(_ACK, msg.data)
        if ack.error is not None or ack.stream != self._stream or not ack.seq:
            raise UnknownError(f"chunk {digest}: not stored: {ack.error}")

    async def get(self, namespace: str, digest: str) -> bytes | None:
        check(namespace, digest)
        subject = subjects.chunk(namespace, digest)
        # Any replica may answer this, and quickly. Only the leader knows what is not there.
        body = msgspec.json.encode({"last_by_subj": subject})
        msg = await self._link.call(f"$JS.API.DIRECT.GET.{self._stream}", body, timeout_s=CALL_S)
        headers = msg.headers or {}
        if "Status" not in headers and headers.get("Nats-Subject") == subject:
            return bytes(msg.data)
        found = await self._log.last(subject)
        if isinstance(found, Unknown):
            raise UnknownError(f"chunk {digest}: {found.reason}")
        return None if isinstance(found, Absent) else found.payload

    async def absent(self, namespace: str, digests: set[str]) -> set[str]:
        for digest in digests:
            check(namespace, digest)
        if len(digests) > ONE_BY_ONE:
            return digests - await self.names(namespace)
        missing: set[str] = set()
        for digest in digests:
            subject = subjects.chunk(namespace, digest)
            if not await self._listed(subject):
                missing.add(digest)
        return missing

    async def names(self, namespace: str) -> set[str]:
        check(namespace)
        found = await self._listed(subjects.chunk(namespace, "*"))
        return {subject.rpartition(".")[2] for subject in found}

    async def everything(self) -> set[tuple[str, str]]:
        """Namespace and digest of every chunk that there is."""
        found = await self._listed(subjects.CHUNKS)
        return {(parts[-2], parts[-1]) for parts in (each.split(".") for each in found)}

    async def stored_at_ms(self, namespace: str, digest: str) -> int | None:
        check(namespace, digest)
        found = await self._log.last(subjects.chunk(namespace, digest))
        if isinstance(found, Unknown):
            raise UnknownError(f"chunk {digest}: {found.reason}")
        return None if isinstance(found, Absent) else found.at_ms

    async def delete(self, namespace: str, digest: str) -> None:
        check(namespace, digest)
        subject = subjects.chunk(namespace, digest)
        data = await self._link.api(
            f"STREAM.PURGE.{self._stream}", {"filter": subject}, timeout_s=CALL_S
        )
        purged = self._decoded(_PURGED, data)
        if purged.error is not None or not purged.success:
            raise UnknownError(f"chunk {digest}: not deleted: {purged.error}")

    async def close(self) -> None:
        """The link is its owner's."""

    async def _listed(self, pattern: str) -> set[str]:
        """The subjects that are there, page by page, as the stream's leader tells."""
        found: set[str] = set()
        while True:
            data = await self._link.api(
                f"STREAM.INFO.{self._stream}",
                {"subjects_filter": pattern, "offset": len(found)},
                timeout_s=CALL_S,
            )
            info = self._decoded(_INFO, data)
            if info.error is not None or info.state is None:
                raise UnknownError(f"stream {self._stream}: {info.error}")
            page = set(info.state.subjects or ())
            if not page - found:
                if len(found) < info.total:
                    raise UnknownError(f"stream {self._stream}: a list that is not whole")
                return found
            found |= page
            if len(found) >= info.total:
                return found

    def _decoded(self, decoder: Any, data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise UnknownError(f"stream {self._stream}: undecodable answer: {error}") from error
