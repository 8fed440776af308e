"""How a denial, a refused user and a missing right show themselves, and what cannot be got around."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fencepost.client import doctor_nats, users
from fencepost.client.client import Client
from fencepost.client.embedded import NatsServer
from fencepost.contracts import authorization, grants, streams, subjects
from fencepost.contracts.messages import Position
from fencepost.core.errors import RefusedError, UnknownError
from fencepost.runtime import access, bus
from fencepost.runtime import streams as declaring
from fencepost.runtime.bus import JetStreamInputs
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import DeniedError, Link, stream_info
from fencepost.runtime.objects import Objects
from fencepost.runtime.ports import Absent, ReadResult, Unknown
from fencepost.runtime.spreader import Owners
from fencepost.sandbox_gateway.blobs import NatsBlobs

from tests.contracts import until
from tests.integration.permissions.guarded import SHARDS, Guarded


async def test_s094_a_denied_request_fails_at_once_and_is_counted(guarded: Guarded) -> None:
    """And nothing that waits runs into its time limit: each says who may not say what."""
    async with guarded.links("client") as link:
        for asked in (
            link.call("fp.v1.receipt.0", b"[]", timeout_s=600),
            link.api(f"STREAM.PURGE.{streams.LEDGER}", {}, timeout_s=600),
            Owners(link, "sandbox").read(),
            Objects(link, streams.OBJECTS_SNAPSHOTS).names(),
            Objects(link, streams.OBJECTS_SNAPSHOTS).put("x", b"x"),
            anext(JetStreamLog(link, stream=streams.FACTS).read("fp.v1.infact.0.a.b", 1)),
        ):
            async with asyncio.timeout(60):
                with pytest.raises(UnknownError, match=r"client may not|do not let client"):
                    await asked
        assert len(guarded.denied["client"]) == 6
        assert (await stream_info(link, streams.LEDGER)).error is None, "the control"
        assert len(guarded.denied["client"]) == 6


async def test_s073_a_denied_read_is_unknown_and_never_absent(guarded: Guarded) -> None:
    async with guarded.links("sweeper", "planner") as (sweeper, planner):
        found = await JetStreamLog(sweeper).last(subjects.ledger("sandbox", 0))
        assert isinstance(found, Unknown)
        found = await JetStreamLog(planner).last(subjects.ledger("sandbox", 0))
        assert not isinstance(found, Unknown), "the control"


async def test_who_may_not_hear_says_so(guarded: Guarded) -> None:
    async with guarded.links("planner") as link:
        await link.subscribe_raw(subjects.receipts(0), lambda _msg: None)
        await link.flush()
        assert link.why_deaf() == ""
        await link.subscribe_raw(subjects.orders("gw"), lambda _msg: None)
        await until(lambda: link.why_deaf() != "")
        assert link.why_deaf() == "planner may not hear fp.v1.dispatch.gw"


async def test_credentials_that_the_server_does_not_take_end_the_start(guarded: Guarded) -> None:
    for wrong in (
        access.Access(),
        access.Access(user="planner", password="wrong"),
        access.Access(user="nobody", password="wrong"),
    ):
        async with asyncio.timeout(60):
            with pytest.raises(RefusedError, match="does not take") as raised:
                await Link.connect(guarded.server.url, name="test", access=wrong)
        assert raised.value.field == "nats_credentials"
        assert "wrong" not in str(raised.value)
    async with guarded.links("planner") as link:
        assert link.is_connected, "the control"


async def test_who_may_not_create_says_so_and_needs_not_where_the_streams_are(
    guarded: Guarded,
) -> None:
    async with guarded.links("planner", "operator") as (planner, operator):
        await declaring.declare(planner, SHARDS, create=False)
        with pytest.raises(DeniedError, match=r"do not let planner"):
            await declaring._create(planner, "FP_EVENTS", {"name": "FP_EVENTS"})
        assert await declaring._create(operator, "FP_EVENTS", {"name": "FP_EVENTS"}), "it exists"


async def test_within_one_account_an_answer_lands_in_the_ledger(tmp_path: Path) -> None:
    """
    Why every role has an account of its own: permissions alone do not look at reply subjects.

    The control of `tests/acceptance/test_grants.py`. If this fails, the server has learned to.
    """
    one_account = """authorization { users = [
      { user: operator, password: x }
      { user: client, password: x, permissions: {
          publish: { allow: ["fp.v1.cmd.*.*.*"] }, subscribe: { allow: ["_INBOX.>"] } } } ] }"""
    server = await NatsServer.start(tmp_path, sync_always=False, extra_config=one_account)
    try:
        operator = await Link.connect(
            server.url, name="o", access=access.Access(user="operator", password="x")
        )
        await declaring.declare(operator, SHARDS, create=True)
        client = await Link.connect(
            server.url, name="c", access=access.Access(user="client", password="x")
        )
        target = subjects.ledger("sandbox", 0)
        with pytest.raises(DeniedError):
            await client.call(target, b"forged", timeout_s=5)
        client.publish("fp.v1.cmd.step.box.s1", b"{}", target)
        await client.flush()
        info = await stream_info(operator, streams.LEDGER)
        assert info.state.messages == 1
        for link in (client, operator):
            await link.close()
    finally:
        await server.stop()


async def test_a_consumer_that_pushes_says_nothing_where_its_maker_may_not(
    guarded: Guarded,
) -> None:
    """
    Who may follow a stream may name a subject that it is pushed to, in the streams' own account.

    The server pushes only where somebody has subscribed to that very subject, and there nobody does:
    a stream's own subjects have wildcards. If this fails, following must not be granted this way.
    """
    async with guarded.links("client", "tracker", "planner", "operator") as links:
        client, tracker, planner, operator = links
        for link, stream, target in (
            (client, streams.EVENTS, subjects.ledger("sandbox", 0)),
            (client, streams.EVENTS, "fp.v1.fact.box.lost"),
            (client, streams.EVENTS, f"$JS.API.STREAM.PURGE.{streams.LEDGER}"),
            (tracker, streams.COMMANDS, subjects.ledger("sandbox", 0)),
            (planner, streams.COMMANDS, subjects.ledger("dag", 0)),
        ):
            config = {"deliver_subject": target, "ack_policy": "none", "deliver_policy": "all"}
            made = await link.api(
                f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config}
            )
            assert b'"error"' not in made, "the control: it is made"
        await planner.call("fp.v1.event.step.box.s1.committed", b"an event", timeout_s=10)
        await client.call("fp.v1.cmd.step.box.s1", b"a command", timeout_s=10)
        await asyncio.sleep(0.3)
        for stream in (streams.LEDGER, streams.FACTS):
            assert (await stream_info(operator, stream)).state.messages == 0
        assert (await stream_info(operator, streams.EVENTS)).state.messages == 1


async def test_a_reader_leaves_no_more_behind_than_its_pulls(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between accounts the server keeps something for each pull until its inbox is given up."""
    monkeypatch.setattr(bus, "PULLS_MAX", 5)
    async with guarded.links("client", "planner") as (client, planner):
        inputs = JetStreamInputs(planner)
        created = await inputs.incarnation(streams.COMMANDS, None)
        taken: list[int] = []
        reader = await inputs.open(
            streams.COMMANDS,
            [f"fp.v1.in.{shard}.step.*.*" for shard in range(SHARDS)],
            after=Position(incarnation=created, seq=0),
            take=lambda message: taken.append(message.seq),
            room=lambda: 2,
            fail=lambda error: pytest.fail(str(error)),
        )
        for number in range(60):
            await client.call(f"fp.v1.cmd.step.box.s{number}", b"{}", timeout_s=5)
        await until(lambda: len(taken) == 60)
        assert taken == list(range(1, 61)), "each once and in order, over many inboxes"
        assert await asyncio.to_thread(_responses, guarded) < 20
        await reader.close()
        for _ in range(30):
            await planner.call(f"$JS.API.DIRECT.GET.{streams.LEDGER}", b'{"seq": 1}', timeout_s=5)
        await planner.flush()
        assert await asyncio.to_thread(_responses, guarded) < 20


