"""
What a checkpoint's manifest reaches: digests alone, never a content (`docs/toolhost-protocol.md`).

Pages come from toolhosts, so nothing in them is believed but their digests: a page that is not as
it should be is an error of that checkpoint, and a tree that is too large or too deep is one too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from fencepost.core.errors import FencepostError
from fencepost.core.limits import KIB
from fencepost.runtime.chunks import ChunkStore

CHUNK_BYTES_MAX: Final = 512 * KIB
CHUNKS_MAX: Final = 262_144
LEVELS_MAX: Final = 8
FORM: Final = 1

Kind = Literal["page", "list", "content"]
KINDS: Final[tuple[Kind, ...]] = ("page", "list", "content")


class ManifestError(FencepostError):
    """A chunk of a manifest is proven to be missing, or is not what it should be."""

    def __init__(self, reason: Literal["missing", "corrupt", "too_large"], detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class _Page(msgspec.Struct):
    """A page, an index or the root; entries are looked at only as far as they name chunks."""

    v: int
    k: Literal["page", "index", "root"]
    packs: list[list[Any]] = []
    e: list[list[Any]] = []
    c: list[list[Any]] = []


_PAGE: Final = msgspec.json.Decoder(_Page)


@dataclass(frozen=True, slots=True)
class Named:
    """The chunks that one page or list names, in its order: digest and kind."""

    chunks: tuple[tuple[bytes, Kind], ...]


def bare(digest: str) -> bytes:
    """`sha256:<hex>`, or the hex alone, as bytes. Raises `ManifestError`."""
    text = digest.removeprefix("sha256:")
    try:
        raw = bytes.fromhex(text)
    except (ValueError, TypeError):
        raw = b""
    if len(text) != 64 or len(raw) != 32:
        raise ManifestError("corrupt", f"no digest: {str(digest)[:80]!r}")
    return raw


def named_by(kind: Kind, data: bytes) -> Named:
    """Reads what a page or a list names. Raises `ManifestError`."""
    if kind == "list":
        if len(data) % 32:
            raise ManifestError("corrupt", "a list of blocks of another form")
        parts = (data[at : at + 32] for at in range(0, len(data), 32))
        return Named(tuple((part, "content") for part in parts))
    try:
        page = _PAGE.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError("corrupt", f"a page that cannot be read: {error}") from error
    if page.v != FORM:
        raise ManifestError("corrupt", f"a page of form {page.v}")
    return Named(tuple(_chunks_of(page)))


def _chunks_of(page: _Page) -> Iterator[tuple[bytes, Kind]]:
    for child in page.c:
        yield _digest_in(child), "page"
    for pack in page.packs:
        yield _digest_in(pack), "content"
    for entry in page.e:
        if len(entry) == 6:
            digests = entry[5]
            if not isinstance(digests, list):
                raise ManifestError("corrupt", "an entry without its blocks")
            kind: Kind = "list" if entry[1] == "F" else "content"
            for digest in digests:
                yield bare(digest if isinstance(digest, str) else ""), kind


def _digest_in(item: list[Any]) -> bytes:
    return bare(item[0] if item and isinstance(item[0], str) else "")


@dataclass(slots=True)
class Tree:
    """Every page and list of one manifest with what it names, and so every chunk of it."""

    manifest: bytes
    named: dict[bytes, Named] = field(default_factory=dict)
    chunks: set[bytes] = field(default_factory=set)


Fetch = Callable[[bytes, Kind], Awaitable[Named]]


async def grown(manifest: bytes, fetch: Fetch) -> Tree:
    """
    Follows a manifest to all that it reaches. Raises what `fetch` does, and `ManifestError`.

    One page at a time: the caller may have most of them at hand.
    """
    tree = Tree(manifest)
    tree.chunks.add(manifest)
    waiting: list[tuple[bytes, Kind, int]] = [(manifest, "page", 1)]
    while waiting:
        digest, kind, level = waiting.pop()
        if digest in tree.named:
            continue
        if level > LEVELS_MAX:
            raise ManifestError("too_large", f"more than {LEVELS_MAX} levels of pages")
        named = tree.named[digest] = await fetch(digest, kind)
        for chunk, of_kind in named.chunks:
            tree.chunks.add(chunk)
            if of_kind != "content":
                waiting.append((chunk, of_kind, level + 1))
        if len(tree.chunks) > CHUNKS_MAX:
            raise ManifestError("too_large", f"more than {CHUNKS_MAX} chunks")
    return tree


async def fetched(store: ChunkStore, namespace: str, digest: bytes) -> bytes:
    """One chunk, compared with its digest. Raises `ManifestError` and `UnknownError`."""
    name = digest.hex()
    data = await store.get(namespace, name)
    if data is None:
        raise ManifestError("missing", f"chunk {name}")
    if hashlib.sha256(data).digest() != digest:
        raise ManifestError("corrupt", f"chunk {name} has other bytes")
    return data


async def read(
    store: ChunkStore, namespace: str, manifest: str, *, known: Mapping[bytes, Named] | None = None
) -> Tree:
    """
    Reads all pages of a stored manifest but those that are `known`.

    Raises `ManifestError` and `UnknownError`.
    """

    async def fetch(digest: bytes, kind: Kind) -> Named:
        if known is not None and digest in known:
            return known[digest]
        return named_by(kind, await fetched(store, namespace, digest))

    return await grown(bare(manifest), fetch)
