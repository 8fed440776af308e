"""The table of grants: what must hold of it whatever is added."""

from __future__ import annotations

import pytest
from fencepost.contracts import authorization, grants, streams, subjects
from fencepost.contracts.grants import ROLES, Grant, Role

from scripts import make_grants

CHANGING = ("CREATE", "UPDATE", "DELETE", "PURGE", "RESTORE", "MSG.DELETE")


def test_page_and_configuration_are_up_to_date() -> None:
    assert make_grants.PAGE.read_text() == make_grants.page()
    assert make_grants.CONFIGURATION.read_text() == authorization.render()


@pytest.mark.parametrize("ledgers", [1, 3])
def test_nobody_changes_a_ledgers_stream_and_only_the_operator_creates_one(ledgers: int) -> None:
    for role in ROLES:
        for subject in grants.publishes(role, ledgers=ledgers):
            for verb in CHANGING:
                changed = {
                    f"{grants.API}.STREAM.{verb}.{name}" for name in streams.ledger_names(ledgers)
                }
                assert subject not in changed or (verb == "CREATE" and role == "operator")
            if subject.startswith(f"{grants.API}.STREAM.CREATE."):
                assert role == "operator"
            assert not subject.startswith(f"{grants.API}.STREAM.UPDATE.")
            assert not subject.startswith(f"{grants.API}.STREAM.DELETE.")


@pytest.mark.parametrize(
    ("subject", "roles"),
    [
        (subjects.ledger("sandbox", 0), {"planner", "mover"}),
        (subjects.ledger("dag", 0), {"tracker", "mover"}),
        (subjects.receipts(0), {"gateway"}),
        (subjects.heartbeats(0), {"gateway"}),
        (subjects.GATEWAY_SEEN, {"gateway"}),
        (subjects.fact("box", "lost"), {"gateway"}),
        (subjects.fact("box", "stray"), {"gateway", "sweeper"}),
        (subjects.message("dag", 0), {"planner"}),
        (subjects.message("sandbox", 0), {"tracker"}),
        (subjects.orders("gw"), {"planner"}),
        (subjects.command("step", "box", "s1"), {"client", "admin"}),
        (subjects.command("dag", "d", "c1"), {"client", "admin", "tracker"}),
        (subjects.fault("box"), {"admin"}),
        (f"$KV.{streams.BUCKET_META}.shards", {"operator"}),
        (f"$KV.{streams.BUCKET_META}.{streams.SWEEP_MODE}", {"operator", "admin", "mover"}),
    ],
)
def test_who_may_say_what(subject: str, roles: set[str]) -> None:
    assert {
        role
        for role in ROLES
        if any(_covers(pattern, subject) for pattern in grants.publishes(role))
    } == roles


def _covers(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">" and len(given) >= len(wanted):
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    return len(wanted) == len(given) and all(
        one in ("*", other) for one, other in zip(wanted, given, strict=True)
    )


def test_no_role_shares_an_account() -> None:
    assert len({grants.account_of(role) for role in ROLES}) == len(ROLES)


def test_who_is_asked_is_one_role_and_who_is_heard_is_one() -> None:
    """An answer has one source; a subject that two accounts export has two meanings."""
    for row in grants.SAID:
        if row.kind == "asked":
            assert len(row.hears) == 1, row
        elif row.hears:
            assert len(row.says) == 1, row


def test_every_stream_is_used_and_can_be_written() -> None:
    assert {use.stream for use in grants.uses()} == set(grants.every_stream())
    assert {use.stream for use in grants.uses(3)} == set(grants.every_stream(3))
    said = [row.subject for row in grants.SAID if row.kind == "stored"]
    for stream in streams.table(1):
        prefix = {"kv": "$KV.{}.", "objects": "$O.{}."}.get(stream.kind)
        if prefix is not None:
            assert any(subject.startswith(prefix.format(stream.name)) for subject in said), stream


def test_the_configuration_holds_no_password() -> None:
    text = authorization.render()
    for role in ROLES:
        assert f"user: {role}, password: ${authorization.variable(role)}" in text
    assert text.count("password:") == len(ROLES)
    assert "no_auth_user" not in text
    assert "no_auth_user" in authorization.render(anybody="admin")


def test_a_role_without_any_grant_may_nothing() -> None:
    """To the server an empty list of what is allowed is no restriction at all."""
    every: list[tuple[Role, Grant]] = [("sweeper", grant) for grant in grants.of("sweeper")]
    text = authorization.render(without=every)
    account = text.partition("FENCEPOST_SWEEPER {")[2].partition("\n  }\n")[0]
    assert account.count('deny: [">"') == 2
    assert "allow" not in account
