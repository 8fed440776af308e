"""Fencing and commit, as stories: sections 1, 12 and 13 of the scenarios, decided by the core."""

import itertools
from typing import Any

import msgspec
import pytest
from fencepost.core import facts
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import inputs, orders

from tests.factories import Bench, body, external, kinds, only
from tests.properties.world import World


def test_s001_the_receipt_of_the_live_generation_commits_and_only_that_commits() -> None:
    bench = Bench().live()
    for _ in range(6):
        bench.cold()
    assert bench.sandbox().epoch == 7
    bench.step("s1")
    committed = only(bench.answer("s1"))
    assert (committed.step, committed.receipt.epoch) == ("s1", 7)
    assert bench.final("s1") == "committed"
    assert len(bench.of_kind(e.Committed)) == 1


def test_s002_s004_the_late_200_of_a_moved_generation_never_moves_the_step() -> None:
    bench = Bench().live()
    for _ in range(6):
        bench.cold()
    bench.step("s1")
    late = bench.receipt("s1")
    assert late.epoch == 7
    bench.cold()
    refused = only(bench.receive(late))
    assert (refused.reason, refused.epoch) == ("late_attempt", 7)
    ended = bench.of_kind(e.Compensated)[-1]
    assert (ended.reason, ended.evidence, ended.epoch) == ("epoch_moved", "lost_with_epoch", 7)
    assert kinds(bench.answer("s1")) == ["committed"]
    assert bench.of_kind(e.Committed)[-1].receipt.epoch == 8
    assert only(bench.receive(late)).reason == "step_final"


@pytest.mark.parametrize("first", ["move", "receipt"])
def test_s004_s012_s201_two_inputs_of_one_batch_are_decided_one_after_the_other(first: str) -> None:
    """Whatever order they come in, the second is decided on the state that the first left."""
    bench = Bench().live()
    bench.step("s1")
    right = bench.receipt("s1")
    # Both wait; nothing is between them but what the first one changed.
    if first == "move":
        assert "epoch_closed" in kinds(bench.gone())
        assert kinds(bench.receive(right, gateway="gw1")) == ["receipt_refused"]
        assert bench.open("s1").phase == "parked"
    else:
        assert kinds(bench.receive(right)) == ["committed"]
        assert "compensated" not in kinds(bench.gone())
        assert bench.final("s1") == "committed"


def test_s003_an_empty_200_is_unknown_and_the_step_is_asked_about_again() -> None:
    bench = Bench().live()
    bench.step("s1")
    owed = bench.dispatches()
    assert only(bench.receive(None, step="s1", problem="empty")).reason == "malformed"
    assert bench.dispatches() == owed
    assert kinds(bench.answer("s1")) == ["committed"]


def test_s009_s010_reads_are_no_steps_and_what_is_unclassified_is_none_either() -> None:
    bench = Bench()
    bench.see_gateway()
    bench.create()
    assert only(bench.step("r1", body("read_file", {"path": "a"}))).reason == "read_only_tool"
    assert only(bench.step("b1", body("bash", {"argv": ["x"]}))).reason == "unknown_tool"
    assert only(bench.step("c1", body("run_command", {"argv": ["x"]}))).reason == "no_compensation"
    assert bench.sandbox().steps == {}


def test_s011_success_in_any_other_words_changes_nothing() -> None:
    bench = Bench().live()
    bench.step("s1")
    lies: list[dict[str, Any]] = [
        {"verdict": "refused", "reason": "ok", "detail": "HTTP 200: committed"},
        {"verdict": "fault", "outcome": "ok", "result": msgspec.Raw(b'{"status":"committed"}')},
        {"verdict": "running", "result": msgspec.Raw(b'{"exit_code":0}')},
    ]
    for lie in lies:
        bench.answer("s1", **{"outcome": "", **lie})
        assert bench.final("s1") == ""
    assert bench.of_kind(e.Committed) == []


def test_s016_a_planner_that_lost_its_shard_reads_again_what_the_other_decided() -> None:
    bench = Bench().live()
    bench.step("s1")
    bench.answer("s1")
    bench.restart()
    assert bench.step("s1") == []
    assert bench.final("s1") == "committed"
    assert bench.dispatches() == []


