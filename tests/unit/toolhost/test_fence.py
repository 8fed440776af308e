"""The fence under the tool: who may write, what a repetition gets, what a revocation says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fencepost.toolhost import toolhost as program

from tests.unit.toolhost.driver import Disk, Toolhost, digest, wait_until

Start = Callable[..., Toolhost]


def test_hello_tells_an_unmarked_disk(start: Start):
    hello = start("--heartbeat-ms", "50").hello()
    assert hello["marker"] is None
    assert hello["journal_seq"] == 0
    assert hello["instance"] == "i-1"
    assert hello["protocol"] == 1
    assert hello["readonly_commands"] is False


def test_nothing_is_written_on_a_disk_without_a_generation(start: Start, disk: Disk):
    host = start()
    receipt = host.write("s1.1", "a", "x")
    assert (receipt["verdict"], receipt["reason"]) == ("refused", "no_generation")
    assert receipt["epoch"] == 0
    assert os.listdir(disk.workspace) == []
    host.mark()
    assert host.write("s1.2", "a", "x")["verdict"] == "applied"


@pytest.mark.parametrize(
    ("epoch", "session", "reason"),
    [(6, "A", "stale_epoch"), (8, "A", "stale_epoch"), (7, "B", "stale_session"), (7, "A", None)],
)
def test_s013_a_call_of_another_generation_is_refused_before_the_disk_is_touched(
    host: Toolhost, disk: Disk, epoch: int, session: str, reason: str | None
):
    receipt = host.write("s1.1", "a.txt", "x", epoch=epoch, session=session)
    if reason is None:
        assert receipt["verdict"] == "applied"
        assert (disk.workspace / "a.txt").read_text() == "x"
    else:
        assert (receipt["verdict"], receipt["reason"]) == ("refused", reason)
        assert receipt["epoch"] == 7
        assert os.listdir(disk.workspace) == []
        assert [r["k"] for r in disk.journal()] == ["opened"]


@pytest.mark.parametrize("epoch", [True, 7.0, "7", None, 0, -7])
def test_an_epoch_is_an_integer_and_nothing_like_one(host: Toolhost, disk: Disk, epoch: Any):
    fence = {**disk.fence("s1.1"), "epoch": epoch}
    host.send_call("apply", fence, "write_file", {"path": "a", "content": "x"})
    head, _ = host.expect(lambda head: head["k"] == "refused")
    assert head["reason"] == "invalid_arguments"
    assert "epoch" in head["detail"]
    assert os.listdir(disk.workspace) == []


def test_a_receipt_says_all_that_the_join_needs(host: Toolhost, disk: Disk):
    args = b'{"path": "d/a.txt", "content": "hello"}'
    receipt = host.apply(disk.fence("s1.1", no=12), "write_file", args)
    marker = {"epoch": 7, "session": "A", "nonce": "N7", "instance": "i-1"}
    assert receipt == {
        "sandbox": "sbx",
        "step": "s1",
        "attempt": "s1.1",
        "direction": "apply",
        "no": 12,
        "verdict": "applied",
        **marker,
        "after": marker,
        "tool": "write_file",
        "digest": digest(args),
        "outcome": "ok",
        "changes": [
            {"path": "d", "before": None, "after": "dir"},
            {"path": "d/a.txt", "before": None, "after": digest(b"hello")},
        ],
        "result": None,
        "journal_seq": 1,
        "of": "",
        "reason": "",
        "detail": "",
    }


def test_s017_the_same_fence_again_gets_the_first_receipt_byte_for_byte(host: Toolhost, disk: Disk):
    fence = disk.fence("s1.1")
    args = {"path": "a", "content": "one"}
    host.send_call("apply", fence, "write_file", args)
    first = host.receipt_bytes(fence)
    (disk.workspace / "a").write_text("changed since")
    host.send_call("apply", fence, "write_file", args)
    assert host.receipt_bytes(fence) == first
    assert (disk.workspace / "a").read_text() == "changed since"
    assert host.stat()["counters"]["applied"] == 1


def test_s017_a_new_toolhost_on_the_disk_gives_the_first_receipt_too(start: Start, disk: Disk):
    fence = disk.fence("s1.1")
    args = {"path": "a", "content": "one"}
    with_first = start()
    with_first.mark()
    with_first.send_call("apply", fence, "write_file", args)
    first = with_first.receipt_bytes(fence)
    assert with_first.close_input() == 0
    second = start()
    assert second.hello()["journal_seq"] == 1
    second.send_call("apply", fence, "write_file", args)
    assert second.receipt_bytes(fence) == first


def test_s192_a_paused_gateways_write_is_refused_after_another_attached(start: Start, disk: Disk):
    old, new = start(), start()
    old.mark(session="A")
    assert new.mark(session="B")["k"] == "marked"
    late = old.write("s1.1", "a", "late", session="A")
    assert (late["verdict"], late["reason"]) == ("refused", "stale_session")
    assert new.write("s1.2", "a", "new", session="B")["verdict"] == "applied"
    assert (disk.workspace / "a").read_text() == "new"


def test_s197_the_loser_that_writes_last_does_not_write(start: Start, disk: Disk):
    loser, winner = start(), start()
    loser.mark(epoch=7, session="A", nonce="N7")
    assert loser.write("s0.1", "a", "before")["verdict"] == "applied"
    winner.mark(epoch=8, session="B", nonce="N8")
    won = winner.write("s1.2", "a", "winner", epoch=8, session="B")
    assert won["verdict"] == "applied"
    lost = loser.write("s1.1", "a", "loser")
    assert (lost["verdict"], lost["reason"]) == ("refused", "stale_epoch")
    assert (disk.workspace / "a").read_text() == "winner"


def test_s199_a_warm_reopening_attests_what_the_disk_already_holds(start: Start, disk: Disk):
    old = start()
    old.mark(epoch=7, session="A", nonce="N7")
    applied = old.write("s1.1", "a", "once")
    inode = (disk.workspace / "a").stat().st_ino
    new = start()
    new.mark(epoch=8, session="B", nonce="N8")
    attested = new.write("s1.2", "a", "once", epoch=8, session="B")
    assert attested["verdict"] == "attested"
    assert attested["of"] == "s1.1"
    assert attested["epoch"] == 8
    assert attested["session"] == "B"
    assert attested["journal_seq"] == 2
    for name in ("changes", "outcome", "result", "digest"):
        assert attested[name] == applied[name]
    assert (disk.workspace / "a").stat().st_ino == inode
    # Attesting an attestation names the attempt that wrote; other bytes are another apply.
    assert new.write("s1.3", "a", "once", epoch=8, session="B")["of"] == "s1.1"
    assert new.write("s1.4", "a", "other", epoch=8, session="B")["verdict"] == "applied"
    assert (disk.workspace / "a").read_text() == "other"


def test_s203_a_revoked_fence_is_refused_when_it_comes_late(host: Toolhost, disk: Disk):
    fence = disk.fence("s1.1", no=5)
    revoked = host.revoke("s1.1", no=5)
    assert (revoked["verdict"], revoked["reason"]) == ("revoked", "never_began")
    assert revoked["direction"] == "revoke"
    late = host.apply(fence, "write_file", {"path": "a", "content": "late"})
    assert (late["verdict"], late["reason"]) == ("refused", "revoked")
    assert os.listdir(disk.workspace) == []
    assert host.revoke("s1.1", no=5)["verdict"] == "revoked"
    assert host.write("s1.2", "a", "next")["verdict"] == "applied"


def test_s203_a_revocation_survives_the_toolhost(start: Start, disk: Disk):
    fence = disk.fence("s1.1", no=5)
    first = start()
    first.mark()
    first.revoke("s1.1", no=5)
    os.kill(first.pid, signal.SIGKILL)
    second = start()
    late = second.apply(fence, "write_file", {"path": "a", "content": "late"})
    assert (late["verdict"], late["reason"]) == ("refused", "revoked")


def test_a_revocation_that_comes_too_late_brings_the_receipt(host: Toolhost, disk: Disk):
    fence = disk.fence("s1.1", no=3)
    applied = host.apply(fence, "write_file", {"path": "a", "content": "x"})
    late = host.revoke("s1.1", no=3)
    assert late["verdict"] == "already_done"
    assert late["result"] == applied
    assert host.apply(fence, "write_file", {"path": "a", "content": "x"}) == applied


def test_a_revocation_of_another_epoch_is_refused(host: Toolhost):
    late = host.revoke("s1.1", epoch=6)
    assert (late["verdict"], late["reason"]) == ("refused", "stale_epoch")
    # An attempt of a former session can be revoked: only the planner can have asked for it.
    assert host.revoke("s1.1", session="Z")["verdict"] == "revoked"


def test_an_older_attempt_of_a_step_does_not_write_after_a_newer_one(host: Toolhost, disk: Disk):
    host.write("s1.2", "a", "newer", no=9)
    late = host.write("s1.1", "a", "older", no=8)
    assert (late["verdict"], late["reason"]) == ("refused", "revoked")
    assert (disk.workspace / "a").read_text() == "newer"


def test_arguments_that_do_not_have_their_digest_are_refused(host: Toolhost, disk: Disk):
    fence = disk.fence("s1.1")
    body = b'{"path": "a", "content": "x"}'
    host.send_call("apply", fence, "write_file", body, digest=digest(b"other"))
    receipt = host.receipt(fence)
    assert (receipt["verdict"], receipt["reason"]) == ("refused", "digest_mismatch")
    assert os.listdir(disk.workspace) == []
    host.send_call("apply", fence, "write_file", body, digest=digest(body))
    assert host.receipt(fence)["verdict"] == "applied"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"[" * 4096,
        b'{"epoch":true,"session":"A","nonce":"N"}',
        b'{"epoch":9007199254740992,"session":"A","nonce":"N"}',
        b'{"epoch":7}',
    ],
)
def test_a_marker_that_cannot_be_read_is_none(host: Toolhost, disk: Disk, raw: bytes):
    (disk.state / "marker.json").write_bytes(raw)
    assert host.hello()["marker"] is None
    receipt = host.write("s1.1", "a", "x")
    assert (receipt["verdict"], receipt["reason"]) == ("refused", "no_generation")
    (disk.state / "marker.json").write_bytes(b'{"epoch":7,"session":"A","nonce":"N7"}')
    assert host.write("s1.2", "a", "x")["verdict"] == "applied"


@pytest.mark.parametrize("kept", [1, 2])
def test_s205_a_journal_that_went_back_under_a_live_toolhost_ends_it(
    host: Toolhost, disk: Disk, kept: int
):
    journal, older = disk.state / "journal.jsonl", disk.state / "older"
    for number in (1, 2):
        assert host.write(f"s{number}.1", "a", str(number))["journal_seq"] == number
        if number == kept:
            older.write_bytes(journal.read_bytes())
    older.rename(journal)
    if kept == 2:
        assert host.write("s3.1", "a", "3")["journal_seq"] == 3
        return
    host.send_call("apply", disk.fence("s3.1"), "write_file", b"{}", digest=digest(b"{}"))
    assert host.wait_dead() == 4
    assert (disk.workspace / "a").read_text() == "2"


def test_a_start_in_a_sandbox_that_was_removed_brings_nothing_of_it_back(tmp_path: Path):
    gone = tmp_path / "gone"
    argv = [sys.executable, program.__file__, "--instance", "i", "--workspace", "."]
    ended = subprocess.run(
        [*argv, "--state", gone / "state"], input=b"", capture_output=True, check=False
    )
    assert ended.returncode == 4
    assert not gone.exists()
    gone.mkdir()
    control = subprocess.run(
        [*argv, "--state", gone / "state"],
        input=b"",
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    assert control.returncode == 0, control.stderr
    assert (gone / "state").is_dir()


def test_a_mark_goes_only_upwards(start: Start):
    host = start()
    assert host.mark(epoch=7, nonce="N7")["k"] == "marked"
    assert host.mark(epoch=6, nonce="N6")["reason"] == "stale_epoch"
    assert host.mark(epoch=7, nonce="other")["reason"] == "other_nonce"
    assert host.hello()["marker"] == {"epoch": 7, "session": "A", "nonce": "N7"}
    assert host.mark(epoch=7, nonce="N7", session="B")["k"] == "marked"
    assert host.mark(epoch=8, nonce="N8", session="B")["k"] == "marked"
    assert host.hello()["marker"] == {"epoch": 8, "session": "B", "nonce": "N8"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("epoch", True), ("epoch", 0), ("session", ""), ("nonce", 5), ("timeout_ms", 0)],
)
def test_a_malformed_mark_names_its_field(start: Start, field: str, value: Any):
    host = start()
    refused = host.mark(**{field: value})
    assert refused["k"] == "refused"
    assert refused["reason"] == "invalid_arguments"
    assert field in refused["detail"]
    assert host.hello()["marker"] is None


def test_a_fence_that_was_forgotten_is_too_old_and_not_applied_again(start: Start, disk: Disk):
    host = start()
    host.mark()
    first = disk.fence("s0.1", no=1)
    host.apply(first, "write_file", {"path": "first", "content": "x"})
    body = json.dumps({"path": "many", "content": "x"}).encode()
    count = 9000
    waiting = 0
    for number in range(2, count + 2):
        host.send_call("apply", disk.fence(f"s{number}.1", no=number), "write_file", body)
        waiting += 1
        while waiting - len(host.frames) > 64:
            host.pump(5)
        if len(host.frames) > 1000:
            waiting -= len(host.frames)
            host.frames.clear()
    last = disk.fence(f"s{count + 1}.1", no=count + 1)
    stored = host.receipt_bytes(last)
    host.frames.clear()
    stat = host.stat()
    assert stat["records"] == 4096
    assert stat["journal_seq"] == count + 1
    assert len(disk.journal()) < 2 * (2 * 4096 + 2)
    (disk.workspace / "first").unlink()
    for again in (host, start()):
        receipt = again.apply(first, "write_file", {"path": "first", "content": "x"})
        assert (receipt["verdict"], receipt["reason"]) == ("refused", "too_old")
        again.send_call("apply", last, "write_file", body)
        assert again.receipt_bytes(last) == stored
        assert again.stat()["journal_seq"] == count + 1
    assert not (disk.workspace / "first").exists()


def test_a_torn_last_record_is_not_believed_and_not_in_the_way(start: Start, disk: Disk):
    host = start()
    host.mark()
    fence = disk.fence("s1.1")
    host.apply(fence, "write_file", {"path": "a", "content": "x"})
    host.close_input()
    journal = disk.state / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-40])
    again = start()
    assert again.hello()["journal_seq"] == 0
    # done is torn: the attempt is rolled back and applied once more.
    receipt = again.apply(fence, "write_file", {"path": "a", "content": "x"})
    assert receipt["verdict"] == "applied"
    assert again.write("s2.1", "b", "y")["journal_seq"] == 2
    third = start()
    assert third.hello()["journal_seq"] == 2
    assert third.stat()["corrupt_records"] == 1


def test_two_toolhosts_take_turns_on_one_disk(start: Start, disk: Disk):
    hosts = [start(), start()]
    hosts[0].mark()
    fences = [disk.fence(f"s{n}.1") for n in range(200)]
    for n, fence in enumerate(fences):
        hosts[n % 2].send_call("apply", fence, "write_file", {"path": f"f{n}", "content": "x"})
    receipts = [hosts[n % 2].receipt(fence) for n, fence in enumerate(fences)]
    assert {receipt["verdict"] for receipt in receipts} == {"applied"}
    assert sorted(receipt["journal_seq"] for receipt in receipts) == list(range(1, 201))
    assert len(os.listdir(disk.workspace)) == 200


def test_without_a_new_grant_nothing_is_applied(host: Toolhost, disk: Disk):
    host.send({"k": "grant", "ms": 60_000})
    assert host.write("s1.1", "a", "x")["verdict"] == "applied"
    host.send({"k": "grant", "ms": 1})
    time.sleep(0.05)
    receipt = host.write("s2.1", "b", "x")
    assert (receipt["verdict"], receipt["reason"]) == ("refused", "grant_expired")
    assert not (disk.workspace / "b").exists()
    host.send({"k": "grant", "ms": 60_000})
    assert host.write("s2.2", "b", "x")["verdict"] == "applied"


def test_heartbeats_tell_the_marker_that_is_on_the_disk_now(start: Start):
    host, other = start("--heartbeat-ms", "30"), start()
    host.mark(epoch=7)
    wait_until(lambda: host.pump(0.1) and bool(host.heartbeats))
    assert host.heartbeats[-1]["epoch"] == 7
    other.mark(epoch=8, session="B", nonce="N8")
    other.write("s1.1", "a", "x", epoch=8, session="B")
    wait_until(lambda: host.pump(0.1) and host.heartbeats[-1]["journal_seq"] == 1)
    beat = host.heartbeats[-1]
    assert (beat["epoch"], beat["session"], beat["nonce"], beat["running"]) == (8, "B", "N8", [])


@pytest.mark.parametrize(
    "raw",
    [
        b"not json\n",
        b"[1]\n",
        b'{"k":"stat","n":-1}\n',
        b'{"k":"stat","n":true}\n',
        b"x" * 70_000,
        b'{"k":"apply","n":5}\nab',
    ],
)
def test_a_stream_that_lost_its_framing_ends_the_toolhost(start: Start, raw: bytes):
    host = start()
    host.hello()
    host.send_raw(raw)
    assert host.process.stdin is not None
    host.process.stdin.close()
    assert host.wait_dead() == 2


def test_an_unknown_frame_is_answered_and_the_stream_goes_on(start: Start):
    host = start()
    assert host.ask("dance")[0]["reason"] == "unknown_kind"
    assert host.hello()["k"] == "hello"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"attempt": "../x"}, "attempt"),
        ({"attempt": ""}, "attempt"),
        ({"sandbox": 5}, "sandbox"),
        ({"no": "1"}, "no"),
        ({"no": True}, "no"),
        ({"direction": "undo"}, "direction"),
        ({"session": None}, "session"),
    ],
)
def test_a_malformed_fence_names_its_field(
    host: Toolhost, disk: Disk, change: dict[str, Any], field: str
):
    fence = {**disk.fence("s1.1"), **change}
    head = {"k": "apply", "fence": fence, "step": "s1", "tool": "write_file", "digest": ""}
    host.send(head, b'{"path":"a","content":"x"}')
    refused, _ = host.expect(lambda head: head["k"] == "refused")
    assert refused["reason"] == "invalid_arguments"
    assert refused["detail"].startswith(field)
    assert os.listdir(disk.workspace) == []


@pytest.mark.parametrize(
    "options", [["--state"], ["--what", "x"], ["--limits", "[]"], ["--env", '{"a":1}']]
)
def test_a_wrong_command_line_is_refused(start: Start, options: list[str]):
    assert start(*options).wait_dead() == 1
