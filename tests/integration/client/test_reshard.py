"""A recorded history is cut into another number of shards, and nothing of it is lost."""

from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fencepost.client import ledger, reshard, reshard_commands
from fencepost.client.client import Client
from fencepost.client.embedded import NatsServer
from fencepost.client.verify import verify
from fencepost.contracts import streams, subjects
from fencepost.contracts.messages import Batch, Sent
from fencepost.core.dag.machine import DagMachine
from fencepost.core.errors import LedgerBrokenError, RefusedError
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.runtime import streams as deployed
from fencepost.runtime.chunks.jetstream import JetStreamChunks
from fencepost.runtime.ledger import JetStreamLog
from fencepost.runtime.link import Link, stream_info
from fencepost.runtime.outbox import MessageMaker
from fencepost.runtime.ports import AppendRefused
from fencepost.simulator.options import draw
from fencepost.simulator.simulation import Simulation

BEFORE, AFTER = 2, 5


async def deployment(server: NatsServer, shards: int, ledgers: int = 1) -> Client:
    link = await Link.connect(server.url, name="operator")
    try:
        await deployed.declare(link, shards, create=True, ledgers=ledgers)
    finally:
        await link.close()
    return await Client.connect(server.url, wait_s=5)


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[Client]:
    server = await NatsServer.start(tmp_path / "source")
    try:
        async with await deployment(server, BEFORE) as client:
            yield client
    finally:
        await server.stop()


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[Client]:
    server = await NatsServer.start(tmp_path / "target")
    try:
        async with await deployment(server, AFTER) as client:
            yield client
    finally:
        await server.stop()


def history(seed: int) -> list[Batch]:
    """A history as the services would have written it, faults and takeovers included."""
    simulation = Simulation(seed, msgspec.structs.replace(draw(seed), shards=BEFORE), tracing=False)
    simulation.run()
    assert not simulation.world.violations
    stored = sorted(each for shard in simulation.log.batches for each in shard)
    return [msgspec.json.decode(each.payload, type=Batch) for each in stored]


async def record(client: Client, batches: list[Batch]) -> None:
    heads: dict[int, int] = {}
    for batch in batches:
        prev = heads.get(batch.shard, 0)
        written = msgspec.structs.replace(batch, prev=prev, positions={}, sent=Sent(), snapshot="")
        subject = subjects.ledger(batch.family, batch.shard)
        log = ledger.log_of(client.link, batch.shard, client.ledgers)
        heads[batch.shard] = await log.append(subject, msgspec.json.encode(written), prev)
    await take_messages(client, batches)


async def take_messages(client: Client, batches: list[Batch]) -> None:
    """Dag shards that have taken every message which those sandbox shards sent."""
    machine = SandboxMachine()
    makers = {shard: MessageMaker(machine, shard, BEFORE) for shard in range(BEFORE)}
    for shard, maker in makers.items():
        async for recorded in ledger.batches(client.link, shard, ledgers=client.ledgers):
            maker.make(recorded.seq, recorded.entries, 0)
    dags = DagMachine()
    for shard in range(BEFORE):
        receiver = subjects.message("dag", shard)
        seen = {f"sandbox.{n}": m.links[receiver] for n, m in makers.items() if receiver in m.links}
        batch = Batch(
            v=1,
            id=f"dag.{shard}",
            family="dag",
            shard=shard,
            term=1,
            owner="tracker",
            prev=0,
            now_ms=batches[0].now_ms,
            positions={},
            last_seen=seen,
            sent=Sent(),
            entries=msgspec.Raw(
                dags.encode_entries([dags.term_opened(1, "tracker", BEFORE, "fnv1a32")])
            ),
        )
        log = ledger.log_of(client.link, shard, client.ledgers)
        await log.append(subjects.ledger("dag", shard), msgspec.json.encode(batch), 0)


async def entries_by_sandbox(client: Client) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for shard in range(client.shards):
        async for recorded in ledger.batches(client.link, shard, ledgers=client.ledgers):
            for entry in recorded.entries:
                if not isinstance(entry, e.TermOpened):
                    found.setdefault(entry.sandbox, []).append((recorded.batch.now_ms, entry))
    return found


