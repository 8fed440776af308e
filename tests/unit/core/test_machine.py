"""Bytes to inputs and back: decoding, poison, snapshots, ticks, events."""

from typing import Any

import msgspec
import pytest
from fencepost.core import facts, limits
from fencepost.core.errors import LedgerBrokenError, PoisonedError
from fencepost.core.machine import Place
from fencepost.core.sandbox import entries as e
from fencepost.core.sandbox import inputs
from fencepost.core.sandbox.machine import SandboxMachine

from tests.factories import CALL, UNDO, Bench, body, external, kinds, only

GOOD: dict[str, dict[str, Any]] = {
    "step": body(),
    "create": {},
    "cancel": {},
    "resolve": {"as": "committed", "who": "me", "note": ""},
    "release": {},
}


@pytest.fixture
def machine() -> SandboxMachine:
    return SandboxMachine()


def decode(machine: SandboxMachine, kind: str, data: Any, sandbox: str = "sbx", id_: str = "s1"):
    raw = data if isinstance(data, bytes) else msgspec.json.encode(data)
    return only(list(machine.decode("commands", f"fp.v1.cmd.{kind}.{sandbox}.{id_}", raw)))


@pytest.mark.parametrize("kind", GOOD)
def test_a_command_is_addressed_by_its_subject(machine: SandboxMachine, kind: str) -> None:
    value = decode(machine, kind, GOOD[kind])
    assert isinstance(value, inputs.CommandReceived)
    assert (value.sandbox, value.id) == ("sbx", "s1")
    same = decode(machine, kind, {**GOOD[kind], "sandbox": "sbx"})
    assert isinstance(same, inputs.CommandReceived)


WRONG: list[tuple[str, Any, str, str]] = [
    ("step", {**body(), "deadline_ms": "5"}, "malformed", "deadline_ms"),
    ("step", {**body(), "attempts_max": 1.0}, "malformed", "attempts_max"),
    ("step", {**body(), "attempts_max": True}, "malformed", "attempts_max"),
    ("step", {**body(), "on_moved_epoch": "never"}, "malformed", "on_moved_epoch"),
    ("step", {**body(), "effect": "elsewhere"}, "malformed", "effect"),
    ("step", {**body(), "colour": 1}, "malformed", "colour"),
    ("step", {"args": CALL}, "malformed", "tool"),
    ("step", {"tool": "write_file"}, "malformed", "args"),
    ("step", {**body(), "compensation": {"kind": "hope"}}, "malformed", "compensation.kind"),
    ("step", {**body(), "sandbox": "other"}, "mismatch", "sandbox"),
    ("step", {**body(), "step": "other"}, "mismatch", "step"),
    ("step", b"", "malformed", ""),
    ("step", b"null", "malformed", ""),
    ("step", b"7", "malformed", ""),
    ("step", b"[]", "malformed", ""),
    ("step", b'"x"', "malformed", ""),
    ("step", b"{", "malformed", ""),
    ("step", b"\xff\xfe", "malformed", ""),
    ("step", b'{"tool":"write_file","args":{"path":"\xff"}}', "malformed", "args"),
    ("step", b'{"tool":"write_file","args":{"path":"\\ud800"}}', "malformed", ""),
    ("step", b'{"tool":"write_file","args":1e999}', "malformed", "args"),
    ("step", b'{"tool":"w","args":' + b"[" * 9000 + b"]" * 9000 + b"}", "malformed", ""),
    ("cancel", {"sandbox": "other"}, "mismatch", "sandbox"),
    ("cancel", {"step": "other"}, "mismatch", "step"),
    ("cancel", {"why": "x"}, "malformed", "why"),
    ("resolve", {"who": "me", "note": ""}, "malformed", "as"),
    ("resolve", {"as": "done", "who": "me", "note": ""}, "malformed", "as"),
    ("resolve", {"as": "committed", "note": ""}, "malformed", "who"),
    ("resolve", {"as": "committed", "who": "", "note": ""}, "malformed", "who"),
    ("recover", {"decision": "accept", "who": "", "note": ""}, "malformed", "who"),
    ("recover", {"decision": "maybe", "who": "me"}, "malformed", "decision"),
    ("checkpoint", {"reason": 5}, "malformed", "reason"),
    ("create", {"spec": {"memory_mb": "1"}}, "malformed", "spec.memory_mb"),
    ("create", {"spec": {"colour": 1}}, "malformed", "spec.colour"),
    ("create", {"sandbox": "other"}, "mismatch", "sandbox"),
    ("release", {"sandbox": 7}, "malformed", "sandbox"),
]


