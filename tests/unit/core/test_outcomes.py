"""What receipts, cancels, deadlines and moved generations do to open steps, phase by phase."""

from typing import Any

import msgspec
import pytest
from fencepost.core import limits
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import orders

from tests.factories import UNDO, Bench, body, external, kinds, last_refusal, only

PHASES = ("apply", "revoke", "undo")


def in_phase(phase: str, effect: str = "workspace", **over: Any) -> Bench:
    """A bench whose step `s1` is in that phase."""
    bench = Bench().live()
    bench.step("s1", external(**over) if effect == "external" else body(**over))
    if phase != "apply":
        bench.cancel("s1")
        assert bench.open("s1").phase == "revoke"
    if phase == "undo":
        bench.answer("s1", verdict="already_done", of="s1.1")
        assert bench.open("s1").phase == "undo"
    return bench


# --- apply ----------------------------------------------------------------------------------------


def test_an_applied_receipt_commits_and_leaves_the_memory() -> None:
    bench = in_phase("apply")
    committed = only(bench.answer("s1", journal_seq=7))
    assert (committed.attempt, committed.gateway) == ("s1.1", "gw1")
    sandbox = bench.sandbox()
    assert (sandbox.steps, sandbox.fenced, bench.state.open_steps) == ({}, {}, 0)
    assert (sandbox.committed, sandbox.owed, sandbox.journal_seq) == (1, 1, 7)


def test_external_effects_are_not_owed_to_a_new_disk() -> None:
    bench = in_phase("apply", "external")
    bench.answer("s1")
    assert (bench.sandbox().committed, bench.sandbox().owed) == (1, 0)


@pytest.mark.parametrize("phase", PHASES)
def test_s229_running_moves_nothing(phase: str) -> None:
    bench = in_phase(phase)
    assert bench.answer("s1", verdict="running", outcome="") == []
    assert bench.open("s1").phase == phase


@pytest.mark.parametrize("phase", PHASES)
def test_s204_what_cannot_be_known_is_indeterminate_and_never_run_again(phase: str) -> None:
    bench = in_phase(phase)
    found = only(bench.answer("s1", verdict="indeterminate", outcome="", reason="broken"))
    assert (type(found), found.reason, found.attempt) == (e.Indeterminate, "broken", "s1.1")
    assert bench.sandbox().fenced == {}
    assert bench.dispatches() == []
    for happens in (bench.reattach, bench.warm, bench.cold):
        happens()
        assert bench.dispatches() == []
        assert bench.open("s1").phase == "indeterminate"
    assert only(bench.receive(bench.receipt("s1", direction="apply"))).reason == "not_fenced"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "reason", ["grant_expired", "blob_missing", "stale_epoch", "no_generation"]
)
def test_a_passing_refusal_leaves_the_fence_as_it_is(phase: str, reason: str) -> None:
    bench = in_phase(phase)
    before = bench.dispatches()
    assert only(bench.answer("s1", verdict="refused", outcome="", reason=reason)).reason == reason
    assert bench.dispatches() == before
    assert only(bench.answer("s1", verdict="fault", outcome="", reason="no_space")).reason == (
        "no_space"
    )
    assert bench.dispatches() == before


def test_s181_a_refusal_for_good_is_revoked_before_it_is_called_never_applied() -> None:
    bench = in_phase("apply")
    refused, fenced = bench.answer(
        "s1", verdict="refused", outcome="", reason="invalid_arguments", detail="no such file"
    )
    assert (refused.reason, refused.detail) == ("invalid_arguments", "no such file")
    assert (fenced.direction, fenced.reason, fenced.no) == ("revoke", "invalid_arguments", 2)
    revoked, compensated = bench.answer("s1", reason="never_began")
    assert type(revoked) is e.Revoked
    assert (compensated.reason, compensated.evidence) == ("invalid_arguments", "never_applied")
    assert compensated.final


