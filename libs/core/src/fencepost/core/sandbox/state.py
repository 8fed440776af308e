"""
The state of one sandbox shard: a fold of its entries, nothing else.

What is final has left it (counters and a window of digests stay); every collection that grows with
use has a bound in `limits`. Sub-states of an open attempt are named by `Step.phase`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from fencepost.core.facts import Capabilities, Ref
from fencepost.core.receipts import Receipt
from fencepost.core.steps import SandboxSpec, StepSpec

Phase: TypeAlias = Literal[
    "parked",  # pending: waits for a session, for room, or for its turn
    "apply",  # fenced: may be applied
    "joined",  # fenced: its receipt joined, and waits for what `commit_after` asks
    "revoke",  # fenced: being revoked in the journal
    "undo",  # fenced: being taken back
    "indeterminate",  # open, visible, waits for an operator
]


Key: TypeAlias = tuple[int, int, str]
"""
Where a committed effect stands in the order in which disks saw them: line, journal sequence, and
the step's name, which only breaks ties.

A line is one disk's history: the first epoch of the disk that the write was made on.
"""

FIRST: Key = (0, 0, "")


class Step(msgspec.Struct, kw_only=True):
    """
    An open step. Its attempt's fence is (`epoch`, `session`, `no`).

    `at`: the ledger position before its first entry, which has its `spec`. `receipt` and `gateway`
    are those that joined, while it is `joined`. `since_no` is the number of the first fence under
    which what its latest attempt was carried from, or that attempt itself, may have been applied.
    """

    spec: StepSpec
    phase: Phase = "parked"
    ordinal: int = 0
    tries: int = 0
    attempt: str = ""
    epoch: int = 0
    session: str = ""
    no: int = 0
    since_no: int = 0
    of: str = ""
    reason: str = ""
    ended: bool = False
    undo_tries: int = 0
    refusals: int = 0
    since_ms: int = 0
    at: int = 0
    receipt: Receipt | None = None
    gateway: str = ""


class Create(msgspec.Struct, kw_only=True):
    """
    One create id, until it is settled. `gateway` is "" until one was named.

    `place` is the authority at which it was first asked for: it is asked for nowhere else.
    """

    create_id: str
    gateway: str = ""
    place: str = ""
    ambiguous: bool = False
    failures: int = 0
    since_ms: int = 0


class MarkingState(msgspec.Struct, kw_only=True):
    epoch: int
    session: str
    gateway: str
    nonce: str
    ref: Ref
    since_ms: int


class Finished(msgspec.Struct, array_like=True):
    """A final step: enough to answer a duplicate, and where its entry is."""

    state: Literal["committed", "compensated"]
    attempt: str
    digest: str
    after: int
    index: int
    refusals: int = 0


class News(msgspec.Struct, frozen=True):
    """What those who let go of a sandbox are to hear of it now."""

    phase: Literal["releasing", "gone"]
    reason: str
    evidence: str


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """
    The newest stored checkpoint: all that was committed before its entry is in it.

    So is what its disk had written up to journal sequence `seq`, on this `line` and on those that
    it went on from: `lines`, as in the sandbox. `namespace`: the sandbox under whose name its
    chunks are stored. `is_broken`: its last restore proved that it is not whole in the store.
    """

    id: str
    manifest: str
    namespace: str
    line: int = 0
    seq: int = 0
    lines: tuple[tuple[int, int], ...] = ()
    at: tuple[int, int] = (0, -1)
    is_broken: bool = False


class Checkpointing(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is to be taken. While it is, no new fence is handed out."""

    id: str
    reason: str
    since_ms: int


class Replay(msgspec.Struct, kw_only=True):
    """The owed step that is being applied again. `effect` is what must come of it."""

    step: str
    attempt: str
    name: str
    no: int
    epoch: int
    session: str
    key: Key
    tool: str
    digest: str
    args: msgspec.Raw
    effect: str
    item: int
    since_ms: int = 0
    refusals: int = 0


class Recovering(msgspec.Struct, kw_only=True):
    """
    What the present generation still has to get back before anything is fenced on it.

    `done` steps were applied again (or told), the last one at `key`; `sum` is the sum over them, to
    be compared with `Sandbox.owed_sum`. `kept`, `kept_sum` and `kept_key` are those that were
    applied before the rest was given up. `reason` is why it stopped, in `stopped_in`. `lost` is the
    checkpoint that was given up with all that it holds, `without` the one that this generation does
    without, by an operator's word.
    """

    phase: Literal["restore", "replay", "tell", "stopped"]
    since_ms: int
    done: int = 0
    sum: int = 0
    key: Key = FIRST
    kept: int = 0
    kept_sum: int = 0
    kept_key: Key = FIRST
    replay: Replay | None = None
    failures: int = 0
    retry_at_ms: int = 0
    stopped_in: str = ""
    reason: str = ""
    detail: str = ""
    found: str = ""
    lost: str = ""
    without: str = ""


