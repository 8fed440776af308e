"""What a new generation owes, how it gets it back, and what stops that."""

import random
from typing import Any

import msgspec
import pytest
from fencepost.core import limits
from fencepost.core.invariants import ShardAuditor
from fencepost.core.machine import Place
from fencepost.core.receipts import Change
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import inputs, orders, owed, transitions
from fencepost.core.sandbox.state import Checkpoint, Recovering

from tests.factories import Bench, external, kinds, manifest, only


def owing(*names: str, **spec: Any) -> Bench:
    """A sandbox whose disk is gone, with these steps committed on it."""
    bench = Bench().live(**spec)
    for name in names:
        bench.step(name)
        bench.answer(name)
    bench.cold()
    return bench


def phase(bench: Bench) -> str:
    recovering = bench.sandbox().recovering
    return "" if recovering is None else recovering.phase


def recovering(bench: Bench) -> Recovering:
    found = bench.sandbox().recovering
    assert found is not None
    return found


def replayed(bench: Bench) -> list[str]:
    return [entry.step for entry in bench.of_kind(e.Replayed)]


def stop(bench: Bench) -> e.RecoveryStopped:
    """The next replay comes to something else."""
    entry = bench.replay(outcome="failed")[-1]
    assert isinstance(entry, e.RecoveryStopped)
    return entry


def decide(bench: Bench, decision: str, **over: Any) -> list[Any]:
    body = {"decision": decision, "who": "me", "note": "looked", **over}
    return bench.command("recover", "r1", body)


# --- what owes --------------------------------------------------------------------------------------


def test_a_cold_disk_owes_what_was_committed_and_new_steps_wait() -> None:
    bench = owing("s1", "s2")
    opened = bench.of_kind(e.EpochOpened)[-1]
    assert (opened.disk, opened.owed, opened.recovering) == ("cold", 2, True)
    parked = only(bench.step("s3"))
    assert (type(parked), parked.reason) == (e.Parked, "recovering")


def test_a_first_disk_and_one_that_nothing_was_committed_on_owe_nothing() -> None:
    bench = Bench().live()
    assert not bench.of_kind(e.EpochOpened)[-1].recovering
    bench.cold()
    assert not bench.of_kind(e.EpochOpened)[-1].recovering
    assert kinds(bench.step("s1")) == ["fenced"]


def test_a_warm_disk_owes_nothing() -> None:
    bench = Bench().live()
    bench.step("s1")
    bench.answer("s1")
    bench.warm()
    opened = bench.of_kind(e.EpochOpened)[-1]
    assert (opened.owed, opened.recovering, bench.sandbox().recovering) == (0, False, None)


def test_external_effects_are_never_owed_and_never_applied_again() -> None:
    bench = Bench().live()
    bench.step("x1", external())
    bench.answer("x1")
    bench.step("s1")
    bench.answer("s1")
    bench.cold()
    assert bench.of_kind(e.EpochOpened)[-1].owed == 1
    bench.recover()
    assert replayed(bench) == ["s1"]


def test_the_owed_steps_are_applied_again_one_by_one_and_then_new_ones_are_fenced() -> None:
    bench = owing("s1", "s2")
    bench.step("s3")
    assert kinds(bench.recall()) == ["replaying"]
    assert bench.recall() == [], "one at a time"
    dispatch = only(bench.dispatches())
    replay = recovering(bench).replay
    assert replay is not None
    assert (dispatch.fence.direction, dispatch.fence.attempt) == ("replay", f"s1.1:r{replay.no}")
    assert (dispatch.step, dispatch.of, dispatch.effect) == ("s1", "s1.1", "workspace")
    assert kinds(bench.receive(bench.replay_receipt())) == ["replayed"]
    assert kinds(bench.replay()) == ["replaying", "replayed", "recovered"]
    assert bench.of_kind(e.Recovered)[-1].replayed == 2
    assert kinds(bench.tick()) == ["fenced"]
    assert bench.final("s1") == "committed", "never touched"


def test_s208_the_order_is_the_one_in_which_the_disk_saw_them() -> None:
    bench = Bench().live()
    bench.step("a")
    bench.step("b")
    late = bench.receipt("a", journal_seq=2)
    bench.answer("b", journal_seq=1)
    bench.receive(late)
    assert [x.step for x in bench.of_kind(e.Committed)] == ["b", "a"]
    bench.cold()
    bench.recover()
    assert replayed(bench) == ["b", "a"]
    # And where the ledger heard of them the other way round:
    bench = Bench().live()
    bench.step("a")
    bench.step("b")
    bench.answer("a", journal_seq=2)
    bench.answer("b", journal_seq=1)
    bench.cold()
    bench.recover()
    assert replayed(bench) == ["b", "a"]


def test_s208_an_attested_step_stands_where_it_was_written() -> None:
    bench = Bench().live()
    bench.step("a")  # written at 1, and nobody heard
    bench.step("b")
    bench.answer("b", journal_seq=2)
    bench.warm()
    bench.answer("a", verdict="attested", of="a.1", of_seq=1, journal_seq=3)
    committed = bench.of_kind(e.Committed)[-1]
    assert (committed.line, committed.receipt.epoch) == (1, 2)
    bench.cold()
    bench.recover()
    assert replayed(bench) == ["a", "b"]


