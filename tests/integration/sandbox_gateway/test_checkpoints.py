"""Checkpoints, restores and what is dropped: orders in, facts out, with the real toolhost."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fencepost.contracts import subjects
from fencepost.core import facts as f
from fencepost.core.errors import UnknownError
from fencepost.core.sandbox.orders import CheckpointOrder, PruneOrder, RestoreOrder
from fencepost.providers import processes
from fencepost.providers.process import ProcessProvider
from fencepost.runtime.chunks import ChunkStore
from fencepost.runtime.chunks.jetstream import JetStreamChunks
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import GatewayMetrics
from fencepost.sandbox_gateway import manifests
from fencepost.sandbox_gateway.blobs import NatsBlobs
from fencepost.sandbox_gateway.session import GatewaySession, Options

from tests.chunks import MemoryChunks, named
from tests.integration.sandbox_gateway.conftest import PausableClock, Running, StartGateway
from tests.integration.sandbox_gateway.control import MASTER, SHARDS, Control, Live, wait_for
from tests.unit.toolhost.keeping import told_tree


class Box:
    """One live sandbox, and what a shard may order of its disk."""

    def __init__(self, live: Live, root: Path) -> None:
        self.live = live
        self.control = live.control
        self.gateway = live.gateway
        self.sandbox = live.found.sandbox
        self.workspace = root / live.ref.native_id / "workspace"
        self.state = root / live.ref.native_id / "state"

    @classmethod
    async def made(cls, running: Running, control: Control, root: Path, name: str) -> Box:
        return cls(await control.live(running.id, name), root)

    def order(self, order: Any) -> None:
        self.control.order(self.gateway, order)

    def checkpoint_order(self, checkpoint: str, base: str = "", **more: Any) -> CheckpointOrder:
        about = {"epoch": self.live.marked.epoch, "session": self.live.found.session, **more}
        return CheckpointOrder(sandbox=self.sandbox, checkpoint=checkpoint, base=base, **about)

    async def checkpoint(self, checkpoint: str, base: str = "") -> f.Checkpointed:
        self.order(self.checkpoint_order(checkpoint, base))
        return await self.control.fact(f.Checkpointed, checkpoint=checkpoint, sandbox=self.sandbox)

    async def checkpoint_fails(self, checkpoint: str, base: str = "") -> f.CheckpointFailed:
        self.order(self.checkpoint_order(checkpoint, base))
        return await self.control.fact(f.CheckpointFailed, checkpoint=checkpoint)

    def restore_order(self, checkpoint: str, manifest: str, namespace: str) -> RestoreOrder:
        return RestoreOrder(
            sandbox=self.sandbox,
            epoch=self.live.marked.epoch,
            session=self.live.found.session,
            checkpoint=checkpoint,
            manifest=manifest,
            namespace=namespace,
        )

    async def restore(self, checkpoint: str, manifest: str, namespace: str) -> f.Restored:
        self.order(self.restore_order(checkpoint, manifest, namespace))
        return await self.control.fact(f.Restored, checkpoint=checkpoint, sandbox=self.sandbox)

    async def restore_fails(self, checkpoint: str, manifest: str, space: str) -> f.RestoreFailed:
        self.order(self.restore_order(checkpoint, manifest, space))
        return await self.control.fact(f.RestoreFailed, checkpoint=checkpoint, sandbox=self.sandbox)


@pytest.fixture
def chunks() -> MemoryChunks:
    return MemoryChunks()


@pytest.fixture
async def gateway(
    nats: Any, control: Control, root: Path, chunks: ChunkStore
) -> AsyncIterator[Running]:
    link = await Link.connect(nats.url, name="gateway")
    metrics = GatewayMetrics()
    session = GatewaySession(
        link,
        providers={"process": ProcessProvider(root, isolate=False, heartbeat_ms=200)},
        options=Options(
            shards=SHARDS, master=MASTER, heartbeat_ms=200, allow_faults=True, chunks_young_ms=0
        ),
        clock=PausableClock(),
        metrics=metrics,
        blob_store=NatsBlobs(link),
        chunk_store=chunks,
    )
    running = Running(session, link, metrics)
    await wait_for(lambda: any(seen.gateway == session.id for seen in control.seen), "a session")
    yield running
    await running.stop()
    await link.close()


def fill(root: Path) -> None:
    (root / "src").mkdir()
    for number in range(120):
        (root / "src" / f"{number}.py").write_bytes(b"%d" % number * 2000)
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o755)
    (root / "big").write_bytes(os.urandom(1_500_000))
    (root / "link").symlink_to("src/1.py")
    (root / "empty").mkdir()
    with open(os.fsencode(root) + b"/\xff\xfe", "wb") as file:
        file.write(b"\0\r\n")


async def test_a_checkpoint_is_restored_in_another_sandbox(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    box = await Box.made(gateway, control, root, "one")
    fill(box.workspace)
    await box.live.run("s1")
    said = await box.checkpoint("c1")
    assert (said.gateway, said.session, said.epoch) == (gateway.id, box.live.found.session, 1)
    assert (said.nonce, said.journal_seq, said.files) == (box.live.marked.nonce, 1, 124)
    assert said.sent_bytes == sum(map(len, chunks.held.values()))
    assert {where for where, _ in chunks.held} == {"one"}
    tree = told_tree(box.workspace)
    fork = await Box.made(gateway, control, root, "two")
    done = await fork.restore("c1", said.manifest, "one")
    assert (done.files, done.size_bytes, done.journal_seq) == (said.files, said.size_bytes, 0)
    assert told_tree(fork.workspace) == tree
    assert gateway.metric("checkpoint_orders_total", outcome="stored") == 1
    assert gateway.metric("restore_orders_total", outcome="restored") == 1


async def test_a_change_sends_its_neighbourhood_and_a_new_gateway_knows_the_base(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    box = await Box.made(gateway, control, root, "one")
    fill(box.workspace)
    await asyncio.sleep(0.15)
    first = await box.checkpoint("c1")
    (box.workspace / "src" / "7.py").write_text("changed")
    puts = chunks.puts
    second = await box.checkpoint("c2", base=first.manifest)
    assert second.manifest != first.manifest
    assert (second.sent_bytes < first.sent_bytes / 4, chunks.puts - puts <= 4) == (True, True)
    # As after a restart: the base's pages are read again, its contents are not.
    gateway.session._checkpoints._trees.drop("one")
    gets = chunks.gets
    third = await box.checkpoint("c3", base=second.manifest)
    assert (third.manifest, third.sent_bytes) == (second.manifest, 0)
    assert chunks.gets - gets < 6


async def test_a_repeated_order_gets_the_same_report(
    gateway: Running, control: Control, root: Path
) -> None:
    box = await Box.made(gateway, control, root, "one")
    first = await box.checkpoint("c1")
    (box.workspace / "f").write_text("later")
    box.order(box.checkpoint_order("c1"))
    await wait_for(lambda: len(control.of(f.Checkpointed)) == 2)
    assert control.of(f.Checkpointed) == [first, first]
    done = await box.restore("c1", first.manifest, "one")
    box.order(box.restore_order("c1", first.manifest, "one"))
    await wait_for(lambda: len(control.of(f.Restored)) == 2)
    assert control.of(f.Restored) == [done, done]


async def test_a_store_that_does_not_say_is_unreachable_and_nothing_is_reported(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    box = await Box.made(gateway, control, root, "one")
    fill(box.workspace)
    chunks.fail = True
    failed = await box.checkpoint_fails("c1")
    assert (failed.reason, failed.epoch) == ("unreachable", 1)
    chunks.fail = False
    said = await box.checkpoint("c2")
    fork = await Box.made(gateway, control, root, "two")
    chunks.fail = True
    assert (await fork.restore_fails("c2", said.manifest, "one")).reason == "unreachable"
    assert told_tree(fork.workspace) == {}
    chunks.fail = False
    await fork.restore("c2", said.manifest, "one")
    assert not control.of(f.Checkpointed, checkpoint="c1")


async def test_a_chunk_that_is_missing_or_altered_fails_the_restore(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    box = await Box.made(gateway, control, root, "one")
    fill(box.workspace)
    said = await box.checkpoint("c1")
    key = max(chunks.held, key=lambda key: len(chunks.held[key]))
    data = chunks.held.pop(key)
    fork = await Box.made(gateway, control, root, "two")
    assert (await fork.restore_fails("c1", said.manifest, "one")).reason == "missing"
    control.facts.clear()
    chunks.held[key] = data[:-1] + bytes([data[-1] ^ 1])
    assert (await fork.restore_fails("c1", said.manifest, "one")).reason == "corrupt"
    chunks.held[key] = data
    await fork.restore("c1", said.manifest, "one")
    assert told_tree(fork.workspace) == told_tree(box.workspace)


async def test_a_base_that_is_broken_is_not_built_upon(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    box = await Box.made(gateway, control, root, "one")
    fill(box.workspace)
    await asyncio.sleep(0.15)
    first = await box.checkpoint("c1")
    gateway.session._checkpoints._trees.drop("one")
    chunks.held.clear()
    second = await box.checkpoint("c2", base=first.manifest)
    assert second.manifest == first.manifest
    fork = await Box.made(gateway, control, root, "two")
    await fork.restore("c2", second.manifest, "one")
    assert told_tree(fork.workspace) == told_tree(box.workspace)


@pytest.mark.parametrize("lost", ["content", "all"])
async def test_what_the_store_lost_while_the_sandbox_lives_is_sent_again(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks, lost: str
) -> None:
    """Nobody reads a base's contents; an increment that inherits a hole restores none."""
    box = await Box.made(gateway, control, root, "one")
    fill(box.workspace)
    await asyncio.sleep(0.15)
    first = await box.checkpoint("c1")
    (box.workspace / "new").write_text("n")
    held = await box.checkpoint("control", base=first.manifest)
    largest = max(chunks.held, key=lambda key: len(chunks.held[key]))
    for key in {"content": [largest], "all": list(chunks.held)}[lost]:
        del chunks.held[key]
    (box.workspace / "newer").write_text("n")
    second = await box.checkpoint("c2", base=held.manifest)
    assert second.sent_bytes > first.sent_bytes / 2 > held.sent_bytes
    fork = await Box.made(gateway, control, root, "two")
    await fork.restore("c2", second.manifest, "one")
    assert told_tree(fork.workspace) == told_tree(box.workspace)
    third = await box.checkpoint("c3", base=second.manifest)
    assert third.sent_bytes == 0, "an increment again"
    assert gateway.metric("chunks_lost_total") >= 1


