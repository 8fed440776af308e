"""
Announcements that a host's own agent leaves as files: "this is going, in so many seconds".

Spot and preemptible machines say so on a metadata endpoint some time before they go; what an agent
there finds out it writes into such a file, by `echo 120 > file`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

_READ_BYTES: Final = 64
_GRACE_S_MAX: Final = 86_400.0


def grace_ms(path: Path) -> int | None:
    """
    The milliseconds that a notice gives, or None where no file is, or none that can be read.

    A notice that names no seconds (it is empty, or half written) is one all the same, of 0.
    """
    try:
        # A pipe that nobody writes to would hold whoever opens it, for good.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        text = os.read(descriptor, _READ_BYTES)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    try:
        seconds = float(text)
    except ValueError:
        return 0
    return int(min(seconds, _GRACE_S_MAX) * 1000) if seconds > 0 else 0
