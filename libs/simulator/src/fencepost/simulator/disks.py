"""
Simulated disks: marker, journal, files, and what truly happened on them.

`held` is the truth that no program of the system reads: how often each step's effect is on these
bytes. It travels with a snapshot, as the bytes do. The outside world counts external effects.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from fencepost.core.receipts import Receipt
from fencepost.simulator.storing import Store
from fencepost.simulator.world import Process

# Of a point that came back: nobody has read it yet, it was read, it was marked ("").
Unmet = Literal["unread", "unmarked", ""]
RecordState = Literal["", "open", "done", "broken", "rolled"]


class Record(msgspec.Struct, kw_only=True):
    """What the journal says of one fence. `before` is the pre-image of a file tool."""

    key: str
    attempt: str
    direction: str
    step: str
    no: int
    tool: str = ""
    digest: str = ""
    of: str = ""
    seq: int = 0
    state: RecordState = ""
    verdict: str = ""
    is_command: bool = False
    revoked: bool = False
    ended: bool = False
    undone: bool = False
    path: str = ""
    before: str | None = None
    receipt: Receipt | None = None


class Marker(msgspec.Struct, frozen=True):
    epoch: int
    session: str
    nonce: str


class Contents(msgspec.Struct, kw_only=True):
    """
    The bytes of one disk. `order` is the order in which the journal's records began.

    `restoring`: begun and not finished. `restored` is the checkpoint that was put back, in the
    epoch `restored_in`; `applied_in` the last epoch in which a step was begun.
    """

    marker: Marker | None = None
    journal: dict[str, Record] = {}
    order: list[str] = []
    steps: dict[str, str] = {}
    journal_seq: int = 0
    files: dict[str, str] = {}
    held: dict[str, int] = {}
    applied_in: int = 0
    restoring: bool = False
    restored: tuple[str, str] = ("", "")
    restored_in: int = 0

    def copy(self) -> Contents:
        return Contents(
            marker=self.marker,
            journal={key: msgspec.structs.replace(r) for key, r in self.journal.items()},
            order=list(self.order),
            steps=dict(self.steps),
            journal_seq=self.journal_seq,
            files=dict(self.files),
            held=dict(self.held),
            applied_in=self.applied_in,
            restoring=self.restoring,
            restored=self.restored,
            restored_in=self.restored_in,
        )

    def record(self, key: str, *, attempt: str, direction: str, step: str, no: int) -> Record:
        record = self.journal.get(key)
        if record is None:
            record = Record(key=key, attempt=attempt, direction=direction, step=step, no=no)
            self.journal[key] = record
            self.order.append(key)
        return record

    def hold(self, step: str, by: int) -> None:
        self.held[step] = self.held.get(step, 0) + by


class Disk:
    """
    One disk, whatever instance it is mounted in. `holder` has its lock, `waiters` want it.

    `pulled` is set when it is gone for good: whatever still runs on it can reach nothing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.contents = Contents()
        self.snapshots: list[Contents] = []
        self.holder: object | None = None
        self.waiters: list[object] = []
        self.users: list[Process] = []
        self.pulled = False
        self.unmet: Unmet = ""

    def roll_back(self, older: list[Contents], *, spared: object) -> None:
        """
        Puts the last of `older` in place beneath what runs on it.

        Only `spared` lives on: an older point makes the fences of its own session valid again, and
        a toolhost of that session that still had one waiting could not know.
        """
        self.unmet = "unread"
        self.snapshots = older
        self.contents = older[-1].copy()
        for user in list(self.users):
            if user is not spared and user.alive:
                user.kill()


class Outside:
    """The world beyond all sandboxes: how often each external step took effect, and the store."""

    def __init__(self) -> None:
        self.store = Store()
        self.done: dict[str, int] = {}
        self.undone: dict[str, int] = {}

    def apply(self, step: str) -> None:
        self.done[step] = self.done.get(step, 0) + 1

    def undo(self, step: str) -> None:
        self.undone[step] = self.undone.get(step, 0) + 1
