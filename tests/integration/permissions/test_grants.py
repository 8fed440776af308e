"""
What the generated configuration lets each user do, asked of a real server.

The expectation is computed from the table by a matcher of its own; that the services need what
the table says, and no more, is `tests/acceptance/test_grants.py`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import pytest
from fencepost.contracts import grants, streams
from fencepost.contracts.authorization import API_IN_ROLE
from fencepost.contracts.grants import ROLES, Grant, Role
from fencepost.core.errors import UnknownError
from fencepost.runtime.link import Link

from tests.contracts import until
from tests.integration.permissions.guarded import Guarded

CALLS: Final = (
    "STREAM.CREATE.{}",
    "STREAM.UPDATE.{}",
    "STREAM.DELETE.{}",
    "STREAM.PURGE.{}",
    "STREAM.INFO.{}",
    "STREAM.MSG.GET.{}",
    "STREAM.MSG.DELETE.{}",
    "STREAM.SNAPSHOT.{}",
    "STREAM.RESTORE.{}",
    "STREAM.PEER.REMOVE.{}",
    "STREAM.LEADER.STEPDOWN.{}",
    "DIRECT.GET.{}",
    "DIRECT.GET.{}.a",
    "CONSUMER.CREATE.{}",
    "CONSUMER.CREATE.{}.mine",
    "CONSUMER.CREATE.{}.mine.a",
    "CONSUMER.DURABLE.CREATE.{}.mine",
    "CONSUMER.MSG.NEXT.{}.mine",
    "CONSUMER.DELETE.{}.mine",
    "CONSUMER.INFO.{}.mine",
    "CONSUMER.NAMES.{}",
    "CONSUMER.LIST.{}",
    "CONSUMER.PAUSE.{}.mine",
    "CONSUMER.LEADER.STEPDOWN.{}.mine",
)
"""What can be asked of one stream."""

ELSEWHERE: Final = (
    "$JS.API.INFO",
    "$JS.API.STREAM.NAMES",
    "$JS.API.STREAM.LIST",
    "$JS.API.STREAM.CREATE.MINE",
    "$JS.API.META.LEADER.STEPDOWN",
    "$JS.API.SERVER.REMOVE",
    "$JS.API.ACCOUNT.PURGE.FENCEPOST",
    "$JS.API.ACCOUNT.STREAM.MOVE.FENCEPOST.FP_LEDGER",
    "$JS.ACK.FP_LEDGER.c.1.1.1.1.0",
    "$JS.FC.FP_LEDGER.c.x",
    "$SYS.REQ.SERVER.PING",
    "$SYS.REQ.USER.INFO",
    "$G.x",
    f"{API_IN_ROLE}.STREAM.UPDATE.FP_LEDGER",
    f"{API_IN_ROLE}.STREAM.DELETE.FP_LEDGER",
    f"{API_IN_ROLE}.STREAM.PURGE.FP_LEDGER",
    "fp.v1.ledger.sandbox",
    "fp.v1.ledger.sandbox.0.x",
    "fp.v1.ledger.other.0",
    "fp.v1.in.0.step.box.s1",
    "fp.v1.infact.0.box.lost",
    "fp.v1.other",
    "fp.v2.ledger.sandbox.0",
    "fp.v1.event",
    "fp.v1.message.other.0",
    "anything",
    "_INBOX.somebody.else",
    "_R_.abcdef",
    *(f"fp.v1.fact.box.{kind}" for kind in ("lost", "gone", "marked", "stray", "orphaned")),
    *(
        f"$KV.{bucket}.{key}"
        for bucket in (streams.BUCKET_OWNERS, streams.BUCKET_LEASES, streams.BUCKET_META)
        for key in ("sandbox.shard.0", "dag.shard.0", "sweep.shard.0", "sweep", "shards", "g1")
    ),
)


def literal(pattern: str) -> str:
    """One subject that a pattern stands for."""
    return pattern.replace("*", "0").replace(">", "0.x")


def covers(pattern: str, subject: str) -> bool:
    """Tells whether a pattern stands for a subject; NATS' rules, written anew."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


