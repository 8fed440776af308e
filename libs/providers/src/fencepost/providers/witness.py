"""The identity of a folder that several processes share: minted once, read by all of them."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def minted(path: Path, *, digits: int) -> str:
    """Reads the identity in this file, minting it where there is none: the first to try decides."""
    if not path.exists():
        mine = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        mine.write_text(secrets.token_hex(digits // 2) + "\n", encoding="ascii")
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
        mine.unlink()
    return path.read_text(encoding="ascii").strip()
