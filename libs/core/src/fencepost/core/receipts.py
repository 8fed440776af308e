"""
What a sandbox says it did: receipts, stamped by the gateway that carried them.

A receipt's meaning is in `docs/toolhost-protocol.md`. Strictness is deliberate: `True` and `7.0`
are not the integer 7, and a missing field is a receipt of wrong shape, not a default.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Direction: TypeAlias = Literal["apply", "undo", "replay", "revoke"]
Verdict: TypeAlias = Literal[
    "applied",
    "attested",
    "running",
    "revoked",
    "already_done",
    "refused",
    "indeterminate",
    "fault",
]


class Marker(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reading of a disk's generation marker; `instance` is the provider's, echoed."""

    epoch: int
    session: str
    nonce: str
    instance: str


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One path that a step changed: digests before and after, None where nothing is."""

    path: str
    before: str | None
    after: str | None
    mode: str = ""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    One answer of a toolhost about one fence.

    `of_seq`, where it is `attested`: the journal sequence of the record that wrote the effect.
    """

    sandbox: str
    step: str
    attempt: str
    direction: Direction
    no: int
    verdict: Verdict
    epoch: int
    session: str
    nonce: str
    instance: str
    after: Marker
    tool: str
    digest: str
    journal_seq: int
    outcome: Literal["ok", "failed", ""] = ""
    changes: list[Change] = []
    result: msgspec.Raw = msgspec.Raw(b"null")
    of: str = ""
    of_seq: int = 0
    reason: str = ""
    detail: str = ""


class StampedReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """
    A receipt's exact bytes with the gateway's stamp.

    `mac` covers gateway, sandbox, time and the receipt's bytes under a key that is bound to
    gateway and sandbox, so no gateway can speak for a sandbox whose key it was not given.
    `gateway` is the gateway session's id. `at_ms` is that gateway's clock: a label, no evidence.
    """

    gateway: str
    sandbox: str
    at_ms: int
    mac: str
    receipt: msgspec.Raw