def test_a_fence_that_the_journal_forgot_is_indeterminate() -> None:
    bench = in_phase("apply")
    assert kinds(bench.answer("s1", verdict="refused", outcome="", reason="too_old")) == [
        "indeterminate"
    ]
    revoking = in_phase("revoke")
    assert kinds(revoking.answer("s1", verdict="refused", outcome="", reason="too_old")) == [
        "indeterminate"
    ]


# --- revoke ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "evidence"),
    [("never_began", "never_applied"), ("rolled_back", "undone"), ("undone", "undone")],
)
def test_s203_a_revocation_in_the_journal_ends_the_attempt(reason: str, evidence: str) -> None:
    bench = in_phase("revoke")
    revoked, compensated = bench.answer("s1", reason=reason)
    assert (revoked.journal, revoked.attempt) == (reason, "s1.1")
    assert (compensated.evidence, compensated.reason, compensated.final) == (
        evidence,
        "cancelled",
        True,
    )
    assert bench.final("s1") == "compensated"
    assert bench.sandbox().compensated == 1


def test_s196_the_forward_receipt_is_neither_the_revocations_nor_the_undos() -> None:
    bench = Bench().live()
    bench.step("s1")
    forward = bench.receipt("s1")
    bench.cancel("s1")
    assert only(bench.receive(forward)).reason == "wrong_direction"
    bench.answer("s1", verdict="already_done")
    assert only(bench.receive(forward)).reason == "wrong_direction"
    assert bench.open("s1").phase == "undo"
    assert kinds(bench.answer("s1")) == ["compensated"]
    assert only(bench.receive(forward)).reason == "step_final"


def test_already_done_is_undone_by_the_attempt_that_did_it() -> None:
    bench = Bench().live()
    bench.step("s1")
    bench.reattach()  # carried into s1.2; what s1.1 did is not known here
    bench.cancel("s1")
    undo = only(bench.answer("s1", verdict="already_done", of="s1.1"))
    assert (undo.direction, undo.attempt, undo.of) == ("undo", "s1.2", "s1.1")
    order = only(bench.dispatches())
    assert (order.of, order.fence.direction, order.tool) == ("s1.1", "undo", "")
    bench.reattach()
    assert only(bench.dispatches()).of == "s1.1"
    stranger = in_phase("revoke")
    assert only(stranger.answer("s1", verdict="already_done", of="s2.1")).of == "s1.1"


# --- undo -----------------------------------------------------------------------------------------


def test_an_undo_carries_the_callers_own_command() -> None:
    bench = in_phase("undo", "external")
    order = only(bench.dispatches())
    assert (order.tool, msgspec.json.decode(order.args)) == ("run_command", UNDO["args"])
    assert order.digest != bench.open("s1").spec.digest
    compensated = only(bench.answer("s1", journal_seq=9))
    assert (compensated.evidence, compensated.journal_seq) == ("undone", 9)
    assert bench.sandbox().journal_seq == 9


def test_s021_a_failed_undo_is_visible_tried_again_and_never_called_compensated() -> None:
    bench = in_phase("undo", "external")
    names = {only(bench.dispatches()).fence.attempt}
    for n in range(2, limits.UNDO_TRIES_MAX + 1):
        first = bench.receipt("s1", outcome="failed")
        fenced = only(bench.receive(first))
        assert (fenced.direction, fenced.error) == ("undo", "the undo command failed")
        assert bench.open("s1").undo_tries == n
        names.add(only(bench.dispatches()).fence.attempt)
        # The former try's receipt is no receipt of this one.
        assert type(only(bench.receive(first))) is e.ReceiptRefused
    # A disk answers a name that it knows with its first receipt: each try has its own.
    assert len(names) == limits.UNDO_TRIES_MAX
    given_up = only(bench.answer("s1", outcome="failed"))
    assert (given_up.reason, bench.open("s1").phase) == ("undo_failed", "indeterminate")