@pytest.mark.parametrize("seed", [3, 14, 15])
async def test_every_entry_is_there_again_in_its_sandbox_s_order(
    source: Client, target: Client, seed: int
) -> None:
    await record(source, history(seed))
    before = await entries_by_sandbox(source)
    result = await reshard.reshard(source, target)
    assert (result.shards_before, result.shards) == (BEFORE, AFTER)
    after = await entries_by_sandbox(target)
    assert set(after) == set(before)
    for sandbox, entries in before.items():
        if sandbox:
            assert after[sandbox] == entries
        else:
            assert sorted(map(repr, after[sandbox])) == sorted(map(repr, entries))
    assert result.entries >= sum(map(len, before.values()))
    assert (await verify(target)).is_clean
    # The source is as it was, but for our own terms: it can go on.
    assert await entries_by_sandbox(source) == before


async def test_from_one_ledger_to_three_and_back_nothing_is_lost(
    source: Client, target: Client, tmp_path: Path
) -> None:
    """With as many shards, and with others; `target` keeps its one."""
    await record(source, history(3))
    before = await entries_by_sandbox(source)
    server = await NatsServer.start(tmp_path / "three")
    try:
        async with await deployment(server, 3, ledgers=3) as three:
            result = await reshard.reshard(source, three)
            assert (result.ledgers_before, result.ledgers) == (1, 3)
            found = [await ledger.history(three.link, f"FP_LEDGER_{n}") for n in range(3)]
            assert sum(each.messages for each in found) == result.batches
            assert all(each.is_unbroken for each in found)
            assert sum(each.messages > 0 for each in found) > 1, "else it says little"
            there = await entries_by_sandbox(three)
            result = await reshard.reshard(three, target)
            assert (result.ledgers_before, result.ledgers) == (3, 1)
            assert result.verified.is_clean
    finally:
        await server.stop()
    after = await entries_by_sandbox(target)
    for held in (there, after):
        held.pop("", None)
    before.pop("", None)
    assert before == there == after


async def test_between_servers_the_streams_are_made_for_the_number_asked_and_the_rest_stays(
    source: Client, tmp_path: Path
) -> None:
    await record(source, history(3))
    assert source.link.nc.connected_url is not None
    server = await NatsServer.start(tmp_path / "other")

    async def move(**asked: int | None) -> reshard.Result:
        wanted = {"shards": None, "ledgers": None, "replicas": 1, **asked}
        here = source.link.nc.connected_url.geturl()  # type: ignore[union-attr]
        files = {"to_credentials": "", "to_operator": ""}
        return await reshard_commands._between(here, to=server.url, **files, **wanted)  # type: ignore[arg-type]

    try:
        with pytest.raises(RefusedError, match=f"ledgers: expected 1 to {BEFORE}"):
            await move(ledgers=BEFORE + 1)
        result = await move(ledgers=BEFORE)
        assert (result.shards, result.ledgers, result.ledgers_before) == (BEFORE, BEFORE, 1)
        async with await Client.connect(server.url) as moved:
            assert (moved.shards, moved.ledgers) == (BEFORE, BEFORE)
    finally:
        await server.stop()


async def test_verify_says_which_ledger_is_not_whole(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path / "two")
    try:
        async with await deployment(server, BEFORE, ledgers=2) as client:
            await record(client, history(3))
            info = await stream_info(client.link, "FP_LEDGER_1")
            cut = {**info.config, "max_msgs": info.state.messages - 1, "discard": "old"}
            assert b'"error"' not in await client.link.api("STREAM.UPDATE.FP_LEDGER_1", cut)
            report = await verify(client)
            assert not report.is_clean
            told = [each for each in report.violations if each.family == "ledger"]
            assert [(each.invariant, each.shard) for each in told] == [("I8", 1)]
            assert told[0].detail.startswith("FP_LEDGER_1 is not whole")
    finally:
        await server.stop()


