"""
A cancel with 20,000 DAGs in the ledger, beside one with 100.

Two stacks. In each a DAG with one sandbox is opened, held and cancelled for real; its entries are
then appended again and again under new names, straight to the shards' logs, while nobody owns
them, and the owners take over by folding all of it. Every tenth DAG stays open, the others have
ended with everything gone. Then DAGs with three holdings are cancelled, on one stack and on the
other in turns, so that what disturbs one disturbs the other.

Two times: from the command to the verdict, and the part until the barrier and all three orders to
release are durable. The rest is the provider's: processes end, folders go.
"""

import asyncio
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from fencepost.client import ledger, ulid
from fencepost.client.client import Client
from fencepost.client.stack import Stack
from fencepost.contracts import subjects
from fencepost.contracts.messages import Batch, Seen, Sent
from fencepost.core import ids, limits
from fencepost.core.dag.machine import DagMachine
from fencepost.core.machine import Machine
from fencepost.core.sandbox.machine import SandboxMachine
from fencepost.runtime.fold import decode_batch
from fencepost.runtime.link import Link
from fencepost.runtime.ports import Valid

from bench.owning import as_owner

FEW, MANY, MANY_QUICK = 100, 20_000, 2_000
CANCELS, CANCELS_QUICK = 15, 5
WARM_UPS = 2
HOLDINGS = 3
OPEN_EVERY = 10
OWNERS = ("planner-1", "tracker-1")
BATCH_BYTES = limits.BATCH_BYTES_MAX * 3 // 4
READY_S_MAX = 900.0
BOUND_S = 60.0

Say = Callable[[str], None]
MACHINES: tuple[Machine[Any, Any], ...] = (DagMachine(), SandboxMachine())

_encode = msgspec.json.Encoder().encode
_raws = msgspec.json.Decoder(list[msgspec.Raw])


async def compare(many: int, cancels: int, say: Say) -> dict[str, Any]:
    """Cancels with `FEW` and with `many` DAGs in the ledger, in turns; medians and their ratio."""
    async with _running() as few, _running() as full:
        stacks = {FEW: few, many: full}
        result: dict[str, Any] = {"holdings": HOLDINGS}
        for count, (stack, client) in stacks.items():
            began = time.perf_counter()
            size = await fill(stack, client, count)
            filled_s = time.perf_counter() - began
            took_s = await _take_over(stack, client)
            say(
                f"{count} DAGs, {size} entries: appended in {filled_s:.0f} s,"
                f" taken over in {took_s:.1f} s"
            )
            result[str(count)] = {"entries": size, "takeover_s": round(took_s, 1)}
        times: dict[int, list[tuple[float, float]]] = {FEW: [], many: []}
        for number in range(WARM_UPS + cancels):
            for count, (_, client) in stacks.items():
                found = await _cancel(client)
                if number >= WARM_UPS:
                    times[count].append(found)
        say(f"{cancels} cancels each (load {os.getloadavg()[0]:.1f})")
    for count, pairs in times.items():
        for at, name in enumerate(("cancel_ms", "durable_ms")):
            result[str(count)][name] = round(statistics.median(pair[at] for pair in pairs), 2)
    result["few"], result["many"] = str(FEW), str(many)
    result["ratio"], result["ratio_durable"] = ratios(times[FEW], times[many])
    return result


def ratios(few: list[tuple[float, float]], many: list[tuple[float, float]]) -> tuple[float, float]:
    """The medians of neighbours' ratios: of whole cancels, and of their durable parts."""
    pairs = list(zip(few, many, strict=True))
    return tuple(round(statistics.median(b[at] / a[at] for a, b in pairs), 2) for at in (0, 1))  # type: ignore[return-value]


