"""A step that was carried into a new attempt is on the disk under its older one."""

from tests.unit.toolhost.driver import Disk, Toolhost


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
