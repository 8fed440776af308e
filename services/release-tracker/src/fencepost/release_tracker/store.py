"""
The projection's tables: locks, positions, and rows in bulk. One connection, used by one task.

A shard is written under an advisory lock of the session that writes, so a lock that is lost takes
the ability to write along. Besides, a position moves only from where this process left it: when
somebody wiped the tables, or wrote them, the transaction is rolled back as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import asyncpg
import msgspec
from fencepost.core.errors import FencepostError, RefusedError, RetryLaterError
from fencepost.release_tracker.dag_rows import AcquisitionRow, DagRow, NodeRow
from fencepost.release_tracker.families import FAMILIES, Family
from fencepost.release_tracker.projecting import VERSION
from fencepost.release_tracker.rows import (
    AttemptRow,
    EpochRow,
    HolderRow,
    SandboxRow,
    StepRow,
)

LOCK_CLASS: Final = 0x4650
"""First half of the key of a shard's advisory lock; the shard and its family are the second."""

COMMAND_TIMEOUT_S: Final = 60.0

_TYPES: Final[Mapping[str, str]] = {
    "str": "text",
    "int": "bigint",
    "int | None": "bigint",
    "bool": "boolean",
    "bytes": "bytea",
    "bytes | None": "bytea",
}


class MovedElsewhereError(RetryLaterError):
    """The tables are no longer as this process left them: begin again from what they say."""


class WrongLedgerError(FencepostError):
    """The tables are a projection of another ledger, or by another version of this program."""


class Ledger(NamedTuple):
    """Which ledger: the incarnations of its streams, in their order, and the number of shards."""

    incarnations: tuple[str, ...]
    shards: int

    @property
    def incarnation(self) -> str:
        """As the tables say it: of one stream its own, so that another number is another text."""
        return " ".join(self.incarnations)


def _columns(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind))


def _upsert(kind: type[Any]) -> str:
    columns = _columns(kind)
    types = [_TYPES[kind.__annotations__[column]] for column in columns]
    quoted = [f'"{column}"' for column in columns]
    arrays = ", ".join(f"${place}::{type_}[]" for place, type_ in enumerate(types, 1))
    keys = ", ".join(f'"{column}"' for column in kind.KEY)
    sets = ", ".join(
        f'"{column}" = EXCLUDED."{column}"' for column in columns if column not in kind.KEY
    )
    # Names of tables and columns are this package's own; every value is a parameter.
    return (
        f"INSERT INTO {kind.TABLE} ({', '.join(quoted)}) SELECT * FROM unnest({arrays})"  # noqa: S608
        f" ON CONFLICT ({keys}) DO UPDATE SET {sets}"
    )


def _select(kind: type[Any], alias: str, rest: str) -> str:
    columns = ", ".join(f'{alias}."{column}"' for column in _columns(kind))
    return f"SELECT {columns} {rest}"


_UPSERTS: Final = {kind: _upsert(kind) for family in FAMILIES for kind in family.rows}

_LOADS: Final[Mapping[tuple[type, str], str]] = {
    (SandboxRow, "sandbox"): _select(
        SandboxRow, "s", "FROM sandboxes s WHERE s.sandbox = ANY($1::text[])"
    ),
    (EpochRow, "sandbox"): _select(
        EpochRow,
        "e",
        "FROM sandboxes s JOIN epochs e USING (sandbox, epoch) WHERE s.sandbox = ANY($1::text[])",
    ),
    (StepRow, "step"): _select(
        StepRow,
        "s",
        "FROM unnest($1::text[], $2::text[]) AS k (sandbox, step)"
        " JOIN steps s USING (sandbox, step)",
    ),
    (AttemptRow, "step"): _select(
        AttemptRow,
        "a",
        "FROM unnest($1::text[], $2::text[]) AS k (sandbox, step)"
        " JOIN steps s USING (sandbox, step)"
        " JOIN attempts a USING (sandbox, step, admitted_seq, ordinal)",
    ),
    (HolderRow, "key"): _select(
        HolderRow,
        "h",
        "FROM unnest($1::text[], $2::text[], $3::text[]) AS k (sandbox, kind, holder)"
        " JOIN holders h USING (sandbox, kind, holder)",
    ),
    (DagRow, "dag"): _select(DagRow, "d", "FROM dags d WHERE d.dag = ANY($1::text[])"),
    (NodeRow, "dag"): _select(NodeRow, "n", "FROM dag_nodes n WHERE n.dag = ANY($1::text[])"),
    (NodeRow, "key"): _select(
        NodeRow,
        "n",
        "FROM unnest($1::text[], $2::bytea[]) AS k (dag, key) JOIN dag_nodes n USING (dag, key)",
    ),
    (AcquisitionRow, "key"): _select(
        AcquisitionRow,
        "a",
        "FROM unnest($1::text[], $2::text[]) AS k (dag, acquisition)"
        " JOIN acquisitions a USING (dag, acquisition)",
    ),
}
"""The queries that read rows back, by what they are looked for."""


Connection: TypeAlias = asyncpg.Connection


async def connect(dsn: str) -> asyncpg.Connection:
    """Raises what `UNREACHABLE` names."""
    return await asyncpg.connect(
        dsn,
        timeout=10,
        command_timeout=COMMAND_TIMEOUT_S,
        server_settings={
            "application_name": "fencepost-release-tracker",
            # A lost commit is made again from the ledger; waiting for the disk buys nothing.
            "synchronous_commit": "off",
            # A server that loses this client must not keep its locks for hours.
            "tcp_keepalives_idle": "10",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
        },
    )


