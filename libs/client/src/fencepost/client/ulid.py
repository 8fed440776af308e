"""ULIDs: ids that carry the millisecond at which they were minted, so old ones can be told."""

from __future__ import annotations

import os
import time
from typing import Final

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS: Final = [high + low for high in _ALPHABET for low in _ALPHABET]


class _Reserve:
    """Random bytes for many ids at once: a system call for each would cost more than all else."""

    data = b""
    at = 0


def _forget() -> None:
    _Reserve.data, _Reserve.at = b"", 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # else two processes would mint the same ids


def _chance() -> bytes:
    at = _Reserve.at
    if at + 10 > len(_Reserve.data):
        _Reserve.data, at = os.urandom(4000), 0
    _Reserve.at = at + 10
    return _Reserve.data[at : at + 10]


def mint() -> str:
    """Mints a ULID: 48 bits of milliseconds, 80 random bits. Within one there is no order."""
    value = (time.time_ns() // 1_000_000 << 80) | int.from_bytes(_chance())
    # Thirteen pairs of five-bit digits; the first pair's upper digit holds three bits only.
    return "".join([_PAIRS[(value >> shift) & 1023] for shift in range(120, -1, -10)])
