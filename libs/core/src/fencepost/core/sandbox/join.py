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

import msgspec
from fencepost.core import limits
from fencepost.core.receipts import Direction, Receipt
from fencepost.core.sandbox.state import Sandbox, Step

REASONS: Final = (
    "malformed",
    "too_large",
    "bad_mac",
    "wrong_sandbox",
    "step_final",
    "not_fenced",
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


_QUOTE: Final = ord('"')
_ESCAPE: Final = ord("\\")
_CHANGES_UNMEASURED: Final = 32
_ENCODE: Final = msgspec.json.Encoder().encode


def why_not(
    sandbox: Sandbox,
    step: Step,
    receipt: Receipt,
    *,
    gateway: str,
    direction: Direction,
    attempt: str,
    tool: str,
    digest: str,
) -> str:
    """
    Returns "" when the receipt joins, else the reason why not.

    `attempt`, `tool` and `digest` are those of the call that the current fence was handed out for
    (the step's own, or its undo's).
    """
    if receipt.attempt != attempt:
        if receipt.attempt == step.attempt and receipt.direction != direction:
            return "wrong_direction"
        return "late_attempt" if _ordinal(receipt) < step.ordinal else "wrong_attempt"
    if receipt.direction != direction:
        return "wrong_direction"
    return (
        _why_not_the_generation(sandbox, step, receipt, gateway=gateway)
        or _why_not_the_call(receipt, tool=tool, digest=digest, no=step.no)
        or _why_not_recorded(receipt)
    )


def _ordinal(receipt: Receipt) -> int:
    _, _, ordinal = receipt.attempt.rpartition(".")
    # At most 9 digits: the name is the sandbox's own text, and a number may be of any length.
    return int(ordinal) if ordinal.isdecimal() and len(ordinal) < 10 else 0


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


def _why_not_recorded(receipt: Receipt) -> str:
    """
    Bounds what a ledger would have to carry, and every reader of it to read, for ever.

    Deeper nesting than this could be read here and fail a reader inside a few more brackets.
    """
    result = bytes(receipt.result)
    size = len(result) + 6 * (len(receipt.detail) + len(receipt.reason) + len(receipt.of))
    if size > limits.RECEIPT_BYTES_MAX // 4 or len(receipt.changes) > _CHANGES_UNMEASURED:
        size += len(_ENCODE(receipt.changes))
        if size > limits.RECEIPT_BYTES_MAX:
            return "too_large"
    if result.count(b"[") + result.count(b"{") > limits.NESTING_MAX and _is_deep(result):
        return "malformed"
    whole = (receipt.no, receipt.journal_seq)
    if any(type(value) is not int or not 0 <= value < 1 << 53 for value in whole):
        return "malformed"
    return ""


def _is_deep(result: bytes) -> bool:
    depth = 0
    quoted = escaped = False
    for byte in result:
        if quoted:
            quoted = escaped or byte != _QUOTE
            escaped = byte == _ESCAPE and not escaped
        elif byte == _QUOTE:
            quoted = True
        elif byte in b"[{":
            depth += 1
            if depth > limits.NESTING_MAX:
                return True
        elif byte in b"]}":
            depth -= 1
    return False
