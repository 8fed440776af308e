"""
A Docker engine for tests: one of our own where it can be started, else the one that answers.

One of our own gets stand-ins for the images that cannot be pulled; another's engine is never given
any. One test run at a time has it: another one does without, or waits for
`FENCEPOST_TEST_ENGINE_WAIT` seconds. `FENCEPOST_TEST_ENGINE=none` does without in any case.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "deploy" / "docker" / "engine.sh"
STAND_INS = ROOT / "deploy" / "docker" / "stand_ins.py"
HOME = Path("/var/tmp/fencepost-engine")
PYTHON, NATS, POSTGRES = "python:3.11-slim", "nats:2.15-alpine", "postgres:18-alpine"


_held: list[IO[str]] = []


class NoEngineError(Exception):
    """No engine can be had here, and why."""


@dataclass(frozen=True)
class Engine:
    """`is_own`: started here, so that it may be restarted and killed, and is stopped at the end."""

    host: str
    is_own: bool

    @property
    def environment(self) -> dict[str, str]:
        given = {**os.environ, "DOCKER_HOST": self.host, "FENCEPOST_ENGINE_HOME": str(HOME)}
        given.pop("DOCKER_CONTEXT", None)
        return {**given, "TESTCONTAINERS_RYUK_DISABLED": "true"}

    def docker(self, *words: str, seconds: float = 120, check: bool = True) -> str:
        """Runs a docker command; what it said, or an AssertionError with what it complained of."""
        done = subprocess.run(
            ["docker", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0 or not check, f"docker {' '.join(words)}: {done.stderr}"
        # What a container wrote to standard error comes out as `docker logs` own.
        return (done.stdout + done.stderr if words[0] == "logs" else done.stdout).strip()

    def script(self, word: str) -> None:
        """What `engine.sh` can do to an engine of our own: restart, kill, start, stop."""
        assert self.is_own
        done = _engine_script(word)
        assert done.returncode == 0, done.stderr


def start() -> Engine:
    """Finds or starts an engine, with the images that tests name. Raises `NoEngineError`."""
    if os.environ.get("FENCEPOST_TEST_ENGINE") == "none":
        raise NoEngineError("FENCEPOST_TEST_ENGINE=none")
    _take_turn()
    done = _engine_script("start")
    if done.returncode == 0:
        engine = Engine(done.stdout.strip().removeprefix("DOCKER_HOST="), is_own=True)
        try:
            _make_ready(engine)
        except BaseException:
            stop(engine)
            raise
        return engine
    if (found := answering()) is not None:
        return found
    raise NoEngineError(done.stderr.strip() or "no engine answers")


def _make_ready(engine: Engine) -> None:
    """Clears away what a run that was cut short left, and makes the images. Raises NoEngineError."""
    if left := engine.docker("ps", "-aq").split():
        engine.docker("rm", "-fv", *left)
    made = subprocess.run(
        [sys.executable, STAND_INS],
        env=engine.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if made.returncode != 0:
        raise NoEngineError(f"the stand-ins cannot be made: {made.stderr.strip()[-300:]}")


def answering() -> Engine | None:
    """An engine that somebody else runs, once it has the images that tests name."""
    for host in filter(None, (os.environ.get("DOCKER_HOST"), "unix:///var/run/docker.sock")):
        engine = Engine(host, is_own=False)
        if host.endswith(f"{HOME}/docker.sock"):
            continue  # one of our own, of another run
        try:
            engine.docker("version", seconds=20)
            for image in (PYTHON, NATS, POSTGRES):
                if not engine.docker("images", "-q", image):
                    engine.docker("pull", "-q", image, seconds=300)
        except (AssertionError, OSError, subprocess.SubprocessError):
            continue
        return engine
    return None


def stop(engine: Engine) -> None:
    """Stops what `start` started."""
    if engine.is_own:
        _engine_script("stop")
        while _held:
            _held.pop().close()


def _take_turn() -> None:
    HOME.mkdir(mode=0o711, parents=True, exist_ok=True)
    turn = (HOME / "turn").open("w")
    until = time.monotonic() + float(os.environ.get("FENCEPOST_TEST_ENGINE_WAIT", "0"))
    while True:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= until:
                turn.close()
                raise NoEngineError("another test run has it") from None
            time.sleep(0.5)
        else:
            _held.append(turn)
            return


def _engine_script(word: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", SCRIPT, word],
        env={**os.environ, "FENCEPOST_ENGINE_HOME": str(HOME)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
