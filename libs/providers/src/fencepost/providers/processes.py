"""Starting, finding and killing processes of one host. Linux: finding needs `/proc`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

INSTANCE: Final = "FENCEPOST_INSTANCE"
CHANNEL: Final = "FENCEPOST_CHANNEL"

_PR_SET_PDEATHSIG: Final = 1
_SOCKET_BUFFER_BYTES: Final = 1 << 20
_KILL_WAIT_S: Final = 5.0

# Absent on other systems: there the end of the stream alone ends the toolhost.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def _die_with_parent() -> None:
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def spawn(
    command: list[str], *, env: dict[str, str], log: Path
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """
    Starts a program in its own session, its standard input and output one socket to us.

    It gets no other descriptor, and SIGTERM when the calling thread's process dies.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    try:
        with log.open("ab") as errors:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors,
                cwd="/",
                env=env,
                close_fds=True,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call, nothing that locks
            )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return process, ours


def started_at(pid: int) -> int | None:
    """The kernel's start time of a process in ticks: with the pid, its identity. None: gone."""
    fields = _stat(pid)
    return None if fields is None else fields[1]


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start time), or None for a process that is gone or only waits to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[1]), int(fields[19])


def find(variable: str, value: str) -> dict[int, int]:
    """Finds the processes that carry `variable=value`, and all below them: pid to start time."""
    needle = f"{variable}={value}".encode()
    parents: dict[int, int] = {}
    started: dict[int, int] = {}
    found: set[int] = set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - hot on a busy host
        if not name.isdigit():
            continue
        pid = int(name)
        fields = _stat(pid)
        if fields is None:
            continue
        parents[pid], started[pid] = fields
        with contextlib.suppress(OSError):
            if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    grown = True
    while grown:
        below = {pid for pid, parent in parents.items() if parent in found} - found
        found |= below
        grown = bool(below)
    found.discard(os.getpid())
    return {pid: started[pid] for pid in found}


def kill_all(variable: str, value: str) -> bool:
    """
    Kills them with SIGKILL until none is left. Blocks, at most some seconds.

    False: some are still there, for example asleep in the kernel.
    """
    until = time.monotonic() + _KILL_WAIT_S
    pause_s = 0.001
    while found := find(variable, value):
        for pid, start in found.items():
            _kill(pid, start)
        if time.monotonic() > until:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)
    return True


def _kill(pid: int, start: int) -> None:
    """Kills this very process: a pid that was given to another one meanwhile is left alone."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if started_at(pid) == start:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def tasks_of_this_user() -> int:
    """Counts what the kernel counts against the limit on a user's processes: threads."""
    me = os.getuid()
    count = 0
    for name in os.listdir("/proc"):  # noqa: PTH208 - hot on a busy host
        if name.isdigit():
            with contextlib.suppress(OSError):
                task = Path(f"/proc/{name}/task")
                if task.stat().st_uid == me:
                    count += len(os.listdir(task))  # noqa: PTH208
    return count
