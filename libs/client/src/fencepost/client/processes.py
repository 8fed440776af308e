"""
Child processes that never outlive the process that started them.

On Linux the kernel ends a child with its parent (PDEATHSIG, bound to the starting *thread*, so
children are started from a thread that lives as long as the process). Elsewhere a watchdog child
notices the end of its standard input and sends the same signal. FENCEPOST_PORTABLE is for tests: it
lets Linux take that way too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from fencepost.core.errors import FencepostError

_PR_SET_PDEATHSIG: Final = 1
_IS_LINUX: Final = sys.platform == "linux" and not os.environ.get("FENCEPOST_PORTABLE")
_LIBC: Final = ctypes.CDLL(None, use_errno=True) if _IS_LINUX else None
_WATCHDOG: Final = """
import os, sys
sys.stdin.buffer.read()
try:
    os.kill(int(sys.argv[1]), int(sys.argv[2]))
except OSError:
    pass
"""

PORT_FIRST: Final = 15_000
PORT_LAST: Final = 32_000
"""
Ports are taken from below the usual ephemeral range. Inside it a client that keeps connecting to
a server that is down can be connected to itself, and then holds the server's port.
"""


class StartError(FencepostError):
    """A program did not start. The message ends with the last lines of its log."""


def free_port() -> int:
    """Finds a loopback port that is free now. Another process may take it before it is used."""
    for _ in range(200):
        port = random.randint(PORT_FIRST, PORT_LAST)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise StartError("no free port on 127.0.0.1")


def _die_with(parent: int, number: int) -> None:
    # After the change of user: changing credentials clears the setting.
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """One running program, with its log."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        log: Path,
        watchdog: subprocess.Popen[bytes] | None,
    ) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._watchdog = watchdog

    @classmethod
    def start(
        cls,
        name: str,
        argv: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: int | None = None,
        death_signal: int = signal.SIGKILL,
    ) -> Child:
        """
        Starts a program in a session of its own, so that a terminal's Ctrl-C reaches only us.

        `user` is the uid (and gid) to run as; only root can ask for another than its own.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()
        out: IO[bytes]
        with log.open("ab") as out:
            try:
                process = subprocess.Popen(
                    [str(part) for part in argv],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=dict(env) if env is not None else None,
                    cwd=cwd,
                    start_new_session=True,
                    user=user,
                    group=user,
                    extra_groups=None if user is None else [],
                    preexec_fn=(lambda: _die_with(parent, death_signal)) if _LIBC else None,  # noqa: PLW1509
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise StartError(f"{name}: cannot be started: {error}") from error
        watchdog = None
        if _LIBC is None:
            watchdog = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _WATCHDOG,
                    str(process.pid),
                    str(int(death_signal)),
                ],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        return cls(name, process, log, watchdog)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        code = self._process.poll()
        if code is not None:
            self._end_watchdog()
        return code

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    def send(self, number: int) -> None:
        """Sends a signal, or nothing when it has ended."""
        if self.is_running:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it with SIGKILL and collects it."""
        self.send(signal.SIGKILL)
        self._process.wait()
        self._end_watchdog()

    async def wait(self, seconds: float) -> int | None:
        """Waits until it has ended, at most so long; its exit code, or None while it runs."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return code

    async def stop(self, *, number: int = signal.SIGTERM, grace_s: float = 5.0) -> int:
        """Asks it to end, and kills it when it has not within the grace."""
        self.send(number)
        self.send(signal.SIGCONT)
        code = await self.wait(grace_s)
        if code is None:
            self.kill()
            code = self._process.returncode
        self._end_watchdog()
        return code

    def tail(self, lines: int = 12) -> str:
        """The last lines of its log."""
        try:
            text = self.log.read_bytes()[-16_384:].decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _end_watchdog(self) -> None:
        # Killed, not released: its way of ending is to kill our child's pid, which may be reused.
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
            self._watchdog = None


class Started:
    """What runs as one process at a time, and may be started again; `port` is where it listens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self._child: Child | None = None

    @property
    def child(self) -> Child:
        assert self._child is not None, f"{self.name} was never started"
        return self._child

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.is_running

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.child.kill()
