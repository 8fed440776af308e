"""What no outside can bring about at will: the toolhost's parts, with one call made to fail."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fencepost.toolhost import toolhost

from tests.unit.toolhost.driver import Disk, Toolhost, digest
from tests.unit.toolhost.test_files import tree

Start = Callable[..., Toolhost]


class One:
    """Enough of a call to be recorded."""

    def __init__(self, attempt: str, no: int) -> None:
        self.attempt, self.no = attempt, no
        self.direction, self.step, self.tool = "apply", attempt.partition(".")[0], "write_file"
        self.key = attempt


def begun(one: One) -> dict[str, Any]:
    record = toolhost.record_of("begun", one)
    return {**record, "t": one.tool, "g": "", "of": "", "pg": 0, "st": 0, "pre": False}


def reread(tmp_path: Path) -> Any:
    journal = toolhost.Journal(str(tmp_path), False)
    journal.refresh()
    return journal


def test_a_roll_back_that_cannot_be_recorded_is_recorded_with_the_next(tmp_path: Path):
    journal = reread(tmp_path)
    one, two = One("s1.1", 1), One("s2.1", 2)
    journal.append(begun(one), b'{"ops":[]}')
    really_write = journal.write

    def full(data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    journal.write = full
    with pytest.raises(OSError, match="full"):
        journal.append(toolhost.record_of("rolled", one), owe=True)
    assert journal.entries["s1.1"].state == "rolled"
    assert reread(tmp_path).entries["s1.1"].state == "open"
    journal.write = really_write
    journal.append(begun(two), b'{"ops":[]}')
    for known in (journal, reread(tmp_path)):
        assert known.entries["s1.1"].state == "rolled"
        assert known.open == {"s2.1"}


def test_a_record_appended_during_a_compaction_is_carried_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal, other = reread(tmp_path), reread(tmp_path)
    one = One("s1.1", 1)
    journal.append(begun(one), b'{"ops":[]}')
    other.refresh()
    really_rename = os.rename

    def late(source: str, target: str) -> None:
        other.append(toolhost.record_of("ended", one))
        really_rename(source, target)

    monkeypatch.setattr(toolhost.os, "rename", late)
    journal.compact()
    monkeypatch.undo()
    assert journal.entries["s1.1"].ended
    assert reread(tmp_path).entries["s1.1"].ended
    # And one that comes just after it finds that its file is no longer the journal.
    other.append_unlocked(toolhost.record_of("revoked", one))
    journal.refresh()
    assert journal.entries["s1.1"].revoked


def test_a_marker_that_moves_under_a_file_tool_takes_it_back(disk: Disk):
    (disk.workspace / "a").write_text("before")
    options = ["--state", str(disk.state), "--workspace", str(disk.workspace), "--instance", "i"]
    host = toolhost.Toolhost(toolhost.parse_options(options))
    host.mark({"epoch": 7, "session": "A", "nonce": "N7"})
    really = host.files.carry_out
    moving = True

    def carry_out(ops: Any, number: int) -> None:
        really(ops, number)
        if moving:
            host.write_marker(8, "B", "N8")

    host.files.carry_out = carry_out
    body = b'{"path": "a", "content": "after"}'
    head = {"k": "apply", "step": "s1", "tool": "write_file", "digest": digest(body)}

    def ask(epoch: int, session: str) -> dict[str, Any]:
        fence = disk.fence("s1.1", epoch=epoch, session=session)
        host.take_call("apply", {**head, "fence": fence}, body)
        host.pump()
        return json.loads(host.outgoing.pop().partition(b"\n")[2])

    receipt = ask(7, "A")
    assert (receipt["verdict"], receipt["reason"]) == ("fault", "marker_moved")
    assert tree(disk) == {"a": ("file", 0o644, b"before")}
    moving = False
    assert ask(8, "B")["verdict"] == "applied"
    assert (disk.workspace / "a").read_text() == "after"


def test_a_marker_that_moves_under_a_command_makes_it_indeterminate(host: Toolhost, disk: Disk):
    marker = json.dumps({"epoch": 8, "session": "B", "nonce": "N8"})
    shell = f"printf '%s' '{marker}' > {disk.state}/marker.json"
    receipt = host.apply("s1.1", "run_command", {"shell": shell})
    assert (receipt["verdict"], receipt["reason"]) == ("indeterminate", "marker_moved")
    later = host.apply(disk.fence("s2.1", epoch=8, session="B"), "run_command", {"shell": "true"})
    assert later["verdict"] == "applied"


def test_a_roll_back_that_fails_leaves_the_question_open() -> None:
    """Whoever asks again has it settled first; to call it indeterminate would close it for good."""

    class Failing:
        def roll_back(self, *_: Any) -> None:
            raise FileNotFoundError(errno.ENOENT, "taken away")

    class Host:
        files = Failing()

    with pytest.raises(toolhost.Fault) as fault:
        toolhost.Toolhost.take_back(Host(), One("s1.1", 1), [])
    assert fault.value.reason == "io_error"
