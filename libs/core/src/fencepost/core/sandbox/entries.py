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
from fencepost.core.receipts import Change, Direction, Receipt
from fencepost.core.steps import SandboxSpec, StepSpec

Evidence: TypeAlias = Literal[
    "never_applied",  # the fence is revoked in the journal, or was never handed out
    "lost_with_epoch",  # the disk that held it is gone
    "undone",  # taken back, with a receipt
    "carried",  # same disk: its journal decides under the next attempt's fence
    "resolved",  # an operator's entry
]
Disk: TypeAlias = Literal["cold", "warm", "restored"]


class OwedName(msgspec.Struct, frozen=True, array_like=True):
    """One owed step, in a list for people."""

    step: str
    attempt: str
    tool: str


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
    """
    Only this gateway session may call the provider's create; accepted before it does.

    `place` is the authority at which that session creates, "" where it was not known.
    """

    create_id: str
    gateway: str
    place: str = ""


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
    """
    `owed`: committed workspace steps that this disk was not shown to hold.

    `recovering`: nothing is fenced before `recovered`. `checkpoint` is what it starts from, the
    disk is then called `restored`; `blank` tells that no marker of this sandbox was found on it.
    Without a checkpoint a `restored` disk is an older point of this sandbox's own, whose journal
    was at `journal_seq`.
    """

    epoch: int
    nonce: str
    instance: str
    disk: Disk
    evidence: str
    owed: int = 0
    recovering: bool = False
    checkpoint: str = ""
    blank: bool = False
    journal_seq: int = 0


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


class Joined(_Entry, frozen=True, kw_only=True, tag="joined"):
    """A receipt joined a step that is committed only after a heartbeat or a checkpoint."""

    step: str
    attempt: str
    receipt: Receipt
    gateway: str


class Committed(_Entry, frozen=True, kw_only=True, tag="committed"):
    """
    `line`: the first epoch of the disk that was written, where it is not the receipt's own.

    `beat`: the journal sequence in the heartbeat that a `joined` step waited for.
    """

    step: str
    attempt: str
    receipt: Receipt
    gateway: str
    line: int = 0
    beat: int = 0


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


class CheckpointAsked(_Entry, frozen=True, kw_only=True, tag="checkpoint_asked"):
    """A client asked for a checkpoint; it is taken when its turn comes."""

    checkpoint: str
    reason: str


class CheckpointingEntry(_Entry, frozen=True, kw_only=True, tag="checkpointing"):
    """A checkpoint is to be taken: from here on no new fence, until it ended one way or another."""

    checkpoint: str
    reason: str


class CheckpointedEntry(_Entry, frozen=True, kw_only=True, tag="checkpointed"):
    """
    The workspace of this moment is stored outside the sandbox: all that was committed is in it.

    `journal_seq` is the disk's; of what is open, the joined steps up to there are in it too.
    """

    checkpoint: str
    manifest: str
    epoch: int
    journal_seq: int
    line: int
    reason: str
    files: int = 0
    size_bytes: int = 0
    sent_bytes: int = 0


class CheckpointFailedEntry(_Entry, frozen=True, kw_only=True, tag="checkpoint_failed"):
    checkpoint: str
    reason: str
    detail: str = ""


class RestoredEntry(_Entry, frozen=True, kw_only=True, tag="restored"):
    """The disk of this generation is what the checkpoint holds."""

    checkpoint: str
    manifest: str
    epoch: int
    session: str
    journal_seq: int
    files: int = 0
    size_bytes: int = 0


class RestoreFailedEntry(_Entry, frozen=True, kw_only=True, tag="restore_failed"):
    checkpoint: str
    reason: str
    detail: str = ""


class Replaying(_Entry, frozen=True, kw_only=True, tag="replaying"):
    """
    A fence was handed out for applying a committed step again, on this generation's disk.

    `attempt` is the one that was committed, `name` the fence's own; `key` is its place in the order
    in which disks saw the owed steps. `item` stands for it in the sum over them.
    """

    step: str
    attempt: str
    name: str
    no: int
    epoch: int
    session: str
    key: tuple[int, int, str]
    tool: str
    digest: str
    args: msgspec.Raw
    effect: str
    item: int
    reason: str = ""


class Replayed(_Entry, frozen=True, kw_only=True, tag="replayed"):
    """
    A committed step is on this generation's disk. Its own state is not touched: it was final.

    `effect` is what came of it; `accepted` where it is not what the first receipt says, by an
    operator's word: then `verdict` is "" where it was not applied at all.
    """

    step: str
    attempt: str
    name: str
    epoch: int
    verdict: Literal["applied", "attested", ""]
    effect: str
    journal_seq: int
    no: int
    of: int
    accepted: bool = False


class OwedTold(_Entry, frozen=True, kw_only=True, tag="owed"):
    """
    A page of the committed steps that are not on this generation's disk and will not be.

    `key` is the last one's place in their order, `sum` stands for them in the sum over all.
    """

    epoch: int
    steps: list[OwedName]
    told: int
    of: int
    key: tuple[int, int, str]
    sum: int


class RecoveryStopped(_Entry, frozen=True, kw_only=True, tag="recovery_stopped"):
    """
    The disk is not what it should be, and a person decides: accept, tell or discard.

    `expected` and `found` are effects where they differ; `changes` is what the step came to this
    time, as far as there is room for it. The first receipt has what was expected.
    """

    epoch: int
    reason: str
    step: str = ""
    attempt: str = ""
    detail: str = ""
    expected: str = ""
    found: str = ""
    changes: tuple[Change, ...] = ()


class RecoveryDecided(_Entry, frozen=True, kw_only=True, tag="recovery_decided"):
    """An operator's word on a recovery that stopped."""

    epoch: int
    decision: Literal["accept", "tell", "discard"]
    who: str
    note: str = ""


class Recovered(_Entry, frozen=True, kw_only=True, tag="recovered"):
    """
    From here on new steps are fenced.

    `replayed`: the disk holds all that was committed. `told`: what stands above `kept` in the order
    was given up, was listed, and is owed no more. `accepted`: by an operator's word.

    `lost`: the checkpoint that was given up too. `without`: the one that this disk does not have,
    accepted as it is; a later generation tries it again.
    """

    epoch: int
    mode: Literal["replayed", "told", "accepted"]
    replayed: int = 0
    told: int = 0
    checkpoint: str = ""
    kept: tuple[int, int, str] = (0, 0, "")
    lost: str = ""
    without: str = ""


class Preempted(_Entry, frozen=True, kw_only=True, tag="preempting"):
    """The provider announced that it will take this instance away."""

    instance: str
    grace_ms: int


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
    | Joined
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
    | CheckpointAsked
    | CheckpointingEntry
    | CheckpointedEntry
    | CheckpointFailedEntry
    | RestoredEntry
    | RestoreFailedEntry
    | Replaying
    | Replayed
    | OwedTold
    | RecoveryStopped
    | RecoveryDecided
    | Recovered
    | Preempted
)
