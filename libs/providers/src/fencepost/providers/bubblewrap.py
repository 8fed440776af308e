"""
The walls of the `process` provider: what a tool's command line is wrapped in.

One probe per process, of the whole line and done for real: namespaces are refused in many
containers although the program is there, so only a run that worked counts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WORKSPACE: Final = "/workspace"
_SYSTEM: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC: Final = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/certs")
_ETC_NETWORK: Final = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf")
_UID: Final = "1000"

# The strictest that works is taken. Without a user namespace (it may be forbidden to root in a
# container, or bwrap be setuid) the rest still stands.
_USER_CHOICES: Final = (
    ("--unshare-user", "--uid", _UID, "--gid", _UID, "--disable-userns"),
    ("--unshare-user", "--uid", _UID, "--gid", _UID),
    (),
)
_ALWAYS: Final = (
    "--unshare-pid",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--hostname",
    "sandbox",
    "--cap-drop",
    "ALL",
    "--die-with-parent",
    "--new-session",
)


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """A bubblewrap that was seen to work. `user`: how it leaves our user id behind."""

    program: str
    user: tuple[str, ...]
    prlimit: str
    is_sized: bool

    def scratch(self, memory_mb: int) -> tuple[str, ...]:
        """Bounds the scratch folder that follows: what lies there is memory, of no process."""
        return ("--size", str(memory_mb << 20)) if self.is_sized else ()

    def prefix(
        self, etc: Path, *, writable: bool, network: bool, processes: int, memory_mb: int
    ) -> list[str]:
        """
        Builds the argv to put before a command. `{workspace}` and `{cwd}` are left for the
        toolhost to fill.

        `processes` is limited inside, where only the sandbox's own are counted; the kernel counts
        none against root, so there it holds only for a gateway that is not run as root.
        """
        words = [self.program, *self.user, *_ALWAYS]
        if not network:
            words.append("--unshare-net")
        words += _system_binds()
        for path in (*_ETC, *(_ETC_NETWORK if network else ())):
            words += ["--ro-bind-try", path, path]
        for name in ("passwd", "group"):
            words += ["--ro-bind", str(etc / name), f"/etc/{name}"]
        words += ["--proc", "/proc", "--dev", "/dev"]
        for path in ("/dev/shm", "/tmp"):  # noqa: S108 - inside, and each sandbox's own
            words += [*self.scratch(memory_mb), "--tmpfs", path]
        words += ["--bind" if writable else "--ro-bind", "{workspace}", WORKSPACE]
        # The toolhost names a command's folder as the host does: that name leads to the same place.
        words += ["--symlink", WORKSPACE, "{workspace}", "--remount-ro", "/dev"]
        words += ["--remount-ro", "/", "--chdir", "{cwd}", "--"]
        # bubblewrap tells a program the folder by the host's name of it; its own is better.
        words += ["/usr/bin/env", "-u", "PWD"]
        if self.prlimit:
            words += [self.prlimit, f"--nproc={processes}"]
        return words


def _system_binds() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for path in _SYSTEM:
        if os.path.islink(path):  # noqa: PTH114
            words += ["--symlink", os.readlink(path), path]  # noqa: PTH115
        elif os.path.isdir(path):  # noqa: PTH112
            words += ["--ro-bind", path, path]
    return words


def write_etc(folder: Path) -> None:
    """
    Writes the two files that programs look themselves up in, so that the host's stay unseen.

    What is there already is left alone: a gateway must start on a full disk too, or nobody could
    stop what fills it.
    """
    folder.mkdir(mode=0o755, exist_ok=True)
    for name, text in (
        ("passwd", f"sandbox:x:{_UID}:{_UID}:sandbox:{WORKSPACE}:/bin/sh\n"),
        ("group", f"sandbox:x:{_UID}:\n"),
    ):
        with contextlib.suppress(OSError):
            if (folder / name).read_text(encoding="ascii") == text:
                continue
        fresh = folder / f".{name}.{os.getpid()}"
        fresh.write_text(text, encoding="ascii")
        fresh.replace(folder / name)


@functools.cache
def probe() -> Bubblewrap | None:
    """Finds a bubblewrap that works here, or None. Blocks for some tens of milliseconds, once."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    prlimit = next((path for path in ("/usr/bin/prlimit",) if os.access(path, os.X_OK)), "")
    for user in _USER_CHOICES:
        for is_sized in (True, False):
            found = Bubblewrap(program=program, user=user, prlimit=prlimit, is_sized=is_sized)
            if _works(found):
                return found
    return None


def _works(found: Bubblewrap) -> bool:
    """Runs a command behind the very walls that tools get."""
    with tempfile.TemporaryDirectory(prefix="fencepost-probe-") as name:
        folder = Path(name)
        write_etc(folder / "etc")
        workspace = folder / "workspace"
        workspace.mkdir()
        prefix = found.prefix(
            folder / "etc", writable=True, network=False, processes=64, memory_mb=64
        )
        places = {"{workspace}": str(workspace), "{cwd}": str(workspace)}
        command = [places.get(word, word) for word in prefix]
        try:
            done = subprocess.run(
                [*command, "/bin/sh", "-c", "echo > here"],
                check=False,
                capture_output=True,
                timeout=10,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0 and (workspace / "here").exists()
