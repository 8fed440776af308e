"""
How a connection shows who it is: a user's credentials and certificates, all of them by file.

A credentials file is one of three, told apart by what is in it: the JSON that
`fencepost deploy nats` writes (`{"user": …, "password": …}`), a NATS credentials file with a user
JWT, or an nkey seed.
"""

from __future__ import annotations

import importlib.util
import ssl
from pathlib import Path
from typing import Any

import msgspec
from fencepost.core.errors import RefusedError

_EXPECTED = 'JSON {"user": "…", "password": "…"}, a NATS credentials file, or an nkey seed'


class _UserFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user: str
    password: str


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a connection is made with; everything empty is a connection without a user.

    `creds` and `seed` are paths. The password is nowhere shown.
    """

    user: str = ""
    password: str = ""
    creds: str = ""
    seed: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __repr__(self) -> str:
        return f"Access({self.who})"

    @property
    def who(self) -> str:
        """Whom the server is told, for messages."""
        return self.user or self.creds or self.seed or "nobody"

    def tls(self) -> ssl.SSLContext | None:
        """
        The context of a TLS connection, or None where no certificate was named.

        Raises `RefusedError` naming the file that cannot be used.
        """
        if not (self.ca or self.cert):
            return None
        context = ssl.create_default_context()
        if self.ca:
            try:
                context = ssl.create_default_context(cafile=_there("nats_ca", self.ca))
            except (OSError, ssl.SSLError) as error:
                raise _unusable("nats_ca", self.ca, str(error)) from error
        if self.cert:
            try:
                context.load_cert_chain(
                    _there("nats_cert", self.cert),
                    _there("nats_key", self.key) if self.key else None,
                )
            except (OSError, ssl.SSLError) as error:
                raise _unusable("nats_cert", self.cert, str(error)) from error
        return context

    def options(self) -> dict[str, Any]:
        """What `nats.connect` takes. Raises `RefusedError`."""
        found: dict[str, Any] = {}
        if self.user:
            found |= {"user": self.user, "password": self.password}
        if self.creds:
            found["user_credentials"] = self.creds
        if self.seed:
            found["nkeys_seed"] = self.seed
        if self.creds or self.seed:
            _require_nkeys()
        context = self.tls()
        if context is not None:
            found["tls"] = context
        return found


def read(credentials: str = "", *, ca: str = "", cert: str = "", key: str = "") -> Access:
    """
    Reads a credentials file. Raises `RefusedError` naming the setting and what was expected.

    The certificates are looked at when the connection is made.
    """
    if key and not cert:
        raise _unusable("nats_cert", cert, "a key was named without its certificate")
    tls = {"ca": ca, "cert": cert, "key": key}
    if not credentials:
        return Access(**tls)
    path = _there("nats_credentials", credentials)
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable("nats_credentials", path, str(error)) from error
    if "BEGIN NATS USER JWT" in text:
        return Access(creds=path, **tls)
    if text.startswith("SU") and text.isalnum():
        return Access(seed=path, **tls)
    try:
        found = msgspec.json.decode(text, type=_UserFile)
    except msgspec.MsgspecError as error:
        raise _unusable("nats_credentials", path, f"expected {_EXPECTED}") from error
    if not found.user or not found.password:
        raise _unusable("nats_credentials", path, "user and password must not be empty")
    return Access(user=found.user, password=found.password, **tls)


def _there(field: str, path: str) -> str:
    if not Path(path).is_file():
        raise _unusable(field, path, "there is no such file")
    return path


def _unusable(field: str, path: str, why: str) -> RefusedError:
    name = f"FENCEPOST_{field.upper()}"
    return RefusedError("bad_setting", f"{name}: {path or 'empty'}: {why}", field=field)


def _require_nkeys() -> None:
    if importlib.util.find_spec("nkeys") is None:
        raise RefusedError(
            "bad_setting",
            "FENCEPOST_NATS_CREDENTIALS: JWTs and nkeys need the package nkeys (nats-py[nkeys])",
            field="nats_credentials",
        )