def table(result: dict[str, Any]) -> str:
    """Lays the comparison out for a person."""
    lines = [
        f"cancel of a DAG with {result['holdings']} holdings, in milliseconds",
        f"{'DAGs':>9} {'entries':>9} {'to verdict':>11} {'to durable':>11} {'takeover s':>11}",
    ]
    for count in (result["few"], result["many"]):
        row = result[count]
        lines.append(
            f"{count:>9} {row['entries']:>9} {row['cancel_ms']:>11.1f}"
            f" {row['durable_ms']:>11.1f} {row['takeover_s']:>11.1f}"
        )
    lines.append(
        f"many to few: {result['ratio']} to the verdict, {result['ratio_durable']} to durable"
    )
    return "\n".join(lines)


@contextlib.asynccontextmanager
async def _running() -> AsyncIterator[tuple[Stack, Client]]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-bench-"))
    folder.chmod(0o755)
    try:
        stack = await Stack.start(
            folder,
            trackers=1,
            others=False,
            postgres=False,
            environment={"FENCEPOST_LOG_LEVEL": "warning"},
        )
        try:
            async with await Client.connect(stack.nats.url, wait_s=10) as client:
                yield stack, client
        finally:
            await stack.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- measuring ---------------------------------------------------------------------------------


async def _take_over(stack: Stack, client: Client) -> float:
    """Starts the owners again; how long it takes until every shard of both families answers."""
    began = time.perf_counter()
    for name in OWNERS:
        stack.services[name].start()
    for name in OWNERS:
        await stack.services[name].ready(seconds=READY_S_MAX)
    for shard in range(client.shards):
        await client.open_dag(_name_in(shard, client.shards), timeout_s=READY_S_MAX)
    return time.perf_counter() - began


def _name_in(shard: int, shards: int) -> str:
    while ids.shard_of(name := f"dag-{ulid.mint()}", shards) != shard:
        pass
    return name


async def _cancel(client: Client) -> tuple[float, float]:
    """Cancels a DAG with its holdings: milliseconds to the verdict, and until it was durable."""
    dag = await client.open_dag()
    held = await asyncio.gather(
        *(client.acquire(dag, f"slot-{number}") for number in range(HOLDINGS))
    )
    heard: list[float] = []

    def take(_message: Any) -> None:
        heard.append(time.perf_counter())

    wanted = [subjects.event_dag(dag, kind) for kind in ("closed", "release_begun")]
    wanted += [subjects.event_sandbox(one.sandbox, "releasing") for one in held]
    listening = [await client.link.subscribe_raw(subject, take) for subject in wanted]
    await client.link.flush()
    try:
        began = time.perf_counter()
        verdict = await client.cancel_dag(dag, bound_s=BOUND_S)
        ended = time.perf_counter()
        async with asyncio.timeout(BOUND_S):
            while len(heard) < 1 + 2 * HOLDINGS:
                await asyncio.sleep(0.001)
    finally:
        for subscription in listening:
            await subscription.unsubscribe()
    if verdict.released != "confirmed":
        raise RuntimeError(f"not confirmed: {verdict}")
    return (ended - began) * 1000, (max(heard) - began) * 1000


# -- filling -----------------------------------------------------------------------------------


async def fill(stack: Stack, client: Client, dags: int) -> int:
    """Stops the owners and appends so many DAGs with what belongs to them; how many entries."""
    dag = await client.open_dag("dag-bench-template", ["one", "two"])
    held = await client.acquire(dag, "box")
    if (verdict := await client.cancel_dag(dag, bound_s=BOUND_S)).released != "confirmed":
        raise RuntimeError(f"not confirmed: {verdict}")
    for name in OWNERS:
        await stack.services[name].stop()
    of_dag = await _entries(client, "dag", "dag", dag)
    of_sandbox = await _entries(client, "sandbox", "sandbox", held.sandbox)
    async with as_owner(stack, "planner") as planner, as_owner(stack, "tracker") as tracker:
        links = {"sandbox": planner, "dag": tracker}
        writers = {
            (machine.family, shard): _Writer(links[machine.family], client, machine, shard)
            for machine in MACHINES
            for shard in range(client.shards)
        }
        for writer in writers.values():
            await writer.open()
        for number in range(dags):
            names = {dag: f"dag-{ulid.mint()}", held.sandbox: f"sbx-{ulid.mint()}"}
            new_dag, new_sandbox = names.values()
            is_open = number % OPEN_EVERY == 0
            shard = ids.shard_of(new_dag, client.shards)
            await writers["dag", shard].put(_renamed(of_dag[:1] if is_open else of_dag, names))
            if not is_open:
                shard = ids.shard_of(new_sandbox, client.shards)
                await writers["sandbox", shard].put(_renamed(of_sandbox, names))
        for writer in writers.values():
            await writer.flush()
        for writer in writers.values():
            await writer.close(writers.values())
    return sum(writer.count for writer in writers.values())


