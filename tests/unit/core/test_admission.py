"""What is refused at admission, with its reason and field, each beside the control that is taken."""

from typing import Any

import msgspec
import pytest
from fencepost.core import facts, ids, limits
from fencepost.core.sandbox import entries as e

from tests.factories import CALL, UNDO, Bench, body, external, kinds, only, ref

RUN = {"argv": ["make"]}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("an unknown tool", body("rm_rf", {}), "unknown_tool", "tool"),
    ("a tool of no name", body("", {}), "unknown_tool", "tool"),
    ("a missing argument", body(args={"content": "x"}), "bad_arguments", "args.path"),
    ("a path outside", body(args={**CALL, "path": "../x"}), "bad_arguments", "args.path"),
    ("an unknown argument", body(args={**CALL, "colour": 1}), "bad_arguments", "args.colour"),
    ("arguments of no object", body(args=[1]), "bad_arguments", "args"),
    ("a read", body("read_file", {"path": "a"}), "read_only_tool", "tool"),
    (
        "an inline argument over the limit",
        body(args={**CALL, "content": "x" * limits.INLINE_BYTES_MAX}),
        "too_large",
        "args",
    ),
    (
        "an external effect after a heartbeat",
        external(commit_after="heartbeat"),
        "unsupported",
        "commit_after",
    ),
    ("no attempt", body(attempts_max=0), "out_of_range", "attempts_max"),
    (
        "too many attempts",
        body(attempts_max=limits.ATTEMPTS_MAX + 1),
        "out_of_range",
        "attempts_max",
    ),
    (
        "too short a deadline",
        body(deadline_ms=limits.DEADLINE_MS_MIN - 1),
        "out_of_range",
        "deadline_ms",
    ),
    (
        "too long a deadline",
        body(deadline_ms=limits.DEADLINE_MS_MAX + 1),
        "out_of_range",
        "deadline_ms",
    ),
    ("a command without an undo", body("run_command", RUN), "no_compensation", "compensation"),
    (
        "a command with a pre-image",
        body("run_command", RUN, compensation={"kind": "pre_image"}),
        "no_compensation",
        "compensation.kind",
    ),
    (
        "an undo without arguments",
        body("run_command", RUN, compensation={"kind": "command"}),
        "no_compensation",
        "compensation.args",
    ),
    (
        "an undo of wrong arguments",
        body("run_command", RUN, compensation={"kind": "command", "args": {"argv": []}}),
        "bad_arguments",
        "compensation.args.argv",
    ),
    (
        "an undo of no object",
        body("run_command", RUN, compensation={"kind": "command", "args": 7}),
        "bad_arguments",
        "compensation.args",
    ),
    (
        "an undo over the limit",
        body(
            "run_command",
            RUN,
            compensation={"kind": "command", "args": {"shell": "x" * limits.INLINE_BYTES_MAX}},
        ),
        "too_large",
        "compensation.args",
    ),
]


@pytest.mark.parametrize(
    ("command", "reason", "field"),
    [pytest.param(*rest, id=name) for name, *rest in REFUSED],
)
def test_s020_a_command_that_cannot_be_a_step_is_refused(
    command: dict[str, Any], reason: str, field: str
) -> None:
    bench = Bench().live()
    refused = only(bench.step("s1", command))
    assert (type(refused), refused.reason, refused.field) == (e.Refused, reason, field)
    assert (refused.command, refused.id) == ("step", "s1")
    assert refused.digest
    assert bench.sandbox().steps == {}
    assert kinds(bench.step("s1")) == ["fenced"]


TAKEN: list[dict[str, Any]] = [
    body(args={**CALL, "content": "x" * (limits.INLINE_BYTES_MAX - 100)}),
    body(attempts_max=1),
    body(attempts_max=limits.ATTEMPTS_MAX),
    body(deadline_ms=limits.DEADLINE_MS_MIN),
    body(deadline_ms=limits.DEADLINE_MS_MAX),
    body("run_command", RUN, compensation=UNDO),
    body("apply_patch", {"patch": "x"}, compensation={"kind": "pre_image"}),
    body("write_file", compensation=UNDO),
    body("run_migration", {"name": "m", "up": RUN, "down": RUN}),
    body("delete_path", {"path": "a"}),
]


@pytest.mark.parametrize("command", TAKEN)
def test_a_command_within_the_bounds_is_fenced(command: dict[str, Any]) -> None:
    assert kinds(Bench().live().step("s1", command)) == ["fenced"]


