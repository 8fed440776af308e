"""
The entries of the sandbox family: what a batch of its ledger may contain.

An entry's tag is its name in the ledger for ever. Fields may be added with defaults; a reader that
meets an unknown kind refuses to own the shard (S-220).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from fencepost.core.facts import Capabilities, Ref
from fencepost.core.machine import TermOpened as TermOpened  # noqa: PLC0414 - every family has it
from fencepost.core.receipts import Direction, Receipt
from fencepost.core.steps import SandboxSpec, StepSpec

Evidence: TypeAlias = Literal[
    "never_applied",  # the fence is revoked in the journal, or was never handed out
    "lost_with_epoch",  # the disk that held it is gone
    "undone",  # taken back, with a receipt
    "carried",  # same disk: its journal decides under the next attempt's fence
    "resolved",  # an operator's entry
]
Disk: TypeAlias = Literal["cold", "warm", "restored"]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    sandbox: str


class Refused(_Entry, frozen=True, kw_only=True, tag="refused"):
    """A command that never became anything: `reason` is a stable word, `field` what was wrong."""

    command: str
    id: str
    reason: str
    field: str = ""
    detail: str = ""
    digest: str = ""


class Created(_Entry, frozen=True, kw_only=True, tag="created"):
    spec: SandboxSpec
    create_id: str


class RebuildIntended(_Entry, frozen=True, kw_only=True, tag="rebuild_intended"):
    """A later generation is a create too; refused once `releasing`."""

    create_id: str
    epoch: int


class Requested(_Entry, frozen=True, kw_only=True, tag="requested"):
    """Only this gateway session may call the provider's create; accepted before it does."""

    create_id: str
    gateway: str


class AssignedEntry(_Entry, frozen=True, kw_only=True, tag="assigned"):
    create_id: str
    ref: Ref
    capabilities: Capabilities


class CreateFailedEntry(_Entry, frozen=True, kw_only=True, tag="create_failed"):
    """`ambiguous`: sent, no answer; settled by asking again under the same id."""

    create_id: str
    reason: str
    ambiguous: bool


class EpochOpened(_Entry, frozen=True, kw_only=True, tag="epoch_opened"):
    """`owed`: committed workspace steps that this disk was not shown to hold."""

    epoch: int
    nonce: str
    instance: str
    disk: Disk
    evidence: str
    owed: int = 0


class Marking(_Entry, frozen=True, kw_only=True, tag="marking"):
    """A gateway session is told to write the marker; nothing is fenced before `attached`."""

    epoch: int
    session: str
    gateway: str
    nonce: str
    ref: Ref
    journal_seq: int = 0


class Attached(_Entry, frozen=True, kw_only=True, tag="attached"):
    """From here on only receipts of this session, stamped by this gateway, can join."""

    epoch: int
    session: str
    gateway: str
    journal_seq: int


class Detached(_Entry, frozen=True, kw_only=True, tag="detached"):
    """The session ended; the epoch did not (nothing shows that the disk is gone)."""

    session: str
    reason: str


class EpochClosed(_Entry, frozen=True, kw_only=True, tag="epoch_closed"):
    """From here on no receipt of this epoch commits."""

    epoch: int
    reason: str
    evidence: str = ""


class Condemned(_Entry, frozen=True, kw_only=True, tag="condemned"):
    """Something of a former epoch may still act on this instance: it is stopped and replaced."""

    reason: str


class Parked(_Entry, frozen=True, kw_only=True, tag="parked"):
    """A pending step waits. `spec` is there for a step's first entry only."""

    step: str
    attempt: str
    ordinal: int
    reason: str
    spec: StepSpec | None = None


class Fenced(_Entry, frozen=True, kw_only=True, tag="fenced"):
    """
    A fence was handed out: for applying (a new attempt), or for revoking or undoing `of`.

    `error` is set when an undo is tried again, and says why the former one did not hold.
    """

    step: str
    attempt: str
    ordinal: int
    no: int
    epoch: int
    session: str
    direction: Direction = "apply"
    of: str = ""
    reason: str = ""
    error: str = ""
    counted: bool = True
    spec: StepSpec | None = None


class Revoked(_Entry, frozen=True, kw_only=True, tag="revoked"):
    """The journal holds the revocation: a late dispatch of this attempt is refused by the disk."""

    step: str
    attempt: str
    epoch: int
    journal: str