def test_s018_s019_a_retry_is_a_new_attempt_under_a_new_fence() -> None:
    bench = Bench().live()
    bench.step("s1")
    first = only(bench.dispatches())
    bench.cold()
    second = only(bench.dispatches())
    assert (first.fence.attempt, second.fence.attempt) == ("s1.1", "s1.2")
    assert (first.fence.epoch, second.fence.epoch) == (1, 2)
    assert second.fence.no > first.fence.no
    assert (first.step, first.digest) == (second.step, second.digest)


def test_s022_a_file_that_went_with_its_disk_is_no_tool_result() -> None:
    bench = Bench().live()
    bench.step("s1", attempts_max=1)
    bench.cold()
    ended = bench.of_kind(e.Compensated)[-1]
    assert (ended.evidence, ended.reason, ended.final) == ("lost_with_epoch", "epoch_moved", True)
    assert bench.of_kind(e.Committed) == []


def test_s025_without_an_authority_a_receipt_commits_nothing_and_the_step_stays() -> None:
    bench = Bench().live()
    bench.step("s1")
    right = bench.receipt("s1")
    bench.lost()
    refused = only(bench.receive(right, gateway="gw1"))
    assert (refused.reason, bench.open("s1").phase) == ("no_session", "apply")
    bench.attach(marker=msgspec.structs.replace(bench.marker(), session="S1"), journal_seq=0)
    assert kinds(bench.answer("s1", verdict="attested", of="s1.1")) == ["committed"]


# --- faults alone and in pairs --------------------------------------------------------------------


def _restart(world: World) -> None:
    world.bench.restart()


def _late(world: World) -> None:
    """Delivery: the dispatch is carried out, its receipt comes after everything else."""
    for effect in world.bench.effects():
        if isinstance(effect.order, orders.Dispatch):
            world.pending += world.carry_out(effect.order, effect.target)


def _dropped(world: World) -> None:
    _late(world)
    world.pending.clear()


def _preempted(world: World) -> None:
    for name in list(world.disks):
        del world.disks[name]


def _replaced(world: World) -> None:
    for name in list(world.disks):
        world.replace_disk(name)


def _lease(world: World) -> None:
    world.bench.tick(700)
    world.bench.tick(6_000)


FAULTS = {
    "planner": _restart,
    "late": _late,
    "dropped": _dropped,
    "preempted": _preempted,
    "replaced": _replaced,
    "lease": _lease,
}


def calm(world: World) -> None:
    """Faults stop; everything is answered until nothing is open."""
    bench = world.bench
    for _ in range(40):
        bench.see_gateway()
        if world.beats("sbx"):
            bench.beat()
        for effect in bench.effects():
            world.pending += world.carry_out(effect.order, effect.target)
        pending, world.pending = world.pending, []
        for report in pending:
            if isinstance(report, tuple):
                gateway, sandbox, said = report
                bench.take(
                    inputs.ReceiptReceived(
                        sandbox=sandbox, gateway=gateway, mac_ok=True, receipt=said
                    )
                )
            else:
                bench.take(report)
        bench.tick(700)
    assert bench.auditor.finish() == []


@pytest.mark.parametrize("effect", ["workspace", "external"])
@pytest.mark.parametrize(
    "faults",
    [*((name,) for name in FAULTS), *itertools.permutations(FAULTS, 2)],
    ids="-".join,
)
def test_s023_s024_each_fault_alone_and_in_pairs(faults: tuple[str, ...], effect: str) -> None:
    world = World()
    bench = world.bench
    bench.see_gateway()
    bench.create()
    calm(world)
    assert bench.sandbox().live
    bench.step("s1", external() if effect == "external" else body())
    for name in faults:
        FAULTS[name](world)
    calm(world)
    lost = {"preempted", "replaced"} & set(faults)
    if lost and faults[0] == "late":
        # The receipt came before anybody saw the loss: committed, and owed to the next disk (I2).
        assert bench.final("s1") == "committed"
        assert bench.of_kind(e.EpochOpened)[-1].owed == (1 if effect == "workspace" else 0)
        return
    if effect == "external" and lost:
        assert bench.open("s1").phase == "indeterminate"
        assert world.external.get(("sbx", "s1"), 0) <= 1
        return
    assert bench.final("s1") == "committed"
    disk = only(list(world.disks.values()))
    assert disk.applied == {"s1": 1}
    if effect == "external":
        assert world.external == {("sbx", "s1"): 1}