@pytest.mark.parametrize(("kind", "data", "reason", "field"), WRONG)
def test_s071_s072_a_bad_command_is_one_clear_refusal(
    machine: SandboxMachine, kind: str, data: Any, reason: str, field: str
) -> None:
    value = decode(machine, kind, data)
    assert isinstance(value, inputs.CommandMalformed)
    assert value.reason == reason
    if field:
        assert value.field == field
    bench = Bench()
    refused = only(bench.take(value))
    assert (type(refused), refused.reason) == (e.Refused, reason)
    assert bench.state.sandboxes == {}


@pytest.mark.parametrize("bad", ["main\n", "a b", "", "a.b", "x" * 65, "ü", "*", ">", "a/b"])
def test_bad_ids_are_refused(machine: SandboxMachine, bad: str) -> None:
    for sandbox, step, field in ((bad, "s1", "sandbox"), ("sbx", bad, "step")):
        pack = msgspec.json.encode({"steps": [{**body(), "sandbox": sandbox, "step": step}]})
        value = only(list(machine.decode("now", "fp.v1.cmd.batch.sbx.b1", pack)))
        assert isinstance(value, inputs.CommandMalformed)
        assert (value.reason, value.field) == ("bad_id", field)
    good = msgspec.json.encode({"steps": [{**body(), "sandbox": "sbx", "step": "x" * 64}]})
    assert isinstance(
        only(list(machine.decode("now", "fp.v1.cmd.batch.sbx.b1", good))), inputs.CommandReceived
    )


def test_a_pack_with_one_bad_member_loses_only_that() -> None:
    bench = Bench().live()
    pack = {
        "steps": [
            {**body(), "sandbox": "sbx", "step": "s1"},
            {**body(), "sandbox": "sbx", "step": "s2", "colour": 1},
            7,
            {**body("rm", {}), "sandbox": "sbx", "step": "s4"},
            {**body(), "sandbox": "sbx", "step": "s5"},
        ]
    }
    entries = bench.command("batch", "b1", pack)
    assert kinds(entries) == ["fenced", "refused", "refused", "refused", "fenced"]
    assert [x.reason for x in entries[1:4]] == ["malformed", "malformed", "unknown_tool"]
    assert entries[1].id == "s2"


def test_spelling_does_not_change_a_digest(machine: SandboxMachine) -> None:
    one = decode(machine, "step", b'{"tool":"write_file","args":{"path":"a","content":"\\u0041"}}')
    two = decode(machine, "step", b'{"args": {"content": "A", "path":"a"}, "tool":"write_file"}')
    other = decode(machine, "step", b'{"args": {"content": "B", "path":"a"}, "tool":"write_file"}')
    assert one.digest == two.digest != other.digest
    assert bytes(one.command.args) == b'{"content":"A","path":"a"}'


@pytest.mark.parametrize(
    ("source", "subject", "data"),
    [
        ("facts", "fp.v1.infact.0", b"{}"),
        ("facts", "fp.v1.infact.0", b'{"kind":"nonsense"}'),
        ("facts", "fp.v1.infact.0", b"\xff"),
        ("commands", "fp.v1.cmd.dance.sbx.s1", b"{}"),
        ("commands", "fp.v1.cmd.batch.sbx.b1", b"[]"),
        ("commands", "fp.v1.cmd.batch.sbx.b1", b"\xff"),
        ("commands", "step", b"{}"),
        ("messages", "fp.v1.msg.x", b"{}"),
    ],
)
def test_s221_what_nothing_can_be_made_of_is_poison(
    machine: SandboxMachine, source: str, subject: str, data: bytes
) -> None:
    with pytest.raises(PoisonedError):
        machine.decode(source, subject, data)
    bench = Bench().live()
    refused = only(bench.take(machine.poison(source, subject, 77, "x" * 900)))
    assert (refused.reason, refused.id, refused.command) == ("poison", "77", source)
    assert len(refused.detail) == 500
    assert bench.state.poisoned == 1
    assert kinds(bench.step("s1")) == ["fenced"]


