"""
The table of grants as JWTs of accounts and users, for a server in operator mode.

The same accounts as `authorization.conf` makes, by NATS's rules for claims (version 2): an export
is private, so every import carries an activation that the exporting account signed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from pathlib import Path
from typing import Any, Final

import nkeys
from fencepost.contracts import grants
from fencepost.contracts.authorization import API_IN_ROLE
from fencepost.contracts.grants import Grant, Role

_ROLE_OF: Final = {grants.account_of(role): role for role in grants.ROLES}
_LIMITS: Final = {
    **dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1),
    "wildcards": True,
}
_STORAGE: Final = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)


class Key:
    """A pair of keys. What it is for is in the letter that its public half begins with."""

    def __init__(self, prefix: int) -> None:
        self.seed: str = nkeys.encode_seed(secrets.token_bytes(32), prefix).decode()
        self._pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public: str = self._pair.public_key.decode()

    def sign(self, subject: str, name: str, kind: str, claims: dict[str, Any]) -> str:
        """A JWT about `subject`."""
        body = {"iss": self.public, "sub": subject, "name": name, "iat": 1}
        body["nats"] = {**claims, "type": kind, "version": 2}
        body["jti"] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        told = f"{_written(head)}.{_written(body)}"
        return f"{told}.{_base64(self._pair.sign(told.encode()))}"


class Operator:
    """An operator, an account for each role, and their users."""

    def __init__(self) -> None:
        self._key = Key(nkeys.PREFIX_BYTE_OPERATOR)
        self._system = Key(nkeys.PREFIX_BYTE_ACCOUNT)
        self._accounts = {role: Key(nkeys.PREFIX_BYTE_ACCOUNT) for role in grants.ROLES}

    def configuration(self) -> str:
        """What the server's configuration says of it."""
        told = [
            f"operator: {self._key.sign(self._key.public, 'fencepost', 'operator', {})}",
            f"system_account: {self._system.public}",
            "resolver: MEMORY",
            "resolver_preload: {",
            f"  {self._system.public}: {self._of_system()}",
            *(f"  {key.public}: {self._account(role)}" for role, key in self._accounts.items()),
            "}",
        ]
        return "\n".join(told) + "\n"

    def user(self, role: Role, **claims: Any) -> tuple[str, str]:
        """A user's JWT and seed. What it may do, its account says."""
        key = Key(nkeys.PREFIX_BYTE_USER)
        limits = dict.fromkeys(("subs", "data", "payload"), -1)
        token = self._accounts[role].sign(key.public, role, "user", {**limits, **claims})
        return token, key.seed

    def _of_system(self) -> str:
        return self._key.sign(self._system.public, "SYS", "account", {"limits": _LIMITS})

    def _account(self, role: Role) -> str:
        own = grants.of(role)
        allowed = {
            verb: {"allow": [_told(role, grant) for grant in own if grant.verb == name]}
            for verb, name in (("pub", "publish"), ("sub", "subscribe"))
        }
        claims: dict[str, Any] = {
            "default_permissions": {
                verb: told if told["allow"] else {"deny": [">"]} for verb, told in allowed.items()
            },
            "exports": _exports(role),
            "imports": [self._import(role, grant) for grant in own if _is_abroad(role, grant)],
            "limits": {**_LIMITS, **(_STORAGE if role == "operator" else {})},
        }
        if role != "operator":
            claims["mappings"] = {f"{grants.API}.>": [{"subject": f"{API_IN_ROLE}.>"}]}
        name = grants.account_of(role)
        return self._key.sign(self._accounts[role].public, name, "account", claims)

    def _import(self, role: Role, grant: Grant) -> dict[str, Any]:
        exporter = self._accounts[_ROLE_OF[grant.account]]
        kind = _kind(grant)
        activation = exporter.sign(
            self._accounts[role].public,
            grant.subject,
            "activation",
            {"subject": grant.subject, "kind": kind},
        )
        told = _told(role, grant)
        return {
            "name": grant.subject,
            "subject": grant.subject,
            "account": exporter.public,
            "token": activation,
            "type": kind,
            **({"local_subject": told} if told != grant.subject else {}),
        }


def credentials(path: Path, token: str, seed: str) -> Path:
    """Writes a user's JWT and seed as NATS's own tools do."""
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
    return path


def _is_abroad(role: Role, grant: Grant) -> bool:
    return grant.account not in {"", grants.account_of(role)}


def _kind(grant: Grant) -> str:
    return "service" if grant.verb == "publish" else "stream"


def _exports(role: Role) -> list[dict[str, Any]]:
    wanted = {
        (_kind(grant), grant.subject, grant.many)
        for other in grants.ROLES
        for grant in grants.of(other)
        if other != role and grant.account == grants.account_of(role)
    }
    return [
        {
            "name": subject,
            "subject": subject,
            "type": kind,
            "token_req": True,
            **({"response_type": "Stream"} if many else {}),
        }
        for kind, subject, many in sorted(wanted)
        # An account's exports may not overlap: the wider has the narrower, whose imports carry
        # activations of their own.
        if not any(
            kind == other and subject != wider and _is_within(subject, wider)
            for other, wider, _ in wanted
        )
    ]


def _is_within(subject: str, wider: str) -> bool:
    own, theirs = subject.split("."), wider.split(".")
    if theirs[-1] == ">":
        own, theirs = own[: len(theirs) - 1], theirs[:-1]
    return len(own) == len(theirs) and all(
        there in {"*", here} and here != ">" for here, there in zip(own, theirs, strict=True)
    )


def _told(role: Role, grant: Grant) -> str:
    """A grant's subject as the server looks at it: after the account's mapping."""
    if role == "operator" or not grant.subject.startswith(grants.API + "."):
        return grant.subject
    return API_IN_ROLE + grant.subject.removeprefix(grants.API)


def _written(value: dict[str, Any]) -> str:
    return _base64(json.dumps(value, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
