"""
The demo's third act: an agent's session of thirty steps, once in peace and once with its sandbox
taken away twice in the middle.

Both must end with the same tree. The trees are read through the sandboxes, file by file: nothing
here takes the ledger's word for what stands on a disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from fencepost.client import timeline
from fencepost.client.client import Client
from fencepost.client.verify import verify
from fencepost.core.errors import FencepostError, RefusedError, UnknownError
from fencepost.core.sandbox import entries as e
from fencepost.core.steps import SandboxSpec

PEACE: Final = "session"
STRUCK: Final = "session-reclaimed"
STRIKES: Final = (12, 23)
"""The sandbox is taken away while these steps are under way, the first counted as 1."""
CHECKPOINT_EVERY: Final = 8
_PATIENCE_S: Final = 60.0

Say = Callable[[str], None]


class Call(NamedTuple):
    """One step of the session. `undo` is the shell line that takes a command's effect back."""

    tool: str
    args: dict[str, Any]
    undo: str = ""


def session() -> list[Call]:
    """Thirty steps of an agent that writes a small package: files, patches, commands, a link."""
    calls = [
        _write("README.md", "# shapes\n\nAreas of shapes.\n"),
        _write("shapes/__init__.py", '"""Areas of shapes."""\n'),
    ]
    for name, formula in (("square", "a * a"), ("circle", "3.14 * a * a"), ("cube", "6 * a * a")):
        calls += [
            _write(f"shapes/{name}.py", f"def area(a: float) -> float:\n    return {formula}\n"),
            _write(f"tests/test_{name}.py", f"from shapes import {name}\n"),
            _append(f"tests/test_{name}.py", 1, f"from shapes import {name}", "", "assert True"),
            _append("README.md", 3, "Areas of shapes.", f"- {name}"),
        ]
    calls += [
        Call("write_file", {"path": "bin/areas", "content": "#!/bin/sh\nls shapes\n", "mode": 493}),
        Call("write_file", {"path": "LATEST", "symlink_to": "shapes/cube.py"}),
        _change("shapes/circle.py", "    return 3.14 * a * a", "    return 3.14159 * a * a"),
        _shell("cat shapes/*.py | wc -l > lines.txt", "rm -f lines.txt"),
        _write("shapes/old.py", "# to be removed\n"),
        _write("data/table.csv", "".join(f"{n},{n * n}\n" for n in range(2_000))),
        _shell("sort -r data/table.csv > data/sorted.csv", "rm -f data/sorted.csv"),
        Call("delete_path", {"path": "shapes/old.py"}),
        _rename("shapes/cube.py", "shapes/box.py"),
        _rename("tests/test_cube.py", "tests/test_box.py"),
        Call("write_file", {"path": "LATEST", "symlink_to": "shapes/box.py"}),
        _shell("cp -r shapes backup && rm backup/circle.py", "rm -rf backup"),
        _write("NOTES", "r\u00e9sum\u00e9\r\nwith line ends of its own\r\n"),
        _change("shapes/square.py", "    return a * a", "    return a**2"),
        _shell("cksum shapes/*.py tests/*.py data/* > sums.txt", "rm -f sums.txt"),
        _write("DONE", ""),
    ]
    assert len(calls) == 30, "the act says thirty"
    return calls


async def play(client: Client, say: Say) -> tuple[dict[str, Any], bool]:
    """Plays the act on a running stack; what it found, and whether it went as it must."""
    began = time.monotonic()
    say("\n[bold]Act 3: the work of a session that loses its sandbox twice[/]")
    calls = session()
    spec = SandboxSpec(checkpoint_every_steps=CHECKPOINT_EVERY)
    for sandbox in (PEACE, STRUCK):
        await client.create_sandbox(sandbox, spec)
    await _run(client, PEACE, calls)
    expected = await tree(client, PEACE)
    say(f"  in peace: {len(calls)} steps; its tree is {_short(expected)}")
    await _run(client, STRUCK, calls, strikes=STRIKES, say=say)
    found = await tree(client, STRUCK)
    told = await _told(client, STRUCK)
    for line in told.words:
        say(f"  {line}")
    same = found == expected
    say(
        f"  {len(calls)} steps, {len(STRIKES)} reclaims, {told.restored} checkpoints restored,"
        f" {told.replayed} steps replayed; its tree is {_short(found)}:"
        + (" [green]the same[/]" if same else " [red]another one[/]")
    )
    report = await verify(client)
    verdict = "clean" if report.is_clean else f"{report.violation_count} violations"
    seconds = time.monotonic() - began
    say(f"verify: {verdict} ({report.entries} entries); {seconds:.1f} s")
    result = {
        "act": 3,
        "steps": len(calls),
        "reclaims": len(STRIKES),
        "epoch": told.epoch,
        "checkpoints": told.checkpoints,
        "restored": told.restored,
        "replayed": told.replayed,
        "tree_in_peace": expected,
        "tree_reclaimed": found,
        "same_tree": same,
        "verify": "clean" if report.is_clean else [str(one) for one in report.violations],
        "seconds": round(seconds, 2),
    }
    succeeded = (
        same
        and told.epoch == 1 + len(STRIKES)
        and told.restored == len(STRIKES)
        and told.replayed > 0
        and report.is_clean
    )
    return result, succeeded


