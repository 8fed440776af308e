"""
What gateways report about sandboxes, and sweepers propose: durable inputs of a sandbox's shard.

A fact says what was seen, never what follows from it; the shard decides that.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from fencepost.core.receipts import Marker


class Ref(msgspec.Struct, frozen=True, kw_only=True):
    """
    The provider's name of one running thing.

    The same native id on another authority, or with another instance, is another sandbox.
    """

    authority: str
    provider: str
    native_id: str
    instance: str


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a provider can show. `generation` False: no mutating step is ever admitted."""

    generation: bool = True
    observes_gone: bool = True
    readonly_commands: bool = False
    isolation: str = "none"
    power_loss_is_new_instance: bool = True


class Assigned(msgspec.Struct, frozen=True, kw_only=True, tag="assigned", tag_field="kind"):
    """The provider named the sandbox for `create_id`, before boot and health."""

    sandbox: str
    create_id: str
    gateway: str
    ref: Ref
    capabilities: Capabilities


class CreateFailed(
    msgspec.Struct, frozen=True, kw_only=True, tag="create_failed", tag_field="kind"
):
    """
    The create did not happen, or may have (`ambiguous`): then `find` settles it later.

    A definite failure is asked again by the shard, with a delay. It is about one call: another
    one under the same id may be on its way. `settled`: none is, and no later one can make anything.
    """

    sandbox: str
    create_id: str
    gateway: str
    reason: str
    ambiguous: bool
    settled: bool = False


class Found(msgspec.Struct, frozen=True, kw_only=True, tag="found", tag_field="kind"):
    """
    A gateway opened a channel and read the disk: the marker, or None where there is none.

    `session` is the new attachment's id and `nonce_fresh` a nonce for a new generation, both
    minted by the gateway, so the shard needs no randomness. `asked` is that of the order: a
    reading that was taken before something else was learned of the disk proves nothing. None: by
    hand, taken as it is.
    """

    sandbox: str
    gateway: str
    session: str
    ref: Ref
    marker: Marker | None
    journal_seq: int
    nonce_fresh: str
    asked: int | None = None


class Marked(msgspec.Struct, frozen=True, kw_only=True, tag="marked", tag_field="kind"):
    """The marker on the disk now says this; every older tool process was ended first."""

    sandbox: str
    gateway: str
    session: str
    epoch: int
    nonce: str
    instance: str
    journal_seq: int


class AttachFailed(
    msgspec.Struct, frozen=True, kw_only=True, tag="attach_failed", tag_field="kind"
):
    """
    A channel, or the marking, failed.

    `observed`: what the provider says of the instance; only `gone` is evidence of a loss.
    `condemned`: the former epoch's processes could not be shown to be gone.
    """

    sandbox: str
    gateway: str
    session: str
    ref: Ref
    reason: str
    observed: Literal["present", "terminating", "gone", "unknown"]
    condemned: bool = False


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag="lost", tag_field="kind"):
    """The channel of an attached session ended; `observed` as in `AttachFailed`."""

    sandbox: str
    gateway: str
    session: str
    epoch: int
    ref: Ref
    reason: str
    observed: Literal["present", "terminating", "gone", "unknown"]


class StopAnswered(
    msgspec.Struct, frozen=True, kw_only=True, tag="stop_answered", tag_field="kind"
):
    """The provider's answer to a stop: a signal about a request, not about a sandbox."""

    sandbox: str
    gateway: str
    ref: Ref
    answer: Literal[
        "accepted",
        "refused",
        "not_found",
        "refused_other_instance",
        "timeout",
        "unreachable",
        "unconfigured",
        "unsupported",
    ]
    detail: str = ""


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag="gone", tag_field="kind"):
    """The provider was observed to have this instance no more."""

    sandbox: str
    gateway: str
    ref: Ref


class Stray(msgspec.Struct, frozen=True, kw_only=True, tag="stray", tag_field="kind"):
    """
    A sweeper's proposal: a provider lists this thing under this sandbox's label, and nothing that
    it was told vouches for it. The shard, which knows, decides.

    `create_id`, `dag` and `acquisition` are the labels that it was made with, "" where absent.
    """

    sandbox: str
    ref: Ref
    create_id: str = ""
    dag: str = ""
    acquisition: str = ""
    observes_gone: bool = True


class Orphaned(msgspec.Struct, frozen=True, kw_only=True, tag="orphaned", tag_field="kind"):
    """
    A sweeper's proposal: this holder's DAG, asked with proof, does not have this acquisition.

    An acquisition's id is used once and is in its DAG before the sandbox's shard hears of it, so
    what the DAG does not have now it never will.
    """

    sandbox: str
    dag: str
    acquisition: str
    evidence: str


class Checkpointed(msgspec.Struct, frozen=True, kw_only=True, tag="checkpointed", tag_field="kind"):
    """
    The workspace is stored outside the sandbox, every part of it verified, under `manifest`.

    `journal_seq` is the disk's when the snapshot was taken, between two steps. `sent_bytes` is
    what was not in the store before.
    """

    sandbox: str
    gateway: str
    session: str
    epoch: int
    nonce: str
    checkpoint: str
    manifest: str
    journal_seq: int
    files: int = 0
    size_bytes: int = 0
    sent_bytes: int = 0
    reason: str = ""


class CheckpointFailed(
    msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_failed", tag_field="kind"
):
    """Nothing was stored that anybody may name; the disk and former checkpoints are untouched."""

    sandbox: str
    gateway: str
    session: str
    epoch: int
    checkpoint: str
    reason: Literal["no_space", "io_error", "unreachable", "busy", "unsupported", "too_large"]
    detail: str = ""


class Restored(msgspec.Struct, frozen=True, kw_only=True, tag="restored", tag_field="kind"):
    """The workspace is what the checkpoint holds, whole, and the disk's journal says so."""

    sandbox: str
    gateway: str
    session: str
    epoch: int
    checkpoint: str
    manifest: str
    journal_seq: int
    files: int = 0
    size_bytes: int = 0


class RestoreFailed(
    msgspec.Struct, frozen=True, kw_only=True, tag="restore_failed", tag_field="kind"
):
    """The workspace is not what the checkpoint holds; the disk's journal says it is unfinished."""

    sandbox: str
    gateway: str
    session: str
    epoch: int
    checkpoint: str
    reason: Literal[
        "missing", "corrupt", "no_space", "io_error", "unreachable", "unsupported", "not_empty"
    ]
    detail: str = ""


class Preempting(msgspec.Struct, frozen=True, kw_only=True, tag="preempting", tag_field="kind"):
    """The provider announced that it will take this instance away, in `grace_ms` or later."""

    sandbox: str
    gateway: str
    session: str
    epoch: int
    ref: Ref
    grace_ms: int = 0


Fact: TypeAlias = (
    Assigned
    | CreateFailed
    | Found
    | Marked
    | AttachFailed
    | Lost
    | StopAnswered
    | Gone
    | Stray
    | Orphaned
    | Checkpointed
    | CheckpointFailed
    | Restored
    | RestoreFailed
    | Preempting
)
