"""ULIDs: ids that carry the millisecond at which they were minted, so old ones can be told."""

from __future__ import annotations

import os
import time
from typing import Final

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS: Final = [high + low for high in _ALPHABET for low in _ALPHABET]


def mint() -> str:
    """Mints a ULID: 48 bits of milliseconds, 80 random bits. Within one there is no order."""
    value = (time.time_ns() // 1_000_000 << 80) | int.from_bytes(os.urandom(10))
    # Thirteen pairs of five-bit digits; the first pair's upper digit holds three bits only.
    return "".join([_PAIRS[(value >> shift) & 1023] for shift in range(120, -1, -10)])
