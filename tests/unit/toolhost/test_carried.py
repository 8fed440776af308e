"""A step that was carried into a new attempt is on the disk under its older one."""

from collections.abc import Callable

import pytest

from tests.unit.toolhost.driver import Disk, Toolhost
from tests.unit.toolhost.test_crashes import crashing, run_to_the_point


def carried(host: Toolhost, disk: Disk) -> None:
    """`s1.1` wrote, its receipt was lost, and session B carries the step into `s1.2`."""
    host.write("s1.1", "a", "once", no=3)
    host.mark(session="B")


def test_a_revoked_attempt_that_an_older_one_preceded_is_done_already(host: Toolhost, disk: Disk):
    carried(host, disk)
    late = host.revoke("s1.2", session="B", no=4)
    assert (late["verdict"], late["of"]) == ("already_done", "s1.1")
    assert late["result"]["attempt"] == "s1.1"
    # Asked again it says the same, and the revoked attempt itself is refused.
    assert host.revoke("s1.2", session="B", no=4)["verdict"] == "already_done"
    assert host.write("s1.2", "a", "once", session="B", no=4)["reason"] == "revoked"


def test_without_an_older_attempt_it_never_began(host: Toolhost, disk: Disk):
    host.mark(session="B")
    late = host.revoke("s1.2", session="B", no=4)
    assert (late["verdict"], late["reason"]) == ("revoked", "never_began")


def test_what_was_carried_is_undone_by_the_attempt_that_wrote(host: Toolhost, disk: Disk):
    carried(host, disk)
    late = host.revoke("s1.2", session="B", no=4)
    undone = host.undo("s1.2:u5", late["of"], session="B", no=5)
    assert (undone["verdict"], undone["outcome"]) == ("applied", "ok")
    assert not (disk.workspace / "a").exists()


def test_an_undo_under_a_new_session_is_not_answered_with_the_old_receipt(
    host: Toolhost, disk: Disk
):
    host.write("s1.1", "a", "once", no=3)
    first = host.undo("s1.1:u4", "s1.1", no=4)
    assert first["outcome"] == "ok"
    host.mark(session="B")
    again = host.undo("s1.1:u5", "s1.1", session="B", no=5)
    assert (again["verdict"], again["outcome"]) == ("applied", "ok")
    assert (again["session"], again["no"]) == ("B", 5)


def test_what_was_carried_and_undone_is_called_undone(host: Toolhost, disk: Disk):
    carried(host, disk)
    late = host.revoke("s1.2", session="B", no=4)
    host.undo("s1.2:u5", late["of"], session="B", no=5)
    # The answer was lost, and the session too: the next one asks again.
    host.mark(session="C")
    again = host.revoke("s1.2", session="C", no=6)
    assert (again["verdict"], again["reason"]) == ("revoked", "undone")


def test_an_undo_that_failed_leaves_what_was_carried(host: Toolhost, disk: Disk):
    carried(host, disk)
    late = host.revoke("s1.2", session="B", no=4)
    failed = host.undo(
        "s1.2:u5", late["of"], session="B", no=5, tool="run_command", args={"shell": "exit 3"}
    )
    assert failed["outcome"] == "failed"
    host.mark(session="C")
    again = host.revoke("s1.2", session="C", no=6)
    assert (again["verdict"], again["of"]) == ("already_done", "s1.1")


def test_an_undo_that_left_no_record_leaves_what_was_carried(host: Toolhost, disk: Disk):
    carried(host, disk)
    late = host.revoke("s1.2", session="B", no=4)
    undo = disk.fence("s1.2:u5", session="B", direction="undo", no=5)
    host.send_call("undo", undo, "run_command", {"shell": "sleep 60"}, of=late["of"])
    host.mark(session="C")  # ends it
    again = host.revoke("s1.2", session="C", no=6)
    assert (again["verdict"], again["of"]) == ("already_done", "s1.1")


@pytest.mark.parametrize("point", ["begun", "effect", "before_done"])
def test_an_undo_that_was_rolled_back_leaves_what_was_carried(
    start: Callable[..., Toolhost], disk: Disk, point: str
):
    host = start()
    host.mark()
    carried(host, disk)
    of = host.revoke("s1.2", session="B", no=4)["of"]
    host.end()
    undo = disk.fence("s1.2:u5", session="B", direction="undo", no=5)
    assert run_to_the_point(crashing(start, disk, point), undo, "undo", ("", {}), of=of)
    late = start()
    late.mark(session="C")
    again = late.revoke("s1.2", session="C", no=6)
    assert (again["verdict"], again["of"]) == ("already_done", "s1.1")
    assert (disk.workspace / "a").read_text() == "once"
