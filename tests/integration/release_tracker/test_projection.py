"""The projection on real servers: what it shows, that it counts once, and that a rebuild is equal."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fencepost.core import ids
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import views
from fencepost.release_tracker import projector as projecting
from fencepost.release_tracker import store
from fencepost.release_tracker.store import Store
from fencepost.release_tracker.store import connect as connect_store
from fencepost.runtime.metrics import TrackerMetrics

from tests.integration.release_tracker.conftest import SHARDS, Stack, eventually
from tests.integration.release_tracker.planner import (
    Shard,
    Workload,
    hostile_refusals,
    write_file,
)


async def caught_up(stack: Stack, workload: Workload) -> None:
    heads = {shard.shard: shard.head for shard in workload.shards if shard.head}

    async def reached() -> bool:
        return await stack.positions() == heads

    await eventually(reached)


async def wipe(stack: Stack) -> None:
    connection = await connect_store(stack.dsn)
    await store.wipe(connection)
    await connection.close()


async def test_a_rebuild_equals_the_incremental_projection_byte_for_byte(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(stack.log, 7, shards=SHARDS, sandboxes=9)
    async with stack.projecting():
        await workload.open()
        await workload.run(250)
        for shard in workload.shards:
            await shard.append(hostile_refusals())
        await workload.run(250)
        await caught_up(stack, workload)
    before = await stack.dump()
    kinds = await stack.fetch("SELECT state, count(*) FROM steps GROUP BY state ORDER BY state")
    # The workload reached every state, else the comparison would say little.
    assert [row["state"] for row in kinds] == [
        "committed",
        "compensated",
        "fenced",
        "indeterminate",
        "pending",
    ]
    await wipe(stack)
    assert await stack.dump() != before
    # Other groups of batches than before: one at a time.
    monkeypatch.setattr(projecting, "GROUP_BATCHES_MAX", 1)
    async with stack.projecting():
        await caught_up(stack, workload)
    assert await stack.dump() == before
    await wipe(stack)
    monkeypatch.setattr(projecting, "GROUP_BATCHES_MAX", 128)
    async with stack.projecting():
        await caught_up(stack, workload)
    assert await stack.dump() == before


async def test_the_projection_says_what_the_machine_says(stack: Stack) -> None:
    workload = Workload(stack.log, 11, shards=SHARDS, sandboxes=6)
    await workload.open()
    await workload.run(400)
    async with stack.projecting():
        await caught_up(stack, workload)
    rows = {row["sandbox"]: row for row in await stack.fetch("SELECT * FROM sandboxes")}
    held = await stack.fetch("SELECT * FROM holders WHERE removed_seq IS NULL AND kind = 'dag'")
    steps = {(row["sandbox"], row["step"]): row for row in await stack.fetch("SELECT * FROM steps")}
    seen = 0
    for shard in workload.shards:
        for name, sandbox in shard.state.sandboxes.items():
            view = views.view_sandbox(shard.state, name)
            row = rows.pop(name)
            assert view is not None
            assert row["state"] == view["state"]
            assert row["is_open"] == view["open"]
            assert row["creates"].split() == view["creates"]
            assert row["steps_committed"] == view["committed"]
            assert row["steps_compensated"] == view["compensated"]
            assert row["commands_refused"] == view["refused"]
            assert row["steps_owed"] == view["owed"]
            for field in ("epoch", "session", "gateway", "native_id", "authority", "journal_seq"):
                assert row[field] == view[field], (name, field)
            assert {h["holder"]: h["acquisition"] for h in held if h["sandbox"] == name} == view[
                "holders"
            ]
            for step in [*sandbox.steps, *sandbox.finished]:
                told = views.view_step(shard.state, name, step)
                assert told is not None
                shown = steps.pop((name, step))
                for field in ("state", "attempt", "digest"):
                    assert shown[field] == told[field], (name, step, field)
                if "epoch" in told and told["state"] == "fenced":
                    assert (shown["epoch"], shown["tries"]) == (told["epoch"], told["tries"])
                seen += 1
    assert seen > 100
    assert not rows
    assert not steps


async def test_a_batch_that_is_read_again_counts_once(stack: Stack) -> None:
    workload = Workload(stack.log, 3, shards=SHARDS, sandboxes=3)
    metrics = TrackerMetrics()
    await workload.open()
    await workload.run(40)
    async with stack.projecting(stack.projector(metrics)):
        await caught_up(stack, workload)
    first = metrics.projected._value.get()
    assert first == sum(shard.batches for shard in workload.shards)
    before = await stack.dump()
    # A new start reads from the lowest shard's position: the others' later batches come again.
    await workload.shards[0].turn(*_step(workload.shards[0], "box-x"))
    again = TrackerMetrics()
    async with stack.projecting(stack.projector(again)) as running:
        await caught_up(stack, workload)
        assert not running.stopped
    assert again.projected._value.get() == 1
    assert (await stack.dump()) != before


def _step(shard: Shard, sandbox: str) -> list[Any]:
    return [shard.command("step", sandbox, "one", write_file(1))]


async def test_a_gap_stops_its_shard_alone_and_says_so(stack: Stack) -> None:
    workload = Workload(stack.log, 5, shards=SHARDS, sandboxes=6)
    await workload.open()
    broken, whole = workload.shards[0], workload.shards[1]
    reached = broken.head
    await broken.append([], prev=broken.head - 1)
    metrics = TrackerMetrics()
    async with stack.projecting(stack.projector(metrics)) as running:
        await whole.turn(*_step(whole, "box-x"))

        async def others_go_on() -> bool:
            return (await stack.positions()).get(whole.shard) == whole.head and bool(
                running.stopped
            )

        await eventually(others_go_on)
        assert "shard 0: a gap" in running.why_not_ready
        assert metrics.projection_stopped.labels("sandbox")._value.get() == 1
        assert set(running.stopped) == {0}
        assert (await stack.positions())[0] == reached


async def test_an_entry_of_an_unknown_kind_stops_its_shard(stack: Stack) -> None:
    workload = Workload(stack.log, 5, shards=SHARDS, sandboxes=1)
    await workload.open()
    shard = workload.shards[0]
    encode = shard.machine.encode_entries
    shard.machine.encode_entries = lambda _entries: b'[{"kind":"from_the_future"}]'  # type: ignore[method-assign]
    await shard.append([])
    shard.machine.encode_entries = encode  # type: ignore[method-assign]
    async with stack.projecting() as running:

        async def stopped() -> bool:
            return bool(running.stopped)

        await eventually(stopped)
        assert "cannot read" in running.why_not_ready


async def test_what_strangers_bring_into_the_ledger_never_blocks_the_projection(
    stack: Stack,
) -> None:
    workload = Workload(stack.log, 5, shards=SHARDS, sandboxes=1)
    await workload.open()
    for shard in workload.shards:
        await shard.append(hostile_refusals())
    async with stack.projecting():
        await caught_up(stack, workload)
    rows = await stack.fetch("SELECT * FROM refusals")
    assert len(rows) == 2 * SHARDS
    assert min(row["epoch"] for row in rows) == -(1 << 63)


async def test_rows_changed_by_other_hands_stop_the_shard_with_what_to_do(stack: Stack) -> None:
    workload = Workload(stack.log, 5, shards=SHARDS, sandboxes=3)
    await workload.open()
    async with stack.projecting():
        await caught_up(stack, workload)
    name = workload.names[0]
    connection = await stack.connect()
    await connection.execute("DELETE FROM sandboxes WHERE sandbox = $1", name)
    await connection.close()
    shard = workload.of(name)
    await shard.turn(*shard.attachments(shard.state.sandboxes[name]))
    async with stack.projecting() as running:

        async def stopped() -> bool:
            return bool(running.stopped)

        await eventually(stopped)
        assert "release_tracker rebuild" in running.why_not_ready
        assert set(running.stopped) == {shard.shard}


async def test_a_batch_that_trips_a_bug_stops_its_shard_alone_and_says_so(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(stack.log, 5, shards=SHARDS, sandboxes=6)
    await workload.open()
    load, buggy = Store.load, workload.shards[0].shard

    async def loading(self: Store, names: Any) -> Any:
        working = await load(self, names)
        apply = working.apply

        def failing(shard: int, *args: Any) -> None:
            if shard == buggy:
                raise KeyError("of a bug")
            apply(shard, *args)

        working.apply = failing
        return working

    monkeypatch.setattr(Store, "load", loading)
    async with stack.projecting() as running:

        async def others_go_on() -> bool:
            reached = await stack.positions()
            return bool(running.stopped) and all(
                reached.get(shard.shard) == shard.head for shard in workload.shards[1:]
            )

        await eventually(others_go_on)
        assert set(running.stopped) == {buggy}
        assert "cannot be projected: KeyError: 'of a bug'" in running.why_not_ready
    monkeypatch.undo()
    async with stack.projecting():
        await caught_up(stack, workload)


async def test_a_bug_between_batches_is_told_and_tried_again(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(stack.log, 5, shards=SHARDS, sandboxes=1)
    await workload.open()
    said: list[str] = []
    positions = Store.positions

    async def failing(self: Store) -> Any:
        if len(said) < 2:
            said.append(running.why_not_ready)
            raise ValueError("of a bug")
        return await positions(self)

    monkeypatch.setattr(Store, "positions", failing)
    metrics = TrackerMetrics()
    running = stack.projector(metrics)
    async with stack.projecting(running):
        await caught_up(stack, workload)
    assert said[1] == "the projection failed: ValueError: of a bug"
    assert metrics.projection_errors.labels("bug")._value.get() == 2


async def test_a_wiped_projection_is_made_again_though_the_ledger_is_idle(stack: Stack) -> None:
    workload = Workload(stack.log, 13, shards=SHARDS, sandboxes=4)
    await workload.open()
    await workload.run(60)
    async with stack.projecting():
        await caught_up(stack, workload)
        before = await stack.dump()
        await wipe(stack)
        await caught_up(stack, workload)
        assert await stack.dump() == before
        connection = await stack.connect()
        await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        await connection.close()

        async def back() -> bool:
            found = await stack.fetch("SELECT to_regclass('projection_position') AS it")
            return found[0]["it"] is not None

        await eventually(back)
        await caught_up(stack, workload)
        assert await stack.dump() == before


async def test_another_ledger_under_the_projection_is_refused(stack: Stack) -> None:
    workload = Workload(stack.log, 5, shards=SHARDS, sandboxes=1)
    await workload.open()
    async with stack.projecting():
        await caught_up(stack, workload)
    connection = await stack.connect()
    await connection.execute("UPDATE projection_ledger SET incarnation = 'another'")
    await connection.close()
    before = await stack.dump()
    shard = workload.shards[0]
    await shard.turn(*_step(shard, "box-x"))
    async with stack.projecting() as running:

        async def refused() -> bool:
            return "another ledger" in running.why_not_ready

        await eventually(refused)
        assert await stack.dump() == before
        await wipe(stack)
        await caught_up(stack, workload)


async def test_two_replicas_share_the_shards_and_one_takes_over(stack: Stack) -> None:
    workload = Workload(stack.log, 17, shards=SHARDS, sandboxes=4)
    await workload.open()
    counts = [TrackerMetrics(), TrackerMetrics()]
    async with stack.projecting(stack.projector(counts[0])):
        await caught_up(stack, workload)
        async with stack.projecting(stack.projector(counts[1])):
            await workload.run(60)
            await caught_up(stack, workload)
            total = sum(shard.batches for shard in workload.shards)
            assert sum(count.projected._value.get() for count in counts) == total
    async with stack.projecting(stack.projector(counts[1])):
        await workload.run(20)
        await caught_up(stack, workload)
    before = await stack.dump()
    await wipe(stack)
    async with stack.projecting():
        await caught_up(stack, workload)
    assert await stack.dump() == before


async def test_a_step_id_that_comes_again_starts_a_new_row(stack: Stack) -> None:
    """Once an id has left the window of duplicates it may be used again."""
    shard = Shard(stack.log, ids.shard_of("box", SHARDS), SHARDS)
    await shard.open()
    await shard.turn(shard.command("create", "box", "c1", {}))
    for _ in range(4):
        await shard.turn(*shard.attachments(shard.state.sandboxes["box"]))
    sandbox = shard.state.sandboxes["box"]
    for _ in range(2):
        await shard.turn(shard.command("step", "box", "again", write_file(1)))
        await shard.turn(shard.receipt(sandbox, "again", sandbox.steps["again"]))
        sandbox.finished.clear()
    assert sandbox.committed == 2
    async with stack.projecting():

        async def reached() -> bool:
            return (await stack.positions()).get(shard.shard) == shard.head

        await eventually(reached)
    (step,) = await stack.fetch("SELECT * FROM steps")
    attempts = await stack.fetch("SELECT * FROM attempts ORDER BY admitted_seq")
    assert [row["state"] for row in attempts] == ["committed", "committed"]
    assert step["admitted_seq"] == attempts[1]["admitted_seq"] > attempts[0]["admitted_seq"]
    assert step["result"] == b'{"bytes": 3, "text":"\\u0000\xc3\xa9"}'


async def test_an_undo_and_a_revocation_show_on_the_attempt(stack: Stack) -> None:
    shard = Shard(stack.log, ids.shard_of("box", SHARDS), SHARDS)
    await shard.open()
    await shard.turn(shard.command("create", "box", "c1", {}))
    for _ in range(4):
        await shard.turn(*shard.attachments(shard.state.sandboxes["box"]))
    sandbox = shard.state.sandboxes["box"]
    await shard.turn(shard.command("step", "box", "one", write_file(1)))
    await shard.turn(shard.command("cancel", "box", "one", {"reason": "enough"}))
    made = await shard.turn(shard.receipt(sandbox, "one", sandbox.steps["one"]))
    assert any(isinstance(entry, e.Revoked) for entry in made)
    async with stack.projecting():

        async def reached() -> bool:
            return (await stack.positions()).get(shard.shard) == shard.head

        await eventually(reached)
    (step,) = await stack.fetch("SELECT * FROM steps")
    (attempt,) = await stack.fetch("SELECT * FROM attempts")
    assert (step["state"], step["is_cancelled"], step["reason"]) == ("compensated", True, "enough")
    assert (attempt["direction"], attempt["evidence"]) == ("revoke", "never_applied")
    assert attempt["journal"] == "never_began"
    # The fence that revokes it is a later one of the same attempt.
    assert attempt["made_at_ms"] == attempt["fenced_at_ms"] == step["admitted_at_ms"]
    assert attempt["no"] == 2


async def test_postgres_away_or_slow_blocks_nobody_and_is_caught_up_with(
    stack: Stack, postgres_server: Any
) -> None:
    if not hasattr(postgres_server, "kill"):
        pytest.skip("a container is not killed and started again")
    workload = Workload(stack.log, 19, shards=SHARDS, sandboxes=4)
    await workload.open()
    async with stack.projecting() as running:
        await caught_up(stack, workload)
        holding = await stack.connect()
        async with holding.transaction():
            # As slow as can be: the projection's next write waits for this transaction.
            await holding.execute("LOCK TABLE steps IN ACCESS EXCLUSIVE MODE")
            async with asyncio.timeout(30):
                await workload.run(50)
        await holding.close()
        await caught_up(stack, workload)
        postgres_server.kill()
        await postgres_server.child.wait(10)

        async def told() -> bool:
            return "PostgreSQL" in running.why_not_ready

        # The machines go on, as they know nothing of any of this.
        async with asyncio.timeout(30):
            await workload.run(50)
        await eventually(told)
        again = await type(postgres_server).start(postgres_server._data, port=postgres_server.port)
        try:
            await caught_up(stack, workload)

            async def ready() -> bool:
                return running.why_not_ready == ""

            await eventually(ready)
            before = await stack.dump()
            await wipe(stack)
            await caught_up(stack, workload)
            assert await stack.dump() == before
        finally:
            await again.stop()
