"""A deployment over three ledger streams: crashes, cancels, what is read back, who is refused."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from fencepost.client import Client, ledger
from fencepost.client.processes import StartError
from fencepost.client.stack import Service, choose_ledgers, ledgers_of
from fencepost.contracts import streams
from fencepost.core import ids
from fencepost.core.errors import RefusedError

from tests.acceptance.conftest import RunningStack, StartStack
from tests.acceptance.walking import PATIENCE_S, History, Work

LEDGERS = 3


def in_ledger(kind: str, number: int, shards: int) -> str:
    """A name whose shard is in a ledger of this number."""
    names = (f"{kind}-{n}" for n in range(10_000))
    return next(name for name in names if ids.shard_of(name, shards) % LEDGERS == number)


async def fencepost(stack: RunningStack, *words: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fencepost.client", *words, "--url", stack.nats.url, "--json"),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out
    return out


async def projected(service: Service, what: str, key: str, names: set[str]) -> None:
    """Waits until a list of the HTTP API has these: the projection reads their ledgers."""
    async with httpx.AsyncClient(base_url=service.http_url, timeout=30) as http:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = await http.get(f"/v1/{what}", params={"limit": 100})
            if answer.is_success and names <= {each[key] for each in answer.json()["items"]}:
                return
            assert time.monotonic() < deadline, answer.text
            await asyncio.sleep(0.05)


@pytest.mark.budget(50)
async def test_a_killed_planner_and_a_cancel_over_three_ledgers(start_stack: StartStack) -> None:
    stack = await start_stack(planners=2, trackers=1, postgres=True, ledgers=LEDGERS)
    async with await stack.client() as client:
        assert client.ledgers == LEDGERS
        history = History(client)
        names = [in_ledger("box", number, stack.shards) for number in range(LEDGERS)]
        boxes = [Work(stack, client, history, name) for name in names]
        await asyncio.gather(*(client.create_sandbox(box.box) for box in boxes))
        dags = [in_ledger("dag", number, stack.shards) for number in range(LEDGERS)]
        for dag in dags:
            await client.open_dag(dag, ["a"])
        held = await asyncio.gather(
            *(client.acquire(dag, f"slot-{n}") for dag in dags for n in range(2))
        )
        assert all(box.epoch == 1 for box in held)
        working = asyncio.gather(*(box.round(f"{box.box}-a") for box in boxes))
        await asyncio.sleep(0.05)
        stack.services["planner-1"].kill()
        verdicts = await asyncio.gather(*(client.cancel_dag(dag, bound_s=60) for dag in dags))
        await working
        stack.services["planner-1"].start()
        assert [verdict.released for verdict in verdicts] == ["confirmed"] * LEDGERS
        await asyncio.gather(*(box.round(f"{box.box}-b") for box in boxes))
        for box in boxes:
            await box.check()
        for name in streams.ledger_names(LEDGERS):
            found = await ledger.history(client.link, name)
            assert found.is_unbroken
            assert found.messages > 0
        await _reads_back(stack, client, boxes, dags)
    report = await stack.verify()
    assert report.is_clean, report.violations
    assert report.shards == 2 * stack.shards


async def _reads_back(
    stack: RunningStack, client: Client, boxes: list[Work], dags: list[str]
) -> None:
    """By who waits, by who reads the history, from the projection: each of its own ledger."""
    tracker = stack.of("tracker")[0]
    for box in boxes:
        for step, outcome in list(box.outcomes.items())[:2]:
            again = await client.wait(box.box, step, timeout_s=PATIENCE_S)
            assert (again.state, again.position) == (outcome.state, outcome.position)
    await projected(tracker, "sandboxes", "sandbox", {box.box for box in boxes})
    await projected(tracker, "dags", "dag", set(dags))
    lines = (await fencepost(stack, "replay", boxes[1].box)).splitlines()
    kinds = {msgspec.json.decode(line)["kind"] for line in lines}
    assert {"created", "fenced", "committed"} <= kinds
    lines = (await fencepost(stack, "replay", "--dag", dags[2])).splitlines()
    assert "answered" in {msgspec.json.decode(line)["kind"] for line in lines}


@pytest.mark.budget(30)
async def test_a_service_for_another_number_of_ledgers_owns_and_appends_nothing(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(ledgers=LEDGERS)
    for role in ("planner", "gateway"):
        wrong = stack.add(role, FENCEPOST_LEDGERS="1")
        wrong.start()
        with pytest.raises(StartError, match=r"FENCEPOST_LEDGERS: .* made with 3 ledgers, not 1"):
            await wrong.ready(seconds=PATIENCE_S)
    tracker = stack.add("tracker", FENCEPOST_LEDGERS="2")
    tracker.start()
    async with httpx.AsyncClient(base_url=tracker.http_url, timeout=30) as http:
        deadline = time.monotonic() + PATIENCE_S
        told = ""
        while "FENCEPOST_LEDGERS=2" not in told:
            assert time.monotonic() < deadline, told
            await asyncio.sleep(0.05)
            try:
                answer = await http.get("/readyz")
            except httpx.TransportError:
                continue
            assert answer.status_code == 503
            told = answer.text
    async with await stack.client() as client:
        for shard in range(stack.shards):
            last = await ledger.last_batch(client.link, shard, family="dag", ledgers=LEDGERS)
            assert last is None, "no dag shard was ever owned"
    right = stack.add("tracker")
    right.start()
    await right.ready()
    assert (await stack.verify()).is_clean


def test_a_folder_keeps_the_number_that_it_was_made_with(tmp_path: Path) -> None:
    data = tmp_path / "new"
    with pytest.raises(RefusedError, match="ledgers: expected 1 to 8"):
        choose_ledgers(data, 9)
    assert choose_ledgers(data, 3) == 3
    assert choose_ledgers(data, None) == 3, "begun, and not yet served"
    (data / "nats" / "store").mkdir(parents=True)
    assert choose_ledgers(data, None) == choose_ledgers(data, 3) == ledgers_of(data) == 3
    with pytest.raises(RefusedError, match=r"FENCEPOST_LEDGERS: .* has 3, not 1"):
        choose_ledgers(data, 1)
    old = tmp_path / "old"
    (old / "nats" / "store").mkdir(parents=True)
    assert choose_ledgers(old, None) == choose_ledgers(old, 1) == 1
    assert not (old / "ledgers").exists()
    with pytest.raises(RefusedError, match="has 1, not 3"):
        choose_ledgers(old, 3)