class Committed(_Entry, frozen=True, kw_only=True, tag="committed"):
    step: str
    attempt: str
    receipt: Receipt
    gateway: str


class Compensated(_Entry, frozen=True, kw_only=True, tag="compensated"):
    """
    `final` False: only this attempt ended; the step goes on with another.

    `journal_seq` is the undo's, where there was one: a disk that is behind it is an older one.
    """

    step: str
    attempt: str
    reason: str
    evidence: Evidence
    final: bool
    detail: str = ""
    epoch: int = 0
    journal_seq: int = 0


class Cancelled(_Entry, frozen=True, kw_only=True, tag="cancelled"):
    """A client's cancel, or a deadline: wins over retries, whatever comes after (S-191)."""

    step: str
    attempt: str
    reason: str


class Indeterminate(_Entry, frozen=True, kw_only=True, tag="indeterminate"):
    """Visible, never run again by itself; closed by an operator's `resolve`."""

    step: str
    attempt: str
    reason: str
    detail: str = ""


class Resolved(_Entry, frozen=True, kw_only=True, tag="resolved"):
    """An operator's word on an indeterminate step, recorded as such."""

    step: str
    attempt: str
    state: Literal["committed", "compensated"]
    who: str
    note: str


class ReceiptRefused(_Entry, frozen=True, kw_only=True, tag="receipt_refused"):
    """A receipt that did not join. It moved nothing."""

    step: str
    attempt: str
    reason: str
    detail: str = ""
    direction: str = ""
    verdict: str = ""
    epoch: int = 0
    session: str = ""
    gateway: str = ""


class HolderAdded(_Entry, frozen=True, kw_only=True, tag="holder_added"):
    dag: str
    acquisition: str


class HolderRemoved(_Entry, frozen=True, kw_only=True, tag="holder_removed"):
    """`reason` says why, where the DAG itself did not let go."""

    dag: str
    acquisition: str
    reason: str = ""


class ToldEntry(_Entry, frozen=True, kw_only=True, tag="told"):
    """What a DAG is told of its acquisition; the message is derived from it (`Told`)."""

    dag: str
    acquisition: str
    phase: Literal["refused", "requested", "assigned", "ready", "releasing", "gone"]
    reason: str = ""
    evidence: str = ""
    epoch: int = 0
    ref: Ref | None = None


class Claimed(_Entry, frozen=True, kw_only=True, tag="claimed"):
    claim: str
    reason: str


class Unclaimed(_Entry, frozen=True, kw_only=True, tag="unclaimed"):
    claim: str


class Releasing(_Entry, frozen=True, kw_only=True, tag="releasing"):
    """Durable before the provider is asked to stop."""

    reason: str


class StopAnsweredEntry(_Entry, frozen=True, kw_only=True, tag="stop_answered"):
    instance: str
    answer: str
    detail: str = ""


class GoneEntry(_Entry, frozen=True, kw_only=True, tag="gone"):
    """Observed gone, with every create id of this sandbox settled."""

    instance: str
    evidence: str


class StrayFound(_Entry, frozen=True, kw_only=True, tag="stray_found"):
    """
    Something runs under this sandbox's label that nothing in the state vouches for.

    A stop of exactly this instance is owed until `stray_gone`. The sandbox itself is not touched:
    it may be gone, or may never have been known here.
    """

    ref: Ref
    create_id: str = ""
    dag: str = ""
    acquisition: str = ""
    observes_gone: bool = True


class StrayGone(_Entry, frozen=True, kw_only=True, tag="stray_gone"):
    ref: Ref
    evidence: str


SandboxEntry: TypeAlias = (
    TermOpened
    | Refused
    | Created
    | RebuildIntended
    | Requested
    | AssignedEntry
    | CreateFailedEntry
    | EpochOpened
    | Marking
    | Attached
    | Detached
    | EpochClosed
    | Condemned
    | Parked
    | Fenced
    | Revoked
    | Committed
    | Compensated
    | Cancelled
    | Indeterminate
    | Resolved
    | ReceiptRefused
    | HolderAdded
    | HolderRemoved
    | ToldEntry
    | Claimed
    | Unclaimed
    | Releasing
    | StopAnsweredEntry
    | GoneEntry
    | StrayFound
    | StrayGone
)