def test_s021_an_undo_that_holds_after_a_failure_compensates() -> None:
    bench = in_phase("undo")
    assert only(bench.answer("s1", verdict="refused", outcome="", reason="digest_mismatch")).error
    assert only(bench.answer("s1")).evidence == "undone"


def test_an_undo_moved_to_another_session_is_not_a_failed_try() -> None:
    bench = in_phase("undo")
    for _ in range(limits.UNDO_TRIES_MAX + 2):
        bench.reattach()
    assert bench.open("s1").undo_tries == 1
    assert only(bench.dispatches()).fence.direction == "undo"
    assert only(bench.answer("s1")).evidence == "undone"


def test_s209_an_undo_never_removes_a_later_steps_bytes() -> None:
    bench = in_phase("undo")
    found = only(bench.answer("s1", verdict="refused", outcome="", reason="overwritten"))
    assert (type(found), found.reason) == (e.Indeterminate, "overwritten")


def test_nothing_to_undo_is_never_applied() -> None:
    bench = in_phase("undo")
    found = only(bench.answer("s1", verdict="refused", outcome="", reason="nothing_to_undo"))
    assert (found.evidence, found.final) == ("never_applied", True)


# --- cancel ---------------------------------------------------------------------------------------


def test_a_cancel_of_a_waiting_step_ends_it_at_once() -> None:
    bench = Bench()
    bench.create()
    bench.step("s1")
    cancelled, compensated = bench.cancel("s1", "changed my mind")
    assert (cancelled.reason, compensated.reason) == ("changed my mind", "changed my mind")
    assert (compensated.evidence, compensated.final) == ("never_applied", True)
    assert bench.sandbox().parked == {}


def test_a_cancel_of_a_fenced_step_goes_through_the_journal() -> None:
    bench = in_phase("apply")
    cancelled, fenced = bench.cancel("s1")
    assert (type(cancelled), fenced.direction, fenced.of) == (e.Cancelled, "revoke", "s1.1")
    assert only(bench.dispatches()).fence.direction == "revoke"
    assert bench.cancel("s1") == []


@pytest.mark.parametrize("phase", ["revoke", "undo"])
def test_a_cancel_of_what_is_ending_changes_nothing(phase: str) -> None:
    assert in_phase(phase).cancel("s1") == []


def test_a_long_reason_is_cut_so_that_the_cancel_fits_a_batch() -> None:
    bench = in_phase("apply")
    entries = bench.cancel("s1", "x" * 40_000)
    assert len(bench.machine.encode_entries(entries)) < 2_000


def test_a_cancel_of_nothing_is_refused_with_the_reason() -> None:
    bench = in_phase("apply")
    assert only(bench.cancel("s2")).reason == "unknown_step"
    assert only(bench.cancel("s2", sandbox="nope")).reason == "unknown_sandbox"
    bench.answer("s1")
    assert only(bench.cancel("s1")).reason == "step_final"
    bench.step("s3")
    bench.answer("s3", verdict="indeterminate", outcome="")
    assert only(bench.cancel("s3")).reason == "indeterminate"


def test_s191_a_cancel_without_a_session_waits_and_wins() -> None:
    bench = in_phase("apply")
    bench.lost()
    assert kinds(bench.cancel("s1", "stop it")) == ["cancelled"]
    settled = bench.reattach(marker=bench.marker(), session="S7")
    assert kinds(settled)[-1] == "fenced"
    assert (settled[-1].direction, settled[-1].reason) == ("revoke", "stop it")


def test_s191_a_cancel_and_a_preemption_at_once_end_the_step() -> None:
    bench = in_phase("apply")
    bench.lost()
    bench.cancel("s1", "stop it")
    bench.cold()
    ended = bench.of_kind(e.Compensated)[-1]
    assert (ended.reason, ended.evidence, ended.final) == ("stop it", "lost_with_epoch", True)
    assert bench.final("s1") == "compensated"
    control = in_phase("apply")
    control.lost()
    control.cold()
    assert control.open("s1").attempt == "s1.2"


# --- deadlines ------------------------------------------------------------------------------------


