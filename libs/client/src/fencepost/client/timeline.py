"""The ledger of one sandbox, or of one DAG, in words: what was recorded, and in what order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec
from fencepost.client import commands, ledger, recovery_words
from fencepost.client.client import Client
from fencepost.client.ledger import Recorded
from fencepost.core import ids
from fencepost.core.dag import entries as d
from fencepost.core.sandbox import entries as e


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """
    One entry of the ledger. `text` is for people; `entry` is all that was recorded.

    `epoch` is the epoch that was open, or the last one, when the entry was made; 0 of a DAG.
    `owner` is the replica that appended it.
    """

    at: str
    shard: int
    seq: int
    index: int
    term: int
    owner: str
    epoch: int
    kind: str
    text: str
    entry: e.SandboxEntry | d.DagEntry


async def lines(client: Client, sandbox: str, *, follow: bool = False) -> AsyncIterator[Line]:
    """Reads the sandbox's entries in order; with `follow`, goes on waiting for more."""
    epoch = again = 0
    async for recorded in client.history(sandbox, follow=follow):
        for index, entry in enumerate(recorded.entries):
            if getattr(entry, "sandbox", "") != sandbox:
                continue
            if isinstance(entry, e.EpochOpened):
                epoch, again = entry.epoch, 0
            line = _line(recorded, index, epoch, entry)
            if isinstance(entry, e.Replayed):
                again += 1
                line = msgspec.structs.replace(line, text=f"{line.text} ({again} of {entry.of})")
            yield line


async def dag_lines(client: Client, dag: str, *, follow: bool = False) -> AsyncIterator[Line]:
    """Reads a DAG's entries in order; with `follow`, goes on waiting for more."""
    shard = ids.shard_of(commands.require_id("dag", dag), client.shards)
    async for recorded in ledger.batches(
        client.link, shard, family="dag", ledgers=client.ledgers, follow=follow
    ):
        for index, entry in enumerate(recorded.dag_entries):
            if getattr(entry, "dag", "") == dag:
                yield _line(recorded, index, 0, entry)


def _line(recorded: Recorded, index: int, epoch: int, entry: e.SandboxEntry | d.DagEntry) -> Line:
    batch = recorded.batch
    return Line(
        at=recorded.at.isoformat(timespec="milliseconds"),
        shard=batch.shard,
        seq=recorded.seq,
        index=index,
        term=batch.term,
        owner=batch.owner,
        epoch=epoch,
        kind=str(type(entry).__struct_config__.tag),
        text=words(entry),
        entry=entry,
    )


def words(entry: e.SandboxEntry | d.DagEntry) -> str:
    """Says an entry in a sentence without its time."""
    say = _WORDS.get(type(entry))
    return say(entry) if say is not None else str(type(entry).__struct_config__.tag)


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def _why(reason: str, detail: str = "") -> str:
    return f"{reason} ({detail})" if detail else reason


def _fenced(entry: e.Fenced) -> str:
    fence = f"epoch {entry.epoch}, session {entry.session}"
    if entry.direction == "undo":
        text = f"undo of {entry.of} fenced under {fence}: {entry.reason}"
    elif entry.direction == "revoke":
        text = f"revocation of {entry.of} fenced under {fence}: {entry.reason}"
    else:
        tool = f" {entry.spec.tool}" if entry.spec is not None else ""
        text = f"{entry.attempt}{tool} fenced under {fence}"
        if entry.of:
            text += f", carried from {entry.of} ({entry.reason})"
    return text + (f"; before: {entry.error}" if entry.error else "")


def _committed(entry: e.Committed) -> str:
    receipt = entry.receipt
    text = f"{entry.attempt} committed: receipt of epoch {receipt.epoch}"
    if receipt.verdict == "attested":
        text += f", attested from {receipt.of}"
    changed = ", ".join(
        f"{change.path} {_short(change.after) if change.after else 'removed'}"
        for change in receipt.changes[:3]
    )
    if len(receipt.changes) > 3:
        changed += f" and {len(receipt.changes) - 3} more"
    if receipt.outcome == "failed":
        text += "; the tool failed"
    return text + (f"; {changed}" if changed else "")


def _compensated(entry: e.Compensated) -> str:
    end = "the step ended" if entry.final else "the step goes on"
    return (
        f"{entry.attempt} compensated: {_why(entry.reason, entry.detail)},"
        f" evidence {entry.evidence}; {end}"
    )


def _receipt_refused(entry: e.ReceiptRefused) -> str:
    of = f" of epoch {entry.epoch}" if entry.epoch else ""
    verdict = f" ({entry.verdict})" if entry.verdict else ""
    return (
        f"receipt{of} for {entry.attempt or entry.step}{verdict} refused:"
        f" {_why(entry.reason, entry.detail)}"
    )


def _parked(entry: e.Parked) -> str:
    tool = f" {entry.spec.tool}" if entry.spec is not None else ""
    return f"{entry.attempt}{tool} waits: {entry.reason}"


