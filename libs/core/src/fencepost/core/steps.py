"""
What a client asks for: a step command, before and after admission.

`StepCommand` is the wire shape; `StepSpec` is what admission made of it (durations absolute,
defaults filled in, arguments fixed byte for byte with their digest).
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from fencepost.core import ids

Policy: TypeAlias = Literal["retry", "reject"]
CommitAfter: TypeAlias = Literal["receipt", "heartbeat", "checkpoint"]
Effect: TypeAlias = Literal["workspace", "external"]


def canonical(args: Any) -> bytes:
    """
    Writes arguments as the exact bytes that are digested, sent and compared.

    Keys sorted, so two spellings of one object are one command (duplicates are compared by it).
    """
    return msgspec.json.encode(args, order="deterministic")


def digest_of(args: bytes) -> str:
    """The digest of arguments, over their exact bytes."""
    return "sha256:" + hashlib.sha256(args).hexdigest()


_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def is_digest(value: object) -> bool:
    """Tells whether `value` is written as the digests of contents are."""
    return type(value) is str and _DIGEST.fullmatch(value) is not None


class Compensation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """
    How an effect is taken back.

    `pre_image`: the toolhost restores what it replaced (file tools only).
    `command`: the caller's own undo, `run_command` arguments in `args`; it must be idempotent.
    """

    kind: Literal["pre_image", "command"]
    args: msgspec.Raw = msgspec.Raw(b"")


class StepCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    One tool call, as published on `fp.v1.cmd.step.<sandbox>.<step>`.

    `sandbox` and `step` may be left out where the subject names them; when both do, they must be
    equal. `deadline_ms` is a duration from admission.
    """

    tool: str
    args: msgspec.Raw
    sandbox: str = ""
    step: str = ""
    compensation: Compensation | None = None
    on_moved_epoch: Policy = "retry"
    attempts_max: int | None = None
    deadline_ms: int | None = None
    commit_after: CommitAfter = "receipt"
    effect: Effect = "workspace"


class StepSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step as admitted. `args` are the exact bytes that `digest` covers."""

    tool: str
    args: msgspec.Raw
    digest: str
    compensation: Compensation
    attempts_max: int
    deadline_at_ms: int
    on_moved_epoch: Policy = "retry"
    commit_after: CommitAfter = "receipt"
    effect: Effect = "workspace"


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint of another sandbox that the first generation starts from."""

    sandbox: str
    checkpoint: str
    manifest: str


class SandboxSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """
    What a sandbox is made of.

    `options` are the provider's own. `rebuild`: whether a lost generation is replaced by itself.
    `checkpoint_every_steps` and `checkpoint_every_s`: 0 is never by itself. `recovery` is what a
    generation does about committed steps that its disk lacks, `while_recovering` what becomes of
    new steps meanwhile.
    """

    provider: str = "process"
    image: str = ""
    network: bool = False
    memory_mb: int = 512
    processes: int = 128
    rebuild: bool = True
    options: dict[str, str] = {}
    checkpoint_every_steps: int = 0
    checkpoint_every_s: int = 0
    recovery: Literal["replay", "tell"] = "replay"
    while_recovering: Literal["wait", "refuse"] = "wait"
    origin: Origin | None = None


def spec_problem(spec: SandboxSpec) -> tuple[str, str] | None:
    """The field of a spec that is out of its bounds, and what was expected; None where none is."""
    if not 16 <= spec.memory_mb <= 1 << 20:
        return "spec.memory_mb", "expected 16 to 1048576"
    if not 1 <= spec.processes <= 1 << 16:
        return "spec.processes", "expected 1 to 65536"
    if not 0 <= spec.checkpoint_every_steps <= 1_000_000:
        return "spec.checkpoint_every_steps", "expected 0 to 1000000"
    if not 0 <= spec.checkpoint_every_s <= 24 * 3600:
        return "spec.checkpoint_every_s", "expected 0 to 86400"
    origin = spec.origin
    if origin is not None:
        if not ids.is_id(origin.sandbox):
            return "spec.origin.sandbox", f"expected {ids.ID_PATTERN}"
        if not ids.is_id(origin.checkpoint):
            return "spec.origin.checkpoint", f"expected {ids.ID_PATTERN}"
        if not is_digest(origin.manifest):
            return "spec.origin.manifest", "expected sha256: and 64 hexadecimal digits"
    return None


class SandboxCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Creates a sandbox by hand, as published on `fp.v1.cmd.create.<sandbox>.<id>`.

    It is kept by the claim `operator` until `fp.v1.cmd.release`; `reason` is recorded with it.
    """

    spec: SandboxSpec = SandboxSpec()
    sandbox: str = ""
    reason: str = ""


class CancelCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cancels one step, as published on `fp.v1.cmd.cancel.<sandbox>.<step>`."""

    sandbox: str = ""
    step: str = ""
    reason: str = ""


Who = Annotated[str, msgspec.Meta(min_length=1)]
"""Whose word it is that is recorded: nobody's is none."""


class ResolveCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    An operator's word on an indeterminate step, on `fp.v1.cmd.resolve.<sandbox>.<step>`.

    `as_`: what the operator found to be true of the world. `who` and `note` are recorded.
    """

    as_: Literal["committed", "compensated"] = msgspec.field(name="as")
    who: Who
    note: str
    sandbox: str = ""
    step: str = ""


class ReleaseCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ends an operator's claim, on `fp.v1.cmd.release.<sandbox>.<id>`; the last reason releases."""

    sandbox: str = ""


class ClaimCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Keeps a sandbox whoever lets go of it, on `fp.v1.cmd.claim.<sandbox>.<claim>`.

    For work that outlives its DAG. The claim's id is used once; `reason` is recorded with it.
    """

    sandbox: str = ""
    reason: str = ""


class UnclaimCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ends a claim, on `fp.v1.cmd.unclaim.<sandbox>.<claim>`; the last reason releases."""

    sandbox: str = ""


class CheckpointCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks for a checkpoint, on `fp.v1.cmd.checkpoint.<sandbox>.<id>`; the id becomes its id."""

    sandbox: str = ""
    reason: str = ""


class RecoverCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    An operator's way out of a recovery that stopped, on `fp.v1.cmd.recover.<sandbox>.<id>`.

    `accept`: the disk as it is, and on with what is still owed. `tell`: what is still owed is given
    up and listed. `discard`: this disk is given up, and the recovery begins anew on another one.
    """

    decision: Literal["accept", "tell", "discard"]
    who: Who
    note: str = ""
    sandbox: str = ""
