"""The inputs of the sandbox machine: commands, receipts, facts, time; and its volatile hints."""

from __future__ import annotations

import msgspec
from fencepost.core.receipts import Receipt
from fencepost.core.steps import (
    CancelCommand,
    CheckpointCommand,
    ClaimCommand,
    RecoverCommand,
    ReleaseCommand,
    ResolveCommand,
    SandboxCommand,
    StepCommand,
    UnclaimCommand,
)


class CommandReceived(msgspec.Struct, frozen=True, kw_only=True):
    """
    A command that was decoded and whose ids agree with its subject.

    `digest` is that of a step's arguments, over their exact bytes; else "".
    """

    sandbox: str
    id: str
    command: (
        StepCommand
        | SandboxCommand
        | CancelCommand
        | ResolveCommand
        | ReleaseCommand
        | ClaimCommand
        | UnclaimCommand
        | CheckpointCommand
        | RecoverCommand
    )
    digest: str = ""


class CommandMalformed(msgspec.Struct, frozen=True, kw_only=True):
    """A command that is addressed but cannot be taken: the reason, and the field that is wrong."""

    sandbox: str
    id: str
    command: str
    reason: str
    field: str = ""
    detail: str = ""


class ReceiptReceived(msgspec.Struct, frozen=True, kw_only=True):
    """
    A stamped receipt. `receipt` is None when its shape was wrong, and `problem` says why.

    `mac_ok` was checked by the shell under the key of `gateway` and `sandbox`.
    """

    sandbox: str
    gateway: str
    mac_ok: bool
    receipt: Receipt | None
    problem: str = ""
    step: str = ""
    attempt: str = ""


class Poison(msgspec.Struct, frozen=True, kw_only=True):
    """A message that nothing could be made of; recorded with its position and passed over."""

    source: str
    subject: str
    seq: int
    detail: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class GatewaySeen(msgspec.Struct, frozen=True, kw_only=True):
    """
    A gateway session says that it is alive and what it can reach.

    `authorities` are those whose sandboxes it can open; `providers` those it can create with;
    `places` says at which authority each of them creates.
    """

    gateway: str
    authorities: list[str]
    providers: list[str]
    places: dict[str, str] = {}
    sandboxes: int = 0
    closing: bool = False


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox's toolhost re-read its marker a moment ago."""

    sandbox: str
    gateway: str
    epoch: int
    session: str
    journal_seq: int


class Heartbeats(msgspec.Struct, frozen=True, kw_only=True):
    gateway: str
    beats: list[Heartbeat]


class OwedStep(msgspec.Struct, frozen=True, kw_only=True):
    """
    One committed step that the present generation owes, as the owner read it in the ledger.

    `accepted`: the effect that an operator accepted in its place in an earlier generation, or "".
    """

    sandbox: str
    epoch: int
    key: tuple[int, int, str]
    step: str
    attempt: str
    tool: str
    digest: str
    args: msgspec.Raw
    effect: str
    accepted: str = ""


class OwedItem(msgspec.Struct, frozen=True, kw_only=True):
    """One owed step, without what it takes to apply it."""

    key: tuple[int, int, str]
    step: str
    attempt: str
    tool: str
    digest: str
    effect: str


class OwedPage(msgspec.Struct, frozen=True, kw_only=True):
    """The next owed steps, in order, that are told and not applied. None: there are no more."""

    sandbox: str
    epoch: int
    items: list[OwedItem]


class OwedEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger has no more owed steps than were fed; said only where one is waited for."""

    sandbox: str
    epoch: int
