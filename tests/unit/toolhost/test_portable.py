"""The toolhost without what only Linux has: processes by `ps`, no prctl, no exchange of names."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fencepost.toolhost
import pytest
from fencepost.toolhost import toolhost

from tests.unit.toolhost import test_commands as commands
from tests.unit.toolhost.driver import Disk, Toolhost, wait_until

SECONDS = 10**10  # more than any kernel's ticks since its start, less than `ps` makes of a date
COOKIE = b"FENCEPOST_FENCE=disk:s1.1"


class TestByPs:
    """Some of the other modules' tests again, on toolhosts that find processes by `ps`."""

    @pytest.fixture(autouse=True)
    def portable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FENCEPOST_PORTABLE", "1")

    def test_it_is_ps_that_is_asked(self, host: Toolhost, disk: Disk):
        host.apply("s1.1", "run_command", {"argv": ["true"]})
        begun = next(record for record in disk.journal() if record["k"] == "begun")
        assert begun["st"] > SECONDS
        assert host.stat()["rss_bytes"] > 1_000_000

    def test_a_file_is_replaced_and_comes_back(self, host: Toolhost, disk: Disk):
        host.write("s1.1", "a", "one\n")
        assert host.write("s2.1", "a", "two\n")["outcome"] == "ok"
        assert (disk.workspace / "a").read_text() == "two\n"
        assert host.undo("s2.u", of="s2.1")["verdict"] == "applied"
        assert (disk.workspace / "a").read_text() == "one\n"

    test_time = staticmethod(commands.test_a_command_past_its_time_is_killed_with_its_whole_group)
    test_background = staticmethod(
        commands.test_what_a_command_leaves_in_the_background_is_killed_and_told
    )
    test_revoke = staticmethod(
        commands.test_s229_a_duplicate_of_a_running_command_is_told_so_and_a_revocation_kills_it
    )
    test_revoke_by_another = staticmethod(
        commands.test_s229_a_revocation_through_another_toolhost_kills_it_first
    )
    test_mark = staticmethod(
        commands.test_s200_a_new_session_ends_the_old_toolhosts_command_before_it_opens
    )
    test_stuck_holder = staticmethod(
        commands.test_s200_a_stopped_toolhost_that_holds_the_lock_is_ended
    )
    test_end_of_stream = staticmethod(commands.test_the_end_of_the_stream_ends_every_tool)
    test_killed_toolhost = staticmethod(
        commands.test_s204_a_command_of_a_killed_toolhost_is_indeterminate_and_not_run_again
    )
    test_read_only = staticmethod(commands.test_s213_a_command_declared_read_only_cannot_write)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[dict[str, int]]:
    """A command's processes: the shell, one in its group, and an orphan in another session."""
    line = "sleep 600 & echo $! > inner; (setsid sh -c 'echo $$ > left; exec sleep 601' &); wait"
    name, _, value = COOKIE.decode().partition("=")
    shell = subprocess.Popen(
        ["sh", "-c", line],
        cwd=tmp_path,
        env={**os.environ, name: value},
        start_new_session=True,
    )
    files = {name: tmp_path / name for name in ("inner", "left")}
    wait_until(lambda: all(f.exists() and f.read_text().endswith("\n") for f in files.values()))
    pids = {"shell": shell.pid} | {name: int(file.read_text()) for name, file in files.items()}
    yield pids
    toolhost.end_processes(shell.pid, COOKIE, toolhost.start_time(shell.pid), float("inf"))
    shell.wait()


def hide_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(*which: str, environment: bool = False) -> Any:
        return asked(*which)

    asked: Callable[..., Any] = toolhost.ps
    monkeypatch.setattr(toolhost, "ps", hidden)


def started(pid: int) -> int:
    found = toolhost.look_by_ps(pid)
    assert found is not None
    return int(found[1])


def test_a_commands_processes_are_those_that_proc_tells(tree: dict[str, int]):
    shell = tree["shell"]
    by_proc = toolhost.processes_in_proc(shell, COOKIE + b"\0", toolhost.start_time(shell))
    by_ps = toolhost.processes_by_ps(shell, COOKIE + b"\0", started(shell))
    assert sorted(by_proc) == by_ps == sorted(tree.values())
    # A longer attempt's cookie is another one.
    assert toolhost.processes_by_ps(0, COOKIE[:-1] + b"\0", 0) == []


def test_where_environments_are_hidden_the_group_is_found_still(
    tree: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    shell = tree["shell"]
    hide_environments(monkeypatch)
    found = toolhost.processes_by_ps(shell, COOKIE, started(shell))
    # The orphan in another session is the one that escapes there (docs/security.md).
    assert found == sorted([shell, tree["inner"]])
    assert toolhost.processes_by_ps(0, COOKIE, 0) == []


def test_a_group_id_that_was_given_to_another_leader_leads_to_nobody(
    tree: dict[str, int],
):
    shell = tree["shell"]
    assert (
        toolhost.processes_by_ps(shell, b"", started(shell) - 3) == []
    )  # beyond what `ps` may be off by
    assert toolhost.processes_by_ps(shell, b"", started(shell)) == sorted([shell, tree["inner"]])


def test_a_list_without_ourselves_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolhost, "ps", lambda *_, **__: [])
    with pytest.raises(OSError, match="ps lists no processes"):
        toolhost.processes_by_ps(0, COOKIE, 0)


def test_start_times_grow_with_time():
    dates = [
        b"Thu Dec 31 23:59:59 2026",
        b"Fri Jan  1 00:00:00 2027",
        b"Sun Feb 28 23:59:59 2027",
        b"Mon Mar  1 00:00:01 2027",
        b"Mon Mar  1 00:01:00 2027",
    ]
    seconds = [toolhost.seconds_of(date.split()) for date in dates]
    assert seconds == sorted(set(seconds))


def test_a_limit_is_at_most_what_may_be_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1 << 20, 1 << 20))
    assert toolhost.Limits({"file_mb": 5}).pairs == [(resource.RLIMIT_FSIZE, 1 << 20)]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1 << 20, resource.RLIM_INFINITY))
    assert toolhost.Limits({"file_mb": 5}).pairs == [(resource.RLIMIT_FSIZE, 5 << 20)]


def test_a_limit_that_the_system_refuses_is_a_fault_on_linux_only(
    monkeypatch: pytest.MonkeyPatch,
):
    limits = toolhost.Limits({"memory_mb": 5})

    def refuse(_kind: int, _pair: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    limits.set = refuse
    with pytest.raises(OSError, match="exceeds maximum"):
        limits.apply()
    monkeypatch.setattr(toolhost.sys, "platform", "darwin")
    limits.apply()


class TestCompiled:
    @pytest.fixture
    def source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = tmp_path / "program.py"
        path.write_text("print('one')\n")
        monkeypatch.setattr(fencepost.toolhost, "source_path", lambda: path)
        return path

    def said(self) -> str:
        program = fencepost.toolhost.compiled_path()
        argv = [sys.executable, "-I", "-S", str(program)]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def test_it_is_always_of_the_present_source(self, source: Path):
        assert self.said() == "one\n"
        made = fencepost.toolhost.compiled_path().stat().st_ino
        assert fencepost.toolhost.compiled_path().stat().st_ino == made  # and made once
        source.write_text("print('two!')\n")
        assert self.said() == "two!\n"

    def test_where_nothing_can_be_written_it_is_the_source(self, source: Path):
        (source.parent / "__pycache__").write_text("in the way")
        assert fencepost.toolhost.compiled_path() == source
        assert self.said() == "one\n"