def test_what_a_command_leaves_out_is_filled_in() -> None:
    bench = Bench().live()
    bench.step("s1")
    spec = bench.open("s1").spec
    assert spec.attempts_max == limits.ATTEMPTS_MAX_DEFAULT
    assert spec.deadline_at_ms == bench.now_ms + limits.DEADLINE_MS_DEFAULT
    assert spec.compensation.kind == "pre_image"
    bench.step("s2", attempts_max=2, deadline_ms=700)
    assert bench.open("s2").spec.attempts_max == 2
    assert bench.open("s2").spec.deadline_at_ms == bench.now_ms + 700


def test_a_migration_is_undone_by_its_way_down() -> None:
    bench = Bench().live()
    bench.step("s1", body("run_migration", {"name": "m", "up": RUN, "down": {"shell": "down"}}))
    compensation = bench.open("s1").spec.compensation
    assert compensation.kind == "command"
    assert msgspec.json.decode(compensation.args) == {"shell": "down"}


def test_a_sandbox_that_is_not_there_is_named() -> None:
    bench = Bench()
    assert only(bench.step("s1")).reason == "unknown_sandbox"
    bench.live()
    assert kinds(bench.step("s1")) == ["fenced"]


def test_a_sandbox_of_another_shard_is_misrouted() -> None:
    shard = ids.shard_of("sbx", 8)
    for kind, content in (("step", body()), ("create", {}), ("cancel", {}), ("release", {})):
        other = Bench(shard=(shard + 1) % 8, shards=8)
        refused = only(other.command(kind, "s1", content))
        assert (refused.reason, refused.field) == ("misrouted", "sandbox")
    right = Bench(shard=shard, shards=8)
    assert only(right.step("s1")).reason == "unknown_sandbox"


def test_a_released_sandbox_takes_no_step() -> None:
    bench = Bench().live()
    bench.command("release", "r", {})
    assert only(bench.step("s1")).reason == "sandbox_released"
    bench.gone()
    assert bench.sandbox().gone
    assert only(bench.step("s1")).reason == "sandbox_released"


def test_s005_without_a_generation_no_step_is_admitted() -> None:
    bench = Bench()
    bench.see_gateway()
    bench.create()
    bench.tick()
    bench.assigned(capabilities=facts.Capabilities(generation=False))
    refused = only(bench.step("s1"))
    assert (refused.reason, refused.field) == ("no_generation", "sandbox")
    control = Bench().live()
    assert kinds(control.step("s1")) == ["fenced"]


def test_s005_steps_that_came_before_the_provider_was_known_are_never_fenced() -> None:
    bench = Bench()
    bench.see_gateway()
    bench.create()
    bench.step("s1")
    bench.step("s2")
    bench.assigned(capabilities=facts.Capabilities(generation=False), ref=ref())
    bench.tick(600)
    assert bench.of_kind(e.Fenced) == []
    ended = bench.of_kind(e.Compensated)
    assert [(c.step, c.reason, c.evidence) for c in ended] == [
        ("s1", "no_generation", "never_applied"),
        ("s2", "no_generation", "never_applied"),
    ]


def test_s230_an_overloaded_sandbox_takes_the_same_step_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "PARKED_STEPS_PER_SANDBOX_MAX", 2)
    bench = Bench().live()
    for n in range(limits.OPEN_STEPS_PER_SANDBOX_MAX):
        assert kinds(bench.step(f"f{n}")) == ["fenced"]
    assert kinds(bench.step("p1")) == ["parked"]
    assert kinds(bench.step("p2")) == ["parked"]
    assert only(bench.step("p3")).reason == "overloaded"
    bench.answer("f0")
    assert kinds(bench.step("p3")) == ["parked"]


def test_s230_an_overloaded_shard_takes_the_same_step_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "OPEN_STEPS_PER_SHARD_MAX", 1)
    bench = Bench().live()
    bench.step("s1")
    assert only(bench.step("s2")).reason == "overloaded"
    bench.answer("s1")
    assert kinds(bench.step("s2")) == ["fenced"]


# --- duplicates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["parked", "fenced", "committed", "indeterminate"])
def test_s017_s195_a_repeated_id_is_the_same_step_or_a_clear_error(state: str) -> None:
    bench = Bench()
    bench.see_gateway()
    bench.create()
    if state != "parked":
        bench.tick()
        bench.assigned()
        bench.attach()
    bench.step("s1")
    if state == "committed":
        bench.answer("s1")
    elif state == "indeterminate":
        bench.answer("s1", verdict="indeterminate", outcome="")
    assert bench.step("s1") == []
    reordered = b'{"args": {"content": "x", "path": "a.txt"}, "tool": "write_file"}'
    assert bench.command("step", "s1", reordered) == []
    refused = only(bench.step("s1", args={**CALL, "content": "y"}))
    assert (refused.reason, refused.field) == ("id_reused", "step")


