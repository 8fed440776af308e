"""When a checkpoint is taken, what it may hold, and what `commit_after` waits for."""

import itertools
from typing import Any

import msgspec
import pytest
from fencepost.core import facts, limits
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import orders
from fencepost.core.sandbox.state import Sandbox

from tests.factories import Bench, kinds, manifest, only


def ordered(bench: Bench) -> list[orders.CheckpointOrder]:
    return [f.order for f in bench.effects() if isinstance(f.order, orders.CheckpointOrder)]


def asked(bench: Bench, id_: str = "k1") -> list[Any]:
    return bench.command("checkpoint", id_, {}) + bench.tick()


def committed(bench: Bench, *names: str, **over: Any) -> None:
    for name in names:
        bench.step(name, **over)
        bench.answer(name)


# --- asking ---------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_asked_for_is_begun_ordered_and_named() -> None:
    bench = Bench().live()
    committed(bench, "s1")
    assert kinds(asked(bench)) == ["checkpoint_asked", "checkpointing"]
    order = only(ordered(bench))
    assert (order.checkpoint, order.base, order.session) == ("k1", "", bench.sandbox().session)
    assert kinds(bench.checkpointed()) == ["checkpointed"]
    known = bench.sandbox()
    assert known.checkpoint is not None
    assert (known.checkpoint.id, known.checkpoint.manifest) == ("k1", manifest("k1"))
    assert (known.owed, known.owed_sum, known.checkpointing) == (0, 0, None)
    assert ordered(bench) == []


def test_the_next_checkpoint_names_the_newest_one_as_its_base() -> None:
    bench = Bench().live()
    bench.checkpoint("k1")
    asked(bench, "k2")
    assert only(ordered(bench)).base == manifest("k1")


def test_asking_for_the_same_checkpoint_again_makes_no_entry() -> None:
    bench = Bench().live()
    asked(bench)
    assert asked(bench) == []
    bench.checkpointed()
    assert asked(bench) == []


def test_too_many_wishes_are_refused() -> None:
    bench = Bench().live()
    bench.step("s1")  # so that none is stored
    for n in range(limits.CHECKPOINTS_ASKED_MAX):
        assert kinds(bench.command("checkpoint", f"k{n}", {}))[-1] == "checkpoint_asked"
    assert only(bench.command("checkpoint", "one-more", {})).reason == "overloaded"


@pytest.mark.parametrize(
    ("sandbox", "reason"), [("nobody", "unknown_sandbox"), ("sbx", "sandbox_released")]
)
def test_a_wish_that_nobody_can_fulfil_is_refused(sandbox: str, reason: str) -> None:
    bench = Bench().live()
    bench.command("release", "r", {})
    assert only(bench.command("checkpoint", "k1", {}, sandbox)).reason == reason


# --- the hold -------------------------------------------------------------------------------------


def test_no_fence_is_handed_out_while_a_checkpoint_is_taken_and_afterwards_it_is() -> None:
    bench = Bench().live()
    asked(bench)
    parked = only(bench.step("s1"))
    assert (type(parked), parked.reason) == (e.Parked, "checkpointing")
    bench.checkpointed()
    assert kinds(bench.tick()) == ["fenced"]


def test_the_order_waits_for_what_is_fenced() -> None:
    bench = Bench().live()
    bench.step("s1")
    asked(bench)
    assert ordered(bench) == []
    made = len(bench.owed)
    bench.answer("s1")
    assert ordered(bench)
    assert any(isinstance(f.order, orders.CheckpointOrder) for f in bench.owed[made:]), "at once"


def test_a_checkpoint_of_before_the_hold_was_quiet_is_passed_over() -> None:
    bench = Bench().live()
    bench.step("s1")
    asked(bench)
    assert bench.checkpointed() == []
    bench.answer("s1")
    assert kinds(bench.checkpointed()) == ["checkpointed"]


def test_a_failure_ends_the_hold_and_says_why() -> None:
    bench = Bench().live()
    asked(bench)
    bench.step("s1")
    failed = only(bench.take(failure(bench.sandbox(), reason="no_space", detail="full")))
    assert (failed.reason, failed.detail) == ("no_space", "full")
    assert kinds(bench.tick()) == ["fenced"]
    assert bench.sandbox().checkpoint is None


