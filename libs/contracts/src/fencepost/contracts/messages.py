"""The wire beside the ledger: batches, volatile commands, questions, reads. JSON throughout."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Final, Literal

import msgspec
from fencepost.core.receipts import Marker, StampedReceipt
from fencepost.core.steps import StepCommand
from fencepost.core.sweeping import Listed, Report

BATCH_VERSION: Final = 1
HASH: Final = "fnv1a32"


class Position(msgspec.Struct, frozen=True):
    """How far a durable input stream was read; `incarnation` is the stream's creation time."""

    incarnation: str
    seq: int


class Seen(msgspec.Struct, frozen=True):
    """The last message taken from one sending shard: its ledger sequence and index."""

    seq: int
    index: int


class Sent(msgspec.Struct, frozen=True):
    """The ledger sequence up to which all publications of a kind were acknowledged in order."""

    events: int = 0
    messages: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """
    One message of a shard's log. See design section 2.

    `prev` is the sequence of the shard's former batch (0 for the first): the condition under
    which this one was accepted. `entries` is a JSON array of tagged objects.
    """

    v: int
    id: str
    family: str
    shard: int
    term: int
    owner: str
    prev: int
    now_ms: int
    positions: dict[str, Position]
    last_seen: dict[str, Seen]
    sent: Sent
    entries: msgspec.Raw
    snapshot: str = ""


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """A volatile command: what a durable one's subject would say, and its body."""

    kind: str
    aggregate: str
    id: str
    body: msgspec.Raw


class PackedCommands(msgspec.Struct, frozen=True, kw_only=True):
    """
    The body of `fp.v1.cmd.batch.<sandbox>.<id>`: step commands for sandboxes of one shard.

    Each names its own sandbox and step. One that belongs to another shard is refused
    (`misrouted`); the others are taken all the same.
    """

    steps: list[StepCommand]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """
    A question: the state of a step, a sandbox, or all sandboxes of the shard.

    `sweep`: a page of all that are not gone, from the place `after` on (`core.sweeping`).
    """

    what: Literal["step", "sandbox", "sandboxes", "sweep"]
    sandbox: str = ""
    step: str = ""
    after: int = 0


class AskDag(msgspec.Struct, frozen=True, kw_only=True):
    """
    A question to a dag shard: one DAG, or a page of its DAGs ordered by id, after `after`.

    `released` leaves out all but one verdict; "" none.
    """

    what: Literal["dag", "dags"]
    dag: str = ""
    after: str = ""
    limit: int = 100
    released: Literal["", "confirmed", "unconfirmed", "nothing_held"] = ""


class ListRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a gateway for the next page of what an authority lists; `token` "" begins anew."""

    authority: str
    token: str = ""


class ListReply(msgspec.Struct, frozen=True, kw_only=True):
    """
    One page. Only one without `token` ends a listing, and only a `complete` one made it whole.

    `problem`: nothing can be said (another authority, a walk that is over).
    """

    deployment: str = ""
    items: list[Listed] = []
    token: str = ""
    complete: bool = False
    observes_gone: bool = True
    problem: str = ""


class SweepReply(msgspec.Struct, frozen=True, kw_only=True):
    """What one census tick saw, one report an authority, and one of the holders."""

    reports: list[Report] = []
    problem: str = ""


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """
    A read-only tool call. Below `epoch_min` the answer is `unknown`, never a result.

    `sandbox` is named by the subject.
    """

    tool: str
    args: msgspec.Raw
    epoch_min: int = 0
    timeout_ms: int = 30_000


class ReadReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    `ok`: the tool ran and `result` is its own. `failed`: it ran and failed. `refused`: your fault.
    `unknown`: nothing can be said (no generation, too old an epoch, no channel): ask again later.
    """

    status: Literal["ok", "failed", "refused", "unknown"]
    result: msgspec.Raw = msgspec.Raw(b"null")
    marker: Marker | None = None
    reason: str = ""
    field: str = ""
    detail: str = ""


def receipt_key(master: bytes, gateway: str, sandbox: str) -> bytes:
    """The key that stamps receipts of one sandbox at one gateway session."""
    return hmac.digest(master, f"{gateway}\n{sandbox}".encode(), hashlib.sha256)


def stamp(key: bytes, *, gateway: str, sandbox: str, at_ms: int, receipt: bytes) -> StampedReceipt:
    """Stamps a receipt's exact bytes."""
    mac = hmac.digest(key, b"%d\n" % at_ms + receipt, hashlib.sha256).hex()
    return StampedReceipt(
        gateway=gateway, sandbox=sandbox, at_ms=at_ms, mac=mac, receipt=msgspec.Raw(receipt)
    )


def stamp_holds(key: bytes, stamped: StampedReceipt) -> bool:
    """Tells whether the stamp is this key's, over exactly these bytes."""
    want = hmac.digest(key, b"%d\n" % stamped.at_ms + bytes(stamped.receipt), hashlib.sha256).hex()
    # As bytes: of texts, it takes ASCII ones only.
    return hmac.compare_digest(want.encode(), stamped.mac.encode())


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The shape of every refusal that leaves the system."""

    reason: str
    field: str = ""
    expected: str = ""
    detail: str = ""
    retry_ms: int | None = None
    extra: dict[str, Any] = {}
