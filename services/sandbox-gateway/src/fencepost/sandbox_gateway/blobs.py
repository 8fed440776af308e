"""
Contents above the inline bound: by digest in the object store, streamed to toolhosts in parts.

A digest that the store does not have is not the gateway's to judge: the toolhost answers
`blob_missing`. A store that does not answer, or cannot prove it, is unknown, and nothing is sent.
"""

from __future__ import annotations

import re
from typing import Any, Final, Protocol

import msgspec
from fencepost.contracts import streams
from fencepost.core.limits import CONTENT_BYTES_MAX
from fencepost.core.steps import digest_of
from fencepost.runtime.link import Link
from fencepost.runtime.objects import Objects

MARK: Final = b'"$blob"'
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class BlobStore(Protocol):
    async def get(self, digest: str) -> bytes | None:
        """The content, or None where the store proves that it has none. Raises `UnknownError`."""

    async def put(self, data: bytes) -> str:
        """Stores a content and returns its digest. Raises `UnknownError`."""


class NatsBlobs:
    """`FP_BLOBS`: an object's name is its content's digest."""

    def __init__(self, link: Link) -> None:
        self._objects = Objects(link, streams.OBJECTS_BLOBS)

    async def get(self, digest: str) -> bytes | None:
        found = await self._objects.get(digest)
        if found is None:
            await self._objects.prove_absent(digest)
        return found

    async def put(self, data: bytes) -> str:
        digest: str = digest_of(data)
        if await self._objects.about(digest) is None:
            await self._objects.put(digest, data)
        return digest


def named_in(args: bytes) -> list[str]:
    """Finds the digests that arguments name, each once, as far as all of them fit the bound."""
    if MARK not in args:
        return []
    try:
        value = msgspec.json.decode(args)
    except msgspec.DecodeError:
        return []
    found: dict[str, None] = {}
    room = CONTENT_BYTES_MAX
    waiting: list[Any] = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            digest, size = item.get("$blob"), item.get("size")
            if isinstance(digest, str) and _DIGEST.fullmatch(digest) and type(size) is int:
                if digest not in found and 0 <= size <= room:
                    room -= size
                    found[digest] = None
            else:
                waiting.extend(item.values())
    return list(found)