def failure(known: Sandbox, **over: Any) -> facts.CheckpointFailed:
    assert known.checkpointing is not None
    fields = {
        "sandbox": known.id,
        "gateway": known.gateway,
        "session": known.session,
        "epoch": known.epoch,
        "checkpoint": known.checkpointing.id,
        "reason": "io_error",
        **over,
    }
    return facts.CheckpointFailed(**fields)


def success(known: Sandbox) -> facts.Checkpointed:
    assert known.checkpointing is not None
    return facts.Checkpointed(
        sandbox=known.id,
        gateway=known.gateway,
        session=known.session,
        epoch=known.epoch,
        nonce=known.nonce,
        checkpoint=known.checkpointing.id,
        manifest=manifest("late"),
        journal_seq=known.journal_seq,
    )


def test_a_busy_toolhost_is_no_failure() -> None:
    bench = Bench().live()
    asked(bench)
    assert bench.take(failure(bench.sandbox(), reason="busy")) == []
    assert ordered(bench)


def test_a_hold_ends_by_time_whatever_became_of_the_order() -> None:
    bench = Bench().live()
    asked(bench)
    late = bench.sandbox().checkpointing
    assert late is not None
    stored = success(bench.sandbox())
    for _ in range(200):
        bench.beat()
        if entries := [x for x in bench.tick(4_000) if type(x) is e.CheckpointFailedEntry]:
            break
    assert only(entries).reason == "timeout"
    assert bench.now_ms - late.since_ms > limits.CHECKPOINT_MS
    assert bench.take(stored) == [], "what was given up is nobody's checkpoint"