def ulid(ms: int) -> str:
    letters = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    head = "".join(letters[(ms >> (5 * n)) & 31] for n in range(9, -1, -1))
    return head + "0" * 16


def test_ids_older_than_the_window_are_refused_not_guessed_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "FINISHED_WINDOW", 2)
    bench = Bench().live()
    for ms in (10, 20, 30):
        bench.step(ulid(ms))
        bench.answer(ulid(ms))
    assert list(bench.sandbox().finished) == [ulid(20), ulid(30)]
    assert bench.sandbox().finished_floor_ms == 10
    assert only(bench.step(ulid(10))).reason == "too_old"
    assert only(bench.step(ulid(9))).reason == "too_old"
    assert bench.step(ulid(20)) == []
    assert kinds(bench.step(ulid(11))) == ["fenced"]


# --- fences and queues -----------------------------------------------------------------------------


def test_the_first_fence_names_the_live_generation() -> None:
    bench = Bench().live()
    fenced = only(bench.step("s1"))
    assert (fenced.attempt, fenced.ordinal, fenced.no) == ("s1.1", 1, 1)
    assert (fenced.epoch, fenced.session, fenced.direction) == (1, "S1", "apply")
    assert only(bench.step("s2")).no == 2


def test_without_a_live_epoch_a_step_waits_and_is_fenced_when_there_is_one() -> None:
    bench = Bench()
    bench.see_gateway()
    bench.create()
    assert only(bench.step("s1")).reason == "no_live_epoch"
    bench.tick()
    bench.assigned()
    bench.found()
    assert only(bench.step("s2")).reason == "no_live_epoch"
    bench.marked()
    woken = bench.tick()
    assert kinds(woken) == ["fenced", "fenced"]
    assert [f.step for f in woken] == ["s1", "s2"]
    assert [f.no for f in woken] == [1, 2]


def test_waiting_steps_are_fenced_in_order_as_room_comes() -> None:
    bench = Bench().live()
    room = limits.OPEN_STEPS_PER_SANDBOX_MAX
    for n in range(room + 3):
        bench.step(f"s{n}")
    assert len(bench.sandbox().fenced) == room
    assert list(bench.sandbox().parked) == [f"s{room}", f"s{room + 1}", f"s{room + 2}"]
    parked = [p.reason for p in bench.of_kind(e.Parked)]
    assert parked == ["too_many_open", "behind_others", "behind_others"]
    committed, woken = bench.answer("s3")
    assert (committed.step, woken.step) == ("s3", f"s{room}")
    assert len(bench.sandbox().fenced) == room
    bench.cancel("s4")
    assert len(bench.sandbox().fenced) == room
    *_, woken = bench.answer("s4", reason="never_began")
    assert woken.step == f"s{room + 1}"


def test_retries_are_fenced_before_steps_that_never_began() -> None:
    bench = Bench().live()
    room = limits.OPEN_STEPS_PER_SANDBOX_MAX
    for n in range(room + 2):
        bench.step(f"s{n}")
    bench.cold()
    fenced = [f.step for f in bench.of_kind(e.Fenced)[room:]]
    assert fenced == [f"s{n}" for n in range(room)]
    assert list(bench.sandbox().parked) == [f"s{room}", f"s{room + 1}"]
    assert bench.sandbox().requeued == {}


def test_s206_ten_waiting_steps_of_one_sandbox_hold_no_other_up() -> None:
    bench = Bench()
    bench.live("other")
    bench.create()
    for n in range(10):
        assert kinds(bench.step(f"s{n}")) == ["parked"]
    assert kinds(bench.step("s1", sandbox="other")) == ["fenced"]
    assert kinds(bench.answer("s1", "other")) == ["committed"]


def test_an_external_effect_is_a_step_like_others_at_admission() -> None:
    bench = Bench().live()
    assert kinds(bench.step("s1", external())) == ["fenced"]
    assert bench.open("s1").spec.effect == "external"


def test_a_refusal_does_not_repeat_all_that_it_refuses() -> None:
    bench = Bench().live()
    refused = only(bench.step("s1", body(args={**CALL, "x" * 10_000: 1})))
    assert refused.reason == "bad_arguments"
    assert len(msgspec.json.encode(refused)) < 2_000


def test_a_malformed_command_is_cut_to_size() -> None:
    bench = Bench()
    pack = msgspec.json.encode({"steps": [{"sandbox": "x" * 40_000, "step": "y" * 400}]})
    refused = only(bench.command("batch", "b1", pack))
    assert len(refused.sandbox) < 100
    assert not ids.is_id(refused.sandbox)
    assert len(msgspec.json.encode(refused)) < 2000