def test_s220_an_unknown_entry_is_never_skipped(machine: SandboxMachine) -> None:
    known = machine.encode_entries([e.Cancelled(sandbox="a", step="b", attempt="c", reason="d")])
    assert len(machine.decode_entries(known)) == 1
    for broken in (
        known.replace(b"cancelled", b"beamed_up"),
        known.replace(b'"step":"b",', b""),
        b"{}",
        b"[7]",
        known[:-2],
    ):
        with pytest.raises(LedgerBrokenError):
            machine.decode_entries(broken)


def test_s075_an_entry_of_an_older_form_is_still_read(machine: SandboxMachine) -> None:
    old = (
        b'[{"kind":"compensated","sandbox":"sbx","step":"s1","attempt":"s1.1","reason":"r",'
        b'"evidence":"undone","final":true}]'
    )
    entry = only(list(machine.decode_entries(old)))
    assert (entry.journal_seq, entry.epoch, entry.detail) == (0, 0, "")


def busy_bench() -> Bench:
    bench = Bench().live()
    for n in range(18):
        bench.step(f"s{n}", external() if n % 2 else body())
    bench.answer("s0")
    bench.answer("s1", verdict="indeterminate", outcome="")
    bench.cancel("s2")
    bench.cancel("s4")
    bench.answer("s4", verdict="already_done")
    bench.answer("s6", nonce="N0")
    return bench


