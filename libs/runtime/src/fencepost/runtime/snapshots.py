"""
Snapshots of a shard's state: a cache that bounds the start.

A snapshot's name holds the shard, the sequence and the digest of its bytes, and the digest is
recorded in the ledger's later batches, so an owner never starts from one that no accepted batch
names, if there is a better. Anything wrong with one (torn, corrupt, of another version, newer
than the log) means that the fold starts earlier (S-218).
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

import msgspec
import structlog
from fencepost.contracts import streams
from fencepost.contracts.messages import HASH, Position, Seen, Sent
from fencepost.core.errors import UnknownError
from fencepost.runtime.link import Link
from fencepost.runtime.objects import Objects

MAGIC: Final = b"fencepost snapshot 1\n"

logger = structlog.get_logger(__name__)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a snapshot carries beside the state.

    `links` are the last acknowledged messages to each receiver, as of `sent.messages`.
    """

    family: str
    machine: int
    shard: int
    shards: int
    hash: str
    seq: int
    term: int
    now_ms: int
    positions: dict[str, Position]
    last_seen: dict[str, Seen]
    sent: Sent
    links: dict[str, Seen]


class Snapshot(NamedTuple):
    header: Header
    state: bytes


class SnapshotError(Exception):
    """These bytes are not a snapshot that can be used; the text says why."""


def encode(header: Header, state: bytes) -> bytes:
    head = msgspec.json.encode(header)
    return b"".join((MAGIC, b"%d\n" % len(head), head, state))


def decode(data: bytes) -> Snapshot:
    """Raises `SnapshotError`."""
    if not data.startswith(MAGIC):
        raise SnapshotError("not a snapshot, or of another version")
    size, newline, rest = data[len(MAGIC) :].partition(b"\n")
    if not newline or not size.isdigit() or len(rest) < int(size):
        raise SnapshotError("torn")
    try:
        header = msgspec.json.decode(rest[: int(size)], type=Header)
    except msgspec.DecodeError as error:
        raise SnapshotError(f"undecodable header: {error}") from error
    return Snapshot(header, rest[int(size) :])


def check(snapshot: Snapshot, *, family: str, machine: int, shard: int, shards: int) -> None:
    """Raises `SnapshotError` when it is another shard's, or another machine's."""
    header = snapshot.header
    want = (family, machine, shard, shards, HASH)
    have = (header.family, header.machine, header.shard, header.shards, header.hash)
    if want != have:
        raise SnapshotError(f"of {have}, not of {want}")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pointer(seq: int, sha256: str) -> str:
    """How a batch names a snapshot: `<sequence>.<sha256>`."""
    return f"{seq}.{sha256}"


def prefix(family: str, shard: int) -> str:
    return f"{family}-{shard}-"


def name(family: str, shard: int, seq: int, sha256: str) -> str:
    return f"{prefix(family, shard)}{seq:020d}-{sha256}"


def parse_name(text: str) -> tuple[int, str] | None:
    """Reads sequence and digest from a name; None when it is none of ours."""
    parts = text.rsplit("-", 2)
    if len(parts) != 3 or not parts[1].isdigit() or len(parts[2]) != 64:
        return None
    return int(parts[1]), parts[2]


class JetStreamSnapshots:
    """See `ports.Snapshots`: the object store."""

    def __init__(self, link: Link, *, bucket: str = streams.OBJECTS_SNAPSHOTS) -> None:
        self._objects = Objects(link, bucket)

    async def put(self, name: str, data: bytes) -> None:
        await self._objects.put(name, data)

    async def get(self, name: str) -> bytes | None:
        try:
            return await self._objects.get(name)
        except UnknownError as error:
            logger.warning("snapshot_not_read", name=name, detail=str(error))
            return None

    async def names(self, prefix: str) -> list[str]:
        try:
            found = await self._objects.names()
        except UnknownError as error:
            logger.warning("snapshots_not_listed", detail=str(error))
            return []
        return sorted(name for name in found if name.startswith(prefix))

    async def delete(self, name: str) -> None:
        try:
            await self._objects.delete(name)
        except UnknownError as error:
            logger.warning("snapshot_not_deleted", name=name, detail=str(error))
