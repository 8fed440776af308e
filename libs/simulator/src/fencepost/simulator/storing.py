"""
Checkpoints of simulated disks: what a toolhost takes and puts back, and the store outside.

The real ones move chunks; here a workspace is one value, that the store may lose or spoil. What it
holds of each step's effect travels with it, as the bytes do.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import msgspec
from fencepost.core.steps import digest_of

if TYPE_CHECKING:
    from fencepost.core.sandbox.orders import CheckpointOrder, RestoreOrder
    from fencepost.simulator.toolhost import Toolhost

Spoiled: TypeAlias = Literal["", "missing", "corrupt"]

YOUNG_MS: Final = 14_000
"""Longer than any order is on its way here, as the real one is: one to drop that another session
gets late knows nothing of what was stored meanwhile."""


class Workspace(msgspec.Struct, frozen=True):
    """What a checkpoint holds: the files, and the truth about whose effects they are."""

    files: dict[str, str]
    held: dict[str, int]

    @property
    def manifest(self) -> str:
        return digest_of(msgspec.json.encode(self, order="deterministic"))


class Store:
    """The store of all checkpoints, by namespace and manifest."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Workspace] = {}
        self._spoiled: dict[tuple[str, str], Spoiled] = {}
        self._stored_ms: dict[tuple[str, str], int] = {}

    def put(
        self, namespace: str, workspace: Workspace, now_ms: int, *, spoiled: Spoiled = ""
    ) -> str:
        key = (namespace, workspace.manifest)
        self._kept[key] = workspace
        self._stored_ms[key] = now_ms
        self._spoiled[key] = spoiled
        return workspace.manifest

    def get(self, namespace: str, manifest: str) -> Workspace | Spoiled:
        """What restoring reads: the workspace, or why there is none."""
        key = (namespace, manifest)
        if key not in self._kept:
            return "missing"
        return self._spoiled[key] or self._kept[key]

    def truth(self, namespace: str, manifest: str) -> Workspace | None:
        """What was stored under that name, whatever became of it."""
        return self._kept.get((namespace, manifest))

    def prune(self, namespace: str, keep: Collection[str], now_ms: int) -> None:
        """Drops all others that are not young; everything, where none is kept."""
        before_ms = now_ms - YOUNG_MS if keep else now_ms
        for key in [k for k in self._kept if k[0] == namespace and k[1] not in keep]:
            if self._stored_ms[key] <= before_ms:
                del self._kept[key], self._spoiled[key], self._stored_ms[key]


class TakeCall(NamedTuple):
    order: CheckpointOrder


class RestoreCall(NamedTuple):
    order: RestoreOrder
    workspace: Workspace


class Taken(NamedTuple):
    """A toolhost's answer to a `TakeCall`, with the nonce that it read from its marker."""

    order: CheckpointOrder
    workspace: Workspace
    nonce: str
    journal_seq: int


class PutBack(NamedTuple):
    """A toolhost's answer to a `RestoreCall`; `reason` is "" where it was done."""

    order: RestoreOrder
    journal_seq: int
    reason: Literal["", "not_empty"] = ""


def take(toolhost: Toolhost, call: TakeCall) -> None:
    """Between two steps, under the lock."""
    contents, order = toolhost.contents, call.order
    marker = contents.marker
    if marker is None or (marker.epoch, marker.session) != (order.epoch, order.session):
        return
    held = {step: times for step, times in contents.held.items() if times}
    workspace = Workspace(dict(contents.files), held)
    if toolhost.crashes_at("checkpointing"):
        return
    toolhost.tell("taken", Taken(order, workspace, marker.nonce, contents.journal_seq))


def put_back(toolhost: Toolhost, call: RestoreCall) -> None:
    """
    Makes the disk what the checkpoint holds; what was begun and not finished is begun anew.

    Never what this epoch's own steps were applied to: a late repeat would take them away.
    """
    contents, order = toolhost.contents, call.order
    marker = contents.marker
    if marker is None or (marker.epoch, marker.session) != (order.epoch, order.session):
        return
    done = (order.checkpoint, order.manifest)
    same = contents.restored == done and not contents.restoring
    if same and contents.restored_in == order.epoch:
        pass
    elif contents.applied_in == order.epoch:
        toolhost.tell("put back", PutBack(order, contents.journal_seq, "not_empty"))
        return
    elif not same or contents.applied_in >= contents.restored_in:
        contents.restoring = True
        contents.files, contents.held, contents.steps = {}, {}, {}
        if toolhost.crashes_at("restoring"):
            return
        contents.files = dict(call.workspace.files)
        contents.held = dict(call.workspace.held)
        contents.restoring = False
    contents.restored, contents.restored_in = done, order.epoch
    for step in contents.held:
        toolhost.observer.wrote(toolhost, step, restored=True)
    if toolhost.crashes_at("restored"):
        return
    toolhost.tell("put back", PutBack(order, contents.journal_seq))
