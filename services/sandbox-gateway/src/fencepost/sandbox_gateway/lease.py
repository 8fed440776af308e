"""
May this gateway session still send writes? Only this file answers that.

Rule 1: a renewal counts from when it was *sent*: the server may have taken it at once and the
answer may have been long under way, so any later instant would promise time that is not there.
Rule 2: monotonic time of this machine only; no other machine's clock is compared.
Rule 3: writing stops well before the lease can be over, and what is over never comes back: a new
session is another lease.
"""

from __future__ import annotations

from typing import Final

# Of the lease, how much may pass since the last renewal before writes stop.
WRITES_STOP_PERCENT: Final = 60


class Lease:
    """One session's lease. All times are milliseconds of one monotonic clock."""

    def __init__(self, lease_ms: int) -> None:
        self.lease_ms = lease_ms
        self._renewed_at_ms: int | None = None
        self._over = False

    def renewed(self, sent_at_ms: int) -> bool:
        """Takes a renewal that was sent then and answered since. False: too late, it is over."""
        if self._over:
            return False
        if self._renewed_at_ms is None or sent_at_ms > self._renewed_at_ms:
            self._renewed_at_ms = sent_at_ms
        return True

    def remaining_ms(self, now_ms: int) -> int:
        if self._over or self._renewed_at_ms is None:
            return 0
        return max(0, self._renewed_at_ms + self.lease_ms - now_ms)

    def may_write(self, now_ms: int) -> bool:
        """Whether writes may be sent and grants given now."""
        if self.is_over(now_ms) or self._renewed_at_ms is None:
            return False
        return (now_ms - self._renewed_at_ms) * 100 < self.lease_ms * WRITES_STOP_PERCENT

    def is_over(self, now_ms: int) -> bool:
        """Whether the lease was held and is past. Once true, it stays so."""
        if self._renewed_at_ms is not None and now_ms - self._renewed_at_ms >= self.lease_ms:
            self._over = True
        return self._over
