"""
Runs one command so that nothing which it starts outlives it, and shows pytest's closing line last.

Used by the build machine: `contained.py SECONDS COMMAND...`. On Linux this becomes the parent
of every orphan below it, so that a service which left its session is found too; elsewhere the
command's own process group is ended. The exit code is the command's, 124 when its time ran out.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 5.0
EXIT_OUT_OF_TIME = 124
CLOSING = re.compile(
    r"\d+ (passed|failed|errors?|skipped|deselected)\b.* in \d[\d.]*s|no tests ran in "
)


def adopt_orphans() -> None:
    """Makes orphans of this process's descendants its own children, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(of: int) -> list[int]:
    """Tells every process below `of`, nearest first; nothing where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [*children.get(of, [])]
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def reap() -> None:
    """Collects what has ended, so that it does not stay as a zombie."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def reap_orphans(but: int) -> None:
    """Collects ended orphans as their first parent would have, and leaves `but` to its Popen."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == but:
                return
            os.waitpid(ended.si_pid, 0)


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """
    Waits for the command; None when its time ran out. Orphans that end are collected meanwhile.

    A test that kills a parent looks whether the children are gone, and a zombie is not.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            return code
        reap_orphans(process.pid)
        time.sleep(0.05)
    return None


def end_all(group: int) -> None:
    """Asks every process below this one to end, and kills what has not within the grace."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        deadline = time.monotonic() + GRACE_SECONDS
        told: set[int] = set()
        while time.monotonic() < deadline:
            reap()
            left = descendants(os.getpid())
            if not left:
                return
            for pid in set(left) - told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            told.update(left)
            time.sleep(0.05)


def relay(stream: IO[bytes], lines: list[str]) -> None:
    """Prints the command's output as it comes, and keeps it."""
    for raw in stream:
        lines.append(raw.decode(errors="replace").rstrip("\n"))
        print(lines[-1], flush=True)


def main() -> int:
    seconds, command = float(sys.argv[1]), sys.argv[2:]
    adopt_orphans()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=relay, args=(process.stdout, lines), daemon=True)
    reader.start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: sys.exit(128 + got))
    try:
        ended = wait_for(process, seconds)
        if ended is None:
            print(f"out of time after {seconds:.0f} s: {' '.join(command)}", flush=True)
    finally:
        end_all(process.pid)
    code = EXIT_OUT_OF_TIME if ended is None else ended
    reader.join(timeout=GRACE_SECONDS)
    closing = next((line for line in reversed(lines) if CLOSING.search(line)), None)
    if closing is not None and lines[-1] != closing:
        print(closing, flush=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
