"""
An auditor of a recorded ledger: what the entries alone can show of the invariants.

Rule 1: it shares nothing with the deciding code but the shapes of the entries. Using `decide` or
        `evolve` to check what they wrote would prove nothing.
Rule 2: it never raises on what it reads and never stops at the first fault; whatever follows a
        fault is judged on what the ledger says, so one fault may show several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
from fencepost.core import limits
from fencepost.core.facts import Ref
from fencepost.core.invariants_dag import DagJudge
from fencepost.core.invariants_recovery import RecoveryJudge
from fencepost.core.machine import TermOpened
from fencepost.core.sandbox import entries as e
from fencepost.core.steps import StepSpec, digest_of

_EVENTS_OF_A_FENCE: Final = ("apply", "revoke", "undo")


class Violation(msgspec.Struct, frozen=True):
    """`invariant` is an id of the design (`I1`…`I10`) or of a scenario row (`S-15`)."""

    invariant: str
    shard: int
    seq: int
    index: int
    detail: str


class _Step(msgspec.Struct):
    """
    One step as the ledger tells it. `between`: its attempt ended, the next must follow.

    `forgotten`: it was fenced when another tree than that of its journal's words may have come.
    """

    spec: StepSpec
    state: str
    ordinal: int = 1
    attempt: str = ""
    direction: str = ""
    no: int = 0
    epoch: int = 0
    session: str = ""
    revoked: str = ""
    cancelled: bool = False
    unproven: bool = False
    forgotten: bool = False
    joined: bool = False


class _Sandbox(msgspec.Struct):
    created: bool = False
    epoch: int = 0
    open: bool = False
    nonce: str = ""
    instance: str = ""
    session: str = ""
    gateway: str = ""
    marking: tuple[int, str, str] | None = None
    condemned: bool = False
    releasing: bool = False
    ended: bool = False
    instance_gone: bool = False
    ref: Ref | None = None
    no: int = 0
    holders: set[str] = msgspec.field(default_factory=set)
    claims: set[str] = msgspec.field(default_factory=set)
    creates: set[str] = msgspec.field(default_factory=set)
    creates_ever: set[str] = msgspec.field(default_factory=set)
    steps: dict[str, _Step] = msgspec.field(default_factory=dict)
    final: dict[str, str] = msgspec.field(default_factory=dict)


class ShardAuditor:
    """
    Takes one shard's batches in order; keeps only what is open, and a window of what ended.

    Of another family than `sandbox` and `dag` it judges the batches' frames, not their entries.
    """

    def __init__(self, family: str, shard: int) -> None:
        self.family = family
        self.shard = shard
        self._seq = 0
        self._term = 0
        self._owner = ""
        self._now_ms = 0
        self._batches = 0
        self._entries = 0
        self._epochs = 0
        self._refused = 0
        self._receipts_refused = 0
        self._committed = 0
        self._compensated = 0
        self._sandboxes: dict[str, _Sandbox] = {}
        self._strays: set[tuple[str, Ref]] = set()
        self._between: list[tuple[str, str]] = []
        self._found: list[Violation] = []
        self._at = (0, 0)
        self._all = 0
        self._dags = DagJudge(self._need)
        self._recovery = RecoveryJudge(self._need)

    def take(
        self, *, seq: int, prev: int, term: int, owner: str, now_ms: int, entries: Iterable[Any]
    ) -> list[Violation]:
        """Judges the next batch; returns what is wrong with it, in order."""
        self._found = []
        self._at = (seq, 0)
        listed = list(entries)
        self._take_frame(seq, prev, term=term, owner=owner, now_ms=now_ms, entries=listed)
        for index, entry in enumerate(listed):
            self._at = (seq, index)
            self._entries += 1
            if self.family == "sandbox":
                self._recovery.take(entry)
            if isinstance(entry, TermOpened):
                self._term_opened(entry, term, index)
            elif self.family == "sandbox":
                self._take_entry(entry)
            elif self.family == "dag":
                self._dags.take(entry)
        self._check_whole()
        self._seq, self._term, self._owner = seq, max(term, self._term), owner
        self._now_ms = max(now_ms, self._now_ms)
        self._batches += 1
        self._all += len(self._found)
        return self._found

    def finish(self) -> list[Violation]:
        """Judges the ledger as a whole, after its last batch."""
        self._found = []
        self._at = (self._seq, 0)
        for name, sandbox in self._sandboxes.items():
            if sandbox.ended and (fenced := [n for n, s in sandbox.steps.items() if s.no]):
                open_ = [n for n in fenced if sandbox.steps[n].state != "indeterminate"]
                self._need(not open_, "I9", f"{name} is gone, but {open_[:3]} are still fenced")
        self._all += len(self._found)
        return self._found

    def summary(self) -> dict[str, Any]:
        """Counts, for people; `open` are steps that have not ended, by state."""
        open_: dict[str, int] = {}
        for sandbox in self._sandboxes.values():
            for step in sandbox.steps.values():
                open_[step.state] = open_.get(step.state, 0) + 1
        return {
            "family": self.family,
            "shard": self.shard,
            "batches": self._batches,
            "entries": self._entries,
            "terms": self._term,
            "sandboxes": len(self._sandboxes),
            "dags": self._dags.count,
            "epochs": self._epochs,
            "steps": {"committed": self._committed, "compensated": self._compensated, **open_},
            "refused": self._refused,
            "receipts_refused": self._receipts_refused,
            "violations": self._all,
        }

    # --- the frame of a batch (I8) ------------------------------------------------------------

    def _need(self, holds: bool, invariant: str, detail: str) -> bool:
        if not holds:
            self._found.append(Violation(invariant, self.shard, *self._at, detail))
        return holds

    def _take_frame(
        self, seq: int, prev: int, *, term: int, owner: str, now_ms: int, entries: list[Any]
    ) -> None:
        self._need(prev == self._seq, "I8", f"follows {prev}, the last batch was {self._seq}")
        self._need(seq > self._seq, "I8", f"sequence {seq} after {self._seq}")
        self._need(now_ms >= self._now_ms, "I8", f"time {now_ms} after {self._now_ms}")
        opens = any(isinstance(entry, TermOpened) for entry in entries)
        if term == self._term and not opens:
            self._need(owner == self._owner, "I8", f"term {term} is {self._owner}'s, not {owner}'s")
        elif term < self._term:
            self._need(False, "I8", f"a batch of term {term} after term {self._term} opened")
        else:
            self._need(opens, "I8", f"term {term} was never opened")

    def _term_opened(self, entry: TermOpened, term: int, index: int) -> None:
        self._need(
            entry.term == self._term + 1, "I8", f"term {entry.term} opened after {self._term}"
        )
        self._need(entry.term == term, "I8", f"term {entry.term} opened in a batch of {term}")
        self._need(index == 0, "I8", "a term is opened by the first entry of a batch")

    def _check_whole(self) -> None:
        """One input's entries are one batch: nothing may be left half said at its end."""
        for name, step in self._between:
            kept = self._sandboxes[name].steps.get(step)
            self._need(
                kept is None or kept.state != "between",
                "S-15",
                f"{step}: an attempt ended, no other followed",
            )
        self._between.clear()

    # --- entries ------------------------------------------------------------------------------

    def _take_entry(self, entry: Any) -> None:
        if isinstance(entry, e.Refused):
            self._refused += 1
            return
        if isinstance(entry, e.StrayFound | e.StrayGone):
            self._stray(entry)
            return
        judge = _JUDGES.get(type(entry))
        if not self._need(judge is not None, "I8", f"an entry of kind {type(entry).__name__}"):
            return
        assert judge is not None
        sandbox = self._sandboxes.get(entry.sandbox)
        if sandbox is None and isinstance(entry, e.ToldEntry):
            return  # a refusal of what never came to be
        if sandbox is None:
            sandbox = self._sandboxes[entry.sandbox] = _Sandbox()
            self._need(isinstance(entry, e.Created), "S-15", f"{entry.sandbox} was never created")
        if sandbox.ended:
            self._need(
                isinstance(
                    entry,
                    e.Compensated
                    | e.Cancelled
                    | e.Indeterminate
                    | e.Resolved
                    | e.ReceiptRefused
                    | e.ToldEntry,
                ),
                "S-15",
                f"{entry.sandbox} is gone for good, then {type(entry).__name__}",
            )
        judge(self, sandbox, entry)

    def _stray(self, entry: e.StrayFound | e.StrayGone) -> None:
        """Of the sandbox's name alone: nothing of the sandbox itself may be called a stray."""
        key = (entry.sandbox, entry.ref)
        if isinstance(entry, e.StrayGone):
            self._need(key in self._strays, "S-15", f"a stray of {entry.sandbox} gone, not found")
            self._strays.discard(key)
            return
        self._need(key not in self._strays, "S-15", f"a stray of {entry.sandbox} found twice")
        self._strays.add(key)
        sandbox = self._sandboxes.get(entry.sandbox)
        if sandbox is not None:
            is_its_own = sandbox.ref == entry.ref and not sandbox.instance_gone
            self._need(not is_its_own, "I6", f"{entry.sandbox}: its own instance called a stray")
            self._need(
                entry.create_id not in sandbox.creates,
                "I6",
                f"{entry.sandbox}: what {entry.create_id} makes called a stray",
            )

    def _created(self, sandbox: _Sandbox, entry: e.Created) -> None:
        self._need(not sandbox.created, "S-15", f"{entry.sandbox} created twice")
        sandbox.created = True
        sandbox.creates.add(entry.create_id)
        sandbox.creates_ever.add(entry.create_id)

    def _rebuild_intended(self, sandbox: _Sandbox, entry: e.RebuildIntended) -> None:
        self._need(not sandbox.releasing, "I4", f"{entry.sandbox} rebuilt while releasing")
        self._need(
            entry.create_id not in sandbox.creates_ever, "I5", f"{entry.create_id} used again"
        )
        self._need(entry.epoch == sandbox.epoch + 1, "I8", f"rebuilt for epoch {entry.epoch}")
        sandbox.creates.add(entry.create_id)
        sandbox.creates_ever.add(entry.create_id)
        sandbox.condemned = False

    def _requested(self, sandbox: _Sandbox, entry: e.Requested) -> None:
        self._need(
            entry.create_id in sandbox.creates, "I5", f"{entry.create_id} requested, not intended"
        )

    def _assigned(self, sandbox: _Sandbox, entry: e.AssignedEntry) -> None:
        self._need(
            entry.create_id in sandbox.creates, "I5", f"{entry.create_id} assigned, not intended"
        )
        sandbox.creates.discard(entry.create_id)
        sandbox.instance_gone = False
        sandbox.ref = entry.ref

    def _create_failed(self, sandbox: _Sandbox, entry: e.CreateFailedEntry) -> None:
        self._need(
            entry.create_id in sandbox.creates, "I5", f"{entry.create_id} failed, not intended"
        )
        if sandbox.releasing and not entry.ambiguous:
            sandbox.creates.discard(entry.create_id)

    def _epoch_opened(self, sandbox: _Sandbox, entry: e.EpochOpened) -> None:
        self._need(
            entry.epoch == sandbox.epoch + 1, "I8", f"epoch {entry.epoch} after {sandbox.epoch}"
        )
        self._need(
            not sandbox.open, "I8", f"epoch {entry.epoch} opened, {sandbox.epoch} not closed"
        )
        self._need(
            entry.nonce not in ("", sandbox.nonce),
            "I1",
            f"epoch {entry.epoch} has no nonce of its own",
        )
        self._need(not sandbox.releasing, "I4", f"epoch {entry.epoch} opened while releasing")
        self._epochs += 1
        sandbox.epoch, sandbox.open, sandbox.session = entry.epoch, True, ""
        sandbox.nonce, sandbox.instance, sandbox.marking = entry.nonce, entry.instance, None
        if entry.disk != "warm" or entry.recovering or entry.evidence == "other_instance":
            for step in sandbox.steps.values():
                step.forgotten = step.forgotten or step.state == "fenced"

    def _marking(self, sandbox: _Sandbox, entry: e.Marking) -> None:
        self._current(sandbox, entry.epoch, "marking")
        self._need(entry.nonce == sandbox.nonce, "I1", "marking another nonce than the epoch's")
        sandbox.marking = (entry.epoch, entry.session, entry.gateway)
        sandbox.ref = entry.ref

    def _attached(self, sandbox: _Sandbox, entry: e.Attached) -> None:
        self._current(sandbox, entry.epoch, "attached")
        self._need(
            (entry.epoch, entry.session, entry.gateway) == sandbox.marking,
            "I1",
            f"session {entry.session} attached, the marker was being written for {sandbox.marking}",
        )
        sandbox.session, sandbox.gateway, sandbox.marking = entry.session, entry.gateway, None

    def _detached(self, sandbox: _Sandbox, entry: e.Detached) -> None:
        if entry.session == sandbox.session:
            sandbox.session = ""
        if sandbox.marking is not None and sandbox.marking[1] == entry.session:
            sandbox.marking = None

    def _epoch_closed(self, sandbox: _Sandbox, entry: e.EpochClosed) -> None:
        self._current(sandbox, entry.epoch, "closed")
        sandbox.open, sandbox.session, sandbox.marking = False, "", None

    def _current(self, sandbox: _Sandbox, epoch: int, what: str) -> None:
        self._need(
            sandbox.open and epoch == sandbox.epoch,
            "I1",
            f"{what} under epoch {epoch}, the ledger's is {sandbox.epoch}"
            f" ({'open' if sandbox.open else 'closed'})",
        )

    def _condemned(self, sandbox: _Sandbox, entry: e.Condemned) -> None:
        self._need(not sandbox.open, "I1", f"{entry.sandbox} condemned while its epoch is open")
        sandbox.condemned = True

    def _holder_added(self, sandbox: _Sandbox, entry: e.HolderAdded) -> None:
        self._need(not sandbox.releasing, "I6", f"{entry.dag} holds what is being released")
        sandbox.holders.add(entry.dag)

    def _holder_removed(self, sandbox: _Sandbox, entry: e.HolderRemoved) -> None:
        self._need(entry.dag in sandbox.holders, "I6", f"{entry.dag} held it not")
        sandbox.holders.discard(entry.dag)

    def _claimed(self, sandbox: _Sandbox, entry: e.Claimed) -> None:
        self._need(not sandbox.releasing, "I6", f"{entry.claim} claims what is being released")
        sandbox.claims.add(entry.claim)

    def _unclaimed(self, sandbox: _Sandbox, entry: e.Unclaimed) -> None:
        self._need(entry.claim in sandbox.claims, "I6", f"{entry.claim} claimed it not")
        sandbox.claims.discard(entry.claim)

    def _releasing(self, sandbox: _Sandbox, entry: e.Releasing) -> None:
        held = sorted(sandbox.holders | sandbox.claims)
        self._need(not held, "I6", f"{entry.sandbox} releasing, still held by {held[:3]}")
        self._need(not sandbox.releasing, "S-15", f"{entry.sandbox} releasing twice")
        sandbox.releasing = True

    def _stop_answered(self, sandbox: _Sandbox, entry: e.StopAnsweredEntry) -> None:
        self._need(
            sandbox.releasing or sandbox.condemned, "I6", f"{entry.sandbox} stopped while held"
        )

    def _gone(self, sandbox: _Sandbox, entry: e.GoneEntry) -> None:
        self._need(
            not sandbox.open or entry.instance != sandbox.instance,
            "I1",
            f"the instance of epoch {sandbox.epoch} is gone, the epoch still open",
        )
        sandbox.instance_gone = True
        sandbox.ended = sandbox.releasing and not sandbox.creates

    def _told(self, sandbox: _Sandbox, entry: e.ToldEntry) -> None:
        self._need(
            entry.phase != "gone" or sandbox.ended,
            "I4",
            f"{entry.dag} is told that {entry.sandbox} is gone, and it is not",
        )

    # --- steps --------------------------------------------------------------------------------

    def _new_step(self, sandbox: _Sandbox, entry: e.Parked | e.Fenced, spec: StepSpec) -> _Step:
        name = entry.step
        self._need(name not in sandbox.steps, "S-15", f"{name} begun while it is open")
        self._need(
            name not in sandbox.final, "S-15", f"{name} begun, it is {sandbox.final.get(name)}"
        )
        self._need(digest_of(bytes(spec.args)) == spec.digest, "I1", f"{name}: digest of arguments")
        self._need(entry.ordinal == 1, "S-15", f"{name} begins with attempt {entry.ordinal}")
        self._need(not sandbox.releasing, "S-15", f"{name} begun while releasing")
        step = sandbox.steps[name] = _Step(spec, "pending", entry.ordinal, entry.attempt)
        self._check_attempt(name, entry)
        return step

    def _check_attempt(self, name: str, entry: e.Parked | e.Fenced) -> None:
        self._need(
            entry.attempt == f"{name}.{entry.ordinal}", "S-15", f"{name}: named {entry.attempt}"
        )

    def _known(self, sandbox: _Sandbox, name: str, what: str) -> _Step | None:
        step = sandbox.steps.get(name)
        state = sandbox.final.get(name, "unknown")
        self._need(step is not None, "S-15", f"{name} {what}, it is {state}")
        return step

    def _next_attempt(self, step: _Step, entry: e.Parked | e.Fenced) -> None:
        name = entry.step
        self._need(
            entry.ordinal == step.ordinal + 1,
            "S-15",
            f"{name}: attempt {entry.ordinal} after {step.ordinal}",
        )
        self._check_attempt(name, entry)
        self._need(not step.cancelled, "S-191", f"{name}: a new attempt after its cancel")
        step.ordinal, step.attempt, step.revoked = entry.ordinal, entry.attempt, ""

    def _parked(self, sandbox: _Sandbox, entry: e.Parked) -> None:
        if entry.spec is not None:
            self._new_step(sandbox, entry, entry.spec)
            return
        step = self._known(sandbox, entry.step, "parked")
        if step is None:
            return
        self._need(step.state == "between", "S-15", f"{entry.step}: {step.state}, then parked")
        self._next_attempt(step, entry)
        step.state = "pending"

    def _fenced(self, sandbox: _Sandbox, entry: e.Fenced) -> None:
        name = entry.step
        step = (
            self._new_step(sandbox, entry, entry.spec)
            if entry.spec is not None
            else self._known(sandbox, name, "fenced")
        )
        self._current(sandbox, entry.epoch, f"{name} fenced")
        self._need(
            entry.session == sandbox.session != "",
            "I1",
            f"{name} fenced for session {entry.session!r}, attached is {sandbox.session!r}",
        )
        self._need(entry.no > sandbox.no, "I8", f"{name}: fence {entry.no} after {sandbox.no}")
        sandbox.no = max(sandbox.no, entry.no)
        self._need(entry.direction in _EVENTS_OF_A_FENCE, "S-15", f"{name}: {entry.direction}")
        if step is None:
            return
        if entry.direction == "apply":
            self._fenced_to_apply(sandbox, step, entry)
        else:
            self._fenced_to_end(step, entry)
        step.state, step.direction, step.no = "fenced", entry.direction, entry.no
        step.joined = False
        step.epoch, step.session = entry.epoch, entry.session

    def _fenced_to_apply(self, sandbox: _Sandbox, step: _Step, entry: e.Fenced) -> None:
        name = entry.step
        if step.state == "between":
            self._next_attempt(step, entry)
        else:
            self._need(
                step.state == "pending", "S-15", f"{name}: {step.state}, then fenced for applying"
            )
            self._need(
                (entry.ordinal, entry.attempt) == (step.ordinal, step.attempt),
                "S-15",
                f"{name}: {entry.attempt} fenced, {step.attempt} was waiting",
            )
        self._need(not step.cancelled, "S-191", f"{name} fenced for applying after its cancel")
        self._need(not sandbox.releasing, "S-15", f"{name} fenced for applying while releasing")
        self._need(
            not (step.unproven and step.spec.effect == "external"),
            "I3",
            f"{name}: an external effect fenced again, nothing shows that it never began",
        )
        step.unproven = True

    def _fenced_to_end(self, step: _Step, entry: e.Fenced) -> None:
        name = entry.step
        self._need(
            step.state == "fenced",
            "S-15",
            f"{name}: {step.state}, then fenced for {entry.direction}",
        )
        self._need(
            (entry.ordinal, entry.attempt) == (step.ordinal, step.attempt),
            "S-15",
            f"{name}: {entry.direction} of {entry.attempt}, the latest is {step.attempt}",
        )
        allowed = {"revoke": ("apply", "revoke", "undo"), "undo": ("revoke", "undo")}
        self._need(
            step.direction in allowed.get(entry.direction, ()),
            "S-15",
            f"{name}: {entry.direction} after {step.direction}",
        )

    def _revoked(self, sandbox: _Sandbox, entry: e.Revoked) -> None:
        step = self._known(sandbox, entry.step, "revoked")
        if step is None:
            return
        self._current(sandbox, entry.epoch, f"{entry.step} revoked")
        self._need(
            step.state == "fenced" and step.direction == "revoke" and entry.attempt == step.attempt,
            "S-203",
            f"{entry.step}: {entry.attempt} revoked, but no such revocation was fenced",
        )
        step.revoked = entry.journal or "revoked"

    def _replaying(self, sandbox: _Sandbox, entry: e.Replaying) -> None:
        name = entry.step
        self._current(sandbox, entry.epoch, f"{name} fenced for applying it again")
        self._need(
            entry.session == sandbox.session != "",
            "I1",
            f"{name} fenced again for session {entry.session!r}, attached is {sandbox.session!r}",
        )
        self._need(entry.no > sandbox.no, "I8", f"{name}: fence {entry.no} after {sandbox.no}")
        sandbox.no = max(sandbox.no, entry.no)
        self._need(
            digest_of(bytes(entry.args)) == entry.digest, "I1", f"{name}: digest of arguments"
        )

    def _of_recovery(self, sandbox: _Sandbox, entry: Any) -> None:
        """Judged by `RecoveryJudge`; here only that it is about the open epoch."""
        epoch = getattr(entry, "epoch", None)
        if epoch is not None:
            self._current(sandbox, epoch, type(entry).__name__)

    def _joined(self, sandbox: _Sandbox, entry: e.Joined) -> None:
        self._check_join(sandbox, entry, "joined")
        step = sandbox.steps.get(entry.step)
        if step is not None:
            step.joined = True

    def _committed_(self, sandbox: _Sandbox, entry: e.Committed) -> None:
        self._check_join(sandbox, entry, "committed")
        self._end(sandbox, entry.step, "committed")

    def _check_join(self, sandbox: _Sandbox, entry: e.Committed | e.Joined, word: str) -> None:
        name, receipt = entry.step, entry.receipt
        step = self._known(sandbox, name, word)
        if step is not None:
            self._need(
                step.state == "fenced" and step.direction == "apply",
                "S-15",
                f"{name}: {step.state} {step.direction}, then {word}",
            )
            waits = step.spec.commit_after != "receipt"
            self._need(
                step.joined == (waits and word == "committed"),
                "I1",
                f"{name}: {word}, and waits for a {step.spec.commit_after}",
            )
            for what, said, want in (
                ("attempt", entry.attempt, step.attempt),
                ("receipt.attempt", receipt.attempt, step.attempt),
                ("receipt.step", receipt.step, name),
                ("receipt.sandbox", receipt.sandbox, entry.sandbox),
                ("receipt.direction", receipt.direction, "apply"),
                ("receipt.no", receipt.no, step.no),
                ("receipt.tool", receipt.tool, step.spec.tool),
                ("receipt.digest", receipt.digest, step.spec.digest),
                ("receipt.epoch", receipt.epoch, step.epoch),
                ("receipt.session", receipt.session, step.session),
            ):
                same = type(said) is type(want) and said == want
                self._need(same, "I1", f"{name}: {what} is {said!r}, the fence's {want!r}")
        self._current(sandbox, receipt.epoch, f"{name} {word}")
        for what, said, want in (
            ("session", receipt.session, sandbox.session),
            ("nonce", receipt.nonce, sandbox.nonce),
            ("instance", receipt.instance, sandbox.instance),
            ("gateway", entry.gateway, sandbox.gateway),
            ("epoch after", receipt.after.epoch, receipt.epoch),
            ("session after", receipt.after.session, receipt.session),
            ("nonce after", receipt.after.nonce, receipt.nonce),
            ("instance after", receipt.after.instance, receipt.instance),
        ):
            same = type(said) is type(want) and said == want and said != ""
            self._need(same, "I1", f"{name}: {what} is {said!r}, not {want!r}")
        self._need(
            receipt.verdict in ("applied", "attested") and receipt.outcome in ("ok", "failed"),
            "I1",
            f"{name}: {word} on a receipt that says {receipt.verdict!r} {receipt.outcome!r}",
        )

    def _compensated_(self, sandbox: _Sandbox, entry: e.Compensated) -> None:
        name = entry.step
        step = self._known(sandbox, name, "compensated")
        if step is None:
            return
        self._need(
            step.state in ("pending", "fenced"), "S-15", f"{name}: {step.state}, then compensated"
        )
        self._need(
            entry.attempt == step.attempt, "S-15", f"{name}: {entry.attempt}, not {step.attempt}"
        )
        self._check_evidence(sandbox, step, entry)
        if entry.evidence in ("never_applied", "undone", "carried") and not step.forgotten:
            step.unproven = False
        if entry.final:
            self._end(sandbox, name, "compensated")
            return
        self._need(step.state == "fenced", "S-15", f"{name}: an attempt ended that was not fenced")
        step.state = "between"
        self._between.append((entry.sandbox, name))

    def _check_evidence(self, sandbox: _Sandbox, step: _Step, entry: e.Compensated) -> None:
        fenced = step.state == "fenced"
        moved = step.epoch != sandbox.epoch or step.session != sandbox.session
        holds = {
            # On a live epoch a dispatch may only be late: the journal must hold the revocation.
            "never_applied": not fenced or step.revoked != "" or step.direction == "undo",
            "lost_with_epoch": fenced and (step.epoch != sandbox.epoch or not sandbox.open),
            "undone": fenced
            and (step.direction == "undo" or step.revoked in ("rolled_back", "undone")),
            "carried": fenced and moved and not entry.final,
        }.get(entry.evidence, False)
        self._need(
            holds,
            "S-203" if entry.evidence == "never_applied" else "S-15",
            f"{entry.step}: {entry.evidence} is not what the ledger shows of {entry.attempt}",
        )
        self._need(
            not (entry.evidence == "lost_with_epoch" and step.spec.effect == "external"),
            "I3",
            f"{entry.step}: an external effect is not lost with a disk",
        )
        # An older point's journal, or that of a tree that a checkpoint takes the place of, may not
        # know that it began.
        self._need(
            not (step.forgotten and step.spec.effect == "external"),
            "I3",
            f"{entry.step}: an external effect, {entry.evidence} after another disk may have come",
        )

    def _cancelled(self, sandbox: _Sandbox, entry: e.Cancelled) -> None:
        step = self._known(sandbox, entry.step, "cancelled")
        if step is not None:
            self._need(
                step.state in ("pending", "fenced"),
                "S-15",
                f"{entry.step}: {step.state}, cancelled",
            )
            step.cancelled = True

    def _indeterminate(self, sandbox: _Sandbox, entry: e.Indeterminate) -> None:
        step = self._known(sandbox, entry.step, "indeterminate")
        if step is not None:
            self._need(
                step.state == "fenced", "S-15", f"{entry.step}: {step.state}, then indeterminate"
            )
            step.state = "indeterminate"

    def _resolved(self, sandbox: _Sandbox, entry: e.Resolved) -> None:
        step = self._known(sandbox, entry.step, "resolved")
        if step is not None:
            self._need(
                step.state == "indeterminate", "S-15", f"{entry.step}: {step.state}, then resolved"
            )
        self._end(sandbox, entry.step, entry.state)

    def _receipt_refused(self, _sandbox: _Sandbox, _entry: e.ReceiptRefused) -> None:
        self._receipts_refused += 1

    def _end(self, sandbox: _Sandbox, name: str, state: str) -> None:
        if sandbox.final.get(name) is not None:
            self._need(
                False,
                "I3" if state == "committed" else "S-15",
                f"{name} {state}, it was {sandbox.final[name]}",
            )
        sandbox.steps.pop(name, None)
        sandbox.final[name] = state
        if len(sandbox.final) > limits.FINISHED_WINDOW:
            del sandbox.final[next(iter(sandbox.final))]
        if state == "committed":
            self._committed += 1
        else:
            self._compensated += 1