def _responses(guarded: Guarded) -> int:
    url = f"{guarded.server.monitor_url}/accountz?acc={grants.HUB}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)["account_detail"]
    return len(found.get("responses") or {})


async def test_objects_are_those_of_every_nats_client(guarded: Guarded) -> None:
    """Written by ours and read by the library's, on a server without users; and the other way."""
    server = await NatsServer.start(guarded.folder.parent / "plain", sync_always=False)
    try:
        link = await Link.connect(server.url, name="test")
        await declaring.declare(link, SHARDS, create=True)
        ours = Objects(link, streams.OBJECTS_BLOBS)
        theirs = await link.nc.jetstream().object_store(streams.OBJECTS_BLOBS)
        large = bytes(range(256)) * 2_000
        await ours.put("a", large)
        assert (await theirs.get("a")).data == large
        await theirs.put("b", large)
        assert await ours.get("b") == large
        await theirs.put("empty", b"")
        assert await ours.get("empty") == b""
        await theirs.delete("a")
        assert await ours.get("a") is None
        assert sorted(await ours.names()) == ["b", "empty"]
        await link.close()
    finally:
        await server.stop()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
async def test_a_leader_that_was_cut_off_proves_no_content_absent(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers from what it had: what was stored since, by its peers, is not absent."""
    async with guarded.links("gateway") as link:
        blobs = NatsBlobs(link)
        digest = await blobs.put(b"content")
        assert await blobs.get("sha256:" + "0" * 64) is None, "the control"
        last = JetStreamLog.last

        async def stale(_self: JetStreamLog, _subject: str) -> ReadResult:
            return Absent()

        monkeypatch.setattr(JetStreamLog, "last", stale)
        with pytest.raises(UnknownError, match="not known to be absent"):
            await blobs.get(digest)
        api = Link.api

        async def former(self: Link, what: str, *args: Any, **more: Any) -> bytes:
            answer = await api(self, what, *args, **more)
            if what.startswith("STREAM.INFO."):
                found = json.loads(answer)
                found["state"]["last_seq"] -= 1
                found["state"].pop("subjects", None)
                return json.dumps(found).encode()
            return answer

        monkeypatch.setattr(Link, "api", former)
        with pytest.raises(UnknownError, match="not known to be absent"):
            await blobs.get(digest)
        monkeypatch.setattr(JetStreamLog, "last", last)
        assert await blobs.get(digest) == b"content"


async def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    ca, server_pair, client_pair = await asyncio.to_thread(_certificates, tmp_path)
    folder = tmp_path / "nats"
    credentials = users.make(folder)
    (folder / users.AUTHORIZATION).write_text(authorization.render(users=users.USERS))
    tls = (
        f'tls {{ cert_file: "{server_pair[0]}", key_file: "{server_pair[1]}",'
        f' ca_file: "{ca}", verify: true }}'
    )
    server = await NatsServer.start(
        folder, sync_always=False, extra_config=f"include ./{users.AUTHORIZATION}\n{tls}"
    )
    try:
        path = str(credentials["operator"])
        good = access.read(path, ca=str(ca), cert=str(client_pair[0]), key=str(client_pair[1]))
        link = await Link.connect(server.url, name="test", access=good)
        await declaring.declare(link, SHARDS, create=True)
        await link.close()
        who = access.read(
            str(credentials["client"]),
            ca=str(ca),
            cert=str(client_pair[0]),
            key=str(client_pair[1]),
        )
        async with await Client.connect(server.url, user=who) as client:
            assert client.shards == SHARDS
        for bad in (
            access.read(path),
            access.read(path, ca=str(client_pair[0])),
        ):
            async with asyncio.timeout(60):
                with pytest.raises(RefusedError, match="does not take operator"):
                    await Link.connect(server.url, name="test", access=bad)
    finally:
        await server.stop()


def _certificates(folder: Path) -> tuple[Path, tuple[Path, Path], tuple[Path, Path]]:
    """A certificate authority of this test's own, and one certificate for each side."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    pairs: list[tuple[Path, Path]] = []
    for name in ("server", "client"):
        openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", "r.csr")
        (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl(
            *("x509", "-req", "-in", "r.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-set_serial"),
            *(str(len(pairs) + 1), "-extfile", "ext", "-out", f"{name}.pem"),
        )
        pairs.append((folder / f"{name}.pem", folder / f"{name}.key"))
    return folder / "ca.pem", pairs[0], pairs[1]


def test_secrets_are_for_their_owner_alone_and_made_once(tmp_path: Path) -> None:
    made = users.make(tmp_path, secrets_folder=tmp_path / "credentials")
    assert set(made) == set(grants.ROLES)
    for path in (tmp_path / users.USERS, *made.values()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = (tmp_path / users.USERS).read_text()
    first = made["planner"].read_text()
    password = json.loads(first)["password"]
    assert len(password) == 64
    assert password not in text
    assert users.make(tmp_path, secrets_folder=tmp_path / "credentials") == made
    assert (made["planner"].read_text(), (tmp_path / users.USERS).read_text()) == (first, text)
    made["planner"].unlink()
    with pytest.raises(RefusedError, match="planner"):
        users.make(tmp_path, secrets_folder=tmp_path / "credentials")


async def test_the_doctor_says_what_is_wrong_with_a_deployment(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def told(**environment: str) -> list[str]:
        for name in ("URL", "CREDENTIALS", "CA", "CERT", "KEY"):
            monkeypatch.delenv(f"FENCEPOST_NATS_{name}", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(f"FENCEPOST_NATS_{name}", value)
        found = await asyncio.to_thread(lambda: list(doctor_nats.checks()))
        return [f"{check.status}: {check.found}" for check in found]

    url, client = guarded.server.url, str(guarded.credentials["client"])
    assert await told() == []
    welcome = "ok: lets client in; 2 shards in one ledger"
    assert await told(URL=url, CREDENTIALS=client) == [f"ok: {client}", welcome]
    [none, refused] = await told(URL=url)
    assert none.startswith("warning: none")
    assert "does not take nobody" in refused
    [missing] = await told(URL=url, CREDENTIALS=str(tmp_path / "gone"))
    assert "FENCEPOST_NATS_CREDENTIALS" in missing
    [_, no_right] = await told(URL=url, CREDENTIALS=str(guarded.credentials["tracker"]))
    assert "do not let tracker publish" in no_right
    open_to_all = tmp_path / "open.credentials"
    open_to_all.write_text(Path(client).read_text())
    open_to_all.chmod(0o644)
    [readable, _] = await told(URL=url, CREDENTIALS=str(open_to_all))
    assert "others may read it" in readable
    [no_certificate] = await told(URL=url, CREDENTIALS=client, CA=client)
    assert "FENCEPOST_NATS_CA" in no_certificate
