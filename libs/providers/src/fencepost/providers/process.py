"""
The embedded runtime: a sandbox is a directory and the processes that carry its instance.

Layout: `<root>/<native id>/{instance,labels.json,state/,workspace/}`, beside `.new` (being made),
`.trash` (being removed), `.settled` (create ids that are over) and `.going` (put there by whoever
minds the host, when it is to go; `going` in one sandbox's folder is about that one). A directory
appears by one rename and disappears by one rename, so a crash leaves nothing half-made under a
native id.

An instance is minted at the create and carries the host's boot: after a reboot the former ones
are gone, because a power loss may have torn what they had not synced.

Processes are found by the instance in their environment. Inside bubblewrap that is complete: they
die with their pid namespace. Without it, a tool that empties its environment and leaves its process
group escapes (docs/security.md); the isolation is then reported as `none`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from fencepost.core.facts import Capabilities, Ref
from fencepost.core.steps import SandboxSpec
from fencepost.providers import announced, bubblewrap, processes, witness
from fencepost.providers.protocol import (
    LABEL_CREATE,
    LABEL_DEPLOYMENT,
    Absent,
    ChannelRefusedError,
    CreateAmbiguous,
    CreateAnswer,
    Created,
    CreateRefused,
    FindAnswer,
    Listed,
    Notice,
    Observation,
    Page,
    ProviderTraits,
    StopAnswer,
    Unknown,
    stop_refusal,
)
from fencepost.providers.stream import SocketChannel

NAME: Final = "process"
_Argv: TypeAlias = list[str]
_Notices: TypeAlias = list[Notice]
_WITNESS: Final = ".fencepost-root"
_NEW: Final = ".new"
_TRASH: Final = ".trash"
_SETTLED: Final = ".settled"
_GOING: Final = "going"
"""In a sandbox's folder it announces that one's end; `.going` in the root, the host's."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NATIVE: Final = re.compile(r"[A-Za-z0-9_-]{1,96}")
_INSTANCE: Final = re.compile(r"i[0-9a-f]{16}-b[0-9a-f]{8}")
_SETTLED_KEPT_S: Final = 24 * 3600
_CRASH: Final = ("FENCEPOST_TOOLHOST_CRASH", "FENCEPOST_TOOLHOST_CRASH_ONCE")
FILE_MB_MAX: Final = 1024
_PATH: Final = ("/opt/homebrew/bin:" if sys.platform == "darwin" else "") + (
    "/usr/local/bin:/usr/bin:/bin"
)


class RootUnreadableError(OSError):
    """The root is not there, or is another one: nothing can be said about what it held."""


