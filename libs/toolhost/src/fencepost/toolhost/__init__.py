"""The one-file program that runs inside a sandbox; standard library only, Python 3.8 or later."""

import importlib.util
import pathlib
import py_compile

_TIMESTAMPED = bytes(4)  # the flags of a compiled file that goes by its source's time and size


def source_path() -> pathlib.Path:
    """The toolhost's file, to be started as `python3 -I -S <file> ...`."""
    return pathlib.Path(__file__).with_name("toolhost.py")


def source() -> bytes:
    """The toolhost's text, for providers that pipe it into a sandbox."""
    return source_path().read_bytes()


def compiled_path() -> pathlib.Path:
    """
    The toolhost compiled for this very version of Python, to be started in the source's place.

    Saves 40 ms and 12 MB in every toolhost. The source's path where nothing can be written.
    """
    path = source_path()
    target = pathlib.Path(importlib.util.cache_from_source(str(path), optimization=""))
    try:
        # Whoever starts a compiled file starts it unlooked at: it must be of this very source.
        if not _is_current(path, target):
            py_compile.compile(
                str(path),
                str(target),
                doraise=True,
                optimize=0,
                invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP,
            )
    except OSError:
        return path
    return target


def _is_current(path: pathlib.Path, target: pathlib.Path) -> bool:
    found = path.stat()
    stamp = b"".join(
        (int(n) & 0xFFFFFFFF).to_bytes(4, "little") for n in (found.st_mtime, found.st_size)
    )
    try:
        with target.open("rb") as compiled:
            return compiled.read(16) == importlib.util.MAGIC_NUMBER + _TIMESTAMPED + stamp
    except FileNotFoundError:
        return False
