"""The system's clock: the only file of the runtime that reads time."""

from __future__ import annotations

import time


class SystemClock:
    """
    Wall time that does not jump.

    The wall clock is read once and carried on by the monotonic clock, so a stepped clock (NTP, a
    person, a resumed machine) cannot make a lease or a deadline fire (S-228). `anchor` reads the
    wall clock again.
    """

    def __init__(self) -> None:
        self._offset_ms = 0
        self.anchor()

    def anchor(self) -> None:
        self._offset_ms = time.time_ns() // 1_000_000 - time.monotonic_ns() // 1_000_000

    def now_ms(self) -> int:
        return self._offset_ms + time.monotonic_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000
