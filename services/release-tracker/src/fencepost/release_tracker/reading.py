"""
What the HTTP API reads: one read-only snapshot per answer, with the positions that it is as of.

Readers see only what was projected; whoever needs certainty asks the shard's owner.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg
import msgspec
from fencepost.core import ids
from fencepost.release_tracker import tasks
from fencepost.release_tracker.store import UNREACHABLE

PAGE_MAX: Final = 500
NESTED_MAX: Final = 200
"""Epochs, attempts and refusals shown with one sandbox or step: the latest."""

READ_TIMEOUT_S: Final = 5.0
CONNECTIONS_MAX: Final = 4

_SANDBOX: Final = (
    "sandbox, shard, state, provider, image, network, memory_mb, processes, rebuild, authority,"
    " native_id, epoch, is_open AS open, instance, session, gateway, journal_seq, reason,"
    " stop_answer, steps_committed AS committed, steps_compensated AS compensated,"
    " commands_refused AS refused, steps_owed AS owed, recovering,"
    " recovered_steps AS recovered, checkpoint, checkpoint_at_ms, creates, created_at_ms,"
    " changed_at_ms"
)
_STEP: Final = (
    "sandbox, step, shard, state, tool, digest, effect, on_moved_epoch, attempts_max,"
    " deadline_at_ms, attempt, tries, epoch, is_cancelled AS cancelled, reason, detail, evidence,"
    " outcome, result_bytes, resolved_by, resolved_note, admitted_at_ms, ended_at_ms, admitted_seq,"
    " ended_seq, ended_index"
)
_DAG: Final = (
    "dag, shard, is_closed AS closed, close_reason, finished, NULLIF(released, '') AS released,"
    " reason, evidence, outstanding AS outstanding_count, held_ever, gone, abandoned,"
    " nodes AS nodes_count, nodes_cancelled AS cancelled, retry_of, opened_at_ms, closed_at_ms,"
    " answered_at_ms"
)
_OPEN: Final = ("pending", "fenced", "indeterminate")


class UnavailableError(Exception):
    """PostgreSQL gave no answer in time."""


class Page(msgspec.Struct, frozen=True):
    items: list[dict[str, Any]]
    next: str | None


def encode_cursor(*place: str | int) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def decode_cursor(cursor: str, *kinds: type) -> tuple[Any, ...]:
    """Raises ValueError on anything that `encode_cursor` did not make of such kinds."""
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        place = msgspec.json.decode(raw, type=tuple[kinds])  # type: ignore[valid-type]
    except (binascii.Error, msgspec.MsgspecError) as error:
        raise ValueError("not a cursor of this list") from error
    if any(type(part) is int and not 0 <= part < 1 << 63 for part in place):
        raise ValueError("not a cursor of this list")
    if any(type(part) is str and not ids.is_id(part) for part in place):
        raise ValueError("not a cursor of this list")
    return tuple(place)


class Reader:
    """Reads through a few connections of its own. Every call may raise `UnavailableError`."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._pool: asyncpg.Pool | None = None

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.terminate()

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Snapshot]:
        if not self._dsn:
            raise UnavailableError("this deployment has no PostgreSQL")
        try:
            if self._pool is None:
                self._pool = await asyncpg.create_pool(
                    self._dsn,
                    min_size=0,
                    max_size=CONNECTIONS_MAX,
                    timeout=READ_TIMEOUT_S,
                    command_timeout=READ_TIMEOUT_S,
                    server_settings={"application_name": "fencepost-release-tracker-http"},
                )
            async with (
                self._pool.acquire(timeout=READ_TIMEOUT_S) as connection,
                connection.transaction(isolation="repeatable_read", readonly=True),
            ):
                yield Snapshot(connection)
        except UNREACHABLE as error:
            raise UnavailableError(str(error) or type(error).__name__) from error


