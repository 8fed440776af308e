"""What every store of chunks must do, and one in memory that does it."""

from __future__ import annotations

import hashlib
import os

import pytest
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.runtime.chunks import ChunkStore, check


def named(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class MemoryChunks:
    """`fail`: every call is answered as by a store that cannot be reached."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], bytes] = {}
        self.stored: dict[tuple[str, str], int] = {}
        self.now_ms = 1
        self.fail = False
        self.puts = 0
        self.gets = 0

    def _look(self, namespace: str, digest: str = "0" * 64) -> tuple[str, str]:
        check(namespace, digest)
        if self.fail:
            raise UnknownError("chunks in memory: asked to fail")
        return namespace, digest

    async def put(self, namespace: str, digest: str, data: bytes) -> None:
        key = self._look(namespace, digest)
        self.puts += 1
        self.held[key] = data
        self.stored[key] = self.now_ms

    async def get(self, namespace: str, digest: str) -> bytes | None:
        self.gets += 1
        return self.held.get(self._look(namespace, digest))

    async def absent(self, namespace: str, digests: set[str]) -> set[str]:
        return {one for one in digests if self._look(namespace, one) not in self.held}

    async def names(self, namespace: str) -> set[str]:
        self._look(namespace)
        return {digest for where, digest in self.held if where == namespace}

    async def stored_at_ms(self, namespace: str, digest: str) -> int | None:
        return self.stored.get(self._look(namespace, digest))

    async def delete(self, namespace: str, digest: str) -> None:
        key = self._look(namespace, digest)
        self.held.pop(key, None)
        self.stored.pop(key, None)

    async def close(self) -> None:
        return


class ChunkStoreContract:
    """Offer fixtures `store`, and `lost` (a store that is not there)."""

    async def test_what_was_put_is_there_as_it_was(self, store: ChunkStore) -> None:
        data = os.urandom(512 * 1024)
        await store.put("sbx", named(data), data)
        assert await store.get("sbx", named(data)) == data
        assert await store.absent("sbx", {named(data), named(b"other")}) == {named(b"other")}
        assert await store.stored_at_ms("sbx", named(data))

    async def test_what_was_never_put_is_absent(self, store: ChunkStore) -> None:
        assert await store.get("sbx", named(b"x")) is None
        assert await store.stored_at_ms("sbx", named(b"x")) is None
        assert await store.names("sbx") == set()
        assert await store.absent("sbx", set()) == set()

    async def test_put_again_it_is_the_same(self, store: ChunkStore) -> None:
        first = named(b"x")
        await store.put("sbx", first, b"x")
        at_ms = await store.stored_at_ms("sbx", first)
        await store.put("sbx", first, b"x")
        again_ms = await store.stored_at_ms("sbx", first)
        assert at_ms is not None
        assert again_ms is not None
        assert again_ms >= at_ms
        assert await store.get("sbx", first) == b"x"
        assert await store.names("sbx") == {first}

    async def test_a_namespace_holds_its_own_alone(self, store: ChunkStore) -> None:
        for sandbox in ("sbx", "sbx-2", "sbx2"):
            data = sandbox.encode()
            await store.put(sandbox, named(data), data)
        assert await store.names("sbx") == {named(b"sbx")}
        assert await store.get("sbx-2", named(b"sbx")) is None
        assert await store.absent("sbx2", {named(b"sbx")}) == {named(b"sbx")}
        await store.delete("sbx-2", named(b"sbx"))
        assert await store.get("sbx", named(b"sbx")) == b"sbx"

    async def test_many_are_listed_whole(self, store: ChunkStore) -> None:
        contents = {named(b"%d" % number): b"%d" % number for number in range(90)}
        for name, data in contents.items():
            await store.put("sbx", name, data)
        assert await store.names("sbx") == set(contents)
        assert await store.absent("sbx", {*contents, named(b"no")}) == {named(b"no")}

    async def test_deleted_it_is_absent_and_that_twice(self, store: ChunkStore) -> None:
        await store.put("sbx", named(b"x"), b"x")
        await store.put("sbx", named(b"y"), b"y")
        for _ in range(2):
            await store.delete("sbx", named(b"x"))
        assert await store.get("sbx", named(b"x")) is None
        assert await store.names("sbx") == {named(b"y")}

    async def test_s068_a_store_that_is_not_there_proves_nothing(self, lost: ChunkStore) -> None:
        name = named(b"x")
        for asking in (
            lost.get("sbx", name),
            lost.absent("sbx", {name}),
            lost.absent("sbx", {named(b"%d" % number) for number in range(99)}),
            lost.names("sbx"),
            lost.stored_at_ms("sbx", name),
            lost.put("sbx", name, b"x"),
            lost.delete("sbx", name),
        ):
            with pytest.raises(UnknownError):
                await asking

    @pytest.mark.parametrize(
        ("namespace", "digest"),
        [("", "0" * 64), ("a/b", "0" * 64), ("..", "0" * 64), ("a.b", "0" * 64), ("sbx", "0" * 63), ("sbx", "../" + "0" * 61), ("sbx", "G" * 64), ("sbx", "*")],
    )  # fmt: skip
    async def test_a_name_that_is_none_is_refused(
        self, store: ChunkStore, namespace: str, digest: str
    ) -> None:
        for asking in (
            store.get(namespace, digest),
            store.put(namespace, digest, b"x"),
            store.absent(namespace, {digest}),
            store.stored_at_ms(namespace, digest),
            store.delete(namespace, digest),
        ):
            with pytest.raises(RefusedError):
                await asking
