"""
Where the chunks of checkpoints are kept: by namespace (a sandbox's id) and sha256.

A chunk's bytes are what its name says, so storing one twice changes nothing but its age. Whoever
reads one compares the digest: a store is not trusted with more than keeping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

from fencepost.core import ids
from fencepost.core.errors import RefusedError

if TYPE_CHECKING:
    from fencepost.runtime.link import Link

HEX_LENGTH: Final = 64
FORMS: Final = "jetstream:, file:///<folder> or s3://<bucket>/<prefix>?endpoint=<url>&region=<name>"


class ChunkStore(Protocol):
    """
    Every method raises `UnknownError` where the store proves neither presence nor absence, and
    `RefusedError` where a name is none. `digest` is 64 characters of hex.
    """

    async def put(self, namespace: str, digest: str, data: bytes) -> None:
        """Stores a chunk that is not there; one that is there is as if it were stored now."""

    async def get(self, namespace: str, digest: str) -> bytes | None:
        """The chunk's bytes, uncompared, or None where the store proves that it has none."""

    async def absent(self, namespace: str, digests: set[str]) -> set[str]:
        """Those of these chunks that the store proves not to have."""

    async def names(self, namespace: str) -> set[str]:
        """The digests of all chunks of a namespace."""

    async def stored_at_ms(self, namespace: str, digest: str) -> int | None:
        """When a chunk was last stored, by the store's clock; None where there is none."""

    async def delete(self, namespace: str, digest: str) -> None:
        """Takes a chunk away. One that is not there is no error."""

    async def close(self) -> None: ...


def check(namespace: str, digest: str = "0" * HEX_LENGTH) -> None:
    """Raises `RefusedError` where a chunk cannot have this name."""
    if not ids.is_id(namespace):
        raise RefusedError("bad_id", f"no namespace: {namespace[:80]!r}", field="namespace")
    if len(digest) != HEX_LENGTH or not set(digest) <= set("0123456789abcdef"):
        raise RefusedError("bad_digest", f"no digest: {digest[:80]!r}", field="digest")


def open_store(url: str, link: Link) -> ChunkStore:
    """
    Makes the store of a URL; nothing is looked at yet. Raises `RefusedError` where it is none.

    Credentials never stand in the URL: those of S3 come from the environment, in the usual ways.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.password:
        raise RefusedError(
            "bad_setting",
            "checkpoint_store: credentials do not belong here",
            field="checkpoint_store",
        )
    # Each is imported when it is used: S3's library is optional, and heavy.
    if parts.scheme == "jetstream" and url in ("jetstream:", "jetstream://"):
        from fencepost.runtime.chunks.jetstream import JetStreamChunks

        return JetStreamChunks(link)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        from fencepost.runtime.chunks.folder import FolderChunks

        return FolderChunks(parts.path)
    if parts.scheme == "s3" and parts.netloc:
        return _open_s3(parts.netloc, parts.path.strip("/"), parts.query)
    raise RefusedError(
        "bad_setting",
        f"checkpoint_store: no store {parts.scheme or '(empty)'!r}; expected {FORMS}",
        field="checkpoint_store",
        expected=FORMS,
    )


def _open_s3(bucket: str, prefix: str, query: str) -> ChunkStore:
    from urllib.parse import parse_qsl

    options = dict(parse_qsl(query))
    unknown = set(options) - {"endpoint", "region"}
    if unknown:
        raise RefusedError(
            "bad_setting",
            f"checkpoint_store: unknown options {sorted(unknown)}; expected {FORMS}",
            field="checkpoint_store",
            expected=FORMS,
        )
    try:
        from fencepost.runtime.chunks.s3 import S3Chunks
    except ImportError as error:
        raise RefusedError(
            "bad_setting",
            f"checkpoint_store: s3 needs the extra fencepost-runtime[s3] ({error})",
            field="checkpoint_store",
        ) from error
    return S3Chunks(bucket, prefix, endpoint=options.get("endpoint"), region=options.get("region"))
