"""
Bad input gets one clear error that names the field, by subject, client and command alike.

Nothing is left half-done: the ledger holds a refusal or nothing, the disk no file, and right input
goes through afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import nats.js.errors
import pytest
from fencepost.client import Client, RefusedError, UnknownError
from fencepost.core.sandbox import entries as e

from tests.acceptance.conftest import RunningStack, StartStack
from tests.acceptance.walking import History

COMMANDS_AT_ONCE = 4
UNDO = {"kind": "command", "args": {"argv": ["true"]}}


class Bad(NamedTuple):
    """A call, and the reason and field of its refusal. `command` has what the command line takes."""

    name: str
    tool: str
    args: dict[str, Any]
    reason: str
    field: str
    options: Mapping[str, Any] = MappingProxyType({})
    words: tuple[str, ...] | None = ()
    sandbox: str = "box"


BAD = [
    Bad("unknown_tool", "bash", {"argv": ["ls"]}, "unknown_tool", "tool"),
    Bad("missing", "write_file", {"path": "bad"}, "bad_arguments", "args.content"),
    Bad("type", "write_file", {"path": "bad", "content": 7}, "bad_arguments", "args.content"),
    Bad("bool", "delete_path", {"path": "a", "recursive": 1}, "bad_arguments", "args.recursive"),
    Bad("above", "write_file", {"path": "../bad", "content": ""}, "bad_arguments", "args.path"),
    Bad("absolute", "write_file", {"path": "/bad", "content": ""}, "bad_arguments", "args.path"),
    Bad("nul", "write_file", {"path": "b\0d", "content": ""}, "bad_arguments", "args.path"),
    Bad("field", "write_file", {"path": "bad", "content": "", "x": 1}, "bad_arguments", "args.x"),
    Bad("no_undo", "run_command", {"argv": ["touch", "bad"]}, "no_compensation", "compensation"),
    Bad(
        "undo_kind",
        "run_command",
        {"argv": ["touch", "bad"]},
        "no_compensation",
        "compensation.kind",
        {"compensation": {"kind": "pre_image"}},
        None,
    ),
    Bad(
        "undo_args",
        "write_file",
        {"path": "bad", "content": ""},
        "bad_arguments",
        "compensation.args.argv",
        {"compensation": {"kind": "command", "args": {"argv": "rm"}}},
        None,
    ),
    Bad("read_only", "read_file", {"path": "a"}, "read_only_tool", "tool"),
    Bad(
        "deadline",
        "write_file",
        {"path": "bad", "content": ""},
        "out_of_range",
        "deadline_ms",
        {"deadline_ms": 1},
        ("--deadline-ms", "1"),
    ),
    Bad(
        "attempts",
        "write_file",
        {"path": "bad", "content": ""},
        "out_of_range",
        "attempts_max",
        {"attempts_max": 1000},
        ("--attempts-max", "1000"),
    ),
    Bad(
        "large",
        "run_command",
        {"argv": ["touch", "bad", "x" * 40_000]},
        "too_large",
        "args",
        {"compensation": UNDO},
        ("--undo", "true"),
    ),
    Bad(
        "nowhere",
        "write_file",
        {"path": "bad", "content": ""},
        "unknown_sandbox",
        "sandbox",
        sandbox="no-box",
    ),
]


async def _heard(
    client: Client, subject: str, body: bytes, *, sandbox: str = "box", step: str = ""
) -> dict[str, Any]:
    """What any NATS client hears of a command that it published: of a step, or of its sandbox."""
    topic = f"step.{sandbox}.{step}" if step else f"sandbox.{sandbox}"
    heard: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    subscription = await client.link.subscribe_raw(
        f"fp.v1.event.{topic}.refused",
        lambda message: heard.done() or heard.set_result(json.loads(message.data)),
    )
    try:
        await client.link.nc.jetstream().publish(subject, body)
        return await asyncio.wait_for(heard, 30)
    finally:
        await subscription.unsubscribe()


async def _by_command(stack: RunningStack, bad: Bad) -> tuple[str, str]:
    assert bad.words is not None
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fencepost.client", "step", "run", bad.sandbox, bad.tool),
        *("--json", json.dumps(bad.args), "--format", "json", "--url", stack.nats.url),
        *bad.words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2, (bad.name, output, errors)
    said = errors.decode()
    assert "Traceback" not in said
    problem = json.loads(output)["error"]
    assert problem["reason"] in said
    return problem["reason"], problem["field"]


async def _nothing_is_left(stack: RunningStack, client: Client) -> None:
    shown = await client.show("box")
    assert shown["open_steps"] == 0
    workspace = stack.sandbox_root / shown["native_id"] / "workspace"
    assert not list(workspace.rglob("*bad*"))
    entries = await History(client).of("box")
    assert not [x for x in entries if isinstance(x, e.Fenced | e.Parked)]
    # The control: right input goes through.
    assert (await client.write_file("box", "good", "x")).is_ok
    report = await stack.verify()
    assert report.violations == []
    assert report.committed == 1


async def test_bad_calls_are_refused_alike_by_subject_client_and_command(
    stack: RunningStack,
) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        found = {}
        for bad in BAD:
            command = {"tool": bad.tool, "args": bad.args, **bad.options}
            refused = await _heard(
                client,
                f"fp.v1.cmd.step.{bad.sandbox}.{bad.name}",
                json.dumps(command).encode(),
                sandbox=bad.sandbox,
                step=bad.name,
            )
            by_subject = (refused["reason"], refused["field"])
            with pytest.raises(RefusedError) as raised:
                await client.step(bad.sandbox, bad.tool, bad.args, timeout_s=30, **bad.options)
            by_client = (raised.value.reason, raised.value.field)
            assert str(raised.value).strip()
            found[bad.name] = by_subject, by_client
        assert {name: by_subject for name, (by_subject, _) in found.items()} == {
            bad.name: (bad.reason, bad.field) for bad in BAD
        }
        # The client may say more closely which argument is too large.
        assert {
            name: (reason, field.removesuffix(".argv") if reason == "too_large" else field)
            for name, (_, (reason, field)) in found.items()
        } == {bad.name: (bad.reason, bad.field) for bad in BAD}

        gate = asyncio.Semaphore(COMMANDS_AT_ONCE)

        async def run(bad: Bad) -> tuple[str, str]:
            async with gate:
                return await _by_command(stack, bad)

        for_commands = [bad for bad in BAD if bad.words is not None]
        answers = await asyncio.gather(*map(run, for_commands))
        assert dict(zip([bad.name for bad in for_commands], answers, strict=True)) == {
            bad.name: found[bad.name][1] for bad in for_commands
        }
        await _nothing_is_left(stack, client)


def _nested(depth: int) -> bytes:
    return b'{"tool": "write_file", "args": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"


RAW = [
    (b"not json", "malformed", ""),
    (b"[]", "malformed", ""),
    (b'{"args": {}}', "malformed", "tool"),
    (b'{"tool": "write_file"}', "malformed", "args"),
    (b'{"tool": 7, "args": {}}', "malformed", "tool"),
    (b'{"tool": "write_file", "args": []}', "bad_arguments", "args"),
    (b'{"tool": "write_file", "args": {}, "colour": 1}', "malformed", "colour"),
    (
        b'{"tool": "write_file", "args": {"path": "bad", "content": ""}, "deadline_ms": "1"}',
        "malformed",
        "deadline_ms",
    ),
    (
        b'{"tool": "write_file", "args": {"path": "bad", "content": ""}, "sandbox": "other"}',
        "mismatch",
        "sandbox",
    ),
    (
        b'{"tool": "write_file", "args": {"path": "b"}, "compensation": {"kind": "magic"}}',
        "malformed",
        "compensation.kind",
    ),
    (
        b'{"tool": "write_file", "args": {"path": "bad", "content": ""}, "on_moved_epoch": "no"}',
        "malformed",
        "on_moved_epoch",
    ),
    (_nested(100), "bad_arguments", "args.a"),
    (_nested(5_000), "malformed", ""),
]


async def test_commands_of_wrong_shape_are_refused_with_the_field(stack: RunningStack) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        found = []
        for number, (body, _, _) in enumerate(RAW):
            refused = await _heard(
                client, f"fp.v1.cmd.step.box.raw{number}", body, step=f"raw{number}"
            )
            assert refused["detail"], refused
            found.append((refused["reason"], refused["field"]))
        assert found == [(reason, field) for _, reason, field in RAW]
        # The server itself takes no command that could not stand in a batch.
        huge = json.dumps({"tool": "write_file", "args": {"path": "bad", "content": "x" * 300_000}})
        with pytest.raises(nats.js.errors.BadRequestError, match="exceeds maximum allowed"):
            await client.link.nc.jetstream().publish("fp.v1.cmd.step.box.huge", huge.encode())
        await _nothing_is_left(stack, client)


async def test_ids_that_are_none_are_refused(stack: RunningStack) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        right = b'{"tool": "write_file", "args": {"path": "bad", "content": ""}}'
        for step in ("a" * 65, "é", "a:b"):
            refused = await _heard(client, f"fp.v1.cmd.step.box.{step}", right)
            assert (refused["reason"], refused["field"]) == ("bad_id", "step"), step
            assert refused["id"] == step
        for sandbox, step, field in (
            ("a.b", "s", "sandbox"),
            ("box\n", "s", "sandbox"),
            ("", "s", "sandbox"),
            ("box", "a b", "step"),
            ("box", "", "step"),
            ("box", "*", "step"),
        ):
            with pytest.raises(RefusedError) as raised:
                await client.write_file(sandbox, "bad", "", step=step)
            assert (raised.value.reason, raised.value.field) == ("bad_id", field)
        await _nothing_is_left(stack, client)


async def test_a_patch_that_does_not_apply_changes_nothing_and_exits_with_1(
    stack: RunningStack,
) -> None:
    async with await stack.client() as client:
        await client.create_sandbox("box")
        patch = (
            "--- /dev/null\n+++ b/bad\n@@ -0,0 +1 @@\n+x\n--- a/zz\n+++ b/zz\n@@ -1 +1 @@\n-a\n+b\n"
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fencepost.client", "step", "run", "box", "apply_patch"),
            *("--file", "-", "--format", "json", "--url", stack.nats.url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, _ = await asyncio.wait_for(process.communicate(patch.encode()), 60)
        assert process.returncode == 1, output
        said = json.loads(output)
        assert (said["state"], said["outcome"]) == ("committed", "failed")
        assert said["result"]["file"] == "zz"
        shown = await client.show("box")
        workspace = stack.sandbox_root / shown["native_id"] / "workspace"
        assert not list(workspace.rglob("*bad*"))
    assert (await stack.verify()).violations == []


async def _run(stack: RunningStack, *words: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fencepost.client", *words, "--url", stack.nats.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 120)
    assert b"Traceback" not in errors
    return process.returncode, output.decode(), errors.decode()


async def test_what_never_was_is_said_by_every_command_that_tells_of_it(
    start_stack: StartStack, tmp_path: Path
) -> None:
    stack = await start_stack(others=True)
    async with await stack.client() as client:
        await client.create_sandbox("box")
        await client.open_dag("flow")
        with pytest.raises(RefusedError, match="no sandbox"):
            await client.release("nobody")
        with pytest.raises(RefusedError, match="no DAG"):
            await client.cancel_dag("nobody")
    page = tmp_path / "page.html"
    asked: list[tuple[str, ...]] = [
        ("replay", "NAME"),
        ("replay", "--dag", "NAME"),
        ("replay", "NAME", "--draw", str(page)),
        ("releases", "NAME"),
        ("read", "NAME", "list_dir", "--arg", "path=."),
    ]
    wrong = await asyncio.gather(
        *(_run(stack, *(word.replace("NAME", "nobody") for word in words)) for words in asked)
    )
    for words, (code, _, said) in zip(asked, wrong, strict=True):
        assert code == 2, (words, said)
        assert "nobody" in said
    assert not page.exists()
    assert "refused: unknown_sandbox" in wrong[0][1], "what was refused is told all the same"
    for words in asked[2:4]:  # the control
        name = "flow" if "--dag" in words or words[0] == "releases" else "box"
        code, _, said = await _run(stack, *(word.replace("NAME", name) for word in words))
        assert code == 0, (words, said)


async def test_who_waits_for_a_provider_that_nobody_offers_is_told_so(stack: RunningStack) -> None:
    told: list[str] = []
    async with await stack.client() as client:
        with pytest.raises(UnknownError, match="no gateway that offers provider 'none'"):
            await client.create_sandbox("odd", {"provider": "none"}, timeout_s=6, say=told.append)
        assert len(told) == 1
        await client.create_sandbox("box", say=told.append)
        assert len(told) == 1, "the control"
        assert (await client.release("odd"))["state"] == "gone"