class ProcessProvider:
    """
    Sandboxes under one root folder on one host, of one deployment.

    Several providers (of several gateways) may share a root: they have the same authority and see
    the same sandboxes. `toolhost` and `python` say what is started inside, and with what.
    """

    def __init__(
        self,
        root: Path,
        *,
        deployment: str = "local",
        toolhost: Path | None = None,
        python: str = "",
        heartbeat_ms: int = 1000,
        isolate: bool = True,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root.resolve()
        self._deployment = deployment
        ours = getattr(sys, "_base_executable", "") or sys.executable
        self._python = python or ours
        self._toolhost = toolhost if toolhost is not None else _toolhost_for(self._python, ours)
        self._heartbeat_ms = heartbeat_ms
        for part in (_NEW, _TRASH, _SETTLED):
            (self._root / part).mkdir(mode=0o700, exist_ok=True)
        self._witness = witness.minted(self._root / _WITNESS, digits=32)
        boot = _boot_id()
        self._boot = _digest(boot or "boot-unknown")[:8]
        self._wrap = bubblewrap.probe() if isolate else None
        if self._wrap is not None:
            bubblewrap.write_etc(self._root / ".etc")
        place = f"{_host_id()}\n{self._root}\n{self._witness}"
        self._traits = ProviderTraits(
            name=NAME,
            authority=f"process-{_digest(place)[:24]}",
            instance="native",
            stop="sync",
            list="complete",
            auto_resume=False,
            snapshot=False,
            settles_creates=True,
            capabilities=Capabilities(
                generation=True,
                observes_gone=True,
                readonly_commands=self._wrap is not None,
                isolation="bubblewrap" if self._wrap is not None else "none",
                power_loss_is_new_instance=bool(boot),
            ),
        )
        self._retire_former_boots()
        self._forget_settled()

    @property
    def traits(self) -> ProviderTraits:
        return self._traits

    # -- making ---------------------------------------------------------------------------------

    async def create(
        self, create_id: str, spec: SandboxSpec, labels: Mapping[str, str]
    ) -> CreateAnswer:
        del spec  # network and limits are the channel's: they bind tools, not a folder
        native = self._native_id(create_id)
        final = self._root / native
        fresh = self._root / _NEW / f"{native}.{secrets.token_hex(4)}"
        try:
            self._assert_root()
            if self._is_settled(native):
                return self._over(native)
            if (found := self._ref_at(native)) is not None:
                return self._created(found)
            self._prepare(fresh, {**labels, LABEL_CREATE: create_id})
            # Another gateway may have been faster: a rename onto a full folder is refused.
            with contextlib.suppress(FileExistsError, NotADirectoryError, OSError):
                fresh.rename(final)
            found = self._ref_at(native)
        except OSError as error:
            shutil.rmtree(fresh, ignore_errors=True)
            return self._create_failed(native, error)
        shutil.rmtree(fresh, ignore_errors=True)
        if found is None:
            return CreateAmbiguous(reason="vanished_while_created")
        if self._is_settled(native):
            # The create id ended between the look and the rename: take the result back.
            await self.stop(found, found.instance)
            return self._over(native)
        return self._created(found)

    def _over(self, native: str) -> CreateAnswer:
        """The answer to a create whose id is settled: refused, unless something of it is there."""
        try:
            exists = self._ref_at(native) is not None
        except OSError as error:
            return CreateAmbiguous(reason=f"settled; {error}")
        if exists:
            return CreateAmbiguous(reason="settled, and what it made is there")
        return CreateRefused(reason="settled")

    def _prepare(self, fresh: Path, labels: Mapping[str, str]) -> None:
        fresh.mkdir(mode=0o700)
        (fresh / "state").mkdir(mode=0o700)
        (fresh / "workspace").mkdir(mode=0o700)
        labels = {LABEL_DEPLOYMENT: self._deployment, **labels}
        (fresh / "labels.json").write_text(json.dumps(labels), encoding="utf-8")
        (fresh / "instance").write_text(
            f"i{secrets.token_hex(8)}-b{self._boot}\n", encoding="ascii"
        )

    def _create_failed(self, native: str, error: OSError) -> CreateAnswer:
        reason = f"{type(error).__name__}: {error.strerror or error}"
        try:
            self._assert_root()
            exists = self._ref_at(native) is not None
        except OSError:
            return CreateAmbiguous(reason=reason)
        return CreateAmbiguous(reason=reason) if exists else CreateRefused(reason=reason)

    def _created(self, ref: Ref) -> Created:
        return Created(ref=ref, capabilities=self._traits.capabilities)

    # -- looking --------------------------------------------------------------------------------

    async def find(self, create_id: str) -> FindAnswer:
        try:
            self._assert_root()
            ref = self._ref_at(self._native_id(create_id))
        except OSError as error:
            return Unknown(reason=str(error))
        return Absent() if ref is None else self._created(ref)

    async def list(self, token: str = "") -> Page:
        del token
        # In a thread: thousands of folders to read must not keep heartbeats waiting.
        return await asyncio.to_thread(self._list)

    def _list(self) -> Page:
        items: list[Listed] = []
        complete = True
        try:
            self._assert_root()
            for entry in sorted(os.listdir(self._root)):  # noqa: PTH208 - names only
                if entry.startswith("."):
                    continue
                ref = self._ref_at(entry)
                if ref is not None and (labels := self._labels_at(self._root / entry)) is not None:
                    items.append(Listed(ref=ref, labels=labels, state="present"))
            for entry in sorted(os.listdir(self._root / _TRASH)):  # noqa: PTH208
                native, _, instance = entry.rpartition(".")
                labels = self._labels_at(self._root / _TRASH / entry)
                if native and labels is not None:
                    ref = self._ref(native, instance)
                    items.append(Listed(ref=ref, labels=labels, state="terminating"))
        except OSError:
            complete = False
        return Page(items=tuple(items), complete=complete)

    async def observe(self, ref: Ref) -> Observation:
        return self._observe(ref)

    def _observe(self, ref: Ref) -> Observation:
        if not self._is_ours(ref):
            return Observation(state="unknown", detail="another authority")
        try:
            self._assert_root()
            there = self._instance_at(ref.native_id)
            if there is not None and there == ref.instance:
                return Observation(state="present", instance=there)
            if (self._root / _TRASH / f"{ref.native_id}.{ref.instance}").exists():
                return Observation(state="terminating", instance=ref.instance)
            # Again, because a stop may have renamed it between the two looks.
            self._assert_root()
            return Observation(state="gone", instance=there or "")
        except OSError as error:
            return Observation(state="unknown", detail=str(error))

    # -- ending ---------------------------------------------------------------------------------

    async def stop(self, ref: Ref, expect_instance: str) -> StopAnswer:
        if refusal := stop_refusal(ref, expect_instance, is_ours=self._is_ours(ref)):
            return refusal
        try:
            answer = self._put_away(ref, expect_instance)
        except OSError as error:
            if error.errno not in _FULL:
                return StopAnswer(answer="unreachable", detail=str(error))
            # What is to be ended may be what fills the disk, and a stop writes two names.
            try:
                await asyncio.to_thread(self._make_room, ref.native_id, expect_instance)
                answer = self._put_away(ref, expect_instance)
            except OSError as again:
                return StopAnswer(answer="unreachable", detail=str(again))
        if answer.answer == "accepted":
            trash = self._trash_of(ref.native_id, expect_instance)
            await asyncio.to_thread(self._remove, trash, expect_instance)
        return answer

    def _trash_of(self, native: str, instance: str) -> Path:
        return self._root / _TRASH / f"{native}.{instance}"

    def _put_away(self, ref: Ref, instance: str) -> StopAnswer:
        """Ends the create id and takes the folder out of its place. Raises `OSError`."""
        self._assert_root()
        there = self._instance_at(ref.native_id)
        trash = self._trash_of(ref.native_id, instance)
        if there == instance:
            self._settle(ref.native_id)
            with contextlib.suppress(FileNotFoundError):
                (self._root / ref.native_id).rename(trash)
        elif not trash.exists():
            if there is not None:
                return StopAnswer(answer="refused_other_instance", instance=there)
            return StopAnswer(answer="not_found")
        return StopAnswer(answer="accepted", instance=instance)

    def _make_room(self, native: str, instance: str) -> None:
        """Ends an instance that is to be stopped anyway, and empties its workspace, in place."""
        if self._instance_at(native) == instance and processes.kill_all(
            processes.INSTANCE, instance
        ):
            shutil.rmtree(self._root / native / "workspace", onerror=_make_removable)

    async def settle(self, create_id: str) -> bool:
        try:
            self._assert_root()
            self._settle(self._native_id(create_id))
        except OSError:
            return False
        return True

    async def notices(self, refs: Collection[Ref]) -> Sequence[Notice]:
        return await asyncio.to_thread(self._notices, refs)

    def _notices(self, refs: Collection[Ref]) -> _Notices:
        of_host = announced.grace_ms(self._root / f".{_GOING}")
        found: list[Notice] = []
        for ref in filter(self._is_ours, refs):
            own = announced.grace_ms(self._root / ref.native_id / _GOING)
            given = [ms for ms in (of_host, own) if ms is not None]
            if given:
                found.append(Notice(ref=ref, grace_ms=min(given), detail="by a file"))
        return found

    async def reclaim(self, ref: Ref) -> bool:
        if not self._is_ours(ref) or self._instance_at(ref.native_id) != ref.instance:
            return False
        # The disk first: what is killed must not find it again.
        trash = self._trash_of(ref.native_id, ref.instance)
        try:
            (self._root / ref.native_id).rename(trash)
        except OSError:
            return False
        await asyncio.to_thread(self._remove, trash, ref.instance)
        return True

    def _remove(self, trash: Path, instance: str) -> None:
        """Removes the folder only when no process of the instance is left; else it stays, seen."""
        if processes.kill_all(processes.INSTANCE, instance):
            shutil.rmtree(trash, onerror=_make_removable)

    # -- the way in -----------------------------------------------------------------------------

    async def channel(self, ref: Ref, spec: SandboxSpec) -> SocketChannel:
        seen = self._observe(ref)
        if seen.state != "present":
            raise ChannelRefusedError(f"sandbox is {seen.state}", seen.state)
        home = self._root / ref.native_id
        name = secrets.token_hex(8)
        # Not in a thread: the kernel ties the parent's death signal to the thread that forks.
        try:
            process, ours = processes.spawn(
                self._command(home, ref.instance, name, spec),
                env=self._environment(home / "workspace", ref.instance, name) | _armed(),
                log=home / "toolhost.log",
            )
        except OSError as error:
            raise ChannelRefusedError(f"spawn: {error}", self._observe(ref).state) from error
        channel = SocketChannel(ours, process, name=name, log=home / "toolhost.log")
        # A stop in between has moved the folder: what was started there is not the sandbox.
        if (seen := self._observe(ref)).state != "present":
            channel.start(lambda _data: None, lambda _reason: None)
            await channel.end(grace_s=0)
            if not (home / "instance").exists():
                shutil.rmtree(home, ignore_errors=True)
            raise ChannelRefusedError(f"sandbox is {seen.state}", seen.state)
        return channel

    def _environment(self, workspace: Path, instance: str, channel: str) -> dict[str, str]:
        return {
            "PATH": _PATH,
            "LANG": "C.UTF-8",
            "HOME": bubblewrap.WORKSPACE if self._wrap is not None else str(workspace),
            "TMPDIR": "/tmp",  # noqa: S108 - a tmpfs of its own inside bubblewrap
            processes.INSTANCE: instance,
            processes.CHANNEL: channel,
        }

    def _command(self, home: Path, instance: str, channel: str, spec: SandboxSpec) -> _Argv:
        env = self._environment(home / "workspace", instance, channel)
        limits: dict[str, int] = {"memory_mb": spec.memory_mb, "file_mb": FILE_MB_MAX}
        command = [self._python, "-I", "-S", str(self._toolhost)]
        command += ["--state", str(home / "state"), "--workspace", str(home / "workspace")]
        command += ["--instance", instance, "--env", json.dumps(env)]
        command += ["--heartbeat-ms", str(self._heartbeat_ms)]
        if not self._traits.capabilities.power_loss_is_new_instance:
            command.append("--sync")  # the instance would survive what the disk may not
        if self._wrap is None:
            limits["processes"] = processes.tasks_of_this_user() + spec.processes
        else:
            etc = self._root / ".etc"
            for option, writable in (("--exec-prefix", True), ("--exec-prefix-ro", False)):
                prefix = self._wrap.prefix(
                    etc,
                    writable=writable,
                    network=spec.network,
                    processes=spec.processes,
                    memory_mb=spec.memory_mb,
                )
                command += [option, json.dumps(prefix)]
        return [*command, "--limits", json.dumps(limits)]

    # -- names and files ------------------------------------------------------------------------

    def _native_id(self, create_id: str) -> str:
        readable = re.sub(r"[^A-Za-z0-9_-]", "-", create_id)[:40]
        return f"{readable}-{_digest(f'{self._deployment}{chr(10)}{create_id}')[:16]}"

    def _ref(self, native: str, instance: str) -> Ref:
        return Ref(
            authority=self._traits.authority, provider=NAME, native_id=native, instance=instance
        )

    def _ref_at(self, native: str) -> Ref | None:
        instance = self._instance_at(native)
        return None if instance is None else self._ref(native, instance)

    def _instance_at(self, native: str) -> str | None:
        """The instance under this name, or None. Raises OSError where that cannot be read."""
        try:
            text = (self._root / native / "instance").read_text(encoding="ascii").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if _INSTANCE.fullmatch(text) is None:
            raise OSError(f"no instance can be read of {native}")
        return text if text.endswith(f"-b{self._boot}") else None

    def _labels_at(self, home: Path) -> dict[str, str] | None:
        """The labels, or None for another deployment's. Raises OSError where unreadable."""
        try:
            labels = json.loads((home / "labels.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise OSError(f"labels of {home.name} cannot be read") from error
        if not isinstance(labels, dict) or labels.get(LABEL_DEPLOYMENT) != self._deployment:
            return None
        return {str(key): str(value) for key, value in labels.items()}

    def _is_ours(self, ref: Ref) -> bool:
        return (
            self._traits.names(ref)
            and _NATIVE.fullmatch(ref.native_id) is not None
            and _INSTANCE.fullmatch(ref.instance) is not None
        )

    def _assert_root(self) -> None:
        """An unmounted or replaced root is no proof that its sandboxes are gone."""
        try:
            held = (self._root / _WITNESS).read_text(encoding="ascii").strip()
        except OSError as error:
            raise RootUnreadableError(f"root cannot be read: {error}") from error
        if held != self._witness:
            raise RootUnreadableError("root was replaced by another one")

    def _is_settled(self, native: str) -> bool:
        return (self._root / _SETTLED / native).exists()

    def _settle(self, native: str) -> None:
        (self._root / _SETTLED / native).touch()

    def _forget_settled(self) -> None:
        newest = max((_mtime(path) for path in (self._root / _SETTLED).iterdir()), default=0.0)
        for path in (self._root / _SETTLED).iterdir():
            if _mtime(path) < newest - _SETTLED_KEPT_S:
                path.unlink(missing_ok=True)

    def _retire_former_boots(self) -> None:
        for entry in list(self._root.iterdir()):
            if entry.name.startswith("."):
                continue
            with contextlib.suppress(OSError):
                text = (entry / "instance").read_text(encoding="ascii").strip()
                if _INSTANCE.fullmatch(text) and not text.endswith(f"-b{self._boot}"):
                    entry.rename(self._root / _TRASH / f"{entry.name}.{text}")
        for entry in list((self._root / _TRASH).iterdir()):
            instance = entry.name.rpartition(".")[2]
            if _INSTANCE.fullmatch(instance) and not instance.endswith(f"-b{self._boot}"):
                shutil.rmtree(entry, onerror=_make_removable)


def _armed() -> dict[str, str]:
    """What tests tell a toolhost, as where it is to die; its tools do not see it."""
    names = (*_CRASH, processes.PORTABLE)
    return {name: os.environ[name] for name in names if name in os.environ}


def _toolhost_for(python: str, ours: str) -> Path:
    """The toolhost compiled, where it is our own Python that runs it; else its source."""
    from fencepost import toolhost

    if os.path.realpath(python) == os.path.realpath(ours):
        return Path(toolhost.compiled_path())
    return Path(toolhost.source_path())


def _make_removable(remove: object, path: str, failure: object) -> None:
    """A tool may have taken its folders' write permission away; the owner can give it back."""
    del failure
    with contextlib.suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)  # noqa: PTH101, PTH120
        os.chmod(path, 0o700)  # noqa: PTH101
        if callable(remove):
            remove(path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _host_id() -> str:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            return Path(path).read_text(encoding="ascii").strip() + "/" + socket.gethostname()
    # A Mac's host name follows the network that it is in.
    hardware = _said(["/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice"])
    found = re.search(r'"IOPlatformUUID" = "([^"]+)"', hardware)
    return found[1] if found else socket.gethostname()


def _boot_id() -> str:
    """What is another one after every start of the machine; empty where nothing tells it."""
    if not processes.is_portable():
        with contextlib.suppress(OSError):
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return _said(["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"])


def _said(argv: list[str]) -> str:
    """What a program of the system says, or nothing."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