def test_s218_a_snapshot_round_trip_changes_nothing_that_follows() -> None:
    one, two = busy_bench(), busy_bench()
    machine = SandboxMachine()
    data = machine.encode_state(one.state)
    assert data == machine.encode_state(two.state)
    assert machine.encode_state(machine.decode_state(data)) == data
    one.restart()
    two.open_term()
    for bench in (one, two):
        bench.see_gateway()
        bench.answer("s2")
        bench.answer("s4")
        bench.reattach()
        bench.cold()
        bench.tick(400_000)
    last = [
        [repr(x) for x in b.entries[-60:] if type(x).__name__ != "TermOpened"] for b in (one, two)
    ]
    mask = [[x.split(" object at ")[0] for x in entries] for entries in last]
    assert mask[0] == mask[1]
    assert machine.encode_state(one.state) == machine.encode_state(two.state)


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b'{"shard":"x","shards":1}', b"\xff"])
def test_s218_a_torn_snapshot_raises(machine: SandboxMachine, data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        machine.decode_state(data)


def test_s014_refused_inputs_leave_the_state_as_it_is() -> None:
    bench = busy_bench()
    wrong: list[Any] = [
        inputs.CommandMalformed(sandbox="sbx", id="s1", command="step", reason="malformed"),
        bench.machine.decode("commands", "fp.v1.cmd.step.sbx.s99", msgspec.json.encode(body("x")))[
            0
        ],
        bench.machine.decode("commands", "fp.v1.cmd.cancel.sbx.s99", b"{}")[0],
    ]
    for value in wrong:
        before = msgspec.json.decode(bench.machine.encode_state(bench.state))
        assert kinds(bench.take(value)) == ["refused"]
        after = msgspec.json.decode(bench.machine.encode_state(bench.state))
        after["sandboxes"]["sbx"]["refused"] -= 1
        assert before == after
    before = msgspec.json.decode(bench.machine.encode_state(bench.state))
    assert kinds(bench.answer("s8", nonce="N0")) == ["receipt_refused"]
    after = msgspec.json.decode(bench.machine.encode_state(bench.state))
    after["sandboxes"]["sbx"]["steps"]["s8"]["refusals"] -= 1
    assert before == after


def test_s015_evolve_takes_no_entry_that_does_not_fit() -> None:
    bench = Bench().live()
    bench.step("s1")
    committed = only(bench.answer("s1"))
    illegal: list[Any] = [
        committed,
        e.Compensated(
            sandbox="sbx", step="s1", attempt="s1.1", reason="r", evidence="undone", final=True
        ),
        e.EpochOpened(sandbox="sbx", epoch=3, nonce="n", instance="i", disk="cold", evidence="x"),
        e.EpochOpened(sandbox="sbx", epoch=2, nonce="n", instance="i", disk="cold", evidence="x"),
        e.EpochClosed(sandbox="sbx", epoch=2, reason="x"),
        e.Condemned(sandbox="sbx", reason="x"),
        e.Attached(sandbox="sbx", epoch=2, session="s", gateway="g", journal_seq=0),
        e.Created(sandbox="sbx", spec=bench.sandbox().spec, create_id="c"),
        e.Releasing(sandbox="sbx", reason="x"),
        e.Fenced(sandbox="sbx", step="s2", attempt="s2.1", ordinal=1, no=1, epoch=1, session="S1"),
        bench.machine.term_opened(1, "o", 1, "h"),
        bench.machine.term_opened(2, "o", 2, "h"),
    ]
    for entry in illegal:
        with pytest.raises((AssertionError, KeyError)):
            bench.machine.evolve(bench.state, entry, Place(99, 0), bench.now_ms)


def test_hints_never_make_entries(machine: SandboxMachine) -> None:
    bench = Bench().live()
    beat = inputs.Heartbeat(sandbox="sbx", gateway="gw1", epoch=1, session="S1", journal_seq=0)
    stranger = msgspec.structs.replace(beat, sandbox="nope")
    for value in (beat, stranger, inputs.Heartbeats(gateway="gw1", beats=[beat, stranger])):
        bench.hint(value)
    assert set(bench.hints.leases) == {"sbx"}
    assert not machine.take_hint(bench.state, bench.hints, inputs.Tick(), bench.now_ms)


def test_a_gateway_that_says_good_bye_is_asked_nothing() -> None:
    bench = Bench().live()
    bench.lost()
    assert len(bench.effects()) == 1
    bench.hint(inputs.GatewaySeen(gateway="gw1", authorities=["host"], providers=[], closing=True))
    assert bench.effects() == []


def test_old_gateways_are_forgotten() -> None:
    bench = Bench()
    for n in range(50):
        bench.see_gateway(f"gw{n}")
        bench.now_ms += limits.LEASE_MS
    assert len(bench.hints.gateways) < 15


def test_the_order_of_deadlines_does_not_grow_with_history() -> None:
    bench = Bench(pure=False).live()
    for n in range(6_000):
        bench.step(f"s{n}", deadline_ms=limits.DEADLINE_MS_MAX)
        bench.answer(f"s{n}")
    assert len(bench.hints.due) < 4_200
    bench.step("last", deadline_ms=1_000)
    bench.beat()
    assert "cancelled" in kinds(bench.tick(1_000))


# --- events ---------------------------------------------------------------------------------------


def events(bench: Bench) -> list[Any]:
    return [event for entry in bench.entries for event in bench.machine.events_of(entry)]


def test_each_step_event_is_on_a_subject_of_its_own() -> None:
    bench = Bench().live()
    bench.step("s1")
    bench.answer("s1", nonce="N0")
    bench.answer("s1", result=msgspec.Raw(b'{"a":1}'))
    bench.step("s2", body("rm", {}))
    bench.step("s3", external())
    bench.cancel("s3")
    bench.answer("s3")
    subjects = [x.subject for x in events(bench) if ".step." in x.subject]
    assert subjects == [
        "fp.v1.event.step.sbx.s1.fenced",
        "fp.v1.event.step.sbx.s1.receipt_refused",
        "fp.v1.event.step.sbx.s1.committed",
        "fp.v1.event.step.sbx.s2.refused",
        "fp.v1.event.step.sbx.s3.fenced",
        "fp.v1.event.step.sbx.s3.fenced",
        "fp.v1.event.step.sbx.s3.compensated",
    ]
    committed = next(x for x in events(bench) if x.subject.endswith("committed"))
    assert committed.body["outcome"] == "ok"
    assert bytes(committed.body["result"]) == b'{"a":1}'
    kinds_told = [x.subject.rsplit(".")[-1] for x in events(bench) if ".sandbox." in x.subject]
    assert kinds_told == ["created", "epoch_opened", "attached"]


@pytest.mark.parametrize(("sandbox", "id_"), [("", ""), ("a b", "s1"), ("a.b", "s1")])
def test_no_event_goes_to_a_subject_that_cannot_be(sandbox: str, id_: str) -> None:
    machine = SandboxMachine()
    for command in ("step", "create", "commands"):
        bad = e.Refused(sandbox=sandbox, command=command, id=id_, reason="bad_id")
        assert machine.events_of(bad) == []
        good = e.Refused(sandbox="sbx", command=command, id="s1", reason="bad_id")
        assert len(list(machine.events_of(good))) == 1


@pytest.mark.parametrize("id_", ["a.b", ">", "", "x" * 65])
def test_a_refusal_of_an_id_that_is_none_is_told_of_its_sandbox(id_: str) -> None:
    (event,) = SandboxMachine().events_of(
        e.Refused(sandbox="sbx", command="step", id=id_, reason="bad_id", field="step")
    )
    assert event.subject == "fp.v1.event.sandbox.sbx.refused"
    assert (event.body["id"], event.body["field"]) == (id_, "step")


def test_every_event_can_be_encoded() -> None:
    bench = busy_bench()
    bench.command("release", "r", {})
    bench.gone()
    for event in events(bench):
        msgspec.json.encode(event.body)
        assert not set(" *>") & set(event.subject)
        assert ".." not in event.subject


# --- views ----------------------------------------------------------------------------------------


def test_a_view_says_where_a_step_stands() -> None:
    bench = busy_bench()
    view = bench.machine.view_step
    assert view(bench.state, "nope", "s1") is None
    assert view(bench.state, "sbx", "nope") is None
    states = {n: view(bench.state, "sbx", n)["state"] for n in ("s0", "s1", "s2", "s3", "s17")}
    assert states == {
        "s0": "committed",
        "s1": "indeterminate",
        "s2": "fenced",
        "s3": "fenced",
        "s17": "fenced",
    }
    place = bench.machine.place_of_final(bench.state, "sbx", "s0")
    assert place is not None
    seq = next(s for s, _, _ in bench.batches if s > place.after)
    entries = next(x for s, _, x in bench.batches if s == seq)
    assert (type(entries[place.index]), entries[place.index].step) == (e.Committed, "s0")
    assert bench.machine.place_of_final(bench.state, "sbx", "s3") is None
    assert bench.machine.place_of_final(bench.state, "nope", "s3") is None


def test_a_view_says_where_a_sandbox_stands() -> None:
    bench = Bench()
    view = bench.machine.view_sandbox
    assert view(bench.state, "sbx") is None
    bench.see_gateway()
    bench.create()
    words = [view(bench.state, "sbx")["state"]]
    bench.tick()
    bench.assigned()
    words.append(view(bench.state, "sbx")["state"])
    bench.attach()
    words.append(view(bench.state, "sbx")["state"])
    bench.lose_lease()
    words.append(view(bench.state, "sbx")["state"])
    bench.command("release", "r", {})
    words.append(view(bench.state, "sbx")["state"])
    bench.gone()
    words.append(view(bench.state, "sbx")["state"])
    assert words == ["creating", "attaching", "live", "lost", "releasing", "gone"]
    assert [v["sandbox"] for v in bench.machine.view_sandboxes(bench.state)] == ["sbx"]


def test_what_an_undo_carries_is_in_the_snapshot_too() -> None:
    bench = Bench().live()
    bench.step("s1", external())
    bench.step("s2")
    bench.restart()
    assert msgspec.json.decode(bench.open("s1").spec.compensation.args) == UNDO["args"]
    assert bench.open("s2").spec.compensation.kind == "pre_image"


@pytest.mark.parametrize(
    "subject", ["fp.v1.infact.0.box.stray", "fp.v1.infact.0.other.gone", "fp.v1.infact.0.box"]
)
def test_a_fact_under_another_ones_subject_is_poison(subject: str) -> None:
    """Which kinds a user may say is granted by their subjects."""
    machine = SandboxMachine()
    ref = facts.Ref(authority="a", provider="process", native_id="n", instance="i")
    fact = facts.Gone(sandbox="box", gateway="gw", ref=ref)
    data = msgspec.json.encode(fact)
    with pytest.raises(PoisonedError, match="subject"):
        machine.decode("facts", subject, data)
    assert list(machine.decode("facts", "fp.v1.infact.0.box.gone", data)) == [fact], "the control"