async def _entries(client: Client, family: str, field: str, name: str) -> list[bytes]:
    """The entries that are about one aggregate, as they stand in the ledger."""
    shard = ids.shard_of(name, client.shards)
    found: list[bytes] = []
    async for recorded in ledger.batches(client.link, shard, family=family, ledgers=client.ledgers):
        found += [
            bytes(raw)
            for raw in _raws.decode(recorded.batch.entries)
            if msgspec.json.decode(raw).get(field) == name
        ]
    return found


def _renamed(entries: list[bytes], names: dict[str, str]) -> list[bytes]:
    joined = b"\n".join(entries)
    for old, new in names.items():
        joined = joined.replace(old.encode(), new.encode())
    return joined.split(b"\n")


class _Writer:
    """Appends to one shard as its owner would, and keeps count of the messages that it owes."""

    def __init__(self, link: Link, client: Client, machine: Machine[Any, Any], shard: int) -> None:
        self._machine = machine
        self._shard = shard
        self._shards = client.shards
        self._log = ledger.log_of(link, shard, client.ledgers)
        self._subject = subjects.ledger(machine.family, shard)
        self._waiting: list[bytes] = []
        self._size = 0
        self._number = 0
        self.count = 0
        self.told: dict[tuple[str, int], Seen] = {}

    async def open(self) -> None:
        last = await self._log.last(self._subject)
        assert isinstance(last, Valid), "a shard that was owned has a log"
        self._last = decode_batch(last.payload, family=self._machine.family, shard=self._shard)
        self._seq = last.seq

    async def put(self, entries: list[bytes]) -> None:
        size = sum(map(len, entries))
        if self._size + size > BATCH_BYTES:
            await self.flush()
        self._waiting += entries
        self._size += size

    async def flush(self) -> None:
        if not self._waiting:
            return
        data = b"[" + b",".join(self._waiting) + b"]"
        self.count += len(self._waiting)
        self._waiting, self._size = [], 0
        await self._append(data, self._last.last_seen)
        index = 0
        for entry in self._machine.decode_entries(data):
            for message in self._machine.messages_of(entry):
                to = (message.family, ids.shard_of(message.aggregate, self._shards))
                self.told[to] = Seen(self._seq, index)
                index += 1

    async def close(self, writers: Iterable["_Writer"]) -> None:
        """Says that all messages of this shard were sent, and all that it was sent were seen."""
        seen = {
            f"{writer._machine.family}.{writer._shard}": last
            for writer in writers
            if (last := writer.told.get((self._machine.family, self._shard))) is not None
        }
        await self._append(b"[]", {**self._last.last_seen, **seen})

    async def _append(self, entries: bytes, seen: dict[str, Seen]) -> None:
        self._number += 1
        self._last = Batch(
            v=self._last.v,
            id=f"bench.{self._machine.family}.{self._shard}.{self._number}",
            family=self._machine.family,
            shard=self._shard,
            term=self._last.term,
            owner=self._last.owner,
            prev=self._seq,
            now_ms=self._last.now_ms + 1,
            positions=self._last.positions,
            last_seen=seen,
            sent=Sent(events=self._seq, messages=self._seq),
            entries=msgspec.Raw(entries),
            snapshot=self._last.snapshot,
        )
        self._seq = await self._log.append(self._subject, _encode(self._last), self._seq)
