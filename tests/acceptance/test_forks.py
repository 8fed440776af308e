"""Checkpoints on demand, and workspaces brought back into sandboxes of their own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fencepost.client import cli, forks
from fencepost.client.client import Client
from fencepost.client.outcome import StepOutcome
from fencepost.core.errors import RefusedError
from typer.testing import CliRunner

from tests.acceptance.conftest import RunningStack

NOTHING = {"kind": "command", "args": {"argv": ["true"]}}


async def _names(client: Client, sandbox: str) -> list[str]:
    listed = await client.list_dir(sandbox)
    return sorted(item["path"] for item in listed["entries"])


async def _write(client: Client, sandbox: str, *names: str) -> None:
    for name in names:
        outcome = await client.write_file(sandbox, name, f"content of {name}\n", step=f"w-{name}")
        assert outcome.is_ok


async def test_of_two_forks_under_one_name_one_is_made(stack: RunningStack) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        await _write(client, "box", "a", "b")
        both = await asyncio.gather(
            *(forks.fork(client, "box", at=step, name="one") for step in ("w-a", "w-b")),
            return_exceptions=True,
        )
        (made,) = [fork for fork in both if isinstance(fork, forks.Fork)]
        (refused,) = [error for error in both if isinstance(error, RefusedError)]
        assert (refused.reason, refused.field) == ("sandbox_exists", "--as")
        assert await _names(client, "one") == (["a"] if made.at == "w-a" else ["a", "b"])


async def test_a_workspace_at_any_committed_step_comes_back_in_a_sandbox_of_its_own(
    stack: RunningStack,
) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        await _write(client, "box", "a", "b")
        stored = await client.checkpoint("box", reason="before the rest")
        assert stored.files == 2
        assert (await client.show("box"))["checkpoint"]["checkpoint"] == stored.checkpoint
        await _write(client, "box", "c")
        await client.run_command(
            "box", "touch charged", undo="true", step="charge", effect="external"
        )
        await _write(client, "box", "d")

        early = await forks.fork(client, "box", at="w-a", name="early")
        assert (early.checkpoint, early.replayed) == ("", 1), "the checkpoint holds more than that"
        assert await _names(client, "early") == ["a"]

        late = await forks.fork(client, "box", at="w-d", name="late")
        assert (late.checkpoint, late.replayed) == (stored.checkpoint, 2)
        assert late.external == ["charge"]
        own = (await client.show("late"))["checkpoint"]["namespace"]
        assert (own, late.leans) == ("late", False), "its origin may go now"
        assert late.difference is None
        assert await _names(client, "late") == ["a", "b", "c", "d"]
        assert await client.read_file("late", "c") == "content of c\n"

        # Its own life: what is done to one is not done to the other.
        assert (late.sandbox, late.origin, late.epoch) == ("late", "box", 1)
        await client.reclaim("late")
        await client.write_file("late", "only here", "x")
        assert await _names(client, "late") == ["a", "b", "c", "d", "only here"]
        assert (await client.show("box"))["epoch"] == 1
        assert await _names(client, "box") == ["a", "b", "c", "charged", "d"]

        again = await forks.fork(client, "late")
        assert again.origin == "late"
        assert await _names(client, again.sandbox) == ["a", "b", "c", "d", "only here"]

        for name in ("box", "late"):
            with pytest.raises(RefusedError, match="--as"):
                await forks.fork(client, "box", at="w-a", name=name)
        with pytest.raises(RefusedError, match="no committed step"):
            await forks.fork(client, "box", at="never")
        with pytest.raises(RefusedError, match="no sandbox"):
            await forks.fork(client, "nobody")

        await client.release("box")
        async with asyncio.timeout(60):
            while (await client.show("box"))["state"] != "gone":
                await asyncio.sleep(0.1)
        await client.reclaim("late")
        await client.write_file("late", "e", "x")
        assert await _names(client, "late") == ["a", "b", "c", "d", "e", "only here"]
    assert (await stack.verify()).is_clean


async def test_a_sandbox_that_is_gone_comes_back_from_its_ledger(stack: RunningStack) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        await _write(client, "box", "a", "b")
        await client.checkpoint("box")
        await client.release("box")
        assert (await client.show("box"))["state"] == "gone"
        found = await forks.fork(client, "box", name="again")
        assert (found.checkpoint, found.replayed) == ("", 2)
        assert await _names(client, "again") == ["a", "b"]


async def test_a_step_with_another_effect_ends_the_fork_there(stack: RunningStack) -> None:
    # Where a sandbox's folder lies is seen inside, and a fork's lies elsewhere.
    line = "{ pwd; cat /proc/self/mountinfo; } | grep -q /box-"
    async with await stack.client() as client:
        await client.create_sandbox("box")
        await _write(client, "box", "a")
        outcome = await client.run_command("box", line, undo="true", step="looks")
        assert isinstance(outcome, StepOutcome)
        assert outcome.is_ok
        await _write(client, "box", "b")
        same = await forks.fork(client, "box", name="box-again")
        assert (same.difference, same.replayed) == (None, 3), "control: its name is like enough"
        other = await forks.fork(client, "box", name="other")
        assert other.difference is not None
        assert (other.difference.step, other.replayed) == ("looks", 1)
        assert other.difference.expected.startswith("ok:")
        assert other.difference.found.startswith("failed:")
        assert await _names(client, "other") == ["a"]


async def test_the_commands_of_recovery_and_of_claims(stack: RunningStack) -> None:
    async def said(*words: str) -> Any:
        line = ["sandbox", *words, "--url", stack.nats.url, "--json"]
        found = await asyncio.to_thread(CliRunner().invoke, cli.app, line)
        if found.exception is not None:
            raise found.exception
        return json.loads(found.stdout)

    async def refused(*words: str) -> str:
        with pytest.raises(RefusedError) as error:
            await said(*words)
        return error.value.field or error.value.reason

    policy = ("--checkpoint-every-steps", "2", "--recovery", "tell", "--while-recovering", "refuse")
    await said("create", "box", *policy)
    assert await refused("create", "x", "--recovery", "maybe") == "spec"
    async with await stack.client() as client:
        await _write(client, "box", "a")
        assert (await said("checkpoint", "box", "--reason", "now"))["files"] == 1
        await _write(client, "box", "b")
        assert (await said("fork", "box", "--at", "w-a", "--as", "early"))["sandbox"] == "early"
        assert await _names(client, "early") == ["a"]
        newest = await said("restore", "box")
        assert await _names(client, newest["sandbox"]) == ["a", "b"]
        assert await refused("fork", "box", "--at", "none") == "--at"
        who = ("--who", "me", "--note", "why")
        assert await refused("recover", "box", "accept", *who) == "sandbox"
        assert await refused("recover", "box", "maybe", *who) == "DECISION"
        assert (await said("claim", "box", "job", "--reason", "it works on"))["claim"] == "job"
        assert (await client.show("box"))["claims"]["job"] == "it works on"
        assert (await client.release("box"))["state"] == "live", "the claim keeps it"
        # A command holds the checkpoint off until there is nothing to take one of.
        await client.submit("box", "run_command", {"argv": ["sleep", "60"]}, compensation=NOTHING)
        asked = asyncio.create_task(client.checkpoint("box", timeout_s=600))
        while not (await client.show("box"))["checkpointing"]:
            await asyncio.sleep(0.05)
        await said("unclaim", "box", "job")
        with pytest.raises(RefusedError, match="released before"):
            await asked
        assert await refused("unclaim", "box", "job") == "claim"
        while (await client.show("box"))["state"] != "gone":
            await asyncio.sleep(0.05)
