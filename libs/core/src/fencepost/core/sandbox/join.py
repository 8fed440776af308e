"""
The join: may this receipt commit this step? Nothing else decides that.

Rule 1: the receipt must be whole and name the fence that was handed out, and that fence must be
        the current one, in the state that the batch extends.
Rule 2: a reason is returned for the first thing that does not fit, most telling first; nothing is
        ever assumed for a thing that is missing.
Rule 3: status, text, exit code and progress are not looked at here at all.
"""

from __future__ import annotations

from typing import Final

from fencepost.core.receipts import Direction, Receipt
from fencepost.core.sandbox.state import Sandbox, Step

REASONS: Final = (
    "malformed",
    "bad_mac",
    "unknown_sandbox",
    "wrong_sandbox",
    "unknown_step",
    "step_final",
    "late_attempt",
    "wrong_attempt",
    "wrong_direction",
    "stale_fence",
    "wrong_tool",
    "wrong_digest",
    "stale_epoch",
    "future_epoch",
    "epoch_closed",
    "no_session",
    "stale_session",
    "wrong_nonce",
    "wrong_instance",
    "marker_moved",
    "wrong_gateway",
    "not_whole",
)


def why_not(
    sandbox: Sandbox,
    step: Step,
    receipt: Receipt,
    *,
    gateway: str,
    direction: Direction,
    tool: str,
    digest: str,
) -> str:
    """
    Returns "" when the receipt joins, else the reason why not.

    `tool` and `digest` are those of the call that the current fence was handed out for (the
    step's own, or its undo's).
    """
    if receipt.attempt != step.attempt:
        return "late_attempt" if _ordinal(receipt) < step.ordinal else "wrong_attempt"
    if receipt.direction != direction:
        return "wrong_direction"
    return (
        _why_not_the_generation(sandbox, step, receipt, gateway=gateway)
        or _why_not_the_call(receipt, tool=tool, digest=digest, no=step.no)
        or ""
    )


def _ordinal(receipt: Receipt) -> int:
    _, _, ordinal = receipt.attempt.rpartition(".")
    return int(ordinal) if ordinal.isdecimal() else 0


def _why_not_the_generation(sandbox: Sandbox, step: Step, receipt: Receipt, *, gateway: str) -> str:
    # `type(...) is int`: True == 1 and 7.0 == 7 in Python, and neither is a generation (S-08).
    if type(receipt.epoch) is not int or type(receipt.after.epoch) is not int:
        return "malformed"
    if receipt.epoch != sandbox.epoch:
        return "stale_epoch" if receipt.epoch < sandbox.epoch else "future_epoch"
    if not sandbox.open:
        return "epoch_closed"
    if sandbox.session == "":
        return "no_session"
    if step.epoch != sandbox.epoch or step.session != sandbox.session:
        return "stale_fence"
    if receipt.session != sandbox.session:
        return "stale_session"
    if receipt.nonce != sandbox.nonce:
        return "wrong_nonce"
    if receipt.instance != sandbox.instance:
        return "wrong_instance"
    after = receipt.after
    if (
        after.epoch != receipt.epoch
        or after.session != receipt.session
        or after.nonce != receipt.nonce
        or after.instance != receipt.instance
    ):
        return "marker_moved"
    if gateway != sandbox.gateway:
        return "wrong_gateway"
    return ""


def _why_not_the_call(receipt: Receipt, *, tool: str, digest: str, no: int) -> str:
    if receipt.no != no:
        return "stale_fence"
    if receipt.tool != tool:
        return "wrong_tool"
    if receipt.digest != digest:
        return "wrong_digest"
    if receipt.verdict in ("applied", "attested") and receipt.outcome not in ("ok", "failed"):
        return "not_whole"
    return ""
