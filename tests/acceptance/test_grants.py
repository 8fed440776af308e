"""
The services under their own users: what the table grants is what they use, and forgeries fail.

The server's trace says who published and subscribed to what. A grant that nobody was seen to use
is a stale one; a denial is a missing one (every test of this level looks for those).
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import msgspec
import pytest
from fencepost.client import Client, ledger
from fencepost.client.client import StepHandle
from fencepost.client.errors import NoServerError
from fencepost.client.sweep_commands import _census, _switch
from fencepost.contracts import grants, streams, subjects
from fencepost.contracts.grants import ROLES, Role
from fencepost.contracts.messages import Now, receipt_key, stamp
from fencepost.core import ids
from fencepost.core.errors import RefusedError
from fencepost.core.facts import Orphaned, Ref, Stray
from fencepost.core.receipts import StampedReceipt
from fencepost.core.sandbox import entries as e
from fencepost.runtime import access
from fencepost.runtime import streams as declaring
from fencepost.runtime.chunks.jetstream import JetStreamChunks
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import DeniedError, Link
from fencepost.runtime.objects import Objects
from fencepost.runtime.ports import Absent, AppendRefused
from fencepost.runtime.snapshots import JetStreamSnapshots
from fencepost.sandbox_gateway.blobs import NatsBlobs
from fencepost.sweeper.reading import NatsSources

from tests.acceptance.conftest import RunningStack, StartStack
from tests.acceptance.walking import PATIENCE_S, History, Work, appending, until

_LINE: Final = re.compile(r'"FENCEPOST\w*/user:(\w+)" - <<- \[(H?PUB|SUB) (\S+)')


class TracedStack(RunningStack):
    """Its server says in its log who sends what."""

    def _make_users(self, *, demand_credentials: bool) -> str:
        text = super()._make_users(demand_credentials=demand_credentials)
        return f"{text}\ntrace: true\ntrace_headers: true"

    def seen(self) -> dict[str, set[tuple[str, str]]]:
        """What each user published and subscribed to."""
        found: dict[str, set[tuple[str, str]]] = {}
        for user, verb, subject in _LINE.findall((self.data / "nats" / "nats.log").read_text()):
            found.setdefault(user, set()).add(
                ("subscribe" if verb == "SUB" else "publish", subject)
            )
        return found


def _covers(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, given = wanted[:-1], given[: len(wanted) - 1] if len(given) >= len(wanted) else []
    return len(wanted) == len(given) and all(
        one in ("*", other) for one, other in zip(wanted, given, strict=True)
    )


@pytest.fixture
async def traced(start_stack: StartStack) -> AsyncIterator[TracedStack]:
    stack = await start_stack(
        kind=TracedStack,
        others=True,
        postgres=True,
        demand_credentials=True,
        environment={"FENCEPOST_SWEEP_EVERY_MS": "300"},
    )
    assert isinstance(stack, TracedStack)
    yield stack


async def test_s092_every_grant_is_used_and_nothing_that_is_not_granted(
    traced: TracedStack,
) -> None:
    with pytest.raises((RefusedError, NoServerError)):
        await Client.connect(traced.nats.url, user=access.Access())
    for role in grants.PEOPLE:
        who = access.read(str(traced.credentials[role]))
        async with await Client.connect(traced.nats.url, wait_s=10, user=who) as client:
            await _work(client, f"{role}-box")
            if role == "admin":
                await _administer(client)
    await _http(traced)
    for name in ("planner-1", "tracker-1"):
        await traced.services[name].stop()
        traced.services[name].start()
        await traced.services[name].ready()
    await _rare(traced)
    seen = traced.seen()
    unused = [
        f"{role}: {grant.verb} {grant.subject}"
        for role in ROLES
        for grant in grants.of(role)
        if not any(
            verb == grant.verb and _covers(grant.subject, subject)
            for verb, subject in seen.get(role, ())
        )
    ]
    assert not unused, "\n".join(unused)
    refused = [
        line
        for line in (traced.data / "nats" / "nats.log").read_text().splitlines()
        if "->> [-ERR" in line and "Permissions" in line
    ]
    assert not refused, "\n".join(refused)


async def _work(client: Client, box: str) -> None:
    """Everything that people do."""
    link = client.link
    heard = [await link.subscribe_raw("fp.v1.event.>", lambda _msg: None)]
    for subject in ("step.>", "sandbox.>", "dag.>", "sweep.*"):
        heard.append(await link.subscribe_raw(f"fp.v1.event.{subject}", lambda _msg: None))
    await client.create_sandbox(box)
    assert (await client.write_file(box, "small", "x")).is_ok
    assert (await client.write_file(box, "large", os.urandom(100_000))).is_ok
    assert await client.read_file(box, "small") == "x"
    command = Now(
        kind="step",
        aggregate=box,
        id="now",
        body=msgspec.Raw(b'{"tool": "delete_path", "args": {"path": "small"}}'),
    )
    shard = ids.shard_of(box, client.shards)
    await link.call(subjects.now(shard), msgspec.json.encode([command]), timeout_s=PATIENCE_S)
    dag = f"{box}-dag"
    await client.open_dag(dag)
    await client.acquire(dag, "slot")
    assert [one async for one in client.list_dags()]
    assert (await client.cancel_dag(dag)).released == "confirmed"
    assert await client.releases_so_far(dag)
    async for _ in client.releases(dag, from_start=True):
        break
    assert [one async for one in client.history(box)]
    assert (await ledger.history(link)).is_unbroken
    await ledger.batch_after(link, shard, 0)
    await client.show(box)


async def _administer(client: Client) -> None:
    """What an admin does besides."""
    await _switch(client.link, "census")
    assert await _census(client.link, PATIENCE_S)
    await client.fault_ahead("later", {"do": "slow_create", "ms": 1})
    await client.fault("admin-box", {"do": "hold_receipts", "ms": 1})


async def _http(stack: TracedStack) -> None:
    tracker = stack.of("tracker")[0].http_url
    async with httpx.AsyncClient(base_url=tracker, timeout=PATIENCE_S) as http:
        assert (await http.post("/v1/tasks/client-box-dag/cancel")).is_success


async def _rare(stack: TracedStack) -> None:
    """What a service does too seldom for a test, by the same code under the same user."""
    ref = Ref(authority="a", provider="process", native_id="n", instance="i")
    roles: tuple[Role, ...] = ("operator", "mover", "gateway", "sweeper", "planner", "tracker")
    links = [await stack.link_as(role) for role in roles]
    operator, mover, gateway, sweeper, planner, tracker = links
    try:
        for name in grants.every_stream():
            with pytest.raises(declaring.StreamMismatchError):
                # It exists: what is tried is only whether the operator may.
                await declaring._declare_one(
                    operator, name, {"name": name, "subjects": ["no"]}, create=True
                )
            await declaring._create(operator, name, {"name": name, "subjects": [f"no.{name}"]})
        await declaring.declare(mover, stack.shards, create=False)
        first = await ledger.batch_after(mover, 0, 0)
        assert first is not None
        assert first.seq in [found.seq async for found in ledger.batches(mover, 0)]
        with pytest.raises(AppendRefused):
            await JetStreamLog(mover).append(subjects.ledger("sandbox", 0), b"{}", 0)
        await _move(mover)
        for link in (planner, tracker):
            store = JetStreamSnapshots(link)
            await store.put("sandbox-9-1", b"x")
            assert await store.names("sandbox-9-") == ["sandbox-9-1"]
            assert await store.get("sandbox-9-1") == b"x"
            await store.delete("sandbox-9-1")
            assert await store.names("sandbox-9-") == []
        digest = await NatsBlobs(gateway).put(b"large")
        assert await NatsBlobs(gateway).get(digest) == b"large"
        chunks = JetStreamChunks(gateway)
        name = digest.removeprefix("sha256:")
        await chunks.put("box", name, b"large")
        assert await chunks.get("box", name) == b"large"
        assert await chunks.names("box") == {name}
        assert await chunks.stored_at_ms("box", name)
        await chunks.delete("box", name)
        assert await chunks.absent("box", {name}) == {name}
        sources = NatsSources(sweeper, SystemClock(), stack.shards)
        assert await sources.propose(Stray(sandbox="nobody", ref=ref))
        assert await sources.propose(
            Orphaned(sandbox="nobody", dag="d", acquisition="a", evidence="absent")
        )
        assert await sources.dag("client-box-dag")
    finally:
        for link in links:
            await link.close()


async def _move(mover: Link) -> None:
    """What moving a ledger reads and writes besides the ledger."""
    for name in (streams.COMMANDS, streams.FACTS, streams.MESSAGES):
        assert isinstance(await JetStreamLog(mover, stream=name).next_after("fp.v1.no", 0), Absent)
    await declaring.put_meta(mover, streams.MOVING, streams.MOVING_ENDED)
    await declaring.put_meta(mover, streams.SWEEP_MODE, b"off")
    objects = Objects(mover, streams.OBJECTS_BLOBS)
    await objects.put("moved", b"x")
    assert await objects.get("moved") == b"x"
    chunks = JetStreamChunks(mover)
    await chunks.put("moved", "0" * 64, b"x")
    assert ("moved", "0" * 64) in await chunks.everything()
    assert await chunks.get("moved", "0" * 64) == b"x"
    assert await chunks.get("moved", "1" * 64) is None


async def _submit(client: Client, step: str) -> StepHandle:
    args, undo = appending(step)
    return await client.submit("box", "run_command", args, step=step, compensation=undo)


async def _entry(history: History, kind: type, step: str, **fields: Any) -> Any:
    """Waits for an entry about a step of `box`."""
    wanted = {"step": step, **fields}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for entry in await history.of("box"):
            if isinstance(entry, kind) and all(
                getattr(entry, name) == value for name, value in wanted.items()
            ):
                return entry
        assert time.monotonic() < deadline, f"no {kind.__name__} {wanted}"
        await asyncio.sleep(0.05)


async def _caught(caught: list[StampedReceipt], step: str) -> StampedReceipt:
    """Waits for a receipt of a step on the wire."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for stamped in caught:
            if msgspec.json.decode(stamped.receipt)["step"] == step:
                return stamped
        assert time.monotonic() < deadline, f"no receipt of {step}"
        await asyncio.sleep(0.02)