def test_s226_receipts_that_were_all_lost_are_asked_for_again() -> None:
    world = World()
    world.bench.see_gateway()
    world.bench.create()
    calm(world)
    for n in range(10):
        world.bench.step(f"s{n}")
    _dropped(world)
    _dropped(world)
    assert len(world.bench.sandbox().fenced) == 10
    calm(world)
    assert all(world.bench.final(f"s{n}") == "committed" for n in range(10))
    assert only(list(world.disks.values())).applied == {f"s{n}": 1 for n in range(10)}


# --- delivery, and what the field taught ------------------------------------------------------------


def test_s165_fencing_is_on_unless_a_provider_says_that_it_cannot() -> None:
    assert facts.Capabilities().generation is True
    bench = Bench().live()
    assert only(bench.step("s1")).epoch == 1


def test_s188_a_recorded_success_never_runs_again() -> None:
    bench = Bench().live()
    bench.step("s1")
    bench.answer("s1")
    bench.gone()
    assert bench.step("s1") == []
    bench.tick()
    bench.assigned(ref=msgspec.structs.replace(bench.sandbox().ref or _ref(), instance="i2"))
    bench.attach()
    assert bench.step("s1") == []
    assert bench.dispatches() == []


def _ref() -> facts.Ref:
    return facts.Ref(authority="host", provider="process", native_id="n2", instance="i2")


def test_s184_s198_a_cancelled_step_has_not_ended_before_the_journal_says_so() -> None:
    bench = Bench().live()
    bench.step("s1", external())
    bench.cancel("s1")
    assert bench.answer("s1", verdict="running", outcome="") == []
    view = bench.machine.view_step(bench.state, "sbx", "s1")
    assert (view["state"], view["phase"]) == ("fenced", "revoke")
    assert bench.of_kind(e.Compensated) == []
    bench.answer("s1", reason="never_began")
    assert bench.machine.view_step(bench.state, "sbx", "s1")["state"] == "compensated"


def test_s197_the_loser_is_refused_when_it_writes_last() -> None:
    bench = Bench().live()
    bench.step("s1")
    loser = bench.receipt("s1")
    bench.cold()
    bench.answer("s1")
    assert only(bench.receive(loser)).reason == "step_final"
    assert len(bench.of_kind(e.Committed)) == 1


def test_s199_a_warm_reopen_commits_what_the_journal_attests() -> None:
    world = World()
    bench = world.bench
    bench.see_gateway()
    bench.create()
    calm(world)
    bench.step("s1")
    _late(world)
    late = world.pending.pop()
    _lease(world)
    assert not bench.sandbox().open
    calm(world)
    committed = only(bench.of_kind(e.Committed))
    assert (committed.receipt.epoch, committed.receipt.verdict) == (2, "attested")
    assert bench.of_kind(e.EpochOpened)[-1].disk == "warm"
    assert only(list(world.disks.values())).applied == {"s1": 1}
    gateway, sandbox, said = late
    refused = only(
        bench.take(
            inputs.ReceiptReceived(sandbox=sandbox, gateway=gateway, mac_ok=True, receipt=said)
        )
    )
    assert (refused.reason, refused.epoch) == ("step_final", 1)


def test_s205_an_exact_restore_is_another_session() -> None:
    bench = Bench().live()
    for n in range(10):
        bench.step(f"w{n}")
        bench.answer(f"w{n}")
    assert bench.sandbox().journal_seq == 10
    bench.step("s11")
    late = bench.receipt("s11")
    marker = bench.marker()
    bench.lost()
    bench.attach(marker=marker, journal_seq=10)
    assert bench.sandbox().epoch == 1
    assert only(bench.receive(late)).reason == "late_attempt"
    assert kinds(bench.answer("s11")) == ["committed"]


def test_s141_s159_a_step_that_may_have_begun_is_asked_about_never_begun_anew() -> None:
    bench = Bench().live()
    bench.step("s1", external())
    before = bench.dispatches()
    bench.restart()
    assert bench.dispatches() == before
    bench.tick(2_500)
    assert bench.dispatches() == before
    assert len(bench.of_kind(e.Fenced)) == 1


