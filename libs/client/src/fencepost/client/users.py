"""
The NATS users of a deployment: for each a secret in a file of its own, and what the server needs.

That is the hash of a password, or the public half of an nkey, of which the server never has the
other. Made once: what is there already stays, so a deployment's services go on with what they have.
To change a user's secret, delete its credentials file and its line in `users.conf`.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Final

import bcrypt
import msgspec
from fencepost.contracts import authorization, grants
from fencepost.contracts.grants import Role
from fencepost.core.errors import RefusedError
from fencepost.runtime import access

ANYBODY: Final[Role] = "admin"
"""Who a connection without credentials is, where such are let in: a person, no service."""

USERS: Final = "users.conf"
AUTHORIZATION: Final = "authorization.conf"

_ROUNDS: Final = 4
"""The passwords are 256 random bits: nobody guesses one, however cheap a guess is."""

_LINE: Final = re.compile(r"^(FENCEPOST_[A-Z]+_(?:PASSWORD|NKEY)):", re.MULTILINE)

_HEAD: Final = "# Hashes of the users' passwords, or public keys; authorization.conf names them.\n"


def credentials_path(folder: Path, role: Role) -> Path:
    return folder / f"{role}.credentials"


def make(
    folder: Path, *, secrets_folder: Path | None = None, nkeys: bool = False
) -> dict[Role, Path]:
    """
    Writes `users.conf` into `folder`, and each user's credentials file into `secrets_folder`.

    Both are readable by their owner alone. Gives the credentials' paths. Raises `RefusedError`
    where one of a user's two halves is missing: they cannot be made to fit any more; and where the
    users that are there are of the other kind than `nkeys` asks for.
    """
    if nkeys:
        access.require_nkeys("nkeys")
    keep = secrets_folder or folder
    for place in (folder, keep):
        place.mkdir(parents=True, exist_ok=True)
    users = folder / USERS
    text = users.read_text() if users.exists() else _HEAD
    known = set(_LINE.findall(text))
    if any(name.endswith("_NKEY") != nkeys for name in known):
        raise RefusedError(
            "other_users",
            f"{users}: has users of the other kind ({'passwords' if nkeys else 'nkeys'}); delete it"
            " and their credentials files, or name another folder",
            field="nkeys",
        )
    found: dict[Role, Path] = {}
    for role in grants.ROLES:
        path = found[role] = credentials_path(keep, role)
        variable = authorization.variable(role, nkey=nkeys)
        if path.exists() != (variable in known):
            missing, there = (users, path) if path.exists() else (path, users)
            raise RefusedError(
                "half_a_user",
                f"{role}: {there} knows this user and {missing} does not; delete both, or bring "
                "the other back",
                field="out",
            )
        if path.exists():
            continue
        secret, told = access.make_nkey() if nkeys else _password(role)
        text += f'{variable}: "{told}"\n'
        _write_private(path, secret)
    _write_private(users, text.encode())
    return found


def _password(role: Role) -> tuple[bytes, str]:
    """What the user's file holds, and what the server is told."""
    password = secrets.token_hex(32)
    hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(_ROUNDS, b"2a")).decode()
    return msgspec.json.encode({"user": role, "password": password}) + b"\n", hashed


def _write_private(path: Path, data: bytes) -> None:
    """Writes it whole, never readable by others, not even for a moment."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    fresh.replace(path)
