"""
Brings a database's schema up to date: numbered SQL files in pairs, each applied once.

`NNNN_pre_<what>.sql` is what the new version needs and the former one can live with: it is applied
before the new version starts. `NNNN_post_<what>.sql` is what the former one could not live with, or
what only speeds things up: it is applied when no replica of the former version is left.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import asyncpg
import structlog
from fencepost.core.errors import FencepostError

Phase: TypeAlias = Literal["pre", "post"]

LOCK: Final = 0x46500001
"""The advisory lock under which one process at a time migrates a database."""

_FILE = re.compile(r"(\d{4})_(pre|post)_([a-z0-9_]+)\.sql")

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS schema_migrations (
    name       text COLLATE "C" PRIMARY KEY,
    sha256     text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
)
"""

logger = structlog.get_logger(__name__)


class MigrationError(FencepostError):
    """The migrations are not whole, or are not those that this database was brought up with."""


class Migration(NamedTuple):
    number: int
    phase: str
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def default_folder() -> Path:
    """`deploy/postgres/migrations` of the tree that this module stands in."""
    for above in Path(__file__).resolve().parents:
        folder = above / "deploy" / "postgres" / "migrations"
        if folder.is_dir():
            return folder
    raise MigrationError(
        "no deploy/postgres/migrations above this package: set FENCEPOST_MIGRATIONS_FOLDER"
    )


def read(folder: Path) -> tuple[Migration, ...]:
    """Reads a folder's migrations in order. Raises `MigrationError` unless they are whole pairs."""
    found: list[Migration] = []
    for path in sorted(folder.glob("*.sql")):
        matched = _FILE.fullmatch(path.name)
        if matched is None:
            raise MigrationError(f"{path.name}: not NNNN_pre_<what>.sql or NNNN_post_<what>.sql")
        found.append(Migration(int(matched[1]), matched[2], path.stem, path.read_text("utf-8")))
    found.sort(key=lambda one: (one.number, one.phase == "post"))
    want = [(number, phase) for number in range(1, len(found) // 2 + 1) for phase in _PHASES]
    if not found or [(one.number, one.phase) for one in found] != want:
        raise MigrationError(
            f"{folder}: migrations come in pairs numbered from 0001, found "
            f"{[one.name for one in found]}"
        )
    return tuple(found)


_PHASES: Final[tuple[Phase, ...]] = ("pre", "post")


async def migrate(
    connection: asyncpg.Connection,
    migrations: Iterable[Migration],
    *,
    phases: Iterable[Phase] = _PHASES,
) -> list[str]:
    """
    Applies what is missing, each in a transaction of its own; returns the names applied.

    A database that has none yet gets all phases: no former version can be using it. Raises
    `MigrationError` when an applied file differs from the one here.
    """
    wanted = tuple(phases)
    await connection.execute("SELECT pg_advisory_lock($1)", LOCK)
    try:
        await connection.execute(_TABLE)
        rows = await connection.fetch("SELECT name, sha256 FROM schema_migrations")
        applied = {row["name"]: row["sha256"] for row in rows}
        done: list[str] = []
        for one in migrations:
            if one.name in applied:
                if applied[one.name] != one.sha256:
                    raise MigrationError(f"{one.name} was applied with other contents")
            elif one.phase in wanted or not applied:
                await _apply(connection, one)
                done.append(one.name)
        return done
    finally:
        if not connection.is_closed():
            await connection.execute("SELECT pg_advisory_unlock($1)", LOCK)


async def _apply(connection: asyncpg.Connection, one: Migration) -> None:
    async with connection.transaction():
        await connection.execute(one.sql)
        await connection.execute(
            "INSERT INTO schema_migrations (name, sha256) VALUES ($1, $2)", one.name, one.sha256
        )
    logger.info("migration_applied", name=one.name)
