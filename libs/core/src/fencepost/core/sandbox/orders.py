"""What a sandbox's shard asks of a gateway: the messages inside effects."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from fencepost.core.facts import Ref
from fencepost.core.receipts import Direction
from fencepost.core.steps import SandboxSpec


class Fence(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a write must carry, checked under the tool.

    `no` rises with every fence of the sandbox, so that a disk can tell a fence that it forgot
    from one that it never saw.
    """

    sandbox: str
    epoch: int
    session: str
    attempt: str
    no: int
    direction: Direction


class Dispatch(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="dispatch"
):
    """
    A fenced call for a toolhost. `fence.direction` says which: apply, replay, undo or revoke.

    A replay applies a committed step again on a later disk; its fence's attempt is of its own.

    `args` are the exact bytes that `digest` covers; for an undo they are the caller's own undo
    command's, or none (`null`, sent as no bytes) for a restore from the pre-image, and `of` is
    the attempt to take back.
    """

    fence: Fence
    step: str
    tool: str
    digest: str
    args: msgspec.Raw = msgspec.Raw(b"null")
    effect: Literal["workspace", "external"] = "workspace"
    of: str = ""


class CreateOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="create"):
    """Create, or find again, under this id. Idempotent by `create_id`."""

    sandbox: str
    create_id: str
    spec: SandboxSpec
    labels: dict[str, str]


class AttachOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="attach"):
    """
    Open a channel in a new session, read the disk's marker and report `found`.

    `asked` rises with all that the shard learns about the sandbox's disk; the report repeats it.
    One that is not above that of the session at hand was answered already.
    """

    sandbox: str
    ref: Ref
    spec: SandboxSpec
    asked: int = 0


class MarkOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="mark"):
    """Write the marker through this session's toolhost, and report `marked`."""

    sandbox: str
    session: str
    epoch: int
    nonce: str


class StopOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stop"):
    """
    Stop this instance, then observe it; report `stop_answered` and, when seen, `gone`.

    Without a ref: find what `create_id` made, and stop that.
    """

    sandbox: str
    create_id: str
    ref: Ref | None


class CheckpointOrder(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="checkpoint"
):
    """
    Store the workspace as it is now; report `checkpointed` or `checkpoint_failed`.

    `base` is the manifest of the newest checkpoint in this sandbox's own namespace, or "": what it
    names is stored already. Given only while nothing that could write is under way.
    """

    sandbox: str
    epoch: int
    session: str
    checkpoint: str
    base: str = ""
    reason: str = ""


class RestoreOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="restore"):
    """
    Make the workspace what this checkpoint holds; report `restored` or `restore_failed`.

    `namespace` is the sandbox under whose name the chunks are stored: its own, or a fork's origin.
    On a disk whose journal already holds this restore, nothing is touched.
    """

    sandbox: str
    epoch: int
    session: str
    checkpoint: str
    manifest: str
    namespace: str


class PruneOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="prune"):
    """
    Drop what none of these manifests names from this sandbox's namespace. Idempotent, unanswered.

    Never while a checkpoint of this sandbox is being taken.
    """

    sandbox: str
    keep: list[str]


Order: TypeAlias = (
    Dispatch
    | CreateOrder
    | AttachOrder
    | MarkOrder
    | StopOrder
    | CheckpointOrder
    | RestoreOrder
    | PruneOrder
)
