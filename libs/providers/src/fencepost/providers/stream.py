"""A channel over a socket to a child process: the fast way to a toolhost on the same host."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fencepost.providers import processes

_READ_BYTES: Final = 1 << 18
_DRAINED_BYTES: Final = 1 << 18
_LAST_WORDS_BYTES: Final = 2_000


class SocketChannel:
    """
    Reads and writes straight from the event loop's readiness callbacks: no task, no stream
    objects and one system call each way for a whole packet of frames.
    """

    def __init__(
        self, sock: socket.socket, process: subprocess.Popen[bytes], *, name: str, log: Path
    ) -> None:
        self._sock = sock
        self._log = log
        self._process = process
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._on_data: Callable[[bytes], None] | None = None
        self._on_end: Callable[[str], None] | None = None
        self._open = True
        self._ended = asyncio.Event()
        self._moved = asyncio.Event()
        self._burying: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def buffered_bytes(self) -> int:
        return self._unsent_bytes

    def start(self, on_data: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        self._on_data, self._on_end = on_data, on_end
        self._loop.add_reader(self._sock.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._close(f"read: {error.strerror}")
            return
        if not data:
            self._close("end_of_stream")
        elif self._on_data is not None:
            self._on_data(data)

    def write(self, data: bytes) -> None:
        if not self._open:
            return
        view = memoryview(data)
        if not self._unsent:
            try:
                sent = self._sock.send(view)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self._close(f"write: {error.strerror}")
                return
            if sent == len(view):
                return
            view = view[sent:]
            self._loop.add_writer(self._sock.fileno(), self._writable)
        self._unsent.append(view)
        self._unsent_bytes += len(view)

    def _writable(self) -> None:
        while self._unsent:
            view = self._unsent[0]
            try:
                sent = self._sock.send(view)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._close(f"write: {error.strerror}")
                return
            self._unsent_bytes -= sent
            self._moved.set()
            if sent < len(view):
                self._unsent[0] = view[sent:]
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._sock.fileno())

    async def drain(self) -> None:
        while self._open and self._unsent_bytes > _DRAINED_BYTES:
            self._moved.clear()
            await self._moved.wait()

    async def end(self, *, grace_s: float = 1.0) -> None:
        if self._open:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
            if grace_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await self._ended.wait()
            self._close("ended")
        if self._burying is not None:
            await asyncio.shield(self._burying)

    def _close(self, reason: str) -> None:
        if not self._open:
            return
        self._open = False
        descriptor = self._sock.fileno()
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        self._sock.close()
        self._unsent.clear()
        self._unsent_bytes = 0
        self._moved.set()
        self._ended.set()
        self._burying = self._loop.create_task(self._bury())
        if self._on_end is not None:
            self._on_end(reason)

    def last_words(self) -> str:
        """How the toolhost ended and the end of what it wrote to its log, once it has ended."""
        status = self._process.poll()
        if status is None:
            return "still running"
        ending = f"signal {-status}" if status < 0 else f"exit {status}"
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LAST_WORDS_BYTES))
            said = log.read(_LAST_WORDS_BYTES).decode("utf-8", "replace").strip()
            return f"{ending}: {said}" if said else ending
        return ending

    async def _bury(self) -> None:
        """A toolhost without its stream proves nothing any more: it ends, and its tools with it."""
        await asyncio.to_thread(self._bury_now)

    def _bury_now(self) -> None:
        if processes.is_portable():  # what it started is found while it lives, not later
            top = self._process.pid if self._process.poll() is None else 0
            processes.kill_all(processes.CHANNEL, self._name, top)
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        processes.kill_all(processes.CHANNEL, self._name)