async def _run(
    client: Client,
    sandbox: str,
    calls: Sequence[Call],
    *,
    strikes: Sequence[int] = (),
    say: Say = lambda _text: None,
) -> None:
    """The agent: one step after the other, each on what the former left."""
    for number, call in enumerate(calls, 1):
        handle = await client.submit(
            sandbox,
            call.tool,
            call.args,
            step=f"step-{number:02d}",
            compensation={"kind": "command", "args": {"shell": call.undo}} if call.undo else None,
        )
        if number in strikes:
            await client.reclaim(sandbox, wait=False)
            say(f"  while step {number} is under way: kill -9, and the disk is gone")
        (await handle.outcome(timeout_s=_PATIENCE_S)).require()


class _Told(NamedTuple):
    words: list[str]
    epoch: int
    checkpoints: int
    restored: int
    replayed: int


async def _told(client: Client, sandbox: str) -> _Told:
    """What the ledger says of the recoveries."""
    words, epoch, counts = [], 0, {"checkpointed": 0, "restored": 0, "replayed": 0}
    async for line in timeline.lines(client, sandbox):
        epoch = line.epoch
        if line.kind in counts:
            counts[line.kind] += 1
        if isinstance(line.entry, e.Recovered):
            words.append(f"epoch {line.epoch}: {line.text}")
    return _Told(words, epoch, *counts.values())


async def tree(client: Client, sandbox: str) -> str:
    """A digest over every path of the live workspace: its kind, its mode, its content."""
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            try:
                view = await client.show(sandbox)
                if view["state"] == "live":
                    return await _tree(client, sandbox)
            except (UnknownError, RefusedError):
                pass  # between two generations
            await asyncio.sleep(0.05)
    raise AssertionError("it goes on until there is one")


async def _tree(client: Client, sandbox: str) -> str:
    listed = (await client.read(sandbox, "list_dir", {"path": ".", "recursive": True})).result
    if listed["cut"]:
        raise FencepostError(f"{sandbox}: more files than a listing holds")
    lines = []
    for item in sorted(listed["entries"], key=lambda item: str(item["path"])):
        digest = ""
        if item["type"] == "file":
            digest = str((await client.stat(sandbox, item["path"]))["digest"])
        lines.append([item["path"], item["type"], item["mode"], item.get("target", ""), digest])
    return "sha256:" + hashlib.sha256(msgspec.json.encode(lines)).hexdigest()


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def _write(path: str, content: str) -> Call:
    return Call("write_file", {"path": path, "content": content})


def _shell(line: str, undo: str) -> Call:
    return Call("run_command", {"shell": line}, undo)


def _patch(path: str, hunk: str) -> Call:
    return Call("apply_patch", {"patch": f"--- a/{path}\n+++ b/{path}\n{hunk}"})


def _append(path: str, line: int, last: str, *added: str) -> Call:
    """Adds lines after line number `line`, which is `last`."""
    new = "".join(f"+{text}\n" for text in added)
    return _patch(path, f"@@ -{line} +{line},{1 + len(added)} @@\n {last}\n{new}")


def _change(path: str, old: str, new: str) -> Call:
    return _patch(path, f"@@ -2 +2 @@\n-{old}\n+{new}\n")


def _rename(old: str, new: str) -> Call:
    lines = (f"diff --git a/{old} b/{new}", "similarity index 100%", f"rename from {old}")
    return Call("apply_patch", {"patch": "\n".join((*lines, f"rename to {new}", ""))})