def test_an_older_point_of_the_disk_keeps_what_it_wrote_in_its_former_line() -> None:
    bench = Bench().live()
    bench.step("a")  # written at 1
    bench.step("b")
    bench.answer("b", journal_seq=2)
    bench.reattach(journal_seq=1)  # a snapshot of before b
    assert bench.of_kind(e.EpochOpened)[-1].disk == "restored"
    bench.recover()
    bench.answer("a", verdict="attested", of="a.1", of_seq=1, journal_seq=9)
    assert bench.of_kind(e.Committed)[-1].line == 1
    bench.cold()
    bench.recover()
    assert replayed(bench) == ["b", "a", "b"]


def gone_on_from_an_older_point(commit_after: str) -> Bench:
    """A step waits that a former line of the disk wrote; a checkpoint of the present one comes."""
    bench = Bench().live()
    bench.step("a", commit_after=commit_after)  # written at 1, and nobody heard
    bench.step("b")
    bench.answer("b", journal_seq=2)
    bench.reattach(journal_seq=1)  # a snapshot of before b
    bench.recover()
    bench.answer("a", verdict="attested", of="a.1", of_seq=1, journal_seq=9)
    bench.checkpoint()
    return bench


@pytest.mark.parametrize("commit_after", ["heartbeat", "checkpoint"])
def test_a_checkpoint_holds_what_the_former_lines_of_its_disk_wrote(commit_after: str) -> None:
    bench = gone_on_from_an_older_point(commit_after)
    ended = bench.of_kind(e.Committed)[-1]
    assert (ended.step, ended.line, bench.of_kind(e.CheckpointedEntry)[-1].line) == ("a", 1, 2)
    assert bench.sandbox().owed == 0
    bench.cold()
    bench.recover()
    assert replayed(bench) == ["b"], "before the checkpoint, and nothing on top of it"
    assert audited(bench, lambda entries: entries) == []
    assert "I2" in audited(bench, changed(e.CheckpointedEntry, journal_seq=0))


@pytest.mark.parametrize(
    ("line", "seq", "holds"),
    [
        (1, 4, True),
        (1, 5, False),  # what the older point of the disk lacked
        (3, 5, True),
        (3, 4, False),
        (3, 9, True),
        (3, 10, False),
        (2, 3, False),
    ],
)
def test_of_a_former_line_a_checkpoint_holds_what_came_before_the_next_one(
    line: int, seq: int, holds: bool
) -> None:
    taken = Checkpoint(
        id="k1", manifest="m", namespace="sb1", line=3, seq=9, lines=((1, 0), (3, 4))
    )
    assert owed.is_covered(taken, line, seq) is holds


@pytest.mark.parametrize("since", [0, 1])
def test_a_generation_owes_what_the_former_ones_committed_too(since: int) -> None:
    bench = owing("s1")
    bench.recover()
    for n in range(since):
        bench.step(f"t{n}")
        bench.answer(f"t{n}")
    bench.cold()
    bench.recover()
    assert replayed(bench) == ["s1", "s1", *(f"t{n}" for n in range(since))]


def test_an_owed_steps_arguments_may_be_older_than_the_checkpoint() -> None:
    bench = Bench().live()
    bench.step("s1")
    bench.command("checkpoint", "k1", {})
    bench.tick()
    bench.step("s2")  # parked before the checkpoint's entry, committed after it
    bench.answer("s1")
    bench.checkpointed()
    bench.tick()
    bench.answer("s2")
    bench.cold()
    bench.recover()
    assert replayed(bench) == ["s2"]


# --- restore ----------------------------------------------------------------------------------------


def restore_order(bench: Bench) -> orders.RestoreOrder:
    return only([f.order for f in bench.effects() if isinstance(f.order, orders.RestoreOrder)])


def with_checkpoint(*after: str, **spec: Any) -> Bench:
    """A lost disk, one step in a checkpoint, and `after` it these."""
    bench = Bench().live(**spec)
    bench.step("s0")
    bench.answer("s0")
    bench.checkpoint("k1")
    for name in after:
        bench.step(name)
        bench.answer(name)
    bench.cold()
    return bench


def test_a_generation_starts_from_the_checkpoint_and_replays_what_came_after() -> None:
    bench = with_checkpoint("s1")
    opened = bench.of_kind(e.EpochOpened)[-1]
    assert (opened.disk, opened.checkpoint, opened.owed) == ("restored", "k1", 1)
    order = restore_order(bench)
    assert (order.manifest, order.namespace) == (manifest("k1"), "sbx")
    assert bench.recall() == [], "not before it is restored"
    assert kinds(bench.restored()) == ["restored"]
    bench.recover()
    assert replayed(bench) == ["s1"]
    assert bench.sandbox().whole


