"""
Starting, finding and killing processes of one host.

They are looked at in two ways: Linux's `/proc`, and `ps` where there is none (macOS, the BSDs). The
difference is in `_look_in_proc` and `_look_by_ps`; all else is the same code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

INSTANCE: Final = "FENCEPOST_INSTANCE"
CHANNEL: Final = "FENCEPOST_CHANNEL"
PORTABLE: Final = "FENCEPOST_PORTABLE"
"""For tests: set in our environment it lets Linux do without what only Linux has."""

_PR_SET_PDEATHSIG: Final = 1
_SOCKET_BUFFER_BYTES: Final = 1 << 20
_KILL_WAIT_S: Final = 5.0
_PS_WAIT_S: Final = 5.0
_ON_DARWIN: Final = sys.platform == "darwin"
_HAS_PROC: Final = Path("/proc/self/stat").exists()
_MONTHS: Final = b"JanFebMarAprMayJunJulAugSepOctNovDec"

# Absent on other systems: there the end of the stream alone ends the toolhost.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


class _Row(NamedTuple):
    """One living process. `carries`: the variable that was asked for is in its environment."""

    parent: int
    group: int
    started: int
    carries: bool


def is_portable() -> bool:
    """Tells whether processes are looked at by `ps`."""
    return not _HAS_PROC or bool(os.environ.get(PORTABLE))


def _die_with_parent() -> None:
    if _prctl is not None and not is_portable():
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
        with contextlib.suppress(OSError):  # more than some systems grant
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
    """When a process started, in ticks, or in seconds by `ps`: with its pid, its identity."""
    if is_portable():
        return next(
            (row.started for found, row in _rows_of_ps("-p", str(pid)) if found == pid), None
        )
    fields = _stat(pid)
    return None if fields is None else fields.started


def _stat(pid: int) -> _Row | None:
    """None for a process that is gone or only waits to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return _Row(int(fields[1]), int(fields[2]), int(fields[19]), carries=False)


def _look_in_proc(variable: str, value: str) -> dict[int, _Row]:
    needle = f"{variable}={value}".encode()
    rows: dict[int, _Row] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - hot on a busy host
        if not name.isdigit():
            continue
        row = _stat(int(name))
        if row is None:
            continue
        rows[int(name)] = row
        with contextlib.suppress(OSError):
            if needle in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                rows[int(name)] = row._replace(carries=True)
    return rows


def _look_by_ps(variable: str, value: str) -> dict[int, _Row]:
    """
    As `_look_in_proc`. Raises OSError where `ps` tells nothing.

    Also by what a toolhost is started with: macOS may not show the environment of a program that
    is Apple's own, and its words it does.
    """
    needles = [f" {variable}={value} ".encode()]
    if variable == INSTANCE:
        needles.append(f" --instance {value} ".encode())
    rows = dict(_rows_of_ps("-axwwE" if _ON_DARWIN else "axwwe", needles=needles))
    if os.getpid() not in rows:
        raise OSError("ps lists no processes")
    return rows


def _rows_of_ps(*flags: str, needles: list[bytes] | None = None) -> Iterator[tuple[int, _Row]]:
    columns = ("pid", "ppid", "pgid", "stat", "lstart", "command")
    for line in _ps(*flags, columns=columns):
        words = line.split(None, 9)
        if len(words) < 9 or not words[0].isdigit() or words[3][:1] in (b"Z", b"X"):
            continue
        told = b" %b " % words[9] if len(words) == 10 else b""
        carries = any(needle in told for needle in needles or ())
        started = _seconds_of(words[4:9])
        yield int(words[0]), _Row(int(words[1]), int(words[2]), started, carries)


def _ps(*flags: str, columns: tuple[str, ...]) -> list[bytes]:
    # One option for each column: in BSD's ps all that follows "=" is the heading.
    options = [part for column in columns for part in ("-o", f"{column}=")]
    try:
        done = subprocess.run(
            ["ps", *flags, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/bin:/usr/bin", "LC_ALL": "C", "TZ": "UTC"},
            check=False,
            timeout=_PS_WAIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError("ps does not answer") from error
    return done.stdout.splitlines()


def _seconds_of(words: list[bytes]) -> int:
    """`Mon Nov 30 09:42:24 2026` as a number that grows with time; months have 31 days."""
    _, month, day, clock, year = words
    hours, minutes, seconds = (int(part) for part in clock.split(b":"))
    days = (int(year) * 12 + _MONTHS.index(month) // 3) * 31 + int(day)
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def find(
    variable: str, value: str, *, top: int = 0, groups: set[int] | None = None
) -> dict[int, int]:
    """
    Finds the processes that carry `variable=value`, and all below them: pid to start time.

    By `ps`, also what stands below `top`, or in a process group of one that was found; `groups` are
    the groups found before, and grow. Raises OSError where processes cannot be looked at.
    """
    portable = is_portable()
    rows = (_look_by_ps if portable else _look_in_proc)(variable, value)
    known = set() if groups is None else groups
    found = {pid for pid, row in rows.items() if row.carries or (portable and pid == top)}
    grown = True
    while grown:
        if portable:
            known |= {rows[pid].group for pid in found} - {os.getpgrp()}
        more = {pid for pid, row in rows.items() if row.parent in found or row.group in known}
        grown = bool(more - found)
        found |= more
    found.discard(os.getpid())
    return {pid: rows[pid].started for pid in found}


def kill_all(variable: str, value: str, top: int = 0) -> bool:
    """
    Kills them with SIGKILL until none is left. Blocks, at most some seconds.

    False: some are still there, for example asleep in the kernel, or it cannot be known.
    """
    until = time.monotonic() + _KILL_WAIT_S
    pause_s = 0.001
    groups: set[int] = set()
    try:
        while found := find(variable, value, top=top, groups=groups):
            for pid, start in found.items():
                _kill(pid, start)
            if time.monotonic() > until:
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)
    except OSError:
        return False
    return True


def _kill(pid: int, start: int) -> None:
    """Kills this very process: a pid that was given to another one meanwhile is left alone."""
    with contextlib.suppress(OSError):
        if is_portable():  # nothing holds on to a process here: a last look must do
            if started_at(pid) == start:
                os.kill(pid, signal.SIGKILL)
            return
        handle = os.pidfd_open(pid)
        try:
            if started_at(pid) == start:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def tasks_of_this_user() -> int:
    """Counts what the kernel counts against the limit on a user's processes: Linux's threads."""
    me = os.getuid()
    if is_portable():
        return sum(line.strip() == b"%d" % me for line in _ps("-ax", columns=("uid",)))
    count = 0
    for name in os.listdir("/proc"):  # noqa: PTH208 - hot on a busy host
        if name.isdigit():
            with contextlib.suppress(OSError):
                task = Path(f"/proc/{name}/task")
                if task.stat().st_uid == me:
                    count += len(os.listdir(task))  # noqa: PTH208
    return count
