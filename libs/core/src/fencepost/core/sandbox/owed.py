"""
What a new generation owes: which committed steps, in which order, and how a list is checked.

The state keeps a count and a sum, never the list. The shard's owner reads the list in the ledger
with `OwedList` and feeds it to the machine, which checks order, count and sum, so that a list that
leaves one out, or has one twice, never ends a recovery.

Rule 1: the order is the one in which disks saw the effects (S-208), not the ledger's.
Rule 2: a step that is external is never owed; a step that a checkpoint holds is not owed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from fencepost.core.machine import Place
from fencepost.core.receipts import Receipt
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import inputs
from fencepost.core.sandbox.state import Checkpoint, Key, Sandbox

_CUT: Final = "cut"
_MASK: Final = (1 << 62) - 1
# What a gateway leaves of a receipt that is too long: everything that changed is left out.
_CUT_DETAIL: Final = "changes: see the stored receipt"


def effect_of(receipt: Receipt) -> str:
    """What came of a call, as far as a receipt shows it: its outcome, and what changed to what."""
    changes = receipt.changes
    if not changes:
        cut = receipt.detail.startswith(_CUT_DETAIL)
        return f"{receipt.outcome}:{_CUT if cut else ''}"
    listed = [f"{c.path}\0{c.after or ''}\0{c.mode}" for c in changes]
    listed.sort()
    text = "\1".join(listed)
    return f"{receipt.outcome}:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def is_same(expected: str, found: str) -> bool:
    """Whether two effects may be the same: a list that was cut says nothing against it."""
    if expected == found:
        return True
    outcome, _, digest = expected.partition(":")
    other, _, with_digest = found.partition(":")
    return outcome == other and _CUT in (digest, with_digest)


def item_of(key: Key, attempt: str, digest: str, effect: str) -> int:
    """One owed step, as it counts in a sum."""
    text = f"{key[0]}\0{key[1]}\0{key[2]}\0{attempt}\0{digest}\0{effect}"
    found = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(found[:8], "big") & _MASK


def add(total: int, item: int) -> int:
    """Adds to a sum; the order does not matter, so it can be kept in the ledger's order."""
    return (total + item) & _MASK


def written_seq(receipt: Receipt) -> int:
    """The journal sequence at which the effect was written."""
    return (
        receipt.of_seq if receipt.verdict == "attested" and receipt.of_seq else receipt.journal_seq
    )


def line_of(sandbox: Sandbox, seq: int) -> int:
    """
    The line that wrote at this journal sequence of the present disk.

    An older point of a disk that came back holds writes of its former line; what it wrote since is
    a line of its own, though the journal counts on.
    """
    return _line_at(sandbox.lines, seq, sandbox.epoch)


def _line_at(lines: Sequence[tuple[int, int]], seq: int, default: int) -> int:
    found = default
    for line, start in lines:
        if start < seq:
            found = line
    return found


def key_of(line: int, receipt: Receipt) -> Key:
    return line, written_seq(receipt), receipt.step


def is_covered(checkpoint: Checkpoint | None, line: int, seq: int) -> bool:
    """
    Whether the newest checkpoint holds what was written there.

    It was taken of a disk that may have gone on from an older point: what a former line had written
    up to that point is in it as well, what that line wrote later is not.
    """
    if checkpoint is None or seq > checkpoint.seq:
        return False
    return line == _line_at(checkpoint.lines, seq, checkpoint.line)


class Owed(NamedTuple):
    """One owed step; its arguments are in the ledger at `spec_at`."""

    key: Key
    step: str
    attempt: str
    tool: str
    digest: str
    effect: str
    spec_at: Place


class Wanted(NamedTuple):
    """What the machine waits for of its owner, about one sandbox."""

    sandbox: str
    epoch: int
    after: int
    checkpoint: Checkpoint | None
    key: Key
    tell: bool


class _Step(NamedTuple):
    tool: str
    digest: str
    effect: str
    at: Place


class OwedList:
    """
    A fold of one sandbox's entries from `Sandbox.owed_after` on: what is owed at their end.

    Place each entry as the ledger has it. Other sandboxes' entries are passed over.
    """

    def __init__(self, sandbox: str, checkpoint: Checkpoint | None) -> None:
        self.sandbox = sandbox
        self._base = Place(*checkpoint.at) if checkpoint is not None else Place(0, -1)
        self._checkpoint = checkpoint
        self._steps: dict[str, _Step] = {}
        self._owed: list[Owed] = []
        self.accepted: dict[str, str] = {}

    def take(self, entry: Any, place: Place) -> None:
        if getattr(entry, "sandbox", None) != self.sandbox:
            return
        match entry:
            case e.Parked() | e.Fenced() if entry.spec is not None:
                spec = entry.spec
                self._steps[entry.step] = _Step(spec.tool, spec.digest, spec.effect, place)
            case e.Committed():
                self._committed(entry, place)
            case e.Compensated() if entry.final:
                self._steps.pop(entry.step, None)
            case e.Resolved():
                self._steps.pop(entry.step, None)
            case e.Replayed() if entry.accepted and entry.verdict:
                self.accepted[entry.step] = entry.effect
            case e.Recovered() if entry.mode == "told":
                self._owed = [one for one in self._owed if one.key <= entry.kept]
            case _:
                pass

    def _committed(self, entry: e.Committed, place: Place) -> None:
        step = self._steps.pop(entry.step, None)
        line = entry.line or entry.receipt.epoch
        if (
            step is None
            or step.effect != "workspace"
            or place < self._base
            or is_covered(self._checkpoint, line, written_seq(entry.receipt))
        ):
            return
        key = key_of(line, entry.receipt)
        effect = effect_of(entry.receipt)
        self._owed.append(
            Owed(key, entry.step, entry.attempt, step.tool, step.digest, effect, step.at)
        )

    def after(self, key: Key) -> list[Owed]:
        """What is owed and comes after `key`, in the order in which it is applied again."""
        return sorted(one for one in self._owed if one.key > key)


def wanted(sandbox: Sandbox) -> Wanted | None:
    """What the machine waits for of its owner, or None."""
    recovering = sandbox.recovering
    if recovering is None or not sandbox.live:
        return None
    replays = recovering.phase == "replay" and recovering.replay is None
    if not replays and recovering.phase != "tell":
        return None
    return Wanted(
        sandbox.id,
        sandbox.epoch,
        sandbox.owed_after,
        sandbox.checkpoint,
        recovering.key,
        recovering.phase == "tell",
    )


def page_of(want: Wanted, owing: Sequence[Owed]) -> inputs.OwedPage:
    """The input that tells these steps."""
    return inputs.OwedPage(
        sandbox=want.sandbox,
        epoch=want.epoch,
        items=[
            inputs.OwedItem(
                key=one.key,
                step=one.step,
                attempt=one.attempt,
                tool=one.tool,
                digest=one.digest,
                effect=one.effect,
            )
            for one in owing
        ],
    )


def step_of(want: Wanted, one: Owed, first: Any, accepted: dict[str, str]) -> inputs.OwedStep:
    """The input that has this step applied again; `first` is the step's first entry."""
    return inputs.OwedStep(
        sandbox=want.sandbox,
        epoch=want.epoch,
        key=one.key,
        step=one.step,
        attempt=one.attempt,
        tool=one.tool,
        digest=one.digest,
        args=first.spec.args,
        effect=one.effect,
        accepted=accepted.get(one.step, ""),
    )
