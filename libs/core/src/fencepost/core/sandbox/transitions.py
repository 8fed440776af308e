"""
The lives of a step, an epoch and a sandbox as tables: what leads from where to where.

Rule 1: `evolve` changes states as it is told; these tables are what its entries may tell, checked
        against it by tests and against every recorded ledger by `fencepost verify`.
Rule 2: the picture in `docs/states.md` is made of these tables, arrow by arrow.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Arrow(NamedTuple):
    """One transition: `entry` is the ledger's word for what happened, `when` a person's."""

    letter: str
    source: str
    target: str
    entry: str
    when: str


# The phases of `Step.phase`, with "new" before the first entry and the two final states.
STEP: Final = (
    Arrow("a", "new", "parked", "parked", "admitted, and no fence can be handed out now"),
    Arrow("b", "new", "apply", "fenced", "admitted on a live epoch with room"),
    Arrow("c", "parked", "apply", "fenced", "a session is attached and there is room"),
    Arrow("d", "parked", "compensated", "compensated", "cancelled, late or released while waiting"),
    Arrow("e", "apply", "committed", "committed", "its receipt joins the live epoch"),
    Arrow("f", "apply", "apply", "fenced", "same disk, new session or epoch: carried"),
    Arrow("g", "apply", "parked", "parked", "its disk is gone and the policy is to retry"),
    Arrow("h", "apply", "compensated", "compensated", "its disk is gone and nothing is retried"),
    Arrow("i", "apply", "revoke", "fenced", "cancelled, late, refused, or moved and not retried"),
    Arrow("j", "apply", "indeterminate", "indeterminate", "what became of it cannot be known"),
    Arrow("k", "revoke", "revoke", "fenced", "same disk, new session or epoch"),
    Arrow("l", "revoke", "compensated", "compensated", "the journal holds the revocation"),
    Arrow("m", "revoke", "undo", "fenced", "too late: the journal holds it as done"),
    Arrow("n", "revoke", "indeterminate", "indeterminate", "what became of it cannot be known"),
    Arrow("o", "undo", "undo", "fenced", "the undo failed, or the session moved: once more"),
    Arrow("p", "undo", "revoke", "fenced", "the epoch moved: these bytes are asked anew"),
    Arrow("q", "undo", "compensated", "compensated", "it was taken back"),
    Arrow("r", "undo", "indeterminate", "indeterminate", "it cannot be taken back"),
    Arrow("s", "indeterminate", "committed", "resolved", "an operator found it to be there"),
    Arrow("t", "indeterminate", "compensated", "resolved", "an operator found it not to be there"),
    Arrow("u", "apply", "joined", "joined", "its receipt joins; it waits for what it asked for"),
    Arrow("v", "joined", "committed", "committed", "a heartbeat came, or a checkpoint holds it"),
    Arrow("w", "joined", "apply", "fenced", "same disk, new session or epoch: carried"),
    Arrow("x", "joined", "parked", "parked", "its disk is gone and the policy is to retry"),
    Arrow("y", "joined", "compensated", "compensated", "its disk is gone and nothing is retried"),
    Arrow("z", "joined", "revoke", "fenced", "cancelled or late before what it waits for"),
)

# Where a sandbox's epoch and session stand.
EPOCH: Final = (
    Arrow("a", "none", "opened", "epoch_opened", "a disk was found: the first, or another one"),
    Arrow("b", "opened", "attached", "attached", "its marker is written, in this session"),
    Arrow("c", "attached", "opened", "detached", "the session ended; nothing shows a loss"),
    Arrow(
        "d", "attached", "closed", "epoch_closed", "lease expired, disk changed, gone, condemned"
    ),
    Arrow("e", "opened", "closed", "epoch_closed", "disk changed, gone or condemned"),
    Arrow("f", "opened", "opened", "marking", "a gateway session is told to write the marker"),
    Arrow("g", "closed", "opened", "epoch_opened", "the next epoch: cold, warm or restored"),
    Arrow("h", "opened", "opened", "detached", "the marking session ended first"),
)

# What a generation has to get back before anything new is fenced on it.
RECOVERY: Final = (
    Arrow("a", "none", "restore", "epoch_opened", "the disk lacks what a checkpoint holds"),
    Arrow("b", "none", "replay", "epoch_opened", "the disk lacks owed steps, no checkpoint"),
    Arrow("c", "none", "tell", "epoch_opened", "the same, and the policy is to tell"),
    Arrow("d", "restore", "replay", "restored", "the disk is what the checkpoint holds"),
    Arrow("e", "restore", "tell", "restored", "the same, and the policy is to tell"),
    Arrow("f", "restore", "restore", "restore_failed", "it may succeed later"),
    Arrow("g", "restore", "stopped", "recovery_stopped", "it will not, or not soon"),
    Arrow("h", "replay", "replay", "replayed", "an owed step is on this disk"),
    Arrow("i", "replay", "whole", "recovered", "all of them are, or nothing was owed"),
    Arrow("j", "replay", "stopped", "recovery_stopped", "it differs from the first receipt"),
    Arrow("k", "tell", "tell", "owed", "a page of what is lost was told"),
    Arrow("l", "tell", "whole", "recovered", "all of it was"),
    Arrow("m", "tell", "stopped", "recovery_stopped", "the ledger does not have what is owed"),
    Arrow("n", "stopped", "replay", "recovery_decided", "accept: the disk as it is, and on"),
    Arrow("o", "stopped", "tell", "recovery_decided", "tell: what is still owed is given up"),
    Arrow("p", "stopped", "none", "condemned", "discard: another disk, from the start"),
)

# The life of a sandbox.
SANDBOX: Final = (
    Arrow("a", "new", "creating", "created", "somebody wants it"),
    Arrow("b", "creating", "made", "assigned", "the provider named it"),
    Arrow("c", "made", "lost", "gone", "its instance was observed to be gone"),
    Arrow("d", "lost", "creating", "rebuild_intended", "a later generation is a create too"),
    Arrow("e", "creating", "releasing", "releasing", "no holder and no claim is left"),
    Arrow("f", "made", "releasing", "releasing", "no holder and no claim is left"),
    Arrow("g", "lost", "releasing", "releasing", "no holder and no claim is left"),
    Arrow("h", "releasing", "gone", "gone", "observed gone, with every create id settled"),
    Arrow("i", "creating", "creating", "create_failed", "asked again, under the same id"),
)

FINAL: Final = frozenset({"committed", "compensated"})


def is_legal(table: tuple[Arrow, ...], source: str, target: str, entry: str) -> bool:
    """Tells whether a table has this arrow."""
    return any((a.source, a.target, a.entry) == (source, target, entry) for a in table)