class Sandbox(msgspec.Struct, kw_only=True):
    """
    `holders` maps DAGs to their acquisitions. `debtors` are those who let go and are told until it
    is gone (DAG and acquisition, by the key of both), `told` what each holder and debtor heard
    last, `untold` the debtors who have yet to hear `news`.

    `owed` counts the committed workspace steps that `checkpoint` does not hold, `owed_sum` is the
    sum over them, and `owed_after` the ledger position from which they can be read. `lines` are the
    lines of which this disk may hold something: (line, journal sequence at its start). `undone` is
    the journal sequence of the last effect that was taken back on this line, `restored_seq` that at
    which this disk was restored from a checkpoint, -1 for never.
    """

    id: str
    spec: SandboxSpec
    creates: dict[str, Create] = {}
    creates_made: int = 0
    ref: Ref | None = None
    capabilities: Capabilities | None = None
    epoch: int = 0
    open: bool = False
    nonce: str = ""
    nonce_on_disk: str = ""
    instance: str = ""
    journal_seq: int = 0
    session: str = ""
    gateway: str = ""
    marking: MarkingState | None = None
    asked: int = 0
    condemned: bool = False
    releasing: bool = False
    gone: bool = False
    waiting_since_ms: int = 0
    next_no: int = 1
    steps: dict[str, Step] = {}
    parked: dict[str, None] = {}
    requeued: dict[str, None] = {}
    fenced: dict[str, None] = {}
    finished: dict[str, Finished] = {}
    finished_floor_ms: int = 0
    holders: dict[str, str] = {}
    claims: dict[str, str] = {}
    debtors: dict[str, tuple[str, str]] = {}
    told: dict[str, str] = {}
    news: News | None = None
    untold: dict[str, None] = {}
    stop_answer: str = ""
    held_ever: int = 0
    committed: int = 0
    compensated: int = 0
    refused: int = 0
    owed: int = 0
    owed_sum: int = 0
    owed_after: int = 0
    lines: list[tuple[int, int]] = []
    undone: int = 0
    joined: dict[str, None] = {}
    checkpoint: Checkpoint | None = None
    manifests: list[str] = []
    checkpoints: int = 0
    checkpointing: Checkpointing | None = None
    checkpoints_asked: dict[str, str] = {}
    checkpoint_at_ms: int = 0
    checkpoint_failures: int = 0
    checkpoint_retry_ms: int = 0
    recovering: Recovering | None = None
    recoveries_failed: int = 0
    restored_seq: int = -1
    preempted: str = ""

    @property
    def live(self) -> bool:
        """Whether a fence may be handed out: the epoch is open and a session attached."""
        return (
            self.open
            and self.session != ""
            and not self.releasing
            and not self.condemned
            and (self.capabilities is None or self.capabilities.generation)
        )

    @property
    def whole(self) -> bool:
        """Whether the live generation's disk holds all that was committed."""
        return self.live and self.recovering is None

    @property
    def fences(self) -> bool:
        """Whether a fence to apply may be handed out to a step that has none."""
        return self.whole and self.checkpointing is None

    def fences_ahead(self, but: str = "") -> int:
        """How many fences were handed out since the oldest open step's, `but` left out."""
        steps = self.steps
        oldest = min((steps[name].since_no for name in self.fenced if name != but), default=None)
        return 0 if oldest is None else self.next_no - oldest


class StrayState(msgspec.Struct, kw_only=True):
    """Something that runs and is nobody's: a stop of it is owed until it is gone."""

    ref: Ref
    observes_gone: bool
    since_ms: int


class SandboxShard(msgspec.Struct, kw_only=True):
    """
    `busy` names the sandboxes that owe something to the outside, or wait for it.

    `ended` are sandboxes that owe nothing any more, in the order in which they ended; the oldest
    leave and are `forgotten`: their id and last epoch stay. Ids before those are told by
    `forgotten_floor_ms` where they are ULIDs; once another has gone, new ids must be ULIDs
    (`names_used_up`), since nobody could tell that one of them was used before.

    `strays` are by the sandbox that their label names, whether there is such a sandbox or not.
    """

    shard: int
    shards: int
    term: int = 0
    owner: str = ""
    sandboxes: dict[str, Sandbox] = {}
    busy: dict[str, None] = {}
    strays: dict[str, list[StrayState]] = {}
    ended: dict[str, None] = {}
    forgotten: dict[str, int] = {}
    forgotten_floor_ms: int = 0
    names_used_up: bool = False
    open_steps: int = 0
    poisoned: int = 0