async def test_receipts_that_are_forged_or_replayed_never_commit(stack: RunningStack) -> None:
    """
    Nobody but a gateway can say one at all, and a gateway's word needs its own stamp.

    The receipt that is forged is a real one, said while no planner lived to hear it; the planner
    that comes then gets forgeries of it alone, and at last the receipt itself.
    """
    async with await stack.client() as client:
        history = History(client)
        await client.create_sandbox("box")
        subject = subjects.receipts(ids.shard_of("box", client.shards))
        gateway, listener = await stack.link_as("gateway"), await stack.link_as("planner")
        caught: list[StampedReceipt] = []
        await listener.subscribe_raw(
            subject,
            lambda msg: caught.extend(msgspec.json.decode(msg.data, type=list[StampedReceipt])),
        )
        await listener.flush()
        assert (await (await _submit(client, "first")).outcome(timeout_s=PATIENCE_S)).is_ok
        former = await _caught(caught, "first")

        await client.fault("box", {"do": "hold_receipts", "ms": 60_000})
        handle = await _submit(client, "open")
        await _entry(history, e.Fenced, "open")
        workspace = Work(stack, client, history, "box")
        log = workspace.workspace_of(await workspace.live()) / "log"
        await until(lambda: "open" in log.read_text(), "the write is on the disk")
        planner = stack.services["planner-1"]
        planner.kill()
        await client.fault("box", {"do": "release_receipts"})
        real = await _caught(caught, "open")
        await client.fault("box", {"do": "hold_receipts", "ms": 60_000})
        planner.start()
        # Not its being ready, but its answer says that it owns the shard, and hears receipts.
        assert (await workspace.live())["epoch"] == 1

        for role in grants.ROLES:
            if role != "gateway":
                link = await stack.link_as(role)
                with pytest.raises(DeniedError):
                    await link.call(subject, msgspec.json.encode([real]), timeout_s=PATIENCE_S)
                await link.close()
        master = (stack.data / "receipt.key").read_text().strip().encode()
        other = "g" + secrets.token_hex(6)
        key = receipt_key(master, other, "box")
        for forged in (
            former,
            msgspec.structs.replace(real, receipt=former.receipt),
            msgspec.structs.replace(real, mac="0" * len(real.mac)),
            msgspec.structs.replace(former, receipt=real.receipt),
            msgspec.structs.replace(real, gateway=other),
            stamp(key, gateway=other, sandbox="box", at_ms=real.at_ms, receipt=bytes(real.receipt)),
        ):
            gateway.publish(subject, msgspec.json.encode([forged]))
        refused = [
            (await _entry(history, e.ReceiptRefused, "open", reason="wrong_gateway")).reason,
            *(x.reason for x in await history.of("box") if isinstance(x, e.ReceiptRefused)),
        ]
        assert sorted(refused[1:]) == ["bad_mac", "bad_mac", "bad_mac", "wrong_gateway"]
        assert (await client.show_step("box", "open"))["state"] == "fenced"
        gateway.publish(subject, msgspec.json.encode([real]))
        gateway.publish(subject, msgspec.json.encode([real]))
        outcome = await handle.outcome(timeout_s=PATIENCE_S)
        assert (outcome.state, outcome.attempts) == ("committed", 1), "the control"
        await client.fault("box", {"do": "release_receipts"})
        assert await client.read_file("box", "log") == "first\nopen\n"
        committed = [x.step for x in await history.of("box") if isinstance(x, e.Committed)]
        assert committed == ["first", "open"]
        for link in (gateway, listener):
            await link.close()
    assert (await stack.verify()).violations == []


