"""Stores of chunks on real servers: JetStream, and S3 as moto's server speaks it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fencepost.client.embedded import free_port
from fencepost.core.errors import UnknownError
from fencepost.runtime import streams
from fencepost.runtime.chunks import ChunkStore
from fencepost.runtime.chunks.jetstream import JetStreamChunks
from fencepost.runtime.chunks.s3 import S3Chunks
from fencepost.runtime.link import Link

from tests.chunks import ChunkStoreContract, named


class TestJetStream(ChunkStoreContract):
    @pytest.fixture
    async def link(self, nats_server: Any) -> AsyncIterator[Link]:
        link = await Link.connect(nats_server.url, name="test")
        await streams.declare(link, 8, create=True)
        yield link
        await link.close()

    @pytest.fixture
    def store(self, link: Link) -> ChunkStore:
        return JetStreamChunks(link)

    @pytest.fixture
    def lost(self, link: Link, monkeypatch: pytest.MonkeyPatch) -> ChunkStore:
        monkeypatch.setattr("fencepost.runtime.chunks.jetstream.CALL_S", 0.5)
        return JetStreamChunks(link, stream="FP_NOT_THERE")


SECRET = "never-to-be-shown"


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own, since what it warns of is not ours to mend."""
    port = free_port()
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=out,
            stderr=out,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def put_bucket(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10).close()


class TestS3(ChunkStoreContract):
    @pytest.fixture(autouse=True)
    def credentials(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    @pytest.fixture
    async def bucket(self, moto: str, request: pytest.FixtureRequest) -> str:
        name = f"b{abs(id(request)):x}"
        for _ in range(200):
            try:
                await asyncio.to_thread(put_bucket, f"{moto}/{name}")
            except OSError:
                await asyncio.sleep(0.1)
            else:
                return name
        raise AssertionError("moto's server did not start")

    @pytest.fixture
    async def store(self, moto: str, bucket: str) -> AsyncIterator[ChunkStore]:
        store = S3Chunks(bucket, "some/prefix", endpoint=moto, region="us-east-1")
        yield store
        await store.close()

    @pytest.fixture
    async def lost(self, moto: str, bucket: str) -> AsyncIterator[ChunkStore]:
        store = S3Chunks(f"{bucket}-not-there", "", endpoint=moto, region="us-east-1")
        yield store
        await store.close()

    async def test_a_server_that_is_not_there_proves_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = S3Chunks("b", "", endpoint=f"http://127.0.0.1:{free_port()}", region="us-east-1")
        with pytest.raises(UnknownError) as unknown:
            await store.get("sbx", named(b"x"))
        assert SECRET not in repr(unknown.value.__dict__) + str(unknown.value)
        await store.close()
