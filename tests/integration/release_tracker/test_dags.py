"""The projection of the dag family: what the machine says, once, and the same when made again."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fencepost.core import ids
from fencepost.core.dag import entries as e
from fencepost.core.dag import verdict
from fencepost.core.dag.machine import DagMachine
from fencepost.core.dag.state import Dag
from fencepost.core.facts import Ref
from fencepost.core.shard_messages import Told
from fencepost.release_tracker import projector as projecting
from fencepost.release_tracker import reading, store
from fencepost.release_tracker.families import DAG
from fencepost.runtime.ports import Log

from tests.integration.release_tracker.conftest import SHARDS, Stack, eventually
from tests.integration.release_tracker.planner import Shard

SLOTS = ["token", "__class__", "", "😀", "nul \0", "e\u0301", "\u00e9", "x" * 1_000]
NODES = ["plan", "nul \0", "nul \ufffd", "😀"]


class DagWorkload:
    """Draws what clients ask and sandboxes' shards tell, from one seed."""

    def __init__(self, log: Log, seed: int, *, dags: int) -> None:
        self.random = random.Random(seed)
        self.shards = [Shard(log, shard, SHARDS, DagMachine()) for shard in range(SHARDS)]
        self.names = [f"dag-{number}" for number in range(dags)]
        self.commands = 0

    def of(self, dag: str) -> Shard:
        return self.shards[ids.shard_of(dag, SHARDS)]

    def command(self, dag: str, do: str, **body: Any) -> Any:
        self.commands += 1
        return self.of(dag).command("dag", dag, f"c{self.commands}", {"do": do, **body})

    async def open(self) -> None:
        for shard in self.shards:
            opened = shard.machine.term_opened(1, "test", SHARDS, "fnv1a32")
            await shard.append(shard._evolve([opened]))
        for name in self.names:
            await self.of(name).turn(self.command(name, "open", nodes=NODES))

    async def run(self, turns: int) -> None:
        for _ in range(turns):
            name = self.random.choice(self.names)
            shard = self.of(name)
            dag = shard.state.dags.get(name)
            if dag is not None:
                await shard.turn(*self._inputs(name, dag))
        for shard in self.shards:
            await shard.turn()

    def _inputs(self, name: str, dag: Dag) -> list[Any]:
        draw = self.random.random()
        if draw < 0.3:
            slot = self.random.choice(SLOTS)
            return [self.command(name, "acquire", slot=slot, replace=draw < 0.1)]
        if draw < 0.35:
            return [self.command(name, "adopt", slot=self.random.choice(SLOTS), sandbox="theirs")]
        if draw < 0.45:
            node = self.random.choice([*NODES, "none"])
            do = self.random.choice(["start", "finish_node"])
            return [self.command(name, do, node=node)]
        if draw < 0.47:
            return [self.command(name, "cancel", bound_ms=self.random.randrange(100))]
        if draw < 0.48:
            return [self.command(name, "finish")]
        if draw < 0.5:
            return [self.command(name, "no_such_thing")]
        return self._told(name, dag)

    def _told(self, name: str, dag: Dag) -> list[Any]:
        if not dag.acquisitions:
            return []
        one = self.random.choice(list(dag.acquisitions.values()))
        words: dict[str, Any] = {"dag": name, "acquisition": one.id, "sandbox": one.sandbox}
        if one.phase == "releasing" and self.random.random() < 0.6:
            reason = self.random.choice(["stop_refused", "shared", "pending_stop"])
            if self.random.random() < 0.5:
                return [Told(**words, phase="releasing", reason=reason, evidence="nul \0")]
            return [Told(**words, phase="gone", evidence="observed_gone")]
        ref = Ref(authority="here", provider="process", native_id=one.id, instance=f"i-{one.id}")
        return self.random.choice(
            [
                [Told(**words, phase="requested")],
                [Told(**words, phase="assigned", ref=ref)],
                [Told(**words, phase="assigned", ref=ref), Told(**words, phase="ready", epoch=1)],
                [Told(**words, phase="refused", reason="unknown_sandbox")],
            ]
        )

    def heads(self) -> dict[int, int]:
        return {shard.shard: shard.head for shard in self.shards}


async def positions(stack: Stack) -> dict[int, int]:
    connection = await store.connect(stack.dsn)
    try:
        return await store.Store(connection, DAG).positions()
    except store.UNREACHABLE:
        return {}
    finally:
        connection.terminate()


