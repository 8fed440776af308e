"""
Named points at which a process can be made to die, for tests of crash safety.

`FENCEPOST_CRASH=<name>` kills the process there, as `kill -9` would; with
`FENCEPOST_CRASH_ONCE=<file>` only the first process to get there, which makes the file. Without
the variable a point costs one comparison.

`FENCEPOST_CRASH=@<file>` reads the point's name from the first line of a file, anew at each point:
so a running process can be armed. Who dies takes the line out first; the next line is armed then.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

POINTS: Final = (
    "before_append",
    "after_append",
    "after_effects",
    "after_events",
    "after_messages",
    "after_answers",
    "after_fold",
    "after_term_opened",
    "before_snapshot",
    "after_snapshot",
    "gateway_order_received",
    "gateway_frames_sent",
    "gateway_receipt_received",
    "gateway_before_receipts",
    "gateway_after_receipts",
    "gateway_before_create",
    "gateway_after_create",
    "gateway_before_stop",
    "gateway_after_stop",
    "gateway_before_assigned",
    "gateway_after_assigned",
    "gateway_before_create_failed",
    "gateway_after_create_failed",
    "gateway_before_found",
    "gateway_after_found",
    "gateway_before_marked",
    "gateway_after_marked",
    "gateway_before_attach_failed",
    "gateway_after_attach_failed",
    "gateway_before_lost",
    "gateway_after_lost",
    "gateway_before_stop_answered",
    "gateway_after_stop_answered",
    "gateway_before_gone",
    "gateway_after_gone",
)
"""Every point's name; a test walks them."""

RECOVERY_POINTS: Final = (
    "gateway_checkpoint_stored",
    "gateway_before_checkpointed",
    "gateway_after_checkpointed",
    "gateway_restore_begun",
    "gateway_before_restored",
    "gateway_after_restored",
)
"""Those of checkpoints and restores; the test of recovery walks them."""

_ARMED: str = os.environ.get("FENCEPOST_CRASH", "")
_ONCE: str = os.environ.get("FENCEPOST_CRASH_ONCE", "")

_SCRIPT: str = _ARMED[1:] if _ARMED.startswith("@") else ""

assert not _ARMED or _SCRIPT or _ARMED in (*POINTS, *RECOVERY_POINTS), (
    f"FENCEPOST_CRASH: no such point: {_ARMED}"
)


def point(name: str) -> None:
    """Dies here when this point is armed."""
    if _ARMED and is_armed(name):
        _die()


def is_armed(name: str) -> bool:
    """Tells whether this process is to die there: for a point that needs preparation."""
    return name == (_line() if _SCRIPT else _ARMED)


def _line() -> str:
    with contextlib.suppress(OSError):
        return Path(_SCRIPT).read_text(encoding="utf-8").partition("\n")[0]
    return ""


def _die() -> None:
    if _SCRIPT:
        script = Path(_SCRIPT)
        _, _, rest = script.read_text(encoding="utf-8").partition("\n")
        fresh = script.with_name(f"{script.name}.{os.getpid()}")
        fresh.write_text(rest, encoding="utf-8")
        fresh.rename(script)
    elif _ONCE:
        try:
            os.close(os.open(Path(_ONCE), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
    os._exit(137)
