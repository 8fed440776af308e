"""A deployment is stopped, cut into another number of shards, and goes on with its sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fencepost.client import Client, RefusedError, StepOutcome, reshard_embedded
from fencepost.client.processes import StartError
from fencepost.client.stack import ledgers_of, refuse_half_moved, shards_of
from fencepost.core.sandbox import entries as e

from tests.acceptance.conftest import QUICK, RunningStack, StartStack
from tests.acceptance.walking import PATIENCE_S, History, Work, until

BOXES = 3
LARGE = b"large" * 20_000


@pytest.fixture
def folders() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[RunningStack]:
    stack = await RunningStack.start(
        folder,
        trackers=1,
        others=False,
        postgres=False,
        shards=shards_of(folder),
        ledgers=ledgers_of(folder),
        environment=QUICK,
    )
    try:
        yield stack
    finally:
        await stack.stop()


async def fencepost(*words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fencepost.client", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("FENCEPOST_")},
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def reshard(data: Path, into: Path, shards: int, ledgers: int) -> dict[str, Any]:
    words = ("reshard", "--data", str(data), "--into", str(into), "--shards", str(shards))
    code, out, err = await fencepost(*words, "--ledgers", str(ledgers), "--json")
    assert code == 0, out + err
    found: dict[str, Any] = msgspec.json.decode(out)
    assert (found["shards"], found["ledgers"]) == (shards, ledgers)
    assert found["verified"]["violations"] == []
    return found


def works(stack: RunningStack, client: Client) -> list[Work]:
    history = History(client)
    return [Work(stack, client, history, f"box-{number}") for number in range(BOXES)]


async def epochs(boxes: list[Work]) -> list[int]:
    return [(await box.live())["epoch"] for box in boxes]


async def go_on(stack: RunningStack, before: list[int], old: dict[str, StepOutcome]) -> None:
    """The same generations, the same answers, and more steps."""
    tag = f"of-{stack.shards}"
    async with await stack.client() as client:
        boxes = works(stack, client)
        assert await epochs(boxes) == before
        for step, outcome in old.items():
            again = await client.wait(outcome.sandbox, step, timeout_s=PATIENCE_S)
            assert (again.state, again.epoch) == (outcome.state, outcome.epoch), step
            assert again.result == outcome.result
        # The same call again is answered, not run again: what it wrote is overwritten by now.
        path = "f/box-0-first-w1"
        assert (await client.write_file("box-0", path, tag)).is_ok
        again = await client.write_file("box-0", path, path[2:], step="box-0-first-w1")
        assert again.epoch == old["box-0-first-w1"].epoch
        assert await client.read_file("box-0", path) == tag
        assert (await client.write_file("box-0", path, path[2:])).is_ok
        assert await client.read_file("box-0", "large") == LARGE.decode()
        assert (await client.show_dag("cancelled"))["released"] == "confirmed"
        await client.open_dag(tag)
        held = await client.acquire(tag, "slot")
        assert held.epoch == 1
        assert (await client.cancel_dag(tag)).released == "confirmed"
        with pytest.raises(RefusedError, match="names another sandbox"):
            await client.acquire("goes-on", "slot")  # it holds what it held
        await asyncio.gather(*(box.round(f"{box.box}-{tag}") for box in boxes))
        for box in boxes:
            await box.check()
            old.update(box.outcomes)
    report = await stack.verify()
    assert report.is_clean, report.violations


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.budget(80)
async def test_steps_dags_and_checkpoints_go_on_in_another_number_of_shards_and_ledgers(
    start_stack: StartStack, folders: Path
) -> None:
    first = await start_stack(trackers=1)
    old: dict[str, StepOutcome] = {}
    async with await first.client() as client:
        boxes = works(first, client)
        await asyncio.gather(*(client.create_sandbox(box.box) for box in boxes))
        await asyncio.gather(*(box.round(f"{box.box}-first") for box in boxes))
        await client.reclaim("box-1")
        await boxes[1].round("box-1-second")
        assert (await client.write_file("box-0", "large", LARGE)).is_ok
        await client.checkpoint("box-2", timeout_s=PATIENCE_S)
        await boxes[2].round("box-2-after")
        for dag in ("cancelled", "goes-on"):
            await client.open_dag(dag, ["a"])
            await client.acquire(dag, "slot")
        assert (await client.cancel_dag("cancelled")).released == "confirmed"
        for box in boxes:
            old.update(box.outcomes)
        before = await epochs(boxes)
    await first.stop()

    moved = await reshard(first.data, folders / "three", 3, 3)
    assert (moved["shards_before"], moved["ledgers_before"]) == (first.shards, 1)
    assert moved["contents"] >= 1
    assert moved["chunks"] >= 1
    async with running(folders / "three") as stack:
        assert (stack.shards, stack.ledgers) == (3, 3)
        await go_on(stack, before, old)
        # What the checkpoint of before holds, and what was owed on top of it, comes back.
        async with await stack.client() as client:
            box = works(stack, client)[2]
            box.outcomes = {step: one for step, one in old.items() if one.sandbox == "box-2"}
            log = (box.workspace_of(await box.live()) / "log").read_text()
            await client.reclaim("box-2")
            await box.live()
            entries = await box.history.of("box-2")
            await until(
                lambda: any(isinstance(x, e.RestoredEntry) for x in entries), "it is restored", 1
            )
            assert (box.workspace_of(await box.live()) / "log").read_text() == log
            before = await epochs(works(stack, client))
    await reshard(folders / "three", folders / "eight", 8, 1)
    async with running(folders / "eight") as stack:
        await go_on(stack, before, old)


async def test_a_service_for_another_number_of_shards_does_not_start(stack: RunningStack) -> None:
    wrong = stack.add("planner", FENCEPOST_SHARDS="3")
    wrong.start()
    with pytest.raises(StartError, match=r"FENCEPOST_SHARDS: .* made with 8 shards, not 3"):
        await wrong.ready(seconds=PATIENCE_S)
    for service in stack.of("planner"):
        assert service is wrong or service.is_running


async def test_folders_that_do_not_fit_are_refused(stack: RunningStack, folders: Path) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
    words = ("reshard", "--shards", "3", "--data", str(stack.data))
    (folders / "used").mkdir()
    (folders / "used" / "file").touch()
    code, _, err = await fencepost(*words, "--into", str(folders / "used"))
    assert code == 2
    assert "--into: expected an empty or new folder" in err
    code, _, err = await fencepost(
        "reshard", "--shards", "3", "--data", str(folders), "--into", "x"
    )
    assert code == 2
    assert "--data: expected the folder of an embedded stack" in err
    code, _, err = await fencepost(*words, "--ledgers", "4", "--into", str(folders / "new"))
    assert code == 2
    assert "ledgers: expected 1 to 3, the number of shards, got 4" in err
    assert not (folders / "new").exists()
    code, _, err = await fencepost("reshard", "--shards", "3")
    assert code == 2
    assert "expected --to" in err


@pytest.mark.budget(30)
async def test_no_stack_starts_on_a_folder_before_its_history_is_whole(
    start_stack: StartStack, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one would take every sandbox of the former for a stranger."""
    first = await start_stack()
    async with await first.client() as client:
        await client.create_sandbox("box")
    await first.stop()

    async def killed(_: Path) -> None:
        raise ConnectionAbortedError

    half = folders / "half"
    with monkeypatch.context() as cut:
        cut.setattr(reshard_embedded, "_servers_of", killed)
        with pytest.raises(ConnectionAbortedError):
            await reshard_embedded.reshard_folder(first.data, half, shards=3)
    assert any((half / "sandboxes").iterdir()), "the former one's, within reach"
    code, _, err = await fencepost("up", "--data", str(half), "--port", "0")
    assert code == 1
    assert "`fencepost reshard` into this folder has not ended" in err
    assert not (half / "nats" / "store").exists()
    await reshard(first.data, folders / "whole", 3, 1)
    refuse_half_moved(folders / "whole")