_JUDGES: dict[type, Callable[[ShardAuditor, _Sandbox, Any], None]] = {
    e.Created: ShardAuditor._created,
    e.RebuildIntended: ShardAuditor._rebuild_intended,
    e.Requested: ShardAuditor._requested,
    e.AssignedEntry: ShardAuditor._assigned,
    e.CreateFailedEntry: ShardAuditor._create_failed,
    e.EpochOpened: ShardAuditor._epoch_opened,
    e.Marking: ShardAuditor._marking,
    e.Attached: ShardAuditor._attached,
    e.Detached: ShardAuditor._detached,
    e.EpochClosed: ShardAuditor._epoch_closed,
    e.Condemned: ShardAuditor._condemned,
    e.Parked: ShardAuditor._parked,
    e.Fenced: ShardAuditor._fenced,
    e.Revoked: ShardAuditor._revoked,
    e.Joined: ShardAuditor._joined,
    e.Committed: ShardAuditor._committed_,
    e.Compensated: ShardAuditor._compensated_,
    e.Cancelled: ShardAuditor._cancelled,
    e.Indeterminate: ShardAuditor._indeterminate,
    e.Resolved: ShardAuditor._resolved,
    e.ReceiptRefused: ShardAuditor._receipt_refused,
    e.HolderAdded: ShardAuditor._holder_added,
    e.HolderRemoved: ShardAuditor._holder_removed,
    e.Claimed: ShardAuditor._claimed,
    e.Unclaimed: ShardAuditor._unclaimed,
    e.Releasing: ShardAuditor._releasing,
    e.StopAnsweredEntry: ShardAuditor._stop_answered,
    e.GoneEntry: ShardAuditor._gone,
    e.ToldEntry: ShardAuditor._told,
    e.Replaying: ShardAuditor._replaying,
    e.CheckpointedEntry: ShardAuditor._of_recovery,
    e.RestoredEntry: ShardAuditor._of_recovery,
    e.Replayed: ShardAuditor._of_recovery,
    e.OwedTold: ShardAuditor._of_recovery,
    e.RecoveryStopped: ShardAuditor._of_recovery,
    e.RecoveryDecided: ShardAuditor._of_recovery,
    e.Recovered: ShardAuditor._of_recovery,
    e.CheckpointAsked: ShardAuditor._of_recovery,
    e.CheckpointingEntry: ShardAuditor._of_recovery,
    e.CheckpointFailedEntry: ShardAuditor._of_recovery,
    e.RestoreFailedEntry: ShardAuditor._of_recovery,
    e.Preempted: ShardAuditor._of_recovery,
}