UNREACHABLE: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
"""What any use of PostgreSQL may raise while it is down, slow, wiped or starting."""


REFUSED: Final = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.ClientConfigurationError,
)
"""Of these, what stays so until somebody mends the address or the database's users."""


def failed(error: BaseException) -> FencepostError:
    """What `UNREACHABLE` names, as whose move is next. Shows neither the address nor a password."""
    text = str(error) or type(error).__name__
    if isinstance(error, REFUSED):
        return RefusedError("bad_setting", f"FENCEPOST_POSTGRES_DSN: {text}", field="postgres_dsn")
    return RetryLaterError(f"PostgreSQL: {text}")


class Store:
    """One family's tables and positions; see the module."""

    def __init__(self, connection: asyncpg.Connection, family: Family) -> None:
        self._connection = connection
        self._family = family

    async def bind(self, ledger: Ledger) -> None:
        """Says which ledger this is a projection of, or checks it. Raises `WrongLedgerError`."""
        await self._connection.execute(
            "INSERT INTO projection_ledger (incarnation, shards, version) VALUES ($1, $2, $3)"
            " ON CONFLICT DO NOTHING",
            ledger.incarnation,
            ledger.shards,
            VERSION,
        )
        row = await self._connection.fetchrow(
            "SELECT incarnation, shards, version FROM projection_ledger"
        )
        have = None if row is None else (row["incarnation"], row["shards"], row["version"])
        want = (ledger.incarnation, ledger.shards, VERSION)
        if have != want:
            raise WrongLedgerError(
                f"the projection is of another ledger or version: has {have}, wanted {want}"
                " (incarnation, shards, version); make it again:"
                " python -m fencepost.release_tracker rebuild"
            )

    async def lock(self, shards: Iterable[int]) -> list[int]:
        """Takes the locks that are free; returns the shards now held. Never waits."""
        number, families = self._family.number, len(FAMILIES)
        rows = await self._connection.fetch(
            "SELECT shard FROM unnest($2::int[]) AS wanted (shard)"
            " WHERE pg_try_advisory_lock($1, shard * $4 + $3)",
            LOCK_CLASS,
            list(shards),
            number,
            families,
        )
        return [row["shard"] for row in rows]

    async def positions(self) -> dict[int, int]:
        """The last batch of each shard that is in the tables; a shard without any is left out."""
        rows = await self._connection.fetch(
            "SELECT shard, seq FROM projection_position WHERE family = $1", self._family.name
        )
        return {row["shard"]: row["seq"] for row in rows}

    async def load(self, names: Any) -> Any:
        """Reads every row that the named entries may rest on."""
        working = self._family.working()
        for kind, by, columns in names.wanted():
            for record in await self._connection.fetch(_LOADS[kind, by], *columns):
                working.take(kind(**record))
        return working

    def transaction(self) -> Any:
        return self._connection.transaction()

    async def move(self, moves: Mapping[int, tuple[int, int]]) -> None:
        """
        Moves positions, `shard: (from, to)`. Raises `MovedElsewhereError`.

        The first thing in a transaction: a wipe takes this table's lock before all others, too.
        """
        fresh = [(shard, to) for shard, (was, to) in moves.items() if was == 0]
        known = [(shard, was, to) for shard, (was, to) in moves.items() if was]
        done = 0
        if fresh:
            done += _count(
                await self._connection.execute(
                    "INSERT INTO projection_position (family, shard, seq)"
                    " SELECT $3, * FROM unnest($1::int[], $2::bigint[]) ON CONFLICT DO NOTHING",
                    *_transposed(fresh, 2),
                    self._family.name,
                )
            )
        if known:
            done += _count(
                await self._connection.execute(
                    "UPDATE projection_position p SET seq = m.reached"
                    " FROM unnest($1::int[], $2::bigint[], $3::bigint[])"
                    " AS m (shard, was, reached)"
                    " WHERE p.family = $4 AND p.shard = m.shard AND p.seq = m.was",
                    *_transposed(known, 3),
                    self._family.name,
                )
            )
        if done != len(moves):
            raise MovedElsewhereError("the positions are not where this process left them")

    async def write(self, changed: Mapping[type, Mapping[Any, Any]]) -> None:
        for kind in self._family.rows:
            rows = changed.get(kind)
            if rows:
                columns = zip(*(msgspec.structs.astuple(row) for row in rows.values()), strict=True)
                await self._connection.execute(
                    _UPSERTS[kind], *(list(column) for column in columns)
                )


async def wipe(connection: Connection) -> None:
    """Empties the projection of all families, in one transaction; who writes it begins again."""
    tables = ", ".join(kind.TABLE for family in FAMILIES for kind in family.rows)
    async with connection.transaction():
        await connection.execute("LOCK TABLE projection_position IN ACCESS EXCLUSIVE MODE")
        await connection.execute(f"TRUNCATE projection_position, projection_ledger, {tables}")


def _transposed(keys: Iterable[Sequence[Any]], width: int) -> list[list[Any]]:
    """Rows as columns: one list for each of `width` places."""
    columns: list[list[Any]] = [[] for _ in range(width)]
    for key in keys:
        for column, value in zip(columns, key, strict=True):
            column.append(value)
    return columns


def _count(status: str) -> int:
    return int(status.rpartition(" ")[2])
