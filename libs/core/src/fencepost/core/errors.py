"""
Errors by what the caller must do: again later, your fault, or a bug.

In the deciding code a refusal is an entry, never an exception; these are for the outer edges.
"""

from __future__ import annotations


class FencepostError(Exception):
    """The base of every error that Fencepost raises on purpose. Not raised itself."""


class RetryLaterError(FencepostError):
    """An operating error: the same call may succeed after `delay_ms`."""

    def __init__(self, message: str, *, delay_ms: int = 1000) -> None:
        super().__init__(message)
        self.delay_ms = delay_ms


class UnknownError(RetryLaterError):
    """A read that proves neither presence nor absence. Never to be taken for an absence."""


class RefusedError(FencepostError):
    """
    The caller's fault: sending the same again gives the same answer.

    `reason` is a stable word, `field` the offending field or "", `expected` what would be taken.
    """

    def __init__(self, reason: str, message: str, *, field: str = "", expected: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
        self.expected = expected


class PoisonedError(FencepostError):
    """A message that cannot be understood: recorded, set aside, alerted on."""


class OwnershipLostError(FencepostError):
    """The process no longer owns the shard: drop its state and stop. Not an incident."""


class LedgerBrokenError(FencepostError):
    """
    The recorded history cannot be folded (a gap, a newer version, an unknown kind).

    A bug or tampering: the shard is not owned until a person has looked.
    """
