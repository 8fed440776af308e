"""What a timeline says of checkpoints and of recoveries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fencepost.core.sandbox import entries as e

_UNITS: Final = ("B", "KiB", "MiB", "GiB")
_NAMED_MAX: Final = 5


def size(count: int) -> str:
    """A number of bytes for people."""
    amount, unit = float(count), 0
    while amount >= 1024 and unit + 1 < len(_UNITS):
        amount /= 1024
        unit += 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def _checkpointed(entry: e.CheckpointedEntry) -> str:
    return (
        f"checkpoint {entry.checkpoint} stored: {entry.files} files, {size(entry.size_bytes)},"
        f" {size(entry.sent_bytes)} sent; journal {entry.journal_seq} ({entry.reason})"
    )


def _replayed(entry: e.Replayed) -> str:
    if not entry.verdict:
        return f"{entry.step} was not applied again, by an operator's word"
    how = "applied again" if entry.verdict == "applied" else "attested by the disk's journal"
    accepted = "; its effect differs, by an operator's word" if entry.accepted else ""
    return f"{entry.step} {how} as {entry.name}{accepted}"


def _told(entry: e.OwedTold) -> str:
    named = ", ".join(f"{one.step} ({one.tool})" for one in entry.steps[:_NAMED_MAX])
    more = len(entry.steps) - _NAMED_MAX
    named += f" and {more} more" if more > 0 else ""
    return f"{entry.told} of {entry.of} owed steps are told and given up: {named}"


def _stopped(entry: e.RecoveryStopped) -> str:
    text = f"recovery stopped: {entry.reason}"
    if entry.step:
        text += f" at {entry.step}"
    if entry.detail:
        text += f" ({entry.detail})"
    if entry.expected or entry.found:
        text += f"; expected {_short(entry.expected)}, found {_short(entry.found)}"
    return f"{text}; a person decides: accept, tell or discard"


def _short(effect: str) -> str:
    outcome, _, digest = effect.partition(":")
    return f"{outcome}:{digest[:12]}"


def _recovered(entry: e.Recovered) -> str:
    what = {
        "replayed": f"whole again: {entry.replayed} steps replayed",
        "told": f"goes on without {entry.told} steps; {entry.replayed} were replayed",
        "accepted": f"goes on as it is, by an operator's word; {entry.replayed} steps replayed",
    }[entry.mode]
    if entry.lost:
        what += f"; checkpoint {entry.lost} is lost with all that it held"
    elif entry.without:
        what += f"; without checkpoint {entry.without} this time"
    elif entry.checkpoint:
        what += f" on checkpoint {entry.checkpoint}"
    return what


def _why(reason: str, detail: str) -> str:
    return f"{reason} ({detail})" if detail else reason


WORDS: Final[dict[Any, Callable[[Any], str]]] = {
    e.Joined: lambda x: (
        f"{x.attempt} joined: receipt of epoch {x.receipt.epoch}; committed later, as it asked for"
    ),
    e.CheckpointAsked: lambda x: f"checkpoint {x.checkpoint} asked for: {x.reason}",
    e.CheckpointingEntry: lambda x: (
        f"checkpoint {x.checkpoint} to be taken ({x.reason}); new fences wait"
    ),
    e.CheckpointedEntry: _checkpointed,
    e.CheckpointFailedEntry: lambda x: (
        f"checkpoint {x.checkpoint} failed: {_why(x.reason, x.detail)}; the former one stands"
    ),
    e.RestoredEntry: lambda x: (
        f"checkpoint {x.checkpoint} restored: {x.files} files, {size(x.size_bytes)};"
        f" journal {x.journal_seq}"
    ),
    e.RestoreFailedEntry: lambda x: (
        f"checkpoint {x.checkpoint} not restored: {_why(x.reason, x.detail)}"
    ),
    e.Replaying: lambda x: (
        f"{x.step} {x.tool} to be applied again: {x.name} fenced under epoch {x.epoch}"
    ),
    e.Replayed: _replayed,
    e.OwedTold: _told,
    e.RecoveryStopped: _stopped,
    e.RecoveryDecided: lambda x: (
        f"recovery decided by {x.who}: {x.decision}" + (f"; {x.note}" if x.note else "")
    ),
    e.Recovered: _recovered,
    e.Preempted: lambda x: (
        f"the provider will take {x.instance} away"
        + (f" in {x.grace_ms / 1000:g} s or later" if x.grace_ms else ", it does not say when")
    ),
}
