"""Real SWE-ReX servers on loopback, each with a disk of its own that ends with it."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from fencepost.providers import bubblewrap

TOKEN = "a-token-of-the-tests"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SwerexServer:
    """
    One server. Its base folder is the same path in each, as it is in containers: a private tmpfs
    in bubblewrap, else a folder that is emptied when the server is replaced.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"{name}.log"
        self._disk = folder / f"{name}.disk"
        self.is_private = bubblewrap.probe() is not None
        # Inside a namespace of its own every server can have the same folder.
        self.base = "/var/tmp/fencepost" if self.is_private else str(self._disk / "base")
        self._process: subprocess.Popen[bytes] | None = None

    def entry(self) -> dict[str, str]:
        return {"url": self.url, "token": TOKEN, "base": self.base, "python": sys.executable}

    async def start(self) -> None:
        self._disk.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "swerex.server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--auth-token", TOKEN]
        if self.is_private:
            wrap = [str(shutil.which("bwrap")), "--unshare-pid", "--die-with-parent"]
            wrap += ["--bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
            wrap += ["--tmpfs", "/var/tmp", "--"]
            command = wrap + command
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        request = urllib.request.Request(self.url + "/is_alive", headers={"X-API-Key": TOKEN})
        until = time.monotonic() + 60
        while True:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()
            try:
                with urllib.request.urlopen(request, timeout=2) as answer:
                    assert answer.status == 200
                    return
            except OSError:
                assert time.monotonic() < until, self._log.read_text()
                time.sleep(0.1)

    def kill(self) -> None:
        """Takes the server with its disk and every process, as a preemption does."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None
        shutil.rmtree(self._disk, ignore_errors=True)

    async def replace(self) -> None:
        """Another server at the same address: nothing that it answers tells it from the first."""
        self.kill()
        await self.start()
