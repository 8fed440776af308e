"""
Chunks in a folder that every gateway sees: `<folder>/<namespace>/<two characters>/<digest>`.

The folder carries a witness. Without it, or with another one than at the first look, the folder is
not the store (an unmounted disk, say), and nothing of what is missing there is absent.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from fencepost.core.errors import UnknownError
from fencepost.runtime.chunks import HEX_LENGTH, check

WITNESS: Final = ".fencepost-chunks"

T = TypeVar("T")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderChunks:
    """A chunk appears by one rename, after its bytes were synced."""

    def __init__(self, folder: str) -> None:
        self._root = Path(folder)
        self._witness = ""

    async def put(self, namespace: str, digest: str, data: bytes) -> None:
        check(namespace, digest)
        await self._apart(lambda: self._put(namespace, digest, data))

    def _put(self, namespace: str, digest: str, data: bytes) -> None:
        self._look_at_witness()
        path = self._path(namespace, digest)
        try:
            # Read, not trusted: a repeat is what mends a chunk that was damaged.
            if path.stat().st_size == len(data) and path.read_bytes() == data:
                os.utime(path)
                return
        except FileNotFoundError:
            pass
        temp = path.with_name(f".{digest}.{secrets.token_hex(4)}")
        try:
            with self._created(temp) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temp.replace(path)
        except OSError:
            temp.unlink(missing_ok=True)
            raise
        _sync(path.parent)

    def _created(self, path: Path) -> BinaryIO:
        try:
            return path.open("xb")
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A chunk is only kept once the way to it is.
            _sync(path.parent.parent)
            _sync(self._root)
            return path.open("xb")

    async def get(self, namespace: str, digest: str) -> bytes | None:
        check(namespace, digest)

        def read() -> bytes | None:
            try:
                return self._path(namespace, digest).read_bytes()
            except FileNotFoundError:
                self._look_at_witness()
                return None

        return await self._apart(read)

    async def absent(self, namespace: str, digests: set[str]) -> set[str]:
        for digest in digests:
            check(namespace, digest)

        def look() -> set[str]:
            missing = {one for one in digests if not self._path(namespace, one).exists()}
            self._look_at_witness()
            return missing

        return await self._apart(look)

    async def names(self, namespace: str) -> set[str]:
        check(namespace)

        def look() -> set[str]:
            found: set[str] = set()
            try:
                for folder in (self._root / namespace).iterdir():
                    found.update(
                        path.name for path in folder.iterdir() if len(path.name) == HEX_LENGTH
                    )
            except FileNotFoundError:
                pass
            self._look_at_witness()
            return found

        return await self._apart(look)

    async def stored_at_ms(self, namespace: str, digest: str) -> int | None:
        check(namespace, digest)

        def look() -> int | None:
            try:
                return self._path(namespace, digest).stat().st_mtime_ns // 1_000_000
            except FileNotFoundError:
                self._look_at_witness()
                return None

        return await self._apart(look)

    async def delete(self, namespace: str, digest: str) -> None:
        check(namespace, digest)

        def drop() -> None:
            self._path(namespace, digest).unlink(missing_ok=True)
            self._look_at_witness()

        await self._apart(drop)

    async def close(self) -> None:
        """Nothing is held open."""

    def _path(self, namespace: str, digest: str) -> Path:
        return self._root / namespace / digest[:2] / digest

    async def _apart(self, work: Callable[[], T]) -> T:
        """In a thread; what is missing counts only once the witness was seen after it."""
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise UnknownError(
                f"chunks in {self._root}: {error.strerror or type(error).__name__}"
            ) from error

    def _look_at_witness(self) -> None:
        path = self._root / WITNESS
        try:
            found = path.read_text(encoding="ascii")
        except FileNotFoundError:
            if self._witness or (self._root.is_dir() and any(self._root.iterdir())):
                raise UnknownError(f"{self._root} is not the folder of chunks it was") from None
            self._root.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{WITNESS}.{secrets.token_hex(4)}")
            fresh.write_text(secrets.token_hex(16), encoding="ascii")
            # The first of several gateways wins; the others see its witness.
            try:
                os.link(fresh, path)
            except FileExistsError:
                pass
            finally:
                fresh.unlink()
            found = path.read_text(encoding="ascii")
        if self._witness and found != self._witness:
            raise UnknownError(f"{self._root} is another folder of chunks than it was")
        self._witness = found