def test_a_deadline_ends_a_waiting_step_and_not_a_moment_before() -> None:
    bench = Bench()
    bench.create()
    bench.step("s1", deadline_ms=1000)
    assert bench.tick(999) == []
    cancelled, compensated = bench.tick(1)
    assert (cancelled.reason, compensated.evidence) == ("deadline", "never_applied")


def test_s203_a_deadline_on_a_live_epoch_revokes_first() -> None:
    bench = Bench().live()
    bench.step("s1", deadline_ms=1000)
    late = bench.receipt("s1")
    bench.beat()
    cancelled, fenced = [x for x in bench.tick(1000) if getattr(x, "step", "") == "s1"]
    assert (type(cancelled), fenced.direction, fenced.reason) == (e.Cancelled, "revoke", "deadline")
    assert only(bench.receive(late)).reason == "wrong_direction"
    assert bench.answer("s1", reason="never_began")[1].reason == "deadline"


@pytest.mark.parametrize("phase", ["revoke", "undo"])
def test_a_deadline_of_what_is_ending_changes_nothing(phase: str) -> None:
    bench = in_phase(phase, deadline_ms=1000)
    bench.tick(1000)
    assert bench.open("s1").reason == "cancelled"
    assert bench.of_kind(e.Cancelled)[-1].reason == "cancelled"


def test_a_deadline_of_an_indeterminate_step_changes_nothing() -> None:
    bench = in_phase("apply", deadline_ms=1000)
    bench.answer("s1", verdict="indeterminate", outcome="")
    bench.tick(1000)
    assert bench.open("s1").phase == "indeterminate"


def test_a_deadline_survives_a_change_of_owners() -> None:
    bench = Bench().live()
    bench.step("s1", deadline_ms=1000)
    bench.restart()
    assert "cancelled" in kinds(bench.tick(1000))


def test_a_deadline_that_passes_while_no_session_is_there_revokes_on_the_next() -> None:
    bench = in_phase("apply", deadline_ms=100)
    marker = bench.marker()
    bench.lost()
    assert kinds(bench.tick(100)) == ["cancelled"]
    settled = bench.attach(marker=marker)
    assert (settled[-1].direction, settled[-1].reason) == ("revoke", "deadline")


def test_a_deadline_that_a_new_owner_finds_passed_is_not_carried() -> None:
    bench = in_phase("apply", deadline_ms=100)
    marker = bench.marker()
    bench.lost()
    bench.found(marker=marker)
    bench.marked()
    bench.now_ms += 100
    bench.restart()
    fenced = only([x for x in bench.entries[-3:] if type(x) is e.Fenced])
    assert (fenced.direction, fenced.reason, fenced.attempt) == ("revoke", "deadline", "s1.1")


def test_a_fence_of_a_session_that_ended_is_dispatched_to_nobody() -> None:
    bench = in_phase("apply")
    assert len(bench.dispatches()) == 1
    bench.lost()
    assert bench.dispatches() == []
    bench.found(marker=bench.marker())
    bench.marked()
    assert bench.dispatches() == []  # what the former session left is yet to be settled
    bench.tick()
    assert only(bench.dispatches()).fence.session == bench.sandbox().session


# --- moved epochs: disk x policy x effect x phase ----------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("effect", ["workspace", "external"])
@pytest.mark.parametrize("policy", ["retry", "reject"])
@pytest.mark.parametrize("disk", ["cold", "warm", "restored", "gone", "session"])
def test_s002_s018_a_moved_generation(disk: str, policy: str, effect: str, phase: str) -> None:
    bench = Bench().live()
    for n in range(3):
        bench.step(f"w{n}")
        bench.answer(f"w{n}")
    command = external() if effect == "external" else body()
    bench.step("s1", command, on_moved_epoch=policy)
    old = bench.receipt("s1")
    if phase != "apply":
        bench.cancel("s1")
    if phase == "undo":
        bench.answer("s1", verdict="already_done")
    entries = _move(bench, disk)
    mine = [x for x in entries if getattr(x, "step", "") == "s1"]
    got = _expected(disk, policy, effect, phase)
    assert [_short(x) for x in mine] == got
    # Whatever came of it, what the old fence says is late.
    answer = bench.receive(old, gateway="gw1")
    assert "committed" not in kinds(answer)
    if bench.sandbox().session:
        assert last_refusal(bench).step == "s1"


