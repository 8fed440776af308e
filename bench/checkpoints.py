"""
How long a checkpoint takes after one file of many changed, and a restore beside `tar`.

The gateway's session, the toolhost and the disk are real, as is the server that orders and facts
go through; the store is a folder on the same disk as the workspaces and the archive. A checkpoint
is timed from its order to its fact. `tar` packs and unpacks the same tree on the same disk, in
turns with the restore. Everything written before is synced before a measurement begins.
"""

import asyncio
import itertools
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]
from fencepost.client.embedded import NatsServer
from fencepost.contracts import subjects
from fencepost.core import facts as f
from fencepost.core.sandbox.orders import (
    AttachOrder,
    CheckpointOrder,
    CreateOrder,
    MarkOrder,
    Order,
    RestoreOrder,
)
from fencepost.core.steps import SandboxSpec
from fencepost.providers.process import ProcessProvider
from fencepost.runtime import streams
from fencepost.runtime.chunks.folder import FolderChunks
from fencepost.runtime.clock import SystemClock
from fencepost.runtime.link import Link
from fencepost.runtime.metrics import GatewayMetrics
from fencepost.sandbox_gateway.blobs import NatsBlobs
from fencepost.sandbox_gateway.session import GatewaySession, Options

FILES, BYTES = 20_000, 200_000_000
FILES_QUICK, BYTES_QUICK = 4_000, 40_000_000
ROUNDS, ROUNDS_QUICK = 5, 2
SETTLED_S = 0.2
"""After so long a file's times can be told from those of a later change."""

_FACT = msgspec.json.Decoder(f.Fact)


class Disk:
    """One live sandbox: its workspace, and what may be ordered of it."""

    def __init__(self, rig: "Rig", sandbox: str, session: str, workspace: Path) -> None:
        self.rig = rig
        self.sandbox = sandbox
        self.session = session
        self.workspace = workspace

    async def checkpoint(self, base: str = "") -> f.Checkpointed:
        name = f"c{next(self.rig.count)}"
        order = CheckpointOrder(
            sandbox=self.sandbox, epoch=1, session=self.session, checkpoint=name, base=base
        )
        found: f.Checkpointed = await self.rig.answered(order, f.Checkpointed)
        return found

    def cpu_s(self) -> float:
        """Processor time so far of the gateway (this process) and of this disk's toolhost."""
        channel: Any = self.rig.session._attached[self.sandbox]._channel
        toolhost = psutil.Process(channel.pid).cpu_times()
        return time.process_time() + float(toolhost.user) + float(toolhost.system)

    async def restore(self, taken: f.Checkpointed) -> f.Restored:
        order = RestoreOrder(
            sandbox=self.sandbox,
            epoch=1,
            session=self.session,
            checkpoint=taken.checkpoint,
            manifest=taken.manifest,
            namespace=taken.sandbox,
        )
        found: f.Restored = await self.rig.answered(order, f.Restored)
        return found


class Rig:
    """A shard's side of one gateway session."""

    def __init__(self, link: Link, session: GatewaySession, root: Path) -> None:
        self.link = link
        self.session = session
        self.root = root
        self.count = itertools.count(1)
        self._waiting: list[tuple[str, type, asyncio.Future[Any]]] = []

    def take(self, msg: Any) -> None:
        fact = _FACT.decode(msg.data)
        for sandbox, kind, future in self._waiting:
            if fact.sandbox == sandbox and not future.done():
                if isinstance(fact, kind):
                    future.set_result(fact)
                elif isinstance(fact, f.CheckpointFailed | f.RestoreFailed | f.Lost):
                    future.set_exception(RuntimeError(repr(fact)))

    async def answered(self, order: Order, kind: type) -> Any:
        assert not isinstance(order, f.Ref)
        sandbox = getattr(order, "sandbox", "")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting = (sandbox, kind, future)
        self._waiting.append(waiting)
        try:
            self.link.publish(subjects.orders(self.session.id), msgspec.json.encode([order]))
            async with asyncio.timeout(300):
                return await future
        finally:
            self._waiting.remove(waiting)

    async def disk(self) -> Disk:
        name = f"sbx{next(self.count)}"
        spec = SandboxSpec()
        create = CreateOrder(sandbox=name, create_id=name, spec=spec, labels={})
        ref = (await self.answered(create, f.Assigned)).ref
        found = await self.answered(AttachOrder(sandbox=name, ref=ref, spec=spec), f.Found)
        session, nonce = found.session, found.nonce_fresh
        mark = MarkOrder(sandbox=name, session=session, epoch=1, nonce=nonce)
        await self.answered(mark, f.Marked)
        return Disk(self, name, session, self.root / ref.native_id / "workspace")


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Rig]:
    server = await NatsServer.start(folder / "nats", sync_always=False)
    link = await Link.connect(server.url, name="bench")
    stopping = asyncio.Event()
    session = GatewaySession(
        link,
        providers={"process": ProcessProvider(folder / "sandboxes", isolate=False)},
        options=Options(shards=1, master=b"of the bench alone", lease_ms=120_000),
        clock=SystemClock(),
        metrics=GatewayMetrics(),
        blob_store=NatsBlobs(link),
        chunk_store=FolderChunks(str(folder / "chunks")),
    )
    try:
        await streams.declare(link, 1, create=True)
        rig = Rig(link, session, folder / "sandboxes")
        await link.subscribe_raw(subjects.FACTS, rig.take)
        task = asyncio.create_task(session.run(stopping))
        while not session.is_open:
            await asyncio.sleep(0.01)
        yield rig
        stopping.set()
        await task
    finally:
        await link.close()
        await server.stop()


