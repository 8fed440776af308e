"""
The pool's folder: which servers there are, and which create id was given to which of them.

`<name>.json` describes a server (`{"url": …, "token": …}` or `"token_file"`, and where they differ
from the usual, `"base"` and `"python"`). `.assigned/<key>` names the place that a create id was
given to, `.assigned/<key>.settled` that the create id is over; both are on the disk before any
server is asked, and several gateways may write them.

`<name>.going`, from whoever minds that machine, announces that it will be taken away in so many
seconds: no sandbox is begun there any more.

A place is a name with the address and folder that it stood for. An entry that is edited to lead
elsewhere is another place: what another server does not hold says nothing of the former one's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import structlog
from fencepost.core.errors import RefusedError
from fencepost.providers import announced, witness
from fencepost.providers.swerex.server import Server

_WITNESS: Final = ".fencepost-pool"
_ASSIGNED: Final = ".assigned"
_SETTLED: Final = ".settled"
_LOCK: Final = ".lock"
_KEY_LENGTH: Final = 32

logger = structlog.get_logger(__name__)


def load_pool(folder: Path) -> dict[str, Server]:
    """Reads the pool's servers by name. Raises `RefusedError` naming the file and the field."""
    servers: dict[str, Server] = {}
    taken: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise _wrong(path, "file", f"a JSON object ({error})") from error
        if not isinstance(raw, dict):
            raise _wrong(path, "file", "a JSON object")
        for field in raw:
            if field not in ("url", "token", "token_file", "base", "python"):
                raise _wrong(path, field, "url, token, token_file, base or python")
        url = raw.get("url")
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise _wrong(path, "url", "an http:// or https:// address")
        other = taken.setdefault(url.rstrip("/"), path.name)
        if other != path.name:
            # Listed under two names, a sandbox would be taken for a second one that nobody knows.
            raise _wrong(path, "url", f"an address of its own, {other} has this one")
        servers[path.stem] = Server(
            name=path.stem,
            url=url,
            token=_token(path, raw),
            **{name: str(raw[name]) for name in ("base", "python") if name in raw},
        )
    return servers


def _token(path: Path, raw: Mapping[str, Any]) -> str:
    field = "token_file" if "token_file" in raw else "token"
    token = raw.get("token")
    if field == "token_file":
        try:
            token = (path.parent / str(raw[field])).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise _wrong(path, field, f"a readable file ({error})") from error
    if not isinstance(token, str) or not token:
        raise _wrong(path, field, "the server's token, or token_file")
    if not token.isascii() or not token.isprintable():
        raise _wrong(path, field, "one line of printable ASCII")
    return token


def _wrong(path: Path, field: str, expected: str) -> RefusedError:
    return RefusedError(
        "bad_setting", f"{path.name}: {field}: expected {expected}", field=field, expected=expected
    )


class Pool:
    """One deployment's view of the folder. Raises `OSError` where the folder cannot be used."""

    def __init__(self, folder: Path, *, deployment: str) -> None:
        self._folder = folder.resolve()
        self._assigned_in = self._folder / _ASSIGNED
        self._assigned_in.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._deployment = deployment
        self.identity: Final = witness.minted(self._folder / _WITNESS, digits=24)
        self._over: set[str] = set()
        self._servers = _by_place(load_pool(self._folder))
        self._complaint = ""

    def servers(self) -> dict[str, Server]:
        """
        The servers by place, as the folder has them now.

        While an entry is wrong, as one is that an editor has half written, the former ones stand.
        """
        try:
            self._servers = _by_place(load_pool(self._folder))
        except RefusedError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("pool_unreadable", detail=self._complaint)
        else:
            self._complaint = ""
        return self._servers

    def is_whole(self) -> bool:
        """
        Whether the servers, as last read, are all that may hold something.

        They are not while an entry is wrong, or a create id that is not over was given to a place
        that is not in the pool any more. Reads many files: for a thread.
        """
        if self._complaint:
            return False
        for path in self._assigned_in.iterdir():
            key = path.name
            if len(key) != _KEY_LENGTH or key in self._over:
                continue
            if path.with_name(key + _SETTLED).exists():
                self._over.add(key)
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.read_text(encoding="utf-8") not in self._servers:
                    return False
        return True

    def going_ms(self, server: Server) -> int | None:
        """In how long this server is announced to go; 0: nobody said; None: it is not."""
        return announced.grace_ms(self._folder / f"{server.name}.going")

    # -- create ids -----------------------------------------------------------------------------

    def key(self, create_id: str) -> str:
        """What a create id is called in files' names, here and on servers that pools may share."""
        told = f"{self.identity}\n{self._deployment}\n{create_id}"
        return hashlib.sha256(told.encode()).hexdigest()[:_KEY_LENGTH]

    def _path(self, create_id: str) -> Path:
        return self._assigned_in / self.key(create_id)

    def assigned(self, create_id: str) -> str:
        """The place that a create id was given to, "" for none: then no server was asked for it."""
        with contextlib.suppress(FileNotFoundError):
            return self._path(create_id).read_text(encoding="utf-8")
        return ""

    def assign(self, create_id: str, place: str) -> str:
        """Gives a create id its place, once: the first of several gateways decides."""
        path = self._path(create_id)
        with self._alone():
            if not path.exists():
                self._write(path, place)
        return path.read_text(encoding="utf-8")

    def release(self, create_id: str, place: str) -> None:
        """Takes an assignment back that made nothing; another gateway's newer one stands."""
        with self._alone():
            if self.assigned(create_id) == place:
                self._path(create_id).unlink(missing_ok=True)

    def settle(self, create_id: str) -> None:
        """
        Writes down that a create id is over.

        Where it was given to stays known: what an unanswered create made is still there.
        """
        path = self._path(create_id)
        self._write(path.with_name(path.name + _SETTLED), "")

    def is_settled(self, create_id: str) -> bool:
        path = self._path(create_id)
        return path.with_name(path.name + _SETTLED).exists()

    def _write(self, path: Path, text: str) -> None:
        """On the disk when this returns: what a server is asked later must be found again."""
        mine = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            with mine.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            mine.replace(path)
        finally:
            mine.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Held for a few system calls, so it is waited for."""
        with (self._assigned_in / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _by_place(servers: Mapping[str, Server]) -> dict[str, Server]:
    return {server.place: server for server in servers.values()}