def _move(bench: Bench, disk: str) -> list[Any]:
    if disk == "cold":
        return bench.cold() + bench.recover()
    if disk == "warm":
        return bench.warm()
    if disk == "session":
        return bench.reattach()
    if disk == "gone":
        return bench.gone()
    return bench.reattach(journal_seq=1) + bench.recover()


def _short(entry: Any) -> str:
    if type(entry) is e.Compensated:
        return f"{entry.evidence}{' final' if entry.final else ''}"
    if type(entry) is e.Fenced:
        return f"{entry.direction} {entry.attempt}"
    return kinds([entry])[0]


def _expected(disk: str, policy: str, effect: str, phase: str) -> list[str]:
    if effect == "external" and disk in ("cold", "restored", "gone"):
        return ["indeterminate"]
    if disk in ("cold", "gone"):
        again = phase == "apply" and policy == "retry"
        if not again:
            return ["lost_with_epoch final"]
        return ["lost_with_epoch", "parked", *(["apply s1.2"] if disk == "cold" else [])]
    if phase == "undo" and disk != "session":
        # Other bytes may hold another attempt of it: they are asked before anything is undone.
        return ["revoke s1.1"]
    if phase != "apply":
        return [f"{phase} s1.1"]
    if policy == "reject" and disk != "session":
        return ["revoke s1.1"]
    return ["carried", "apply s1.2"]


def test_s205_bytes_under_another_instance_vouch_for_no_external_effect() -> None:
    bench = in_phase("apply", "external")
    bench.step("s2")
    bench.lost()
    moved = msgspec.structs.replace(bench.sandbox().ref, instance="i2")
    entries = bench.attach(marker=bench.marker(), ref=moved, journal_seq=0)
    assert bench.of_kind(e.EpochOpened)[-1].disk == "warm"
    assert [_short(x) for x in entries if getattr(x, "step", "") == "s1"] == ["indeterminate"]
    assert bench.open("s2").attempt == "s2.2"


@pytest.mark.parametrize("phase", ["apply", "revoke", "undo"])
def test_s205_a_restore_on_the_same_disk_leaves_no_word_on_an_external_effect(phase: str) -> None:
    """The journal's records are of the tree from before the restore: it would say "never began"."""
    bench = Bench().live()
    bench.checkpoint()
    bench.cold()
    bench.recover()
    bench.step("s1", external())
    bench.step("s2")
    if phase != "apply":
        bench.cancel("s1")
    if phase == "undo":
        bench.answer("s1", verdict="already_done", of="s1.1")
    entries = bench.warm()
    opened = bench.of_kind(e.EpochOpened)[-1]
    assert (opened.disk, opened.recovering) == ("warm", True)
    assert [_short(x) for x in entries if getattr(x, "step", "") == "s1"] == ["indeterminate"]
    bench.recover()
    assert bench.open("s1").phase == "indeterminate"
    assert bench.open("s2").attempt == "s2.2", "what the tree held went with it"


def test_a_warm_disk_that_needs_no_restore_is_asked_for_an_external_effect() -> None:
    bench = Bench().live()
    bench.step("s0")
    bench.answer("s0")
    bench.step("s1", external())
    bench.warm()
    assert not bench.of_kind(e.EpochOpened)[-1].recovering
    assert (bench.open("s1").phase, bench.open("s1").attempt) == ("apply", "s1.2")