async def test_what_jetstream_lost_while_the_sandbox_lives_is_sent_again(
    start_gateway: StartGateway, control: Control, root: Path
) -> None:
    gateway = await start_gateway(isolate=False)
    store = JetStreamChunks(control.link)
    box = await Box.made(gateway, control, root, "one")
    fill(box.workspace)
    first = await box.checkpoint("c1")
    for name in await store.names("one"):
        await store.delete("one", name)
    (box.workspace / "new").write_text("n")
    second = await box.checkpoint("c2", base=first.manifest)
    fork = await Box.made(gateway, control, root, "two")
    await fork.restore("c2", second.manifest, "one")
    assert told_tree(fork.workspace) == told_tree(box.workspace)


async def test_what_cannot_be_looked_for_is_no_checkpoint(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    box = await Box.made(gateway, control, root, "one")
    fill(box.workspace)
    first = await box.checkpoint("c1")

    async def unknown(_namespace: str, _digests: set[str]) -> set[str]:
        raise UnknownError("not now")

    chunks.absent = unknown  # type: ignore[method-assign]
    assert (await box.checkpoint_fails("c2", base=first.manifest)).reason == "unreachable"
    del chunks.absent  # type: ignore[attr-defined]
    await box.checkpoint("c3", base=first.manifest)


async def test_a_chunk_that_happens_to_be_there_is_no_proof(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    """It may be about to be dropped by another gateway, which read the list before."""
    box = await Box.made(gateway, control, root, "one")
    fill(box.workspace)
    first = await box.checkpoint("c1")
    chunks.now_ms = 99
    await box.checkpoint("c2")
    assert set(chunks.stored.values()) == {99}
    assert (await box.checkpoint("c3", base=first.manifest)).sent_bytes == 0


# -- what a toolhost may not do


class Liar:
    """A toolhost's answers, as a hostile one would give them: frames into the attachment."""

    def __init__(self, box: Box, running: Running) -> None:
        self.attachment = running.session._attached[box.sandbox]
        self.sent: list[tuple[dict[str, Any], bytes]] = []
        self.attachment.write = self._take  # type: ignore[method-assign]

    def _take(self, data: bytes) -> None:
        head, _, body = data.partition(b"\n")
        self.sent.append((msgspec.json.decode(head), body))

    async def asked(self, kind: str) -> tuple[dict[str, Any], bytes]:
        await wait_for(lambda: any(head["k"] == kind for head, _ in self.sent), kind)
        return next(item for item in self.sent if item[0]["k"] == kind)

    def say(self, body: bytes = b"", **head: Any) -> None:
        head["n"] = len(body)
        self.attachment._take(msgspec.json.encode(head) + b"\n" + body)

    async def offer(self, id_: str, *contents: bytes) -> None:
        self.sent = [item for item in self.sent if item[0]["k"] != "want"]
        digests = b"".join(hashlib.sha256(data).digest() for data in contents)
        self.say(digests, k="offer", id=id_)
        await self.asked("want")

    def checkpointed(self, id_: str, box: Box, manifest: str) -> None:
        marked = box.live.marked
        self.say(
            k="checkpointed",
            id=id_,
            checkpoint="c1",
            manifest="sha256:" + manifest,
            epoch=marked.epoch,
            session=marked.session,
            nonce=marked.nonce,
        )


def page(**more: Any) -> bytes:
    return msgspec.json.encode({"v": 1, "k": "root", "entries": 0, "files": 0, "size": 0, **more})


ABSENT = "ab" * 32


@pytest.mark.parametrize("kind", ["page", "content"])
@pytest.mark.parametrize(
    ("more", "good"),
    [
        ({"c": []}, True),
        ({"c": [[ABSENT, 0, 0]]}, False),
        ({"packs": [[ABSENT, 5]]}, False),
        ({"e": [["a", "f", 420, 0, 5, [ABSENT]]]}, False),
        ({"e": [["a", "F", 420, 0, 5, [ABSENT]]]}, False),
        ({"e": [["a", "f", 420, 0, 5, 7]]}, False),
        ({"c": [["zz", 0, 0]]}, False),
        ({"c": 7}, False),
        ({"v": 2}, False),
        ({"k": "other"}, False),
    ],
)
async def test_a_manifest_that_is_not_whole_is_no_checkpoint(
    gateway: Running,
    control: Control,
    root: Path,
    chunks: MemoryChunks,
    kind: str,
    more: Any,
    good: bool,
) -> None:
    """What another sandbox's namespace holds does not count."""
    await chunks.put("other", ABSENT, b"x")
    box = await Box.made(gateway, control, root, "one")
    liar = Liar(box, gateway)
    box.order(box.checkpoint_order("c1"))
    id_ = (await liar.asked("checkpoint"))[0]["id"]
    data = page(**more)
    await liar.offer(id_, data)
    liar.say(data, k="chunk", id=id_, digest=named(data), kind=kind)
    liar.checkpointed(id_, box, named(data))
    if good:
        await control.fact(f.Checkpointed)
    else:
        assert (await control.fact(f.CheckpointFailed)).reason == "io_error"
        assert not control.of(f.Checkpointed)


@pytest.mark.parametrize(
    "lie", ["bytes", "unasked", "unnamed", "large", "twice", "offer", "generation"]
)
async def test_a_frame_that_is_a_lie_ends_the_checkpoint(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks, lie: str
) -> None:
    box = await Box.made(gateway, control, root, "one")
    liar = Liar(box, gateway)
    box.order(box.checkpoint_order("c1"))
    id_ = (await liar.asked("checkpoint"))[0]["id"]
    data = page()
    huge = bytes(600 * 1024)
    await liar.offer(id_, data, huge)
    chunk = {"k": "chunk", "id": id_, "digest": named(data), "kind": "page"}
    match lie:
        case "bytes":
            liar.say(data + b" ", **chunk)
        case "unasked":
            liar.say(b"x", k="chunk", id=id_, digest=named(b"x"), kind="content")
        case "unnamed":
            liar.say(data, k="chunk", id=id_, digest="x", kind="page")
        case "large":
            liar.say(huge, k="chunk", id=id_, digest=named(huge), kind="content")
        case "twice":
            liar.say(data, **chunk)
            liar.say(data, **chunk)
        case "offer":
            liar.say(bytes(32 * 99), k="offer", id=id_)
        case "generation":
            liar.say(data, **chunk)
            liar.say(
                k="checkpointed", id=id_, checkpoint="c1", manifest="sha256:" + named(data), epoch=2
            )
    failed = await control.fact(f.CheckpointFailed)
    assert failed.reason in ("io_error", "unreachable")
    assert not control.of(f.Checkpointed)
    assert not any(len(held) > manifests.CHUNK_BYTES_MAX for held in chunks.held.values())


async def test_a_toolhost_that_needs_too_much_at_once_is_cut_off(
    gateway: Running, control: Control, root: Path
) -> None:
    box = await Box.made(gateway, control, root, "one")
    said = await box.checkpoint("c1")
    fork = await Box.made(gateway, control, root, "two")
    liar = Liar(fork, gateway)
    fork.order(fork.restore_order("c1", said.manifest, "one"))
    id_ = (await liar.asked("restore"))[0]["id"]
    liar.say(bytes(32 * 257), k="need", id=id_)
    assert (await control.fact(f.RestoreFailed)).reason == "unreachable"


async def test_another_sandboxs_chunks_are_not_given(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    box = await Box.made(gateway, control, root, "one")
    (box.workspace / "secret").write_text("s")
    said = await box.checkpoint("c1")
    thief = await Box.made(gateway, control, root, "two")
    failed = await thief.restore_fails("c1", said.manifest, "two")
    assert failed.reason == "missing"
    await thief.restore("c1", said.manifest, "one")


# -- losses


async def test_a_toolhost_that_dies_of_a_checkpoint_is_unreachable(
    gateway: Running, control: Control, root: Path
) -> None:
    box = await Box.made(gateway, control, root, "one")
    (toolhost,) = [
        pid
        for pid in processes.find(processes.INSTANCE, box.live.ref.instance)
        if b"toolhost" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(toolhost, signal.SIGSTOP)
    box.order(box.checkpoint_order("c1"))
    box.order(box.checkpoint_order("c1"))
    await asyncio.sleep(0.1)
    os.kill(toolhost, signal.SIGKILL)
    assert (await control.fact(f.CheckpointFailed)).reason == "unreachable"
    await control.fact(f.Lost)


async def test_another_sessions_orders_are_not_carried_out(
    gateway: Running, control: Control, root: Path
) -> None:
    box = await Box.made(gateway, control, root, "one")
    box.order(box.checkpoint_order("c0", session="ss-of-before"))
    await box.checkpoint("c1")
    assert not control.of(f.CheckpointFailed)
    assert gateway.metric("orders_refused_total", reason="not_attached") == 1


async def test_an_order_of_another_epoch_is_refused_by_the_disk(
    gateway: Running, control: Control, root: Path
) -> None:
    box = await Box.made(gateway, control, root, "one")
    box.order(box.checkpoint_order("c1", epoch=2))
    failed = await control.fact(f.CheckpointFailed)
    assert (failed.reason, failed.epoch) == ("unreachable", 2)
    await box.checkpoint("c2")


async def test_a_preemption_is_announced_and_then_happens(
    gateway: Running, control: Control, root: Path
) -> None:
    box = await Box.made(gateway, control, root, "one")
    body = msgspec.json.encode({"do": "preempt", "grace_ms": 300})
    msg = await control.link.call(subjects.fault("one"), body, timeout_s=5)
    assert msgspec.json.decode(msg.data) == {"ok": True}
    notice = await control.fact(f.Preempting)
    assert (notice.sandbox, notice.grace_ms, notice.epoch) == ("one", 300, 1)
    assert notice.ref == box.live.ref
    assert (await control.fact(f.Lost)).observed == "gone"


# -- dropping


async def dropped(gateway: Running, control: Control, order: PruneOrder) -> None:
    """Orders it and waits: of two for one sandbox the second begins when the first is done."""
    control.order(gateway.id, order)
    key = ("prune", order.sandbox)
    before = gateway.metric("orders_total", kind="prune")
    await wait_for(
        lambda: (
            gateway.metric("orders_total", kind="prune") > before or key in gateway.session._busy
        )
    )
    await wait_for(lambda: key not in gateway.session._busy, "the prune")


async def test_what_no_manifest_reaches_is_dropped_and_nothing_else(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    box = await Box.made(gateway, control, root, "one")
    other = await Box.made(gateway, control, root, "two")
    fill(box.workspace)
    fill(other.workspace)
    await other.checkpoint("x1")
    theirs = {key for key in chunks.held if key[0] == "two"}
    first = await box.checkpoint("c1")
    (box.workspace / "big").write_bytes(os.urandom(1_400_000))
    second = await box.checkpoint("c2", base=first.manifest)
    before = len(chunks.held)
    await dropped(
        gateway, control, PruneOrder(sandbox="one", keep=[first.manifest, second.manifest])
    )
    assert len(chunks.held) == before
    await dropped(gateway, control, PruneOrder(sandbox="one", keep=[second.manifest]))
    assert len(chunks.held) < before
    assert {key for key in chunks.held if key[0] == "two"} == theirs
    fork = await Box.made(gateway, control, root, "fork")
    await fork.restore("c2", second.manifest, "one")
    assert told_tree(fork.workspace) == told_tree(box.workspace)
    assert gateway.metric("chunks_dropped_total") == before - len(chunks.held)


async def test_a_checkpoint_that_the_shard_has_not_heard_of_keeps_its_chunks(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    box = await Box.made(gateway, control, root, "one")
    (box.workspace / "a").write_text("a")
    first = await box.checkpoint("c1")
    (box.workspace / "a").write_text("b")
    await box.checkpoint("c2", base=first.manifest)
    before = dict(chunks.held)
    await dropped(gateway, control, PruneOrder(sandbox="one", keep=[first.manifest]))
    assert chunks.held == before


async def test_young_chunks_are_spared_while_the_sandbox_lives(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    box = await Box.made(gateway, control, root, "one")
    first = await box.checkpoint("c1")
    await chunks.put("one", named(b"old"), b"old")
    chunks.now_ms = gateway.clock.now_ms() + 60_000
    await chunks.put("one", named(b"young"), b"young")
    await dropped(gateway, control, PruneOrder(sandbox="one", keep=[first.manifest]))
    names = await chunks.names("one")
    assert (named(b"old") in names, named(b"young") in names) == (False, True)
    # Gone, it has none that could still be on its way, whatever was reported or is attached yet.
    await dropped(gateway, control, PruneOrder(sandbox="one", keep=[]))
    assert await chunks.names("one") == set()


@pytest.mark.parametrize("trouble", ["unknown", "missing"])
async def test_a_store_that_does_not_say_what_is_needed_loses_nothing(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks, trouble: str
) -> None:
    box = await Box.made(gateway, control, root, "one")
    first = await box.checkpoint("c1")
    await chunks.put("one", named(b"old"), b"old")
    keep = [first.manifest]
    if trouble == "unknown":
        chunks.fail = True
    else:
        keep.append("sha256:" + ABSENT)
    before = dict(chunks.held)
    await dropped(gateway, control, PruneOrder(sandbox="one", keep=keep))
    assert chunks.held == before
    assert gateway.metric("prunes_given_up_total") == 1


async def test_a_gateway_whose_lease_is_not_renewed_drops_nothing_more(
    gateway: Running, control: Control, root: Path, chunks: MemoryChunks
) -> None:
    """It may have been stopped for a while, and another one has taken checkpoints meanwhile."""
    for number in range(5):
        await chunks.put("gone", named(b"%d" % number), b"%d" % number)
    held = []

    async def delete(namespace: str, digest: str) -> None:
        held.append(digest)
        gateway.clock.ahead_ms += 4_000  # of a lease of five seconds

    chunks.delete = delete  # type: ignore[method-assign]
    control.order(gateway.id, PruneOrder(sandbox="gone", keep=[]))
    await wait_for(lambda: held)
    await asyncio.sleep(0.1)
    assert len(held) == 1