async def caught_up(stack: Stack, workload: DagWorkload) -> None:
    async def reached() -> bool:
        try:
            return await positions(stack) == workload.heads()
        except store.UNREACHABLE:
            return False

    await eventually(reached)


async def wipe(stack: Stack) -> None:
    connection = await store.connect(stack.dsn)
    await store.wipe(connection)
    await connection.close()


async def test_a_rebuild_of_dags_equals_the_incremental_projection_byte_for_byte(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = DagWorkload(stack.log, 3, dags=12)
    await workload.open()
    async with stack.projecting(stack.projector(family=DAG)):
        await workload.run(150)
        hostile = e.Refused(dag="d" * 9_000 + "\0", command="dag", id="\0" * 9_000, reason="bad_id")
        await workload.shards[0].append([hostile])
        await workload.run(150)
        await caught_up(stack, workload)
    before = await stack.dump()
    phases = await stack.fetch("SELECT DISTINCT phase FROM acquisitions")
    # The workload reached every phase and verdict, else the comparison would say little.
    assert {row["phase"] for row in phases} >= {"ready", "releasing", "gone", "abandoned"}
    verdicts = await stack.fetch("SELECT DISTINCT released FROM verdicts")
    assert {row["released"] for row in verdicts} >= {"confirmed", "unconfirmed"}
    for group in (1, 128):
        await wipe(stack)
        assert await stack.dump() != before
        monkeypatch.setattr(projecting, "GROUP_BATCHES_MAX", group)
        async with stack.projecting(stack.projector(family=DAG)):
            await caught_up(stack, workload)
        assert await stack.dump() == before


async def test_s144_the_projection_of_dags_says_what_the_machine_says(stack: Stack) -> None:
    workload = DagWorkload(stack.log, 5, dags=8)
    await workload.open()
    await workload.run(300)
    reader = reading.Reader(stack.dsn)
    async with stack.projecting(stack.projector(family=DAG)):
        await caught_up(stack, workload)
        async with reader.snapshot() as snapshot:
            for name in workload.names:
                found = await snapshot.dag(name)
                assert found is not None
                assert_same(found, workload.of(name).state.dags[name])
            page = await snapshot.dags("unconfirmed", "", 500)
            told = [
                name
                for name in workload.names
                if workload.of(name).state.dags[name].told.startswith("unconfirmed")
            ]
            assert [item["dag"] for item in page.items] == sorted(told)
    await reader.close()


def assert_same(found: dict[str, Any], dag: Dag) -> None:
    assert found["closed"] == dag.closed
    assert found["finished"] == dag.finished
    assert f"{found['released'] or ''}/{found['reason']}".strip("/") == dag.told.strip("/")
    for field in ("held_ever", "gone", "abandoned"):
        assert found[field] == getattr(dag, field), field
    assert found["cancelled"] == dag.cancelled_nodes
    shown = [name.replace("\0", "\ufffd") for name in dag.nodes]
    assert [one["node"] for one in found["nodes"]] == shown
    assert [one["status"] for one in found["nodes"]] == list(dag.nodes.values())
    left = {one["acquisition"]: one for one in found["outstanding"]}
    assert set(left) == set(dag.acquisitions)
    for acquisition in dag.acquisitions.values():
        one = left[acquisition.id]
        assert one["slot"] == acquisition.slot.replace("\0", "\ufffd")
        assert (one["sandbox"], one["phase"]) == (acquisition.sandbox, acquisition.phase)
        assert one["reason"] == verdict.reason_of(acquisition)
        assert one["instance"] == (acquisition.ref.instance if acquisition.ref else "")
        assert one["since_ms"] == acquisition.since_ms


async def test_s061_a_row_that_other_hands_removed_stops_its_shard_loudly(stack: Stack) -> None:
    workload = DagWorkload(stack.log, 9, dags=6)
    await workload.open()
    gone = workload.of("dag-0")
    async with stack.projecting(stack.projector(family=DAG)) as running:
        await caught_up(stack, workload)
        connection = await stack.connect()
        await connection.execute("DELETE FROM dags WHERE dag = 'dag-0'")
        await connection.close()
        for name in workload.names:
            await workload.of(name).turn(workload.command(name, "start", node="plan"))

        async def told() -> bool:
            return gone.shard in running.stopped

        await eventually(told)
        assert "lacks DAG dag-0" in running.why_not_ready

        async def others_go_on() -> bool:
            found, heads = await positions(stack), workload.heads()
            return all(found[shard] == heads[shard] for shard in heads if shard != gone.shard)

        await eventually(others_go_on)
        assert (await positions(stack))[gone.shard] < gone.head