def test_a_carried_attempt_is_no_try_and_a_lost_one_is() -> None:
    bench = Bench().live()
    bench.step("s1", attempts_max=2)
    for _ in range(4):
        bench.reattach()
        bench.warm()
    step = bench.open("s1")
    assert (step.tries, step.ordinal) == (1, 9)
    bench.cold()
    assert (bench.open("s1").tries, bench.open("s1").ordinal) == (2, 10)
    bench.cold()
    assert bench.final("s1") == "compensated"
    ended = bench.of_kind(e.Compensated)[-1]
    assert (ended.reason, ended.evidence) == ("epoch_moved", "lost_with_epoch")


def test_the_reason_of_a_moved_epoch_is_not_an_older_one() -> None:
    bench = Bench().live()
    bench.step("s1", on_moved_epoch="reject")
    bench.reattach()
    assert bench.open("s1").reason == "session_moved"
    bench.warm()
    assert (bench.open("s1").phase, bench.open("s1").reason) == ("revoke", "epoch_moved")


def test_s019_the_first_attempts_late_receipt_is_recorded_and_refused() -> None:
    bench = Bench().live()
    bench.step("s1")
    first = bench.receipt("s1")
    bench.cold()
    assert only(bench.receive(first)).reason == "late_attempt"
    bench.answer("s1")
    assert bench.final("s1") == "committed"
    assert only(bench.receive(first)).reason == "step_final"
    assert len(bench.of_kind(e.Committed)) == 1


def test_s002_s004_the_late_receipt_of_a_rejected_step_is_recorded() -> None:
    bench = Bench().live()
    bench.step("s1", on_moved_epoch="reject")
    late = bench.receipt("s1")
    bench.cold()
    ended = bench.of_kind(e.Compensated)[-1]
    assert (ended.reason, ended.epoch, ended.final) == ("epoch_moved", 1, True)
    refused = only(bench.receive(late))
    assert (refused.reason, refused.epoch, refused.attempt) == ("step_final", 1, "s1.1")
    for _ in range(20):
        bench.receive(late)
    assert len(bench.of_kind(e.ReceiptRefused)) == limits.REFUSALS_RECORDED_PER_ATTEMPT_MAX


def test_s017_the_receipt_that_ended_a_step_says_nothing_new() -> None:
    bench = Bench().live()
    bench.step("s1")
    first = bench.receipt("s1")
    bench.receive(first)
    assert bench.receive(first) == []
    bench.step("s2")
    bench.cancel("s2")
    revoked = bench.receipt("s2")
    bench.receive(revoked)
    assert bench.receive(revoked) == []
    bench.step("s3")
    bench.cancel("s3")
    bench.answer("s3", verdict="already_done")
    undone = bench.receipt("s3")
    bench.receive(undone)
    assert bench.receive(undone) == []


# --- resolve --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["committed", "compensated"])
def test_an_operators_word_closes_an_indeterminate_step(state: str) -> None:
    bench = in_phase("apply")
    word = {"as": state, "who": "op", "note": "looked"}
    assert only(bench.command("resolve", "s1", word)).reason == "not_indeterminate"
    bench.answer("s1", verdict="indeterminate", outcome="")
    resolved = only(bench.command("resolve", "s1", word))
    assert (resolved.state, resolved.who, resolved.note) == (state, "op", "looked")
    assert bench.final("s1") == state
    assert getattr(bench.sandbox(), state) == 1
    assert only(bench.command("resolve", "s1", word)).reason == "not_indeterminate"
    assert only(bench.command("resolve", "s1", word, "nope")).reason == "unknown_sandbox"


def test_an_indeterminate_step_makes_room_for_others() -> None:
    bench = Bench().live()
    for n in range(limits.OPEN_STEPS_PER_SANDBOX_MAX + 1):
        bench.step(f"s{n}")
    entries = bench.answer("s0", verdict="indeterminate", outcome="")
    assert kinds(entries) == ["indeterminate", "fenced"]


