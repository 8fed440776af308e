"""
Identities: what an id may look like, and which shard an aggregate belongs to.

Ids travel as subject tokens, so they are matched whole (`fullmatch`): a `$` would let a trailing
newline pass. Slot names are never ids; they travel as values only.
"""

from __future__ import annotations

import re
from typing import Final

ID_PATTERN: Final = r"[A-Za-z0-9_-]{1,64}"
_ID = re.compile(ID_PATTERN)
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_CROCKFORD: Final = {c: n for n, c in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}

_FNV_OFFSET: Final = 2166136261
_FNV_PRIME: Final = 16777619


def is_id(value: object) -> bool:
    """Tells whether `value` may stand as one token of a subject."""
    return type(value) is str and _ID.fullmatch(value) is not None


def shard_of(aggregate_id: str, shards: int) -> int:
    """
    Computes the shard that owns an aggregate.

    The same function as the server's `{{partition(n,1)}}` (FNV-1a, 32 bits, modulo n), so a
    client can address an owner directly and agree with the server. A contract test compares both.
    """
    value = _FNV_OFFSET
    for byte in aggregate_id.encode():
        value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return value % shards


def attempt_id(step: str, ordinal: int) -> str:
    """Names one try of a step; a value, never a subject token."""
    return f"{step}.{ordinal}"


def undo_id(attempt: str, no: int) -> str:
    """
    Names one try of taking an attempt back.

    Each has a name of its own: a disk answers a name that it knows with its first receipt, and
    that of a failed undo, or of a former session's, would answer every later one.
    """
    return f"{attempt}:u{no}"


def replay_id(attempt: str, no: int) -> str:
    """Names one try of applying a committed attempt again, on a later generation's disk."""
    return f"{attempt}:r{no}"


def ulid_ms(value: str) -> int | None:
    """Reads the millisecond at which a ULID was minted, or None when it is not one."""
    if _ULID.fullmatch(value) is None:
        return None
    ms = 0
    for char in value[:10]:
        ms = (ms << 5) | _CROCKFORD[char]
    return ms
