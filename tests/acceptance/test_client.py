"""The client against real services: duplicates, large contents, bad input, lost servers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from typing import Any

import pytest
from fencepost.client import Client, RefusedError
from fencepost.core import limits

from tests.acceptance.conftest import RunningStack, StartStack


async def test_s017_the_same_step_id_again_runs_once_and_gives_the_same_outcome(
    stack: RunningStack,
) -> None:
    async with await stack.client() as client, await stack.client() as other:
        await client.create_sandbox("box")
        call = {"argv": ["sh", "-c", "echo x >> count"]}
        undo = {"kind": "command", "args": {"argv": ["rm", "-f", "count"]}}
        outcomes = await asyncio.gather(
            client.step("box", "run_command", call, step="once", compensation=undo),
            client.step("box", "run_command", call, step="once", compensation=undo),
            other.step("box", "run_command", call, step="once", compensation=undo, timeout_s=30),
        )
        late = await other.step(
            "box", "run_command", call, step="once", compensation=undo, timeout_s=30
        )
        assert {(found.state, found.position) for found in [*outcomes, late]} == {
            ("committed", outcomes[0].position)
        }
        assert await client.read_file("box", "count") == "x\n"

        for caller in (client, other):
            with pytest.raises(RefusedError) as raised:
                await caller.step(
                    "box",
                    "run_command",
                    {"argv": ["true"]},
                    step="once",
                    compensation=undo,
                    timeout_s=30,
                )
            assert (raised.value.reason, raised.value.field) == ("id_reused", "step")
        assert await client.read_file("box", "count") == "x\n"


async def test_contents_above_the_inline_bound_travel_by_reference(stack: RunningStack) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        for size in (limits.INLINE_BYTES_MAX - 200, limits.INLINE_BYTES_MAX + 1, 9 * limits.MIB):
            content = os.urandom(size // 2 + 1).hex()[:size]
            outcome = await client.write_file("box", f"f{size}", content)
            assert outcome.is_ok, outcome
            found = await client.stat("box", f"f{size}")
            assert found["digest"] == "sha256:" + hashlib.sha256(content.encode()).hexdigest()
        raw = os.urandom(200_000)
        assert (await client.write_file("box", "raw", raw)).is_ok
        assert (await client.stat("box", "raw"))["digest"] == (
            "sha256:" + hashlib.sha256(raw).hexdigest()
        )
        with pytest.raises(RefusedError) as raised:
            await client.write_file("box", "huge", b"\0" * (limits.CONTENT_BYTES_MAX + 1))
        assert (raised.value.reason, raised.value.field) == ("too_large", "args.content")
    assert (await stack.verify()).violations == []


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("bash", {"argv": ["ls"]}, "unknown_tool", "tool"),
    ("write_file", {"path": "a"}, "bad_arguments", "args.content"),
    ("write_file", {"path": "a", "content": 7}, "bad_arguments", "args.content"),
    ("write_file", {"path": "../a", "content": ""}, "bad_arguments", "args.path"),
    ("write_file", {"path": "/etc/a", "content": ""}, "bad_arguments", "args.path"),
    ("write_file", {"path": "a", "content": "", "x": 1}, "bad_arguments", "args.x"),
    ("run_command", {"argv": ["ls"]}, "no_compensation", "compensation"),
    ("run_command", {"argv": ["x" * 20_000]}, "too_large", "args"),
]


async def _by_subject(client: Client, tool: str, args: dict[str, Any], step: str) -> dict[str, Any]:
    """What any NATS client hears of a command that it published."""
    heard: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    subscription = await client.link.subscribe_raw(
        f"fp.v1.event.step.box.{step}.refused",
        lambda message: heard.done() or heard.set_result(json.loads(message.data)),
    )
    command: dict[str, Any] = {"tool": tool, "args": args}
    if len(json.dumps(args)) > 10_000:
        command["compensation"] = {"kind": "command", "args": {"argv": ["true"]}}
    await client.link.nc.jetstream().publish(
        f"fp.v1.cmd.step.box.{step}", json.dumps(command).encode()
    )
    try:
        return await asyncio.wait_for(heard, 30)
    finally:
        await subscription.unsubscribe()


async def test_bad_input_gets_the_same_error_by_subject_client_and_command(
    stack: RunningStack,
) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        for number, (tool, args, reason, field) in enumerate(BAD):
            by_subject = await _by_subject(client, tool, args, f"bad{number}")
            assert (by_subject["reason"], by_subject["field"]) == (reason, field), args

            undo = (
                {"kind": "command", "args": {"argv": ["true"]}} if reason == "too_large" else None
            )
            with pytest.raises(RefusedError) as raised:
                await client.step("box", tool, args, compensation=undo)
            assert raised.value.reason == reason
            assert raised.value.field.startswith(field)
        for tool, args, reason, field in (BAD[0], BAD[3], BAD[6]):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fencepost.client", "step", "run", "box", tool),
                *("--json", json.dumps(args), "--format", "json", "--url", stack.nats.url),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, errors = await process.communicate()
            assert process.returncode == 2
            problem = json.loads(output)["error"]
            assert (problem["reason"], problem["field"]) == (reason, field)
            assert reason in errors.decode()

        for sandbox, reason in (("no-box", "unknown_sandbox"), ("a.b", "bad_id")):
            with pytest.raises(RefusedError) as raised:
                await client.write_file(sandbox, "a", "b")
            assert (raised.value.reason, raised.value.field) == (reason, "sandbox")

        # The control: nothing of all that is left, and right input goes through.
        assert await client.list_dir("box") is not None
        assert (await client.show("box"))["open_steps"] == 0
        assert (await client.write_file("box", "a", "b")).is_ok


async def test_a_patch_that_does_not_apply_is_a_committed_failure_that_says_where(
    stack: RunningStack,
) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        patch = "--- a/zz\n+++ b/zz\n@@ -1 +1 @@\n-a\n+b\n"
        outcome = await client.apply_patch("box", patch)
        assert (outcome.state, outcome.outcome) == ("committed", "failed")
        assert outcome.result["file"] == "zz"
        await client.write_file("box", "zz", "a\n")
        assert (await client.apply_patch("box", patch)).is_ok
        assert await client.read_file("box", "zz") == "b\n"


async def test_steps_on_their_way_survive_the_loss_of_the_server(start_stack: StartStack) -> None:
    stack = await start_stack()
    async with await stack.client() as client:
        await client.create_sandbox("box")
        handles = []

        async def send() -> None:
            for number in range(60):
                handles.append(
                    await client.submit("box", "write_file", path=f"f{number}", content="x")
                )
                await asyncio.sleep(0.005)

        sending = asyncio.create_task(send())
        await asyncio.sleep(0.1)
        stack.nats.kill()
        await asyncio.sleep(0.3)
        await stack.nats.restart()
        await sending
        outcomes = await asyncio.gather(*(handle.outcome(timeout_s=60) for handle in handles))
        assert {outcome.state for outcome in outcomes} == {"committed"}
        assert len(outcomes) == 60
    assert (await stack.verify()).violations == []