async def test_a_target_with_a_history_in_any_of_its_ledgers_is_refused(
    source: Client, tmp_path: Path
) -> None:
    batches = history(3)
    await record(source, batches)
    server = await NatsServer.start(tmp_path / "three")
    try:
        async with await deployment(server, BEFORE, ledgers=2) as two:
            batch = next(each for each in batches if each.shard == 1)
            log = ledger.log_of(two.link, 1, two.ledgers)
            await log.append(subjects.ledger("sandbox", 1), msgspec.json.encode(batch), 0)
            with pytest.raises(RefusedError, match="FP_LEDGER_1 has 1 batches"):
                await reshard.reshard(source, two)
    finally:
        await server.stop()


async def test_a_source_that_is_written_meanwhile_is_refused(
    source: Client, target: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await record(source, history(3))
    compared = reshard._prove_still

    async def written(client: Client, sealed: dict[Any, Batch]) -> None:
        family, shard = next(iter(sealed))
        async for recorded in ledger.batches(client.link, shard, family=family):
            last = recorded
        other = msgspec.structs.replace(
            last.batch, id="another", prev=last.seq, entries=msgspec.Raw(b"[]")
        )
        subject = subjects.ledger(family, shard)
        await JetStreamLog(client.link).append(subject, msgspec.json.encode(other), last.seq)
        await compared(client, sealed)

    monkeypatch.setattr(reshard, "_prove_still", written)
    with pytest.raises(RefusedError, match="was written meanwhile"):
        await reshard.reshard(source, target)


async def test_on_a_target_that_was_not_written_to_its_end_nothing_starts(
    source: Client, target: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It folds and verifies, as a shorter history: what is missing is on the source alone."""

    async def killed(_: Client, __: Client) -> int:
        raise ConnectionAbortedError

    await record(source, history(3))
    await deployed.declare(target.link, AFTER, create=False)
    with monkeypatch.context() as cut:
        cut.setattr(reshard, "copy_contents", killed)
        with pytest.raises(ConnectionAbortedError):
            await reshard.reshard(source, target)
    assert (await verify(target)).is_clean
    for create in (False, True):
        with pytest.raises(deployed.HalfMovedError, match="has not ended: its history is not"):
            await deployed.declare(target.link, AFTER, create=create)
    await deployed.declare(source.link, BEFORE, create=False)


async def test_a_target_is_as_it_was_where_the_source_was_refused(
    source: Client, target: Client
) -> None:
    with pytest.raises(RefusedError, match="empty"):
        await reshard.reshard(source, target)
    await deployed.declare(target.link, AFTER, create=False)
    await record(source, history(3))
    await reshard.reshard(source, target)
    await deployed.declare(target.link, AFTER, create=False)


async def test_what_sweeping_was_switched_to_it_stays(source: Client, target: Client) -> None:
    await record(source, history(3))
    await deployed.put_meta(source.link, streams.SWEEP_MODE, b"off")
    assert await deployed.read_meta(target.link, streams.SWEEP_MODE) is None
    await reshard.reshard(source, target)
    assert await deployed.read_meta(target.link, streams.SWEEP_MODE) == b"off"


async def test_an_owner_that_still_lives_is_fenced(source: Client, target: Client) -> None:
    await record(source, history(3))
    heads = {}
    for shard in range(BEFORE):
        async for recorded in ledger.batches(source.link, shard):
            heads[shard] = recorded
    await reshard.reshard(source, target)

    for shard, last in heads.items():
        late = msgspec.structs.replace(last.batch, id="late", prev=last.seq)
        subject = subjects.ledger("sandbox", shard)
        with pytest.raises(AppendRefused):
            await JetStreamLog(source.link).append(subject, msgspec.json.encode(late), last.seq)


async def test_a_source_with_an_unread_input_is_refused(source: Client, target: Client) -> None:
    await record(source, history(3))
    body = b'{"tool": "write_file", "args": {"path": "a", "content": ""}}'
    await source.link.call(subjects.command("step", "s1", "late"), body, timeout_s=5)
    with pytest.raises(RefusedError, match="has not read FP_COMMANDS"):
        await reshard.reshard(source, target)
    assert (await ledger.history(target.link)).messages == 0


async def test_a_target_with_a_history_is_refused(source: Client, target: Client) -> None:
    batches = history(3)
    await record(source, batches)
    log = JetStreamLog(target.link)
    await log.append(subjects.ledger("sandbox", 0), msgspec.json.encode(batches[0]), 0)
    with pytest.raises(RefusedError, match="has 1 batches"):
        await reshard.reshard(source, target)


async def test_a_message_that_nobody_took_is_on_its_way(source: Client, target: Client) -> None:
    batches = history(3)
    await record(source, batches)
    told = e.ToldEntry(sandbox="nobody", dag="d1", acquisition="a1", phase="refused")
    async for recorded in ledger.batches(source.link, 0):
        head = recorded
    batch = msgspec.structs.replace(
        head.batch,
        id="told",
        prev=head.seq,
        entries=msgspec.Raw(SandboxMachine().encode_entries([told])),
    )
    subject = subjects.ledger("sandbox", 0)
    await JetStreamLog(source.link).append(subject, msgspec.json.encode(batch), head.seq)
    with pytest.raises(RefusedError, match="are on their way"):
        await reshard.reshard(source, target)


async def test_what_a_newer_version_wrote_is_not_written_anew_with_less(
    source: Client, target: Client
) -> None:
    batches = history(3)
    first = next(each for each in batches if b'"committed"' in bytes(each.entries))
    more = bytes(first.entries).replace(b'{"kind":"committed",', b'{"kind":"committed","newer":1,')
    changed = msgspec.structs.replace(first, entries=msgspec.Raw(more))
    await record(source, [changed if each is first else each for each in batches])
    with pytest.raises(RefusedError, match="committed has newer, which this version does not know"):
        await reshard.reshard(source, target)


async def test_an_empty_source_is_refused(source: Client, target: Client) -> None:
    with pytest.raises(RefusedError, match="empty"):
        await reshard.reshard(source, target)


async def test_contents_go_along(source: Client, target: Client) -> None:
    put = await source._blobs.put(b"x" * 100_000, field="content")
    assert await reshard.copy_contents(source, target) == 1
    assert await target._blobs._objects.get(put["$blob"]) == b"x" * 100_000


async def test_chunks_of_checkpoints_go_along(source: Client, target: Client) -> None:
    theirs, ours = JetStreamChunks(source.link), JetStreamChunks(target.link)
    chunks = {(f"box-{n % 3}", sha256(b"%d" % n).hexdigest()): b"%d" % n for n in range(40)}
    for (box, digest), data in chunks.items():
        await theirs.put(box, digest, data)
    assert await reshard.copy_chunks(source, target) == len(chunks)
    assert await ours.everything() == set(chunks)
    for (box, digest), data in chunks.items():
        assert await ours.get(box, digest) == data


def test_a_state_that_differs_is_named() -> None:
    ended = {"gone": True, "steps": {}, "epoch": 3}
    alive = {"gone": False, "steps": {}, "epoch": 3}
    before = {"sandbox": {"s1": alive, "s2": ended}, "dag": {}}
    assert reshard.compare(before, before) == 0
    assert reshard.compare(before, {"sandbox": {"s1": alive}, "dag": {}}) == 1
    with pytest.raises(LedgerBrokenError, match="sandbox s1: it is not"):
        reshard.compare(before, {"sandbox": {"s2": ended}, "dag": {}})
    with pytest.raises(LedgerBrokenError, match="sandbox s1: epoch is not"):
        changed = {**alive, "epoch": 4}
        reshard.compare(before, {"sandbox": {"s1": changed, "s2": ended}, "dag": {}})
    with pytest.raises(LedgerBrokenError, match="s3: was not there"):
        reshard.compare(before, {"sandbox": {**before["sandbox"], "s3": alive}, "dag": {}})
