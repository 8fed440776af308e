"""
The rows of the projection: one class per table, fields in the order of its columns.

Everything in a row is a function of the ledger's entries and their place, never of when or in what
company a batch was applied: that is why a rebuild gives the same bytes. What comes from a sandbox
or a stranger goes through `text`, `name` and `number`, so that no entry exists which PostgreSQL
would refuse: one such entry would hold up all that come after it.
"""

from __future__ import annotations

from typing import ClassVar, Final, TypeAlias

import msgspec

NAME_CHARS_MAX: Final = 200
_BIGINT_MAX: Final = (1 << 63) - 1


def text(value: str) -> str:
    """Makes a string that PostgreSQL can store: no NUL, no half of a surrogate pair."""
    if value.isascii() and "\0" not in value:
        return value
    return value.replace("\0", "\ufffd").encode(errors="replace").decode()


def name(value: str) -> str:
    """
    As `text`, and short enough for an index.

    Ids have at most 64 characters and stay as they are; what was refused as an id is cut.
    """
    return text(value[:NAME_CHARS_MAX])


def number(value: int) -> int:
    """The nearest integer that a bigint can hold: a refused receipt may say any."""
    return max(-_BIGINT_MAX - 1, min(_BIGINT_MAX, value))


class SandboxRow(msgspec.Struct, kw_only=True):
    """
    `creates` are the create ids that are not settled, separated by spaces.

    `recovering` is the phase of a recovery, `recovered_steps` how many owed steps it brought back
    or told. `checkpoint_line` and `checkpoint_seq` say what the newest checkpoint holds.
    """

    TABLE: ClassVar[str] = "sandboxes"
    KEY: ClassVar[tuple[str, ...]] = ("sandbox",)

    sandbox: str
    shard: int
    state: str = "creating"
    provider: str
    image: str
    network: bool
    memory_mb: int
    processes: int
    rebuild: bool
    recovery: str = "replay"
    authority: str = ""
    native_id: str = ""
    ref_instance: str = ""
    has_ref: bool = False
    creates: str = ""
    epoch: int = 0
    is_open: bool = False
    instance: str = ""
    session: str = ""
    gateway: str = ""
    journal_seq: int = 0
    is_condemned: bool = False
    is_releasing: bool = False
    is_gone: bool = False
    reason: str = ""
    stop_answer: str = ""
    steps_committed: int = 0
    steps_compensated: int = 0
    commands_refused: int = 0
    steps_owed: int = 0
    recovering: str = ""
    recovered_steps: int = 0
    checkpoint: str = ""
    checkpoint_line: int = 0
    checkpoint_seq: int = 0
    checkpoint_at_ms: int | None = None
    created_at_ms: int
    created_seq: int
    changed_at_ms: int
    changed_seq: int

    def word(self) -> str:
        """One word for where the sandbox is in its life."""
        if self.is_gone:
            return "gone"
        if self.is_releasing:
            return "releasing"
        if self.is_condemned:
            return "condemned"
        if not self.has_ref:
            return "creating"
        if not self.is_open:
            return "lost" if self.epoch else "attaching"
        if not self.session:
            return "attaching"
        return "recovering" if self.recovering else "live"

    def settle(self, create_id: str) -> None:
        self.creates = " ".join(one for one in self.creates.split() if one != create_id)


class EpochRow(msgspec.Struct, kw_only=True):
    TABLE: ClassVar[str] = "epochs"
    KEY: ClassVar[tuple[str, ...]] = ("sandbox", "epoch")

    sandbox: str
    epoch: int
    disk: str
    evidence: str
    owed: int
    instance: str
    session: str = ""
    gateway: str = ""
    opened_at_ms: int
    opened_seq: int
    attached_at_ms: int | None = None
    closed_at_ms: int | None = None
    closed_reason: str = ""
    closed_evidence: str = ""


class StepRow(msgspec.Struct, kw_only=True):
    """`attempt`, `ordinal` and `epoch` are the latest attempt's. Arguments stay in the ledger."""

    TABLE: ClassVar[str] = "steps"
    KEY: ClassVar[tuple[str, ...]] = ("sandbox", "step")

    sandbox: str
    step: str
    shard: int
    state: str
    tool: str
    digest: str
    effect: str
    on_moved_epoch: str
    attempts_max: int
    deadline_at_ms: int
    attempt: str = ""
    ordinal: int = 0
    tries: int = 0
    epoch: int = 0
    is_cancelled: bool = False
    reason: str = ""
    detail: str = ""
    evidence: str = ""
    outcome: str = ""
    result: bytes | None = None
    result_bytes: int = 0
    journal_seq: int = 0
    resolved_by: str = ""
    resolved_note: str = ""
    admitted_at_ms: int
    admitted_seq: int
    ended_at_ms: int | None = None
    ended_seq: int | None = None
    ended_index: int | None = None


class AttemptRow(msgspec.Struct, kw_only=True):
    """`direction` is the latest fence's: an attempt to apply may later be revoked or undone."""

    TABLE: ClassVar[str] = "attempts"
    KEY: ClassVar[tuple[str, ...]] = ("sandbox", "step", "admitted_seq", "ordinal")

    sandbox: str
    step: str
    admitted_seq: int
    ordinal: int
    attempt: str
    state: str
    direction: str = "apply"
    no: int = 0
    epoch: int = 0
    session: str = ""
    of: str = ""
    reason: str = ""
    detail: str = ""
    error: str = ""
    evidence: str = ""
    journal: str = ""
    made_at_ms: int
    fenced_at_ms: int | None = None
    ended_at_ms: int | None = None


class RefusalRow(msgspec.Struct, kw_only=True):
    TABLE: ClassVar[str] = "refusals"
    KEY: ClassVar[tuple[str, ...]] = ("shard", "seq", "index")

    shard: int
    seq: int
    index: int
    kind: str
    sandbox: str
    step: str
    command: str = ""
    attempt: str = ""
    reason: str
    field: str = ""
    detail: str = ""
    direction: str = ""
    verdict: str = ""
    epoch: int = 0
    session: str = ""
    gateway: str = ""
    at_ms: int


class HolderRow(msgspec.Struct, kw_only=True):
    TABLE: ClassVar[str] = "holders"
    KEY: ClassVar[tuple[str, ...]] = ("sandbox", "kind", "holder")

    sandbox: str
    kind: str
    holder: str
    acquisition: str = ""
    reason: str = ""
    added_at_ms: int
    added_seq: int
    removed_at_ms: int | None = None
    removed_seq: int | None = None


Row: TypeAlias = SandboxRow | EpochRow | StepRow | AttemptRow | RefusalRow | HolderRow

ROWS: Final[tuple[type[Row], ...]] = (
    SandboxRow,
    EpochRow,
    StepRow,
    AttemptRow,
    RefusalRow,
    HolderRow,
)
"""Every table of the projection, in the order in which they are written."""