def fill(root: Path, files: int, size: int) -> None:
    """A tree as a large project has it: folders in folders, most files small, some large."""
    rng = random.Random(1)
    sizes = [rng.paretovariate(1.2) for _ in range(files)]
    scale = size / sum(sizes)
    for number, share in enumerate(sizes):
        folder = root / f"d{number % 40}" / f"e{number % 1_000 // 40}"
        folder.mkdir(parents=True, exist_ok=True)
        count = max(1, int(share * scale))
        (folder / f"file{number}.txt").write_bytes(
            (rng.randbytes(997) * (count // 997 + 1))[:count]
        )


async def compare(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures in a folder of its own, below the current one's disk, and removes it."""
    files, size = (FILES_QUICK, BYTES_QUICK) if quick else (FILES, BYTES)
    rounds = ROUNDS_QUICK if quick else ROUNDS
    place = Path(tempfile.mkdtemp(prefix=".bench-checkpoints-", dir=Path.cwd()))
    try:
        async with running(place) as rig:
            return await _measured(rig, place, files, size, rounds, say)
    finally:
        shutil.rmtree(place, ignore_errors=True)


async def _measured(
    rig: Rig, place: Path, files: int, size: int, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    disk = await rig.disk()
    await asyncio.to_thread(fill, disk.workspace, files, size)
    await asyncio.sleep(SETTLED_S)
    await asyncio.to_thread(os.sync)
    began = time.perf_counter()
    taken = await disk.checkpoint()
    first_s = time.perf_counter() - began
    say(f"first checkpoint of {taken.files} files, {taken.size_bytes} bytes: {first_s:.2f} s")
    change_s, change_cpu_s, sent = [], [], []
    changed = sorted(disk.workspace.rglob("file1*.txt"))
    for number in range(rounds):
        changed[number * 7].write_bytes(os.urandom(10_000))
        await asyncio.sleep(SETTLED_S)
        cpu_s, began = disk.cpu_s(), time.perf_counter()
        taken = await disk.checkpoint(base=taken.manifest)
        change_s.append(time.perf_counter() - began)
        change_cpu_s.append(disk.cpu_s() - cpu_s)
        sent.append(taken.sent_bytes)
        say(f"after one change: {change_s[-1]:.3f} s, {sent[-1]} bytes sent")
    archive = place / "tree.tar"
    tar_pack_s = await asyncio.to_thread(_tar, "cf", archive, disk.workspace)
    restore_s, restore_cpu_s, tar_s = [], [], []
    for number in range(rounds):
        target = place / f"tar{number}"
        target.mkdir()
        tar_s.append(await asyncio.to_thread(_tar, "xf", archive, target))
        await asyncio.to_thread(shutil.rmtree, target)
        fresh = await rig.disk()
        await asyncio.to_thread(os.sync)
        cpu_s, began = fresh.cpu_s(), time.perf_counter()
        await fresh.restore(taken)
        restore_s.append(time.perf_counter() - began)
        restore_cpu_s.append(fresh.cpu_s() - cpu_s)
        say(f"restore {restore_s[-1]:.2f} s, tar {tar_s[-1]:.2f} s")
        await asyncio.to_thread(shutil.rmtree, fresh.workspace)
    return {
        "files": taken.files,
        "bytes": taken.size_bytes,
        "first_s": round(first_s, 3),
        "change_s": round(statistics.median(change_s), 3),
        "change_s_max": round(max(change_s), 3),
        "change_cpu_s": round(statistics.median(change_cpu_s), 3),
        "change_sent_bytes": round(statistics.median(sent)),
        "change_sent_bytes_max": max(sent),
        "restore_s": round(statistics.median(restore_s), 3),
        "restore_cpu_s": round(statistics.median(restore_cpu_s), 3),
        "tar_extract_s": round(statistics.median(tar_s), 3),
        "tar_create_s": round(tar_pack_s, 3),
        "restore_to_tar": round(
            statistics.median(t / r for t, r in zip(tar_s, restore_s, strict=True)), 2
        ),
    }


def _tar(what: str, archive: Path, folder: Path) -> float:
    """Seconds that `tar` takes."""
    os.sync()
    began = time.perf_counter()
    subprocess.run(["tar", what, archive, "-C", folder, "."], check=True)
    return time.perf_counter() - began


def table(result: dict[str, Any]) -> str:
    lines = [f"checkpoints of {result['files']} files, {result['bytes'] / 1e6:.0f} MB"]
    for name, seconds, more in (
        ("the first", result["first_s"], ""),
        (
            "after one file changed",
            result["change_s"],
            f"at most {result['change_s_max']:.2f} s, {result['change_sent_bytes_max']:,} bytes",
        ),
        ("restored", result["restore_s"], f"{result['restore_to_tar']:.2f} of tar's speed"),
        ("tar, unpacking the same", result["tar_extract_s"], ""),
    ):
        lines.append(f"  {name:<26}{seconds:>8.2f} s   {more}".rstrip())
    return "\n".join(lines)
