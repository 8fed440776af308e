"""
A sandbox as most are: an HTTP server that does what it is asked and answers 200.

The demo's common planner talks to it. It knows no generation, so neither can its answer.
Run as `python -m fencepost.client.plain_sandbox FOLDER PORT`.
"""

from __future__ import annotations

import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class _Tools(BaseHTTPRequestHandler):
    disk: Path

    def do_POST(self) -> None:
        """Applies a patch that makes one new file, durably, and says so."""
        patch = self.rfile.read(int(self.headers["Content-Length"])).decode()
        name, content = new_file_of(patch)
        with (self.disk / name).open("w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._answer(200, b"patch applied\n")

    def do_GET(self) -> None:
        path = self.disk / self.path.lstrip("/")
        if path.is_file():
            self._answer(200, path.read_bytes())
        else:
            self._answer(404, b"no such file\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads this server's log."""


def new_file_of(patch: str) -> tuple[str, str]:
    """The name and content of the one file that a unified diff makes."""
    lines = patch.splitlines()
    name = next(line for line in lines if line.startswith("+++ b/")).removeprefix("+++ b/")
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    return name, "".join(line + "\n" for line in added)


if __name__ == "__main__":
    _Tools.disk = Path(sys.argv[1])
    _Tools.disk.mkdir(parents=True, exist_ok=True)
    HTTPServer(("127.0.0.1", int(sys.argv[2])), _Tools).serve_forever()
