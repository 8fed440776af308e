"""
How a connection shows who it is: a user's credentials and certificates, all of them by file.

A credentials file is one of three, told apart by what is in it: the JSON that
`fencepost deploy nats` writes (`{"user": …, "password": …}`), a NATS credentials file with a user
JWT, or an nkey seed.
"""

from __future__ import annotations

import importlib.util
import re
import secrets
import ssl
from pathlib import Path
from typing import Any, Final

import msgspec
from fencepost.core.errors import RefusedError

_EXPECTED = 'JSON {"user": "…", "password": "…"}, a NATS credentials file, or an nkey seed'

_BYTES_MAX: Final = 64 * 1024
"""More is no credentials file, whatever it is."""

# As the client library reads them: the one line after the heading, its end cut off.
_JWT: Final = re.compile(r"BEGIN NATS USER JWT-*\n[\w-]+\.[\w-]+\.[\w-]+\n")
_SEED: Final = re.compile(r"BEGIN USER NKEY SEED-*\n(SU[A-Z2-7]{56})\n")


class _UserFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user: str
    password: str


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a connection is made with; everything empty is a connection without a user.

    `creds` and `seed` are paths. Neither the password nor the token is shown anywhere.
    """

    user: str = ""
    password: str = ""
    token: str = ""
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
        return self.user or self.creds or self.seed or ("a token" if self.token else "nobody")

    @property
    def is_nobody(self) -> bool:
        """Whether the server is told nothing of who this is."""
        return not (self.user or self.token or self.creds or self.seed)

    @property
    def is_encrypted(self) -> bool:
        """Whether a certificate was named: then nothing is said to a server without one."""
        return bool(self.ca or self.cert)

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
        if self.token:
            found["token"] = self.token
        if self.creds:
            found["user_credentials"] = self.creds
        if self.seed:
            found["nkeys_seed"] = self.seed
        if self.creds or self.seed:
            _require_seed(self.creds or self.seed)
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
    text = _text(path)
    if "BEGIN NATS USER JWT" in text:
        return Access(creds=_whole(path, text), **tls)
    text = text.strip()
    if re.fullmatch("SU[A-Z2-7]{56}", text):
        return Access(seed=path, **tls)
    if re.fullmatch("S[A-Z2-7]{57}", text):
        raise _unusable("nats_credentials", path, "the seed is of another kind than a user's (SU…)")
    try:
        found = msgspec.json.decode(text, type=_UserFile)
    except msgspec.MsgspecError as error:
        raise _unusable("nats_credentials", path, f"expected {_EXPECTED}") from error
    if not found.user or not found.password:
        raise _unusable("nats_credentials", path, "user and password must not be empty")
    return Access(user=found.user, password=found.password, **tls)


def _text(path: str) -> str:
    try:
        if Path(path).stat().st_size > _BYTES_MAX:
            raise _unusable("nats_credentials", path, f"expected {_EXPECTED}; it is too large")
        return Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise _unusable("nats_credentials", path, why) from error


def _whole(path: str, text: str) -> str:
    """The path of a credentials file that has both its halves, as they are read later."""
    for pattern, what in ((_JWT, "a user's JWT"), (_SEED, "a user's seed (SU…)")):
        if pattern.search(text) is None:
            raise _unusable(
                "nats_credentials",
                path,
                f"expected {what} on the line below its heading, and lines that end with \\n alone",
            )
    return path


def _there(field: str, path: str) -> str:
    if not Path(path).is_file():
        raise _unusable(field, path, "there is no such file")
    return path


def _unusable(field: str, path: str, why: str) -> RefusedError:
    name = f"FENCEPOST_{field.upper()}"
    return RefusedError("bad_setting", f"{name}: {path or 'empty'}: {why}", field=field)


def require_nkeys(field: str) -> None:
    """Raises `RefusedError` where the library for nkeys is not there; it is an extra."""
    if importlib.util.find_spec("nkeys") is None:
        raise RefusedError(
            "not_installed",
            f"{field}: JWTs and nkeys need the package nkeys (fencepost-runtime[nkeys])",
            field=field,
        )


def make_nkey() -> tuple[bytes, str]:
    """A new user's credentials file, and what the server is told of it: the public half."""
    require_nkeys("nkeys")
    import nkeys

    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    return seed + b"\n", nkeys.from_seed(bytearray(seed)).public_key.decode()


def _require_seed(path: str) -> None:
    """Raises where a seed cannot be used: its check sum is wrong, or the library is not there."""
    require_nkeys("FENCEPOST_NATS_CREDENTIALS")
    import nkeys

    text = _text(path)
    found = _SEED.search(text)
    seed = (found.group(1) if found else text.strip()).encode()
    try:
        prefix, raw = nkeys.decode_seed(seed)
        is_whole = nkeys.encode_seed(raw, prefix) == seed
    except (nkeys.NkeysError, ValueError):
        is_whole = False
    if not is_whole:
        raise _unusable("nats_credentials", path, "the seed is damaged: its check sum is wrong")