@pytest.mark.parametrize(
    "wrong",
    [
        {"session": "S0"},
        {"epoch": 1},
        {"gateway": "gw9"},
        {"checkpoint": "k0"},
        {"manifest": manifest("k0")},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_only_this_generations_restore_of_this_checkpoint_counts(wrong: dict[str, Any]) -> None:
    bench = with_checkpoint()
    assert bench.restored(**wrong) == []
    assert kinds(bench.restored()) == ["restored", "recovered"]


def restore_failed(bench: Bench, reason: str) -> list[Any]:
    from fencepost.core import facts

    known = bench.sandbox()
    fields = {"gateway": known.gateway, "session": known.session, "epoch": known.epoch}
    return bench.take(
        facts.RestoreFailed(sandbox="sbx", checkpoint="k1", reason=reason, **fields)  # type: ignore[arg-type]
    )


def test_a_restore_that_may_succeed_later_is_made_again_later_and_not_for_ever() -> None:
    bench = with_checkpoint()
    for n in range(limits.RESTORE_TRIES_MAX):
        entries = restore_failed(bench, "unreachable")
        if n + 1 < limits.RESTORE_TRIES_MAX:
            assert kinds(entries) == ["restore_failed"]
            assert not [f for f in bench.effects() if isinstance(f.order, orders.RestoreOrder)]
            bench.now_ms = recovering(bench).retry_at_ms
            bench.beat()
            restore_order(bench)
    assert kinds(entries) == ["restore_failed", "recovery_stopped"]


@pytest.mark.parametrize("reason", ["missing", "corrupt", "unsupported", "not_empty"])
def test_a_checkpoint_that_cannot_be_restored_stops_the_recovery(reason: str) -> None:
    bench = with_checkpoint("s1")
    assert restore_failed(bench, reason)[-1].reason == f"restore_{reason}"
    assert bench.recall() == []


def test_a_lost_checkpoint_is_told_with_what_came_after_it() -> None:
    bench = with_checkpoint("s1")
    restore_failed(bench, "missing")
    decide(bench, "tell")
    assert kinds(bench.recall()) == ["owed", "recovered"]
    ended = bench.of_kind(e.Recovered)[-1]
    assert (ended.mode, ended.told, ended.lost) == ("told", 1, "k1")
    assert bench.sandbox().checkpoint is None
    bench.step("s9")
    bench.tick()
    bench.answer("s9")
    bench.cold()
    bench.recover()
    assert replayed(bench) == ["s9"]


def test_a_lost_checkpoint_with_nothing_after_it_is_told_at_once() -> None:
    bench = with_checkpoint()
    restore_failed(bench, "missing")
    assert kinds(decide(bench, "tell")) == ["recovery_decided", "recovered"]
    bench.cold()
    assert bench.sandbox().recovering is None


def test_accepting_a_disk_without_its_checkpoint_goes_on_with_what_came_after() -> None:
    bench = with_checkpoint("s1")
    restore_failed(bench, "corrupt")
    decide(bench, "accept")
    bench.recover()
    assert replayed(bench) == ["s1"]
    ended = bench.of_kind(e.Recovered)[-1]
    assert (ended.mode, ended.without) == ("accepted", "k1"), "it is not called whole by itself"


def test_accepting_a_disk_without_its_checkpoint_where_nothing_else_is_owed() -> None:
    bench = with_checkpoint()
    restore_failed(bench, "corrupt")
    assert kinds(decide(bench, "accept")) == ["recovery_decided", "recovered"]
    assert bench.of_kind(e.Recovered)[-1].without == "k1"
    bench.cold()
    assert restore_order(bench).checkpoint == "k1", "tried again"


@pytest.mark.parametrize("reason", ["missing", "corrupt", "unsupported"])
def test_a_checkpoint_that_was_found_broken_is_no_base_until_it_is_restored(reason: str) -> None:
    bench = with_checkpoint("s1")
    restore_failed(bench, reason)
    decide(bench, "accept")
    bench.recover()
    bench.command("checkpoint", "k2", {})
    bench.tick()
    base = only(checkpoint_orders(bench)).base
    assert base == (manifest("k1") if reason == "unsupported" else "")
    bench.cold()
    bench.recover()
    assert only(checkpoint_orders(bench)).base == manifest("k1"), "it was whole after all"


# --- forks ------------------------------------------------------------------------------------------


def checkpoint_orders(bench: Bench) -> list[orders.CheckpointOrder]:
    return [f.order for f in bench.effects() if isinstance(f.order, orders.CheckpointOrder)]


def test_a_fork_starts_from_another_sandboxes_checkpoint() -> None:
    origin = {"sandbox": "origin", "checkpoint": "k7", "manifest": manifest("k7")}
    bench = Bench().live(origin=origin)
    opened = bench.of_kind(e.EpochOpened)[-1]
    assert (opened.disk, opened.checkpoint, opened.recovering) == ("restored", "k7", True)
    assert restore_order(bench).namespace == "origin"
    bench.recover()
    bench.tick()
    order = only(checkpoint_orders(bench))
    assert (order.reason, order.base) == ("origin", ""), "the chunks lie in another namespace"
    assert kinds(bench.step("s1")) == ["parked"], "first the fork has a checkpoint of its own"
    bench.checkpointed()
    bench.tick()
    bench.answer("s1")
    bench.cold()
    assert restore_order(bench).namespace == "sbx", "whatever has become of the origin"
    bench.recover()
    assert not checkpoint_orders(bench)


def test_a_fork_whose_origin_is_gone_goes_on_where_that_is_accepted() -> None:
    origin = {"sandbox": "origin", "checkpoint": "k7", "manifest": manifest("k7")}
    bench = Bench().live(origin=origin)
    restore_failed(bench, "missing")
    decide(bench, "accept")
    bench.tick()
    assert not checkpoint_orders(bench), "it would put an end to the origin's for good"


@pytest.mark.parametrize("field", ["sandbox", "checkpoint", "manifest"])
def test_an_origin_that_names_nothing_is_refused(field: str) -> None:
    bench = Bench()
    bench.see_gateway()
    origin = {"sandbox": "o", "checkpoint": "k", "manifest": manifest("k"), field: "no such"}
    refused = only(bench.create(origin=origin))
    assert (refused.reason, refused.field) == ("out_of_range", f"spec.origin.{field}")


# --- what moves under a recovery --------------------------------------------------------------------


def test_a_session_that_moves_hands_out_the_replays_fence_anew() -> None:
    bench = owing("s1")
    bench.recall()
    old = bench.replay_receipt()
    entries = bench.reattach()
    again = only([x for x in entries if type(x) is e.Replaying])
    assert (again.step, again.session, again.reason) == ("s1", "S3", "session_moved")
    assert kinds(bench.receive(old)) == ["receipt_refused"]
    got = bench.replay_receipt(verdict="attested", of=old.attempt, of_seq=1)
    assert kinds(bench.receive(got)) == ["replayed", "recovered"]


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("move", ["warm", "cold"])
def test_another_epoch_begins_the_recovery_anew(move: str, checkpoint: bool) -> None:
    bench = with_checkpoint("s1", "s2") if checkpoint else owing("s1", "s2")
    if checkpoint:
        bench.restored()
    bench.replay()
    bench.recall()
    old = bench.replay_receipt()
    if move == "warm":
        bench.warm()
    else:
        bench.cold()
    opened = bench.of_kind(e.EpochOpened)[-1]
    assert (opened.recovering, opened.owed) == (True, 2)
    assert kinds(bench.receive(old)) == ["receipt_refused"], "of the former generation"
    assert phase(bench) == ("restore" if checkpoint else "replay")
    bench.recover()
    assert replayed(bench) == ["s1", "s1", "s2"]
    assert bench.sandbox().whole


def test_a_disk_that_went_back_during_the_recovery_is_another_generation() -> None:
    bench = owing("s1", "s2")
    bench.replay()
    marker = bench.marker()
    bench.lost()
    bench.attach(marker=marker, journal_seq=0)
    assert bench.of_kind(e.EpochOpened)[-1].disk == "restored"
    bench.recover()
    assert replayed(bench) == ["s1", "s1", "s2"]


def test_a_disk_whose_last_change_was_a_restore_is_restored_again_under_another_epoch() -> None:
    """A point from before the restore has a journal of the same length."""
    bench = with_checkpoint()
    bench.restored()
    bench.warm()
    assert bench.of_kind(e.EpochOpened)[-1].recovering
    bench.recover()
    bench.step("s1")
    bench.answer("s1")
    bench.warm()
    assert not bench.of_kind(e.EpochOpened)[-1].recovering, "the journal tells them apart"


def test_a_release_ends_a_recovery() -> None:
    bench = owing("s1")
    bench.recall()
    bench.command("release", "r", {})
    assert bench.sandbox().recovering is None
    assert not [x for x in bench.dispatches() if x.fence.direction == "replay"]
    assert bench.recall() == []
    bench.gone()
    assert bench.sandbox().gone


def test_a_new_owner_makes_the_replay_again_and_goes_on() -> None:
    bench = owing("s1", "s2")
    bench.recall()
    before = only(bench.dispatches())
    bench.restart()
    assert only(bench.dispatches()) == before
    bench.receive(bench.replay_receipt())
    bench.restart()
    bench.recover()
    assert replayed(bench) == ["s1", "s2"]


def test_steps_that_were_open_are_settled_after_the_recovery_not_before() -> None:
    bench = Bench().live()
    bench.step("s1")
    bench.answer("s1", journal_seq=5)
    bench.step("s2")
    entries = bench.reattach(journal_seq=1)  # an older point: its journal is to say
    assert not [x for x in entries if type(x) is e.Fenced]
    assert "fenced" in kinds(bench.recover())
    assert bench.open("s2").attempt == "s2.2"


def test_an_older_point_from_before_an_undo_is_not_gone_on_from() -> None:
    bench = Bench().live()
    bench.step("s1")
    bench.cancel("s1")
    bench.answer("s1", verdict="already_done", journal_seq=1)
    bench.answer("s1", journal_seq=2)
    marker = bench.marker()
    bench.lost()
    assert kinds(bench.found(marker=marker, journal_seq=1)) == ["epoch_closed", "condemned"]


@pytest.mark.parametrize(("behind", "gone_on"), [(3, True), (2, False)])
def test_an_older_point_whose_journal_may_have_forgotten_what_is_owed_is_given_up(
    behind: int, gone_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has forgotten would be applied once more, on top of what came after it."""
    monkeypatch.setattr(limits, "FENCES_BEHIND_MAX", behind)
    bench = Bench().live()
    for n, name in enumerate(("s1", "s2"), 1):
        bench.step(name)
        bench.answer(name, journal_seq=n)
    entries = bench.found(marker=bench.marker(), journal_seq=1)
    opens = ["epoch_closed", "epoch_opened", "marking"]
    assert kinds(entries) == (opens if gone_on else ["epoch_closed", "condemned"])


@pytest.mark.parametrize(("behind", "gone_on"), [(2, True), (1, False)])
def test_a_long_recovery_begins_anew_on_a_disk_of_its_own(
    behind: int, gone_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = owing("s1", "s2", "s3")
    bench.replay()
    bench.replay()
    monkeypatch.setattr(limits, "FENCES_BEHIND_MAX", behind)
    marker, seq = bench.marker(), bench.sandbox().journal_seq
    bench.reattach()
    assert bench.sandbox().live, "the same epoch goes on where it was"
    bench.lose_lease()
    entries = bench.found(marker=marker, journal_seq=seq)
    assert kinds(entries) == (["epoch_opened", "marking"] if gone_on else ["condemned"])


# --- what does not fit --------------------------------------------------------------------------------


def fed(bench: Bench) -> inputs.OwedStep:
    value = bench.recalled(only(bench.machine.wanted(bench.state)))
    assert isinstance(value, inputs.OwedStep)
    return value


def test_a_list_that_leaves_one_out_never_ends_a_recovery() -> None:
    bench = owing("s1", "s2")
    bench.replay()
    stopped = only(bench.take(inputs.OwedEnd(sandbox="sbx", epoch=2)))
    assert (type(stopped), stopped.reason) == (e.RecoveryStopped, "list_differs")
    assert kinds(decide(bench, "accept")) == ["recovery_decided", "recovered"]


def test_a_step_that_was_never_committed_spoils_the_sum() -> None:
    bench = owing("s1")
    forged = msgspec.structs.replace(fed(bench), digest="sha256:" + "0" * 64)
    known = bench.sandbox()
    entries = bench.machine.decide(bench.state, bench.hints, forged, bench.now_ms)
    for entry in entries:
        bench.machine.evolve(bench.state, entry, Place(bench.seq, 0), bench.now_ms)
    got = msgspec.structs.replace(bench.replay_receipt(), digest=forged.digest)
    said = inputs.ReceiptReceived(sandbox="sbx", gateway=known.gateway, mac_ok=True, receipt=got)
    entries = bench.machine.decide(bench.state, bench.hints, said, bench.now_ms)
    assert kinds(list(entries)) == ["replayed", "recovery_stopped"]


def test_steps_are_taken_in_their_order_alone() -> None:
    bench = owing("s1", "s2")
    first = fed(bench)
    bench.replay()
    assert bench.take(first) == [], "the one that was just applied"
    assert bench.take(msgspec.structs.replace(fed(bench), epoch=1)) == [], "of a former epoch"
    assert kinds(bench.take(fed(bench))) == ["replaying"]


def test_the_list_of_another_ledger_order_is_the_same_list() -> None:
    """The sum does not depend on the order, the list does not depend on where reading began."""
    rng = random.Random(7)
    bench = Bench().live()
    names = [f"s{n}" for n in range(12)]
    for name in names:
        bench.step(name)
    seqs = list(range(1, 13))
    rng.shuffle(seqs)
    for name, seq in zip(names, seqs, strict=True):
        bench.answer(name, journal_seq=seq)
    bench.cold()
    bench.recover()
    assert replayed(bench) == [name for _, name in sorted(zip(seqs, names, strict=True))]


# --- differences, and the three ways out --------------------------------------------------------------


def test_what_comes_to_something_else_stops_the_recovery() -> None:
    bench = owing("s1", "s2")
    stopped = stop(bench)
    assert (stopped.reason, stopped.step, stopped.attempt) == ("differs", "s1", "s1.1")
    assert bench.recall() == []
    assert bench.dispatches() == []
    assert only(bench.step("s3")).reason == "recovering"


def test_a_difference_names_where_it_may_be_as_far_as_there_is_room() -> None:
    bench = owing("s1", "s2")
    few = [Change("a.txt", None, "sha256:1"), Change("x" * 300, None, None)]
    stopped = bench.replay(changes=few)[-1]
    assert isinstance(stopped, e.RecoveryStopped)
    assert stopped.changes == tuple(few)
    assert stopped.detail.endswith(f"this time: a.txt, …{'x' * 60}")
    shown = bench.sandbox().recovering
    assert shown is not None
    assert shown.detail == stopped.detail
    for many, at_most in (
        ([Change(f"{n}", None, None) for n in range(500)], limits.CHANGES_SHOWN_MAX),
        ([Change(f"{n}" + "x" * 3_900, None, None) for n in range(9)], 2),
    ):
        bench = owing("s1")
        stopped = bench.replay(changes=many)[-1]
        assert isinstance(stopped, e.RecoveryStopped)
        assert stopped.changes == tuple(many[:at_most])
        assert f"and {len(many) - 3} more" in stopped.detail or len(stopped.detail) == 300


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ([("a", "1")], [("a", "1")], True),
        ([("a", "1"), ("b", None)], [("b", None), ("a", "1")], True),
        ([("a", "1")], [("a", "2")], False),
        ([("a", "1")], [("b", "1")], False),
        ([("a", "1")], [], False),
        ([("a", None)], [("a", "1")], False),
    ],
)
def test_the_digests_of_what_changed_are_compared(
    first: list[tuple[str, str | None]], second: list[tuple[str, str | None]], same: bool
) -> None:
    def changes(listed: list[tuple[str, str | None]]) -> list[Change]:
        return [Change(path=path, before="x", after=after) for path, after in listed]

    bench = Bench().live()
    bench.step("s1")
    bench.answer("s1", changes=changes(first))
    bench.cold()
    entries = bench.replay(changes=changes(second))
    assert kinds(entries)[-1] == ("recovered" if same else "recovery_stopped")


def test_a_list_that_was_cut_says_nothing_against_the_same_outcome() -> None:
    bench = Bench().live()
    bench.step("s1")
    bench.answer("s1", changes=[Change(path="a", before=None, after="1")])
    bench.cold()
    entries = bench.replay(changes=[], detail="changes: see the stored receipt")
    assert kinds(entries)[-1] == "recovered"


def test_accept_takes_the_disk_as_it_is_and_later_generations_compare_with_that() -> None:
    bench = owing("s1", "s2")
    stop(bench)
    assert kinds(decide(bench, "accept")) == ["recovery_decided", "replayed"]
    assert bench.of_kind(e.Replayed)[-1].accepted
    bench.recover()
    bench.cold()
    assert kinds(bench.replay(outcome="failed")) == ["replaying", "replayed"]
    bench.recover()
    assert bench.sandbox().whole


def test_tell_lists_what_is_lost_and_owes_it_no_more() -> None:
    bench = owing("s1", "s2", "s3")
    bench.replay()
    stop(bench)
    decide(bench, "tell")
    bench.recover()
    told = [named.step for entry in bench.of_kind(e.OwedTold) for named in entry.steps]
    assert told == ["s2", "s3"]
    ended = bench.of_kind(e.Recovered)[-1]
    assert (ended.mode, ended.replayed, ended.told) == ("told", 1, 2)
    bench.step("s4")
    bench.answer("s4")
    bench.cold()
    bench.recover()
    assert replayed(bench)[1:] == ["s1", "s4"]


def test_discard_gives_the_disk_up_and_the_next_one_begins_anew() -> None:
    bench = owing("s1", "s2")
    bench.replay()
    stop(bench)
    assert kinds(decide(bench, "discard")) == ["recovery_decided", "epoch_closed", "condemned"]
    bench.gone()
    bench.tick()
    bench.assigned(
        ref=msgspec.structs.replace(bench.of_kind(e.AssignedEntry)[0].ref, instance="i9")
    )
    bench.attach()
    bench.recover()
    assert replayed(bench) == ["s1", "s1", "s2"]


def test_a_decision_on_what_has_not_stopped_is_refused() -> None:
    bench = owing("s1")
    assert only(decide(bench, "accept")).reason == "not_stopped"
    stop(bench)
    bench.lost()
    assert only(decide(bench, "accept")).reason == "no_live_epoch"


def test_a_decision_that_is_none_is_refused() -> None:
    bench = owing("s1")
    stop(bench)
    refused = only(decide(bench, "whatever"))
    assert (refused.reason, refused.field) == ("malformed", "decision")


# --- receipts of replays ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempt": "s1.1"},
        {"attempt": "s1.1:r1"},
        {"no": 1},
        {"session": "S0"},
        {"nonce": "N0"},
        {"instance": "i0"},
        {"epoch": 1},
        {"tool": "stat"},
        {"digest": "sha256:0"},
        {"outcome": ""},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_s196_a_replay_is_joined_as_strictly_as_an_apply(wrong: dict[str, Any]) -> None:
    bench = owing("s1")
    bench.recall()
    right = bench.replay_receipt()
    refused = only(bench.receive(msgspec.structs.replace(right, **wrong)))
    assert (type(refused), refused.direction) == (e.ReceiptRefused, "replay")
    assert kinds(bench.receive(right)) == ["replayed", "recovered"]


def test_refused_receipts_of_a_replay_are_bounded() -> None:
    bench = owing("s1")
    bench.recall()
    wrong = msgspec.structs.replace(bench.replay_receipt(), nonce="N0")
    for _ in range(30):
        bench.receive(wrong)
    refused = [x for x in bench.of_kind(e.ReceiptRefused) if x.direction == "replay"]
    assert len(refused) == limits.REFUSALS_RECORDED_PER_ATTEMPT_MAX


def test_a_late_receipt_of_a_replay_moves_nothing() -> None:
    bench = owing("s1")
    bench.recall()
    got = bench.replay_receipt()
    bench.receive(got)
    assert all(type(x) is e.ReceiptRefused for x in bench.receive(got))
    assert bench.final("s1") == "committed"


def test_a_replay_that_runs_says_nothing_yet() -> None:
    bench = owing("s1")
    bench.recall()
    assert bench.receive(bench.replay_receipt(verdict="running", outcome="")) == []


def test_a_fault_is_tried_again_under_the_same_fence_and_not_for_ever() -> None:
    bench = owing("s1")
    bench.recall()
    fault = {"verdict": "fault", "outcome": "", "reason": "no_space"}
    for _ in range(limits.REFUSALS_RECORDED_PER_ATTEMPT_MAX - 1):
        assert kinds(bench.receive(bench.replay_receipt(**fault))) == ["receipt_refused"]
        only(bench.dispatches())
    stopped = only(bench.receive(bench.replay_receipt(**fault)))
    assert (type(stopped), stopped.reason) == (e.RecoveryStopped, "no_space")


def test_a_grant_that_ran_out_is_waited_for() -> None:
    bench = owing("s1")
    bench.recall()
    said = {"verdict": "refused", "outcome": "", "reason": "grant_expired"}
    for _ in range(20):
        assert bench.receive(bench.replay_receipt(**said)) == []
    assert kinds(bench.receive(bench.replay_receipt())) == ["replayed", "recovered"]


def test_a_call_that_the_disk_refuses_stops_the_recovery_and_accept_leaves_it_out() -> None:
    bench = owing("s1", "s2")
    bench.recall()
    said = {"verdict": "refused", "outcome": "", "reason": "invalid_arguments"}
    stopped = only(bench.receive(bench.replay_receipt(**said)))
    assert stopped.reason == "invalid_arguments"
    accepted = decide(bench, "accept")[-1]
    assert (type(accepted), accepted.verdict) == (e.Replayed, "")
    bench.recover()
    assert bench.sandbox().whole


def test_a_replay_that_was_cut_down_gives_the_disk_up_and_not_for_ever() -> None:
    bench = owing("s1")
    said = {"verdict": "indeterminate", "outcome": "", "reason": "broken"}
    for n in range(limits.REPLAY_DISCARDS_MAX):
        bench.recall()
        entries = bench.receive(bench.replay_receipt(**said))
        assert kinds(entries) == ["epoch_closed", "condemned"]
        bench.gone()
        bench.tick()
        fresh = bench.of_kind(e.AssignedEntry)[0].ref
        bench.assigned(ref=msgspec.structs.replace(fresh, instance=f"again{n}"))
        bench.attach()
    bench.recall()
    stopped = only(bench.receive(bench.replay_receipt(**said)))
    assert (type(stopped), stopped.reason) == (e.RecoveryStopped, "broken")


# --- policies -----------------------------------------------------------------------------------------


def test_by_policy_what_is_lost_is_told_in_pages_and_nothing_is_applied_again() -> None:
    bench = owing("s1", "s2", "s3", recovery="tell")
    assert kinds(bench.recall()) == ["owed"]
    assert kinds(bench.recall()) == ["owed", "recovered"]
    pages = bench.of_kind(e.OwedTold)
    assert [[named.step for named in page.steps] for page in pages] == [["s1", "s2"], ["s3"]]
    assert [(page.told, page.of) for page in pages] == [(2, 3), (3, 3)]
    assert bench.of_kind(e.Replaying) == []
    assert bench.sandbox().owed == 0
    bench.cold()
    assert not bench.of_kind(e.EpochOpened)[-1].recovering, "told once, owed no more"


def test_by_policy_a_checkpoint_is_restored_before_the_rest_is_told() -> None:
    bench = with_checkpoint("s1", recovery="tell")
    bench.recover()
    assert [x.steps[0].step for x in bench.of_kind(e.OwedTold)] == ["s1"]
    assert bench.of_kind(e.RestoredEntry)


def test_pages_that_do_not_follow_are_not_taken() -> None:
    bench = owing("s1", "s2", "s3", recovery="tell")
    page = bench.recalled(only(bench.machine.wanted(bench.state)))
    assert isinstance(page, inputs.OwedPage)
    turned = msgspec.structs.replace(page, items=page.items[::-1])
    assert bench.take(turned) == []
    bench.take(page)
    assert bench.take(page) == []


@pytest.mark.parametrize("policy", ["wait", "refuse"])
def test_by_policy_new_steps_wait_or_are_refused(policy: str) -> None:
    bench = owing("s1", while_recovering=policy)
    entry = only(bench.step("s2"))
    expected = (e.Parked, "recovering") if policy == "wait" else (e.Refused, "recovering")
    assert (type(entry), entry.reason) == expected
    bench.recover()
    assert kinds(bench.step("s3")) == ["fenced"]


def test_owed_steps_have_no_deadline_and_no_number_of_attempts() -> None:
    bench = Bench().live()
    bench.step("s1", deadline_ms=100, attempts_max=1)
    bench.answer("s1")
    bench.cold()
    bench.beat()
    bench.tick(1_000)
    bench.recover()
    assert replayed(bench) == ["s1"]


def test_no_checkpoint_is_taken_of_what_owes() -> None:
    bench = owing("s1")
    assert kinds(bench.command("checkpoint", "k1", {}) + bench.tick()) == ["checkpoint_asked"]
    bench.beat()
    assert "checkpointing" not in kinds(bench.tick(600)), "nor by time"
    assert "checkpointing" in kinds(bench.recover())


# --- what is shown ------------------------------------------------------------------------------------


def test_a_view_says_that_it_recovers_and_how_far_it_is() -> None:
    bench = owing("s1", "s2")
    bench.replay()
    view = bench.machine.view_sandbox(bench.state, "sbx")
    assert view is not None
    assert view["state"] == "recovering"
    assert (view["recovering"]["done"], view["recovering"]["of"]) == (1, 2)
    bench.recover()
    view = bench.machine.view_sandbox(bench.state, "sbx")
    assert view is not None
    assert (view["state"], view["recovering"]) == ("live", None)


def test_events_tell_each_step_of_a_recovery() -> None:
    bench = with_checkpoint("s1", "s2")
    bench.restored()
    bench.replay()
    stop(bench)
    decide(bench, "tell")
    bench.recover()
    subjects = [
        event.subject.rpartition(".")[2]
        for entry in bench.entries
        for event in bench.machine.events_of(entry)
        if event.subject.startswith("fp.v1.event.sandbox.sbx.")
    ]
    for word in (
        "checkpointed",
        "restored",
        "replayed",
        "recovery_stopped",
        "recovery_decided",
        "owed",
        "recovered",
    ):
        assert word in subjects, word


def test_recoveries_move_along_the_arrows_of_the_table() -> None:
    arrows = {(a.source, a.target, a.entry) for a in transitions.RECOVERY}
    seen = set()
    for make in (_replays, _tells, _restores, _stops):
        bench = make()
        state = bench.machine.initial(0, 1)
        for seq, now_ms, entries in bench.batches:
            for index, entry in enumerate(entries):
                before = _phase(state)
                bench.machine.evolve(state, entry, Place(seq - 1, index), now_ms)
                after = _phase(state)
                tag = type(entry).__struct_config__.tag
                if tag in {a.entry for a in transitions.RECOVERY} and after != "none":
                    seen.add((before, after, tag))
    assert {x for x in seen if x[0] != x[1] or x[2] in ("replayed", "owed", "restore_failed")} <= {
        *arrows,
        ("none", "whole", "epoch_opened"),
        ("whole", "restore", "epoch_opened"),
        ("whole", "replay", "epoch_opened"),
        ("whole", "tell", "epoch_opened"),
        ("stopped", "restore", "epoch_opened"),
        ("stopped", "replay", "epoch_opened"),
    }


def _phase(state: Any) -> str:
    known = state.sandboxes.get("sbx")
    if known is None or not known.epoch:
        return "none"
    return "whole" if known.recovering is None else str(known.recovering.phase)


def _replays() -> Bench:
    bench = owing("s1", "s2")
    bench.recover()
    return bench


def _tells() -> Bench:
    bench = owing("s1", "s2", "s3", recovery="tell")
    bench.recover()
    return bench


def _restores() -> Bench:
    bench = with_checkpoint("s1")
    restore_failed(bench, "unreachable")
    bench.recover()
    return bench


def _stops() -> Bench:
    bench = owing("s1", "s2", "s3")
    stop(bench)
    decide(bench, "accept")
    stop(bench)
    decide(bench, "tell")
    bench.recover()
    return bench


# --- the list -----------------------------------------------------------------------------------------


def test_the_list_passes_other_sandboxes_over() -> None:
    bench = owing("s1")
    bench.create("other")
    found = owed.OwedList("other", None)
    for entry in bench.entries:
        found.take(entry, Place(0, 0))
    assert found.after((0, 0, "")) == []


# --- the auditor --------------------------------------------------------------------------------------


def audited(bench: Bench, spoil: Any) -> list[str]:
    """What the auditor finds in the bench's ledger after `spoil` was at its entries."""
    auditor = ShardAuditor("sandbox", 0)
    found = []
    for seq, now_ms, entries in bench.batches:
        kept = spoil(list(entries))
        found += auditor.take(
            seq=seq, prev=seq - 1, term=1, owner="owner1", now_ms=now_ms, entries=kept
        )
    return [one.invariant for one in found]


def without(kind: type, step: str = "") -> Any:
    return lambda entries: [x for x in entries if type(x) is not kind or (step and x.step != step)]


def changed(kind: type, **over: Any) -> Any:
    return lambda entries: [
        msgspec.structs.replace(x, **over) if type(x) is kind else x for x in entries
    ]


def story() -> Bench:
    """Two steps in a checkpoint, two after it, a reclaim, a recovery, and one more step."""
    bench = Bench().live()
    for name in ("s1", "s2"):
        bench.step(name, commit_after="checkpoint" if name == "s2" else "receipt")
        bench.answer(name)
    bench.checkpointed()
    bench.tick()
    for name in ("s3", "s4"):
        bench.step(name, commit_after="heartbeat" if name == "s4" else "receipt")
        bench.answer(name)
    bench.beat(journal_seq=bench.sandbox().journal_seq)
    bench.tick()
    bench.cold()
    bench.step("s5")
    bench.recover()
    bench.answer("s5")
    return bench


def test_the_auditor_finds_nothing_wrong_with_a_good_recovery() -> None:
    assert audited(story(), lambda entries: entries) == []


@pytest.mark.parametrize(
    ("spoil", "invariant"),
    [
        (without(e.Recovered), "I2"),
        (without(e.Replayed, "x"), ""),
        (without(e.Replayed), "I2"),
        (without(e.Replaying), "I3"),
        (without(e.RestoredEntry), "I2"),
        (without(e.Joined), "I1"),
        (without(e.CheckpointedEntry), "I2"),
        (without(e.CheckpointingEntry), "I2"),
        (changed(e.EpochOpened, recovering=False), "I2"),
        (changed(e.EpochOpened, owed=0), "I2"),
        (changed(e.Replaying, key=(1, 99, "s3")), "S-208"),
        (changed(e.Replaying, name="s3.1"), "S-196"),
        (changed(e.Replaying, digest="sha256:0"), "I1"),
        (changed(e.Replaying, session="S0"), "I1"),
        (changed(e.RestoredEntry, checkpoint="other"), "I2"),
        (changed(e.CheckpointedEntry, journal_seq=0), "I2"),
        (changed(e.CheckpointedEntry, checkpoint="other"), "I2"),
        (changed(e.Committed, beat=0), "I2"),
        (changed(e.Committed, line=7), "I2"),
    ],
)
def test_the_auditor_finds_what_is_wrong_with_a_recovery(spoil: Any, invariant: str) -> None:
    found = audited(story(), spoil)
    if invariant:
        assert invariant in found
    else:
        assert found == []


def test_the_auditor_finds_a_step_that_was_applied_again_twice() -> None:
    bench = story()

    def twice(entries: list[Any]) -> list[Any]:
        return [
            x
            for entry in entries
            for x in ([entry, entry] if type(entry) is e.Replayed else [entry])
        ]

    assert "I3" in audited(bench, twice)


def test_the_auditor_finds_a_checkpoint_beside_an_open_step() -> None:
    bench = Bench().live()
    bench.step("s1")
    bench.answer("s1")
    bench.checkpoint("k1")

    def unanswered(entries: list[Any]) -> list[Any]:
        return [x for x in entries if type(x) is not e.Committed]

    assert "I2" in audited(bench, unanswered)


def test_a_ledger_from_before_there_was_recovery_is_judged_as_it_was() -> None:
    bench = owing("s1")

    def older(entries: list[Any]) -> list[Any]:
        from fencepost.core.machine import TermOpened

        made = changed(TermOpened, machine=1)(entries)
        return list(changed(e.EpochOpened, recovering=False)(made))

    assert audited(bench, older) == []
