"""
Reading the recorded history, batch by batch, straight from the ledger's streams.

Which stream a shard is in follows from the number of them, `ledgers`: the deployment's, which
`Client.connect` reads.
Three answers, three ways: a batch, the end (nothing after this yet), or `UnknownError`; never a
short history.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Final, TypeVar

import msgspec
from fencepost.contracts import streams, subjects
from fencepost.contracts.messages import Batch
from fencepost.core.dag.entries import DagEntry
from fencepost.core.errors import LedgerBrokenError, UnknownError
from fencepost.core.sandbox.entries import SandboxEntry
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link, stream_info
from fencepost.runtime.ports import Absent, Valid

T = TypeVar("T")

_FOLLOW_S: Final = 0.2

_decode_batch = msgspec.json.Decoder(Batch).decode
_decode_entries = msgspec.json.Decoder(list[SandboxEntry]).decode
_decode_dag_entries = msgspec.json.Decoder(list[DagEntry]).decode


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One batch as it stands in the stream. `size` is in bytes."""

    seq: int
    size: int
    batch: Batch

    @property
    def entries(self) -> Sequence[SandboxEntry]:
        """The batch's entries of the sandbox family, decoded anew at each call."""
        return self._decoded(_decode_entries)

    @property
    def dag_entries(self) -> Sequence[DagEntry]:
        """The batch's entries of the dag family, decoded anew at each call."""
        return self._decoded(_decode_dag_entries)

    def _decoded(self, decode: Callable[[bytes | msgspec.Raw], Sequence[T]]) -> Sequence[T]:
        try:
            return decode(self.batch.entries)
        except msgspec.MsgspecError as error:
            where = f"{self.batch.family}.{self.batch.shard}"
            raise LedgerBrokenError(f"batch {self.seq} of {where}: {error}") from error

    @property
    def at(self) -> datetime:
        """The batch's own time, on which its decisions were made."""
        return datetime.fromtimestamp(self.batch.now_ms / 1000).astimezone()


class StreamHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of one of the ledger's streams as a whole."""

    first: int
    last: int
    messages: int

    @property
    def is_unbroken(self) -> bool:
        return self.messages == self.last and (self.messages == 0 or self.first == 1)


async def history(link: Link, stream: str = streams.LEDGER) -> StreamHistory:
    """Asks how many messages a ledger stream has, from where to where."""
    info = await stream_info(link, stream)
    if info.error is not None:
        raise UnknownError(f"{stream} cannot be read: {info.error.description}")
    return StreamHistory(
        first=info.state.first_seq, last=info.state.last_seq, messages=info.state.messages
    )


def log_of(link: Link, shard: int, ledgers: int) -> JetStreamLog:
    """The stream that a shard's batches are in, to read or to append."""
    return JetStreamLog(link, stream=streams.ledger_of(shard, ledgers))


async def batches(
    link: Link,
    shard: int,
    *,
    family: str = "sandbox",
    ledgers: int = 1,
    after: int = 0,
    follow: bool = False,
) -> AsyncIterator[Recorded]:
    """
    Reads a shard's batches with a sequence above `after`, in order.

    Ends at the head; with `follow` it waits there for more, for ever. Raises `UnknownError` when
    the server does not answer and `LedgerBrokenError` on a batch that cannot be read.
    """
    subject = subjects.ledger(family, shard)
    log = log_of(link, shard, ledgers)
    while True:
        async for seq, payload in log.read(subject, after + 1):
            yield _read(subject, seq, payload)
            after = seq
        if not follow:
            return
        await asyncio.sleep(_FOLLOW_S)


async def batch_after(
    link: Link, shard: int, after: int, *, family: str = "sandbox", ledgers: int = 1
) -> Recorded | None:
    """The first batch of a shard with a sequence above `after`: where an entry's place points."""
    subject = subjects.ledger(family, shard)
    found = await log_of(link, shard, ledgers).next_after(subject, after)
    if isinstance(found, Valid):
        return _read(subject, found.seq, found.payload)
    if isinstance(found, Absent):
        return None
    raise UnknownError(f"{subject} after {after}: {found.reason}")


async def last_batch(
    link: Link, shard: int, *, family: str = "sandbox", ledgers: int = 1
) -> Recorded | None:
    """A shard's newest batch, as the stream's leader has it; only an append on it proves that."""
    subject = subjects.ledger(family, shard)
    found = await log_of(link, shard, ledgers).last(subject)
    if isinstance(found, Valid):
        return _read(subject, found.seq, found.payload)
    if isinstance(found, Absent):
        return None
    raise UnknownError(f"{subject}: {found.reason}")


def _read(subject: str, seq: int, payload: bytes) -> Recorded:
    try:
        batch = _decode_batch(payload)
    except msgspec.MsgspecError as error:
        raise LedgerBrokenError(f"{subject}: batch {seq} cannot be read: {error}") from error
    return Recorded(seq=seq, size=len(payload), batch=batch)
