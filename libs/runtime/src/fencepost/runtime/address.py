"""
Where the NATS servers are: one address, or several separated by commas, and as whom if they say.

    nats://127.0.0.1:4222    tls://a:4222,tls://b:4222    nats://[::1]:4222    nats://me:p%40ss@a

What stands before the @ is a user's name and password, percent-encoded, or a token alone. It is
taken out here, so that no message shows it: print `Address.shown`, never what was typed.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from typing import Final, NoReturn
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec
from fencepost.core.errors import RefusedError
from fencepost.runtime.access import Access

PORT: Final = 4222

EXPECTED: Final = "nats://host:port or tls://host:port, several separated by commas"

_CHARACTERS_MAX: Final = 4096
_HOST_MAX: Final = 253
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


class Server(msgspec.Struct, frozen=True):
    """One server. `host` has no brackets."""

    scheme: str
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


class Address(msgspec.Struct, frozen=True):
    """Servers of one deployment. What their address says of a user is not shown."""

    servers: tuple[Server, ...]
    user: str = ""
    password: str = ""
    token: str = ""

    def __repr__(self) -> str:
        return f"Address({self.shown})"

    @property
    def urls(self) -> list[str]:
        """For `nats.connect`, without a user."""
        return [server.url for server in self.servers]

    @property
    def shown(self) -> str:
        """For messages."""
        return ",".join(self.urls)

    @property
    def is_encrypted(self) -> bool:
        """Whether nothing may be said to a server that does not encrypt."""
        return any(server.scheme == "tls" for server in self.servers)

    def whom(self, access: Access) -> Access:
        """As whom to connect: a user that the address names goes before a file's."""
        if not (self.user or self.token):
            return access
        return msgspec.structs.replace(
            access, user=self.user, password=self.password, token=self.token, creds="", seed=""
        )


class AddressError(ValueError):
    """What is wrong with an address, in words that show no password."""


def read(text: object) -> Address:
    """Takes an address apart. Raises `AddressError`."""
    if not isinstance(text, str):
        raise AddressError(f"expected {EXPECTED}, got {type(text).__name__}")
    _check_characters(text)
    parts = [part.strip() for part in text.split(",")]
    read = [_server(part, n, of=len(parts), secret="@" in text) for n, part in enumerate(parts, 1)]
    said = {user for _, user in read if user is not None}
    if len(said) > 1:
        raise AddressError("expected one user for all servers, got another one for each")
    user, password, token = said.pop() if said else ("", "", "")
    return Address(tuple(server for server, _ in read), user, password, token)


def require(field: str, text: object) -> Address:
    """As `read`. Raises `RefusedError` naming the field."""
    try:
        return read(text)
    except AddressError as error:
        raise RefusedError(
            "bad_address", f"{field}: {error}", field=field, expected=EXPECTED
        ) from error


def _check_characters(text: str) -> None:
    if not text.strip():
        raise AddressError(f"expected {EXPECTED}, got nothing")
    if len(text) > _CHARACTERS_MAX:
        raise AddressError(f"expected at most {_CHARACTERS_MAX} characters, got {len(text)}")
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs"):
            raise AddressError(f"expected no control characters, got {character!a}")


def _server(part: str, n: int, *, of: int, secret: bool) -> tuple[Server, tuple[str, ...] | None]:
    where = "" if of == 1 else f" as server {n}"

    def wrong(expected: str) -> NoReturn:
        # Where an @ stands anywhere, a part may be half of a password that has a comma in it.
        got = "one that is not shown, for its user" if secret else repr(part)
        raise AddressError(f"expected {expected}{where}, got {got}") from None

    if not part:
        wrong(EXPECTED)
    try:
        split = urlsplit(part if "://" in part else f"nats://{part}")
        host, port = split.hostname or "", split.port
    except ValueError:
        wrong("host:port, the port from 1 to 65535, and an IPv6 address in brackets")
    if split.scheme in ("ws", "wss"):
        wrong("nats:// or tls:// (websockets are not supported)")
    if split.scheme not in ("nats", "tls"):
        wrong("nats:// or tls://")
    if split.path not in ("", "/") or split.query or split.fragment:
        wrong("nothing after host:port")
    if port == 0:
        wrong("a port from 1 to 65535")
    if not _is_host(host, bracketed="[" in split.netloc.rpartition("@")[2]):
        wrong("a host's name or address")
    return Server(split.scheme, host, port or PORT), _user(split)


def _is_host(host: str, *, bracketed: bool) -> bool:
    if bracketed:
        try:
            return ipaddress.ip_address(host).version == 6
        except ValueError:
            return False
    return is_name(host)


def is_name(host: str) -> bool:
    """Whether it can be a host's name, or an IPv4 address."""
    return len(host) <= _HOST_MAX and _HOST.fullmatch(host) is not None


def _user(split: SplitResult) -> tuple[str, str, str] | None:
    """User, password and token of one server's address."""
    if split.username is None:
        return None
    try:
        user = unquote(split.username, errors="strict")
        password = unquote(split.password or "", errors="strict")
    except UnicodeDecodeError:
        raise AddressError("expected UTF-8 in what is percent-encoded before the @") from None
    if not user or (split.password is not None and not password):
        raise AddressError("expected user:password or a token before the @, neither empty")
    return (user, password, "") if password else ("", "", user)
