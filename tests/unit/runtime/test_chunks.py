"""Stores of chunks that need no server, and how a URL leads to one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.runtime.chunks import ChunkStore, open_store
from fencepost.runtime.chunks.folder import WITNESS, FolderChunks

from tests.chunks import ChunkStoreContract, MemoryChunks, named


class TestMemory(ChunkStoreContract):
    @pytest.fixture
    def store(self) -> ChunkStore:
        return MemoryChunks()

    @pytest.fixture
    def lost(self) -> ChunkStore:
        store = MemoryChunks()
        store.fail = True
        return store


class TestFolder(ChunkStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ChunkStore:
        return FolderChunks(str(tmp_path / "chunks"))

    @pytest.fixture
    def lost(self, tmp_path: Path) -> ChunkStore:
        (tmp_path / "file").touch()
        return FolderChunks(str(tmp_path / "file" / "chunks"))

    async def test_a_folder_that_went_away_is_not_empty_but_unknown(
        self, store: ChunkStore, tmp_path: Path
    ) -> None:
        await store.put("sbx", named(b"x"), b"x")
        shutil.move(tmp_path / "chunks", tmp_path / "away")
        for _ in range(2):
            with pytest.raises(UnknownError):
                await store.get("sbx", named(b"x"))
        (tmp_path / "chunks").mkdir()
        with pytest.raises(UnknownError):
            await store.names("sbx")
        (tmp_path / "chunks").rmdir()
        shutil.move(tmp_path / "away", tmp_path / "chunks")
        assert await store.get("sbx", named(b"x")) == b"x"

    async def test_put_again_mends_what_was_damaged(
        self, store: ChunkStore, tmp_path: Path
    ) -> None:
        await store.put("sbx", named(b"x"), b"x")
        (found,) = (tmp_path / "chunks" / "sbx").glob("*/*")
        found.write_bytes(b"y")
        await store.put("sbx", named(b"x"), b"x")
        assert await store.get("sbx", named(b"x")) == b"x"

    async def test_another_folder_in_its_place_is_unknown(
        self, store: ChunkStore, tmp_path: Path
    ) -> None:
        await store.put("sbx", named(b"x"), b"x")
        (tmp_path / "chunks" / WITNESS).write_text("another")
        with pytest.raises(UnknownError):
            await store.get("sbx", named(b"y"))

    async def test_a_folder_with_other_things_in_it_is_not_taken(self, tmp_path: Path) -> None:
        (tmp_path / "mine").touch()
        with pytest.raises(UnknownError):
            await FolderChunks(str(tmp_path)).names("sbx")

    async def test_two_gateways_share_a_folder(self, tmp_path: Path) -> None:
        one, two = (FolderChunks(str(tmp_path / "chunks")) for _ in range(2))
        await one.put("sbx", named(b"x"), b"x")
        assert await two.get("sbx", named(b"x")) == b"x"

    async def test_a_torn_chunk_is_stored_again(self, store: ChunkStore, tmp_path: Path) -> None:
        name = named(b"whole")
        await store.put("sbx", name, b"whole")
        path = tmp_path / "chunks" / "sbx" / name[:2] / name
        path.write_bytes(b"wh")
        await store.put("sbx", name, b"whole")
        assert path.read_bytes() == b"whole"


@pytest.mark.parametrize(
    "url",
    [
        "", "chunks", "file://host/chunks", "file:chunks", "http://x/y", "jetstream:other",
        "s3:///prefix", "s3://bucket/p?key=secret", "s3://key:secret@bucket/p",
    ],
)  # fmt: skip
def test_a_url_that_leads_nowhere_is_refused(url: str) -> None:
    link: Any = None
    with pytest.raises(RefusedError) as refused:
        open_store(url, link)
    assert refused.value.field == "checkpoint_store"
    assert "secret" not in str(refused.value)


def test_a_url_leads_to_its_store(tmp_path: Path) -> None:
    link: Any = None
    assert type(open_store(f"file://{tmp_path}", link)).__name__ == "FolderChunks"
    assert type(open_store("jetstream:", link)).__name__ == "JetStreamChunks"
    assert type(open_store("s3://bucket/a/b?region=x", link)).__name__ == "S3Chunks"


def test_s3_without_its_library_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    link: Any = None
    monkeypatch.delitem(sys.modules, "fencepost.runtime.chunks.s3", raising=False)
    monkeypatch.setitem(sys.modules, "aiobotocore.session", None)
    with pytest.raises(RefusedError, match=r"fencepost-runtime\[s3\]"):
        open_store("s3://bucket", link)
