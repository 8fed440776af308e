"""`fencepost up`, its children, `down`, and the exit codes, as real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fencepost.client.processes import Child

from tests.contracts import until

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("FENCEPOST")}


async def fencepost(*words: str, cwd: Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fencepost.client", *words),
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


class Up:
    """A `fencepost up` in the foreground of this test, and what it wrote when it was ready."""

    def __init__(self, child: Child, state: dict[str, Any]) -> None:
        self.child = child
        self.state = state
        self.children = psutil.Process(child.pid).children(recursive=True)

    async def ended(self) -> int | None:
        code = await self.child.wait(30)
        _, alive = psutil.wait_procs(self.children, timeout=10)
        assert not alive, f"still running: {alive}"
        return code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
async def up(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Up]:
    child = Child.start(
        "up",
        # Without PostgreSQL, which has tests of its own, to spare the time.
        [
            *(sys.executable, "-m", "fencepost.client", "up", "--port", "0", "--no-postgres"),
            *("--json", *getattr(request, "param", ())),
        ],
        log=folder / "up.log",
        cwd=folder,
        env=ENVIRONMENT,
    )
    try:
        written = folder / ".fencepost/up.json"
        async with asyncio.timeout(90):
            while not written.exists():
                assert child.is_running, child.tail()
                await asyncio.sleep(0.05)
        yield Up(child, json.loads(written.read_text()))
    finally:
        await child.stop(grace_s=30)


async def test_a_second_up_says_which_one_runs(up: Up, folder: Path) -> None:
    code, output, errors = await fencepost(
        "up", "--port", "0", "--no-postgres", "--json", cwd=folder
    )
    assert code == 2
    assert str(up.state["pid"]) in errors
    assert up.state["nats_url"] in errors
    assert json.loads(output)["error"]["state"]["pid"] == up.state["pid"]
    assert up.child.is_running


async def test_up_json_names_the_process_that_runs_after_a_kill(up: Up, folder: Path) -> None:
    def told() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / ".fencepost/up.json").read_text())
        return found

    before = up.state["services"]["planner-1"]["pid"]
    os.kill(before, signal.SIGKILL)
    await until(lambda: told()["services"]["planner-1"]["pid"] != before)
    os.kill(told()["services"]["planner-1"]["pid"], 0)
    assert told()["started_at"] == up.state["started_at"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_up_stops_everything_in_order_when_asked(
    up: Up, folder: Path, number: signal.Signals
) -> None:
    code, output, _ = await fencepost("sandbox", "create", "box", cwd=folder)
    assert (code, output) == (0, "box\n")
    up.child.send(number)
    assert await up.ended() == 0
    assert not (folder / ".fencepost/up.json").exists()
    code, _, errors = await fencepost("sandbox", "list", cwd=folder)
    assert code == 5
    assert "no server" in errors


@pytest.mark.parametrize("up", [("--ledgers", "2")], indirect=True)
async def test_a_killed_up_leaves_no_child_and_does_not_block_the_next(
    up: Up, folder: Path
) -> None:
    up.child.send(signal.SIGKILL)
    assert await up.ended() == -signal.SIGKILL
    assert up.state["ledgers"] == 2
    code, _, errors = await fencepost(
        *("up", "--port", "0", "--no-postgres", "--ledgers", "3"), cwd=folder
    )
    assert code == 2
    assert "has 2, not 3" in errors
    code, output, errors = await fencepost(
        *("up", "--port", "0", "--no-postgres", "--detach", "--json"), cwd=folder
    )
    assert code == 0, errors
    try:
        assert json.loads(output)["pid"] != up.state["pid"]
        assert json.loads(output)["ledgers"] == 2, "it keeps the number that it was made with"
    finally:
        assert (await fencepost("down", cwd=folder))[0] == 0
    code, _, errors = await fencepost("down", cwd=folder)
    assert "nothing runs" in errors


async def test_up_starts_a_killed_service_again(up: Up, folder: Path) -> None:
    assert (await fencepost("sandbox", "create", "box", cwd=folder))[0] == 0
    for name in ("planner-1", "gateway-1"):
        psutil.Process(up.state["services"][name]["pid"]).kill()
        code, _, errors = await fencepost(
            *("step", "run", "box", "write_file", "-a", f"path={name}", "-a", "content=x"),
            cwd=folder,
        )
        assert code == 0, errors


async def test_the_exit_code_of_a_step_says_how_it_ended(up: Up, folder: Path) -> None:
    async def step(*words: str) -> int:
        return (await fencepost("step", "run", *words, cwd=folder))[0]

    assert up.child.is_running
    assert (await fencepost("sandbox", "create", "box", cwd=folder))[0] == 0
    undo = ("--undo", "true")
    assert await step("box", "run_command", *undo, "--", "true") == 0
    assert await step("box", "run_command", *undo, "--", "false") == 1
    assert await step("box", "run_command", "--", "true") == 2
    late = ("--deadline-ms", "300")
    assert await step("box", "run_command", *undo, *late, "--", "sleep", "20") in (3, 4)
    assert await step("box", "run_command", *undo, "--timeout", "0.3", "--", "sleep", "1") == 5


async def test_the_demo_goes_as_it_must(folder: Path) -> None:
    code, output, errors = await fencepost("demo", "--json", cwd=folder)
    assert code == 0, errors
    act, release, recovery = [json.loads(line) for line in output.splitlines()]
    assert act["act"] == 1
    assert act["naive"] == {"stored": "success", "file_present": False}
    attempts = [(a["state"], a["epoch"]) for a in act["fencepost"]["attempts"]]
    assert attempts == [("compensated", 7), ("committed", 8)]
    assert act["fencepost"]["attempts"][0]["receipts_refused"]
    assert act["fencepost"]["file_present"] is True
    assert act["verify"] == "clean"
    assert release["act"] == 2
    assert release["verdict_first"] == "unconfirmed"
    assert release["reasons"]["workspace"] == "shared"
    assert release["reasons"]["builder"] == "stop_refused"
    assert set(release["reasons"]) == {"workspace", "builder", "gpu"}
    assert (release["left_running"], release["other_dag_alive"]) == (0, True)
    assert (release["verdict_last"], release["verify"]) == ("confirmed", "clean")
    assert recovery["act"] == 3
    assert (recovery["steps"], recovery["reclaims"], recovery["epoch"]) == (30, 2, 3)
    assert recovery["restored"] == 2
    assert recovery["replayed"] >= 1
    assert recovery["tree_reclaimed"] == recovery["tree_in_peace"]
    assert recovery["verify"] == "clean"