def test_receipts_of_a_waiting_step_are_refused() -> None:
    bench = in_phase("apply")
    first = bench.receipt("s1")
    bench.gone()
    assert bench.open("s1").phase == "parked"
    assert only(bench.receive(first, gateway="gw1")).reason == "late_attempt"
    again = msgspec.structs.replace(first, attempt="s1.2")
    assert only(bench.receive(again, gateway="gw1")).reason == "not_fenced"


def test_a_dispatch_says_all_that_a_disk_must_check() -> None:
    bench = in_phase("apply")
    effect = only([f for f in bench.effects() if isinstance(f.order, orders.Dispatch)])
    assert effect.target == "gw1"
    fence = effect.order.fence
    assert (fence.sandbox, fence.epoch, fence.session, fence.no) == ("sbx", 1, "S1", 1)
    assert (fence.attempt, fence.direction, effect.order.step) == ("s1.1", "apply", "s1")


# --- what the disk's journal may have forgotten ---------------------------------------------------


@pytest.fixture
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FENCES_BEHIND_MAX", 8)
    monkeypatch.setattr(limits, "FENCES_AHEAD_MAX", 4)


def one_open(others: int) -> Bench:
    """`s1` is open since the fence 1, and `others` were handed out and answered since."""
    bench = Bench().live()
    bench.step("s1")
    for n in range(others):
        bench.step(f"o{n}")
        bench.answer(f"o{n}")
    return bench


@pytest.mark.usefixtures("short_window")
def test_no_fence_is_handed_out_far_ahead_of_an_open_one() -> None:
    bench = one_open(3)
    assert only(bench.step("s2")).reason == "far_ahead"
    assert only(bench.step("s3")).reason == "behind_others"
    assert bench.reattach()[-1].reason == "session_moved", "and none by a new session"
    assert kinds(bench.answer("s1")) == ["committed", "fenced", "fenced"]
    # Of those four fences the oldest is open now.
    for n in range(2):
        assert kinds(bench.step(f"t{n}")) == ["fenced"]
    assert only(bench.step("t2")).reason == "far_ahead"


@pytest.mark.usefixtures("short_window")
def test_what_is_woken_stays_within_reach_of_the_oldest() -> None:
    bench = one_open(1)
    room = limits.OPEN_STEPS_PER_SANDBOX_MAX
    for n in range(room):
        bench.step(f"s2{n}")
    assert len(bench.sandbox().fenced) == 3
    assert kinds(bench.answer("s20")) == ["committed"], "s1 is open still"
    assert kinds(bench.answer("s1")) == ["committed", *["fenced"] * 3]


@pytest.mark.usefixtures("short_window")
@pytest.mark.parametrize(("carries", "expected"), [(5, "carried"), (6, "indeterminate")])
def test_what_the_journal_may_have_forgotten_is_not_carried(carries: int, expected: str) -> None:
    """Each session's own fence counts: the record that wrote is as old as the first of them."""
    bench = one_open(3)
    for _ in range(carries - 1):
        bench.reattach()
        assert bench.open("s1").since_no == 1
    found = [x for x in bench.reattach() if getattr(x, "step", "") == "s1"]
    assert _short(found[0]) == expected
    if expected == "indeterminate":
        assert (found[0].reason, found[0].detail) == ("too_old", "session_moved")


@pytest.mark.usefixtures("short_window")
@pytest.mark.parametrize(
    ("carries", "expected"),
    [(4, ["cancelled", "fenced"]), (5, ["cancelled", "indeterminate"])],
)
def test_what_the_journal_may_have_forgotten_is_not_called_never_applied(
    carries: int, expected: list[str]
) -> None:
    bench = one_open(3)
    for _ in range(carries):
        bench.reattach()
    assert kinds(bench.cancel("s1")) == expected


@pytest.mark.usefixtures("short_window")
def test_an_attempt_on_a_new_disk_is_as_old_as_its_own_fence() -> None:
    bench = one_open(3)
    bench.cold()
    assert (bench.open("s1").attempt, bench.open("s1").since_no) == ("s1.2", bench.open("s1").no)
