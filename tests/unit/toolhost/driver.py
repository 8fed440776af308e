"""
Drives real toolhost processes over pipes, without an event loop.

`Toolhost` starts one, speaks frames, and collects its answers; `Disk` numbers fences as a planner
would. Waits are for answers, with generous bounds, never for a fixed time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from fencepost.toolhost import compiled_path, source_path

WAIT_S = 60.0
COMPILED = compiled_path()
Frame = tuple[dict[str, Any], bytes]


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Disk:
    """A sandbox's disk: state and workspace, and the fences given out for it."""

    def __init__(self, root: Path) -> None:
        self.state = root / "state"
        self.workspace = root / "workspace"
        self.state.mkdir(parents=True, exist_ok=True)
        self.workspace.mkdir(exist_ok=True)
        self.numbers = itertools.count(1)

    def fence(
        self,
        attempt: str,
        *,
        epoch: int = 7,
        session: str = "A",
        direction: str = "apply",
        no: int | None = None,
    ) -> dict[str, Any]:
        number = next(self.numbers) if no is None else no
        return {
            "sandbox": "sbx",
            "epoch": epoch,
            "session": session,
            "attempt": attempt,
            "no": number,
            "direction": direction,
        }

    def journal(self) -> list[dict[str, Any]]:
        lines = (self.state / "journal.jsonl").read_bytes().splitlines()
        return [json.loads(line[9:]) for line in lines if line]


class Toolhost:
    """One running toolhost. Use as a context manager: it is ended by its own process id."""

    def __init__(
        self,
        disk: Disk,
        *options: str,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
    ) -> None:
        self.disk = disk
        program = COMPILED if python == sys.executable else source_path()
        argv = [python, "-I", "-S", str(program), "--state", str(disk.state)]
        argv += ["--workspace", str(disk.workspace), "--instance", "i-1", *options]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin = self.process.stdin.fileno()
        self.stdout = self.process.stdout.fileno()
        self.buffer = bytearray()
        self.frames: list[Frame] = []
        self.heartbeats: list[dict[str, Any]] = []
        self.ids = itertools.count(1)
        self.ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # -- the process

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close_input(self) -> int:
        """Ends the stream and waits for the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(WAIT_S)

    def wait_dead(self) -> int:
        return self.process.wait(WAIT_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            assert self.process.stdin is not None
            if not self.process.stdin.closed:
                self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass

    # -- frames

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        if body:
            head = {**head, "n": len(body)}
        self.send_raw(json.dumps(head).encode() + b"\n" + body)

    def send_raw(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.stdin, view) :]

    def pump(self, wait_s: float) -> bool:
        """Reads what is there; False when nothing came, or the stream ended."""
        if self.ended or not select.select([self.stdout], [], [], wait_s)[0]:
            return False
        chunk = os.read(self.stdout, 1 << 20)
        if not chunk:
            self.ended = True
            return False
        self.buffer += chunk
        while True:
            end = self.buffer.find(b"\n")
            if end < 0:
                return True
            head = json.loads(self.buffer[:end])
            size = head.get("n", 0)
            if len(self.buffer) < end + 1 + size:
                return True
            body = bytes(self.buffer[end + 1 : end + 1 + size])
            del self.buffer[: end + 1 + size]
            if head["k"] == "heartbeat":
                self.heartbeats.append(head)
            else:
                self.frames.append((head, body))

    def expect(self, wanted: Callable[[dict[str, Any]], bool], wait_s: float = WAIT_S) -> Frame:
        """The first frame that fits, waited for."""
        until = time.monotonic() + wait_s
        while True:
            for index, (head, body) in enumerate(self.frames):
                if wanted(head):
                    del self.frames[index]
                    return head, body
            if self.ended or time.monotonic() > until:
                stderr = b""
                if self.process.poll() is not None and self.process.stderr is not None:
                    stderr = self.process.stderr.read()
                raise AssertionError(f"no such answer; waiting: {self.frames}; {stderr.decode()}")
            self.pump(0.2)

    def ask(self, kind: str, body: bytes = b"", **fields: Any) -> Frame:
        number = f"q{next(self.ids)}"
        self.send({"k": kind, "id": number, **fields}, body)
        return self.expect(lambda head: head.get("id") == number)

    def hello(self) -> dict[str, Any]:
        return self.ask("hello")[0]

    def mark(
        self, epoch: int = 7, session: str = "A", nonce: str = "N7", **more: Any
    ) -> dict[str, Any]:
        return self.ask("mark", epoch=epoch, session=session, nonce=nonce, **more)[0]

    def stat(self) -> dict[str, Any]:
        return self.ask("stat")[0]

    def read(self, tool: str, args: Any, **more: Any) -> tuple[dict[str, Any], Any]:
        head, body = self.ask("read", json.dumps(args).encode(), tool=tool, **more)
        return head, json.loads(body)

    def good(self, tool: str, args: Any) -> Any:
        head, result = self.read(tool, args)
        assert head["ok"], result
        return result

    # -- fenced calls

    def send_call(
        self, kind: str, fence: dict[str, Any], tool: str = "", args: Any = None, **more: Any
    ) -> None:
        body = b"" if args is None else args if type(args) is bytes else json.dumps(args).encode()
        head = {"k": kind, "fence": fence, "step": fence["attempt"].partition(".")[0], "tool": tool}
        self.send({**head, "digest": digest(body), "effect": "workspace", **more}, body)

    def receipt(self, fence: dict[str, Any], wait_s: float = WAIT_S) -> dict[str, Any]:
        return json.loads(self.receipt_bytes(fence, wait_s))

    def receipt_bytes(self, fence: dict[str, Any], wait_s: float = WAIT_S) -> bytes:
        names = ("attempt", "direction")
        _, body = self.expect(
            lambda head: head["k"] == "receipt" and all(head[n] == fence[n] for n in names), wait_s
        )
        return body

    def apply(
        self, fence: dict[str, Any] | str, tool: str, args: Any, **more: Any
    ) -> dict[str, Any]:
        if isinstance(fence, str):
            fence = self.disk.fence(fence)
        self.send_call("apply", fence, tool, args, **more)
        return self.receipt(fence)

    def undo(
        self, attempt: str, of: str, tool: str = "", args: Any = None, **fence: Any
    ) -> dict[str, Any]:
        sent = self.disk.fence(attempt, direction="undo", **fence)
        self.send_call("undo", sent, tool, args, of=of)
        return self.receipt(sent)

    def revoke(self, attempt: str, **fence: Any) -> dict[str, Any]:
        sent = self.disk.fence(attempt, direction="revoke", **fence)
        self.send_call("revoke", sent)
        return self.receipt(sent)

    def write(self, attempt: str, path: str, content: str, **fence: Any) -> dict[str, Any]:
        sent = self.disk.fence(attempt, **fence)
        return self.apply(sent, "write_file", {"path": path, "content": content})


def wait_until(claim: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    until = time.monotonic() + wait_s
    while not claim():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)
