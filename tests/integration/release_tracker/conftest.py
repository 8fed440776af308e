"""A ledger on a real nats-server, an empty database on a real PostgreSQL, and what runs between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest
from fencepost.contracts import streams
from fencepost.release_tracker import migrations
from fencepost.release_tracker.families import FAMILIES, SANDBOX, Family
from fencepost.release_tracker.projector import Projector
from fencepost.runtime.bus import JetStreamInputs
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import TrackerMetrics
from fencepost.runtime.streams import declare

SHARDS = 3
TABLES = (*(kind.TABLE for family in FAMILIES for kind in family.rows), "projection_position")


class Stack:
    """One ledger and one database; projectors are started and stopped by the test."""

    def __init__(self, link: Link, dsn: str, *, ledgers: int = 1) -> None:
        self.link = link
        self.dsn = dsn
        self.logs = [JetStreamLog(link, stream=name) for name in streams.ledger_names(ledgers)]
        self.log = self.logs[0]
        self.scripts = migrations.read(migrations.default_folder())

    def projector(
        self,
        metrics: TrackerMetrics | None = None,
        shards: int = SHARDS,
        family: Family = SANDBOX,
    ) -> Projector:
        return Projector(
            self.dsn,
            family,
            inputs=JetStreamInputs(self.link),
            logs=self.logs,
            shards=shards,
            metrics=metrics or TrackerMetrics(),
            scripts=self.scripts,
        )

    @contextlib.asynccontextmanager
    async def projecting(self, projector: Projector | None = None) -> AsyncIterator[Projector]:
        made = projector or self.projector()
        task = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            if task.done():
                task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def measuring(self, projector: Projector) -> AsyncIterator[None]:
        task = asyncio.create_task(projector.measure())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def connect(self) -> asyncpg.Connection:
        return await asyncpg.connect(self.dsn)

    async def fetch(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        connection = await self.connect()
        try:
            return await connection.fetch(sql, *args)
        finally:
            await connection.close()

    async def positions(self) -> dict[int, int]:
        """None where there is no table yet, or no server."""
        try:
            rows = await self.fetch(
                "SELECT shard, seq FROM projection_position WHERE family = 'sandbox'"
            )
        except (OSError, asyncpg.PostgresError):
            return {}
        return {row["shard"]: row["seq"] for row in rows}

    async def dump(self) -> bytes:
        """Every row of every table in the order of its key, as COPY writes it."""
        connection = await self.connect()
        out = bytearray()
        try:
            for table in TABLES:
                keys = await connection.fetchval(
                    "SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY k.place)"
                    " FROM pg_index i CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k (num, place)"
                    " JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.num"
                    " WHERE i.indrelid = $1::regclass AND i.indisprimary",
                    table,
                )
                out += f"\n-- {table}\n".encode()
                await connection.copy_from_query(
                    f"SELECT * FROM {table} ORDER BY {keys}", output=_appender(out)
                )
        finally:
            await connection.close()
        return bytes(out)


def _appender(out: bytearray) -> Callable[[bytes], Any]:
    async def append(data: bytes) -> None:
        out.extend(data)

    return append


async def eventually(what: Callable[[], Any], *, within_s: float = 30.0) -> Any:
    """Waits until `what` gives something true, and returns that."""
    async with asyncio.timeout(within_s):
        while True:
            found = await what()
            if found:
                return found
            await asyncio.sleep(0.02)


@pytest.fixture
async def stack(nats_server: Any, postgres_server: Any) -> AsyncIterator[Stack]:
    link = await Link.connect(nats_server.url, name="test")
    try:
        await declare(link, SHARDS, create=True)
        yield Stack(link, postgres_server.dsn)
    finally:
        await link.close()
