"""What the README tells a person to run does what it says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path

import nats

from tests.acceptance.conftest import RunningStack

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def _blocks(language: str, holding: str) -> list[str]:
    found = [text for kind, text in BLOCKS.findall(README) if kind == language and holding in text]
    assert found, f"the README has no {language} block with {holding!r}"
    return found


async def _run_python(program: str, stack: RunningStack) -> str:
    program = program.replace("nats://127.0.0.1:4222", stack.nats.url)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        env={**os.environ, "FENCEPOST_NATS_URL": stack.nats.url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_the_smallest_client_program_runs(stack: RunningStack) -> None:
    (program,) = _blocks("python", "fencepost.client")
    assert await _run_python(program, stack) == "committed at epoch 1\nhello\n\n"


async def test_any_nats_client_runs_a_step_and_reads_it_back(stack: RunningStack) -> None:
    """The `nats pub` and `nats req` lines, by another client: the subjects and bodies are theirs."""
    (commands,) = _blocks("sh", "nats pub")
    lines = [shlex.split(line) for line in commands.splitlines()]
    connection = await nats.connect(stack.nats.url)
    try:
        attached = await connection.subscribe("fp.v1.event.sandbox.box.attached")
        committed = await connection.subscribe("fp.v1.event.step.box.s1.committed")
        waits = {"create": attached, "step": committed}
        for _, verb, subject, body in lines:
            if verb == "pub":
                await connection.publish(subject, body.encode())
                await waits[subject.split(".")[3]].next_msg(timeout=30)
            else:
                reply = json.loads(
                    (await connection.request(subject, body.encode(), timeout=30)).data
                )
                assert reply["status"] == "ok"
                assert reply["result"]["content"] == "hi"
    finally:
        await connection.close()
    assert [verb for _, verb, _, _ in lines] == ["pub", "pub", "req"]

    (program,) = _blocks("python", "import nats")
    event = json.loads(await _run_python(program, stack))
    assert (event["state"], event["epoch"], event["outcome"]) == ("committed", 1, "ok")


async def test_the_commands_of_the_readme_run_in_their_order(
    stack: RunningStack, tmp_path: Path
) -> None:
    (typed,) = _blocks("sh", "sandbox create box")
    outputs = []
    for line in typed.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0].endswith("fencepost")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fencepost.client", *words[1:]),
            env={**os.environ, "FENCEPOST_NATS_URL": stack.nats.url},
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, (line, output.decode(), errors.decode())
        outputs.append(output.decode())
    assert outputs[0] == "box\n"
    assert outputs[2] == "hello"
    assert outputs[3] == "box is live at epoch 2\n"
    assert "epoch 2 opened on a cold disk" in outputs[5]
    assert outputs[6].startswith("clean: ")
