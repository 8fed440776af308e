"""
Small disks that can run full or lose their power: for root on Linux.

`lose_power` is what file system tests do: the file system is shut down without flushing its log
(the ioctl of `xfstests`' godown), so that dirty pages and uncommitted metadata never reach the
device, then it is mounted again, which replays the log. What the file system had handed to the
device is kept, synced or not: a device's own volatile cache is not part of this.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

_MIB: Final = 1024 * 1024
_SHUTDOWN: Final = (2 << 30) | (4 << 16) | (ord("X") << 8) | 125
_NO_LOG_FLUSH: Final = struct.pack("I", 2)
_CLONE_NEWNS: Final = 0x00020000
_FILLER: Final = ".filler"
_LEFT_BYTES: Final = 4096


class DiskError(RuntimeError):
    """A disk could not be made or mounted here."""


def why_not() -> str:
    """Says why small disks cannot be had here, or nothing."""
    if sys.platform != "linux":
        return "not on Linux"
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("mount", "umount", "mkfs.ext4") if shutil.which(name) is None]
    return f"no {missing[0]}" if missing else ""


def why_no_power_cut() -> str:
    """Says why a disk that loses its power cannot be had here, or nothing."""
    why = why_not()
    if not why and not Path("/dev/loop-control").exists():
        why = "no loop devices"
    return why


def unshare_mounts() -> None:
    """
    Gives this process mounts of its own: what it mounts ends with it and its children.

    Called before anything else is started; without it a killed run would leave mounts behind.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise DiskError(f"unshare: {os.strerror(ctypes.get_errno())}")
    _run("mount", "--make-rprivate", "/")


class Disk:
    """One mounted file system of `size_mb`, in memory."""

    def __init__(self, folder: Path, size_mb: int) -> None:
        self.folder = folder
        self.size_mb = size_mb
        self.is_mounted = False

    def mount(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={self.size_mb}m", "tmpfs", str(self.folder))
        self.is_mounted = True

    def fill(self) -> None:
        """Leaves no more than a page free."""
        with contextlib.suppress(OSError), (self.folder / _FILLER).open("ab") as filler:
            for size in (_MIB, _LEFT_BYTES):
                while True:
                    try:
                        os.write(filler.fileno(), b"\0" * size)
                    except OSError:
                        break

    def free(self) -> None:
        (self.folder / _FILLER).unlink(missing_ok=True)

    def unmount(self) -> None:
        if self.is_mounted:
            _run("umount", str(self.folder))
            self.is_mounted = False


class PowerDisk(Disk):
    """An ext4 file system on a loop device: what was not synced is gone after `lose_power`."""

    def __init__(self, folder: Path, size_mb: int, image: Path) -> None:
        super().__init__(folder, size_mb)
        self._image = image

    def mount(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._image.exists():
            with self._image.open("wb") as image:
                image.truncate(self.size_mb * _MIB)
            _run("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
        _run("mount", "-o", "loop", str(self._image), str(self.folder))
        self.is_mounted = True

    def cut(self) -> None:
        """From here on nothing reaches the device, and every access fails."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, _SHUTDOWN, _NO_LOG_FLUSH)
        except OSError as error:
            raise DiskError(f"{self.folder}: not shut down: {error}") from error
        finally:
            os.close(handle)

    def come_back(self) -> None:
        """Mounts it again, without what had not reached the device. Nobody may have it open."""
        self.unmount()
        self.mount()

    def discard(self) -> None:
        self._image.unlink(missing_ok=True)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise DiskError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
