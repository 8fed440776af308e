"""The rows that the dag family's shards are projected into; see `rows`."""

from __future__ import annotations

from typing import ClassVar, Final, TypeAlias

import msgspec


class DagRow(msgspec.Struct, kw_only=True):
    """`released`, `reason`, `evidence` and `outstanding` are the last verdict's that was given."""

    TABLE: ClassVar[str] = "dags"
    KEY: ClassVar[tuple[str, ...]] = ("dag",)

    dag: str
    shard: int
    retry_of: str
    is_closed: bool = False
    close_reason: str = ""
    finished: str = ""
    released: str = ""
    reason: str = ""
    evidence: str = ""
    outstanding: int = 0
    verdicts: int = 0
    held_ever: int = 0
    gone: int = 0
    abandoned: int = 0
    nodes: int = 0
    nodes_cancelled: int = 0
    commands_refused: int = 0
    opened_at_ms: int
    opened_seq: int
    closed_at_ms: int | None = None
    answered_at_ms: int | None = None
    changed_at_ms: int
    changed_seq: int


class NodeRow(msgspec.Struct, kw_only=True):
    """`key` is the name's own bytes: two names are one only when these are equal."""

    TABLE: ClassVar[str] = "dag_nodes"
    KEY: ClassVar[tuple[str, ...]] = ("dag", "key")

    dag: str
    key: bytes
    place: int
    node: str
    status: str
    started_at_ms: int | None = None
    ended_at_ms: int | None = None


class AcquisitionRow(msgspec.Struct, kw_only=True):
    """`slot` is a value, never a key. `since_ms`: when the phase began."""

    TABLE: ClassVar[str] = "acquisitions"
    KEY: ClassVar[tuple[str, ...]] = ("dag", "acquisition")

    dag: str
    acquisition: str
    slot: str
    sandbox: str
    is_adopted: bool
    phase: str = "intent"
    authority: str = ""
    native_id: str = ""
    instance: str = ""
    has_ref: bool = False
    epoch: int = 0
    reason: str = ""
    evidence: str = ""
    intended_at_ms: int
    intended_seq: int
    since_ms: int
    settled_at_ms: int | None = None
    settled_seq: int | None = None


class VerdictRow(msgspec.Struct, kw_only=True):
    """`cancel` is the command that was answered, "" for a change told to subscribers."""

    TABLE: ClassVar[str] = "verdicts"
    KEY: ClassVar[tuple[str, ...]] = ("dag", "seq", "index")

    dag: str
    seq: int
    index: int
    released: str
    reason: str
    evidence: str
    cancel: str
    outstanding: int
    cancelled: int
    at_ms: int


class DagRefusalRow(msgspec.Struct, kw_only=True):
    TABLE: ClassVar[str] = "dag_refusals"
    KEY: ClassVar[tuple[str, ...]] = ("shard", "seq", "index")

    shard: int
    seq: int
    index: int
    dag: str
    id: str
    command: str
    reason: str
    field: str
    detail: str
    at_ms: int


Row: TypeAlias = DagRow | NodeRow | AcquisitionRow | VerdictRow | DagRefusalRow

ROWS: Final[tuple[type[Row], ...]] = (
    DagRow,
    NodeRow,
    AcquisitionRow,
    VerdictRow,
    DagRefusalRow,
)
"""Every table of this family, in the order in which they are written."""
