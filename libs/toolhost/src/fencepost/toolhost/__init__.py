"""The one-file program that runs inside a sandbox; standard library only, Python 3.8 or later."""

import pathlib


def source_path() -> pathlib.Path:
    """The toolhost's file, to be started as `python3 -I -S <file> ...`."""
    return pathlib.Path(__file__).with_name("toolhost.py")


def source() -> bytes:
    """The toolhost's text, for providers that pipe it into a sandbox."""
    return source_path().read_bytes()