async def test_an_answer_of_the_server_lands_in_the_askers_account_alone(
    stack: RunningStack,
) -> None:
    """
    A reply subject is where the server answers, and it asks nobody's permission there.

    The control is in `tests/integration/permissions`: within one account the ledger takes it.
    """
    async with await stack.client() as client:
        before = (await ledger.history(client.link)).last
    sayers: tuple[Role, ...] = ("client", "gateway", "sweeper", "planner", "tracker")
    for role in sayers:
        link = await stack.link_as(role)
        for family in ("sandbox", "dag"):
            if (family, role) in (("sandbox", "planner"), ("dag", "tracker")):
                continue
            target = subjects.ledger(family, 0)
            for subject in grants.publishes(role):
                if subject.startswith("fp.v1.ledger"):
                    continue
                link.publish(subject.replace("*", "x").replace(">", "x"), b"{}", target)
        await link.flush()
        await link.close()
    async with await stack.client() as client:
        for service in (*stack.of("planner"), *stack.of("gateway")):
            await service.ready()
        batches = [
            found.seq
            for family in ("sandbox", "dag")
            for shard in range(client.shards)
            async for found in ledger.batches(client.link, shard, family=family)
        ]
        assert len(batches) == (await ledger.history(client.link)).last >= before
    assert (await stack.verify()).violations == []