class Snapshot:
    """One moment of the projection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def position(self, shard: int, *, family: str = "sandbox") -> dict[str, int]:
        """How far a shard is projected: the sequence of its last batch, 0 for none."""
        seq = await self._connection.fetchval(
            "SELECT seq FROM projection_position WHERE family = $1 AND shard = $2", family, shard
        )
        return {"shard": shard, "seq": seq or 0}

    async def positions(self, *, family: str = "sandbox") -> list[dict[str, int]]:
        rows = await self._connection.fetch(
            "SELECT shard, seq FROM projection_position WHERE family = $1 ORDER BY shard", family
        )
        return [dict(row) for row in rows]

    async def sandboxes(self, after: str, limit: int) -> Page:
        rows = await self._connection.fetch(
            f"SELECT {_SANDBOX} FROM sandboxes WHERE sandbox > $1 ORDER BY sandbox LIMIT $2",  # noqa: S608
            after,
            limit + 1,
        )
        items = [_sandbox(row) for row in rows[:limit]]
        more = len(rows) > limit
        return Page(items, encode_cursor(items[-1]["sandbox"]) if more else None)

    async def sandbox(self, sandbox: str) -> dict[str, Any] | None:
        """One sandbox with its holders, claims, epochs (latest first) and open steps by state."""
        fetch = self._connection.fetch
        rows = await fetch(f"SELECT {_SANDBOX} FROM sandboxes WHERE sandbox = $1", sandbox)  # noqa: S608
        if not rows:
            return None
        found = _sandbox(rows[0])
        held = await fetch(
            "SELECT kind, holder, acquisition, reason, added_at_ms FROM holders"
            " WHERE sandbox = $1 AND removed_seq IS NULL ORDER BY added_seq, holder",
            sandbox,
        )
        found["holders"] = [
            {
                "dag": row["holder"],
                "acquisition": row["acquisition"],
                "since_ms": row["added_at_ms"],
            }
            for row in held
            if row["kind"] == "dag"
        ]
        found["claims"] = [
            {"claim": row["holder"], "reason": row["reason"], "since_ms": row["added_at_ms"]}
            for row in held
            if row["kind"] == "claim"
        ]
        epochs = await fetch(
            "SELECT epoch, disk, evidence, owed, instance, session, gateway, opened_at_ms,"
            " attached_at_ms, closed_at_ms, closed_reason, closed_evidence FROM epochs"
            " WHERE sandbox = $1 ORDER BY epoch DESC LIMIT $2",
            sandbox,
            NESTED_MAX,
        )
        found["epochs"] = [dict(row) for row in epochs]
        counts = await fetch(
            "SELECT state, count(*) AS count FROM steps WHERE sandbox = $1 AND state = ANY($2)"
            " GROUP BY state ORDER BY state",
            sandbox,
            list(_OPEN),
        )
        found["open_steps"] = dict.fromkeys(_OPEN, 0) | {
            row["state"]: row["count"] for row in counts
        }
        return found

    async def steps(
        self, sandbox: str | None, state: str | None, after: tuple[int, str, str], limit: int
    ) -> Page:
        """
        Steps in the order of their admission, of several ledgers by their sequences in each.

        Results are shown with one step only.
        """
        rows = await self._connection.fetch(
            f"SELECT {_STEP} FROM steps WHERE (admitted_seq, sandbox, step) > ($1, $2, $3)"  # noqa: S608
            " AND ($4::text IS NULL OR sandbox = $4) AND ($5::text IS NULL OR state = $5)"
            " ORDER BY admitted_seq, sandbox, step LIMIT $6",
            *after,
            sandbox,
            state,
            limit + 1,
        )
        items = [dict(row) for row in rows[:limit]]
        last = items[-1] if len(rows) > limit else None
        return Page(
            items,
            encode_cursor(last["admitted_seq"], last["sandbox"], last["step"]) if last else None,
        )

    async def sandboxes_of_step(self, step: str) -> list[str]:
        """The sandboxes with a step of this id: one, unless somebody used an id twice."""
        rows = await self._connection.fetch(
            "SELECT DISTINCT sandbox FROM steps WHERE step = $1 ORDER BY sandbox LIMIT $2",
            step,
            NESTED_MAX,
        )
        return [row["sandbox"] for row in rows]

    async def step(self, sandbox: str, step: str) -> dict[str, Any] | None:
        """
        One step with its result, attempts and refusals (latest first).

        A command that was refused never became a step: it is shown as `refused` all the same.
        """
        fetch = self._connection.fetch
        refusals = await fetch(
            "SELECT kind, command, attempt, reason, field, detail, direction, verdict, epoch,"
            " session, gateway, at_ms, seq, index FROM refusals WHERE sandbox = $1 AND step = $2"
            " ORDER BY seq DESC, index DESC LIMIT $3",
            sandbox,
            step,
            NESTED_MAX,
        )
        rows = await fetch(
            f"SELECT {_STEP}, result FROM steps WHERE sandbox = $1 AND step = $2",  # noqa: S608
            sandbox,
            step,
        )
        if rows:
            found = dict(rows[0])
            found["result"] = _json(found["result"])
            found["attempts"] = await self._attempts(found)
        else:
            told = [
                row for row in refusals if row["kind"] == "command" and row["command"] == "step"
            ]
            if not told:
                return None
            found = {
                "sandbox": sandbox,
                "step": step,
                "state": "refused",
                "reason": told[0]["reason"],
                "detail": told[0]["detail"],
                "attempts": [],
            }
        found["refusals"] = [dict(row) for row in refusals]
        return found

    async def _attempts(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        rows = await self._connection.fetch(
            "SELECT attempt, ordinal, state, direction, no, epoch, session, of, reason, detail,"
            " error, evidence, journal, made_at_ms, fenced_at_ms, ended_at_ms FROM attempts"
            " WHERE sandbox = $1 AND step = $2 AND admitted_seq = $3"
            " ORDER BY ordinal DESC LIMIT $4",
            step["sandbox"],
            step["step"],
            step["admitted_seq"],
            NESTED_MAX,
        )
        return [dict(row) for row in rows]

    async def dags(self, released: str | None, after: str, limit: int) -> Page:
        """DAGs by id; with `released`, those whose last verdict is this one."""
        rows = await self._connection.fetch(
            f"SELECT {_DAG} FROM dags WHERE dag > $1"  # noqa: S608
            " AND ($2::text IS NULL OR released = $2) ORDER BY dag LIMIT $3",
            after,
            released,
            limit + 1,
        )
        items = [dict(row) for row in rows[:limit]]
        more = len(rows) > limit
        return Page(items, encode_cursor(items[-1]["dag"]) if more else None)

    async def dag(self, dag: str) -> dict[str, Any] | None:
        """One DAG with its nodes, what is outstanding, its verdicts and refusals (latest first)."""
        fetch = self._connection.fetch
        rows = await fetch(f"SELECT {_DAG} FROM dags WHERE dag = $1", dag)  # noqa: S608
        if not rows:
            return None
        found = dict(rows[0])
        nodes = await fetch(
            "SELECT node, status, started_at_ms, ended_at_ms FROM dag_nodes WHERE dag = $1"
            " ORDER BY place LIMIT $2",
            dag,
            NESTED_MAX,
        )
        found["nodes"] = [dict(row) for row in nodes]
        open_ones = await fetch(
            "SELECT slot, sandbox, acquisition, instance, phase, reason, evidence, since_ms"
            " FROM acquisitions WHERE dag = $1 AND settled_seq IS NULL"
            " ORDER BY intended_seq, acquisition LIMIT $2",
            dag,
            NESTED_MAX,
        )
        found["outstanding"] = [
            tasks.outstanding({**row, "reason": _reason_of(row)}) for row in open_ones
        ]
        found["outstanding_count"] = await self._connection.fetchval(
            "SELECT count(*) FROM acquisitions WHERE dag = $1 AND settled_seq IS NULL", dag
        )
        verdicts = await fetch(
            "SELECT released, reason, evidence, cancel, outstanding AS outstanding_count,"
            " cancelled, at_ms, seq, index FROM verdicts WHERE dag = $1"
            " ORDER BY seq DESC, index DESC LIMIT $2",
            dag,
            NESTED_MAX,
        )
        found["verdicts"] = [dict(row) for row in verdicts]
        return found


def _reason_of(row: Any) -> str:
    """Why an acquisition is outstanding, as `core.dag.verdict` words it."""
    if row["phase"] == "releasing":
        return row["reason"] or "pending_shard"
    return "held" if row["phase"] == "ready" else "acquiring"


def _sandbox(row: Any) -> dict[str, Any]:
    found = dict(row)
    found["creates"] = found["creates"].split()
    return found


def _json(result: bytes | None) -> Any:
    """A stored result, or None where it is not inline (`result_bytes` says how long it was)."""
    if result is None:
        return None
    try:
        msgspec.json.decode(result)
    except msgspec.MsgspecError:
        return None  # a tool's answer that is not UTF-8: what surrounds it must still be read
    return msgspec.Raw(result)
