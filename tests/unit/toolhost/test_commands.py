"""Commands: what their receipts say, what ends them, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.toolhost.driver import Disk, Toolhost, wait_until

Start = Callable[..., Toolhost]

BWRAP = [
    "bwrap",
    "--die-with-parent",
    "--unshare-pid",
    "--ro-bind",
    "/",
    "/",
    "--dev",
    "/dev",
    "--proc",
    "/proc",
]
BWRAP_RW = [*BWRAP, "--bind", "{workspace}", "{workspace}", "--chdir", "{cwd}"]
BWRAP_RO = [*BWRAP, "--ro-bind", "{workspace}", "{workspace}", "--chdir", "{cwd}"]
needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed"
)

# Leaves a process in another session that would write later, and one in the group.
STUBBORN = (
    "echo $$ > pid; (setsid sh -c 'echo $$ > pid2; sleep 60; touch PROOF2' &) ;"
    " sh -c 'echo $$ > pid3; sleep 60; touch PROOF' & wait; sleep 60"
)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def pids_of(disk: Disk) -> list[int]:
    names = ("pid", "pid2", "pid3")
    paths = [disk.workspace / name for name in names]
    wait_until(lambda: all(path.exists() and path.read_text().endswith("\n") for path in paths))
    return [int(path.read_text()) for path in paths]


def start_command(
    host: Toolhost, fence: dict[str, Any], shell: str = STUBBORN, **more: Any
) -> None:
    host.send_call("apply", fence, "run_command", {"shell": shell, **more})


@pytest.mark.parametrize("prefix", [[], pytest.param(BWRAP_RW, marks=needs_bwrap)])
def test_a_command_says_what_it_did(start: Start, disk: Disk, prefix: list[str]):
    host = start("--exec-prefix", json.dumps(prefix))
    host.mark()
    (disk.workspace / "sub").mkdir()
    args = {
        "argv": ["sh", "-c", 'cat; pwd; echo "$GREETING" >&2; touch made; exit 3'],
        "cwd": "sub",
        "env": {"GREETING": "hällo"},
        "stdin": "from stdin\n",
    }
    receipt = host.apply("s1.1", "run_command", args)
    assert receipt["verdict"] == "applied"
    assert receipt["outcome"] == "failed"
    result = receipt["result"]
    assert result["exit_code"] == 3
    assert result["stdout"] == f"from stdin\n{os.path.realpath(disk.workspace / 'sub')}\n"
    assert result["stderr"] == "hällo\n"
    assert result["timed_out"] is False
    assert (disk.workspace / "sub" / "made").exists()
    assert host.apply("s2.1", "run_command", {"argv": ["true"]})["outcome"] == "ok"
    assert [r["k"] for r in disk.journal()] == ["opened", "begun", "done", "begun", "done"]


def test_long_output_is_cut_in_the_middle_and_says_so(host: Toolhost):
    shell = "printf begin; head -c 200000 /dev/zero | tr '\\0' x; printf end; echo é >&2"
    result = host.apply("s1.1", "run_command", {"shell": shell, "output_max_bytes": 1000})["result"]
    assert result["stdout"].startswith("beginxxx")
    assert result["stdout"].endswith("xxxend")
    assert result["stdout_cut"] == 200_008 - 1000
    assert f"[{result['stdout_cut']} bytes cut]" in result["stdout"]
    assert result["stderr"] == "é\n"
    assert result["stderr_cut"] == 0


def test_a_program_that_cannot_be_started_is_a_failed_command(host: Toolhost):
    receipt = host.apply("s1.1", "run_command", {"argv": ["no-such-program"]})
    assert (receipt["verdict"], receipt["outcome"]) == ("applied", "failed")
    assert receipt["result"]["exit_code"] == 127
    assert "cannot start" in receipt["result"]["stderr"]


def test_a_command_killed_by_a_signal_says_which(host: Toolhost):
    receipt = host.apply("s1.1", "run_command", {"shell": "kill -9 $$"})
    assert receipt["outcome"] == "failed"
    assert receipt["result"]["signal"] == 9
    assert "exit_code" not in receipt["result"]


def test_a_command_past_its_time_is_killed_with_its_whole_group(host: Toolhost, disk: Disk):
    fence = disk.fence("s1.1")
    start_command(host, fence, timeout_ms=1500)
    pids = pids_of(disk)
    receipt = host.receipt(fence)
    assert (receipt["verdict"], receipt["outcome"]) == ("applied", "failed")
    assert receipt["result"]["timed_out"] is True
    assert not any(alive(pid) for pid in pids)


def test_what_a_command_leaves_in_the_background_is_killed_and_told(host: Toolhost, disk: Disk):
    shell = "sh -c 'echo $$ > pid; sleep 60; touch PROOF' & (setsid sh -c 'echo $$ > pid2; sleep 60' &); sleep 0.3"
    receipt = host.apply("s1.1", "run_command", {"shell": shell})
    assert receipt["outcome"] == "ok"
    assert receipt["result"]["background_killed"] >= 2
    for name in ("pid", "pid2"):
        assert not alive(int((disk.workspace / name).read_text()))
    assert "background_killed" not in host.apply("s2.1", "run_command", {"shell": "true"})["result"]


def test_the_frames_time_limit_counts_too(host: Toolhost, disk: Disk):
    fence = disk.fence("s1.1")
    host.send_call("apply", fence, "run_command", {"shell": "sleep 60"}, timeout_ms=100)
    assert host.receipt(fence)["result"]["timed_out"] is True


def test_s229_a_duplicate_of_a_running_command_is_told_so_and_a_revocation_kills_it(
    start: Start, disk: Disk
):
    host, other = start(), start()
    host.mark()
    fence = disk.fence("s1.1")
    start_command(host, fence)
    pids = pids_of(disk)
    for asked in (host, other):
        start_command(asked, fence)
        assert asked.receipt(fence)["verdict"] == "running"
    assert all(alive(pid) for pid in pids)
    revoked = host.revoke("s1.1", no=fence["no"])
    assert not any(alive(pid) for pid in pids)
    # It began, so nobody can say that it did nothing.
    assert revoked["verdict"] == "indeterminate"
    assert host.receipt(fence)["verdict"] == "indeterminate"
    assert not (disk.workspace / "PROOF").exists()
    start_command(host, fence)
    assert host.receipt(fence)["verdict"] == "indeterminate"
    assert host.write("s2.1", "a", "x")["verdict"] == "applied"


def test_s229_a_revocation_through_another_toolhost_kills_it_first(start: Start, disk: Disk):
    host, other = start(), start()
    host.mark()
    fence = disk.fence("s1.1")
    start_command(host, fence)
    pids = pids_of(disk)
    revoked = other.revoke("s1.1", no=fence["no"])
    assert revoked["verdict"] == "indeterminate"
    assert not any(alive(pid) for pid in pids)
    told = host.receipt(fence)
    assert (told["verdict"], told["reason"]) == ("indeterminate", "revoked")
    kinds = [r["k"] for r in disk.journal()]
    assert kinds.count("done") == 0
    assert "broken" in kinds


def test_s184_a_cancelled_command_is_answered_only_when_its_group_is_gone(
    host: Toolhost, disk: Disk
):
    fence = disk.fence("s1.1")
    start_command(host, fence, "trap '' TERM INT HUP; echo $$ > pid; sleep 3; touch PROOF")
    wait_until(lambda: (disk.workspace / "pid").exists())
    host.revoke("s1.1", no=fence["no"])
    assert not alive(int((disk.workspace / "pid").read_text()))
    time.sleep(3.2)
    assert not (disk.workspace / "PROOF").exists()


def test_while_a_command_runs_everything_else_is_served(start: Start, disk: Disk):
    host = start("--heartbeat-ms", "50")
    host.mark()
    fence, queued = disk.fence("s1.1"), disk.fence("s2.1")
    start_command(host, fence, "while [ ! -e go ]; do sleep 0.02; done")
    host.send_call("apply", queued, "write_file", {"path": "after", "content": "x"})
    wait_until(
        lambda: (
            host.pump(0.1) and bool(host.heartbeats) and host.heartbeats[-1]["running"] == ["s1.1"]
        )
    )
    (disk.workspace / "seen").write_text("x")
    assert host.good("read_file", {"path": "seen"})["content"] == "x"
    assert host.revoke("s9.1")["verdict"] == "revoked"
    assert host.stat()["queued"] == 1
    assert not (disk.workspace / "after").exists()
    (disk.workspace / "go").write_text("")
    assert host.receipt(fence)["outcome"] == "ok"
    assert host.receipt(queued)["verdict"] == "applied"


def test_s200_a_new_session_ends_the_old_toolhosts_command_before_it_opens(
    start: Start, disk: Disk
):
    old, new = start(), start()
    old.mark(epoch=7)
    fence = disk.fence("s1.1")
    start_command(old, fence)
    pids = pids_of(disk)
    marked = new.mark(epoch=8, session="B", nonce="N8")
    assert marked["k"] == "marked"
    assert marked["ended"] == [pids[0]]
    assert not any(alive(pid) for pid in pids)
    told = old.receipt(fence)
    assert (told["verdict"], told["reason"]) == ("indeterminate", "ended")
    refused = old.write("s2.1", "a", "old")
    assert (refused["verdict"], refused["reason"]) == ("refused", "stale_epoch")
    assert not (disk.workspace / "a").exists()
    again = new.apply(disk.fence("s1.2", epoch=8, session="B"), "run_command", {"shell": STUBBORN})
    assert again["verdict"] == "indeterminate"


@pytest.mark.parametrize("prefix", [[], pytest.param(BWRAP_RW, marks=needs_bwrap)])
def test_s200_a_stopped_toolhost_that_holds_the_lock_is_ended(
    start: Start, disk: Disk, prefix: list[str]
):
    old, new = start("--exec-prefix", json.dumps(prefix)), start()
    old.mark(epoch=7)
    fence = disk.fence("s1.1")
    start_command(old, fence, "echo x > started; sleep 60; touch PROOF")
    wait_until(lambda: (disk.workspace / "started").exists())
    old.signal(signal.SIGSTOP)
    begun = [r for r in disk.journal() if r["k"] == "begun"]
    marked = new.mark(epoch=8, session="B", nonce="N8", timeout_ms=20_000)
    assert marked["k"] == "marked"
    assert marked["ended"] == [begun[0]["pg"]]
    assert not alive(begun[0]["pg"])
    old.signal(signal.SIGCONT)
    assert old.wait_dead() == -signal.SIGKILL
    receipt = new.write("s2.1", "a", "x", epoch=8, session="B")
    assert receipt["verdict"] == "applied"


def test_a_late_mark_of_an_old_gateway_ends_nothing(start: Start, disk: Disk):
    host, late = start(), start()
    host.mark(epoch=8, nonce="N8")
    fence = disk.fence("s1.1", epoch=8)
    start_command(host, fence, "while [ ! -e go ]; do sleep 0.02; done")
    assert late.mark(epoch=7, nonce="N7", session="Z")["reason"] == "stale_epoch"
    assert late.mark(epoch=8, nonce="other", session="Z")["reason"] == "other_nonce"
    (disk.workspace / "go").write_text("")
    assert host.receipt(fence)["outcome"] == "ok"


def test_a_new_session_through_the_same_toolhost_ends_its_command(host: Toolhost, disk: Disk):
    fence = disk.fence("s1.1")
    start_command(host, fence)
    pids = pids_of(disk)
    assert host.mark(session="A")["ended"] == []  # the same session: nothing former to end
    assert all(alive(pid) for pid in pids)
    assert host.mark(session="B")["ended"] == [pids[0]]
    assert not any(alive(pid) for pid in pids)
    assert host.receipt(fence)["reason"] == "ended"


def test_a_lost_grant_ends_the_running_command(host: Toolhost, disk: Disk):
    fence = disk.fence("s1.1")
    host.send({"k": "grant", "ms": 60_000})
    start_command(host, fence)
    pids = pids_of(disk)
    host.send({"k": "grant", "ms": 100})
    receipt = host.receipt(fence)
    assert (receipt["verdict"], receipt["reason"]) == ("indeterminate", "grant_expired")
    assert not any(alive(pid) for pid in pids)


def test_the_end_of_the_stream_ends_every_tool(host: Toolhost, disk: Disk):
    start_command(host, disk.fence("s1.1"))
    pids = pids_of(disk)
    assert host.close_input() == 0
    assert not any(alive(pid) for pid in pids)
    assert [r["k"] for r in disk.journal()][-1] == "broken"


def test_sigterm_ends_every_tool(host: Toolhost, disk: Disk):
    start_command(host, disk.fence("s1.1"))
    pids = pids_of(disk)
    host.signal(signal.SIGTERM)
    assert host.wait_dead() == 143
    assert not any(alive(pid) for pid in pids)


def test_s204_a_command_of_a_killed_toolhost_is_indeterminate_and_not_run_again(
    start: Start, disk: Disk
):
    first = start()
    first.mark()
    fence = disk.fence("s1.1")
    start_command(first, fence)
    pids = pids_of(disk)
    os.kill(first.pid, signal.SIGKILL)
    first.wait_dead()
    second = start()
    start_command(second, fence)
    receipt = second.receipt(fence)
    assert receipt["verdict"] == "indeterminate"
    assert not any(alive(pid) for pid in pids)
    other_attempt = disk.fence("s1.2")
    start_command(second, other_attempt)
    assert second.receipt(other_attempt)["verdict"] == "indeterminate"
    assert [r["k"] for r in disk.journal()] == ["opened", "begun", "broken"]
    assert second.revoke("s1.1", no=fence["no"])["verdict"] == "indeterminate"


@needs_bwrap
def test_s213_a_command_declared_read_only_cannot_write(start: Start, disk: Disk):
    host = start("--exec-prefix-ro", json.dumps(BWRAP_RO))
    host.mark()
    (disk.workspace / "a").write_text("kept")
    assert host.hello()["readonly_commands"] is True
    head, result = host.read("run_command", {"shell": "cat a; echo bad > a; touch b"})
    assert head["ok"]
    assert (head["epoch"], head["session"], head["nonce"]) == (7, "A", "N7")
    assert result["stdout"] == "kept"
    assert result["exit_code"] != 0
    assert "Read-only" in result["stderr"]
    assert os.listdir(disk.workspace) == ["a"]
    assert (disk.workspace / "a").read_text() == "kept"
    # The same command, fenced as mutating, writes.
    assert host.apply("s1.1", "run_command", {"shell": "echo good > a"})["outcome"] == "ok"
    assert (disk.workspace / "a").read_text() == "good\n"


def test_s213_without_a_read_only_view_such_a_command_is_not_run(host: Toolhost, disk: Disk):
    head, result = host.read("run_command", {"shell": "touch b"})
    assert not head["ok"]
    assert result["reason"] == "unsupported"
    assert os.listdir(disk.workspace) == []


@needs_bwrap
def test_a_read_only_command_past_its_time_is_ended(start: Start):
    host = start("--exec-prefix-ro", json.dumps(BWRAP_RO))
    host.mark()
    head, result = host.read("run_command", {"shell": "sleep 60"}, timeout_ms=200)
    assert head["ok"]
    assert result["timed_out"] is True


def test_limits_hold_for_tools_and_not_for_the_toolhost(start: Start, disk: Disk):
    host = start("--limits", '{"file_mb": 1, "memory_mb": 4000}')
    host.mark()
    receipt = host.apply(
        "s1.1", "run_command", {"shell": "ulimit -f; head -c 3000000 /dev/zero > big"}
    )
    assert receipt["outcome"] == "failed"
    assert (disk.workspace / "big").stat().st_size <= 1 << 20
    content = "x" * 2_000_000
    assert host.write("s2.1", "large", content)["outcome"] == "ok"


def test_the_environment_of_tools_is_the_given_one(start: Start):
    host = start("--env", '{"ONE": "1"}', env={"SECRET_OF_THE_GATEWAY": "x"})
    host.mark()
    out = host.apply("s1.1", "run_command", {"argv": ["env"]})["result"]["stdout"]
    assert "ONE=1\n" in out
    assert "SECRET" not in out


def test_a_migration_goes_up_and_its_undo_goes_down(host: Toolhost, disk: Disk):
    args = {"name": "m1", "up": {"shell": "echo up > db"}, "down": {"argv": ["rm", "db"]}}
    assert host.apply("s1.1", "run_migration", args)["outcome"] == "ok"
    assert (disk.workspace / "db").read_text() == "up\n"
    undone = host.undo("s1.u", of="s1.1")
    assert (undone["verdict"], undone["outcome"], undone["direction"]) == ("applied", "ok", "undo")
    assert not (disk.workspace / "db").exists()
    assert host.undo("s1.u2", of="s1.1")["result"] == {"already_undone": True}


def test_a_callers_own_undo_command_is_fenced_and_runs_once(host: Toolhost, disk: Disk):
    host.apply("s1.1", "run_command", {"shell": "echo x >> log"})
    refused = host.undo("s1.u0", of="s1.1")
    assert (refused["verdict"], refused["reason"]) == ("refused", "invalid_arguments")
    undo = disk.fence("s1.u1", direction="undo")
    for _ in range(2):
        host.send_call("undo", undo, "run_command", {"shell": "echo undone >> log"}, of="s1.1")
        receipt = host.receipt(undo)
        assert (receipt["verdict"], receipt["outcome"], receipt["of"]) == ("applied", "ok", "s1.1")
    assert (disk.workspace / "log").read_text() == "x\nundone\n"
    nothing = host.undo("s2.u1", of="s2.1", tool="run_command", args={"shell": "touch z"})
    assert (nothing["verdict"], nothing["reason"]) == ("refused", "nothing_to_undo")
    assert not (disk.workspace / "z").exists()


def test_an_undo_that_fails_has_not_taken_back(host: Toolhost, disk: Disk):
    args = {
        "name": "m1",
        "up": {"shell": "echo up > db"},
        "down": {"shell": "echo try >> log; test -e ok && rm db"},
    }
    host.apply("s1.1", "run_migration", args)
    first = host.undo("s1.u1", of="s1.1")
    assert (first["verdict"], first["outcome"]) == ("applied", "failed")
    (disk.workspace / "ok").write_text("")
    second = host.undo("s1.u2", of="s1.1")
    assert (second["verdict"], second["outcome"]) == ("applied", "ok")
    assert (disk.workspace / "log").read_text() == "try\ntry\n"
    assert not (disk.workspace / "db").exists()


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({}, "argv"),
        ({"argv": ["true"], "shell": "true"}, "argv"),
        ({"argv": "true"}, "argv"),
        ({"argv": []}, "argv"),
        ({"argv": [1]}, "argv"),
        ({"argv": ["a\0b"]}, "argv"),
        ({"shell": ""}, "shell"),
        ({"shell": 5}, "shell"),
        ({"shell": "true", "cwd": "../x"}, "cwd"),
        ({"shell": "true", "cwd": "missing"}, "cwd"),
        ({"shell": "true", "cwd": "/"}, "cwd"),
        ({"shell": "true", "env": {"A": 1}}, "env"),
        ({"shell": "true", "env": {"A=B": "1"}}, "env"),
        ({"shell": "true", "stdin": 4}, "stdin"),
        ({"shell": "true", "timeout_ms": 0}, "timeout_ms"),
        ({"shell": "true", "timeout_ms": True}, "timeout_ms"),
        ({"shell": "true", "output_max_bytes": -1}, "output_max_bytes"),
        ({"shell": "true", "sudo": True}, "sudo"),
    ],
)
def test_wrong_arguments_of_a_command_name_the_field(
    host: Toolhost, disk: Disk, args: dict[str, Any], field: str
):
    receipt = host.apply("s1.1", "run_command", args)
    assert (receipt["verdict"], receipt["reason"]) == ("refused", "invalid_arguments")
    assert receipt["detail"].startswith(field + ":")
    assert [r["k"] for r in disk.journal()] == ["opened"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": None}, "name"),
        ({"name": ""}, "name"),
        ({"up": "x"}, "up"),
        ({"down": {}}, "down.argv"),
        ({"down": {"shell": "true", "cwd": "."}}, "down.cwd"),
    ],
)
def test_wrong_arguments_of_a_migration_name_the_field(
    host: Toolhost, change: dict[str, Any], field: str
):
    good = {"name": "m", "up": {"shell": "true"}, "down": {"shell": "true"}}
    receipt = host.apply("s1.1", "run_migration", {**good, **change})
    assert (receipt["verdict"], receipt["reason"]) == ("refused", "invalid_arguments")
    assert receipt["detail"].startswith(field + ":")
    assert host.apply("s1.2", "run_migration", good)["verdict"] == "applied"