UNIVERSE: Final = sorted(
    {
        *(literal(row.subject) for row in grants.SAID),
        *(literal(grant.subject) for role in ROLES for grant in grants.of(role)),
        *(f"$JS.API.{call.format(name)}" for name in grants.every_stream() for call in CALLS),
        *ELSEWHERE,
    }
)


def _asked(text: str) -> str:
    """The subject of a denial, under the name that it was asked by, in lower case."""
    subject = text.rpartition(' "')[2].rstrip('"').lower()
    return subject.replace(API_IN_ROLE + ".", "$js.api.", 1)


def _plain(subject: str) -> str:
    return subject.replace(API_IN_ROLE + ".", "$JS.API.", 1).lower()


@pytest.mark.parametrize("role", ROLES)
async def test_a_user_may_publish_what_its_rows_say_and_nothing_else(
    guarded: Guarded, role: Role
) -> None:
    async with guarded.links(role) as link:
        denied = guarded.denied[role]
        for subject in UNIVERSE:
            link.publish(subject, b"{}")
        await link.flush()
        allowed = grants.publishes(role)
        refused = {
            subject
            for subject in UNIVERSE
            if not any(covers(pattern, _upper(subject)) for pattern in allowed)
        }
        wanted = {_plain(subject) for subject in refused}
        await until(lambda: len(denied) >= len(refused))
        assert {_asked(text) for text in denied} == wanted
        assert len(denied) == len(refused), "a denial for each"
        assert wanted
        assert len(wanted) < len(UNIVERSE)


def _upper(subject: str) -> str:
    return subject.replace(API_IN_ROLE + ".", "$JS.API.", 1)


@pytest.mark.parametrize("role", ROLES)
async def test_a_user_may_hear_what_its_rows_say_and_nothing_else(
    guarded: Guarded, role: Role
) -> None:
    async with guarded.links(role) as link:
        denied = guarded.denied[role]
        asked = [*UNIVERSE, ">", "fp.>", "fp.v1.>", "fp.v1.*.*", "$JS.>", "$SYS.>", "$KV.>"]
        for subject in asked:
            await link.subscribe_raw(subject, lambda _msg: None)
        await link.flush()
        allowed = grants.subscribes(role)
        wanted = {
            subject.lower()
            for subject in asked
            if not any(covers(pattern, subject) for pattern in allowed)
        }
        await until(lambda: len(denied) >= len(wanted))
        assert {text.rpartition(' "')[2].rstrip('"').lower() for text in denied} == wanted
        assert ">" in wanted


async def _has_effect(guarded: Guarded, role: Role, grant: Grant) -> bool:
    """Whether what a grant is for comes about: an answer, a message, a subscription."""
    if grant.subject in (grants.INBOXES, grants.ANSWERS) or grant.verb == "subscribe":
        return await _hears_and_answers(guarded, role, grant)
    heard = [row for row in grants.SAID if row.subject == grant.subject and row.hears]
    if heard and heard[0].kind != "stored":
        return all([await _reaches(guarded, role, other, grant) for other in heard[0].hears])
    async with guarded.links(role) as link:
        if not grant.account:
            link.publish(literal(grant.subject), b"{}")
            await link.flush()
            return not guarded.denied[role]
        subject, body = literal(grant.subject), b"{}"
        try:
            if grant.subject.startswith(_NEXT):
                stream = grant.subject.split(".")[-2]
                subject = f"{_NEXT}{stream}.{await _consumer(link, stream)}"
                body = b'{"batch": 1, "no_wait": true}'
            answer = await link.call(subject, body, timeout_s=2.0)
        except UnknownError:
            return False
        return bool(answer.data or answer.headers)


_NEXT: Final = "$JS.API.CONSUMER.MSG.NEXT."