def test_s142_a_fence_is_in_the_ledger_before_anything_is_dispatched() -> None:
    bench = Bench().live()
    value = only(
        list(bench.machine.decode("commands", "fp.v1.cmd.step.sbx.s1", msgspec.json.encode(body())))
    )
    decided = bench.machine.decide(bench.state, bench.hints, value, bench.now_ms)
    assert kinds(list(decided)) == ["fenced"]
    assert bench.dispatches() == []
    bench.take(value)
    assert len(bench.dispatches()) == 1


def test_s143_a_release_half_done_is_taken_up_by_the_next_owner() -> None:
    bench = Bench().live()
    bench.command("release", "r", {})
    stop = [f.order for f in bench.effects()]
    bench.restart()
    bench.see_gateway()
    assert [f.order for f in bench.effects()] == stop
    bench.gone()
    assert bench.gone(ref=_ref()) == []
    assert bench.effects() == []


def test_s139_a_permanent_refusal_is_final_and_the_same_each_time() -> None:
    bench = Bench().live()
    wrong = body("run_command", {"argv": ["x"]})
    first, second = only(bench.step("s1", wrong)), only(bench.step("s1", wrong))
    assert first == second
    assert bench.sandbox().steps == {}
    assert bench.effects() == []


def test_s158_a_tool_that_failed_is_a_result_and_a_sandbox_that_did_not_open_is_none() -> None:
    bench = Bench()
    bench.see_gateway()
    bench.create()
    bench.tick()
    bench.assigned()
    bench.step("s1")
    failed = facts.AttachFailed(
        sandbox="sbx",
        gateway="gw1",
        session="S9",
        ref=bench.sandbox().ref or _ref(),
        reason="no such container",
        observed="unknown",
    )
    bench.take(failed)
    assert bench.machine.view_step(bench.state, "sbx", "s1")["state"] == "pending"
    bench.attach()
    committed = only(bench.answer("s1", outcome="failed"))
    assert committed.receipt.outcome == "failed"
    assert all("no such container" not in repr(x) for x in bench.of_kind(e.Committed))


def test_s144_views_and_events_show_no_secrets() -> None:
    bench = Bench().live()
    bench.step("s1", external())
    bench.answer("s1")
    shown = [bench.machine.view_sandbox(bench.state, "sbx")]
    shown += [bench.machine.view_step(bench.state, "sbx", "s1")]
    shown += [event.body for x in bench.entries for event in bench.machine.events_of(x)]
    text = msgspec.json.encode(shown).decode()
    assert "i1" in text  # the instance is shown: it is a name
    for secret in ('"nonce"', '"N1"', '"mac"', '"token"', '"argv"'):
        assert secret not in text


def test_s145_a_field_that_is_not_used_leaves_the_bytes_as_they_were() -> None:
    bench = Bench()
    plain = e.Compensated(
        sandbox="sbx", step="s1", attempt="s1.1", reason="r", evidence="undone", final=True
    )
    assert bench.machine.encode_entries([plain]) == (
        b'[{"kind":"compensated","sandbox":"sbx","step":"s1","attempt":"s1.1","reason":"r",'
        b'"evidence":"undone","final":true}]'
    )


def test_s146_every_recorded_failure_names_its_sandbox() -> None:
    bench = Bench().live()
    bench.step("s1", body("rm", {}))
    bench.step("s2")
    bench.answer("s2", nonce="N0")
    bench.answer("s2", verdict="indeterminate", outcome="")
    bench.lost()
    failures = [
        x
        for x in bench.entries
        if isinstance(x, e.Refused | e.ReceiptRefused | e.Indeterminate | e.Detached)
    ]
    assert len(failures) == 4
    assert {x.sandbox for x in failures} == {"sbx"}


@pytest.mark.parametrize(
    "odd", ["__proto__", "__class__", "__dict__", "constructor", "self", "items", "get", "0"]
)
def test_s076_odd_names_are_values_like_others(odd: str) -> None:
    bench = Bench()
    bench.live(odd)
    assert kinds(bench.step(odd, sandbox=odd)) == ["fenced"]
    bench.restart()
    bench.see_gateway()
    assert kinds(bench.answer(odd, odd)) == ["committed"]
    assert bench.machine.view_sandbox(bench.state, odd)["committed"] == 1
    assert [v["sandbox"] for v in bench.machine.view_sandboxes(bench.state)] == [odd]
    bench.command("release", "r", {}, odd)
    bench.gone(odd)
    assert bench.sandbox(odd).gone
