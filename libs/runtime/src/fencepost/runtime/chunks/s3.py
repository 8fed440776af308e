"""
Chunks in a bucket of S3, or of anything that speaks its protocol: `<prefix>/<namespace>/<digest>`.

Credentials come from the environment in S3's own ways (variables, files, the machine's role), are
held by the library alone, and stand in no message of this file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from fencepost.core.errors import UnknownError
from fencepost.runtime.chunks import HEX_LENGTH, check

AT_ONCE: Final = 16
LISTED_FROM: Final = 64
"""From so many chunks on, a list of all is asked for instead of each one."""


class S3Chunks:
    """One client for all calls, made at the first one."""

    def __init__(
        self, bucket: str, prefix: str, *, endpoint: str | None = None, region: str | None = None
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._endpoint = endpoint
        self._region = region
        self._stack = contextlib.AsyncExitStack()
        self._opening = asyncio.Lock()
        self._made: Any = None
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def put(self, namespace: str, digest: str, data: bytes) -> None:
        async with self._asking(namespace, digest) as (s3, key):
            await s3.put_object(Bucket=self._bucket, Key=key, Body=data)

    async def get(self, namespace: str, digest: str) -> bytes | None:
        try:
            async with self._asking(namespace, digest) as (s3, key):
                found = await s3.get_object(Bucket=self._bucket, Key=key)
                async with found["Body"] as body:
                    data: bytes = await body.read()
                    return data
        except _NotThereError:
            return None

    async def absent(self, namespace: str, digests: set[str]) -> set[str]:
        for digest in digests:
            check(namespace, digest)
        if len(digests) > LISTED_FROM:
            return digests - await self.names(namespace)
        wanted = sorted(digests)
        found = await asyncio.gather(*(self.stored_at_ms(namespace, one) for one in wanted))
        return {one for one, at_ms in zip(wanted, found, strict=True) if at_ms is None}

    async def names(self, namespace: str) -> set[str]:
        found: set[str] = set()
        token: dict[str, str] = {}
        while True:
            async with self._asking(namespace) as (s3, key):
                page = await s3.list_objects_v2(Bucket=self._bucket, Prefix=key, **token)
            for item in page.get("Contents", ()):
                name = item["Key"].removeprefix(key)
                if len(name) == HEX_LENGTH:
                    found.add(name)
            if not page.get("IsTruncated"):
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}

    async def stored_at_ms(self, namespace: str, digest: str) -> int | None:
        try:
            async with self._asking(namespace, digest) as (s3, key):
                about = await s3.head_object(Bucket=self._bucket, Key=key)
        except _NotThereError:
            # A HEAD has no body: a bucket that is not there looks like a key that is not.
            if await self._is_listed(namespace, digest):
                raise UnknownError(f"chunk {digest}: there and not there") from None
            return None
        return int(about["LastModified"].timestamp() * 1000)

    async def _is_listed(self, namespace: str, digest: str) -> bool:
        async with self._asking(namespace, digest) as (s3, key):
            page = await s3.list_objects_v2(Bucket=self._bucket, Prefix=key, MaxKeys=1)
        return bool(page.get("Contents"))

    async def delete(self, namespace: str, digest: str) -> None:
        try:
            async with self._asking(namespace, digest) as (s3, key):
                await s3.delete_object(Bucket=self._bucket, Key=key)
        except _NotThereError:
            return

    async def close(self) -> None:
        await self._stack.aclose()
        self._made = None

    async def _client(self) -> Any:
        async with self._opening:
            if self._made is None:
                config = AioConfig(
                    connect_timeout=5,
                    read_timeout=30,
                    retries={"max_attempts": 3, "mode": "standard"},
                    max_pool_connections=AT_ONCE,
                )
                self._made = await self._stack.enter_async_context(
                    get_session().create_client(
                        "s3",
                        endpoint_url=self._endpoint,
                        region_name=self._region,
                        config=config,
                    )
                )
            return self._made

    @contextlib.asynccontextmanager
    async def _asking(self, namespace: str, digest: str = "") -> AsyncIterator[tuple[Any, str]]:
        """
        Gives client and key, and turns every failure into what it proves.

        Only a missing key is an absence: a missing bucket, a refusal and a timeout are not.
        """
        check(namespace, digest or "0" * HEX_LENGTH)
        async with self._slots:
            try:
                yield await self._client(), f"{self._prefix}{namespace}/{digest}"
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code", "")
                if code in ("NoSuchKey", "404"):
                    raise _NotThereError from None
                raise UnknownError(f"bucket {self._bucket}: {code or 'refused'}") from None
            except (BotoCoreError, HTTPClientError, TimeoutError, OSError) as error:
                # Its text may show more of a request than belongs in a log.
                raise UnknownError(f"bucket {self._bucket}: {type(error).__name__}") from None


class _NotThereError(Exception):
    """The bucket answered that it has no such key."""
