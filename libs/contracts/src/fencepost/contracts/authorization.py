"""
The server's configuration of accounts, users and permissions, made from the table of grants.

The text holds no secret: each user's password (a bcrypt hash) is the server's variable
`FENCEPOST_<ROLE>_PASSWORD`, given by a file that it includes or by the server's environment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from fencepost.contracts import grants
from fencepost.contracts.grants import Grant, Role

HEAD: Final = """\
# Accounts, users and permissions of a Fencepost deployment. Made by `fencepost deploy nats` from
# the table in fencepost.contracts.grants: change it there.
#
# Each user's password is a variable, `FENCEPOST_<ROLE>_PASSWORD`: a bcrypt hash. A file included
# here defines it, or else the environment.
"""

HEAD_NKEYS: Final = HEAD.replace(
    "password is a variable, `FENCEPOST_<ROLE>_PASSWORD`: a bcrypt hash. A file included",
    "nkey is a variable, `FENCEPOST_<ROLE>_NKEY`: the public half. A file included",
)

API_IN_ROLE: Final = "fpjs"
"""
What the JetStream API is called in a role's account, after its own mapping of `$JS.API`.

Under its own name the server answers a second time, that the account has no JetStream.
"""


ANYBODY: Final = "anybody"
"""The user that whoever shows no credentials is, where such are let in."""


def variable(role: Role, *, nkey: bool = False) -> str:
    """The server's variable that holds a user's password hash, or public key."""
    return f"FENCEPOST_{role.upper()}_{'NKEY' if nkey else 'PASSWORD'}"


def render(
    *,
    users: str = "",
    anybody: Role | None = None,
    ledgers: int = 1,
    nkeys: bool = False,
    without: Collection[tuple[Role, Grant]] = (),
) -> str:
    """
    The whole text. `users` is the file with the passwords' hashes, beside this one.

    `nkeys`: users show that they have a key, and the variables hold the public ones.
    `anybody`: the role of whoever shows no credentials at all; None refuses them.
    `ledgers`: over how many streams the shards are spread. `without` leaves grants out, for those
    who want to see what then fails.
    """
    given = {
        role: [grant for grant in grants.of(role, ledgers=ledgers) if (role, grant) not in without]
        for role in grants.ROLES
    }
    head = HEAD_NKEYS if nkeys else HEAD
    lines = [head, *([f"include ./{users}", ""] if users else []), "accounts {"]
    for role in grants.ROLES:
        known = _user(role, nkey=nkeys)
        # The server looks for the user of nobody's by this password, which may be no hash.
        nobody = f'{{ user: {ANYBODY}, password: "{ANYBODY}" }}'
        lines.extend(_account(role, given, [known, nobody] if role == anybody else [known]))
    lines.append("}")
    if anybody is not None:
        lines += ["", "# Whoever shows no credentials.", f"no_auth_user: {ANYBODY}"]
    return "\n".join(lines) + "\n"


def _user(role: Role, *, nkey: bool) -> str:
    if nkey:
        return f"{{ nkey: ${variable(role, nkey=True)} }}"
    return f"{{ user: {role}, password: ${variable(role)} }}"


def _account(role: Role, given: dict[Role, list[Grant]], users: list[str]) -> Iterator[str]:
    own = given[role]
    yield f"  # {grants.ABOUT[role]}"
    yield f"  {grants.account_of(role)} {{"
    if role == "operator":
        yield "    jetstream: enabled"
    yield "    users: ["
    yield from (f"      {user}" for user in users)
    yield "    ]"
    yield "    default_permissions: {"
    for verb in ("publish", "subscribe"):
        told = [_told(role, grant) for grant in own if grant.verb == verb]
        # To the server an empty list of what is allowed is no list at all.
        yield f"      {verb}: {{ allow: [" if told else f'      {verb}: {{ deny: [">"'
        yield from (f'        "{subject}"' for subject in told)
        yield "      ] }"
    yield "    }"
    yield from _listed("exports", _exports(role, given))
    yield from _listed("imports", _imports(role, own))
    if role != "operator":
        yield f'    mappings: {{ "{grants.API}.>": "{API_IN_ROLE}.>" }}'
    yield "  }"


def _told(role: Role, grant: Grant) -> str:
    """A grant's subject as the server looks at it: after the account's mapping."""
    if role == "operator" or not grant.subject.startswith(grants.API + "."):
        return grant.subject
    return API_IN_ROLE + grant.subject.removeprefix(grants.API)


def _listed(name: str, items: list[str]) -> Iterator[str]:
    if items:
        yield f"    {name}: ["
        yield from (f"      {item}" for item in items)
        yield "    ]"


def _exports(role: Role, given: dict[Role, list[Grant]]) -> list[str]:
    """What other roles' grants need of this account, each with the accounts that may have it."""
    account = grants.account_of(role)
    wanted: dict[tuple[str, str, bool], list[str]] = {}
    for other in grants.ROLES:
        if other == role:
            continue
        for grant in given[other]:
            if grant.account == account:
                kind = "service" if grant.verb == "publish" else "stream"
                key = (kind, grant.subject, grant.many)
                wanted.setdefault(key, []).append(grants.account_of(other))
    return [
        f'{{ {kind}: "{subject}"{", response_type: stream" if many else ""},'
        f" accounts: [{', '.join(accounts)}] }}"
        for (kind, subject, many), accounts in sorted(wanted.items())
    ]


def _imports(role: Role, own: list[Grant]) -> list[str]:
    found = []
    for grant in own:
        if grant.account in ("", grants.account_of(role)):
            continue
        kind = "service" if grant.verb == "publish" else "stream"
        told = _told(role, grant)
        to = f', to: "{told}"' if told != grant.subject else ""
        found.append(
            f'{{ {kind}: {{ account: {grant.account}, subject: "{grant.subject}" }}{to} }}'
        )
    return found