async def _consumer(link: Link, stream: str) -> str:
    # None but later messages: a stored one would come under its own subject, not as an answer.
    config = {"ack_policy": "none", "mem_storage": True, "deliver_policy": "new"}
    body = {"stream_name": stream, "config": config}
    made = await link.api(f"CONSUMER.CREATE.{stream}", body, timeout_s=2.0)
    return str(json.loads(made)["name"])


async def _hears_and_answers(guarded: Guarded, role: Role, grant: Grant) -> bool:
    if grant.subject == grants.INBOXES:
        async with guarded.links(role) as link:
            if grant.verb == "subscribe":
                await link.flush()
            else:
                link.publish("_INBOX.own.1", b"")
                await link.flush()
            return not guarded.denied[role]
    if grant.subject == grants.ANSWERS:
        row = next(row for row in grants.SAID if row.kind == "asked" and role in row.hears)
        return await _reaches(guarded, row.says[0], role, grant, subject=row.subject)
    rows = [row for row in grants.SAID if row.subject == grant.subject and role in row.hears]
    if not rows:
        async with guarded.links(role) as link:
            await link.subscribe_raw(literal(grant.subject), lambda _msg: None)
            await link.flush()
            return not guarded.denied[role]
    return await _reaches(guarded, rows[0].says[0], role, grant)


async def _reaches(
    guarded: Guarded, sayer: Role, hearer: Role, grant: Grant, *, subject: str = ""
) -> bool:
    """Whether a message of one role comes to another, and an answer back where one is asked."""
    row = next(row for row in grants.SAID if row.subject == (subject or grant.subject))
    async with guarded.links(sayer, hearer) as (saying, hearing):
        heard: list[Any] = []

        def take(msg: Any) -> None:
            heard.append(msg)
            if msg.reply and row.kind == "asked":
                hearing.publish(msg.reply, b"yes")

        await hearing.subscribe_raw(literal(row.subject), take)
        await hearing.flush()
        if row.kind == "asked":
            try:
                answer = await saying.call(literal(row.subject), b"?", timeout_s=0.5)
                return bool(answer.data == b"yes")
            except UnknownError:
                return False
        saying.publish(literal(row.subject), b"!")
        for _ in range(50):
            if heard or any(guarded.denied.values()):
                break
            await asyncio.sleep(0.02)
        return bool(heard)


EVERY_GRANT: Final = [(role, grant) for role in ROLES for grant in grants.of(role)]


def _rounds() -> list[list[tuple[Role, Grant]]]:
    """
    Every grant once, some at a time: of other roles and about other subjects.

    Two of one round thus have nothing to do with each other, and each round costs one reload.
    """
    rounds: list[list[tuple[Role, Grant]]] = []
    for role, grant in EVERY_GRANT:
        is_alone = grant.subject in (grants.INBOXES, grants.ANSWERS)
        for mates in () if is_alone else rounds:
            if all(
                role != mate and grant.subject != other.subject and other.subject[0] != "_"
                for mate, other in mates
            ):
                mates.append((role, grant))
                break
        else:
            rounds.append([(role, grant)])
    return rounds


async def test_with_all_grants_each_has_an_effect(guarded: Guarded) -> None:
    useless: list[str] = []
    for role, grant in EVERY_GRANT:
        guarded.denied.clear()
        if not await _has_effect(guarded, role, grant):
            useless.append(f"{role}: {grant.verb} {grant.subject}")
    assert not useless, "\n".join(useless)


async def test_without_a_grant_it_has_no_effect(guarded: Guarded) -> None:
    """No other grant of the role stands in for it."""
    kept: list[str] = []
    for mates in _rounds():
        await guarded.reload(without=mates)
        for role, grant in mates:
            guarded.denied.clear()
            if await _has_effect(guarded, role, grant):
                kept.append(f"{role}: {grant.verb} {grant.subject}")
    assert not kept, "\n".join(kept)