def test_a_checkpoint_under_way_survives_a_session_that_moves() -> None:
    bench = Bench().live()
    asked(bench)
    first = only(ordered(bench))
    bench.reattach()
    again = only(ordered(bench))
    assert again.session != first.session
    assert bench.checkpointed(session=first.session) == [], "of the former session"
    assert kinds(bench.checkpointed()) == ["checkpointed"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"session": "S0"},
        {"epoch": 9},
        {"gateway": "gw9"},
        {"nonce": "N0"},
        {"checkpoint": "other"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_only_the_answer_to_the_order_is_a_checkpoint(wrong: dict[str, Any]) -> None:
    bench = Bench().live()
    asked(bench)
    assert bench.checkpointed(**wrong) == []
    assert kinds(bench.checkpointed()) == ["checkpointed"]


@pytest.mark.parametrize(
    "wrong", [{"manifest": "sha256:0"}, {"manifest": "k1"}, {"journal_seq": 0}], ids=str
)
def test_a_checkpoint_that_is_not_whole_is_a_failure(wrong: dict[str, Any]) -> None:
    bench = Bench().live()
    committed(bench, "s1")
    asked(bench)
    assert kinds(bench.checkpointed(**wrong)) == ["checkpoint_failed"]
    assert bench.sandbox().owed == 1


# --- by policy ------------------------------------------------------------------------------------


def test_every_n_steps_a_checkpoint_is_begun() -> None:
    bench = Bench().live(checkpoint_every_steps=2)
    committed(bench, "s1")
    assert "checkpointing" not in kinds(bench.tick())
    committed(bench, "s2")
    begun = only(bench.tick())
    assert (type(begun), begun.reason) == (e.CheckpointingEntry, "every_steps")
    bench.checkpointed()
    assert bench.tick() == []


def test_every_t_seconds_a_checkpoint_is_begun_where_something_was_committed() -> None:
    bench = Bench().live(checkpoint_every_s=3)
    bench.beat()
    assert "checkpointing" not in kinds(bench.tick(4_000))
    committed(bench, "s1")
    begun = only([x for x in bench.tick(1_000) if type(x) is e.CheckpointingEntry])
    assert begun.reason == "every_s"
    bench.checkpointed()
    committed(bench, "s2")
    bench.beat()
    assert "checkpointing" not in kinds(bench.tick(2_000))
    assert "checkpointing" in kinds(bench.tick(1_500))


def test_a_failed_checkpoint_is_tried_again_later_and_ever_later() -> None:
    bench = Bench().live(checkpoint_every_steps=1)
    committed(bench, "s1")
    waits = []
    for _ in range(3):
        bench.tick()
        bench.take(failure(bench.sandbox()))
        began = bench.now_ms
        for _ in itertools.count():
            bench.beat()
            if "checkpointing" in kinds(bench.tick(500)):
                break
        waits.append(bench.now_ms - began)
    assert waits[0] >= limits.CHECKPOINT_RETRY_MS
    assert waits[0] < waits[1] < waits[2]


def preempting(known: Sandbox, **over: Any) -> facts.Preempting:
    fields = {
        "sandbox": known.id,
        "gateway": known.gateway,
        "session": known.session,
        "epoch": known.epoch,
        "ref": known.ref,
        "grace_ms": 30_000,
        **over,
    }
    return facts.Preempting(**fields)


def test_an_announced_preemption_saves_what_was_committed() -> None:
    bench = Bench().live()
    committed(bench, "s1")
    entries = bench.take(preempting(bench.sandbox()))
    assert kinds(entries) == ["preempting", "checkpointing"]
    assert entries[-1].reason == "preempting"
    assert bench.take(preempting(bench.sandbox())) == [], "announced again"


def test_a_preemption_where_nothing_is_unsaved_takes_no_checkpoint() -> None:
    bench = Bench().live()
    assert kinds(bench.take(preempting(bench.sandbox()))) == ["preempting"]


def test_a_preemption_of_another_instance_says_nothing() -> None:
    bench = Bench().live()
    known = bench.sandbox()
    other = msgspec.structs.replace(known.ref, instance="i9")
    assert bench.take(preempting(known, ref=other)) == []


# --- pruning --------------------------------------------------------------------------------------


def pruned(bench: Bench) -> list[orders.PruneOrder]:
    return [f.order for f in bench.owed if isinstance(f.order, orders.PruneOrder)]


def test_the_newest_checkpoints_are_kept_and_the_others_dropped() -> None:
    bench = Bench().live()
    names = [f"k{n}" for n in range(limits.CHECKPOINTS_KEPT + 2)]
    for n, name in enumerate(names):
        committed(bench, f"s{n}")
        bench.checkpoint(name)
    assert pruned(bench)[-1].keep == [manifest(name) for name in names[2:]]


def test_what_is_gone_for_good_keeps_no_checkpoint() -> None:
    bench = Bench().live()
    bench.checkpoint("k1")
    bench.command("release", "r", {})
    bench.gone()
    assert pruned(bench)[-1].keep == []


def test_what_a_checkpoint_stored_that_never_counted_goes_with_its_sandbox() -> None:
    bench = Bench().live()
    asked(bench)
    bench.tick()
    bench.command("release", "r", {})
    bench.gone()
    assert pruned(bench)[-1].keep == []


# --- commit_after ---------------------------------------------------------------------------------


def test_after_a_heartbeat_a_joined_step_is_committed_and_not_before() -> None:
    bench = Bench().live()
    bench.step("s1", commit_after="heartbeat")
    joined = only(bench.answer("s1"))
    assert type(joined) is e.Joined
    assert bench.open("s1").phase == "joined"
    assert bench.dispatches() == [], "nothing is asked of the toolhost any more"
    seq = joined.receipt.journal_seq
    bench.beat(journal_seq=seq - 1)
    assert bench.tick() == []
    bench.beat(journal_seq=seq, session="S0")
    assert bench.tick() == []
    bench.beat(journal_seq=seq)
    entry = only(bench.tick())
    assert (type(entry), entry.beat, entry.receipt) == (e.Committed, seq, joined.receipt)
    assert bench.final("s1") == "committed"


def test_after_a_checkpoint_a_joined_step_is_committed_by_it() -> None:
    bench = Bench().live()
    bench.step("s1", commit_after="checkpoint")
    bench.answer("s1")
    begun = only(bench.tick())
    assert (type(begun), begun.reason) == (e.CheckpointingEntry, "commit_after"), "at once"
    bench.beat(journal_seq=99)
    assert bench.tick() == []
    entries = bench.checkpointed()
    assert kinds(entries) == ["checkpointed", "committed"]
    assert bench.sandbox().owed == 0, "the checkpoint holds it"


def test_a_checkpoint_is_more_than_a_heartbeat() -> None:
    bench = Bench().live()
    bench.step("s1", commit_after="heartbeat")
    bench.answer("s1")
    assert "committed" in kinds(bench.checkpoint())


def test_the_joined_receipt_again_makes_no_entry_and_another_one_is_refused() -> None:
    bench = Bench().live()
    bench.step("s1", commit_after="checkpoint")
    got = bench.receipt("s1")
    bench.receive(got)
    assert bench.receive(got) == []
    assert kinds(bench.receive(msgspec.structs.replace(got, no=99))) == ["receipt_refused"]


def test_reclaim_right_after_the_commit_and_the_checkpoint_holds_it() -> None:
    bench = Bench().live()
    bench.step("s1", commit_after="checkpoint")
    bench.answer("s1")
    bench.checkpointed()
    bench.cold()
    opened = bench.of_kind(e.EpochOpened)[-1]
    assert (opened.disk, opened.owed, opened.recovering) == ("restored", 0, True)
    assert kinds(bench.restored()) == ["restored", "recovered"]


@pytest.mark.parametrize("commit_after", ["heartbeat", "checkpoint"])
def test_a_joined_step_whose_disk_is_lost_is_not_committed_and_tried_again(
    commit_after: str,
) -> None:
    bench = Bench().live()
    bench.step("s1", commit_after=commit_after)
    bench.answer("s1")
    bench.cold()
    assert bench.final("s1") == ""
    assert bench.open("s1").attempt == "s1.2"
    assert bench.open("s1").phase == "apply", "nothing was owed"
    bench.answer("s1")
    bench.beat(journal_seq=bench.sandbox().journal_seq)
    bench.tick()
    if commit_after == "checkpoint":
        bench.checkpointed()
    assert bench.final("s1") == "committed"


def test_a_checkpoint_that_a_dead_generation_finished_commits_nothing() -> None:
    bench = Bench().live()
    bench.step("s1", commit_after="checkpoint")
    bench.answer("s1")
    bench.tick()
    stored = success(bench.sandbox())
    bench.cold()
    assert bench.take(stored) == []
    assert bench.final("s1") == ""


def test_a_joined_step_that_is_cancelled_is_taken_back_and_its_checkpoint_given_up() -> None:
    bench = Bench().live()
    bench.step("s1", commit_after="checkpoint")
    bench.answer("s1")
    bench.tick()
    assert kinds(bench.cancel("s1")) == ["checkpoint_failed", "cancelled", "fenced"]
    bench.answer("s1", verdict="already_done")
    bench.answer("s1")
    assert bench.final("s1") == "compensated"


def test_a_deadline_before_the_checkpoint_takes_the_step_back() -> None:
    bench = Bench().live()
    bench.step("s1", commit_after="checkpoint", deadline_ms=200)
    bench.answer("s1")
    entries = bench.tick(300)
    assert [x for x in kinds(entries) if x != "checkpointing"][:3] == [
        "checkpoint_failed",
        "cancelled",
        "fenced",
    ]


def test_a_session_that_moves_has_the_joined_attempt_attested() -> None:
    bench = Bench().live()
    bench.step("s1", commit_after="heartbeat")
    bench.answer("s1")
    bench.reattach()
    step = bench.open("s1")
    assert (step.phase, step.attempt, step.receipt) == ("apply", "s1.2", None)


def test_one_checkpoint_commits_all_that_waits_also_what_does_not_fit_its_entries() -> None:
    bench = Bench().live()
    long = msgspec.Raw(msgspec.json.encode("x" * (limits.INLINE_BYTES_MAX - 100)))
    for n in range(limits.OPEN_STEPS_PER_SANDBOX_MAX):
        bench.step(f"s{n}", commit_after="checkpoint")
    for n in range(limits.OPEN_STEPS_PER_SANDBOX_MAX):
        bench.answer(f"s{n}", result=long)
    entries = bench.checkpointed()
    assert len(bench.machine.encode_entries(entries)) < limits.INPUT_ENTRIES_BYTES_MAX
    ended = [x for x in entries if type(x) is e.Committed]
    assert len(ended) == limits.OPEN_STEPS_PER_SANDBOX_MAX
    assert bytes(ended[0].receipt.result) == bytes(long)
    assert "joined" in bytes(ended[-1].receipt.result).decode()
    assert bytes(bench.of_kind(e.Joined)[-1].receipt.result) == bytes(long)


def test_a_new_owner_commits_what_the_former_one_had_joined() -> None:
    bench = Bench().live()
    bench.step("s1", commit_after="heartbeat")
    bench.answer("s1")
    bench.restart()
    bench.see_gateway()
    bench.beat(journal_seq=bench.sandbox().journal_seq)
    assert kinds(bench.tick()) == ["committed"]