def _epoch_opened(entry: e.EpochOpened) -> str:
    owed = f", owes {entry.owed} committed steps" if entry.owed else ""
    start = f", to be restored from checkpoint {entry.checkpoint}" if entry.checkpoint else ""
    waits = "; nothing new is fenced before it is whole" if entry.recovering else ""
    found = f"on a {entry.disk} disk{owed}{start}: {entry.evidence}"
    return f"epoch {entry.epoch} opened {found}{waits}"


_WORDS: Final[dict[type, Callable[[Any], str]]] = {
    e.Refused: lambda x: (
        f"{x.command} {x.id} refused: {_why(x.reason, x.detail)}"
        + (f" in {x.field}" if x.field else "")
    ),
    e.Created: lambda x: f"created, provider {x.spec.provider}, as {x.create_id}",
    e.RebuildIntended: lambda x: f"epoch {x.epoch} is to be built, as {x.create_id}",
    e.Requested: lambda x: f"{x.create_id} requested of gateway {x.gateway}",
    e.AssignedEntry: lambda x: f"{x.create_id} is {x.ref.provider} {x.ref.native_id}",
    e.CreateFailedEntry: lambda x: (
        f"{x.create_id} {'may have failed' if x.ambiguous else 'failed'}: {x.reason}"
    ),
    e.EpochOpened: _epoch_opened,
    e.Marking: lambda x: f"gateway {x.gateway} writes the marker of epoch {x.epoch}",
    e.Attached: lambda x: f"attached: session {x.session} of epoch {x.epoch}",
    e.Detached: lambda x: f"session {x.session} ended: {x.reason}",
    e.EpochClosed: lambda x: f"epoch {x.epoch} closed: {_why(x.reason, x.evidence)}",
    e.Condemned: lambda x: f"condemned: {x.reason}",
    e.Parked: _parked,
    e.Fenced: _fenced,
    e.Revoked: lambda x: f"{x.attempt} revoked in the journal: {x.journal}",
    e.Committed: _committed,
    e.Compensated: _compensated,
    e.Cancelled: lambda x: f"{x.step} is to end: {x.reason}",
    e.Indeterminate: lambda x: (
        f"{x.attempt} indeterminate: {_why(x.reason, x.detail)}; an operator must resolve it"
    ),
    e.Resolved: lambda x: f"{x.step} resolved as {x.state} by {x.who}: {x.note}",
    e.ReceiptRefused: _receipt_refused,
    e.HolderAdded: lambda x: f"held by {x.dag}",
    e.HolderRemoved: lambda x: f"no longer held by {x.dag}",
    e.ToldEntry: lambda x: (
        f"DAG {x.dag} is told: {x.phase}" + (f", {_why(x.reason, x.evidence)}" if x.reason else "")
    ),
    e.Claimed: lambda x: f"claimed by {x.claim}: {x.reason}",
    e.Unclaimed: lambda x: f"claim {x.claim} ended",
    e.Releasing: lambda x: f"releasing: {x.reason}",
    e.StopAnsweredEntry: lambda x: f"stop of {x.instance} answered {_why(x.answer, x.detail)}",
    e.GoneEntry: lambda x: f"gone: {_why(x.evidence, x.instance)}",
    e.StrayFound: lambda x: f"{x.ref.instance} runs under this name and is nobody's: to be stopped",
    e.StrayGone: lambda x: f"nobody's {x.ref.instance} is gone: {x.evidence}",
    **recovery_words.WORDS,
    d.Refused: lambda x: (
        f"{x.command} {x.id} refused: {_why(x.reason, x.detail)}"
        + (f" in {x.field}" if x.field else "")
    ),
    d.Opened: lambda x: f"opened with {len(x.nodes)} nodes",
    d.NodeStarted: lambda x: f"node {x.node!r} started",
    d.NodeFinished: lambda x: f"node {x.node!r} ended: {x.status}",
    d.Intended: lambda x: (
        f"{x.acquisition}: slot {x.slot!r} is to get"
        f" {'a fresh sandbox' if x.spec is not None else x.sandbox}"
    ),
    d.Progressed: lambda x: f"{x.acquisition}: {_why(x.phase, x.detail)}",
    d.Ready: lambda x: f"{x.acquisition}: ready at epoch {x.epoch}",
    d.Moved: lambda x: f"slot {x.slot!r} names {x.new} instead of {x.old}",
    d.Closed: lambda x: f"closed: {x.reason}; nothing is acquired from here on",
    d.CancelAsked: lambda x: f"cancelled again, as {x.cancel}",
    d.ReleaseBegun: lambda x: f"{x.acquisition}: lets go of {x.sandbox}: {x.reason}",
    d.ReleaseHeard: lambda x: f"{x.acquisition}: not gone: {_why(x.reason, x.evidence)}",
    d.ReleaseSettled: lambda x: f"{x.acquisition}: {x.sandbox} is gone: {x.evidence}",
    d.Abandoned: lambda x: f"{x.acquisition}: never came to hold anything: {x.reason}",
    d.Finished: lambda x: f"finished: {x.status}",
    d.Answered: lambda x: (
        f"{x.verdict}"
        + (f": {_why(x.reason, x.evidence)}" if x.reason else f", evidence {x.evidence or 'none'}")
        + (f"; answers {x.cancel}" if x.cancel else "")
    ),
}
